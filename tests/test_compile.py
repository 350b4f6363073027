"""Compiled padded batches: one dynamic graph, no hidden syncs, results of eager, real Inductor runs.

Graphs are counted by `helpers.Recorder`, which runs them eagerly; sizes of the first shape are all distinct, because
equal sizes would share one symbol and cost a recompile.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Recorder, assert_bit_equal, assert_near, make_inputs, make_mask, random, says_to_clone
from torch import Tensor

from varlen_prep import VarlenMetadata, pack, prepare_varlen, unpack, varlen_attention
from varlen_prep.backends import REGISTRY

pytestmark = pytest.mark.usefixtures("fresh_compiler")
SHAPES = [(3, 5, 7), (5, 6, 9), (6, 11, 8), (7, 9, 13), (9, 10, 12)]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False, **options: Any
) -> Tensor:
    meta = prepare_varlen(q.shape[0], q.shape[1], k.shape[1], mask, **options)
    return varlen_attention(q, k, v, meta, causal=causal)


def _packed_by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, mask_q: Tensor) -> Tensor:
    meta = prepare_varlen(*mask_q.shape, mask.shape[1], mask, mask_q=mask_q, max_seqlen_k=mask.shape[1])
    rows = [pack(x, meta, side) for x, side in ((q, "q"), (k, "k"), (v, "k"))]
    return unpack(varlen_attention(*rows, meta), meta, "q")


# name: (function of q, k, v, mask, mask_q; operators that may sync)
SCENARIOS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "no_mask": (lambda q, k, v, m, mq: _attend(q, k, v), 0),
    "mask_bound": (lambda q, k, v, m, mq: _attend(q, k, v, m, max_seqlen_k=k.shape[1]), 0),
    "mask_exact": (lambda q, k, v, m, mq: _attend(q, k, v, m), 1),
    "masks_exact": (lambda q, k, v, m, mq: _attend(q, k, v, m, mask_q=mq), 1),
    "masks_causal": (lambda q, k, v, m, mq: _attend(q, k, v, m, mask_q=mq, max_seqlen_k=k.shape[1], causal=True), 0),
    "in_place": (lambda q, k, v, m, mq: _attend(q, k, v, m, layout="in_place"), 0),
    "in_place_masks": (lambda q, k, v, m, mq: _attend(q, k, v, m, mask_q=mq, layout="in_place", causal=True), 0),
    "pack_by_hand": (_packed_by_hand, 0),
}


def test_a_limit_on_elements_adds_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's, for gradients, asked here of torch's kernel."""
    record = dataclasses.replace(REGISTRY["native"], refuse=REGISTRY["cudnn"].refuse)
    monkeypatch.setitem(REGISTRY, "native", record)
    recorder = Recorder()
    compiled = torch.compile(_attend, backend=recorder, fullgraph=True, dynamic=True)
    for batch, seq_q, seq_kv in SHAPES:
        q, k, v, _ = (x.requires_grad_() for x in make_inputs((batch, seq_q), (batch, seq_kv)))
        compiled(q, k, v)
    assert recorder.compiles == 1


