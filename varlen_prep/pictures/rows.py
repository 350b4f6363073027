"""What each row of a metadata holds, on the host: the one read that a picture makes.

B rows, S padded length, T rows in the order that the kernel sees, N sequences.
"""

from __future__ import annotations

import string
from typing import NamedTuple

import torch
from torch import Tensor

from .. import dense
from ..metadata import VarlenMetadata
from ..moves import outside

PADDING = -1
"""Label of a row that takes no part."""
LETTERS = string.ascii_uppercase + string.ascii_lowercase


class Rows(NamedTuple):
    """One side of a metadata on the host. The label of a row is the number of its sequence, or `PADDING`.

    In the in_place layout the sequences that are gaps, or lie opposite one, do not count: the label is the padded row.
    """

    kernel: Tensor
    """int64 (T,): labels in the order that the kernel sees."""
    place: Tensor
    """int64 (T,): where the kernel sees each row of the padded order."""
    shape: tuple[int, int] | None
    """(B, S), or None for packed rows."""
    moved: bool
    """Whether the kernel's order is another one than that of the batch, or the batch has none."""
    offsets: Tensor
    """int64 (N + 1,)."""
    lengths: Tensor
    """int64, number of rows with each label."""

    @property
    def padded(self) -> Tensor:
        """int64 (T,): labels in the padded order, rows of the batch one after the other."""
        return self.kernel[self.place]


def unknown(meta: VarlenMetadata) -> str | None:
    """Why the values cannot be read now; None: they can."""
    offsets = meta.cu_seqlens_q
    if torch.compiler.is_compiling():
        return "the values are not known while tracing"
    if offsets.is_meta or type(offsets) is not Tensor:
        return f"the values are not known: the offsets are a {type(offsets).__name__} on {offsets.device}"
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        return "the values cannot be read while a CUDA graph is captured"
    return None


def on_host(meta: VarlenMetadata) -> VarlenMetadata:
    """The same metadata on the CPU: all tensors of a GPU come in one copy, the only one that waits for the device."""
    if meta.cu_seqlens_q.device.type == "cpu":
        return meta
    tensors: list[Tensor] = []

    def collect(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    meta._map(collect)
    copied = iter(torch.cat([x.long() for x in tensors]).cpu().split([x.shape[0] for x in tensors]))
    return meta._map(lambda x: next(copied).to(x.dtype))


def rows_of(meta: VarlenMetadata, side: str) -> Rows:
    """The rows of one side, "q" or "k", of a metadata on the host."""
    one = meta.side(side)
    offsets = one.cu_seqlens.long()
    shape = None if meta.batch is None else meta.padded_shape(side)
    total = shape[0] * shape[1] if shape else one.total if one.total is not None else int(offsets[-1])
    index = torch.arange(total, device="cpu")
    # In place, a row of the batch is 3 or 5 sequences.
    columns = max((offsets.shape[0] - 1) // max(meta.batch or 0, 1), 1) if meta.layout == "in_place" else 1
    labels = dense.coordinates(offsets, index).sequence // columns
    runs = meta.runs(side, total)
    if runs is not None:
        labels = labels.masked_fill(outside(*runs, total), PADDING)
    lengths = labels[labels >= 0].bincount(minlength=(offsets.shape[0] - 1) // columns)
    place = index if one.inverse is None else one.inverse
    return Rows(labels, place, shape, shape is None or one.order is not None, offsets, lengths)


def same_sides(meta: VarlenMetadata) -> bool:
    """Whether one picture shows both sides: the same lengths, order and maxima."""
    q, k = meta.side("q"), meta.side("k")
    same_maximum = q.max_seqlen == k.max_seqlen and q.exact == k.exact
    return meta.equal_lengths and q.order is k.order and same_maximum


def letter(label: int) -> str:
    """The letter of a sequence, the same on both sides; after `LETTERS` they begin again."""
    return LETTERS[label % len(LETTERS)] if label >= 0 else "."
