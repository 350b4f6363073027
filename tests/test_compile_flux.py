"""`examples/compile_flux.py` as a user runs it: the table, and every way in which its gate must fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import varlen_prep

pytest.importorskip("diffusers")

ROOT = Path(__file__).parents[1]
SHORT = "2x23x96x128 5x41x128x80 4x56x80x144"


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess:
    """Runs the example with these arguments, after the Python statements `before`."""
    code = (
        f"{before}\nimport runpy; runpy.run_path({str(ROOT / 'examples' / 'compile_flux.py')!r}, run_name='__main__')"
    )
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def table(result: subprocess.CompletedProcess) -> list[dict[str, str]]:
    """The lines of the table by column; cells are two spaces apart."""
    lines = [line for line in result.stdout.splitlines() if line.startswith((" ", "line"))]
    head, *rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]


def failures(result: subprocess.CompletedProcess) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.startswith("FAILED")]


def test_built_in_shapes_with_a_cheap_compiler():
    result = run("--compile-backend", "aot_eager")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = table(result)
    assert [row["batch"] for row in rows] == ["2", "5", "1", "4", "2", "6"]
    assert [row["graphs"] for row in rows] == ["1", "1", "2", "2", "2", "2"]  # the second is that of batch 1
    assert {(row["breaks"], row["syncs"]) for row in rows} == {("0", "n/a")}
    assert any(row["prompt"].split(" of ")[0] != row["prompt"].split(" of ")[1] for row in rows)
    assert "compiling with aot_eager" in result.stderr
    assert "OK: 6 shapes, 2 graphs of 2 expected" in result.stdout


def test_inductor_in_bfloat16_without_mask():
    result = run("--no-mask", "--dtype", "bfloat16", "--shapes", SHORT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [row["graphs"] for row in table(result)] == ["1", "1", "1"]


def test_difference_above_tolerance_fails_and_names_the_line():
    result = run("--compile-backend", "eager", "--shapes", SHORT, "--tolerance", "0")
    assert result.returncode == 1
    assert len(failures(result)) == 3
    assert failures(result)[1].startswith("FAILED line 2: difference to SDPA")


def test_extra_graph_fails_and_names_the_line():
    # The prompt length of the first line is the size of the pooled projection: torch takes the two for one symbol.
    result = run("--compile-backend", "eager", "--shapes", "2x24x96x128 5x41x128x80")
    assert result.returncode == 1
    assert failures(result) == ["FAILED line 2: 2 graphs so far, expected exactly 1"]


def test_graph_break_fails_and_names_the_line():
    breaking = (
        "import torch; from varlen_prep.integrations.diffusers import _attention as a; real = a.prepare\n"
        "a.prepare = lambda *args: (torch._dynamo.graph_break(), real(*args))[1]"
    )
    result = run("--compile-backend", "eager", "--shapes", "2x23x96x128", before=breaking)
    assert result.returncode == 1
    assert failures(result)[0].startswith("FAILED line 1: Unsupported: ")


def test_backend_that_cannot_run_fails_and_names_the_line():
    missing = [state.name for state in varlen_prep.backends() if not state.usable]
    if not missing:
        pytest.skip("every backend can run here")
    result = run("--shapes", "2x23x96x128", "--backend", missing[0])
    assert result.returncode == 1
    assert failures(result)[0].startswith(f"FAILED line 1: RuntimeError: backend '{missing[0]}' cannot run here")


def test_unknown_backend_is_a_usage_error():
    result = run("--backend", "no_such")
    assert result.returncode == 2
    assert "invalid choice: 'no_such'" in result.stderr
