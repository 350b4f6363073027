"""torch's built-in CUDA varlen kernels: flash (fp16, bf16) and memory-efficient (fp32).

T packed rows, H heads, D head size, N sequences, M longest query length rounded up by the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dense
from . import _fa2, _family
from ._record import Arguments, Request

_aten = torch.ops.aten


def refuse(request: Request) -> list[str]:
    found = []
    if request.deterministic and request.backward and not torch.are_deterministic_algorithms_enabled():
        found.append(
            "deterministic=True (torch's kernels obey torch.use_deterministic_algorithms(True), which the user sets)"
        )
    if request.dtype == torch.float32:
        left, right = request.window_size
        if (left, right) != (-1, -1) and not (request.causal and left >= 0):
            found.append(f"window_size={request.window_size} in float32 (its kernel has causal left windows only)")
        if (left, right) != (-1, -1) and request.backward and not request.equal_lengths:
            found.append(
                "gradients with a window in float32 where query and key lengths may differ (its kernel gets them wrong)"
            )
    else:
        found += _family.refuse_head_size(request)
    return found


def forward(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    return _efficient_forward(q, k, v, args) if q.dtype == torch.float32 else _flash_forward(q, k, v, args)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    run = _efficient_backward if q.dtype == torch.float32 else _flash_backward
    return run(dout, q, k, v, out, lse, args)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    rows, (lengths, options) = _family.one_size(q, k, v), _flash_arguments(args)
    out, lse, *_ = _aten._flash_attention_forward(*rows, *lengths, False, **options)
    return _family.result(out, lse, v, args)


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    (dout, *rows), (lengths, options) = _family.one_size(dout, q, k, v, out), _flash_arguments(args)
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # the random state of dropout, which is off
    grads = _aten._flash_attention_backward(
        dout.contiguous(), *rows, _family.kernel_lse(lse), *lengths, unused, unused, **options
    )
    return _family.cut(grads, q, k, v)


def _flash_arguments(args: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Offsets, maxima, dropout and causal, in the order of both operators; and their keywords."""
    use = _fa2.lengths(args)
    options = {
        "scale": args.softmax_scale,
        "window_size_left": use.window_size_left if use.window_size_left >= 0 else None,
        "window_size_right": use.window_size_right if use.window_size_right >= 0 else None,
    }
    return (args.cu_seqlens_q, args.cu_seqlens_k, use.max_seqlen_q, use.max_seqlen_k, 0.0, args.causal), options


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    args = _without_hidden_queries(args)
    rows = _repeat_heads(q.shape[1], *_family.one_size(q, k, v, multiple=4))
    out, lse, *_ = _aten._efficient_attention_forward(
        *rows, None, *_efficient_lengths(args), 0.0, 2 if args.causal else 0, True, **_efficient_options(args)
    )
    seen, at = _seen(q, args)
    lse = lse.transpose(0, 1)[:, at.sequence, at.position]
    return out[0, ..., : v.shape[-1]].masked_fill(~seen[:, None, None], 0), lse.masked_fill(~seen, -torch.inf)


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    args = _without_hidden_queries(args)
    seen, at = _seen(q, args)
    dout = dout.masked_fill(~seen[:, None, None], 0)
    # The kernel's (N, H, M); +inf hides a query without keys. The extra sequence takes rows past the last offset.
    sequences, longest = args.cu_seqlens_q.shape[0] - 1, -(-args.max_seqlen_q // 32) * 32
    by_sequence = lse.new_full((sequences + 1, q.shape[1], longest), torch.inf)
    by_sequence[torch.where(at.valid, at.sequence, sequences), :, at.position] = lse.masked_fill(~seen, torch.inf).T
    q_, k_, v_, out_, dout_ = _repeat_heads(q.shape[1], *_family.one_size(q, k, v, out, dout, multiple=4))
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of dropout, which is off
    dq, dk, dv, _ = _aten._efficient_attention_backward(
        dout_.contiguous(), q_, k_, v_, None, out_.contiguous(), *_efficient_lengths(args),
        by_sequence[:-1].contiguous(), 0.0, unused, unused, 2 if args.causal else 0, False, **_efficient_options(args),
    )  # fmt: skip
    dq = dq[0].masked_fill(~seen[:, None, None], 0)
    dk, dv = (x[0].unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return _family.cut((dq, dk, dv), q, k, v)


def _efficient_lengths(args: Arguments) -> tuple[Tensor, Tensor, int, int]:
    return args.cu_seqlens_q, args.cu_seqlens_k, args.max_seqlen_q, args.max_seqlen_k


def _efficient_options(args: Arguments) -> dict[str, Any]:
    window = args.window_size_left + 1 if args.window_size_left >= 0 else None
    return {"scale": args.softmax_scale, "window_size": window}


def _without_hidden_queries(args: Arguments) -> Arguments:
    """Causal only: the kernel is wrong where queries outnumber keys, so each sequence is cut in two.

    The first part holds the queries that see no key, with no keys; the second has at most as many queries as keys.
    """
    if not args.causal:
        return args
    hidden = (args.cu_seqlens_q.diff() - args.cu_seqlens_k.diff()).clamp(min=0)
    first_q, first_k = args.cu_seqlens_q[:-1], args.cu_seqlens_k[:-1]
    parts_q = torch.stack([first_q, first_q + hidden], 1).flatten()
    parts_k = torch.stack([first_k, first_k], 1).flatten()
    return args._replace(
        cu_seqlens_q=torch.cat([parts_q, args.cu_seqlens_q[-1:]]),
        cu_seqlens_k=torch.cat([parts_k, args.cu_seqlens_k[-1:]]),
    )


def _seen(q: Tensor, args: Arguments) -> tuple[Tensor, dense.Coordinates]:
    """Which queries see a key, bool (T,), and where each lies, with position 0 for rows past the last offset."""
    at = dense.coordinates(args.cu_seqlens_q, torch.arange(q.shape[0], device=q.device))
    seen = at.valid & (args.cu_seqlens_k.diff()[at.sequence] > 0)
    return seen, at._replace(position=torch.where(at.valid, at.position, 0))


def _repeat_heads(heads: int, *tensors: Tensor) -> list[Tensor]:
    """(T, H, D) each to the kernel's (1, T, H, D) with equal heads."""
    return [(x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1))[None] for x in tensors]