@pytest.mark.parametrize("static", ["mask", "q", "mask and q"])
def test_a_constant_size_fits_a_traced_one(static: str) -> None:
    """A mask whose length the compiler takes for a constant, beside keys that are joined from two parts."""

    def joint(q: Tensor, first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
        k = torch.cat([first, second], 1)
        return _attend(q, k, k, mask, mask_q=mask, max_seqlen_k=k.shape[1])

    q, parts, mask = random(2, 12, 2, 8), (random(2, 5, 2, 8), random(2, 7, 2, 8)), make_mask("holes", 2, 12, seed=0)
    for name, x in (("mask", mask), ("q", q)):
        if name in static.split(" and "):
            torch._dynamo.mark_static(x)
    out = torch.compile(joint, backend="eager", fullgraph=True, dynamic=True)(q, *parts, mask)
    assert_bit_equal(out, joint(q, *parts, mask))


@pytest.mark.parametrize("name", SCENARIOS)
def test_padded_batch_is_one_graph_over_all_shapes_and_syncs_as_documented(name: str) -> None:
    function, syncs = SCENARIOS[name]
    recorder = Recorder()
    compiled = torch.compile(function, backend=recorder, fullgraph=True, dynamic=True)
    for seed, (batch, seq_q, seq_kv) in enumerate(SHAPES):
        kind = "right" if "in_place" in name else "holes"
        masks = make_mask(kind, batch, seq_kv, seed=seed), make_mask(kind, batch, seq_q, seed=seed + 50)
        *inputs, dout = make_inputs((batch, seq_q), (batch, seq_kv), dim=16, seed=seed)
        results = []
        for run in (compiled, function):
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = run(*leaves, *masks)
            results.append((out, *torch.autograd.grad(out, leaves, dout)))
        assert_near(*results, torch.float64)
    assert recorder.compiles == 1
    assert len(recorder.syncs) == syncs, recorder.syncs


def test_planted_item_is_found_by_the_same_counter() -> None:
    recorder = Recorder()

    def function(q: Tensor, mask: Tensor) -> Tensor:
        return _attend(q, q, q, mask, max_seqlen_k=q.shape[1]) * mask.sum().item()

    q, mask = random(3, 5, 4, 8), make_mask("holes", 3, 5)
    torch.compile(function, backend=recorder, fullgraph=True, dynamic=True)(q, mask)
    assert len(recorder.syncs) == 1
    recorder = Recorder()
    torch.compile(lambda x: x.nonzero() * 2, backend=recorder, fullgraph=True, dynamic=True)(torch.ones(3, 5))
    assert len(recorder.syncs) == 1


def test_maxima_are_symbolic_ints_while_tracing_and_ints_after() -> None:
    kinds = []

    def function(mask: Tensor, ids: Tensor) -> list[int]:
        metas = [prepare_varlen(mask.shape[0], 4, mask.shape[1], mask), VarlenMetadata.from_document_ids(ids)]
        kinds.extend(isinstance(one, Tensor) for meta in metas for one in (meta.max_seqlen_q, meta.max_seqlen_k))
        return [one for meta in metas for one in (meta.max_seqlen_q, meta.max_seqlen_k)]

    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
    maxima = compiled(torch.tensor([[True, True, False], [True, False, False]]), torch.tensor([0, 0, 0, 1, 1]))
    # Of the documents only the count is read, so their maxima are the bound 5.
    assert (maxima, {type(one) for one in maxima}) == ([4, 2, 5, 5], {int})
    assert not any(kinds)


@pytest.mark.parametrize("shape", [(1, 5, 7), (3, 1, 7), (3, 5, 1), (1, 1, 1), (0, 5, 7), (3, 0, 7), (3, 5, 0)])
@pytest.mark.parametrize("name", ["no_mask", "mask_exact", "masks_causal", "in_place_masks"])
def test_sizes_zero_and_one_compile_and_equal_eager(name: str, shape: tuple[int, int, int]) -> None:
    function, _ = SCENARIOS[name]
    batch, seq_q, seq_kv = shape
    *inputs, dout = make_inputs((batch, seq_q), (batch, seq_kv), dim=16)
    masks = torch.ones(batch, seq_kv, dtype=torch.bool), torch.ones(batch, seq_q, dtype=torch.bool)
    results = []
    for run in (torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True), function):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = run(*leaves, *masks)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert_near(*results, torch.float64)


def test_repeated_compiled_calls_leave_no_tensors_behind() -> None:
    function, _ = SCENARIOS["mask_bound"]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)

    def tensors_after(calls: int, keep: list[Tensor]) -> int:
        for seed in range(calls):
            q, k, v, dout = (x.requires_grad_() for x in make_inputs((3, 5), (3, 7), dim=16, seed=seed))
            out = compiled(q, k, v, make_mask("holes", 3, 7, seed=seed), None)
            out.backward(dout.detach())
            keep.extend([out] if keep else [])
        del q, k, v, dout, out
        gc.collect()
        return sum(issubclass(type(one), Tensor) for one in gc.get_objects())  # isinstance would ask lazy objects

    tensors_after(3, [])
    before = tensors_after(1, [])
    assert tensors_after(6, []) <= before  # fewer where garbage of earlier tests went too
    assert tensors_after(6, leak := [torch.zeros(1)]) > before, f"{len(leak)} kept tensors must show"


