"""Compiled code: one dynamic graph, no hidden syncs, results of eager, scopes, export, real Inductor runs.

Graphs are counted by `helpers.Recorder`, which runs them eagerly; sizes of the first shape are all distinct, because
equal sizes would share one symbol and cost a recompile.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    Recorder,
    assert_bit_equal,
    assert_near,
    make_inputs,
    make_mask,
    operators_run,
    random,
    says_to_clone,
)
from torch import Tensor

from varlen_prep import VarlenMetadata, pack, prepare_varlen, unpack, use_backend, varlen_attention

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


def _attend_documents(q: Tensor, meta: VarlenMetadata) -> Tensor:
    return varlen_attention(q, q, q, meta, causal=True)


def _document_ids(x: Tensor, documents: int) -> Tensor:
    return torch.arange(x.shape[0]) * documents // x.shape[0]


def _positions(x: Tensor, documents: int) -> Tensor:
    return torch.arange(x.shape[0]) % -(-x.shape[0] // documents)


def _lengths(x: Tensor, documents: int) -> Tensor:
    # Nine lengths, because the number of sequences is their size; it is varied where capacity is not needed.
    lengths = torch.zeros(documents, dtype=torch.int64)
    lengths[0] = x.shape[0]
    return lengths


# name: (ids of x and a number of documents, metadata of x and ids, compiles allowed, syncs allowed per compile)
SOURCES: dict[str, tuple[Callable[..., Tensor], Callable[..., VarlenMetadata], int, int]] = {
    "lengths_bound": (_lengths, lambda x, n: VarlenMetadata.from_lengths(n, max_seqlen_q=x.shape[0]), 2, 0),
    "lengths_capacity": (
        _lengths, lambda x, n: VarlenMetadata.from_lengths(n, max_seqlen_q=x.shape[0], capacity=12), 2, 0,
    ),
    "lengths_exact": (_lengths, lambda x, n: VarlenMetadata.from_lengths(n), 2, 1),
    "offsets_bound": (
        lambda x, n: torch.nn.functional.pad(_lengths(x, n).cumsum(0), (1, 0)),
        lambda x, n: VarlenMetadata.from_cu_seqlens(n, max_seqlen_q=x.shape[0]), 2, 0,
    ),
    "documents_capacity": (_document_ids, lambda x, n: VarlenMetadata.from_document_ids(n, capacity=9), 1, 0),
    "documents_capacity_bound": (
        _document_ids, lambda x, n: VarlenMetadata.from_document_ids(n, capacity=9, max_seqlen=x.shape[0]), 1, 0,
    ),
    "documents_packed": (
        _document_ids, lambda x, n: VarlenMetadata.from_document_ids(n, capacity=9, layout="packed"), 1, 0,
    ),
    "documents_exact": (_document_ids, lambda x, n: VarlenMetadata.from_document_ids(n), 2, 1),
    "positions_capacity": (_positions, lambda x, n: VarlenMetadata.from_position_ids(n, capacity=9), 1, 0),
    "positions_exact": (_positions, lambda x, n: VarlenMetadata.from_position_ids(n), 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_source_keeps_its_graphs_over_nine_document_counts(name: str) -> None:
    ids_of, source, compiles, syncs = SOURCES[name]
    recorder = Recorder()

    def function(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        meta = source(x, ids)
        return _attend_documents(x, meta), meta.cu_seqlens_q

    compiled = torch.compile(function, backend=recorder, fullgraph=True, dynamic=True)
    for documents in range(9, 0, -1):
        x = random(30 + documents, 4, 16, seed=documents)
        got, want = compiled(x, ids_of(x, documents)), function(x, ids_of(x, documents))
        assert_bit_equal(got[1], want[1])
        assert_near(got[0], want[0], torch.float64)
    assert recorder.compiles <= compiles
    assert len(recorder.syncs) <= syncs * recorder.compiles, recorder.syncs


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


@pytest.mark.parametrize(("bound", "compiles"), [(None, 2), (20, 1)])
def test_metadata_as_an_argument_compiles_once_with_a_bound_and_at_most_twice_without(
    bound: int | None, compiles: int
) -> None:
    recorder = Recorder()
    compiled = torch.compile(_attend_documents, backend=recorder, fullgraph=True, dynamic=True)
    for longest in range(5, 15):
        lengths = [longest, 3, 2]
        if bound is None:
            meta = VarlenMetadata.from_lengths(lengths)
        else:
            meta = VarlenMetadata.from_lengths(torch.tensor(lengths), max_seqlen_q=bound)
        q = random(sum(lengths), 4, 16, seed=longest)
        assert_near(compiled(q, meta), _attend_documents(q, meta), torch.float64)
    assert recorder.compiles <= compiles
    assert not recorder.syncs


def test_float_defaults_are_no_graph_inputs() -> None:
    """A float default of `softcap` was traced as a tensor input that `.item()` read: a sync and twice the compiles."""
    recorder = Recorder()
    compiled = torch.compile(_attend_documents, backend=recorder, fullgraph=True, dynamic=True)
    for rows in (5, 6, 7):
        compiled(random(rows, 4, 16, seed=rows), VarlenMetadata.from_lengths([rows - 2, 2]))
    scalars = [x for x in recorder.inputs if isinstance(x, Tensor) and x.ndim == 0]
    floats = [x for x in recorder.inputs if isinstance(x, (float, torch.SymFloat))]
    assert (scalars, floats, recorder.syncs) == ([], [], [])


def test_backend_scope_around_compiled_code_is_obeyed_on_every_call() -> None:
    """Class-level defaults of `threading.local` are not guarded: the first choice would stay for ever."""
    compiled = torch.compile(_attend_documents, backend=Recorder(), fullgraph=True, dynamic=True)
    q, meta = random(5, 4, 16), VarlenMetadata.from_lengths([3, 2])
    for _ in range(2):
        assert operators_run(lambda: compiled(q, meta)) == ["native_varlen"]
        with use_backend("reference"):
            assert operators_run(lambda: compiled(q, meta)) == ["reference_varlen"]
            with use_backend("native"):
                assert operators_run(lambda: compiled(q, meta)) == ["native_varlen"]
            assert operators_run(lambda: compiled(q, meta)) == ["reference_varlen"]
    assert operators_run(lambda: compiled(q, meta)) == ["native_varlen"]


def test_backend_scope_inside_compiled_code_ends_with_its_block() -> None:
    def function(q: Tensor, meta: VarlenMetadata) -> Tensor:
        with use_backend("reference"):
            first = varlen_attention(q, q, q, meta)
        return first + varlen_attention(q, q, q, meta) + varlen_attention(q, q, q, meta, backend="reference")

    compiled = torch.compile(function, backend=Recorder(), fullgraph=True, dynamic=True)
    q, meta = random(5, 4, 16), VarlenMetadata.from_lengths([3, 2])
    for _ in range(2):
        names = operators_run(lambda: compiled(q, meta))
        assert names == ["reference_varlen", "native_varlen", "reference_varlen"]
    assert operators_run(lambda: varlen_attention(q, q, q, meta)) == ["native_varlen"]


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
    assert tensors_after(6, []) == before
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


def _sync_free_metadata() -> dict[str, Callable[[], VarlenMetadata]]:
    """Every path without an exact maximum, on CUDA tensors that exist already."""
    mask, mask_q = make_mask("right", 3, 16, device="cuda"), make_mask("left", 3, 16, seed=1, device="cuda")
    ids = torch.tensor([0] * 20 + [1] * 20 + [-1] * 8, device="cuda")
    lengths = torch.tensor([20, 28], device="cuda")
    offsets = torch.tensor([0, 20, 48], device="cuda")
    make = VarlenMetadata
    return {
        "no_mask": lambda: prepare_varlen(3, 16, 16, device="cuda"),
        "mask": lambda: prepare_varlen(3, 16, 16, mask, max_seqlen_k=16),
        "masks": lambda: prepare_varlen(3, 16, 16, mask, mask_q=mask_q, max_seqlen_k=16),
        "in_place": lambda: prepare_varlen(3, 16, 16, mask, layout="in_place"),
        "in_place_masks": lambda: prepare_varlen(3, 16, 16, mask, mask_q=mask_q, layout="in_place"),
        "lengths": lambda: make.from_lengths(lengths, max_seqlen_q=28),
        "lengths_capacity": lambda: make.from_lengths(lengths, max_seqlen_q=48, capacity=4),
        "host_lengths": lambda: make.from_lengths([20, 28], device="cuda"),
        "host_lengths_capacity": lambda: make.from_lengths([20, 28], capacity=4, device="cuda"),
        "offsets": lambda: make.from_cu_seqlens(offsets, max_seqlen_q=28),
        "documents": lambda: make.from_document_ids(ids, capacity=4),
        "documents_packed": lambda: make.from_document_ids(ids.view(3, 16), capacity=6),
        "documents_bound": lambda: make.from_document_ids(ids, capacity=4, max_seqlen=20),
        "positions": lambda: make.from_position_ids(ids, capacity=48),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [
    "no_mask", "mask", "masks", "in_place", "in_place_masks", "lengths", "lengths_capacity", "host_lengths",
    "host_lengths_capacity", "offsets", "documents", "documents_packed", "documents_bound", "positions",
])  # fmt: skip
def test_nothing_waits_for_the_device_from_metadata_to_gradients(name: str, dtype: torch.dtype) -> None:
    make = _sync_free_metadata()[name]
    meta = make()
    rows = (3, 16) if meta.seq_q == 16 else (48,)
    q, k, v, dout = (x.requires_grad_() for x in make_inputs(rows, rows, dim=32, dtype=dtype, device="cuda"))
    dout = dout.detach()

    def step() -> Tensor:
        meta = make()
        out, _ = varlen_attention(q, k, v, meta, return_lse=True)
        return torch.autograd.grad(out, (q, k, v), dout)[0]

    for _ in range(2):  # loads kernels, fills the caches of the allocators
        step()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        dq = step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            dq.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_exact_maximum_is_the_one_wait_of_a_masked_forward() -> None:
    mask = make_mask("holes", 3, 16, device="cuda")
    prepare_varlen(3, 16, 16, mask)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchroniz"):
            prepare_varlen(3, 16, 16, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_host_lengths_as_an_argument_of_compiled_code_are_one_graph() -> None:
    def function(q: Tensor, lengths: list[int]) -> Tensor:
        return varlen_attention(q, q, q, VarlenMetadata.from_lengths(lengths), causal=True)

    recorder = Recorder()
    compiled = torch.compile(function, backend=recorder, fullgraph=True, dynamic=True)
    for lengths in ([3, 5, 2], [4, 6, 7], [9, 2, 6]):
        q = random(sum(lengths), 2, 8)
        assert_bit_equal(compiled(q, lengths), function(q, lengths))
    assert recorder.compiles == 1
