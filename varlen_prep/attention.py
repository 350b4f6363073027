"""`varlen_attention`: padded or packed rows in, the same out, through any backend.

B rows, S padded length, T packed rows, H heads, H_kv key heads, D head size.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from . import op, selection
from ._direct import differentiates, refuse_tangents
from .backends import Request
from .metadata import VarlenMetadata
from .moves import keep_rows
from .packing import pack_rows, unpack, zero_gradient_rows


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: VarlenMetadata,
    *,
    backend: str | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0,  # not 0.0: a float default is traced as a tensor input and read by .item()
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each sequence of a ragged batch.

    Query i of a sequence with lengths (lq, lk) sees key j of the same sequence; with `causal`, only
    `j <= i + lk - lq` (bottom-right aligned, as in flash-attn).

    Args:
        q: `(B, S_q, H, D)` padded, or `(T_q, H, D)` packed rows in the order of `pack`.
        k: `(B, S_kv, H_kv, D)` or `(T_k, H_kv, D)`; H must be a multiple of H_kv.
        v: as k, with head size D_v.
        meta: from `prepare_varlen` or a `VarlenMetadata.from_*` constructor, on the same device.
        backend: name of the kernel (see `backends()`); None: the scope's (`use_backend`), else chosen automatically.
        causal: bottom-right aligned per sequence.
        window_size: (left, right) neighbours that a query sees besides its own place; -1 is no bound.
        softmax_scale: None: `D ** -0.5`.
        softcap: scores become `softcap * tanh(scores / softcap)`; 0 is off.
        deterministic: ask for a deterministic backward.
        return_lse: also return the log-sum-exp.

    Returns:
        Output like q with head size D_v. Rows that take no part (masked queries, rows past the last offset, queries
        without keys) are exactly 0 and so are their gradients. With `return_lse`, also the natural-log log-sum-exp,
        float32 (float64 for float64 input), `(B, H, S_q)` padded or `(H, T_q)` packed, -inf where no key is seen,
        without gradient.

    Raises:
        ValueError: shapes that do not fit each other or the metadata, `causal` or a window with a key mask but no
            `mask_q`, or something the backend cannot do (all reasons are listed).
        TypeError: q, k, v of different dtypes; options of other types.

    Example:
        >>> import torch
        >>> from varlen_prep import prepare_varlen, varlen_attention
        >>> q = k = torch.zeros(1, 3, 1, 8)
        >>> v = torch.arange(3.0).view(1, 3, 1, 1).expand(1, 3, 1, 8)
        >>> meta = prepare_varlen(1, 3, 3, torch.tensor([[True, False, True]]))
        >>> varlen_attention(q, k, v, meta)[0, :, 0, 0].tolist()
        [1.0, 1.0, 1.0]
    """
    _check_tensors(q, k, v, meta)
    _check_options(causal, window_size, softmax_scale, softcap, deterministic)
    refuse_tangents(q, k, v)
    aligned = causal or tuple(window_size) != (-1, -1)
    if aligned and _queries_unstated(meta):
        raise ValueError(
            "causal=True or window_size= with a key mask aligns queries to keys: say which queries take part. "
            "Pass mask_q to prepare_varlen (mask_q=mask for self-attention; all True for left-padded keys, chunked "
            "prefill or decoding)."
        )
    request = Request(
        device=q.device,
        dtype=q.dtype,
        heads=q.shape[-2],
        heads_kv=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        causal=causal,
        window_size=(window_size[0], window_size[1]),
        softcap=softcap,
        deterministic=deterministic,
        backward=differentiates(q, k, v),
        lse=return_lse,
        equal_lengths=aligned and meta.equal_lengths,
        rows_q=math.prod(q.shape[:-2]),
        rows_k=math.prod(k.shape[:-2]),
    )
    chosen = selection.select(backend, request)
    if request.backward:
        meta = meta.trainable()
    padded = q.ndim == 4
    finite, finite_backward = chosen.finite_padding, chosen.finite_padding and request.backward
    spare = -1 if request.backward else chosen.overreach
    q = _to_rows(q, meta, "q", finite_backward, spare)
    k = _to_rows(k, meta, "k", finite_backward, spare)
    v = _to_rows(v, meta, "k", finite, spare)
    out, lse = op.call(
        chosen,
        q,
        k,
        v,
        meta.cu_seqlens_q,
        meta.cu_seqlens_k,
        meta.max_seqlen_q,
        meta.max_seqlen_k,
        causal,
        *window_size,
        softmax_scale,
        softcap,
        deterministic,
        lse=return_lse,
    )
    if finite_backward and meta.layout == "in_place" and (runs := meta.runs("q", out.shape[0])) is not None:
        out = zero_gradient_rows(out, *runs)
    out = _from_rows(out, meta, padded, 0.0)
    if not return_lse:
        return out
    lse = _from_rows(lse.detach().T, meta, padded, -torch.inf)
    return out, lse.transpose(-1, -2)


