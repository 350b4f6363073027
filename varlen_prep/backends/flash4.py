"""flash-attn 4 (package `flash-attn-4`, module `flash_attn.cute`, also as a hub kernel): Hopper and Blackwell.

T packed rows, H heads, D head size.  Its kernels are compiled at the first call of each variant, and it registers no
operator, so it cannot be traced by itself.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _family, _machine
from ._calls import bind, find
from ._record import Arguments, Backend, Request

_FORWARD = ("q", "k", "v", *_family.ARGUMENTS, "return_lse")
_BACKWARD = ("dout", "q", "k", "v", "out", "lse", *_family.ARGUMENTS)


def forward(module: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """`module` loads the module that holds the kernels."""
    function = find(module(), "flash_attn_varlen_func", "interface.flash_attn_varlen_func")
    options = (("softcap", args.softcap, 0.0), ("window_size", _window(args), (None, None)))
    run = bind(function, _FORWARD, options)
    # Without gradients lse comes only when asked for.
    out, lse, *_ = run(*_family.one_size(q, k, v), *_family.arguments(args), True)
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
    function = find(module(), "interface._flash_attn_bwd", "_flash_attn_bwd")
    left, right = _window(args)
    options = (
        ("softcap", args.softcap, 0.0),
        ("window_size_left", left, None),
        ("window_size_right", right, None),
        ("deterministic", args.deterministic, False),
    )
    run = bind(function, _BACKWARD, options)
    rows = _family.one_size(dout, q, k, v, out)
    dq, dk, dv, *_ = run(*rows, _family.kernel_lse(lse), *_family.arguments(args))
    return _family.cut((dq, dk, dv), q, k, v)


def _window(args: Arguments) -> tuple[int | None, int | None]:
    """-1, which is unbounded everywhere else, is None here."""
    left, right = args.window_size_left, args.window_size_right
    return left if left >= 0 else None, right if right >= 0 else None


def refuse(request: Request) -> list[str]:
    if request.device.type != "cuda":
        return []
    return _family.refuse_head_size(request, 256 if torch.cuda.get_device_capability(request.device)[0] == 9 else 128)


def _module() -> Any:
    return importlib.import_module("flash_attn.cute")


def _missing() -> list[str]:
    found = []
    if not _machine.has_file("flash_attn", "cute"):
        found.append("package flash-attn-4 is not installed")
    return found + _machine.gpu_reasons((9, 0))


FLASH4 = Backend(
    name="flash4",
    op="flash_attn_4_varlen",
    forward=functools.partial(forward, _module),
    backward=functools.partial(backward, _module),
    dtypes={"cuda": _family.HALF},
    summary="flash-attn 4: Hopper and Blackwell, compiled at the first call",
    install="pip install --pre flash-attn-4",
    missing=_missing,
    refuse=refuse,
    softcap=True,
    finite_padding=True,
    overreach=_family.OVERREACH,
)
