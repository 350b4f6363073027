"""`GraphedVarlen` on the host: static inputs keep their addresses, take on new values whole, or refuse and keep theirs.

B rows, S padded length, T packed rows, H heads, D head size.  Captures are only claimed here: replays run the region
again on the static inputs. Real ones are in `test_graphs_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_bit_equal, assert_near, case, make_inputs, make_mask, refuses
from torch import Tensor
from torch.utils import _pytree as pytree

pytest.importorskip("transformers")

from graphs_helpers import without_gpu

from varlen_prep import VarlenMetadata, prepare_varlen, varlen_attention
from varlen_prep.graphs import GraphedVarlen, _capture, _varlen
from varlen_prep.graphs._varlen import StaticInputs


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch, _varlen)


def tensors(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def addresses(values: Any) -> list[int]:
    return [x.data_ptr() for x in tensors(values)]


def contents(values: Any) -> list[Tensor]:
    return [x.clone() for x in tensors(values)]


def lengths(values: list[int], capacity: int | None = 3, bound: int | None = 8) -> VarlenMetadata:
    return VarlenMetadata.from_lengths(torch.tensor(values), max_seqlen_q=bound, capacity=capacity)


def masked(kind: str, seed: int = 0) -> VarlenMetadata:
    keys = make_mask(kind, 3, 5, seed=seed)
    return prepare_varlen(3, 5, 5, keys, mask_q=keys, max_seqlen_k=5)


# Static inputs


def test_static_inputs_are_copies_of_what_was_given() -> None:
    given = (torch.ones(4, 2), lengths([4, 4]), torch.zeros(3, dtype=torch.bool))
    static = StaticInputs(given)
    assert not set(addresses(static.values)) & set(addresses(given))
    before = contents(static.values)
    given[0].zero_()
    given[1].cu_seqlens_q.zero_()
    assert_bit_equal(contents(static.values), before)


def test_a_tensor_that_both_sides_share_stays_shared_and_equal_inputs_do_not() -> None:
    x, meta = torch.ones(4), lengths([4, 4])
    static = StaticInputs((x, x, meta))
    assert static.values[0] is not static.values[1]
    assert static.values[2].cu_seqlens_q is static.values[2].cu_seqlens_k
    static.write((torch.full((4,), 2.0), torch.full((4,), 3.0), meta))
    assert [static.values[0][0], static.values[1][0]] == [2, 3]


def test_addresses_stay_and_values_follow() -> None:
    static = StaticInputs((torch.zeros(8, 2), lengths([4, 4]), masked("right"), torch.zeros(2, 3, dtype=torch.int64)))
    before = addresses(static.values)
    for step, taking_part in enumerate(([1, 7], [7, 1], [0, 3], [2, 2, 2])):
        rows, ids = torch.full((8, 2), float(step)), torch.full((2, 3), step)
        given = (rows, lengths(taking_part), masked("holes", seed=step), ids)
        static.write(given)
        assert_bit_equal(contents(static.values), contents(given))
        assert addresses(static.values) == before


def test_rows_past_those_that_are_written_become_zero() -> None:
    static = StaticInputs((torch.full((6, 2), torch.nan),))
    static.write((torch.ones(4, 2),))
    static.write((torch.full((1, 2), 2.0),))
    assert static.values[0].tolist() == [[2, 2]] + [[0, 0]] * 5
    static.write((torch.ones(0, 2),))
    assert not static.values[0].any()


@pytest.mark.parametrize("made_in", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("written_in", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_inputs_made_in_one_mode_are_written_in_another(made_in: Any, written_in: Any) -> None:
    with made_in():
        static = StaticInputs((torch.zeros(3), lengths([4, 4])))
    with written_in():
        static.write((torch.ones(3), lengths([1, 7])))
    assert static.values[0].tolist() == [1, 1, 1]


def test_inputs_that_require_gradients_stay_leaves() -> None:
    static = StaticInputs((torch.zeros(3, requires_grad=True),))
    static.write((torch.ones(3),))
    (x,) = static.values
    assert x.requires_grad
    assert x.is_leaf
    assert torch.autograd.grad((x * x).sum(), x)[0].tolist() == [2, 2, 2]


# Refused updates: nothing is half-written

REFUSED: dict[str, tuple[Callable[[], tuple[Any, ...]], type[Exception], str]] = {
    "too many sequences": (lambda: (torch.ones(8, 2), lengths([1, 1, 1, 1], capacity=None)), ValueError, "capacity"),
    "too long a maximum": (lambda: (torch.ones(8, 2), lengths([4, 4], bound=9)), ValueError, "inputs[1]: other: max"),
    "another layout": (lambda: (torch.ones(8, 2), masked("right")), ValueError, "capture once for each"),
    "too many rows": (lambda: (torch.ones(9, 2), lengths([4, 4])), ValueError, "inputs[0]: expected shape (8, 2) or f"),
    "another width": (lambda: (torch.ones(8, 3), lengths([4, 4])), ValueError, "got (8, 3); capture with the largest"),
    "another rank": (lambda: (torch.ones(8), lengths([4, 4])), ValueError, "inputs[0]: expected shape (8, 2)"),
    "another dtype": (lambda: (torch.ones(8, 2).half(), lengths([4, 4])), ValueError, "expected torch.float32, as"),
    "gradients": (lambda: (torch.ones(8, 2, requires_grad=True), lengths([4, 4])), ValueError, "detach it"),
    "no metadata": (lambda: (torch.ones(8, 2), torch.ones(3)), TypeError, "inputs[1]: expected VarlenMetadata"),
    "no tensor": (lambda: (lengths([4, 4]), lengths([4, 4])), TypeError, "inputs[0]: expected Tensor"),
    "too few": (lambda: (torch.ones(8, 2),), ValueError, "inputs: expected 2, as captured, got 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_update_writes_nothing(name: str) -> None:
    make, error, fragment = REFUSED[name]
    static = StaticInputs((torch.zeros(8, 2), lengths([4, 4])))
    before = contents(static.values)
    with refuses(error, fragment):
        static.write(make())
    assert_bit_equal(contents(static.values), before)
    static.write((torch.ones(8, 2), lengths([1, 7])))  # and the change would have been seen
    assert static.values[0].all()
    assert static.values[1].cu_seqlens_q.tolist() == [0, 1, 8, 8]


def test_metadata_of_two_sources_is_written_whole_or_not_at_all() -> None:
    static = StaticInputs((lengths([4, 4]), lengths([4, 4])))
    with refuses(ValueError, "inputs[1]", "capacity"):
        static.write((lengths([1, 7]), lengths([1] * 4, capacity=None)))
    assert static.values[0].cu_seqlens_q.tolist() == [0, 4, 8, 8]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_masks_and_ids_have_one_shape_because_no_value_means_no_row(dtype: torch.dtype) -> None:
    static = StaticInputs((torch.ones(4, 2, dtype=dtype),))
    with refuses(ValueError, "inputs[0]: expected shape (4, 2), as captured, got (3, 2)"):
        static.write((torch.ones(3, 2, dtype=dtype),))


def test_documents_past_the_capacity_are_refused() -> None:
    overflow = case("capacity", "overflow")
    ids = torch.tensor(overflow["document_ids"])
    with refuses(ValueError, "capacity"):
        VarlenMetadata.from_document_ids(ids, capacity=overflow["capacity"])
    static = StaticInputs((VarlenMetadata.from_document_ids(ids // 2, capacity=overflow["capacity"]),))
    before = contents(static.values)
    with refuses(ValueError, "inputs[0]", "at most 4 sequences (the capacity), got 5"):
        static.write((VarlenMetadata.from_document_ids(ids, capacity=5),))
    assert_bit_equal(contents(static.values), before)


def test_offsets_with_fillers_are_written_to_the_capacity() -> None:
    filler = case("capacity", "graph-filler")
    entries = filler["entries"] - 1
    static = StaticInputs((lengths([40], capacity=entries, bound=40),))
    static.write((VarlenMetadata.from_cu_seqlens(torch.tensor(filler["cu_seqlens"]), max_seqlen_q=40),))
    assert static.values[0].cu_seqlens_q.tolist() == filler["padded"]


# The whole object, with a region that runs again


@pytest.mark.usefixtures("on_cpu")
def test_shrinking_and_growing_lengths_give_what_eager_gives() -> None:
    grow = case("capacity", "shrink-then-grow")
    q, k, v, _ = make_inputs((8,), (8,))
    graphed = GraphedVarlen(varlen_attention, q, k, v, lengths(grow["captured_lengths"]))
    for step, taking_part in enumerate(grow["replayed_lengths"]):
        total = sum(taking_part)
        new = [x[:total] for x in make_inputs((8,), (8,), seed=step)[:3]]
        out = graphed(*new, lengths(taking_part))
        assert_near(out[:total], varlen_attention(*new, lengths(taking_part)), torch.float64)
        assert not out[total:].any()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("layout", ["packed", "in_place"])
def test_a_region_that_prepares_follows_its_mask(layout: str) -> None:
    def region(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> dict[str, Tensor]:
        meta = prepare_varlen(3, 5, 5, keys, mask_q=keys, max_seqlen_k=5, layout=layout)
        return {"out": varlen_attention(q, k, v, meta)}

    inputs = make_inputs((3, 5), (3, 5))[:3]
    graphed = GraphedVarlen(region, *inputs, make_mask("full", 3, 5))
    for kind in ("right", "left", "some_empty", "all_empty", "full"):
        keys = make_mask(kind, 3, 5)
        assert_bit_equal(graphed(*inputs, keys), region(*inputs, keys))


@pytest.mark.usefixtures("on_cpu")
def test_a_call_returns_a_copy_and_a_replay_the_static_output() -> None:
    graphed = GraphedVarlen(lambda x: (x + 1, [x * 2]), torch.ones(3))
    first = graphed(torch.ones(3))
    second = graphed(torch.full((3,), 5.0))
    assert first[0].tolist() == [2, 2, 2]
    assert second[1][0].tolist() == [10, 10, 10]
    graphed.update(torch.zeros(3))
    assert graphed.output[0].tolist() == [6, 6, 6]
    assert graphed.replay() is graphed.output
    assert graphed.output[0].tolist() == [1, 1, 1]
    graphed.inputs[0].fill_(3)
    assert graphed.replay()[1][0].tolist() == [6, 6, 6]


@pytest.mark.usefixtures("on_cpu")
def test_a_region_may_return_gradients_and_its_output_needs_none() -> None:
    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x * x).sum()
        return y, torch.autograd.grad(y, x, retain_graph=True)[0]

    graphed = GraphedVarlen(region, torch.ones(2, requires_grad=True))
    y, gradient = graphed(torch.tensor([3.0, 4.0]))
    assert not y.requires_grad
    assert (y.item(), gradient.tolist()) == (25, [6, 8])


@pytest.mark.usefixtures("on_cpu")
def test_a_refused_call_leaves_the_pool_free() -> None:
    graphed = GraphedVarlen(lambda x: x + 1, torch.ones(3))
    with refuses(ValueError, "inputs[0]"):
        graphed(torch.ones(4))
    assert graphed(torch.ones(3)).tolist() == [2, 2, 2]


# What is refused before a capture


@pytest.mark.parametrize("value", [3, None, "x", [torch.ones(2)]])
def test_host_values_are_no_inputs(value: Any) -> None:
    with refuses(TypeError, "inputs[1]: expected a tensor or VarlenMetadata", "close over it"):
        GraphedVarlen(lambda *inputs: inputs[0], torch.ones(2), value)


@pytest.mark.parametrize(("inputs", "found"), [
    ((torch.ones(2),), "got cpu;"),
    ((torch.ones(2), torch.ones(2, device="meta")), "got cpu, meta;"),
    ((), "got none at all;"),
])  # fmt: skip
def test_inputs_that_are_not_on_one_gpu_are_refused(inputs: tuple[Any, ...], found: str) -> None:
    with refuses(ValueError, "inputs: expected all tensors on one CUDA device", found, ".to('cuda')"):
        GraphedVarlen(lambda *inputs: inputs, *inputs)


def test_autocast_with_its_cache_around_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = object.__new__(_capture.GraphPool)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    with refuses(RuntimeError, "autocast", "enter autocast inside", "cache_enabled=False"):
        pool.capture(lambda: None)
