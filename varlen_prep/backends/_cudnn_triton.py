"""The Triton kernel of `_cudnn_sequences`, for GPUs; imported at its first use.

N sequences, T packed rows, H heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SPARE = 4
"""Offsets beyond N, so that those of each tensor start at a multiple of 16 bytes, as N is a multiple of 4."""
_PARTS = 32
"""Programs that share the rows of one sequence that see no key."""


def describe(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, sequences: int, right: int, backward: bool, strides: tuple[int, ...],
    out: Tensor, lse: Tensor, parts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """int32 (2, N) lengths and int64 (6, N + spare) starts; in the forward pass the rows without keys are filled."""
    width = sequences + _SPARE
    lengths = cu_seqlens_q.new_empty((2, sequences))
    starts = cu_seqlens_q.new_empty((6, width), dtype=torch.int64)
    sizes = (0, 0) if backward else (out[0].numel(), lse.shape[1])
    with torch.cuda.device_of(out):
        _describe[(sequences + 1, min(parts, _PARTS))](
            cu_seqlens_q, cu_seqlens_k, lengths, starts, out, lse, cu_seqlens_q.shape[0] - 1, sequences, width,
            right if right >= 0 else 2**31 - 1, int(backward), *strides, *sizes, BLOCK=1024,
        )  # fmt: skip
    return lengths, starts


@triton.jit(
    # One kernel for all sizes: none is compiled while a CUDA graph is captured.
    do_not_specialize=[
        "given", "sequences", "width", "right", "backward", "q_row", "out_row", "lse_row", "k_row", "v_row", "grad_row",
        "columns", "heads",
    ],
    do_not_specialize_on_alignment=["cu_q", "cu_k", "lengths", "starts", "out", "lse"],
)  # fmt: skip
def _describe(
    cu_q, cu_k, lengths, starts, out, lse, given, sequences, width, right, backward, q_row, out_row, lse_row, k_row,
    v_row, grad_row, columns, heads, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    sequence = tl.program_id(0)
    part = tl.program_id(1)
    first, last = tl.minimum(sequence, given), tl.minimum(sequence + 1, given)
    begin_q, begin_k = tl.load(cu_q + first).to(tl.int64), tl.load(cu_k + first).to(tl.int64)
    length_q, length_k = tl.load(cu_q + last) - begin_q, tl.load(cu_k + last) - begin_k
    seeing = tl.where(length_k > 0, tl.minimum(length_q, length_k + right), 0)
    hidden = length_q - seeing
    if part == 0:
        if sequence < sequences:
            seen = tl.where((backward != 0) & (seeing == 0), 0, length_k)
            tl.store(lengths + sequence, seeing.to(tl.int32))
            tl.store(lengths + sequences + sequence, seen.to(tl.int32))
        start = begin_q + hidden
        tl.store(starts + sequence, start * q_row)
        tl.store(starts + width + sequence, start * out_row)
        tl.store(starts + 2 * width + sequence, start * lse_row)
        tl.store(starts + 3 * width + sequence, begin_k * k_row)
        tl.store(starts + 4 * width + sequence, begin_k * v_row)
        tl.store(starts + 5 * width + sequence, begin_k * grad_row)
    place = tl.arange(0, BLOCK)
    for row in range(part, hidden.to(tl.int32), tl.num_programs(1)):
        for column in range(0, columns, BLOCK):
            at = out + (begin_q + row) * columns + column + place
            tl.store(at, tl.zeros((BLOCK,), out.dtype.element_ty), mask=column + place < columns)
        for head in range(0, heads, BLOCK):
            tl.store(lse + (begin_q + row) * heads + head + place, float("-inf"), mask=head + place < heads)
