"""Rules of the flash-attention 2 kernel family, which torch's built-in CUDA kernel and flash-attn 2 share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

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


def contract_lse(lse: Tensor) -> Tensor:
    """In place: the kernel marks a query without keys by +inf, the contract by -inf."""
    return lse.nan_to_num_(nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)


def kernel_lse(lse: Tensor) -> Tensor:
    """The way back: with -inf, exp(score - lse) would be infinite."""
    return lse.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)


def one_size(*tensors: Tensor, multiple: int = 8) -> list[Tensor]:
    """All head sizes padded with zeros, which change nothing, to one that the kernel takes, elements side by side."""
    size = -(-max(x.shape[-1] for x in tensors) // multiple) * multiple
    wide = (x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in tensors)
    return [x if x.stride(-1) == 1 else x.contiguous() for x in wide]


def cut(grads: tuple[Tensor, ...], *like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients back to the head sizes of q, k and v."""
    dq, dk, dv = (grad[..., : x.shape[-1]] for grad, x in zip(grads, like, strict=True))
    return dq, dk, dv
