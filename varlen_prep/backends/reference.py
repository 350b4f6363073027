"""The slow oracle: dense, obvious, exact to the dtype that it is given, on any device, float64 included.

T packed rows, H heads, D head size.  Memory grows with T_q * T_k * H: for tests, not for models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dense
from ._record import Arguments, Backend, lse_dtype


class _Scores(NamedTuple):
    """What forward and backward share, in wide precision, with the key heads repeated."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    """(H, T_q, T_k), after softcap."""
    seen: Tensor
    """bool (T_q, T_k): which pairs attend."""


def _forward(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    wide = _scores(q, k, v, args)
    lse = wide.scores.masked_fill(~wide.seen, -torch.inf).logsumexp(-1)
    return torch.einsum("hqk,khd->qhd", _weights(wide, lse), wide.v).to(q.dtype), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _scores(q, k, v, args)
    weights = _weights(wide, lse)
    # Queries without keys have out 0 whatever dout holds.
    dout = torch.where(wide.seen.any(1)[:, None, None], dout, 0).to(wide.q.dtype)
    dv = torch.einsum("hqk,qhd->khd", weights, dout)
    dweights = torch.einsum("qhd,khd->hqk", dout, wide.v)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * args.softmax_scale
    if args.softcap > 0:
        dscores = dscores * (1 - (wide.scores / args.softcap) ** 2)
    dq = torch.einsum("hqk,khd->qhd", dscores, wide.k)
    dk = torch.einsum("hqk,qhd->khd", dscores, wide.q)
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Matrix products in the precision that is asked for, also under autocast."""

    @functools.wraps(function)
    def run(q: Tensor, *rest: Any) -> Any:
        with torch.autocast(q.device.type, enabled=False):
            return function(q, *rest)

    return run


def _scores(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> _Scores:
    at_q, at_k = (
        dense.coordinates(cu, torch.arange(x.shape[0], device=x.device))
        for cu, x in ((args.cu_seqlens_q, q), (args.cu_seqlens_k, k))
    )
    lengths = args.cu_seqlens_q.diff(), args.cu_seqlens_k.diff()
    seen = dense.allowed(at_q, at_k, lengths, args.causal, (args.window_size_left, args.window_size_right))
    # Rows that take no part may hold NaN, and 0 * NaN is NaN.
    q = torch.where(seen.any(1)[:, None, None], q, 0)
    k, v = (torch.where(seen.any(0)[:, None, None], x, 0) for x in (k, v))
    dtype = lse_dtype(q.dtype)
    q, k, v = (x.to(dtype).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (q, k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * args.softmax_scale
    if args.softcap > 0:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    return _Scores(q, k, v, scores, seen)


def _weights(wide: _Scores, lse: Tensor) -> Tensor:
    """exp(score - lse), (H, T_q, T_k): 0 for hidden keys, also where a query sees none and lse is -inf."""
    shift = torch.where(wide.seen.any(1), lse, 0)
    return torch.where(wide.seen, wide.scores - shift[..., None], -torch.inf).exp()


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

REFERENCE = Backend(
    name="reference",
    op="reference_varlen",
    forward=_without_autocast(_forward),
    backward=_without_autocast(_backward),
    dtypes={"cpu": _FLOATS, "cuda": _FLOATS},
    summary="dense and slow: the oracle of the tests",
    softcap=True,
)