@pytest.mark.parametrize("kind", ["argument", "closure"])
def test_metadata_from_inference_mode_trains_when_compiled_or_says_what_to_do(kind: str) -> None:
    with torch.inference_mode():
        meta = prepare_varlen(2, 3, 4, make_mask("holes", 2, 4))
    q, k, v, dout = make_inputs((2, 3), (2, 4))
    q.requires_grad_()
    function = varlen_attention if kind == "argument" else (lambda q, k, v, _: varlen_attention(q, k, v, meta))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    grads = says_to_clone(lambda: torch.autograd.grad(compiled(q, k, v, meta), q, dout))
    if grads is not None:
        assert_near(grads, torch.autograd.grad(varlen_attention(q, k, v, meta), q, dout), torch.float64)


def _everything(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """Every kind of offsets, and attention on the packed layout."""
    batch, seq = mask.shape
    made_here = torch.ones(batch, seq, dtype=torch.bool, device=mask.device)
    offsets = (
        prepare_varlen(batch, q.shape[1], seq, device=mask.device).cu_seqlens_k,
        prepare_varlen(batch, q.shape[1], seq, made_here, max_seqlen_k=seq).cu_seqlens_k,
        prepare_varlen(batch, q.shape[1], seq, made_here, layout="in_place").cu_seqlens_k,
        VarlenMetadata.from_document_ids(ids, capacity=4).cu_seqlens_k,
        VarlenMetadata.from_position_ids(ids, capacity=64).cu_seqlens_k,
        VarlenMetadata.from_lengths(mask.sum(1), max_seqlen_q=seq).cu_seqlens_k,
    )
    return _attend(q, k, v, mask, max_seqlen_k=seq), *offsets


def test_inductor_equals_eager_forward_backward_and_in_every_offset(device: str) -> None:
    """Also the traps of the compiler: filled lengths summed in the graph, and sums of a mask made in the graph."""
    compiled = torch.compile(_everything, fullgraph=True, dynamic=True)
    for batch, seq_q, seq_kv in ((2, 3, 5), (4, 6, 7)):
        *inputs, dout = make_inputs((batch, seq_q), (batch, seq_kv), dim=16, dtype=torch.float32, device=device)
        mask = make_mask("holes", batch, seq_kv, device=device)
        ids = torch.arange(3 * seq_kv, device=device) // seq_kv
        results = []
        for run in (compiled, _everything):
            leaves = [x.clone().requires_grad_() for x in inputs]
            out, *offsets = run(*leaves, mask, ids)
            results.append((out, *torch.autograd.grad(out, leaves, dout)))
            assert {one.dtype for one in offsets} == {torch.int32}
            assert offsets[0].tolist() == offsets[1].tolist() == list(range(0, (batch + 1) * seq_kv, seq_kv))
            results[-1] += (torch.cat(offsets),)
        assert_near(*results, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [[(1, 16384), (2, 16384)], [(4, 65536), (3, 500)]])
def test_compiled_offsets_are_right_where_a_padded_sum_was_not(shapes: list[tuple[int, int]]) -> None:
    """Inductor on CUDA (torch 2.11) gave [16384, 16384] for one row of 16384 when a pad followed the sum."""

    def offsets(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq = mask.shape
        meta = prepare_varlen(batch, 1, seq, mask, max_seqlen_k=seq)
        lengths = VarlenMetadata.from_lengths(mask.sum(1), max_seqlen_q=seq)
        return meta.cu_seqlens_k, lengths.cu_seqlens_q, meta.order_k

    compiled = torch.compile(offsets, fullgraph=True, dynamic=True)
    for batch, seq in shapes:
        for kind in ("full", "holes", "some_empty"):
            mask = make_mask(kind, batch, seq, device="cuda")
            cu_mask, cu_lengths, order = compiled(mask)
            expected = np.concatenate([[0], np.cumsum(mask.cpu().numpy().sum(1))])
            assert cu_mask.tolist() == cu_lengths.tolist() == expected.tolist()
            assert_bit_equal(order, offsets(mask)[2])
