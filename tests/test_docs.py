"""What the documents say is so: examples run, tables and pictures are those that their scripts make."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import pkgutil
import pydoc
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import varlen_prep
from varlen_prep.backends import REGISTRY, Backend

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MODULES = [name for _, name, _ in pkgutil.walk_packages(varlen_prep.__path__, "varlen_prep.") if "__main__" not in name]
PUBLIC = [
    "varlen_prep",
    *(name for name in MODULES if name.startswith("varlen_prep.integrations.") and name.count(".") == 2),
    *(name for name in MODULES if name.removeprefix("varlen_prep.") in ("auditing", "compat", "graphs", "testing")),
]
"""What users import from; every other module is reached through these."""


OPTIONAL = ("diffusers", "transformers", "triton")


def imported(name: str) -> ModuleType | None:
    """A module of the library, or None if it needs a package that is not installed here."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in OPTIONAL:
            raise
        return None


def load(name: str) -> ModuleType:
    """The same, but the test is skipped."""
    module = imported(name)
    return module if module is not None else pytest.skip(f"{name} needs a package that is not installed")


def script(name: str) -> dict[str, Any]:
    """The names of a script in `docs/`."""
    return runpy.run_path(str(ROOT / "docs" / name))


def public_names(module: ModuleType) -> list[str]:
    """What a module exports: `__all__`, or the functions and classes that it defines."""
    defined = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__ and callable(value)
    ]
    return getattr(module, "__all__", defined)


def examples() -> str:
    """The source of all examples of all docstrings of what can be imported here."""
    modules = [module for name in MODULES if (module := imported(name)) is not None]
    tests = [test for module in modules for test in doctest.DocTestFinder().find(module)]
    return "".join(example.source for test in tests for example in test.examples)


def failures(tests: list[doctest.DocTest], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many examples fail, each docstring in a module of its own, as a user would write it: nothing is imported."""
    runner = doctest.DocTestRunner()
    for test in tests:
        home = ModuleType("docstring_example")
        monkeypatch.setitem(sys.modules, home.__name__, home)  # torch.compile looks names up there
        test.globs = vars(home)
        runner.run(test, clear_globs=False)
    return runner.failures


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("varlen_prep.pictures"):
        pytest.importorskip("matplotlib").use("Agg")
    assert failures(doctest.DocTestFinder().find(load(name)), monkeypatch) == 0


@pytest.mark.parametrize("planted", ["1 + 1\n3", "torch.ones(1).item()\n1.0"], ids=["wrong", "not imported"])
def test_the_check_finds_an_example_that_fails(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test = doctest.DocTestParser().get_doctest(f">>> {planted}\n", {"torch": torch}, "planted", None, 0)
    assert failures([test], monkeypatch) == 1


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_object_is_in_an_example(name: str) -> None:
    module, shown = load(name), examples()
    values = {one: getattr(module, one) for one in public_names(module)}
    # Records are results, which users do not make, but for the one that this library is about.
    records = {one for one, value in values.items() if dataclasses.is_dataclass(value) or hasattr(value, "_fields")}
    used = [one for one, value in values.items() if callable(value) and one not in records - {"VarlenMetadata"}]
    assert used
    assert [one for one in used if not re.search(rf"\b{one}\b", shown)] == []


def test_every_method_that_the_readme_names_is_in_an_example() -> None:
    named = set(re.findall(r"\b(?:meta|VarlenMetadata)\.(\w+)\(", README))
    assert len(named) >= 8
    shown = examples()
    assert [one for one in sorted(named) if f".{one}(" not in shown] == []


def documented() -> list[Any]:
    """The objects that the pages of the API show: those named, and all that a module exports which is named."""
    pages = [page.read_text() for page in (ROOT / "docs" / "api").glob("*.md")]
    shown = []
    for name in re.findall(r"^::: (\S+)", "".join(pages), re.MULTILINE):
        value = pydoc.locate(name) if name not in MODULES else load(name)
        assert value is not None, name
        shown += [getattr(value, one) for one in public_names(value)] if isinstance(value, ModuleType) else [value]
    return shown


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_object_has_a_page(name: str) -> None:
    module, shown = load(name), documented()
    assert [one for one in public_names(module) if not any(getattr(module, one) is value for value in shown)] == []


def test_the_table_of_kernels_is_made_from_the_records() -> None:
    tables = script("make_tables.py")
    assert tables["renewed"](README) == README, "run python docs/make_tables.py"
    planted = README.replace("| yes |", "| no |", 1)
    assert tables["renewed"](planted) == README != planted


@pytest.mark.parametrize(
    "backend", [one for one in REGISTRY.values() if one.name.endswith("_hub")], ids=lambda one: one.name
)
def test_a_hub_kernel_shares_the_row_of_its_package(backend: Backend) -> None:
    twin = REGISTRY[backend.name.removesuffix("_hub")]
    for field in ("dtypes", "lse", "window", "softcap", "bottom_right"):
        assert getattr(backend, field) == getattr(twin, field)
    assert (backend.backward is None) == (twin.backward is None)


def difference(made: Path, kept: Path) -> float:
    """Mean absolute difference of two pictures, 0 to 255; infinite if their sizes differ much."""
    images = pytest.importorskip("PIL.Image")
    a, b = (images.open(path).convert("RGB") for path in (made, kept))
    if max(abs(x - y) for x, y in zip(a.size, b.size, strict=True)) > 4:
        return float("inf")
    chops = importlib.import_module("PIL.ImageChops")
    stat = importlib.import_module("PIL.ImageStat")
    return max(stat.Stat(chops.difference(a, b.resize(a.size))).mean)


def test_the_gallery_is_what_its_script_makes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kept = ROOT / "docs"
    script("make_gallery.py")["make"](tmp_path)
    assert (tmp_path / "gallery.md").read_text() == (kept / "gallery.md").read_text(), "run python docs/make_gallery.py"
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert names == sorted(path.name for path in (kept / "pictures").iterdir())
    # Versions of matplotlib may differ in a few pixels.
    assert {
        name: difference(tmp_path / "pictures" / name, kept / "pictures" / name) < 3 for name in names
    } == dict.fromkeys(names, True)
    assert difference(tmp_path / "pictures" / "packed.png", kept / "pictures" / "in_place.png") > 6
    assert max(path.stat().st_size for path in (kept / "pictures").iterdir()) < 40_000


def test_ci_runs_the_command_of_the_readme() -> None:
    (line,) = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("command=")]
    ended = subprocess.run(["bash", "-c", f'{line}; echo "$command"'], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout == "pip install -e '.[test]' && pytest\n"
