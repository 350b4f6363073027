"""torch's flash attention for CPU, one call per sequence.

T packed rows, H heads, D head size; one sequence has (lq, lk) rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._record import Arguments, lse_dtype

_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Piece(NamedTuple):
    """The queries of one sequence that see a key, and its keys."""

    q: slice
    k: slice
    is_causal: bool
    bias: Tensor | None


def forward(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=lse_dtype(q.dtype))
    for piece in _pieces(q, args):
        rows = _rows(q[piece.q], k[piece.k], v[piece.k])
        part, part_lse = _forward_op(*rows, 0.0, piece.is_causal, attn_mask=piece.bias, scale=args.softmax_scale)
        out[piece.q] = part[0].transpose(0, 1)[..., : v.shape[-1]]
        lse[:, piece.q] = part_lse[0]
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    heads_kv, groups = k.shape[1], q.shape[1] // k.shape[1]
    for piece in _pieces(q, args):
        rows = _rows(q[piece.q], k[piece.k], v[piece.k])
        grad_out, result = _rows(dout[piece.q], out[piece.q], size=rows[0].shape[-1])
        grads = _backward_op(
            grad_out, *rows, result, lse[:, piece.q][None].contiguous(), 0.0, piece.is_causal,
            attn_mask=piece.bias, scale=args.softmax_scale,
        )  # fmt: skip
        part_q, part_k, part_v = (grad[0].transpose(0, 1) for grad in grads)
        dq[piece.q] = part_q[..., : q.shape[-1]]
        for total, part in ((dk, part_k), (dv, part_v)):
            total[piece.k] = part.unflatten(1, (heads_kv, groups)).sum(2)[..., : total.shape[-1]]
    return dq, dk, dv


def _pieces(q: Tensor, args: Arguments) -> Iterator[_Piece]:
    left, right = args.window_size_left, 0 if args.causal else args.window_size_right
    starts_q, starts_k = args.cu_seqlens_q.tolist(), args.cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        shift = (k1 - k0) - (q1 - q0)
        # Query i sees keys up to i + shift + right: the first queries may see none.
        hidden = max(0, -(shift + right)) if right >= 0 else 0
        q0, shift = q0 + hidden, shift + hidden
        if q0 >= q1 or k0 == k1:
            continue
        top_left = right == 0 and left < 0 and shift == 0
        bias = None if top_left or (left < 0 and right < 0) else _bias(q, q1 - q0, k1 - k0, shift, left, right)
        yield _Piece(slice(q0, q1), slice(k0, k1), top_left, bias)


def _bias(like: Tensor, rows: int, columns: int, shift: int, left: int, right: int) -> Tensor:
    """0 where query i sees key j, -inf elsewhere: (rows, columns)."""
    distance = torch.arange(columns) - torch.arange(rows)[:, None] - shift
    hidden = torch.zeros(rows, columns, dtype=torch.bool)
    if right >= 0:
        hidden |= distance > right
    if left >= 0:
        hidden |= distance < -left
    return like.new_zeros(rows, columns).masked_fill_(hidden, -torch.inf)


def _rows(*tensors: Tensor, size: int | None = None) -> list[Tensor]:
    """(rows, H, D) each to the kernel's (1, H, rows, D): equal heads, and one head size (zeros change nothing)."""
    heads = tensors[0].shape[1]
    size = size if size is not None else max(x.shape[-1] for x in tensors)
    wide = (x.repeat_interleave(heads // x.shape[1], 1) for x in tensors)
    return [pad(x, (0, size - x.shape[-1])).transpose(0, 1)[None] for x in wide]
