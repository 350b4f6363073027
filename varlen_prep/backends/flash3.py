"""flash-attn 3 (module `flash_attn_interface`, also as a hub kernel): Hopper, fp16 and bf16.

T packed rows, H heads, D head size.  The kernels below autograd are called, because the operator schema brings its own.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _family, _machine
from ._calls import bind, find, has
from ._record import Arguments, Backend

_FORWARD = ("q", "k", "v", *_family.ARGUMENTS)
_UNUSED = (
    "k_new", "v_new", "qv", "out", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table", "kv_batch_idx",
    "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale",
)  # fmt: skip
_BACKWARD = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", *_family.ARGUMENTS)
_UNUSED_BACKWARD = ("seqused_q", "seqused_k", "sequed_q", "sequed_k")  # spelled so in some releases


def forward(module: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """`module` loads the module that holds the kernels."""
    function = find(module(), "_flash_attn_forward", "flash_attn_interface._flash_attn_forward")
    run = bind(function, _FORWARD, _options(function, args), _UNUSED)
    out, lse, *_ = run(*_family.one_size(q, k, v), *_family.arguments(args))
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
    function = find(module(), "_flash_attn_backward", "flash_attn_interface._flash_attn_backward")
    deterministic = ("deterministic", args.deterministic, False)
    run = bind(function, _BACKWARD, (*_options(function, args), deterministic), _UNUSED_BACKWARD)
    dout, *rows, out = _family.one_size(dout, q, k, v, out)
    grads = tuple(map(torch.empty_like, rows))
    run(dout, *rows, out, _family.kernel_lse(lse), *grads, *_family.arguments(args))
    return _family.cut(grads, q, k, v)


def _options(function: Callable[..., Any], args: Arguments) -> tuple[tuple[str, Any, Any], ...]:
    left, right = args.window_size_left, args.window_size_right
    softcap = ("softcap", args.softcap, 0.0)
    if has(function, "window_size_left"):
        return softcap, ("window_size_left", left, -1), ("window_size_right", right, -1)
    return softcap, ("window_size", (left, right), (-1, -1))


def _module() -> Any:
    return importlib.import_module("flash_attn_interface")


def _missing() -> list[str]:
    found = []
    if not _machine.has_module("flash_attn_interface"):
        found.append("flash-attn 3 (module flash_attn_interface) is not installed")
    return found + _machine.gpu_reasons((9, 0), (9, 0))


FLASH3 = Backend(
    name="flash3",
    op="flash_attn_3_varlen",
    forward=functools.partial(forward, _module),
    backward=functools.partial(backward, _module),
    dtypes={"cuda": _family.HALF},
    summary="flash-attn 3: Hopper",
    install="build flash-attention's hopper folder from source, or use flash3_hub",
    missing=_missing,
    refuse=_family.refuse_head_size,
    softcap=True,
    finite_padding=True,
    overreach=_family.OVERREACH,
)
