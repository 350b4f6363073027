"""Moves padded rows to the front and back: `pack` and `unpack`.

B rows, S padded length, R = B * S.  A permutation of all R rows is used instead of a list of the valid ones: its size
is known without reading the device, and the gradient of a gather by `order` is a gather by `inverse`, which needs no
atomics and is deterministic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ._direct import differentiates
from .moves import gather_rows, keep_rows

if TYPE_CHECKING:
    from .metadata import VarlenMetadata


class _ZeroGradientRows(torch.autograd.Function):
    """The identity, with gradients of dropped rows set to 0: no copy in the forward pass."""

    @staticmethod
    def forward(x: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return keep_rows(grad, *ctx.saved_tensors), None, None


def zero_gradient_rows(x: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """x unchanged; the gradients of rows that `keep_rows` would not keep are exactly 0."""
    return _ZeroGradientRows.apply(x, begin, end)


def _savable(meta: VarlenMetadata, x: Tensor) -> VarlenMetadata:
    """Metadata that autograd can save, where it has to."""
    return meta.trainable() if differentiates(x) else meta


def pack(x: Tensor, meta: VarlenMetadata, side: Literal["q", "k"]) -> Tensor:
    """Gathers padded rows into the order that the offsets describe.

    Args:
        x: `(batch, seq, ...)`, any dtype, on the metadata's device.
        meta: metadata whose `side` was prepared from these rows.
        side: "q" for queries, "k" for keys and values.

    Returns:
        `(batch * seq, ...)`: the rows that take part first, in their order; rows past `cu_seqlens[-1]` are exactly 0.
        Where no row moves (no mask on this side, `layout="in_place"`) it is x reshaped.  Differentiable and
        deterministic: the gradient is the gather by the inverse permutation, 0 for rows that take no part.

    Raises:
        ValueError: the metadata has no padded shape, or x has another one.

    Example:
        >>> import torch
        >>> from varlen_prep import pack, prepare_varlen, unpack
        >>> mask = torch.tensor([[False, True, True], [True, False, True]])
        >>> meta = prepare_varlen(2, 3, 3, mask)
        >>> x = torch.arange(6).view(2, 3, 1)
        >>> pack(x, meta, "k").flatten().tolist()
        [1, 2, 3, 5, 0, 0]
        >>> unpack(pack(x, meta, "k"), meta, "k").flatten().tolist()
        [0, 1, 2, 3, 0, 5]
    """
    return pack_rows(x, meta, side)


def pack_rows(x: Tensor, meta: VarlenMetadata, side: Literal["q", "k"], spare: int = -1) -> Tensor:
    """`pack`; with `spare`, only so many rows past the last offset are 0, and the others may hold anything."""
    batch, seq = meta.padded_shape(side)
    if x.ndim < 2 or x.shape[0] != batch or x.shape[1] != seq:
        raise ValueError(f"x: expected ({batch}, {seq}, ...) for side {side!r}, got {tuple(x.shape)}.")
    rows = x.flatten(0, 1)
    one = _savable(meta, x).side(side)
    if one.order is None or one.inverse is None:
        return rows
    return gather_rows(rows, one.order, one.inverse, one.cu_seqlens, True, 0.0, spare)


def unpack(x: Tensor, meta: VarlenMetadata, side: Literal["q", "k"], *, fill: float = 0) -> Tensor:
    """The inverse of `pack`: packed rows back to `(batch, seq, ...)`, with `fill` where a row takes no part.

    Args:
        x: `(batch * seq, ...)` rows in the order of `pack`.
        meta: the metadata that packed them.
        side: "q" for queries, "k" for keys and values.
        fill: value of the rows that take no part; their gradient is 0 whatever it is.

    Returns:
        `(batch, seq, ...)`.

    Raises:
        ValueError: the metadata has no padded shape, or x has another number of rows.
        TypeError: `fill` is a tensor.
    """
    batch, seq = meta.padded_shape(side)
    if x.ndim < 1 or x.shape[0] != batch * seq:
        raise ValueError(f"x: expected ({batch * seq}, ...) rows for side {side!r}, got {tuple(x.shape)}.")
    if isinstance(fill, Tensor):
        raise TypeError("fill: expected a number, got a tensor, which would be read from the device.")
    fill = fill.item() if hasattr(fill, "item") else fill  # of numpy
    meta = _savable(meta, x)
    one = meta.side(side)
    if one.order is not None and one.inverse is not None:
        x = gather_rows(x, one.inverse, one.order, one.cu_seqlens, False, fill)
    elif (runs := meta.runs(side)) is not None:
        x = keep_rows(x, *runs, fill)
    return x.unflatten(0, (batch, seq))
