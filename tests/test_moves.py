"""The operators that move rows: torch's checks, and the Triton kernels against the torch code."""

from __future__ import annotations

import pytest
import torch
from helpers import MASK_KINDS, make_mask, random

from varlen_prep import moves

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)


def runs(batch: int, seq: int, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """One run in each stretch of `seq` rows, some of them empty, as strided views of offsets."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(seq + 1, (batch, 2), generator=generator).sort(1).values + torch.arange(batch)[:, None] * seq
    ends = ends.int().to(device)
    return ends[:, 0], ends[:, 1]


def permutation_of(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ops.varlen_prep.pack_order(mask)


@pytest.mark.parametrize("kind", MASK_KINDS)
def test_order_is_the_stable_permutation_with_valid_rows_first(device, kind):
    mask = make_mask(kind, 5, 37, device=device)
    cu_seqlens, order, inverse = permutation_of(mask)
    valid = mask.flatten().cpu()
    index = torch.arange(valid.shape[0])
    assert order.cpu().tolist() == index[valid].tolist() + index[~valid].tolist()
    assert order[inverse].cpu().tolist() == index.tolist()
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.cpu().tolist() == [0, *mask.sum(1).cumsum(0).tolist()]


def test_opcheck(device):
    mask = make_mask("holes", 3, 7, device=device)
    cu_seqlens, order, inverse = permutation_of(mask)
    x = random(21, 2, 4, device=device).requires_grad_()
    torch.library.opcheck(torch.ops.varlen_prep.pack_order.default, (mask,))
    for index, back, to_packed in ((order, inverse, True), (inverse, order, False)):
        torch.library.opcheck(torch.ops.varlen_prep.gather_rows.default, (x, index, back, cu_seqlens, to_packed, 0.0))
    torch.library.opcheck(torch.ops.varlen_prep.keep_rows.default, (x, *runs(3, 7, device), 0.0))


def test_gradients_are_those_of_the_numbers(device):
    mask = make_mask("holes", 3, 4, device=device)
    cu_seqlens, order, inverse = permutation_of(mask)
    x = random(12, 3, device=device).requires_grad_()
    for index, back, to_packed in ((order, inverse, True), (inverse, order, False)):
        assert torch.autograd.gradcheck(
            lambda x, i=index, b=back, p=to_packed: moves.gather_rows(x, i, b, cu_seqlens, p, 0.0), (x,)
        )


def test_only_rows_in_runs_are_kept_and_get_gradients(device):
    x = random(21, 3, device=device).requires_grad_()
    begin, end = runs(3, 7, device)
    index = torch.arange(21, device=device)
    part = torch.stack([(index >= b) & (index < e) for b, e in zip(begin, end, strict=True)]).any(0)
    out = moves.keep_rows(x, begin, end, -torch.inf)
    assert torch.equal(out[part], x[part])
    assert (out[~part] == -torch.inf).all()
    assert torch.equal(torch.autograd.grad(out, x, torch.ones_like(out))[0][:, 0].bool(), part)
    assert torch.autograd.gradcheck(lambda x: moves.keep_rows(x, begin, end), (x.detach().double().requires_grad_(),))
    poisoned = x.detach().masked_fill(~part[:, None], torch.nan)
    assert torch.equal(moves.keep_rows(poisoned, begin, end), x.detach().masked_fill(~part[:, None], 0))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty_batches(device, shape):
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    cu_seqlens, order, inverse = permutation_of(mask)
    assert cu_seqlens.tolist() == [0] * (shape[0] + 1)
    assert order.shape == inverse.shape == (0,)
    assert moves.gather_rows(torch.ones(0, 2, device=device), order, inverse, cu_seqlens, True, 0.0).shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "seq"), [
    (1, 1), (3, 7), (1, 15), (1, 4095), (1, 4096), (1, 4097), (5, 4099), (4, 4608), (64, 100), (256, 16), (5000, 1),
    (700, 513), (64, 4096), (2, 100_000), (1, 2**19 - 1), (1, 2**19), (1, 2**19 + 1), (3, 700_001),
])  # fmt: skip
def test_the_triton_order_equals_torch(batch, seq):
    """On both sides of 2**19 rows, from which on the rows are counted by a kernel of its own."""
    pytest.importorskip("triton")
    holes = make_mask("holes", batch, seq, device="cuda")
    masks = [make_mask(kind, batch, seq, seed=1, device="cuda") for kind in MASK_KINDS]
    masks += [holes[:1].expand(batch, seq), holes[:, :1].expand(batch, seq), holes.T.contiguous().T]
    wide = make_mask("holes", batch, seq + 3, device="cuda")
    masks += [wide[:, 1:-2], wide.flatten()[3 : 3 + batch * seq].view(batch, seq)]  # the last begins within a word
    for mask in masks:
        for got, expected in zip(permutation_of(mask), moves.torch_pack_order(mask), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.gpu
def test_a_true_may_be_any_byte_but_0():
    pytest.importorskip("triton")
    codes = torch.randint(256, (3, 5001), dtype=torch.uint8, device="cuda").masked_fill_(
        make_mask("holes", 3, 5001, device="cuda"), 0
    )
    for got, expected in zip(permutation_of(codes.view(torch.bool)), moves.torch_pack_order(codes != 0), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.gpu
def test_masks_of_all_sizes_share_a_kernel():
    """What Triton itself picks for each of them is one and the same, so it may be launched without asking again."""
    pytest.importorskip("triton")
    from varlen_prep import _triton_masks

    kernels = set()
    for batch, seq in ((1, 1), (1, 16), (4, 128), (16, 1), (3, 4097)):
        _triton_masks._place_tiles._compiled.clear()
        moves.pack_order(torch.ones(batch, seq, dtype=torch.bool, device="cuda"))
        kernels.update(_triton_masks._place_tiles._compiled.values())
    assert len(kernels) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [(), (1,), (7,), (24, 128), (1, 5000)])
def test_the_triton_gather_equals_torch(dtype, columns):
    mask = make_mask("holes", 5, 203, device="cuda")
    cu_seqlens, order, inverse = permutation_of(mask)
    x = (random(1015, *columns, device="cuda") * 9).to(dtype)
    strided = (random(1015, 3, *columns, device="cuda") * 9).to(dtype)[:, 1]
    fills = (0.0, -torch.inf) if dtype.is_floating_point else (0.0,)
    for rows in (x, strided):
        for index, to_packed in ((order, True), (inverse, False)):
            for fill in fills:
                got = torch.ops.varlen_prep.gather_rows(rows, index, index, cu_seqlens, to_packed, fill)
                assert torch.equal(got, moves.torch_gather_rows(rows, index, cu_seqlens, to_packed, fill))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [(), (1,), (7,), (24, 128), (1, 5000)])
def test_the_triton_runs_equal_torch(dtype, columns):
    begin, end = runs(5, 203, "cuda")
    x = (random(1015, *columns, device="cuda") * 9).to(dtype)
    strided = (random(1015, 3, *columns, device="cuda") * 9).to(dtype)[:, 1]
    for rows in (x, strided):
        for some in ((begin, end), (begin[:1], end[-1:])):
            for fill in (0, -torch.inf) if dtype.is_floating_point else (0, 1, 3):
                got = torch.ops.varlen_prep.keep_rows(rows, *some, fill)
                assert torch.equal(got, moves.torch_keep_rows(rows, *some, fill))


@pytest.mark.gpu
@pytest.mark.parametrize("spare", [0, 1, 60, 500])
def test_rows_near_a_run_are_filled_and_the_others_are_not_written(spare):
    """Those far away keep what the memory held, so a kernel that read them would be seen."""
    begin, end = runs(5, 203, "cuda")
    x = torch.full((1015, 40), torch.nan, device="cuda").masked_fill(~moves.outside(begin, end, 1015)[:, None], 2)
    index = torch.arange(1015, device="cuda")
    near = torch.zeros(1015, dtype=torch.bool, device="cuda")
    for b, e in zip(begin.tolist(), end.tolist(), strict=True):
        near |= (index >= b) & (index < e + spare)
    got = moves.keep_rows(x, begin, end, 0.0, spare)
    assert torch.equal(got[near], moves.torch_keep_rows(x, begin, end, 0.0)[near])
    cu_seqlens, order, inverse = permutation_of(make_mask("holes", 5, 203, device="cuda"))
    valid = int(cu_seqlens[-1])
    packed = moves.gather_rows(torch.ones(1015, 40, device="cuda"), order, inverse, cu_seqlens, True, 0.0, spare)
    assert packed[:valid].eq(1).all()
    assert not packed[valid : valid + spare].any()


@pytest.mark.gpu
def test_the_gather_does_not_read_rows_that_take_no_part_and_reaches_past_2_to_31():
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free memory")
    mask = torch.ones(1, 2**20 + 3, dtype=torch.bool, device="cuda")
    mask[0, 5:-4] = False
    cu_seqlens, order, inverse = permutation_of(mask)
    x = torch.full((mask.shape[1], 2100), torch.nan, dtype=torch.bfloat16, device="cuda")
    x[mask[0]] = torch.arange(9, dtype=torch.bfloat16, device="cuda")[:, None]
    packed = moves.gather_rows(x, order, inverse, cu_seqlens, True, 0.0)
    assert packed[:9, [0, -1]].tolist() == [[i, i] for i in range(9)]
    assert not packed[9:].any()
    back = moves.gather_rows(packed, inverse, order, cu_seqlens, False, 0.0)
    assert torch.equal(back[-4:, -1].cpu(), torch.arange(5, 9, dtype=torch.bfloat16))
