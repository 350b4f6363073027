"""On a GPU: waits as CUDA sees them, captures that replay other values, and what a failed capture must not leave."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from audit_helpers import attend, attend_exact, input_sets, line_of, lines, operations
from helpers import make_inputs, make_mask
from torch import Tensor

from varlen_prep import AuditReport, audit, prepare_varlen, varlen_attention
from varlen_prep.testing import assert_clean

pytestmark = pytest.mark.gpu


def _same_shapes(kind: str = "right") -> list[tuple[Tensor, ...]]:
    """Three input sets of one shape: the values of the others go into a captured graph."""
    sets = []
    for seed in range(3):
        q, k, v, _ = make_inputs((3, 5), (3, 7), dim=32, dtype=torch.bfloat16, device="cuda", seed=seed)
        mask = make_mask(kind, 3, 7, seed=seed, device="cuda")
        sets.append((q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), mask))
    return sets


def _in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return varlen_attention(q, k, v, prepare_varlen(3, q.shape[1], k.shape[1], mask, layout="in_place"))


@pytest.mark.parametrize(("function", "kind"), [(attend, "holes"), (attend, "some_empty"), (_in_place, "right")])
def test_this_library_is_clean_and_replays_other_masks(function: Callable[..., Tensor], kind: str) -> None:
    report = assert_clean(function, _same_shapes(kind), backward=True)
    assert report.capture is not None
    assert report.capture.error is None
    assert report.capture.difference is not None
    assert report.capture.changed == "the inputs (to those of the other input sets)"
    assert report.reads == ()
    assert report.peak_memory > 0


def test_this_library_is_one_graph_over_shapes() -> None:
    report = assert_clean(attend, input_sets("cuda"), backward=True)
    assert report.graphs == 1


def test_the_documented_read_is_a_wait_and_no_capture_is_tried() -> None:
    report = audit(attend_exact, input_sets("cuda"), fullgraph=True)
    assert len(report.syncs) == 1
    assert {*report.syncs[0].seen} >= {"graph", "cuda"}
    assert "values.tolist()" in report.syncs[0].place.source
    assert "the host waits for the GPU" in report.capture.error


def _wait_without_operator(x: Tensor) -> Tensor:
    lengths = torch.tensor([1, 2, 3]).to(x.device)  # here
    return x[:3] + lengths


def _item(x: Tensor) -> Tensor:
    return x * x.long().sum().item()  # here


def _sage_like(x: Tensor) -> Tensor:
    bound = x.long().abs().max()
    return torch.zeros(bound, device=x.device) + 1  # here


@pytest.mark.parametrize("function", [_wait_without_operator, _item, _sage_like])
def test_a_wait_for_the_gpu_is_found_at_its_line(function: Callable[..., Tensor]) -> None:
    before = torch.cuda.get_sync_debug_mode(), list(warnings.filters), warnings.showwarning
    report = audit(function, [(torch.arange(1.0, 4, device="cuda"),)])
    assert line_of(function, "# here") in lines(report.syncs)
    assert all("cuda" in read.seen for read in report.reads if read.place.line)
    assert before == (torch.cuda.get_sync_debug_mode(), list(warnings.filters), warnings.showwarning)
    with pytest.raises(AssertionError, match="host reads, at most 0 allowed"):
        report.assert_clean(max_graphs=9)


def _reads_a_cpu_tensor(x: Tensor, lengths: Tensor) -> Tensor:
    return x + int(lengths.max())


def test_a_read_of_a_cpu_tensor_beside_a_gpu_waits_for_nothing() -> None:
    report = audit(_reads_a_cpu_tensor, [(torch.ones(3, device="cuda"), torch.tensor([1, 2]))], fullgraph=True)
    assert operations(report) == {}


class _Stale:
    """Offsets that are renewed by eager calls only, as a cache would: a capture keeps those of its warm-up."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, mask: Tensor) -> Tensor:
        if not torch.cuda.is_current_stream_capturing():
            self.kept.append(mask.sum(1).cumsum(0))
        return self.kept[-1] * 2.0


def _masks() -> list[tuple[Tensor]]:
    return [(make_mask("right", 3, 7, seed=seed, device="cuda"),) for seed in range(3)]


def test_a_stale_buffer_in_a_capture_is_found() -> None:
    report = audit(_Stale(), _masks())
    assert report.capture.error is None
    assert report.capture.difference > report.capture.limit
    assert "STALE" in str(report)
    with pytest.raises(AssertionError, match="a CUDA graph replays stale values: it differs from eager"):
        report.assert_clean(max_graphs=99)
    fresh = audit(lambda mask: mask.sum(1).cumsum(0) * 2.0, _masks())
    assert fresh.capture.difference == 0
    fresh.assert_clean()


def test_floats_are_changed_where_one_input_set_is_given() -> None:
    report = assert_clean(lambda x: x.sin(), [(torch.ones(3, 4, device="cuda"),)])
    assert report.capture.changed == "the float inputs"
    assert report.capture.difference == 0


def _aborts(x: Tensor) -> Tensor:
    """A wait that the sync debug mode does not see and that CUDA aborts a capture for."""
    if not torch.compiler.is_compiling():
        torch.cuda.synchronize()
    return x + 1


def _raises(x: Tensor) -> Tensor:
    x = x + 1
    if not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("not in a capture")
    return x


def _state() -> dict[str, object]:
    return {
        "stream": torch.cuda.current_stream(),
        "random": torch.cuda.get_rng_state().tolist(),
        "random on the host": torch.get_rng_state().tolist(),
        "sync debug mode": torch.cuda.get_sync_debug_mode(),
        "capturing": torch.cuda.is_current_stream_capturing(),
        "device": torch.cuda.current_device(),
    }


@pytest.mark.parametrize("function", [_raises, _aborts, lambda x: x + torch.rand_like(x)])
def test_the_gpu_is_as_it_was_also_after_a_capture_that_failed(function: Callable[..., Tensor]) -> None:
    x = torch.ones(3, device="cuda")
    torch.cuda.manual_seed(7)
    torch.rand(3, device="cuda")
    before, peak = _state(), torch.cuda.max_memory_allocated()
    report: AuditReport = audit(function, [(x,)])
    assert _state() == before
    assert torch.cuda.max_memory_allocated() >= peak  # not reset
    assert (report.capture.error is None) == (function not in (_raises, _aborts))
    if function is _raises:
        assert report.capture.error == "RuntimeError: not in a capture"
    # Random numbers and another capture still work.
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(7)
    torch.rand(3, device="cuda")
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert audit(lambda x: x + 1, [(x,)]).capture.error is None


def test_a_function_that_does_nothing_is_captured_without_a_warning() -> None:
    assert audit(lambda x: x, [(torch.ones(3, device="cuda"),)]).capture.error is None


def test_capture_can_be_left_out() -> None:
    assert audit(lambda x: x + 1, [(torch.ones(3, device="cuda"),)], capture=False).capture is None
