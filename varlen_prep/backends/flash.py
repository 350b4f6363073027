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

from . import _fa2, _family, _machine
from ._calls import bind, find
from ._record import Arguments, Backend

_ARGUMENTS = (
    "cu_seqlens_q", "cu_seqlens_k", *_fa2.Lengths._fields, "dropout_p", "softmax_scale", "causal",
)  # fmt: skip
_FORWARD = ("q", "k", "v", *_ARGUMENTS)
_BACKWARD = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", *_ARGUMENTS)


def forward(module: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """`module` loads the module that holds the kernels."""
    function = find(module(), "_flash_attn_varlen_forward", "flash_attn_interface._flash_attn_varlen_forward")
    run = bind(function, _FORWARD, (("softcap", args.softcap, 0.0),))
    out, lse, *_ = run(*_family.one_size(q, k, v), *_arguments(args))
    return _family.result(out, lse, v, args)


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
    options = (("softcap", args.softcap, 0.0), ("deterministic", args.deterministic, False))
    run = bind(function, _BACKWARD, options, ("alibi_slopes",))
    dout, *rows, out = _family.one_size(dout, q, k, v, out)
    grads = tuple(map(torch.empty_like, rows))
    run(dout, *rows, out, _family.kernel_lse(lse), *grads, *_arguments(args))
    return _family.cut(grads, q, k, v)


def _arguments(args: Arguments) -> tuple[Any, ...]:
    """The values of `_ARGUMENTS`."""
    return (args.cu_seqlens_q, args.cu_seqlens_k, *_fa2.lengths(args), 0.0, args.softmax_scale, args.causal)


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
    dtypes={"cuda": _family.HALF},
    summary="flash-attn 2: Ampere and newer",
    install="pip install flash-attn --no-build-isolation",
    missing=_missing,
    refuse=_family.refuse_head_size,
    softcap=True,
    overreach=_family.OVERREACH,
)
