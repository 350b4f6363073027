"""Offsets of one side from uniform shapes, masks, lengths and document starts: tensors in, tensors out.

B rows, S padded length, R = B * S rows, N sequences.  Every function here is free of syncs and of data-dependent
shapes.  Offsets are always written into a zero buffer: a pad after a cumulative sum is miscompiled by Inductor on
CUDA (torch 2.11), and a cumulative sum of a constant does not compile at all when the constant is symbolic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import check_int32_offsets, require
from .moves import pack_order
from .runs import in_place_offsets


class Side(NamedTuple):
    """What a kernel must know of the queries, or of the keys and values. Fields are those of `VarlenMetadata`."""

    cu_seqlens: Tensor
    max_seqlen: int
    exact: bool
    total: int | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None


def with_maximum(side: Side, max_seqlen: int, exact: bool) -> Side:
    """The same side with another maximum (`NamedTuple._replace` does not trace on every torch)."""
    return Side(side.cu_seqlens, max_seqlen, exact, side.total, side.order, side.inverse)


def uniform(name: str, batch: int, seq: int, device: torch.device | None) -> Side:
    """`batch` sequences of `seq` rows each: nothing but the offsets is allocated."""
    check_int32_offsets(name, batch * seq)
    if torch.compiler.is_compiling() or seq == 0:  # a step of 0 raises, and traced sizes are not to be asked for it
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device) * seq
    else:
        cu_seqlens = torch.arange(0, batch * seq + 1, seq, dtype=torch.int32, device=device)
    return Side(cu_seqlens, seq, True, batch * seq)


def with_capacity(cu_seqlens: Tensor, capacity: int) -> Tensor:
    """Offsets of `capacity` sequences: the last offset is repeated, so the added sequences are empty."""
    # Not a filler of capacity + 1 - N offsets, a size that is 0 or 1 for some N, which would compile again.
    full = cu_seqlens[-1:].repeat(capacity + 1)
    full[: cu_seqlens.shape[0]] = cu_seqlens
    return full


def packed(name: str, mask: Tensor) -> Side:
    """A `(B, S)` key or query mask as packed rows. The maximum is the bound S; the caller may replace it."""
    batch, seq = mask.shape
    check_int32_offsets(name, batch * seq)
    cu_seqlens, order, inverse = pack_order(mask)
    return Side(cu_seqlens, seq, False, None, order, inverse)


def in_place(batch: int, seq_q: int, seq_k: int, mask_q: Tensor | None, mask_k: Tensor | None) -> tuple[Side, Side]:
    """Offsets that leave every row where it is: each padded row becomes a few sequences.

    A masked side is cut into leading gap, valid run and trailing gap, and the other side is empty opposite a gap:

        mask on k        q: |      run      |          mask on both   q: | gap |     |  run  | gap |     |
                         k: | gap | run | gap |                       k: |     | gap |  run  |     | gap |

    No gap spans two rows, so none is longer than the padded length, which is the maximum: kernels write nothing for
    rows of a sequence past the maximum that they are given.
    """
    check_int32_offsets("batch * seq_q", batch * seq_q)
    check_int32_offsets("batch * seq_kv", batch * seq_k)
    if mask_q is None and mask_k is None:
        raise ValueError("in_place: expected a mask on at least one side.")
    cu_q, cu_k, one_run = in_place_offsets(mask_q, mask_k, seq_q, seq_k)
    for number, (name, mask) in enumerate((("mask_q", mask_q), ("mask", mask_k))):
        if mask is not None:
            require(
                one_run[number],
                f"{name}: layout='in_place' needs one contiguous run of True per row, got a mask with a hole; "
                "use layout='packed'.",
            )
    return (
        Side(cu_q, seq_q, False, batch * seq_q if mask_q is None else None),
        Side(cu_k, seq_k, False, batch * seq_k if mask_k is None else None),
    )


def check_rewritable(mine: Side, theirs: Side, name: str) -> None:
    """Whether `theirs` can be written over `mine`, whose host values stay: a `ValueError` says why not."""
    have, need = mine.cu_seqlens.shape[0] - 1, theirs.cu_seqlens.shape[0] - 1
    if need > have:
        raise ValueError(f"other: expected at most {have} sequences (the capacity), got {need} for {name!r}; raise it.")
    if theirs.max_seqlen > mine.max_seqlen:
        raise ValueError(
            f"other: max_seqlen_{name} is {theirs.max_seqlen}, more than the {mine.max_seqlen} of this metadata; "
            "prepare it with a larger bound."
        )
    if mine.exact and (not theirs.exact or mine.max_seqlen != theirs.max_seqlen):
        raise ValueError(
            f"other: max_seqlen_{name} of this metadata is the exact {mine.max_seqlen}, which would no longer hold; "
            f"prepare it with a bound (max_seqlen_{name}=...)."
        )
    if mine.total is not None and mine.total != theirs.total:
        raise ValueError(
            f"other: all {mine.total} rows of {name!r} are known to take part here, which would no longer hold; "
            "prepare this metadata with capacity= or a mask."
        )
    if (mine.order is None) != (theirs.order is None):
        raise ValueError(
            f"other: only one of the two moves rows of {name!r}; prepare both from the same kind of input."
        )
