"""flash-attn 3 (module `flash_attn_interface`, also as a hub kernel): Hopper, fp16 and bf16.

T packed rows, H heads, D head size.  The package's functions have no fakes, so they cannot be traced by themselves.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _family, _machine
from ._calls import call, find, has
from ._record import Arguments, Backend


def forward(module: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """`module` loads the module that holds the kernels."""
    function = find(module(), "flash_attn_varlen_func", "flash_attn_interface.flash_attn_varlen_func")
    rows = _family.rows("q k v", q, k, v)
    # Releases differ: some always return (out, lse), others only when asked.
    asked = {"return_lse": (True, True)}
    result = call(function, {**_options(function, args), **asked}, **rows, **_family.arguments(args))
    if not isinstance(result, (tuple, list)):
        raise RuntimeError(
            "flash_attn_interface.flash_attn_varlen_func returned no log-sum-exp, which the backward pass needs; "
            "update flash-attn 3."
        )
    out, lse = result[:2]
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
    rows = _family.rows("dout q k v out", dout, q, k, v, out)
    grads = {f"d{name}": torch.empty_like(rows[name]) for name in "qkv"}
    options = {**_options(function, args), "deterministic": (args.deterministic, False)}
    # The unused lengths are spelled `sequed` in some releases.
    for name in ("seqused_q", "seqused_k", "sequed_q", "sequed_k"):
        options[name] = (None, None)
    call(function, options, **rows, **grads, softmax_lse=_family.kernel_lse(lse), **_family.arguments(args))
    return _family.cut(tuple(grads.values()), q, k, v)


def _options(function: Callable[..., Any], args: Arguments) -> dict[str, tuple[Any, Any]]:
    left, right = args.window_size_left, args.window_size_right
    options: dict[str, tuple[Any, Any]] = {"softcap": (args.softcap, 0.0)}
    if has(function, "window_size_left"):
        return {**options, "window_size_left": (left, -1), "window_size_right": (right, -1)}
    return {**options, "window_size": ((left, right), (-1, -1))}


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
