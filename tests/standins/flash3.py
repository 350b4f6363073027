"""flash-attn 3 (module `flash_attn_interface`) on the CPU: its signatures and traps, in both styles that are out there.

Traps: windows as one pair or as two ints; `sequed_q` for `seqused_q` and `is_causal` for `causal` in the backward; rows
of V past a sequence's end are read (0 * NaN); builds without fp16; unwritten tails.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import _attention as kernel

TILE = 128


def module(*, style: str = "plain", dtypes: tuple[torch.dtype, ...] = kernel.HALF) -> Any:
    """`flash_attn_interface`.

    `style`: "plain" has Python functions, whose first arguments have no defaults; "hub" is the package of the Hub, as
    the source is today: registered operators.
    """

    def forward(
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        unused = (
            k_new, v_new, qv, out, cu_seqlens_k_new, seqused_q, seqused_k, page_table, kv_batch_idx, leftpad_k,
            rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale,
        )  # fmt: skip
        assert unused == (None,) * 16
        assert isinstance(window_size, tuple)
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        kernel.check(q, k, v, cu=cu, longest=longest, dtypes=dtypes)
        args = kernel.arguments(cu, longest, causal, window_size, softmax_scale, softcap, q.shape[-1])
        return *kernel.forward(q, k, v, args, no_keys=-torch.inf, tile=TILE), None, None

    def hub_forward(
        q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
        qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None, leftpad_k: Tensor | None = None,
        rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
        q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
        softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1,
        window_size_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None, num_splits: int = 1, pack_gqa: bool | None = None,
        sm_margin: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        window = window_size_left, window_size_right
        return forward(
            q, k, v, k_new, v_new, qv, out_, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
            max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
            q_descale, k_descale, v_descale, softmax_scale, causal, window, attention_chunk, softcap,
        )  # fmt: skip

    def backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, dq,
        dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        assert sequed_q is None
        assert sequed_k is None
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        kernel.check(dout, q, k, v, out, cu=cu, longest=longest, dtypes=dtypes)
        args = kernel.arguments(cu, longest, causal, window_size, softmax_scale, softcap, q.shape[-1])
        grads = kernel.backward(dout, q, k, v, out, softmax_lse, args, tile=TILE)
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad)
        return dq, dk, dv, softmax_lse

    def hub_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, sequed_q: Tensor | None = None,
        sequed_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
        softmax_scale: float | None = None, is_causal: bool = False, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
    ) -> Tensor:  # fmt: skip
        window = window_size_left, window_size_right
        return backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k,
            dq, dk, dv, softmax_scale, is_causal, window, softcap, deterministic, sm_margin,
        )[3]  # fmt: skip

    if style == "hub":
        # A registered operator: a plain call of it shows no parameters, its `_init_fn` does.
        flags = {"FLASHATTENTION_DISABLE_FP16": torch.float16 not in dtypes, "FLASHATTENTION_DISABLE_FP8": True}
        interface = SimpleNamespace(
            _flash_attn_forward=_Operator(hub_forward), _flash_attn_backward=_Operator(hub_backward)
        )
        return SimpleNamespace(
            __name__="_flash_attn3_cuda_0",
            flash_attn_interface=interface,
            flash_attn_config=SimpleNamespace(CONFIG={"build_flags": flags}),
        )
    return SimpleNamespace(__name__="flash_attn_interface", _flash_attn_forward=forward, _flash_attn_backward=backward)


class _Operator:
    """What `torch.library.custom_op` returns; a call of it would go through torch's dispatcher a second time."""

    def __init__(self, function: Any) -> None:
        self._init_fn = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("dispatched once more")
