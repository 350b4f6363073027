"""Inputs at the edges: tensors that both sides share, narrow types, modes of torch, sizes that would compile again."""

from __future__ import annotations

import pytest
import torch
from helpers import Recorder, assert_bit_equal, assert_near, make_inputs, oracle, random, refuses, run
from torch.utils._python_dispatch import TorchDispatchMode

from varlen_prep import VarlenMetadata, compat, pack, prepare_varlen, varlen_attention

MASK = torch.tensor([[True, False, True, True], [False, True, False, False]])


def test_shared_offsets_are_not_overwritten_by_ones_that_differ():
    shared = VarlenMetadata.from_lengths([3, 2], max_seqlen_q=8, capacity=3)
    other = VarlenMetadata.from_lengths([3, 2], [5, 1], max_seqlen_q=8, max_seqlen_k=8, capacity=3)
    with refuses(ValueError, "other", "share their offsets", "prepare both"):
        shared.copy_(other)
    masked = prepare_varlen(2, 4, 4, MASK, mask_q=MASK, max_seqlen_k=4)
    with refuses(ValueError, "share their offsets"):
        masked.copy_(prepare_varlen(2, 4, 4, MASK, mask_q=~MASK, max_seqlen_k=4))
    assert masked.cu_seqlens_q.tolist() == [0, 3, 4]


def test_an_exact_maximum_does_not_become_a_bound():
    exact = prepare_varlen(2, 4, 4, MASK)
    bound = prepare_varlen(2, 4, 4, MASK, max_seqlen_k=3)
    with refuses(ValueError, "exact 3"):
        exact.copy_(bound)


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 3), (3, 5), (4, 4)])
def test_one_mask_for_both_sides_is_broadcast_to_each(seq_q, seq_kv):
    mask = torch.ones(1, dtype=torch.bool)
    meta = prepare_varlen(2, seq_q, seq_kv, mask, mask_q=mask, max_seqlen_k=seq_kv)
    assert meta.cu_seqlens_q.tolist() == [0, seq_q, 2 * seq_q]
    assert meta.cu_seqlens_k.tolist() == [0, seq_kv, 2 * seq_kv]
    assert (meta.max_seqlen_q, meta.max_seqlen_k) == (seq_q, seq_kv)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_narrow_positions_do_not_wrap_around(dtype):
    first = min(torch.iinfo(dtype).max + 1, 300)
    positions = torch.cat([torch.arange(first), torch.arange(3)]).to(dtype)
    assert VarlenMetadata.from_position_ids(positions).cu_seqlens_q.tolist() == [0, first, first + 3]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int32])
def test_labels_of_any_integer_type_become_documents(dtype):
    labels = torch.tensor([[1, 1, 2, 0], [3, 0, 0, 0]]).to(dtype)
    with refuses(TypeError, "mask.long() - 1"):
        prepare_varlen(2, 4, 4, labels)
    meta = VarlenMetadata.from_document_ids(labels.long() - 1)
    assert meta.cu_seqlens_q.tolist() == [0, 2, 3, 4]
    assert VarlenMetadata.from_document_ids(labels).cu_seqlens_q.tolist() == [0, 2, 3, 4, 5, 8]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_forward_mode_differentiation_is_refused_not_zero(backend):
    x, meta = random(3, 1, 8), VarlenMetadata.from_lengths([3])
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda v: varlen_attention(x, x, v, meta, backend=backend), (x,), (torch.ones_like(x),))
    cu_seqlens = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: compat.flash_attn_varlen_func(q, x, x, cu_seqlens, cu_seqlens, 3, 3), (x,), (x,))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, lambda f: lambda x: torch.func.vjp(f, x)])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_functional_gradients_are_refused_by_name(backend, transform):
    """torch's own error tells the author of an operator what to do, not its user."""
    x, meta = random(3, 1, 8), VarlenMetadata.from_lengths([3])

    def loss(v):
        return varlen_attention(x, x, v, meta, backend=backend).sum()

    with refuses(NotImplementedError, "torch.autograd.grad"):
        transform(loss)(x)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_tensor_is_named(name):
    x = random(3, 1, 8)
    given = {"q": x, "k": x, "v": x, name: x.tolist()}
    with refuses(TypeError, f"{name}: expected a tensor, got list"):
        varlen_attention(**given, meta=VarlenMetadata.from_lengths([3]))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_autocast_changes_nothing(backend):
    inputs, meta = make_inputs((6,), (6,), dtype=torch.float32), VarlenMetadata.from_lengths([4, 2])
    with torch.autocast("cpu", torch.bfloat16):
        got = run(inputs, meta, backend=backend)
    assert got.lse.dtype == torch.float32
    assert_near(got, oracle(inputs, meta.materialize()), torch.float32)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_no_sequences_at_all_over_some_rows(backend):
    meta = VarlenMetadata.from_cu_seqlens([0], max_seqlen_q=4)
    got = run(make_inputs((3,), (3,)), meta, backend=backend)
    assert all((x == 0).all() for x in (got.out, got.dq, got.dk, got.dv))
    assert (got.lse == -torch.inf).all()


