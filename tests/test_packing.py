"""`pack` and `unpack`: the permutation, rows that take no part, gradients, and where nothing moves."""

from __future__ import annotations

import pytest
import torch
from helpers import MASK_KINDS, assert_bit_equal, make_mask, random, refuses, says_to_clone

from varlen_prep import VarlenMetadata, pack, prepare_varlen, unpack


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (3, 17), (1, 64)])
def test_pack_equals_boolean_indexing_then_zeros(kind: str, batch: int, seq: int, device: str) -> None:
    mask = make_mask(kind, batch, seq, device=device)
    meta = prepare_varlen(batch, 2, seq, mask)
    x = random(batch, seq, 3, 2, device=device)
    packed, total = pack(x, meta, "k"), int(mask.sum())
    assert_bit_equal(packed[:total], x[mask])
    assert not packed[total:].any()
    assert packed.shape == (batch * seq, 3, 2)


@pytest.mark.parametrize("kind", MASK_KINDS)
def test_order_and_inverse_are_inverse_permutations(kind: str, device: str) -> None:
    mask = make_mask(kind, 3, 17, device=device)
    meta = prepare_varlen(3, 17, 17, mask, mask_q=mask)
    for order, inverse in ((meta.order_q, meta.inverse_q), (meta.order_k, meta.inverse_k)):
        assert order.dtype == inverse.dtype == torch.int64
        assert sorted(order.tolist()) == list(range(51))
        assert_bit_equal(order[inverse], torch.arange(51, device=device))
        for rows in (order[: int(mask.sum())], order[int(mask.sum()) :]):
            assert rows.tolist() == sorted(rows.tolist()), "stable: no two rows change places"


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize("fill", [0.0, -1.0, -torch.inf])
def test_unpack_puts_rows_back_and_fills_the_others(kind: str, fill: float, device: str) -> None:
    mask = make_mask(kind, 3, 17, device=device)
    x = random(3, 17, 2, device=device)
    for layout in ("packed",) if kind == "holes" else ("packed", "in_place"):
        meta = prepare_varlen(3, 2, 17, mask, layout=layout)
        assert_bit_equal(unpack(pack(x, meta, "k"), meta, "k", fill=fill), x.masked_fill(~mask[..., None], fill))


@pytest.mark.parametrize("kind", MASK_KINDS)
def test_gradients_of_rows_that_take_no_part_are_zero_under_nan(kind: str, device: str) -> None:
    mask = make_mask(kind, 3, 17, device=device)
    meta = prepare_varlen(3, 2, 17, mask)
    total = int(mask.sum())
    tail = torch.arange(51, device=device)[:, None] >= total
    x = random(3, 17, 2, device=device).masked_fill_(~mask[..., None], torch.nan).requires_grad_()
    gradient = random(51, 2, device=device, seed=1).masked_fill(tail, torch.nan)
    packed = pack(x, meta, "k")
    packed.backward(gradient)
    assert packed.isfinite().all()
    assert_bit_equal(x.grad[mask], gradient[:total])
    assert not x.grad[~mask].any()
    rows = random(51, 2, device=device).masked_fill_(tail, torch.nan).requires_grad_()
    gradient = random(3, 17, 2, device=device, seed=1).masked_fill(~mask[..., None], torch.nan)
    unpacked = unpack(rows, meta, "k")
    unpacked.backward(gradient)
    assert unpacked.isfinite().all()
    assert_bit_equal(rows.grad[:total], gradient[mask])
    assert not rows.grad[total:].any()


def test_gradients_and_second_gradients_are_right() -> None:
    meta = prepare_varlen(2, 2, 5, make_mask("holes", 2, 5))
    x = random(2, 5, 2).requires_grad_()
    rows = random(10, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: pack(x, meta, "k"), x)
    assert torch.autograd.gradcheck(lambda rows: unpack(rows, meta, "k", fill=-1.0), rows)
    assert torch.autograd.gradgradcheck(lambda x: pack(x, meta, "k"), x)


def test_backward_uses_no_atomics(device: str) -> None:
    """torch refuses kernels without a deterministic form in this mode; `put_` is the twin that trips it."""
    meta = prepare_varlen(3, 2, 17, make_mask("holes", 3, 17, device=device))
    x = random(3, 17, 2, device=device).requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        (unpack(pack(x, meta, "k"), meta, "k") ** 2).sum().backward()
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.zeros(3, device=device).put_(torch.tensor([0, 0], device=device), torch.ones(2, device=device))
    finally:
        torch.use_deterministic_algorithms(False)
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float16, torch.complex64])
def test_any_dtype_is_moved(dtype: torch.dtype, device: str) -> None:
    mask = torch.tensor([[True, False, True, True]], device=device)
    meta = prepare_varlen(1, 2, 4, mask)
    x = torch.tensor([[1, 0, 1, 1]], device=device).to(dtype)
    assert_bit_equal(unpack(pack(x, meta, "k"), meta, "k"), x)


def test_nothing_moves_without_a_mask_and_in_place(device: str) -> None:
    mask = make_mask("middle", 3, 8, device=device)
    x = random(3, 8, 2, device=device)
    for meta in (
        prepare_varlen(3, 8, 8, device=device),
        prepare_varlen(3, 8, 8, mask, layout="in_place"),
        VarlenMetadata.from_position_ids(torch.arange(24, device=device).view(3, 8)),
    ):
        assert pack(x, meta, "k").data_ptr() == x.data_ptr()
    meta = prepare_varlen(3, 8, 8, mask)
    assert pack(x, meta, "q").data_ptr() == x.data_ptr()
    assert pack(x, meta, "k").data_ptr() != x.data_ptr()


def test_wrong_shapes_and_sides_are_refused_with_their_text() -> None:
    meta = prepare_varlen(2, 3, 4, make_mask("holes", 2, 4))
    with refuses(ValueError, "x", "(2, 4, ...)", "'k'", "(2, 3, 5)"):
        pack(torch.zeros(2, 3, 5), meta, "k")
    with refuses(ValueError, "x", "(8, ...)", "'k'", "(6, 5)"):
        unpack(torch.zeros(6, 5), meta, "k")
    with refuses(ValueError, "side", "'q' or 'k'", "'keys'"):
        pack(torch.zeros(2, 4, 5), meta, "keys")
    with refuses(ValueError, "side", "'q' or 'k'", "'keys'"):
        meta.runs("keys", 6)
    with refuses(ValueError, "packed rows", "no padded shape"):
        pack(torch.zeros(2, 4, 5), VarlenMetadata.from_lengths([3, 2]), "q")


def test_metadata_from_inference_mode_packs_for_training_or_says_what_to_do() -> None:
    mask = make_mask("holes", 2, 4)
    with torch.inference_mode():
        meta = prepare_varlen(2, 3, 4, mask)
    x = random(2, 4, 1).requires_grad_()
    grads = says_to_clone(lambda: torch.autograd.grad(pack(x, meta, "k").sum(), x))
    if grads is not None:
        assert_bit_equal(grads[0], mask[..., None].double())
