"""torch's built-in CUDA varlen kernels: flash (fp16, bf16) and memory-efficient (fp32).

T packed rows, H heads, D head size, N sequences, M longest query length rounded up by the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import dense
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
        if not (left < 0 and right < 0) and not (request.causal and left >= 0):
            found.append(f"window_size={request.window_size} in float32 (its kernel has causal left windows only)")
    elif max(request.head_dim, request.head_dim_v) > 256:
        found.append(f"head size {max(request.head_dim, request.head_dim_v)} (at most 256)")
    return found


def forward(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    return _efficient_forward(q, k, v, args) if q.dtype == torch.float32 else _flash_forward(q, k, v, args)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    run = _efficient_backward if q.dtype == torch.float32 else _flash_backward
    return run(dout, q, k, v, out, lse, args)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    size = v.shape[-1]
    q, k, v = _one_size(q, k, v, multiple=8)
    out, lse, *_ = _aten._flash_attention_forward(
        q, k, v, *_flash_lengths(args), 0.0, args.causal, False, **_flash_options(args)
    )
    return out[..., :size], lse.nan_to_num_(nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = q.shape[-1], k.shape[-1], v.shape[-1]
    q, k, v, out, dout = _one_size(q, k, v, out, dout, multiple=8)
    # The kernel marks a query without keys by +inf; -inf would make exp(score - lse) infinite.
    lse = lse.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # the random state of dropout, which is off
    grads = _aten._flash_attention_backward(
        dout.contiguous(),
        q,
        k,
        v,
        out,
        lse,
        *_flash_lengths(args),
        0.0,
        args.causal,
        unused,
        unused,
        **_flash_options(args),
    )
    return _cut(grads, sizes)


def _flash_lengths(args: Arguments) -> tuple[Tensor, Tensor, int, int]:
    # A maximum of 1 selects a decoding path that reshapes q as if every sequence had one query: wrong for empty ones.
    return args.cu_seqlens_q, args.cu_seqlens_k, max(args.max_seqlen_q, 2), args.max_seqlen_k


def _flash_options(args: Arguments) -> dict[str, object]:
    left, right = args.window_size_left, args.window_size_right
    return {
        "scale": args.softmax_scale,
        "window_size_left": left if left >= 0 else None,
        "window_size_right": right if right >= 0 else None,
    }


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    size = v.shape[-1]
    rows = [x[None] for x in _repeat_heads(q.shape[1], *_one_size(q, k, v, multiple=4))]
    out, lse, *_ = _aten._efficient_attention_forward(
        *rows, None, *_efficient_lengths(args), 0.0, 2 if args.causal else 0, True, **_efficient_options(args)
    )
    seen, at = _seen(q, args)
    lse = lse.transpose(0, 1)[:, at.sequence, at.position]
    return out[0, ..., :size].masked_fill(~seen[:, None, None], 0), lse.masked_fill(~seen, -torch.inf)


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    sizes, heads_kv, groups = (q.shape[-1], k.shape[-1], v.shape[-1]), k.shape[1], q.shape[1] // k.shape[1]
    seen, at = _seen(q, args)
    dout = dout.masked_fill(~seen[:, None, None], 0)
    sequences = args.cu_seqlens_q.shape[0] - 1
    longest = -(-args.max_seqlen_q // 32) * 32
    # The kernel's (N, H, M); +inf hides a query without keys. The extra sequence takes rows past the last offset.
    by_sequence = lse.new_full((sequences + 1, q.shape[1], longest), torch.inf)
    sequence = torch.where(at.valid, at.sequence, sequences)
    by_sequence[sequence, :, torch.where(at.valid, at.position, 0)] = lse.masked_fill(~seen, torch.inf).T
    rows = [x[None] for x in _repeat_heads(q.shape[1], *_one_size(q, k, v, out, dout, multiple=4))]
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of dropout, which is off
    dq, dk, dv, _ = _aten._efficient_attention_backward(
        rows[4].contiguous(), *rows[:3], None, rows[3].contiguous(), *_efficient_lengths(args),
        by_sequence[:-1].contiguous(), 0.0, unused, unused, 2 if args.causal else 0, False, **_efficient_options(args),
    )  # fmt: skip
    dk, dv = (x.unflatten(2, (heads_kv, groups)).sum(3) for x in (dk, dv))
    dq = dq.masked_fill(~seen[None, :, None, None], 0)
    return _cut((dq[0], dk[0], dv[0]), sizes)


def _efficient_lengths(args: Arguments) -> tuple[Tensor, Tensor, int, int]:
    return args.cu_seqlens_q, args.cu_seqlens_k, args.max_seqlen_q, args.max_seqlen_k


def _efficient_options(args: Arguments) -> dict[str, object]:
    window = args.window_size_left + 1 if args.window_size_left >= 0 else None
    return {"scale": args.softmax_scale, "window_size": window}


def _seen(q: Tensor, args: Arguments) -> tuple[Tensor, dense.Coordinates]:
    """Which queries see a key, bool (T,), and where each lies; rows past the last offset see none."""
    at = dense.coordinates(args.cu_seqlens_q, torch.arange(q.shape[0], device=q.device))
    length_k = args.cu_seqlens_k.diff()[at.sequence]
    seen = at.valid & (length_k > 0)
    if args.causal:
        seen = seen & (at.position + length_k - args.cu_seqlens_q.diff()[at.sequence] >= 0)
    return seen, dense.Coordinates(at.sequence, torch.where(at.valid, at.position, 0), at.valid)


def _one_size(*tensors: Tensor, multiple: int) -> list[Tensor]:
    """All head sizes padded with zeros, which change nothing, to one that the kernel takes."""
    size = -(-max(x.shape[-1] for x in tensors) // multiple) * multiple
    return [x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in tensors]


def _repeat_heads(heads: int, *tensors: Tensor) -> list[Tensor]:
    return [x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1) for x in tensors]


def _cut(grads: tuple[Tensor, Tensor, Tensor], sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (grad[..., :size] for grad, size in zip(grads, sizes, strict=True))
    return dq, dk, dv
