"""The report: text of 80 columns, JSON, what `assert_clean` allows, and errors for wrong arguments."""

from __future__ import annotations

import dataclasses
import json
import warnings
from typing import Any

import pytest
import torch
from helpers import refuses
from torch import Tensor

from varlen_prep import AuditReport, audit
from varlen_prep.auditing import Capture, GraphBreak, HostRead, Place, Recompile, _places
from varlen_prep.testing import assert_clean

PLACE = Place(
    file="/a/very/long/path/" + "folder/" * 12 + "file.py", line=7, function="f" * 60, source="x = " + "y" * 90
)
FULL = AuditReport(
    name="function", device="CPU", torch="2.13.0", input_sets=2, backward=True, graphs=3,
    breaks=(GraphBreak(reason="a reason " * 20, place=PLACE),),
    recompiles=(Recompile(guard="args[0].size()[0] == 3", place=PLACE),),
    reads=(HostRead(operation="item", place=PLACE, caller=PLACE, seen=("eager", "graph")),
           HostRead(operation="nonzero", place=Place(file="", line=0, function="", source=""), caller=None,
                    seen=("eager",))),
    compile_error=None, difference=float("inf"), gradient_difference=0.5, limit=1e-4, leaked=("(3, 4) float32",) * 9,
    peak_memory=3 * 2**30, capture=Capture(error=None, changed="the float inputs", difference=0.25, limit=1e-4),
)  # fmt: skip
CLEAN = dataclasses.replace(
    FULL, graphs=1, breaks=(), recompiles=(), reads=(), difference=0.0, gradient_difference=0.0, leaked=(), capture=None
)


@pytest.mark.parametrize("report", [
    FULL, CLEAN, dataclasses.replace(FULL, capture=Capture(error="a long reason " * 9), peak_memory=None),
    dataclasses.replace(FULL, compile_error="Unsupported: " * 20, difference=None, gradient_difference=None),
])  # fmt: skip
def test_the_text_fits_in_80_columns_and_names_everything(report: AuditReport) -> None:
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[0] == f"Audit of function: {'clean' if report is CLEAN else 'not clean'}"
    for one in (*report.breaks, *report.recompiles, *report.reads):
        assert "folder/folder/file.py:7" in text if one.place.file else "a line that is not known" in text
    for read in report.reads:
        assert f"-> {read.operation} (seen: {', '.join(read.seen)})" in text


@pytest.mark.parametrize("report", [FULL, CLEAN])
def test_the_dictionary_is_json_without_loss(report: AuditReport) -> None:
    found = report.to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert {field.name for field in dataclasses.fields(report)} == {*found} - {"syncs", "problems"}
    assert found["problems"] == report.problems()
    assert found["difference"] == ("inf" if report is FULL else 0.0)


@pytest.mark.parametrize(("change", "text"), [
    (dict(graphs=2), "2 graphs, at most 1 allowed"),
    (dict(breaks=FULL.breaks), "graph break at file.py:7: a reason"),
    (dict(reads=FULL.reads), "1 host reads, at most 0 allowed: item at file.py:7"),
    (dict(compile_error="Unsupported: no"), "it does not compile: Unsupported: no"),
    (dict(difference=0.5), "compiled outputs differ from eager by 5.0e-01"),
    (dict(difference=float("nan")), "compiled outputs differ"),
    (dict(gradient_difference=float("inf")), "compiled gradients differ from eager by inf"),
    (dict(leaked=("(2,) int64",)), "each call leaves 1 tensors behind: (2,) int64"),
    (dict(capture=Capture(error="it waits")), "no CUDA graph: it waits"),
    (dict(capture=FULL.capture), "a CUDA graph replays stale values"),
])  # fmt: skip
def test_every_kind_of_problem_fails(change: dict[str, Any], text: str) -> None:
    CLEAN.assert_clean()
    with refuses(AssertionError, text, "Audit of function: not clean"):
        dataclasses.replace(CLEAN, **change).assert_clean()


def test_allowances() -> None:
    dataclasses.replace(CLEAN, graphs=3, breaks=FULL.breaks, recompiles=FULL.recompiles).assert_clean(max_graphs=3)
    dataclasses.replace(CLEAN, reads=FULL.reads).assert_clean(max_syncs=1)
    # With a break nobody knows which eager code runs, so all reads count.
    broken = dataclasses.replace(CLEAN, reads=FULL.reads, breaks=FULL.breaks)
    with pytest.raises(AssertionError, match="2 host reads, at most 1 allowed"):
        broken.assert_clean(max_graphs=3, max_syncs=1)


def test_records_are_frozen() -> None:
    for one in (FULL, PLACE, *FULL.breaks, *FULL.recompiles, *FULL.reads, FULL.capture):
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.line = 3  # type: ignore[union-attr]


def _add(x: Tensor) -> Tensor:
    return x + 1


def test_wrong_arguments_are_refused_with_what_to_do() -> None:
    x = torch.ones(2)
    with refuses(ValueError, "inputs", "at least one input set", "[]"):
        audit(_add, [])
    with refuses(TypeError, "inputs[1]", "a tuple", "Tensor", "write (x,)"):
        audit(_add, [(x,), x])
    with refuses(ValueError, "backward=True", "requires_grad"):
        audit(_add, [(x,)], backward=True)
    with refuses(ValueError, "capture", "CUDA", "capture=False"):
        audit(_add, [(x,)], capture=True)


def test_outputs_are_compared_whatever_they_are() -> None:
    def function(x: Tensor, n: int) -> dict[str, Any]:
        return {"a": x * n, "n": n, "half": n / 2, "none": None, "nan": x * float("nan"), "bool": x > 0}

    assert assert_clean(function, [(torch.ones(3, 4), 2), (torch.ones(5, 6), 3)]).difference == 0


def test_random_functions_get_the_same_numbers_each_time() -> None:
    assert assert_clean(lambda x: torch.nn.functional.dropout(x, 0.5), [(torch.ones(9, 9),)]).difference == 0


def test_shared_tensors_stay_shared_in_the_copies_of_inputs() -> None:
    x = torch.ones(3, 4)
    seen = []

    def function(a: Tensor, b: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            seen.append((a is b, a is x))
        return a + b

    audit(function, [(x, x)])
    assert {*seen} == {(True, False)}


def test_memory_at_the_peak_is_that_of_a_call_above_its_inputs() -> None:
    def function(x: Tensor) -> Tensor:
        return (x + 1).sum()

    report = audit(function, [(torch.ones(2**20),)])
    assert 2**22 <= report.peak_memory < 2**22 + 2**12  # one temporary of float32
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert audit(function, [(torch.ones(4),)]).peak_memory is None


def test_the_import_is_light_and_audit_is_the_function() -> None:
    import varlen_prep

    assert callable(varlen_prep.audit)
    assert varlen_prep.audit is audit


def test_a_warning_is_placed_where_it_comes_from() -> None:
    """As a wait for the GPU is, which torch tells by a warning."""
    found: dict[str, Any] = {"running": _places.from_running_code, "places": []}
    exec("def show(*args, **options):\n    places.append(running()[-1])", found)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = found["show"]
        warnings.warn("a wait", stacklevel=1)
    assert found["places"][0].function == "test_a_warning_is_placed_where_it_comes_from"


def test_a_graph_that_is_traced_again_for_a_float_counts_once() -> None:
    class Scaled(torch.nn.Module):
        scale = 0.5

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(x, self.scale, training=False) * self.scale

    report = audit(Scaled(), [(torch.ones(3, 4),), (torch.ones(5, 4),)])
    assert report.graphs == 1
