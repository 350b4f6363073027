"""`examples/packed_llm.py` as a user runs it, and ways in which its gate must fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
SMALL = ["--steps", "2", "--documents", "3", "--longest", "48", "--hidden", "32", "--layers", "1"]


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess:
    """Runs the example with these arguments, after the Python statements `before`."""
    code = f"{before}\nimport runpy; runpy.run_path({str(ROOT / 'examples' / 'packed_llm.py')!r}, run_name='__main__')"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", code, *SMALL, "--compile-backend", "eager", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_losses_agree_and_nothing_leaks():
    result = run()
    assert result.returncode == 0, result.stdout + result.stderr
    head, packed, padded, verdict = result.stdout.splitlines()
    assert head.split() == ["run", "first", "loss", "last", "loss", "graphs", "tokens/s", "peak", "memory"]
    assert packed.split()[:2] == ["packed", padded.split()[1]]
    assert packed.split()[3] == padded.split()[3] == "1"
    assert float(packed.split()[5]) < float(padded.split()[5])
    assert verdict.startswith("OK: ")
    assert verdict.endswith("no leak between 3 documents, planted leak seen")


def test_a_leak_between_documents_fails():
    # The mask function forgets where documents begin: both the losses and the check of single tokens notice.
    leaking = (
        "from varlen_prep.integrations.transformers import _mask; from varlen_prep import prepare_varlen\n"
        "_mask._documents = lambda f, rows, seq, *rest, make=prepare_varlen: make(rows, seq, seq, device=rest[-1])"
    )
    result = run("--tolerance", "0.0001", before=leaking)
    assert result.returncode == 1
    failures = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    assert failures[0].startswith("FAILED losses differ by ")
    assert failures[-1] == "FAILED a change in document 1 reached documents [1, 2], expected only itself"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["native"])
def test_on_a_gpu(backend):
    result = run(
        "--device", "cuda", "--backend", backend, "--hidden", "128", "--steps", "5", "--compile-backend", "aot_eager"
    )
    assert result.returncode == 0, result.stdout + result.stderr
