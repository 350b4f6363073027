"""torch's CUDA varlen operators on the CPU: the schemas and the traps of `aten._flash_attention_*` and `_efficient_*`.

Flash has the traps of flash-attn 2.  Traps of the memory-efficient one: LSE as (sequences, heads, length rounded up to
32); causal is wrong where queries outnumber keys; a query without keys gets NaN, and its LSE must be +inf in the
backward; one number of heads.  T packed rows, H heads, D head size.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from . import _attention as kernel
from . import flash2


def operators() -> Any:
    """What `torch.ops.aten` has of them."""
    flash = flash2.module()

    def flash_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
        window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert (dropout_p, return_debug_mask) == (0.0, False)
        out, lse, *_ = flash._flash_attn_varlen_forward(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale, is_causal,
            *_window(window_size_left, window_size_right),
        )  # fmt: skip
        return out, lse, torch.zeros(2), torch.zeros(()), torch.zeros(0)

    def flash_backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        grads = tuple(torch.empty_like(x) for x in (query, key, value))
        flash._flash_attn_varlen_backward(
            grad_out, query, key, value, out, logsumexp, *grads, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale,
            is_causal, *_window(window_size_left, window_size_right), 0.0, None, False,
        )  # fmt: skip
        return grads

    return SimpleNamespace(
        _flash_attention_forward=flash_forward,
        _flash_attention_backward=flash_backward,
        _efficient_attention_forward=efficient_forward,
        _efficient_attention_backward=efficient_backward,
    )


def efficient_forward(
    query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, custom_mask_type,
    compute_log_sumexp=False, *, scale=None, seqlen_k=None, window_size=None,
):  # fmt: skip
    assert compute_log_sumexp
    q, k, v, args = _efficient(query, key, value, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k),
                               custom_mask_type, scale, window_size)  # fmt: skip
    out, lse = kernel.forward(q, k, v, args, no_keys=torch.nan)
    by_sequence = lse.new_full((cu_seqlens_q.shape[0] - 1, q.shape[1], -(-max_seqlen_q // 32) * 32), torch.nan)
    for i, (begin, end, _, _) in enumerate(kernel.spans(cu_seqlens_q, cu_seqlens_k)):
        by_sequence[i, :, : end - begin] = lse[:, begin:end]
    out = out.masked_fill(lse.isnan().T[..., None], torch.nan)
    return out[None], by_sequence, torch.zeros(()), torch.zeros(()), max_seqlen_q, max_seqlen_k


def efficient_backward(
    grad_out_, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, logsumexp,
    dropout_p, philox_seed, philox_offset, custom_mask_type, bias_requires_grad, *, scale=None, num_splits_key=None,
    window_size=None, shared_storage_dqdkdv=False,
):  # fmt: skip
    q, k, v, args = _efficient(query, key, value, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k),
                               custom_mask_type, scale, window_size)  # fmt: skip
    assert logsumexp.shape == (cu_seqlens_q.shape[0] - 1, q.shape[1], -(-max_seqlen_q // 32) * 32)
    lse = logsumexp.new_full((q.shape[1], q.shape[0]), torch.inf)
    for i, (begin, end, _, _) in enumerate(kernel.spans(cu_seqlens_q, cu_seqlens_k)):
        lse[:, begin:end] = logsumexp[i, :, : end - begin]
    grads = kernel.backward(grad_out_[0], q, k, v, out[0], lse, args, no_keys=torch.inf)
    return (*(grad[None] for grad in grads), torch.zeros(0))


def _efficient(query: Any, key: Any, value: Any, cu: Any, longest: Any, mask_type: int, scale: Any, window: Any) -> Any:
    q, k, v = (x[0] for x in (query, key, value))
    assert q.shape[1] == k.shape[1], "one number of heads"
    causal = mask_type == 2
    if causal:
        for begin_q, end_q, begin_k, end_k in kernel.spans(*cu):
            assert end_q - begin_q <= end_k - begin_k or begin_k == end_k, (
                "causal is wrong where queries outnumber keys"
            )
    left = -1 if window is None else window - 1
    return q, k, v, kernel.arguments(cu, longest, causal, (left, -1), scale, 0.0, q.shape[-1])


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right
