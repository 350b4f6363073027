"""The operator of the in_place layout: it finds the run of each padded row and cuts the row there.

B rows, S padded length.  An operator for the same reason as those of `moves`: the torch code here is some thirty small
kernels, which on a GPU cost the host more than anything else that metadata is made of.

    varlen_prep::in_place_offsets(mask_q, mask_k, seq_q, seq_k) -> (cu_seqlens_q, cu_seqlens_k, one_run)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._direct import unwatched
from .moves import define, has_triton


def in_place_offsets(
    mask_q: Tensor | None, mask_k: Tensor | None, seq_q: int, seq_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets of both sides from bool (B, S) masks, of which there is at least one; `offsets.in_place` shows the cuts.

    Returns:
        `cu_seqlens_q` and `cu_seqlens_k`, int32 (5 B + 1,) with both masks, else (3 B + 1,); `one_run` bool (2,):
        whether the valid rows of `mask_q`, of `mask_k` are one run at most in each padded row, True without a mask.
        Offsets of other masks say nothing.
    """
    if unwatched(*(x for x in (mask_q, mask_k) if x is not None)):
        return _in_place_offsets(mask_q, mask_k, seq_q, seq_k)
    return torch.ops.varlen_prep.in_place_offsets(mask_q, mask_k, seq_q, seq_k)


def _in_place_offsets(
    mask_q: Tensor | None, mask_k: Tensor | None, seq_q: int, seq_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    if all(x is None or (x.is_cuda and x.numel() > 0) for x in (mask_q, mask_k)) and has_triton():
        from . import _triton_masks

        return _triton_masks.in_place_offsets(mask_q, mask_k, seq_q, seq_k)
    return torch_in_place_offsets(mask_q, mask_k, seq_q, seq_k)


def torch_in_place_offsets(
    mask_q: Tensor | None, mask_k: Tensor | None, seq_q: int, seq_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`in_place_offsets` in torch."""
    mask = _one_of(mask_q, mask_k)
    zero = torch.zeros(mask.shape[0], dtype=torch.int64, device=mask.device)
    one_run = mask.new_ones(2)
    # One column per sequence of a row: where it begins, counted from the row's own beginning.
    q, k = [zero, zero, zero + seq_q], [zero, zero, zero + seq_k]
    if mask_q is not None:
        start_q, end_q, one_run[0] = _runs(mask_q)
        q = [zero, start_q, end_q]
    if mask_k is not None:
        start_k, end_k, one_run[1] = _runs(mask_k)
        k = [zero, start_k, end_k]
    if mask_q is not None and mask_k is not None:
        q, k = [zero, start_q, start_q, end_q, zero + seq_q], [zero, zero, start_k, end_k, end_k]
    return _row_offsets(q, seq_q), _row_offsets(k, seq_k), one_run


def _runs(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First row and end of the valid rows of each row of a (B, S) mask, int64 (B,), 0 and 0 without any; and whether
    there are no others between them, bool ()."""
    batch, seq = mask.shape
    index = torch.arange(seq, device=mask.device)
    count = mask.sum(1)
    if batch * seq == 0:
        return count, count, mask.new_ones(())
    start = torch.where(count > 0, torch.where(mask, index, seq).amin(1), 0)
    end = torch.where(mask, index + 1, 0).amax(1)
    return start, end, (end - start == count).all()


def _row_offsets(columns: list[Tensor], seq: int) -> Tensor:
    """int32 (B * columns + 1,) offsets from where each sequence begins in its row, columns (B,)."""
    batch = columns[0].shape[0]
    cu_seqlens = torch.zeros(batch * len(columns) + 1, dtype=torch.int32, device=columns[0].device)
    first = torch.arange(batch, device=columns[0].device) * seq
    cu_seqlens[:-1] = (torch.stack(columns, 1) + first[:, None]).flatten()
    cu_seqlens[-1:] = batch * seq
    return cu_seqlens


def _one_of(mask_q: Tensor | None, mask_k: Tensor | None) -> Tensor:
    mask = mask_q if mask_q is not None else mask_k
    assert mask is not None
    return mask


def _fake_in_place_offsets(
    mask_q: Tensor | None, mask_k: Tensor | None, seq_q: int, seq_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    mask = _one_of(mask_q, mask_k)
    columns = 3 if mask_q is None or mask_k is None else 5
    cu_seqlens_q = mask.new_empty(mask.shape[0] * columns + 1, dtype=torch.int32)
    return cu_seqlens_q, torch.empty_like(cu_seqlens_q), mask.new_empty(2)


define(
    "varlen_prep::in_place_offsets",
    "(Tensor? mask_q, Tensor? mask_k, SymInt seq_q, SymInt seq_k) -> (Tensor, Tensor, Tensor)",
    _in_place_offsets,
    _fake_in_place_offsets,
)
