"""The operators that move rows: `pack_order` finds where each goes, `gather_rows` takes them there, `keep_rows` clears
those that take no part.

B rows, S padded length, R = B * S.  Operators, because one Triton kernel does on a GPU what compiled torch code does at
a third of the speed: it reads only the rows that take part.  The torch code here is what runs everywhere else, and
what the kernels are tested against.

    varlen_prep::pack_order(mask) -> (cu_seqlens, order, inverse)
    varlen_prep::gather_rows(x, index, inverse, cu_seqlens, to_packed, fill, spare) -> rows
    varlen_prep::keep_rows(x, begin, end, fill, spare) -> rows
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._direct import differentiable, transformed, unwatched

_KERNEL_DTYPES = frozenset(
    {
        torch.bfloat16, torch.float16, torch.float32, torch.float64,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    }
)  # fmt: skip


def pack_order(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets of a bool (B, S) mask and the stable permutation that puts its valid rows first.

    Returns:
        `cu_seqlens` int32 (B + 1,); `order` int64 (R,), the padded row that each packed row holds; `inverse` int64
        (R,), the packed row of each padded row.
    """
    return _pack_order(mask) if unwatched(mask) else torch.ops.varlen_prep.pack_order(mask)


def gather_rows(
    x: Tensor, index: Tensor, inverse: Tensor, cu_seqlens: Tensor, to_packed: bool, fill: float, spare: int = -1
) -> Tensor:
    """`x[index]`, with `fill` in rows that take no part; its gradient is the gather by the inverse permutation.

    Args:
        x: (R, ...).
        index: int64 (R,), a permutation: `order` with `to_packed`, else `inverse`.
        inverse: int64 (R,), its inverse.
        cu_seqlens: int32 (N + 1,): packed rows from `cu_seqlens[-1]` on take no part.
        to_packed: whether the result, or x, is the packed one of the two.
        fill: what rows that take no part are filled with.
        spare: with `to_packed`, how many rows past the last offset are filled; the others may hold anything. -1: all.
    """
    if transformed(x):
        return torch_gather_rows(x, index, cu_seqlens, to_packed, fill)
    gather = torch.ops.varlen_prep.gather_rows
    rest = (index, inverse, cu_seqlens, to_packed, fill, spare)
    return differentiable(gather, _gather_rows, _save_indices, _gather_gradient, (x,), *rest)


def keep_rows(x: Tensor, begin: Tensor, end: Tensor, fill: float = 0, spare: int = -1) -> Tensor:
    """A copy of x with `fill` in rows that take no part, whatever they held; their gradients are 0.

    Args:
        x: (T, ...), n stretches of as many rows each.
        begin: int32 (n,): in each stretch the rows from `begin` to `end`, counted in x, take part.
        end: int32 (n,).
        fill: what the other rows are filled with (its default is no float: that would be traced as a tensor input).
        spare: how many rows after each run are filled; rows further from one may hold anything. -1: all.
    """
    if transformed(x):
        return torch_keep_rows(x, begin, end, fill)
    keep = torch.ops.varlen_prep.keep_rows
    return differentiable(keep, _keep_rows, _save_runs, _keep_gradient, (x,), begin, end, fill, spare)


@functools.cache
def has_triton() -> bool:
    """Whether Triton, part of torch's CUDA builds, is installed; it is not imported to find out."""
    return importlib.util.find_spec("triton") is not None


