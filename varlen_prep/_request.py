"""What a call of `varlen_attention` asks for, checked, and the backend that runs it.

Only host values are looked at, so calls of the same shapes and options get the same answer. In eager code it is kept:
finding it anew would take longer than a small kernel.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import selection
from .backends import Backend, Request
from .metadata import VarlenMetadata


class Call(NamedTuple):
    """The host values of a call, hashable outside a trace; put together only for an answer that is not kept."""

    shapes: tuple[torch.Size, torch.Size, torch.Size]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    devices: tuple[torch.device, torch.device, torch.device, torch.device]
    """Of q, k, v and the metadata."""
    padded: tuple[int | None, int | None, int | None]
    """Of the metadata: batch, seq_q, seq_kv."""
    totals: tuple[int | None, int | None]
    equal_lengths: bool
    backend: str | None
    state: tuple[str | None, int] | None
    """Of `selection`, whose answer may differ once it changes; None where no answer is kept."""
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    deterministic: bool
    backward: bool
    lse: bool


def choose(
    q: Tensor, k: Tensor, v: Tensor, meta: VarlenMetadata, backend: str | None, causal: bool,
    window_size: tuple[int, int], softcap: float, deterministic: bool, backward: bool, lse: bool, keep: bool,
) -> Backend:  # fmt: skip
    """The backend for a call of `varlen_attention`, or the error that says what is wrong with the call.

    With `keep` the answer is remembered; not while tracing, where sizes are not yet known.
    """
    fields = (
        (q.shape, k.shape, v.shape),
        (q.dtype, k.dtype, v.dtype),
        (q.device, k.device, v.device, meta.cu_seqlens_q.device),
        (meta.batch, meta.seq_q, meta.seq_kv),
        (meta.total_q, meta.total_k),
        meta.equal_lengths,
        backend,
        selection.state() if keep else None,  # a trace would be guarded by it
        causal,
        window_size,
        softcap,
        deterministic,
        backward,
        lse,
    )
    # Whether a kernel is deterministic may depend on a switch of torch.
    return _kept(*fields) if keep and not deterministic else _choose(*fields)


def _choose(*fields: Any) -> Backend:
    call = Call(*fields)
    _check_tensors(call)
    aligned = call.causal or call.window_size != (-1, -1)
    if aligned and _queries_unstated(call):
        raise ValueError(
            "causal=True or window_size= with a key mask aligns queries to keys: say which queries take part. "
            "Pass mask_q to prepare_varlen (mask_q=mask for self-attention; all True for left-padded keys, chunked "
            "prefill or decoding)."
        )
    q, k, v = call.shapes
    request = Request(
        device=call.devices[0],
        dtype=call.dtypes[0],
        heads=q[-2],
        heads_kv=k[-2],
        head_dim=q[-1],
        head_dim_v=v[-1],
        causal=call.causal,
        window_size=call.window_size,
        softcap=call.softcap,
        deterministic=call.deterministic,
        backward=call.backward,
        lse=call.lse,
        equal_lengths=aligned and call.equal_lengths,
        rows_q=math.prod(q[:-2]),
        rows_k=math.prod(k[:-2]),
    )
    return selection.select(call.backend, request)


_kept = functools.lru_cache(maxsize=1024)(_choose)


def _queries_unstated(call: Call) -> bool:
    """A key mask came without a query mask."""
    total_q, total_k = call.totals
    return call.padded[0] is not None and total_k is None and total_q is not None


def check_kinds(q: Tensor, k: Tensor, v: Tensor) -> None:
    """That q, k and v are tensors."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}.")


def check_options(
    causal: bool, window_size: tuple[int, int], softmax_scale: float | None, softcap: float, deterministic: bool
) -> None:
    """Types and ranges of the options."""
    if not (isinstance(causal, int) and isinstance(deterministic, int)):  # a bool is one
        name, flag = ("deterministic", deterministic) if isinstance(causal, int) else ("causal", causal)
        raise TypeError(f"{name}: expected a bool, got {type(flag).__name__}.")
    if isinstance(softmax_scale, Tensor) or isinstance(softcap, Tensor):
        name = "softmax_scale" if isinstance(softmax_scale, Tensor) else "softcap"
        raise TypeError(
            f"{name}: expected a number, got a tensor, which would be read from the device and get no gradient; "
            "scale q instead."
        )
    if softcap < 0:
        raise ValueError(f"softcap: expected 0 (off) or a positive number, got {softcap}.")
    left, right = window_size if isinstance(window_size, (tuple, list)) and len(window_size) == 2 else (None, None)
    if not (isinstance(left, int) and isinstance(right, int) and left >= -1 and right >= -1):
        raise ValueError(
            f"window_size: expected (left, right), each -1 (no bound) or the number of neighbours, got {window_size}."
        )


def _check_tensors(call: Call) -> None:
    """Dtypes, shapes and devices of q, k and v, with each other and with the metadata."""
    if len(set(call.dtypes)) > 1:
        raise TypeError(f"q, k, v: expected one dtype, got {', '.join(map(str, call.dtypes))}; cast them.")
    of_q, of_k, of_v = call.shapes
    if len(of_q) not in (3, 4) or not len(of_q) == len(of_k) == len(of_v):
        raise ValueError(
            "q, k, v: expected all padded (batch, seq, heads, head_dim) or all packed (rows, heads, head_dim), got "
            f"{tuple(of_q)}, {tuple(of_k)}, {tuple(of_v)}."
        )
    if of_k[:-1] != of_v[:-1] or of_q[-1] != of_k[-1]:
        raise ValueError(
            "q, k, v: expected k and v of the same rows and heads, and q and k of the same head_dim, got "
            f"{tuple(of_q)}, {tuple(of_k)}, {tuple(of_v)}."
        )
    if of_q[-1] == 0 or of_v[-1] == 0:
        raise ValueError(f"q, v: expected a head_dim of at least 1, got {of_q[-1]} and {of_v[-1]}.")
    if of_k[-2] == 0 or of_q[-2] % of_k[-2] != 0:
        raise ValueError(f"q: expected a multiple of the {of_k[-2]} key heads, got {of_q[-2]} heads.")
    if len(set(call.devices)) > 1:
        raise ValueError(
            f"q, k, v, meta: expected one device, got {', '.join(map(str, call.devices))}; prepare with "
            "device=q.device or call meta.to(q.device)."
        )
    batch, *seqs = call.padded
    for name, shape, seq, total in zip("qk", (of_q, of_k), seqs, call.totals, strict=True):
        if batch is not None and seq is not None:
            expected = (batch, seq) if len(shape) == 4 else (batch * seq,)
            if shape[:-2] != expected:
                raise ValueError(
                    f"{name}: the metadata describes {expected} rows, followed by (heads, head_dim), got "
                    f"{tuple(shape)}; heads come after rows here, unlike in scaled_dot_product_attention."
                )
        elif len(shape) == 4:
            raise ValueError(
                f"{name}: the metadata describes packed rows, so (rows, heads, head_dim) was expected, got "
                f"{tuple(shape)}; flatten batch and sequence ({name}.flatten(0, 1))."
            )
        elif total is not None and shape[0] < total:
            raise ValueError(f"{name}: the metadata describes {total} rows, got {shape[0]}.")
