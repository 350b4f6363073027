"""The attention pattern as a dense mask: the contract of DESIGN.md written down once, slow and obvious.

N sequences, R rows of one side.  Used by `VarlenMetadata.materialize` and by the reference backend.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Coordinates(NamedTuple):
    """Where each row of one side lies; all tensors have the same shape."""

    sequence: Tensor
    """int64: which sequence holds the row; any value where `valid` is False."""
    position: Tensor
    """int64: the row's place in its sequence."""
    valid: Tensor
    """bool: False for rows past the last offset."""


def coordinates(cu_seqlens: Tensor, rows: Tensor) -> Coordinates:
    """Coordinates of the packed row numbers `rows` (ints, any shape)."""
    last = max(cu_seqlens.shape[0] - 2, 0)
    # Of several offsets with the same value the last one begins a sequence that holds rows.
    sequence = (torch.searchsorted(cu_seqlens, rows, right=True) - 1).clamp(0, last)
    return Coordinates(sequence, rows - cu_seqlens[sequence], rows < cu_seqlens[-1])


def allowed(
    q: Coordinates, k: Coordinates, lengths: tuple[Tensor, Tensor], causal: bool, window_size: tuple[int, int]
) -> Tensor:
    """True where a query sees a key: bool (..., R_q, R_k) for coordinates of shape (..., R_q) and (..., R_k).

    Same sequence, and `-left <= j - (i + length_k - length_q) <= right`: causal and window are aligned to the
    bottom-right corner of each sequence. A bound of -1 is none; causal means right = 0.
    """
    left, right = window_size
    right = 0 if causal else right
    seen = q.valid[..., :, None] & k.valid[..., None, :] & (q.sequence[..., :, None] == k.sequence[..., None, :])
    if lengths[0].shape[0] == 0:
        return seen
    diagonal = q.position + (lengths[1] - lengths[0])[q.sequence]
    distance = k.position[..., None, :] - diagonal[..., :, None]
    if right >= 0:
        seen = seen & (distance <= right)
    if left >= 0:
        seen = seen & (distance >= -left)
    return seen
