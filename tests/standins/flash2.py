"""flash-attn 2.8 on the CPU: the private functions of `flash_attn_interface`, with their signatures and traps.

Traps: LSE +inf for a query without keys, and a backward that needs it so; unwritten tails; window bounds that are
dropped or opened against the maxima; the decoding path of a query maximum of 1; maxima that are ints, int32 offsets,
16-bit rows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import _attention as kernel


def module(*, dtypes: tuple[torch.dtype, ...] = kernel.HALF) -> Any:
    """`flash_attn.flash_attn_interface`."""

    def _flash_attn_varlen_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        return_softmax: bool = False, block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None, zero_tensors: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        kernel.check(q, k, v, cu=cu, longest=longest, dtypes=dtypes)
        assert q.shape[-1] == v.shape[-1], "one head size"
        window = _window(longest, causal, window_size_left, window_size_right)
        if max_seqlen_q == 1 and q.shape[1] > k.shape[1] and window_size_left < 0 and window_size_right < 0:
            q.reshape(cu_seqlens_q.shape[0] - 1, k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
        args = kernel.arguments(cu, longest, causal, window, softmax_scale, softcap, q.shape[-1])
        out, lse = kernel.forward(q, k, v, args, no_keys=torch.inf)
        return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
        dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
        window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
        rng_state: Tensor | None = None, zero_tensors: bool = False,
    ) -> Tensor:  # fmt: skip
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        kernel.check(dout, q, k, v, out, cu=cu, longest=longest, dtypes=dtypes)
        window = _window(longest, causal, window_size_left, window_size_right)
        args = kernel.arguments(cu, longest, causal, window, softmax_scale, softcap, q.shape[-1])
        grads = kernel.backward(dout, q, k, v, out, softmax_lse, args, no_keys=torch.inf)
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            assert into is not None
            into.copy_(grad)
        return softmax_lse.new_zeros(q.shape[1], q.shape[0] + 128 * (cu_seqlens_q.shape[0] - 1))

    return SimpleNamespace(
        __name__="flash_attn.flash_attn_interface",
        _flash_attn_varlen_forward=_flash_attn_varlen_forward,
        _flash_attn_varlen_backward=_flash_attn_varlen_backward,
    )


def hub(**options: Any) -> Any:
    """A hub package: nothing private at the top, all under `flash_attn_interface`."""
    return SimpleNamespace(__name__="_flash_attn2_cuda_0", flash_attn_interface=module(**options))


def _window(longest: tuple[int, int], causal: bool, left: int, right: int) -> tuple[int, int]:
    """What the C++ code makes of the bounds before the kernel runs."""
    max_q, max_k = longest
    left = -1 if left >= max_k else left
    right = -1 if right >= max_k else right
    if causal and max_q != 1:
        right = 0
    if left < 0 <= right:
        return max_k, right
    return (left, max_k) if right < 0 <= left else (left, right)
