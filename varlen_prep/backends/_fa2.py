"""Rules of the flash-attention 2 kernel family, which torch's built-in CUDA kernel and flash-attn 2 share."""

from __future__ import annotations

from typing import NamedTuple

from ._record import Arguments


class Lengths(NamedTuple):
    """Maxima and windows that make the kernel compute what the contract says."""

    max_seqlen_q: int
    max_seqlen_k: int
    window_size_left: int
    window_size_right: int


def lengths(args: Arguments) -> Lengths:
    left, right = args.window_size_left, args.window_size_right
    if left >= 0 and right < 0 and not args.causal:
        # The kernel replaces an open right side by max_seqlen_k, which hides keys where queries outnumber them.
        right = args.max_seqlen_q
    # It drops a right bound >= max_seqlen_k, though that too may hide keys where queries outnumber them.
    max_seqlen_k = max(args.max_seqlen_k, right + 1)
    # A query maximum of 1 selects a decoding path that takes every sequence to have one query: wrong for empty ones.
    return Lengths(max(args.max_seqlen_q, 2), max_seqlen_k, left, right)
