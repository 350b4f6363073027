"""What the flash-attn stand-ins share: the reference backend under the habits of the real CUDA kernels.

T packed rows, H heads, D head size.  Rows that the kernel does not write hold NaN here (old memory there): those past
the last offset, and those of a sequence past the maximum that was passed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from varlen_prep.backends import REGISTRY, Arguments

HALF = (torch.float16, torch.bfloat16)
REFERENCE = REGISTRY["reference"]


def check(*rows: Tensor, cu: tuple[Tensor, Tensor], longest: tuple[Any, Any], dtypes: tuple[torch.dtype, ...]) -> None:
    """What the C++ entry points insist on."""
    for maximum in longest:
        assert type(maximum) is int, f"a maximum must be an int, got {type(maximum).__name__}"
    for offsets in cu:
        assert offsets.dtype == torch.int32, "cu_seqlens must have dtype int32"
        assert offsets.is_contiguous(), "cu_seqlens must be contiguous"
    for x in rows:
        if x.dtype not in dtypes:
            raise RuntimeError(f"this build only supports {dtypes}, got {x.dtype}")
        assert x.stride(-1) == 1, "the last dimension must be contiguous"
        assert x.shape[-1] % 8 == 0, "head_size should be a multiple of 8"


def arguments(cu: Any, longest: Any, causal: bool, window: Any, scale: Any, softcap: float, dim: int) -> Arguments:
    return Arguments(*cu, *longest, causal, *window, dim**-0.5 if scale is None else scale, softcap, False)


def forward(
    q: Tensor, k: Tensor, v: Tensor, args: Arguments, *, no_keys: float, tile: int = 0
) -> tuple[Tensor, Tensor]:
    """`no_keys`: the LSE of a query without keys.  `tile`: keys are read by so many rows, past a sequence's end too."""
    out, lse = REFERENCE.forward(q, k, v, args)
    lse = lse.masked_fill(lse == -torch.inf, no_keys)
    if tile:
        spoil(args.cu_seqlens_q, args.cu_seqlens_k, tile, (v,), (out,))
    written = _written(args.cu_seqlens_q, args.max_seqlen_q, q.shape[0])
    return out.masked_fill(~written[:, None, None], torch.nan), lse.masked_fill(~written, torch.nan)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments, *,
    no_keys: float | None = None, tile: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`no_keys`: the only LSE of a query without keys that it computes zeros from; None: any infinity will do."""
    dq, dk, dv = REFERENCE.backward(dout, q, k, v, out, lse, args)  # type: ignore[misc]
    seen = REFERENCE.forward(q, k, v, args)[1] > -torch.inf if no_keys is not None else None
    for begin_q, end_q, begin_k, end_k in spans(args.cu_seqlens_q, args.cu_seqlens_k):
        # exp(score - lse) of a masked score, -inf: 0 only where lse is what the kernel itself writes.
        if seen is not None and (lse[:, begin_q:end_q][~seen[:, begin_q:end_q]] != no_keys).any():
            dq[begin_q:end_q] = dk[begin_k:end_k] = dv[begin_k:end_k] = torch.nan
    if tile:
        spoil(args.cu_seqlens_q, args.cu_seqlens_k, tile, (k, v), (dq,))
        spoil(args.cu_seqlens_k, args.cu_seqlens_q, tile, (q, dout), (dk, dv))
    written = [
        _written(cu, longest, x.shape[0])[:, None, None]
        for cu, longest, x in (
            (args.cu_seqlens_q, args.max_seqlen_q, dq),
            (args.cu_seqlens_k, args.max_seqlen_k, dk),
            (args.cu_seqlens_k, args.max_seqlen_k, dv),
        )
    ]
    dq, dk, dv = (x.masked_fill(~rows, torch.nan) for x, rows in zip((dq, dk, dv), written, strict=True))
    return dq, dk, dv


def spoil(cu: Tensor, cu_other: Tensor, tile: int, read: tuple[Tensor, ...], written: tuple[Tensor, ...]) -> None:
    """0 * NaN: what is read past the end of a sequence reaches its rows unless it is finite."""
    for begin, end, begin_other, end_other in spans(cu, cu_other):
        past = slice(end_other, begin_other + -(-(end_other - begin_other) // tile) * tile)
        if end_other > begin_other and not all(x[past].isfinite().all() for x in read):
            for x in written:
                x[begin:end] = torch.nan


def spans(cu_q: Tensor, cu_k: Tensor) -> list[tuple[int, int, int, int]]:
    q, k = cu_q.tolist(), cu_k.tolist()
    return list(zip(q[:-1], q[1:], k[:-1], k[1:], strict=True))


def _written(cu: Tensor, longest: int, rows: int) -> Tensor:
    """bool (rows,)."""
    written = torch.zeros(rows, dtype=torch.bool)
    for begin, end, _, _ in spans(cu, cu):
        written[begin : min(end, begin + longest)] = True
    return written


def altered(function: Callable[..., Any], without: Mapping[str, Any], renamed: Mapping[str, str]) -> Callable[..., Any]:
    """The same function in another release: without some arguments (name: what it does then), or with other names."""
    signature = inspect.signature(function)
    kept = [x.replace(name=renamed.get(x.name, x.name)) for x in signature.parameters.values() if x.name not in without]
    signature, back = signature.replace(parameters=kept), {new: old for old, new in renamed.items()}

    @functools.wraps(function)
    def other(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return function(**{back.get(name, name): value for name, value in given.items()}, **without)

    other.__signature__ = signature  # type: ignore[attr-defined]
    return other