def _to_rows(x: Tensor, meta: VarlenMetadata, side: Literal["q", "k"], finite: bool, spare: int) -> Tensor:
    """The rows that the kernel reads; with `finite`, `spare` rows next to those that take part are 0 (-1: all)."""
    if x.ndim == 4:
        if (meta.order_q if side == "q" else meta.order_k) is not None:
            return pack_rows(x, meta, side, spare)
        x = x.flatten(0, 1)
    # Gaps in place are sequences, for which the kernel itself writes zero gradients; a tail it never sees.
    untouched = meta.layout == "in_place" or not differentiates(x)
    if not finite and untouched:
        return x
    runs = meta.runs(side, x.shape[0])
    if runs is None:
        return x
    return keep_rows(x, *runs, 0.0, spare) if finite else zero_gradient_rows(x, *runs)


def _from_rows(x: Tensor, meta: VarlenMetadata, padded: bool, fill: float) -> Tensor:
    """Rows that a kernel wrote, (T, ...), in the caller's shape, `fill` where a row takes no part."""
    if meta.layout != "packed":  # every row takes part, or the kernel itself filled the gaps
        return x.unflatten(0, meta.padded_shape("q")) if padded else x
    if padded:
        return unpack(x, meta, "q", fill=fill)
    runs = meta.runs("q", x.shape[0])
    return x if runs is None else keep_rows(x, *runs, fill)


def _queries_unstated(meta: VarlenMetadata) -> bool:
    """A key mask came without a query mask."""
    return meta.batch is not None and meta.total_k is None and meta.total_q is not None


def _check_options(
    causal: bool, window_size: tuple[int, int], softmax_scale: float | None, softcap: float, deterministic: bool
) -> None:
    for name, flag in (("causal", causal), ("deterministic", deterministic)):
        if not isinstance(flag, (bool, int)):
            raise TypeError(f"{name}: expected a bool, got {type(flag).__name__}.")
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        if isinstance(value, Tensor):
            raise TypeError(
                f"{name}: expected a number, got a tensor, which would be read from the device and get no gradient; "
                "scale q instead."
            )
    if softcap < 0:
        raise ValueError(f"softcap: expected 0 (off) or a positive number, got {softcap}.")
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or any(not isinstance(size, int) or size < -1 for size in window_size):
        raise ValueError(
            f"window_size: expected (left, right), each -1 (no bound) or the number of neighbours, got {window_size}."
        )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, meta: VarlenMetadata) -> None:
    if not isinstance(meta, VarlenMetadata):
        raise TypeError(f"meta: expected VarlenMetadata, got {type(meta).__name__}; make it with prepare_varlen.")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them.")
    of_q, of_k, of_v = q.shape, k.shape, v.shape
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
    if not q.device == k.device == v.device == meta.cu_seqlens_q.device:
        raise ValueError(
            f"q, k, v, meta: expected one device, got {q.device}, {k.device}, {v.device}, {meta.cu_seqlens_q.device}; "
            "prepare with device=q.device or call meta.to(q.device)."
        )
    for name, shape, total in (("q", of_q, meta.total_q), ("k", of_k, meta.total_k)):
        if meta.batch is not None:
            batch, seq = meta.padded_shape(name)
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
