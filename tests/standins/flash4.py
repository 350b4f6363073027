"""flash-attn 4 (`flash_attn.cute`) on the CPU: its signatures and traps.

Traps: `qv` is the fourth positional argument; None for an unbounded side of a window; `(out, lse)` always, lse None
unless asked for; maxima that are ints and nothing else; V rows past a sequence's end are read (0 * NaN); unwritten
tails.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import _attention as kernel

TILE = 128


def module(*, dtypes: tuple[torch.dtype, ...] = kernel.HALF) -> Any:
    """`flash_attn.cute`."""

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
        gather_kv_indices: Tensor | None = None, page_table: Tensor | None = None, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: Tensor | None = None, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
        deterministic: bool = False, score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None,
        block_sparse_tensors: Any = None, aux_tensors: list | None = None, aux_scalars: tuple | None = None,
        return_lse: bool = False, scheduler_metadata: Any = None, seqlen_k_per_split: int | None = None,
        disable_scheduler_metadata: bool = False, gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert qv is None, "qv: offsets came by position"
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        kernel.check(q, k, v, cu=cu, longest=longest, dtypes=dtypes)
        args = kernel.arguments(cu, longest, causal, _window(*window_size), softmax_scale, softcap, q.shape[-1])
        out, lse = kernel.forward(q, k, v, args, no_keys=-torch.inf, tile=TILE)
        return out, lse if return_lse else None

    def _flash_attn_bwd(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
        causal: bool = False, softcap: float = 0.0, window_size_left: int | None = None,
        window_size_right: int | None = None, m_block_size: int = 64, n_block_size: int = 128, num_threads: int = 256,
        pack_gqa: bool = False, num_stages_Q: int = 2, num_stages_dO: int = 2, SdP_swapAB: bool = False,  # noqa: N803
        dKV_swapAB: bool = False, dQ_swapAB: bool = False, AtomLayoutMSdP: int = 2, AtomLayoutNdKV: int = 2,  # noqa: N803
        AtomLayoutMdQ: int = 2, V_in_regs: bool = False, cu_seqlens_q: Tensor | None = None,  # noqa: N803
        cu_seqlens_k: Tensor | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, deterministic: bool = False,
        dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None, score_mod: Any = None,
        score_mod_bwd: Any = None, mask_mod: Any = None, aux_tensors: list | None = None,
        aux_scalars: tuple | None = None, block_sparse_tensors: Any = None, dlse: Tensor | None = None,
        learnable_sink: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        kernel.check(dout, q, k, v, out, cu=cu, longest=longest, dtypes=dtypes)
        window = _window(window_size_left, window_size_right)
        args = kernel.arguments(cu, longest, causal, window, softmax_scale, softcap, q.shape[-1])
        return kernel.backward(dout, q, k, v, out, lse, args, tile=TILE)

    interface = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func, _flash_attn_bwd=_flash_attn_bwd)
    return SimpleNamespace(
        __name__="flash_attn.cute", flash_attn_varlen_func=flash_attn_varlen_func, interface=interface
    )


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    """A bound of -1 is not "none" here: releases differ in what they make of it."""
    assert left is None or left >= 0
    assert right is None or right >= 0
    return -1 if left is None else left, -1 if right is None else right
