"""SageAttention 1.x and 2.x (`sageattention`, Triton): int8 scores, forward only.

T packed rows, N sequences, H heads, D head size.  Read in 1.0.6, 2.0.1 and 2.2.0.  Its public `sageattn_varlen` is not
called, only the two kernels below it, because everything around them breaks a promise of this library:

- It subtracts the mean of K over the whole buffer (1.x: in place, from the caller's K), which mixes sequences and
  spreads NaN. Here each sequence loses its own mean, in a private copy: softmax does not change, int8 fits K better.
- It reads the number of its scales from the device, twice. Here that number is a bound that the shapes give.
- Without `causal`, the lanes between the last key of a sequence and the next multiple of 64 count as keys of logit 0 up
  to 2.0.1 and in early builds of 2.2.0. Here the share of the weight that true keys got is measured and divided by
  (`_share`): exact up to rounding, at the cost of a second pass over the sequences that have such lanes, unless the
  head size leaves a column of V free. Keys without mean have a largest logit of at least 0, so the share is never below
  1/64 and the division is always safe.
- With `causal`, the last block of 128 queries reads a scale past those of its sequence, and 0 times what lies there may
  be NaN. Here each sequence has all the scales that are read, 0 where it has no keys.

Measured with int8 emulated on the CPU, normal q, k, v: root mean square error 0.0014 (0.0023 causal) with or without
that mean; with a bias of 10 standard deviations on K 0.0014 with it and 0.025 without, where the correction of the
lanes then fails too (errors to 3). Float32 copies of K gave the same errors as copies in its own dtype.

V is cast to float16 and summed in float16: values of V above about 1000 may overflow, and K without mean must fit its
dtype. Both kernels address int32 elements within a sequence; longer ones are refused.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from .._checks import INT32_MAX
from . import _machine
from ._record import Arguments, Backend, Request
from ._sage_kernels import Kernels, find_kernels

# Rows that share one scale: fixed in the attention kernels.
_BLOCK_Q, _BLOCK_K = 128, 64
# The kernels use exp2.
_LOG2_E = 1.44269504
# A grid has 65535 places, and `_share` takes two for each.
_MAX_SEQUENCES = 32767


class _Side(NamedTuple):
    """What the kernels read of the queries or the keys."""

    int8: Tensor
    cu_seqlens: Tensor
    scales: Tensor
    """float32 (slots, H)."""
    slots: Tensor
    """int64 (N + 1,): the first scale of each sequence."""


def forward(load: Callable[[], Kernels], q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    """`load` gives the kernels."""
    # Triton launches on the current device.
    with torch.cuda.device_of(q):
        out = attend(load(), q, k, v, args)
    # The kernels have no LSE. +inf, which no query has, spoils every use of it; opcheck takes two NaN for a difference.
    return out, q.new_full((q.shape[1], q.shape[0]), torch.inf, dtype=torch.float32)


def attend(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> Tensor:
    """Attention of packed rows by the given kernels; rows past the last offset hold anything."""
    dim_v = v.shape[-1]
    width = 64 if max(q.shape[-1], dim_v) <= 64 else 128
    cu_seqlens_q, cu_seqlens_k = _offsets(args, width, q, k, v)
    if cu_seqlens_q.shape[0] == 1:
        return q.new_zeros((*q.shape[:-1], dim_v))
    slots_q, count_q = _slots(cu_seqlens_q, q.shape[0], 1)
    slots_k, count_k = _slots(cu_seqlens_k, k.shape[0], _BLOCK_Q // _BLOCK_K)
    k = _without_mean(k, cu_seqlens_k, slots_k, count_k)
    factor = args.softmax_scale * _LOG2_E
    # Columns of zeros change no score and no scale.
    side_q = _quantize(kernels, _widen(q, width), cu_seqlens_q, slots_q, count_q, args.max_seqlen_q, _BLOCK_Q, factor)
    side_k = _quantize(kernels, _widen(k, width), cu_seqlens_k, slots_k, count_k, args.max_seqlen_k, _BLOCK_K, 1.0)
    v = _values(v, width)
    # A causal query never sees the lanes past the last key: they come after it.
    if args.causal or not kernels.counts_lanes:
        run = kernels.attend_causal if args.causal else kernels.attend
        return _run(run, side_q, side_k, v, args.max_seqlen_q, q.dtype)[..., :dim_v]
    out = _run(kernels.attend, side_q, side_k, v, args.max_seqlen_q, torch.float16)
    share = out[..., dim_v] if dim_v < width else _share(kernels, side_q, side_k, v, args.max_seqlen_q)
    # 0 or old memory: a query without keys or a row past the end.
    share = torch.where(share > 0, share, 1)
    return torch.div(out[..., :dim_v], share[..., None], out=q.new_empty((*q.shape[:-1], dim_v)))


def _offsets(args: Arguments, width: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous offsets, int64 where the kernels' products of offset and stride need it."""
    sequences = args.cu_seqlens_q.shape[0] - 1
    if sequences > _MAX_SEQUENCES:
        raise ValueError(
            f"cu_seqlens: sage takes at most {_MAX_SEQUENCES} sequences, got {sequences}; split the batch."
        )
    dtype = torch.int32
    for x, longest in zip(tensors, (args.max_seqlen_q, args.max_seqlen_k, args.max_seqlen_k), strict=True):
        stride = max(x.stride(0), x.shape[1] * width)
        if min(longest, x.shape[0]) * stride > INT32_MAX:
            raise ValueError(
                f"max_seqlen: sage addresses at most {INT32_MAX} elements of one sequence, got {longest} rows of "
                f"{stride}; give a tighter bound or choose another backend."
            )
        if x.shape[0] * stride > INT32_MAX:
            dtype = torch.int64
    return args.cu_seqlens_q.to(dtype).contiguous(), args.cu_seqlens_k.to(dtype).contiguous()


