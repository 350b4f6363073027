"""Planted faults: the audit finds each, at its line, and names it; beside each a clean function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from audit_helpers import line_of, lines, operations
from torch import Tensor, nn

from varlen_prep import audit

FLOATS = [
    (torch.arange(1.0, 13).view(3, 4),),
    (torch.arange(1.0, 31).view(5, 6),),
    (torch.arange(-9.0, 54).view(7, 9),),
]
_kept: list[Tensor] = []


def _item(x: Tensor) -> Tensor:
    return x * x.long().sum().item()  # here


def _tolist(x: Tensor) -> Tensor:
    return x * x.sum(1).tolist()[0]  # here


def _numpy(x: Tensor) -> Tensor:
    return x + float(x.numpy().sum())  # here


def _nonzero(x: Tensor) -> Tensor:
    rows = x.flatten().nonzero()  # here
    return x.flatten()[rows]


def _where(x: Tensor) -> Tensor:
    (rows,) = torch.where(x.flatten() > 2)  # here
    return rows + 1


def _bool_index(x: Tensor) -> Tensor:
    return x[x > 2] + 1  # here


def _masked_select(x: Tensor) -> Tensor:
    return x.masked_select(x > 2) + 1  # here


def _unique(x: Tensor) -> Tensor:
    return x.long().unique() + 1  # here


def _repeat_interleave(x: Tensor) -> Tensor:
    lengths = x.sum(1).abs().long() % 3
    return torch.arange(x.shape[0]).repeat_interleave(lengths) + 1  # here


def _size_from_a_tensor(x: Tensor) -> Tensor:
    length = x.sum(1).abs().long().max() % 5
    return torch.zeros(int(length)) + 1  # here


def _index_bound_from_a_tensor(x: Tensor) -> Tensor:
    length = x.sum(1).abs().long().max() % 5
    return x[:, :length] + 1  # here


def _tensor_if(x: Tensor) -> Tensor:
    if x.sum() > 0:  # here
        return x + 1
    return x - 1


READS = {
    "item": _item,
    "item, tolist": _tolist,
    "item, numpy": _numpy,
    "nonzero": _nonzero,
    "nonzero, where": _where,
    "bool index": _bool_index,
    "masked_select": _masked_select,
    "unique": _unique,
    "repeat_interleave without output_size": _repeat_interleave,
    "item, size": _size_from_a_tensor,
    "item, bound": _index_bound_from_a_tensor,
    "item, if": _tensor_if,
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_found_at_its_line_and_named(name: str) -> None:
    function = READS[name]
    report = audit(function, FLOATS[:1])
    assert operations(report) == {line_of(function, "# here"): name.partition(", ")[0]}
    with pytest.raises(AssertionError, match=f"{name.partition(', ')[0]} at test_audit_faults.py"):
        report.assert_clean(max_graphs=9)


def _both_in_one_line(x: Tensor) -> Tensor:
    return x * x.nonzero().sum().item()  # here


def test_two_reads_of_a_line_are_both_named() -> None:
    report = audit(_both_in_one_line, FLOATS[:1])
    assert operations(report) == {line_of(_both_in_one_line, "# here"): "nonzero, item"}
    assert len(report.syncs) == 1


@pytest.mark.parametrize("function", [_item, _nonzero, _bool_index, _masked_select, _repeat_interleave])
def test_a_full_graph_does_not_hide_a_read(function: Callable[..., Any]) -> None:
    """With fullgraph=True torch puts these into the graph: there is no break, but the host still waits."""
    report = audit(function, FLOATS, fullgraph=True)
    assert (report.compile_error, report.graphs, report.breaks) == (None, 1, ())
    assert [read.seen for read in report.reads] == [("eager", "graph")]
    assert lines(report.syncs) == {line_of(function, "# here")}


def _aware_of_the_compiler(x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        assert x.sum().item() != 0.5
    return x + 1


def test_a_read_of_eager_code_alone_is_listed_and_does_not_count_on_cpu() -> None:
    report = audit(_aware_of_the_compiler, FLOATS)
    report.assert_clean()
    assert [read.seen for read in report.reads] == [("eager",)]
    assert "0, and 1 of CPU tensors in eager code only" in str(report)


class _ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad.sum().item()  # here


def test_a_read_of_the_backward_pass_is_found_when_gradients_are_asked_for() -> None:
    x = FLOATS[0][0].clone().requires_grad_()
    assert not audit(_ReadsInBackward.apply, [(x,)]).reads
    report = audit(_ReadsInBackward.apply, [(x,)], backward=True)
    assert line_of(_ReadsInBackward, "# here") in lines(report.reads)


def test_a_tensor_valued_if_is_a_break_with_its_reason() -> None:
    report = audit(_tensor_if, FLOATS)
    (one,) = report.breaks
    assert lines([one]) == {line_of(_tensor_if, "# here")}
    assert "ata-dependent" in one.reason
    with pytest.raises(AssertionError, match=r"graph break at test_audit_faults.py:\d+: .*ata-dependent"):
        report.assert_clean()


def _break_below(x: Tensor) -> Tensor:
    return _breaks(x + 1) * 2


def _breaks(x: Tensor) -> Tensor:
    for _ in range(2):  # a break in a loop makes the compiler skip the whole function
        torch._dynamo.graph_break()  # here
        x = x + 1
    return x


@pytest.mark.parametrize("function", [_break_below, _breaks])
def test_a_break_is_one_finding_also_where_the_compiler_gives_up_on_a_function(function: Callable[..., Any]) -> None:
    report = audit(function, FLOATS)
    assert [lines([one]) for one in report.breaks] == [{line_of(_breaks, "# here")}]
    assert "graph_break()" in report.breaks[0].reason


def test_a_break_under_fullgraph_is_an_error_of_the_compiler() -> None:
    report = audit(_tensor_if, FLOATS, fullgraph=True)
    assert report.compile_error is not None
    assert report.difference is None
    with pytest.raises(AssertionError, match="it does not compile: "):
        report.assert_clean(max_graphs=9, max_syncs=9)


def _specialised(x: Tensor) -> Tensor:
    for row in range(x.shape[0]):  # here
        x = x + row
    return x


def test_a_specialised_size_is_a_recompile_with_its_guard() -> None:
    report = audit(_specialised, FLOATS)
    assert report.graphs == 3
    assert len(report.recompiles) == 2
    assert lines(report.recompiles) == {line_of(_specialised, "# here")}
    assert "size mismatch at index 0. expected 3, actual 5" in report.recompiles[0].guard
    with pytest.raises(
        AssertionError,
        match=r"recompiled for test_audit_faults.py:\d+, where this did not hold: .* expected 3, actual 5",
    ):
        report.assert_clean()
    assert audit(_specialised, FLOATS[:1]).graphs == 1


def _other_path(x: Tensor) -> Tensor:
    return x + 1 if x.shape[0] > 4 else x - 1  # here


def test_a_branch_on_a_size_is_a_recompile_with_its_guard() -> None:
    report = audit(_other_path, FLOATS)
    (one,) = report.recompiles
    assert lines([one]) == {line_of(_other_path, "# here")}
    assert "size()[0] <= 4" in one.guard
    assert one.place.source == "return x + 1 if x.shape[0] > 4 else x - 1  # here"


def test_shapes_that_become_dynamic_cost_one_recompile() -> None:
    report = audit(nn.Identity(), FLOATS, dynamic=True)
    assert (report.graphs, report.problems()) == (0, [])
    counts = [audit(lambda x: x + 1, FLOATS, dynamic=dynamic).graphs for dynamic in (None, None, True, False)]
    assert counts == [2, 2, 1, 3]  # twice the same: an audit leaves no sizes behind for the next


def _leaks(x: Tensor) -> Tensor:
    out = x + 1
    if not torch.compiler.is_compiling():
        _kept.append(out)
    return out


def test_leaked_tensors_are_counted_and_named() -> None:
    try:
        report = audit(_leaks, FLOATS)
    finally:
        _kept.clear()
    assert report.leaked == ("(3, 4) float32",)
    with pytest.raises(AssertionError, match=r"each call leaves 1 tensors behind: \(3, 4\) float32"):
        report.assert_clean()
    assert audit(lambda x: x + 1, FLOATS).leaked == ()


def _wrong(change: Callable[[Tensor], Tensor], part: str) -> Callable[..., Any]:
    """A compiler with a fault in the forward or the backward graph."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def right(graph: Any, example_inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def wrong(graph: Any, example_inputs: Any) -> Any:
        return make_boxed_func(lambda *args: [change(one) if one is not None else None for one in graph.forward(*args)])

    compilers = {"fw_compiler": right, "bw_compiler": right, part: wrong}
    return aot_autograd(**compilers)


@pytest.mark.parametrize("part", ["fw_compiler", "bw_compiler"])
def test_wrong_compiled_results_and_gradients_are_found(part: str) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin()

    inputs = [(torch.ones(3, 4).requires_grad_(),)]
    report = audit(function, inputs, backward=True, compile_backend=_wrong(lambda one: one * 1.01, part))
    found = {"fw_compiler": report.difference, "bw_compiler": report.gradient_difference}[part]
    assert found == pytest.approx(0.01, rel=1e-2)
    with pytest.raises(AssertionError, match=r"compiled (outputs|gradients) differ from eager by 1\.0e-02"):
        report.assert_clean()
    audit(function, inputs, backward=True, compile_backend="aot_eager").assert_clean()
    # Also an output that is not a number, or of another shape.
    for change in (lambda one: one * torch.nan, lambda one: one * torch.inf, lambda one: one[:1]):
        if part == "fw_compiler":
            assert audit(function, [(torch.ones(3, 4),)], compile_backend=_wrong(change, part)).difference == torch.inf
