"""What cuDNN is told of the sequences: lengths and starts; on a GPU one Triton kernel, elsewhere torch.

N sequences, T packed rows, H heads, D head size.  Queries without keys are left out, and in the backward pass keys
without queries too: what cuDNN does with them depends on the kernel.  Those are the first queries of their sequence, so
the others stay aligned to its end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..moves import has_triton
from ._cudnn_plans import STARTS, Key
from ._record import Arguments


def same_offsets(args: Arguments) -> bool:
    """Both sides have one offsets tensor, so no query is without a key, and no key without a query."""
    return args.cu_seqlens_q.data_ptr() == args.cu_seqlens_k.data_ptr()


def describe(args: Arguments, key: Key, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """The buffers that the plan of `key` needs besides rows.

    Args:
        args: of the call.
        key: of its plan.
        out: (T_q, H, D), dense; in the forward pass rows of queries without keys become 0.
        lse: float32 (T_q, H), dense; there -inf.

    Returns:
        int32 lengths (N,) of both sides, and for each tensor int64 starts (N + 1,) or longer, in its elements.
    """
    if out.is_cuda and has_triton():
        from . import _cudnn_triton

        parts = 1 if same_offsets(args) or key.backward else key.longest_q
        given = args.cu_seqlens_q, args.cu_seqlens_k, key.sequences, key.right, key.backward, key.row_strides
        lengths, starts = _cudnn_triton.describe(*given, out, lse, parts)
        return dict(zip(("lengths_q", "lengths_k", *STARTS), (*lengths.unbind(), *starts.unbind()), strict=True))
    return torch_describe(args, key, out, lse)


def torch_describe(args: Arguments, key: Key, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    """`describe` without Triton."""
    sides = args.cu_seqlens_q, args.cu_seqlens_k
    more = key.sequences + 1 - sides[0].shape[0]
    cu_q, cu_k = (torch.cat([x, x[-1:].expand(more)]).long() for x in sides)
    lengths_q, lengths_k = cu_q.diff(), cu_k.diff()
    seeing = lengths_q if key.right < 0 else torch.minimum(lengths_q, lengths_k + key.right)
    seeing = torch.where(lengths_k > 0, seeing, 0)
    if key.backward:
        lengths_k = torch.where(seeing > 0, lengths_k, 0)
    elif not same_offsets(args):
        out.zero_()
        lse.fill_(-torch.inf)
    starts_q = torch.cat([cu_q[:-1] + lengths_q - seeing, cu_q[-1:]])
    firsts = (*[starts_q] * 3, *[cu_k] * 3)
    starts = {name: x * stride for name, x, stride in zip(STARTS, firsts, key.row_strides, strict=True)}
    return {"lengths_q": seeing.int(), "lengths_k": lengths_k.int(), **starts}