def _slots(cu_seqlens: Tensor, rows: int, each: int) -> tuple[Tensor, int]:
    """Places for scales: `each` for every 128 rows of every sequence; their offsets and a bound of their number."""
    slots = cu_seqlens.new_zeros(cu_seqlens.shape, dtype=torch.int64)
    torch.cumsum((cu_seqlens.diff() + _BLOCK_Q - 1) // _BLOCK_Q * each, 0, out=slots[1:])
    return slots, (rows // _BLOCK_Q + cu_seqlens.shape[0] - 1) * each


def _without_mean(k: Tensor, cu_seqlens: Tensor, slots: Tensor, count: int) -> Tensor:
    """k minus the mean key of its sequence, a fresh tensor.

    `embedding_bag` sums in float32, in a fixed order, only the rows of its bag: first 64 rows at a time, so that a long
    sequence is not one thread's work, then the blocks of each sequence.
    """
    rows = k.flatten(1)
    index = torch.arange(count, device=k.device)
    sequence = torch.searchsorted(slots[1:], index, right=True)  # N for slots that no sequence has
    begin = cu_seqlens.index_select(0, sequence).long()
    end = cu_seqlens.index_select(0, (sequence + 1).clamp_max(cu_seqlens.shape[0] - 1)).long()
    block = torch.minimum(begin + (index - slots.index_select(0, sequence)) * _BLOCK_K, end)
    # The last bag takes the rest: rows that belong to no sequence.
    block = torch.cat([block, cu_seqlens[-1:].long()])
    means = F.embedding_bag(torch.arange(rows.shape[0], device=k.device), rows, block, mode="mean")
    weights = block.diff() / (end - begin).clamp_min(1)
    means = F.embedding_bag(index, means.float(), slots, mode="sum", per_sample_weights=weights)
    mean = means.to(k.dtype).index_select(0, _sequence_of_rows(cu_seqlens[1:], rows.shape[0]))
    return torch.sub(rows, mean, out=mean).view(k.shape)


def _sequence_of_rows(ends: Tensor, rows: int) -> Tensor:
    """int64 (rows,); N for rows past the last offset."""
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)


def _quantize(
    kernels: Kernels, x: Tensor, cu_seqlens: Tensor, slots: Tensor, count: int, longest: int, block: int, factor: float
) -> _Side:
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = x.new_zeros((count, x.shape[1]), dtype=torch.float32)
    grid = (-(-min(longest, x.shape[0]) // block), x.shape[1], cu_seqlens.shape[0] - 1)
    strides = (x.stride(1), x.stride(0), out.stride(1), out.stride(0))
    kernels.quantize[grid](
        x, out, scales, cu_seqlens, slots, *strides, sm_scale=factor, H=x.shape[1], C=x.shape[2], BLK=block
    )
    return _Side(out, cu_seqlens, scales, slots)


def _values(v: Tensor, width: int) -> Tensor:
    """float16 v of the kernel's width; a free column holds 1, which turns into the share of `_share`."""
    if v.shape[-1] == width:
        v = v.to(torch.float16)
        return v if v.stride(-1) == 1 else v.contiguous()
    out = v.new_zeros((*v.shape[:-1], width), dtype=torch.float16)
    out[..., : v.shape[-1]] = v
    out[..., v.shape[-1]] = 1
    return out


def _widen(x: Tensor, width: int) -> Tensor:
    """x with columns of zeros up to `width`, and a contiguous last dimension."""
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _run(kernel: Callable[..., Tensor], q: _Side, k: _Side, v: Tensor, longest: int, dtype: torch.dtype) -> Tensor:
    longest = min(longest, q.int8.shape[0])
    offsets = q.cu_seqlens, k.cu_seqlens, longest
    return kernel(q.int8, k.int8, v, *offsets, q.scales, k.scales, q.slots, k.slots, output_dtype=dtype)


def _share(kernels: Kernels, q: _Side, k: _Side, v: Tensor, longest: int) -> Tensor:
    """(T_q, H): the weight that true keys got, below 1 where lanes past the last key took some: the output for V = 1.

    Only sequences with such lanes run, and this is decided on the device. Reversed, each sequence is [begin, end) and
    the span to the one before, [end, begin), has a negative length, which the kernel skips like an empty one.
    """
    lanes = k.cu_seqlens.diff() % _BLOCK_K != 0
    begin, end = q.cu_seqlens[:-1], q.cu_seqlens[1:]
    q = q._replace(cu_seqlens=_spans(begin, torch.where(lanes, end, begin)), slots=_spans(q.slots[:-1], q.slots[1:]))
    k = k._replace(cu_seqlens=_spans(k.cu_seqlens[:-1], k.cu_seqlens[1:]), slots=_spans(k.slots[:-1], k.slots[1:]))
    out = _run(kernels.attend, q, k, v.new_ones(1, 1, v.shape[-1]).expand_as(v), longest, torch.float16)[..., 0]
    ran = torch.cat([lanes, lanes.new_zeros(1)]).index_select(0, _sequence_of_rows(end, out.shape[0]))
    return torch.where(ran[:, None], out, 1)


def _spans(begin: Tensor, end: Tensor) -> Tensor:
    """[begin, end) of each sequence, last sequence first, as one tensor of offsets."""
    return torch.stack([begin, end], 1).flip(0).flatten()


@functools.cache
def _load() -> Kernels:
    """The kernels of the installed package."""
    version = importlib.metadata.version("sageattention")
    return find_kernels("sageattention" if version.startswith("1.") else "sageattention.triton", version)


@functools.cache
def _reasons() -> tuple[str, ...]:
    packages = ("sageattention", "triton")
    reasons = [f"package {name} is not installed" for name in packages if not _machine.has_module(name)]
    if _machine.has_module("sageattention"):
        version = _machine.version("sageattention") or "of unknown version (it has no metadata)"
        if version.split(".")[0] not in ("1", "2"):
            reasons.append(f"sageattention {version}: only 1.x and 2.x are known")
    return (*reasons, *_machine.gpu_reasons((8, 0)))


def _missing() -> list[str]:
    return list(_reasons())


def _refuse(request: Request) -> list[str]:
    sizes = {request.head_dim, request.head_dim_v}
    return [f"head size {size} (at most 128)" for size in sorted(sizes) if size > 128]


SAGE = Backend(
    name="sage",
    op="sage_attn_varlen",
    forward=functools.partial(forward, lambda: _load()),
    backward=None,
    dtypes={"cuda": (torch.float16, torch.bfloat16)},
    summary="SageAttention 1.x and 2.x: int8 scores, forward only, about 1e-2 from exact",
    install="pip install sageattention",
    missing=_missing,
    refuse=_refuse,
    window=False,
    lse=False,
    bottom_right=False,
)