def _pack_order(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if mask.is_cuda and mask.numel() > 0 and has_triton():
        from . import _triton_masks

        return _triton_masks.pack_order(mask)
    return torch_pack_order(mask)


def _gather_rows(
    x: Tensor, index: Tensor, inverse: Tensor, cu_seqlens: Tensor, to_packed: bool, fill: float, spare: int = -1
) -> Tensor:
    if _has_kernel(x, fill):
        from . import _triton

        return _triton.gather_rows(x, index, cu_seqlens, to_packed, fill, spare)
    return torch_gather_rows(x, index, cu_seqlens, to_packed, fill)


def _keep_rows(x: Tensor, begin: Tensor, end: Tensor, fill: float, spare: int = -1) -> Tensor:
    if _has_kernel(x, fill):
        from . import _triton

        return _triton.keep_rows(x, begin, end, fill, spare)
    return torch_keep_rows(x, begin, end, fill)


def _has_kernel(x: Tensor, fill: float) -> bool:
    # Triton takes a float as float32.
    exact = x.dtype != torch.float64 or fill in (0, math.inf, -math.inf)
    return x.is_cuda and x.numel() > 0 and x.dtype in _KERNEL_DTYPES and exact and has_triton()


def torch_pack_order(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`pack_order` in torch."""
    batch, seq = mask.shape
    valid = mask.flatten()
    rank = valid.cumsum(0)
    counts = rank.view(batch, seq)[:, -1] if batch * seq > 0 else rank.new_zeros(batch)
    return from_counts(counts), *permutation(valid, rank)


def from_counts(counts: Tensor) -> Tensor:
    """int32 (N + 1,) offsets from an inclusive cumulative sum, ints (N,)."""
    cu_seqlens = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
    cu_seqlens[1:] = counts
    return cu_seqlens


def permutation(valid: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    """The stable permutation that puts valid rows first.

    Args:
        valid: bool (R,), True for rows that take part.
        rank: int64 (R,), inclusive cumulative sum of `valid`.

    Returns:
        `(order, inverse)`, int64 (R,) each: packed row r is padded row `order[r]`, padded row i is packed row
        `inverse[i]`.
    """
    index = torch.arange(rank.shape[0], device=rank.device)
    if rank.shape[0] == 0:
        return index, index.clone()
    inverse = torch.where(valid, rank - 1, rank[-1] + index - rank)
    return torch.empty_like(inverse).scatter_(0, inverse, index), inverse


def torch_gather_rows(x: Tensor, index: Tensor, cu_seqlens: Tensor, to_packed: bool, fill: float) -> Tensor:
    """`gather_rows` in torch, without its gradient."""
    drop = past_end(cu_seqlens, index.shape[0]) if to_packed else index >= cu_seqlens[-1]
    return x.index_select(0, index).masked_fill_(by_row(drop, x), fill)


def torch_keep_rows(x: Tensor, begin: Tensor, end: Tensor, fill: float) -> Tensor:
    """`keep_rows` in torch, without its gradient."""
    return x.masked_fill(by_row(outside(begin, end, x.shape[0]), x), fill)


def outside(begin: Tensor, end: Tensor, rows: int) -> Tensor:
    """bool (rows,): True for rows outside the runs that `keep_rows` keeps."""
    index = torch.arange(rows, device=begin.device).view(begin.shape[0], -1)
    return ((index < begin[:, None]) | (index >= end[:, None])).flatten()


def past_end(cu_seqlens: Tensor, rows: int) -> Tensor:
    """bool (rows,): True past the last offset."""
    return torch.arange(rows, device=cu_seqlens.device) >= cu_seqlens[-1]


def by_row(drop: Tensor, x: Tensor) -> Tensor:
    """A row mask shaped to broadcast over the trailing dimensions of x."""
    return drop.view(-1, *([1] * (x.ndim - 1)))


def _fake_pack_order(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = mask.shape[0] * mask.shape[1]
    order = mask.new_empty(rows, dtype=torch.int64)
    return mask.new_empty(mask.shape[0] + 1, dtype=torch.int32), order, torch.empty_like(order)


def _fake_gather_rows(x: Tensor, index: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(index.shape[0], *x.shape[1:])


def _save_indices(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, index, inverse, cu_seqlens, to_packed, *_ = inputs
    ctx.save_for_backward(index, inverse, cu_seqlens)
    ctx.to_packed = to_packed


def _gather_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    index, inverse, cu_seqlens = ctx.saved_tensors
    return gather_rows(grad, inverse, index, cu_seqlens, not ctx.to_packed, 0.0), *[None] * 6


def _fake_keep_rows(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _save_runs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _keep_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return keep_rows(grad, *ctx.saved_tensors), *[None] * 4


_GATHER = (
    "(Tensor x, Tensor index, Tensor inverse, Tensor cu_seqlens, bool to_packed, Scalar fill, int spare=-1) -> Tensor"
)
_KEEP = "(Tensor x, Tensor begin, Tensor end, Scalar fill, int spare=-1) -> Tensor"


def define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Defines an operator that is opaque to compilers; it has no gradient yet."""
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    # Not to be traced into, where an operator is called from a frame that runs eagerly after a graph break.
    torch.library.impl(name, "CompositeExplicitAutograd", torch._disable_dynamo(kernel))
    torch.library.register_fake(name, fake)


define("varlen_prep::pack_order", "(Tensor mask) -> (Tensor, Tensor, Tensor)", _pack_order, _fake_pack_order)
define("varlen_prep::gather_rows", _GATHER, _gather_rows, _fake_gather_rows)
define("varlen_prep::keep_rows", _KEEP, _keep_rows, _fake_keep_rows)
torch.library.register_autograd("varlen_prep::gather_rows", _gather_gradient, setup_context=_save_indices)
torch.library.register_autograd("varlen_prep::keep_rows", _keep_gradient, setup_context=_save_runs)
