"""The slow oracle: dense, obvious, exact to the dtype that it is given, on any device, float64 included.

T packed rows, H heads, D head size.  Memory grows with T_q * T_k * H: for tests, not for models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import dense
from ._record import Arguments, Backend


def _attend(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """out (T_q, H, D_v) and lse (H, T_q) by plain differentiable arithmetic."""
    at_q, at_k = (
        dense.coordinates(cu, torch.arange(x.shape[0], device=x.device))
        for cu, x in ((args.cu_seqlens_q, q), (args.cu_seqlens_k, k))
    )
    lengths = args.cu_seqlens_q.diff(), args.cu_seqlens_k.diff()
    window = args.window_size_left, args.window_size_right
    seen = dense.allowed(at_q, at_k, lengths, args.causal, window)
    # Rows that take no part may hold NaN, and 0 * NaN is NaN.
    q = torch.where(seen.any(1)[:, None, None], q, 0)
    k, v = (torch.where(seen.any(0)[:, None, None], x, 0) for x in (k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * args.softmax_scale
    if args.softcap > 0:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    lse = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    # exp(score - lse) is 0 for hidden keys; where a query sees none, lse is -inf and stays out of the arithmetic.
    shift = torch.where(seen.any(1), lse, 0)
    weights = torch.where(seen, scores - shift[..., None], -torch.inf).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def _forward(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = _attend(q.to(wide), k.to(wide), v.to(wide), args)
    return out.to(q.dtype), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.enable_grad():
        inputs = tuple(x.detach().to(wide).requires_grad_() for x in (q, k, v))
        again, _ = _attend(*inputs, args)
        # Queries without keys have out 0 whatever dout holds.
        dout = torch.where((lse > -torch.inf).T[..., None], dout, 0)
        dq, dk, dv = torch.autograd.grad(again, inputs, dout.to(wide))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

REFERENCE = Backend(
    name="reference",
    op="reference_varlen",
    forward=_forward,
    backward=_backward,
    dtypes={"cpu": _FLOATS, "cuda": _FLOATS},
    summary="dense and slow: the oracle of the tests",
    softcap=True,
)
