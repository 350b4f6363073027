"""flash-attn 2.8 (package `flash_attn`, also as a hub kernel): Ampere and newer, fp16 and bf16.

T packed rows, H heads, D head size.  The kernels below autograd are called, because the operator schema brings its own.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _fa2, _machine
from ._calls import call, find
from ._record import Arguments, Backend, Request

HALF = (torch.float16, torch.bfloat16)


def forward(module: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """`module` loads the module that holds the kernels."""
    function = find(module(), "_flash_attn_varlen_forward", "flash_attn_interface._flash_attn_varlen_forward")
    rows = dict(zip("qkv", _fa2.one_size(q, k, v), strict=True))
    out, lse, *_ = call(function, {"softcap": (args.softcap, 0.0)}, **rows, **_shared(args))
    return out[..., : v.shape[-1]], _fa2.contract_lse(lse)


def backward(
    module: Callable[[], Any],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    args: Arguments,
) -> tuple[Tensor, Tensor, Tensor]:
    function = find(module(), "_flash_attn_varlen_backward", "flash_attn_interface._flash_attn_varlen_backward")
    rows = dict(zip(("dout", "q", "k", "v", "out"), _fa2.one_size(dout, q, k, v, out), strict=True))
    grads = {f"d{name}": torch.empty_like(rows[name]) for name in "qkv"}
    call(
        function,
        {"softcap": (args.softcap, 0.0), "deterministic": (args.deterministic, False)},
        **rows,
        **grads,
        softmax_lse=_fa2.kernel_lse(lse),
        alibi_slopes=None,
        **_shared(args),
    )
    return _fa2.cut(tuple(grads.values()), q, k, v)


def _shared(args: Arguments) -> dict[str, Any]:
    return {
        "cu_seqlens_q": args.cu_seqlens_q,
        "cu_seqlens_k": args.cu_seqlens_k,
        **_fa2.lengths(args)._asdict(),
        "dropout_p": 0.0,
        "softmax_scale": args.softmax_scale,
        "causal": args.causal,
    }


def refuse(request: Request) -> list[str]:
    size = max(request.head_dim, request.head_dim_v)
    return [f"head size {size} (at most 256)"] if size > 256 else []


def _module() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _missing() -> list[str]:
    found = []
    if not _machine.has_file("flash_attn", "flash_attn_interface.py"):
        found.append("package flash-attn is not installed")
    elif not _machine.has_module("flash_attn_2_cuda"):
        found.append("flash-attn is installed without its CUDA extension flash_attn_2_cuda")
    return found + _machine.gpu_reasons((8, 0))


FLASH = Backend(
    name="flash",
    op="flash_attn_2_varlen",
    forward=functools.partial(forward, _module),
    backward=functools.partial(backward, _module),
    dtypes={"cuda": HALF},
    summary="flash-attn 2: Ampere and newer",
    install="pip install flash-attn --no-build-isolation",
    missing=_missing,
    refuse=refuse,
    softcap=True,
)