def test_offsets_of_inference_mode_on_one_side_train():
    x = random(5, 2, 8).requires_grad_()
    cu_q = torch.tensor([0, 3, 5], dtype=torch.int32)
    with torch.inference_mode():
        cu_k = cu_q.clone()
    (grad,) = torch.autograd.grad(compat.flash_attn_varlen_func(x, x, x, cu_q, cu_k, 3, 3).sum(), x)
    (expected,) = torch.autograd.grad(compat.flash_attn_varlen_func(x, x, x, cu_q, cu_q, 3, 3).sum(), x)
    assert_bit_equal(grad, expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_metadata_of_inference_mode_trains_in_compiled_code_after_trainable():
    x = random(2, 4, 2, 8).requires_grad_()
    with torch.inference_mode():
        meta = prepare_varlen(2, 4, 4, MASK, mask_q=MASK, max_seqlen_k=4)
    compiled = torch.compile(lambda x, m: varlen_attention(x, x, x, m), backend="aot_eager", fullgraph=True)
    (grad,) = torch.autograd.grad(compiled(x, meta.trainable()).sum(), x)
    (expected,) = torch.autograd.grad(varlen_attention(x, x, x, meta).sum(), x)
    assert_near(grad, expected, torch.float64)
    (packed,) = torch.autograd.grad(pack(x, meta, "k").sum(), x)
    assert_bit_equal(packed, MASK[..., None, None].expand_as(x).double())


def graphs(function, *calls):
    """How often `function` compiles over the calls, whose results must equal eager ones."""
    torch._dynamo.reset()
    recorder = Recorder()
    compiled = torch.compile(function, backend=recorder, fullgraph=True, dynamic=True)
    for call in calls:
        assert_bit_equal(compiled(*call), function(*call))
    return recorder.compiles


def test_a_fixed_bound_on_both_sides_of_the_length_is_one_graph():
    def offsets(mask):
        return prepare_varlen(*mask.shape, mask.shape[1], mask, max_seqlen_k=14).cu_seqlens_k

    masks = [torch.arange(seq) < torch.tensor([[3], [seq - 4], [seq - 9]]) for seq in (13, 15, 18)]
    assert graphs(offsets, *((mask,) for mask in masks)) == 1


def test_any_number_of_lengths_within_a_capacity_is_one_graph():
    def offsets(lengths):
        return VarlenMetadata.from_lengths(lengths, max_seqlen_q=9, capacity=12).cu_seqlens_q

    assert graphs(offsets, *((torch.arange(n),) for n in (5, 3, 2, 9, 10))) == 1


@pytest.mark.parametrize("constructor", [VarlenMetadata.from_document_ids, VarlenMetadata.from_position_ids])
def test_rows_of_two_ids_are_the_same_graph(constructor):
    def offsets(ids):
        return constructor(ids, capacity=40).cu_seqlens_q

    assert graphs(offsets, *((torch.arange(n).flip(0),) for n in (7, 2, 3))) == 1


def test_a_maximum_that_was_read_is_a_bound():
    def offsets(mask):
        first = prepare_varlen(*mask.shape, mask.shape[1], mask)
        again = prepare_varlen(*mask.shape, mask.shape[1], mask, max_seqlen_k=first.max_seqlen_k)
        longest = mask.sum(1).max().item()
        return again.cu_seqlens_k + VarlenMetadata.from_lengths(mask.sum(1), max_seqlen_q=longest).cu_seqlens_q

    assert graphs(offsets, (random(3, 7) > 0,), (random(4, 9) > 0,)) == 1


def test_moving_metadata_compiles_once():
    metas = [VarlenMetadata.from_lengths([n, 2], max_seqlen_q=20, capacity=4) for n in range(3, 8)]
    assert graphs(lambda meta: meta.to("cpu").cu_seqlens_q, *((meta,) for meta in metas)) == 1
    assert metas[0].to("cpu").cu_seqlens_q is not None


@pytest.mark.parametrize(("call", "kind", "fragments"), [
    (lambda: VarlenMetadata.from_document_ids([0, 0, 1]), TypeError, ("document_ids", "list", "torch.tensor")),
    (lambda: VarlenMetadata.from_position_ids([0, 1]), TypeError, ("position_ids", "list", "torch.tensor")),
    (lambda: VarlenMetadata.from_position_ids(torch.zeros(3, 1, 4).long(), axis=5), ValueError, ("axis", "3", "5")),
    (lambda: attend(softcap=-1.0), ValueError, ("softcap", "-1.0")),
    (lambda: attend(window_size=(1.9, 0)), ValueError, ("window_size", "(1.9, 0)")),
    (lambda: attend(dim=0), ValueError, ("head_dim", "at least 1")),
])  # fmt: skip
def test_unclear_input_has_a_clear_error(call, kind, fragments):
    with refuses(kind, *fragments):
        call()


def attend(dim: int = 8, **options):
    x = random(3, 2, dim)
    return varlen_attention(x, x, x, VarlenMetadata.from_lengths([3]), backend="reference", **options)


class Operators(TorchDispatchMode):
    """Names of the operators that run, in order; those inside of an operator do not show."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["in_place", "uniform"])
def test_where_no_row_moves_a_call_is_views_and_one_operator(layout):
    x = random(2, 4, 2, 8)
    run_of_true = torch.tensor([[True, True, False, False], [False, True, True, True]])
    mask, options = (run_of_true, {"layout": "in_place"}) if layout == "in_place" else (None, {})
    meta = prepare_varlen(2, 4, 4, mask, mask_q=mask, max_seqlen_k=4, **options)
    with torch.no_grad(), Operators() as operators:
        varlen_attention(x, x, x, meta, backend="native")
    views = ("aten.view", "aten._unsafe_view", "aten.alias", "aten.detach")
    assert [name for name in operators.names if not name.startswith(views)] == ["varlen_prep.native_varlen.default"]


def test_a_tail_is_cleared_once_without_gradients():
    x, meta = random(8, 2, 8), VarlenMetadata.from_lengths(torch.tensor([3, 2]), max_seqlen_q=4)
    with torch.no_grad(), Operators() as operators:
        varlen_attention(x, x, x, meta, backend="native")
    assert [name.split(".")[1] for name in operators.names].count("keep_rows") == 1
