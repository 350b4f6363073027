"""`varlen_attention`: padded or packed rows in, the same out, through any backend.

B rows, S padded length, T packed rows, H heads, H_kv key heads, D head size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from . import op
from ._direct import differentiates, only_autograd, refuse_transforms
from ._request import check_kinds, check_options, choose
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
        TypeError: q, k, v of different dtypes, or no tensors; options of other types.
        NotImplementedError: forward-mode differentiation, `torch.func` transforms, second derivatives.

    Example:
        >>> import torch
        >>> from varlen_prep import prepare_varlen, varlen_attention
        >>> q = k = torch.zeros(1, 3, 1, 8)
        >>> v = torch.arange(3.0).view(1, 3, 1, 1).expand(1, 3, 1, 8)
        >>> meta = prepare_varlen(1, 3, 3, torch.tensor([[True, False, True]]))
        >>> varlen_attention(q, k, v, meta)[0, :, 0, 0].tolist()
        [1.0, 1.0, 1.0]
    """
    if not isinstance(meta, VarlenMetadata):
        raise TypeError(f"meta: expected VarlenMetadata, got {type(meta).__name__}; make it with prepare_varlen.")
    check_options(causal, window_size, softmax_scale, softcap, deterministic)
    direct = only_autograd(q, k, v)
    if not direct:
        check_kinds(q, k, v)
        refuse_transforms(q, k, v)
    left, right = window_size
    backward = differentiates(q, k, v)
    chosen = choose(
        q, k, v, meta, backend, causal, (left, right), softcap, deterministic, backward, return_lse, keep=direct
    )
    if backward:
        meta = meta.trainable()
    padded = q.ndim == 4
    finite, finite_backward = chosen.finite_padding, chosen.finite_padding and backward
    spare = -1 if backward else chosen.overreach
    q = _to_rows(q, meta, "q", finite_backward, backward, spare)
    k = _to_rows(k, meta, "k", finite_backward, backward, spare)
    v = _to_rows(v, meta, "k", finite, backward, spare)
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
        left,
        right,
        softmax_scale,
        softcap,
        deterministic,
        lse=return_lse,
        backward=backward,
        direct=direct,
    )
    if finite_backward and meta.layout == "in_place" and (runs := meta.runs("q", out.shape[0])) is not None:
        out = zero_gradient_rows(out, *runs)
    out = _from_rows(out, meta, padded, 0.0)
    if not return_lse:
        return out
    lse = _from_rows(lse.detach().T, meta, padded, -torch.inf)
    return out, lse.transpose(-1, -2)


def _to_rows(
    x: Tensor, meta: VarlenMetadata, side: Literal["q", "k"], finite: bool, backward: bool, spare: int
) -> Tensor:
    """The rows that the kernel reads; with `finite`, `spare` rows next to those that take part are 0 (-1: all)."""
    if x.ndim == 4:
        if (meta.order_q if side == "q" else meta.order_k) is not None:
            return pack_rows(x, meta, side, spare)
        x = x.flatten(0, 1)
    # Gaps in place are sequences, for which the kernel itself writes zero gradients; a tail it never sees.
    if not finite and (meta.layout == "in_place" or not (backward and x.requires_grad)):
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
