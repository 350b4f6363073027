"""What the documents say is so: examples of docstrings run, the README's table of kernels agrees with the records."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

import varlen_prep
from varlen_prep.backends import REGISTRY, Backend

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MODULES = [name for _, name, _ in pkgutil.walk_packages(varlen_prep.__path__, "varlen_prep.") if "__main__" not in name]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name):
    if "diffusers" in name:
        pytest.importorskip("diffusers")
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples_to_run():
    finder = doctest.DocTestFinder()
    examples = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(examples) >= 8


def table() -> dict[str, list[str]]:
    """The README's rows of kernels: name to gradients, log-sum-exp, windows, softcap."""
    rows = re.findall(r"^\| (`[a-z0-9_`, ]+`) \| .* \| .* \| (.*) \| (.*) \| (.*) \| (.*) \|$", README, re.MULTILINE)
    return {name: list(cells) for names, *cells in rows for name in re.findall(r"`(\w+)`", names)}


@pytest.mark.parametrize("backend", REGISTRY.values(), ids=lambda backend: backend.name)
def test_the_table_of_kernels_agrees_with_the_records(backend: Backend):
    cells = table()[backend.name]
    if cells[0] == "as above":
        backend, cells = REGISTRY[backend.name.removesuffix("_hub")], table()[backend.name.removesuffix("_hub")]
    has = (backend.backward is not None, backend.lse, backend.window, backend.softcap)
    assert [cell.split(" ")[0] for cell in cells] == ["yes" if one else "no" for one in has]


def test_ci_runs_the_command_of_the_readme():
    (line,) = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("command=")]
    ended = subprocess.run(["bash", "-c", f'{line}; echo "$command"'], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout == "pip install -e '.[test]' && pytest\n"
