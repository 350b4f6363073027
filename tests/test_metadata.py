"""`VarlenMetadata` as an object: pytree, copies, devices, keyword arguments, checkpoint, export, replay."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    assert_bit_equal,
    assert_near,
    make_inputs,
    make_mask,
    oracle,
    random,
    refuses,
    run,
)
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from varlen_prep import VarlenMetadata, prepare_varlen, varlen_attention

MASK, MASK_Q = make_mask("right", 3, 8, seed=1), make_mask("left", 3, 6, seed=2)
KINDS: dict[str, Callable[[], VarlenMetadata]] = {
    "uniform": lambda: prepare_varlen(3, 6, 8),
    "packed": lambda: prepare_varlen(3, 6, 8, MASK, mask_q=MASK_Q, max_seqlen_k=8),
    "exact": lambda: prepare_varlen(3, 6, 8, MASK),
    "in_place": lambda: prepare_varlen(3, 6, 8, MASK, mask_q=MASK_Q, layout="in_place"),
    "lengths": lambda: VarlenMetadata.from_lengths([3, 0, 2], [4, 1, 3]),
    "documents": lambda: VarlenMetadata.from_document_ids(torch.tensor([0, 0, 0, 2, 2, -1]), capacity=4),
}


def rows_of(meta: VarlenMetadata) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if meta.batch is None:
        return (int(meta.cu_seqlens_q[-1]),), (int(meta.cu_seqlens_k[-1]),)
    return meta.padded_shape("q"), meta.padded_shape("k")


def assert_same(a: VarlenMetadata, b: VarlenMetadata) -> None:
    for field in dataclasses.fields(VarlenMetadata):
        mine, theirs = getattr(a, field.name), getattr(b, field.name)
        if isinstance(mine, Tensor):
            assert_bit_equal(mine, theirs)
        else:
            assert (mine, type(mine)) == (theirs, type(theirs)), field.name


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pytree_keep_every_field(kind: str) -> None:
    meta = KINDS[kind]()
    leaves, spec = pytree.tree_flatten(meta)
    assert all(isinstance(leaf, (Tensor, int)) for leaf in leaves)
    same = [
        copy.deepcopy(meta), copy.copy(meta), pickle.loads(pickle.dumps(meta)), meta.to("cpu"),
        pytree.tree_unflatten(leaves, spec), pytree.tree_map(lambda leaf: leaf, meta),
        pytree.treespec_loads(pytree.treespec_dumps(spec)).unflatten(leaves),
    ]  # fmt: skip
    for other in same:
        assert_same(other, meta)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


@pytest.mark.parametrize("kind", KINDS)
def test_to_moves_tensors_and_keeps_host_values(kind: str) -> None:
    meta = KINDS[kind]()
    moved = meta.to("meta")
    for field in dataclasses.fields(VarlenMetadata):
        mine, theirs = getattr(meta, field.name), getattr(moved, field.name)
        assert theirs.device.type == "meta" if isinstance(mine, Tensor) else mine == theirs
    assert (moved.cu_seqlens_q is moved.cu_seqlens_k) == (meta.cu_seqlens_q is meta.cu_seqlens_k)


@pytest.mark.gpu
def test_to_the_host_waits_for_the_values() -> None:
    for _ in range(5):
        torch.cuda._sleep(50_000_000)  # the copy is queued behind this
        meta = prepare_varlen(64, 6, 8192, torch.ones(64, 8192, dtype=torch.bool, device="cuda"), max_seqlen_k=8192)
        assert meta.to("cpu").cu_seqlens_k.tolist() == list(range(0, 65 * 8192, 8192))
        assert_same(meta.to("cpu").to("cuda"), meta)


def test_fields_cannot_be_replaced() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KINDS["uniform"]().max_seqlen_q = 3  # type: ignore[misc]


def test_keyword_arguments_have_the_names_that_kernels_and_models_use() -> None:
    meta = KINDS["lengths"]()
    values = (meta.cu_seqlens_q, meta.cu_seqlens_k, 3, 4)
    flash, model = meta.flash_kwargs(), meta.transformers_kwargs()
    assert list(flash) == ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert list(model) == ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]
    for kwargs in (flash, model):
        assert all(a is b for a, b in zip(kwargs.values(), values, strict=True))


@pytest.mark.parametrize(
    ("causal", "window"),
    [(False, (-1, -1)), (True, (-1, -1)), (True, (2, 0)), (False, (1, 2)), (False, (0, -1))],
)
def test_materialize_equals_plain_loops(causal: bool, window: tuple[int, int]) -> None:
    def sees(i: int, j: int, length_q: int, length_k: int) -> bool:
        distance = j - (i + length_k - length_q)
        right = 0 if causal else window[1]
        return (right < 0 or distance <= right) and (window[0] < 0 or distance >= -window[0])

    lengths_q, lengths_k = [3, 0, 2, 5, 1], [4, 1, 3, 2, 0]
    expected = torch.zeros(sum(lengths_q), sum(lengths_k), dtype=torch.bool)
    for n, (lq, lk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        for i in range(lq):
            for j in range(lk):
                expected[sum(lengths_q[:n]) + i, sum(lengths_k[:n]) + j] = sees(i, j, lq, lk)
    meta = VarlenMetadata.from_lengths(lengths_q, lengths_k)
    assert_bit_equal(meta.materialize(causal=causal, window_size=window), expected)
    for layout in ("packed", "in_place"):
        for kind in ("right", "middle", "some_empty", "holes")[: 4 if layout == "packed" else 3]:
            mask, mask_q = make_mask(kind, 3, 8, seed=5), make_mask(kind, 3, 6, seed=6)
            expected = torch.zeros(3, 6, 8, dtype=torch.bool)
            for b in range(3):
                queries, keys = (m[b].nonzero().flatten().tolist() for m in (mask_q, mask))
                for i, row in enumerate(queries):
                    for j, column in enumerate(keys):
                        expected[b, row, column] = sees(i, j, len(queries), len(keys))
            meta = prepare_varlen(3, 6, 8, mask, mask_q=mask_q, layout=layout)
            assert_bit_equal(meta.materialize(causal=causal, window_size=window), expected)


def test_copy_keeps_addresses_and_takes_the_values(device: str) -> None:
    for first, second in (
        (capacity([4, 4], 8, 3), VarlenMetadata.from_lengths([7, 1])),
        (prepare_varlen(3, 6, 8, MASK, max_seqlen_k=8), prepare_varlen(3, 6, 8, make_mask("holes", 3, 8))),
        (KINDS["in_place"](), prepare_varlen(3, 6, 8, MASK.flip(1), mask_q=MASK_Q.flip(1), layout="in_place")),
    ):
        first, second = first.to(device), second.to(device)
        tensors = [leaf for leaf in pytree.tree_leaves(first) if isinstance(leaf, Tensor)]
        addresses, host = [x.data_ptr() for x in tensors], (first.max_seqlen_q, first.max_seqlen_k)
        assert first.copy_(second) is first
        assert [x.data_ptr() for x in pytree.tree_leaves(first) if isinstance(x, Tensor)] == addresses
        assert (first.max_seqlen_q, first.max_seqlen_k) == host
        sequences = second.cu_seqlens_k.shape[0]
        assert_bit_equal(first.cu_seqlens_k[:sequences], second.cu_seqlens_k)
        assert (first.cu_seqlens_k[sequences:] == second.cu_seqlens_k[-1]).all()
        if second.order_k is not None:
            assert_bit_equal((first.order_k, first.inverse_k), (second.order_k, second.inverse_k))


def capacity(lengths: list[int], bound: int, number: int | None = None) -> VarlenMetadata:
    return VarlenMetadata.from_lengths(torch.tensor(lengths), max_seqlen_q=bound, capacity=number)


@pytest.mark.parametrize(("mine", "other", "fragments"), [
    (lambda: capacity([4, 4], 8, 2), lambda: capacity([1, 1, 1], 8), ("other", "at most 2 sequences", "3", "raise")),
    (lambda: capacity([4, 4], 4, 2), lambda: capacity([5, 1], 5), ("other", "max_seqlen_q", "5", "4", "larger bound")),
    (lambda: VarlenMetadata.from_lengths([4], capacity=2), lambda: capacity([3], 3), ("other", "exact 4", "bound")),
    (KINDS["lengths"], lambda: VarlenMetadata.from_lengths([3, 0, 3], [4, 1, 3]), ("other", "all 5 rows", "capacity=")),
    (KINDS["packed"], KINDS["in_place"], ("other", "layout", "packed", "in_place")),
    (KINDS["packed"], lambda: prepare_varlen(3, 6, 9, make_mask("left", 3, 9)), ("other", "padded shape", "9")),
    (KINDS["in_place"], lambda: prepare_varlen(3, 6, 8, MASK, layout="in_place"), ("other", "in_place")),
    (KINDS["packed"], lambda: prepare_varlen(3, 6, 8, MASK), ("other", "moves rows of 'q'")),
])  # fmt: skip
def test_copy_refuses_what_a_captured_graph_cannot_take_on(
    mine: Callable[[], VarlenMetadata], other: Callable[[], VarlenMetadata], fragments: tuple[str, ...]
) -> None:
    meta = mine()
    before = copy.deepcopy(meta)
    with refuses(ValueError, *fragments):
        meta.copy_(other())
    assert_same(meta, before)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_takes_metadata_as_an_argument(kind: str, reentrant: bool) -> None:
    meta = KINDS[kind]()
    inputs = make_inputs(*rows_of(meta))
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    out = checkpoint(varlen_attention, q, k, v, meta, use_reentrant=reentrant)
    out.backward(inputs.dout)
    expected = run(inputs, meta)
    assert_near((out.detach(), q.grad, k.grad, v.grad), (expected.out, *expected[2:]), torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_from_inference_mode_serves_training(kind: str) -> None:
    with torch.inference_mode():
        meta = KINDS[kind]()
        inputs = make_inputs(*rows_of(meta))
        varlen_attention(*inputs[:3], meta)
    inputs = make_inputs(*rows_of(meta))
    assert_near(run(inputs, meta), oracle(inputs, meta.materialize()), torch.float64)


class Prepares(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        meta = prepare_varlen(q.shape[0], q.shape[1], k.shape[1], mask, max_seqlen_k=k.shape[1])
        return varlen_attention(q, k, k, meta)


class Takes(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, meta: VarlenMetadata) -> Tensor:
        return varlen_attention(q, k, k, meta)


@pytest.mark.parametrize("strict", [False, True])
def test_module_that_prepares_exports_with_dynamic_sizes(strict: bool) -> None:
    def sample(batch: int, seq_q: int, seq_kv: int) -> tuple[Tensor, ...]:
        q, k, *_ = make_inputs((batch, seq_q), (batch, seq_kv))
        return q, k, make_mask("holes", batch, seq_kv, seed=batch)

    batch, seq_q, seq_kv = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "seq_q", "seq_kv"))
    shapes = ({0: batch, 1: seq_q}, {0: batch, 1: seq_kv}, {0: batch, 1: seq_kv})
    program = torch.export.export(Prepares(), sample(3, 5, 7), dynamic_shapes=shapes, strict=strict)
    for sizes in ((3, 5, 7), (5, 9, 4), (2, 2, 11)):
        assert_near(program.module()(*sample(*sizes)), Prepares()(*sample(*sizes)), torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_module_that_takes_metadata_exports_saves_and_loads(kind: str) -> None:
    meta = KINDS[kind]()
    q, k, *_ = make_inputs(*rows_of(meta))
    program = torch.export.export(Takes(), (q, k, meta))
    assert_near(program.module()(q, k, meta), Takes()(q, k, meta), torch.float64)
    torch.export.save(program, buffer := io.BytesIO())
    buffer.seek(0)
    # The example inputs hold the class, which torch loads only when told that it is trusted.
    with torch.serialization.safe_globals([VarlenMetadata]):
        loaded = torch.export.load(buffer)
    assert_near(loaded.module()(q, k, meta), Takes()(q, k, meta), torch.float64)


def _captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


LENGTHS = [[16, 9, 12], [3, 1, 2], [16, 16, 16], [0, 0, 0], [0, 7, 16], [16, 9, 12]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rewrite", ["copy", "mask"])
@pytest.mark.parametrize("layout", ["packed", "in_place"])
def test_replay_follows_lengths_down_up_to_zero_and_back(layout: str, rewrite: str, dtype: torch.dtype) -> None:
    """`copy`: the graph reads metadata that `copy_` rewrites; `mask`: it prepares from a mask rewritten in place."""

    def mask_of(lengths: list[int]) -> Tensor:
        return torch.arange(16, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]

    prepare = functools.partial(prepare_varlen, 3, 16, 16, layout=layout, max_seqlen_k=16)
    mask = mask_of(LENGTHS[0])
    meta = prepare(mask, mask_q=mask)
    inputs = make_inputs((3, 16), (3, 16), dim=32, dtype=dtype, device="cuda")
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])

    def step() -> tuple[Tensor, ...]:
        used = meta if rewrite == "copy" else prepare(mask, mask_q=mask)
        out = varlen_attention(q, k, v, used, causal=True)
        return out, *torch.autograd.grad(out, (q, k, v), inputs.dout)

    graph, results = _captured(step)
    tensors = [leaf for leaf in pytree.tree_leaves(meta) if isinstance(leaf, Tensor)]
    addresses = [x.data_ptr() for x in tensors]
    for lengths in LENGTHS:
        fresh = mask_of(lengths)
        expected = run(inputs, prepare(fresh, mask_q=fresh), causal=True)
        if rewrite == "copy":
            meta.copy_(prepare(fresh, mask_q=fresh))
        else:
            mask.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        assert_near(tuple(x.detach() for x in results), (expected.out, *expected[2:]), dtype)
        assert not results[0][~fresh].any()
    assert [x.data_ptr() for x in tensors] == addresses


@pytest.mark.gpu
def test_replay_follows_packed_lengths_and_documents() -> None:
    meta = VarlenMetadata.from_lengths(torch.tensor([4, 4], device="cuda"), max_seqlen_q=8, capacity=3)
    inputs = make_inputs((8,), (8,), dim=32, dtype=torch.bfloat16, device="cuda")
    graph, out = _captured(lambda: varlen_attention(*inputs[:3], meta))
    for lengths in ([1, 7], [7, 1], [0, 3], [2, 2, 2], [8], [0]):
        other = VarlenMetadata.from_lengths(lengths, device="cuda")
        meta.copy_(other)
        graph.replay()
        assert_near(out, varlen_attention(*inputs[:3], other), torch.bfloat16)
        assert not out[sum(lengths) :].any()
    ids = torch.tensor([0, 0, 1, 1, 1, -1, -1, -1], device="cuda")
    graph, out = _captured(lambda: varlen_attention(*inputs[:3], VarlenMetadata.from_document_ids(ids, capacity=8)))
    for values in ([0] * 8, [0, 1, 2, 3, 4, 5, 6, 7], [-1] * 8, [5, 5, 5, 2, 2, 2, 2, -1]):
        ids.copy_(torch.tensor(values))
        graph.replay()
        assert_near(out, varlen_attention(*inputs[:3], VarlenMetadata.from_document_ids(ids)), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "bound"), [
    (lambda x: prepare_varlen(3, 4, 8, x > 0), "max_seqlen_k="),
    (lambda x: VarlenMetadata.from_lengths(x[0]), "max_seqlen_q="),
    (lambda x: VarlenMetadata.from_document_ids(x), "capacity="),
])  # fmt: skip
def test_exact_maximum_inside_a_capture_is_refused_and_names_the_bound(make: Callable[..., Any], bound: str) -> None:
    x = torch.arange(24, device="cuda").view(3, 8)
    make(x)
    graph = torch.cuda.CUDAGraph()
    with refuses(RuntimeError, "CUDA graph capture", bound, "before the capture"), torch.cuda.graph(graph):
        make(x)
    torch.cuda.synchronize()
    assert random(2, device="cuda").sum().isfinite(), "the context must still work"
