"""The operator of the in_place layout: against plain loops, torch's checks, and Triton against torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import MASK_KINDS, ONE_RUN, Recorder, make_mask
from torch import Tensor

from varlen_prep import prepare_varlen, runs

SIDES = ("q", "k", "both")


def masks_of(sides: str, mask_q: Tensor, mask_k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return mask_q if sides != "k" else None, mask_k if sides != "q" else None


def cuts(mask: Tensor | None) -> list[tuple[int, int]]:
    """First row and end of the run of each row, from the bits."""
    found = []
    for row in mask.tolist() if mask is not None else []:
        bits = [index for index, seen in enumerate(row) if seen] or [0]
        found.append((bits[0], bits[-1] + 1) if any(row) else (0, 0))
    return found


def expected_offsets(mask_q: Tensor | None, mask_k: Tensor | None, seq_q: int, seq_k: int) -> list[list[int]]:
    """What `in_place_offsets` returns for masks without holes, row by row."""
    batch = (mask_q if mask_q is not None else mask_k).shape[0]
    cu_q, cu_k = [0], [0]
    for row in range(batch):
        if mask_q is None:
            begin, end = cuts(mask_k)[row]
            lengths = [(0, begin), (seq_q, end - begin), (0, seq_k - end)]
        elif mask_k is None:
            begin, end = cuts(mask_q)[row]
            lengths = [(begin, 0), (end - begin, seq_k), (seq_q - end, 0)]
        else:
            (begin_q, end_q), (begin_k, end_k) = cuts(mask_q)[row], cuts(mask_k)[row]
            lengths = [(begin_q, 0), (0, begin_k), (end_q - begin_q, end_k - begin_k), (seq_q - end_q, 0)]
            lengths += [(0, seq_k - end_k)]
        for q, k in lengths:
            cu_q.append(cu_q[-1] + q)
            cu_k.append(cu_k[-1] + k)
    return [cu_q, cu_k, [True, True]]


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("kind", ONE_RUN)
def test_offsets_cut_each_row_into_gap_run_and_gap(kind: str, sides: str, device: str) -> None:
    mask_q, mask_k = make_mask(kind, 5, 9, seed=1, device=device), make_mask(kind, 5, 37, seed=2, device=device)
    masks = masks_of(sides, mask_q, mask_k)
    got = torch.ops.varlen_prep.in_place_offsets(*masks, 9, 37)
    assert [x.dtype for x in got] == [torch.int32, torch.int32, torch.bool]
    assert [x.tolist() for x in got] == expected_offsets(*masks, 9, 37)


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("hole", [(0, 1), (4, 7)])
def test_a_hole_is_flagged_on_its_side(hole: tuple[int, int], sides: str, device: str) -> None:
    masks = masks_of(sides, *torch.ones(2, 5, 9, dtype=torch.bool, device=device))
    for side, mask in enumerate(masks):
        if mask is not None:
            mask[hole] = False
            one_run = runs.in_place_offsets(*masks, 9, 9)[2].tolist()
            assert one_run == [side != 0, side != 1]
            mask[hole] = True


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("shape", [(0, 5, 7), (3, 0, 7), (3, 5, 0), (3, 0, 0), (1, 1, 1)])
def test_empty_and_single_sizes(shape: tuple[int, int, int], sides: str, device: str) -> None:
    batch, seq_q, seq_k = shape
    ones = torch.ones(batch, max(seq_q, seq_k), dtype=torch.bool, device=device)
    masks = masks_of(sides, ones[:, :seq_q], ones[:, :seq_k])
    got = runs.in_place_offsets(*masks, seq_q, seq_k)
    assert [x.tolist() for x in got] == expected_offsets(*masks, seq_q, seq_k)


@pytest.mark.parametrize("sides", SIDES)
def test_opcheck(sides: str, device: str) -> None:
    masks = masks_of(sides, make_mask("left", 3, 7, device=device), make_mask("middle", 3, 9, device=device))
    torch.library.opcheck(torch.ops.varlen_prep.in_place_offsets.default, (*masks, 7, 9))


def test_compiled_metadata_is_the_operator_and_its_assert() -> None:
    recorder = Recorder()
    compiled = torch.compile(
        lambda mask: prepare_varlen(mask.shape[0], 4, mask.shape[1], mask, layout="in_place").cu_seqlens_k,
        backend=recorder, fullgraph=True, dynamic=True,
    )  # fmt: skip
    for batch, seq in ((3, 5), (2, 9)):
        mask = make_mask("right", batch, seq)
        assert torch.equal(compiled(mask), prepare_varlen(batch, 4, seq, mask, layout="in_place").cu_seqlens_k)
    assert recorder.compiles == 1
    kernels = [name for name in recorder.operators if name.startswith(("aten", "varlen_prep"))]
    kernels = [name for name in kernels if name != "aten._assert_scalar.default"]  # of host sizes
    assert kernels == ["varlen_prep.in_place_offsets.default", "aten.select.int", "aten._assert_async.msg"]


@pytest.mark.gpu
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize(("batch", "seq_q", "seq_k"), [
    (1, 1, 1), (3, 7, 9), (256, 33, 1), (4, 4095, 4096), (2, 4097, 8192), (64, 100, 8193), (1, 5, 300_001),
])  # fmt: skip
def test_the_triton_cuts_equal_torch(batch: int, seq_q: int, seq_k: int, sides: str) -> None:
    pytest.importorskip("triton")
    for seed, (kind_q, kind_k) in enumerate(itertools.product(MASK_KINDS, repeat=2)):
        wide_q = make_mask(kind_q, batch, seq_q + 3, seed=seed, device="cuda")
        wide_k = make_mask(kind_k, batch, seq_k + 3, seed=seed + 100, device="cuda")
        for mask_q, mask_k in (
            (wide_q[:, :seq_q], wide_k[:, 3:]),  # rows that do not follow each other, and begin anywhere
            (wide_q[:1, :seq_q].expand(batch, seq_q), wide_k[:, :1].expand(batch, seq_k)),
            (wide_q.T.contiguous().T[:, :seq_q], wide_k[:, :seq_k].contiguous()),
        ):
            masks = masks_of(sides, mask_q, mask_k)
            got = torch.ops.varlen_prep.in_place_offsets(*masks, seq_q, seq_k)
            for one, expected in zip(got, runs.torch_in_place_offsets(*masks, seq_q, seq_k), strict=True):
                assert one.dtype == expected.dtype
                assert torch.equal(one, expected)
