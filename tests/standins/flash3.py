"""flash-attn 3 (module `flash_attn_interface`) on the CPU: its signatures and traps, in the styles that are out there.

Traps: tuple or tensor as the result; windows as one pair or as two ints; `sequed_q` for `seqused_q` and `is_causal` for
`causal` in the backward; V rows past a sequence's end are read (0 * NaN); builds without fp16; unwritten tails.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import _attention as kernel

TILE = 128


def module(*, style: str = "asked", dtypes: tuple[torch.dtype, ...] = kernel.HALF) -> Any:
    """`flash_attn_interface`.

    `style`: "asked" returns `(out, lse)` only if `return_attn_probs`, as the source does today; "tuple" always does and
    has no such argument, as before; "tensor" has neither; "hub" is the package of the Hub, with registered operators.
    """

    def asked(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        assert qv is None
        assert isinstance(window_size, tuple)
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        kernel.check(q, k, v, cu=cu, longest=longest, dtypes=dtypes)
        args = kernel.arguments(cu, longest, causal, window_size, softmax_scale, softcap, q.shape[-1])
        out, lse = kernel.forward(q, k, v, args, no_keys=-torch.inf, tile=TILE)
        return (out, lse) if return_attn_probs else out

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
        registered = _Operator(hub_backward)
        flags = {"FLASHATTENTION_DISABLE_FP16": torch.float16 not in dtypes, "FLASHATTENTION_DISABLE_FP8": True}
        interface = SimpleNamespace(flash_attn_varlen_func=asked, _flash_attn_backward=registered)
        return SimpleNamespace(
            __name__="_flash_attn3_cuda_0",
            flash_attn_varlen_func=asked,
            flash_attn_interface=interface,
            flash_attn_config=SimpleNamespace(CONFIG={"build_flags": flags}),
        )
    function = asked
    if style != "asked":
        function = kernel.altered(asked, {"return_attn_probs": style == "tuple"}, {})
    return SimpleNamespace(
        __name__="flash_attn_interface", flash_attn_varlen_func=function, _flash_attn_backward=backward
    )


class _Operator:
    """What `torch.library.custom_op` returns."""

    def __init__(self, function: Any) -> None:
        self._init_fn = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._init_fn(*args, **kwargs)
