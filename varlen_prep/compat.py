"""flash-attn's own functions over this library: change an import line, keep the call.

B rows, S padded length, T packed rows, H heads, D head size, N sequences.  `flash_attn_varlen_func` runs through
`varlen_attention`, so it traces, runs on CPU, and leaves no row undefined. The padding helpers have flash-attn's
signatures and return values; by default they read two numbers from the device once, because a result of `total` rows
needs them, and with `fixed_size=True` they read nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _checks as checks
from .attention import varlen_attention
from .metadata import VarlenMetadata
from .moves import by_row, past_end
from .offsets import Side, packed


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0,  # not 0.0: see varlen_attention
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """`flash_attn.flash_attn_varlen_func` with any backend.

    Args:
        q: `(T_q, H, D)`; k, v: `(T_k, H_kv, D)`.
        cu_seqlens_q, cu_seqlens_k: int32 (N + 1,) offsets, trusted as flash-attn trusts them.
        max_seqlen_q, max_seqlen_k: host ints that no length exceeds.
        dropout_p, alibi_slopes, block_table: only their defaults.
        backend: name of the kernel; None: chosen as in `varlen_attention`.

    Returns:
        Output `(T_q, H, D)`; with `return_attn_probs` `(output, log-sum-exp (H, T_q), None)`.

    Raises:
        ValueError: an argument that is not supported, named.
        TypeError: a maximum that is a tensor, or offsets that are not int32.

    Example:
        >>> import torch
        >>> from varlen_prep.compat import flash_attn_varlen_func
        >>> x = torch.randn(5, 2, 8)
        >>> cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
        >>> flash_attn_varlen_func(x, x, x, cu_seqlens, cu_seqlens, 3, 3, causal=True).shape
        torch.Size([5, 2, 8])
    """
    unsupported = {
        "dropout_p": dropout_p > 0,
        "alibi_slopes": alibi_slopes is not None,
        "block_table": block_table is not None,
    }
    for name, given in unsupported.items():
        if given:
            raise ValueError(f"{name}: not supported here; leave it at its default, or call flash_attn itself.")
    for name, maximum in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        checks.check_size(name, maximum)
    meta = VarlenMetadata.from_sides(
        Side(cu_seqlens_q, max_seqlen_q, exact=False),
        Side(cu_seqlens_k, max_seqlen_k, exact=False),
        shape=None,
        layout="packed",
    )
    result = varlen_attention(
        q,
        k,
        v,
        meta,
        backend=backend,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )
    return (*result, None) if isinstance(result, tuple) else result


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None, *, fixed_size: bool = False
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """`flash_attn.bert_padding.unpad_input`: the rows that take part, and what describes them.

    Args:
        hidden_states: `(B, S, ...)`.
        attention_mask: (B, S) bool or int, nonzero = takes part.
        unused_mask: (B, S), nonzero = keeps its row though it does not take part.
        fixed_size: return B * S rows instead of `total`, which reads nothing from the device: rows past
            `cu_seqlens[-1]` are 0, their index is B * S, and the maximum is the bound S.

    Returns:
        `(hidden_states (total, ...), indices int64 (total,), cu_seqlens int32 (B + 1,), max_seqlen int,
        seqused int32 (B,))`. `seqused` counts the rows of `attention_mask` alone.

    Raises:
        ValueError: shapes that do not fit.
        RuntimeError: inside a CUDA graph capture without `fixed_size`.

    Example:
        >>> import torch
        >>> from varlen_prep.compat import index_first_axis, pad_input, unpad_input
        >>> x = torch.tensor([[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]])
        >>> rows, indices, cu_seqlens, _, _ = unpad_input(x, torch.tensor([[1, 1, 0], [0, 0, 1]]))
        >>> rows.flatten().tolist(), cu_seqlens.tolist()
        ([1.0, 2.0, 6.0], [0, 2, 3])
        >>> pad_input(rows, indices, 2, 3).flatten().tolist()
        [1.0, 2.0, 0.0, 0.0, 0.0, 6.0]
        >>> index_first_axis(x.flatten(0, 1), indices).equal(rows)
        True
    """
    batch, seq = attention_mask.shape
    if hidden_states.shape[:2] != attention_mask.shape:
        raise ValueError(
            f"attention_mask: expected {tuple(hidden_states.shape[:2])} like hidden_states, got "
            f"{tuple(attention_mask.shape)}."
        )
    used = attention_mask != 0
    kept = used if unused_mask is None else used | (unused_mask != 0)
    side = packed("batch * seq", kept)
    assert side.order is not None
    total, longest = batch * seq, seq
    indices = side.order
    if fixed_size:
        indices = indices.masked_fill(past_end(side.cu_seqlens, total), batch * seq)
    elif total > 0:
        sizes = torch.stack([side.cu_seqlens[-1], side.cu_seqlens.diff().amax()])
        total, longest = checks.read_ints(sizes, "the number of rows", "fixed_size=True", batch * seq)
        indices = indices[:total]
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, side.cu_seqlens, longest, used.sum(1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """`flash_attn.bert_padding.pad_input`: rows back to `(batch, seqlen, ...)`, 0 elsewhere.

    Args:
        hidden_states: `(total, ...)`, or the B * S rows of the fixed-size form.
        indices: int64 (total,) from `unpad_input`.
    """
    return _Pad.apply(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """`flash_attn.bert_padding.index_first_axis`: `x[indices]`, no row twice; an index of `x.shape[0]` gives zeros.

    Args:
        x: `(rows, ...)`.
        indices: int64 (total,).
    """
    return _Take.apply(x, indices)


class _Take(torch.autograd.Function):
    """Rows by index. No row is taken twice, so the gradient is a plain scatter, without atomics."""

    @staticmethod
    def forward(x: Tensor, indices: Tensor) -> Tensor:
        return _take(x, indices)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, indices = inputs
        ctx.save_for_backward(indices)
        ctx.rows = x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _put(grad, ctx.saved_tensors[0], ctx.rows), None


class _Pad(torch.autograd.Function):
    """The inverse of `_Take`."""

    @staticmethod
    def forward(x: Tensor, indices: Tensor, rows: int) -> Tensor:
        return _put(x, indices, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _take(grad, ctx.saved_tensors[0]), None, None


def _take(x: Tensor, indices: Tensor) -> Tensor:
    if x.shape[0] == 0:
        return x.new_zeros(indices.shape[0], *x.shape[1:])
    return x.index_select(0, indices.clamp(max=x.shape[0] - 1)).masked_fill(by_row(indices >= x.shape[0], x), 0)


def _put(x: Tensor, indices: Tensor, rows: int) -> Tensor:
    """Rows of x at `indices` of a zero buffer; index `rows` is dropped."""
    return x.new_zeros(rows + 1, *x.shape[1:]).index_copy(0, indices, x)[:rows]
