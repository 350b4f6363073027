"""The Triton kernels that read masks, those of `moves.pack_order` and `runs`, for GPUs; imported at their first use.

B rows, S padded length, R = B * S.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
"""Rows of a mask that one program counts and places."""
_FEW = 128
"""Up to so many tiles, about one per processor, each program counts all of them itself: one launch instead of two."""
_STEP = 4096
"""Counts, words of four rows or rows that one program looks at in one step."""


class _Fixed:
    """Launches a kernel of which Triton compiles one form for each `form`, whatever the other arguments are.

    Triton's own launch looks through all arguments for what the kernel could be specialised on, which costs the host
    more than the launch itself.
    """

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def __call__(self, form: tuple[Any, ...], programs: int, *args: Any) -> None:
        """`form` is the device and what of `args` is compiled into the kernel."""
        compiled = self._compiled.get(form)
        if compiled is None:
            self._compiled[form] = self._kernel[(programs,)](*args, num_warps=8)
        else:
            compiled[(programs, 1, 1)](*args)


def pack_order(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`moves.pack_order` for a mask (B, S) of any strides that is not empty."""
    batch, seq = mask.shape
    rows = batch * seq
    tiles = -(-rows // _TILE)
    cu_seqlens = mask.new_empty(batch + 1, dtype=torch.int32)
    order = mask.new_empty(rows, dtype=torch.int64)
    inverse = torch.empty_like(order)
    with torch.cuda.device_of(mask):
        flat = mask.contiguous()
        if flat.data_ptr() % 16 != 0:  # whole words are read
            flat = flat.clone()
        device, counts = mask.get_device(), None
        if tiles > _FEW:
            counts = mask.new_empty(tiles, dtype=torch.int32)
            _count_tiles((device,), tiles, flat, rows, counts, _TILE)
        few = counts is None
        _place_tiles((device, few), tiles, flat, rows, seq, counts, cu_seqlens, order, inverse, _TILE, _STEP)
    return cu_seqlens, order, inverse


@triton.jit(do_not_specialize=["rows"])
def _count(mask, rows: tl.int64, counts, TILE: tl.constexpr):  # noqa: N803
    """Valid rows of each tile."""
    tile = tl.program_id(0).to(tl.int64)
    row = tile * TILE + tl.arange(0, TILE)
    tl.store(counts + tile, tl.sum(tl.load(mask + row, mask=row < rows, other=0).to(tl.int32)))


@triton.jit(do_not_specialize=["rows", "seq"])
def _place(
    mask, rows: tl.int64, seq: tl.int64, counts, cu_seqlens, order, inverse,
    TILE: tl.constexpr, STEP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Where each row of a tile goes, from the counts of the tiles before it and of all tiles."""
    tile = tl.program_id(0).to(tl.int64)
    tiles = tl.num_programs(0)
    row = tile * TILE + tl.arange(0, TILE)
    inside = row < rows
    valid = tl.load(mask + row, mask=inside, other=0).to(tl.int32)
    if counts is None:
        before, total = _count_words(mask, rows.to(tl.int32), (tile * TILE).to(tl.int32), STEP)
    else:
        before, total = 0, 0
        for first in range(0, tiles, STEP):
            other = first + tl.arange(0, STEP)
            count = tl.load(counts + other, mask=other < tiles, other=0)
            total += tl.sum(count)
            before += tl.sum(tl.where(other < tile, count, 0))
    rank = before + tl.cumsum(valid, 0)
    place = tl.where(valid == 1, rank - 1, total + row - rank)
    tl.store(inverse + row, place, mask=inside)
    tl.store(order + place, row, mask=inside)
    # Counted from the beginning of the sequence in which the tile begins: such numbers fit into int32.
    end = (tile * TILE % seq).to(tl.int32) + 1 + tl.arange(0, TILE)
    length = seq.to(tl.int32)
    tl.store(cu_seqlens + tile * TILE // seq + end // length, rank, mask=inside & (end % length == 0))
    if tile == 0:
        tl.store(cu_seqlens, 0)


@triton.jit
def _count_words(mask, rows, limit, STEP: tl.constexpr):  # noqa: N803
    """Valid rows before `limit`, a multiple of 16, and in all of a mask, read in words of four rows.

    Each byte of a word is summed on its own, which holds for up to 255 steps.
    """
    words = mask.to(tl.pointer_type(tl.int32), bitcast=True)
    whole = rows // 16 * 4
    before = tl.zeros((STEP,), tl.int32)
    total = tl.zeros((STEP,), tl.int32)
    for first in tl.range(0, whole, STEP, loop_unroll_factor=4):
        word = first + tl.arange(0, STEP)
        value = tl.load(words + word, mask=word < whole, other=0)
        ones = ((((value & 0x7F7F7F7F) + 0x7F7F7F7F) | value) >> 7) & 0x01010101  # a True may be any byte but 0
        total += ones
        before += tl.where(word < limit // 4, ones, 0)
    row = whole * 4 + tl.arange(0, 16)
    rest = tl.load(mask + row, mask=row < rows, other=0).to(tl.int32)
    return _sum_bytes(before), _sum_bytes(total) + tl.sum(rest)


@triton.jit
def _sum_bytes(word):
    pairs = (word & 0x00FF00FF) + ((word >> 8) & 0x00FF00FF)
    return tl.sum((pairs & 0xFFFF) + (pairs >> 16))


_count_tiles, _place_tiles = _Fixed(_count), _Fixed(_place)


def in_place_offsets(
    mask_q: Tensor | None, mask_k: Tensor | None, seq_q: int, seq_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`runs.in_place_offsets` for masks of any strides that are not empty."""
    mask_q, mask_k = (x if x is None or x.stride(1) == 1 else x.contiguous() for x in (mask_q, mask_k))
    mask = mask_q if mask_q is not None else mask_k
    assert mask is not None
    cu_q = mask.new_empty(mask.shape[0] * (3 if mask_q is None or mask_k is None else 5) + 1, dtype=torch.int32)
    cu_k = torch.empty_like(cu_q)
    with torch.cuda.device_of(mask):
        one_run = mask.new_ones(2)
        _cut_rows(
            (mask.get_device(), mask_q is None, mask_k is None), mask.shape[0],
            mask_q, mask_k, 0 if mask_q is None else mask_q.stride(0), 0 if mask_k is None else mask_k.stride(0),
            seq_q, seq_k, cu_q, cu_k, one_run, _STEP,
        )  # fmt: skip
    return cu_q, cu_k, one_run


@triton.jit(
    do_not_specialize=["q_stride", "k_stride", "seq_q", "seq_k"],
    do_not_specialize_on_alignment=["mask_q", "mask_k"],
)
def _cut(
    mask_q, mask_k, q_stride: tl.int64, k_stride: tl.int64, seq_q: tl.int64, seq_k: tl.int64, cu_q, cu_k, one_run,
    STEP: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """The sequences of one padded row, of both sides."""
    row = tl.program_id(0).to(tl.int64)
    if mask_q is not None:
        start_q, end_q = _run(mask_q + row * q_stride, seq_q, one_run, STEP)
    if mask_k is not None:
        start_k, end_k = _run(mask_k + row * k_stride, seq_k, one_run + 1, STEP)
    if mask_k is None:
        _store(cu_q, row, seq_q, (0, start_q, end_q, seq_q))
        _store(cu_k, row, seq_k, (0, 0, seq_k, seq_k))
    elif mask_q is None:
        _store(cu_q, row, seq_q, (0, 0, seq_q, seq_q))
        _store(cu_k, row, seq_k, (0, start_k, end_k, seq_k))
    else:
        _store(cu_q, row, seq_q, (0, start_q, start_q, end_q, seq_q, seq_q))
        _store(cu_k, row, seq_k, (0, 0, start_k, end_k, end_k, seq_k))


@triton.jit
def _store(cu_seqlens, row, seq, places):
    """Where each sequence begins in its row, and where the last one ends, which is where the next row begins."""
    first = cu_seqlens + row * (len(places) - 1)
    for number in tl.static_range(len(places)):
        tl.store(first + number, row * seq + places[number])


@triton.jit
def _run(mask, seq, one_run, STEP: tl.constexpr):  # noqa: N803
    """First row and end of the run of a mask (seq,), 0 and 0 without a valid row; clears `one_run` at a hole."""
    start = tl.zeros((STEP,), tl.int64) + seq
    end = tl.zeros((STEP,), tl.int64)
    count = tl.zeros((STEP,), tl.int32)
    for first in range(0, seq, STEP):
        column = first + tl.arange(0, STEP)
        valid = tl.load(mask + column, mask=column < seq, other=0)
        start = tl.minimum(start, tl.where(valid, column, seq))
        end = tl.maximum(end, tl.where(valid, column + 1, 0))
        count += valid.to(tl.int32)
    rows = tl.sum(count)
    run_end = tl.max(end)
    run_start = tl.where(rows > 0, tl.min(start), 0)
    if run_end - run_start != rows:
        tl.store(one_run, False)
    return run_start, run_end


_cut_rows = _Fixed(_cut)
