"""The Triton kernels of `moves` that move rows, for GPUs; imported at their first use.

R = B * S rows of a padded batch.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096
"""Elements that one program moves."""


def gather_rows(x: Tensor, index: Tensor, cu_seqlens: Tensor, to_packed: bool, fill: float, spare: int) -> Tensor:
    """`moves.gather_rows` for x (R, ...) that is not empty."""
    rows = index.shape[0]
    flat, columns, sizes, grid = _tiles(x, rows)
    out = x.new_empty(rows, *x.shape[1:])
    with torch.cuda.device_of(x):
        _gather[grid](
            flat, index, cu_seqlens, out, rows, columns, flat.stride(0), cu_seqlens.shape[0] - 1, _as(x, fill),
            rows if spare < 0 or not to_packed else spare, TO_PACKED=to_packed, **sizes,
        )  # fmt: skip
    return out


def keep_rows(x: Tensor, begin: Tensor, end: Tensor, fill: float, spare: int) -> Tensor:
    """`moves.keep_rows` for x (T, ...) that is not empty."""
    rows = x.shape[0]
    flat, columns, sizes, grid = _tiles(x, rows)
    out = x.new_empty(x.shape)
    with torch.cuda.device_of(x):
        _keep[grid](
            flat, begin, end, out, rows, columns, flat.stride(0), rows // begin.shape[0], begin.stride(0),
            end.stride(0), _as(x, fill), rows if spare < 0 else spare, **sizes,
        )  # fmt: skip
    return out


def _as(x: Tensor, fill: float) -> float:
    """One type of number for each kind of dtype, so that no kernel is compiled twice."""
    return float(fill) if x.dtype.is_floating_point else int(fill)


def _tiles(x: Tensor, rows: int) -> tuple[Tensor, int, dict[str, int], tuple[int, int]]:
    """x as (R, columns), columns side by side; how many columns; the size of a tile, and how many tiles there are."""
    columns = math.prod(x.shape[1:])
    flat = x.reshape(x.shape[0], columns)
    flat = flat if columns == 1 or flat.stride(1) == 1 else flat.contiguous()
    width = min(triton.next_power_of_2(columns), 1024)
    height = _ELEMENTS // width
    return flat, columns, {"HEIGHT": height, "WIDTH": width}, (triton.cdiv(rows, height), triton.cdiv(columns, width))


@triton.jit
def _gather(
    x, index, cu_seqlens, out, rows, columns, x_stride, last, fill, spare,
    TO_PACKED: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    taking_part = tl.load(cu_seqlens + last)
    inside = row < rows
    if TO_PACKED:
        inside = inside & (row < taking_part + spare)
    source = tl.load(index + row, mask=inside, other=0)
    kept = inside & ((row if TO_PACKED else source) < taking_part)
    here = (column < columns)[None, :]
    values = tl.load(x + source[:, None] * x_stride + column[None, :], mask=kept[:, None] & here, other=fill)
    tl.store(out + row[:, None] * columns + column[None, :], values, mask=inside[:, None] & here)


@triton.jit
def _keep(
    x, begin, end, out, rows, columns, x_stride, stretch, begin_stride, end_stride, fill, spare,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = row < rows
    number = row // stretch
    first = tl.load(begin + number * begin_stride, mask=inside, other=0)
    last = tl.load(end + number * end_stride, mask=inside, other=0)
    kept = inside & (row >= first) & (row < last)
    # Near the end of this run, or near that of the one before, which may end with its stretch.
    near = ((row >= last) & (row < last + spare)) | (row - number * stretch < spare)
    here = (column < columns)[None, :]
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=kept[:, None] & here, other=fill)
    tl.store(out + row[:, None] * columns + column[None, :], values, mask=(kept | (inside & near))[:, None] & here)
