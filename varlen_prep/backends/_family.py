"""What the kernels of the flash-attention family share, torch's own among them: dtypes, head sizes, signs of the LSE.

T packed rows, H heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._record import Arguments, Request

HALF = (torch.float16, torch.bfloat16)
OVERREACH = 512
"""No kernel has a tile of more than 256 keys, so none reads further past the end of a sequence."""


ARGUMENTS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal")
"""What flash-attn 3 and 4 call their arguments after the tensors."""


def arguments(args: Arguments) -> tuple[Any, ...]:
    """The values of `ARGUMENTS`."""
    return (*args[:4], args.softmax_scale, args.causal)


def refuse_head_size(request: Request, most: int = 256) -> list[str]:
    size = max(request.head_dim, request.head_dim_v)
    return [f"head size {size} (at most {most})"] if size > most else []


def result(out: Tensor, lse: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """What a forward kernel wrote, in the form of the contract."""
    return cut_size(out, v.shape[-1]), contract_lse(lse) if args.lse else lse


def cut_size(x: Tensor, size: int) -> Tensor:
    """x without the zeros that padded its head size."""
    return x if x.shape[-1] == size else x[..., :size]


def contract_lse(lse: Tensor) -> Tensor:
    """In place: the kernel marks a query without keys by +inf, the contract by -inf."""
    return lse.nan_to_num_(nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)


def kernel_lse(lse: Tensor) -> Tensor:
    """The way back: with -inf, exp(score - lse) would be infinite."""
    return lse.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)


def one_size(*tensors: Tensor, multiple: int = 8) -> list[Tensor]:
    """All head sizes padded with zeros, which change nothing, to one that the kernel takes, elements side by side."""
    sizes = [x.shape[-1] for x in tensors]
    size = -(-max(sizes) // multiple) * multiple
    if min(sizes) < size:
        tensors = tuple(x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in tensors)
    return [x if x.stride()[-1] == 1 else x.contiguous() for x in tensors]


def cut(grads: tuple[Tensor, ...], *like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients back to the head sizes of q, k and v."""
    dq, dk, dv = (cut_size(grad, x.shape[-1]) for grad, x in zip(grads, like, strict=True))
    return dq, dk, dv
