"""`prepare_varlen`: metadata of a padded batch from its shape and masks.

B rows, S_q and S_kv padded lengths.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from . import _checks as checks
from . import offsets
from .metadata import VarlenMetadata
from .offsets import Side


def prepare_varlen(
    batch: int,
    seq_q: int,
    seq_kv: int,
    mask: Tensor | None = None,
    *,
    mask_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    layout: Literal["packed", "in_place"] = "packed",
    device: torch.device | str | None = None,
) -> VarlenMetadata:
    """Metadata of a padded batch: offsets, maxima and, with a mask, the permutation that packs the rows.

    Call it once per forward and give the result to every layer.

    Args:
        batch, seq_q, seq_kv: padded shape, host ints (SymInts while tracing).
        mask: key mask, bool, True = takes part; any shape that broadcasts to one mask per row: (seq_kv,),
            (batch, seq_kv), (batch, 1, seq_kv), (batch, 1, 1, seq_kv). It never removes queries. None: all keys.
        mask_q: query mask of the same kind over seq_q. None: all queries.
        max_seqlen_q: host int that no query length exceeds. None: `seq_q`.
        max_seqlen_k: host int that no key length exceeds. None with a mask: the exact value, read from the device
            (one sync, the only one). Give `seq_kv` to avoid it.
        layout: "packed" moves valid rows to the front and is right for every mask. "in_place" moves nothing and needs
            one contiguous run of True per row; its maxima are always `seq_q` and `seq_kv`.
        device: of the offsets; None: the mask's, or torch's default device.

    Returns:
        `VarlenMetadata`. Without masks: offsets are `arange(batch + 1) * seq`, and nothing else is allocated.

    Raises:
        ValueError: a mask that differs per query or per head or has another shape, sizes past int32, a bound that is
            too small (in_place has no use for bounds), or a hole under "in_place" (device-side asserts where the mask
            is on a GPU).
        TypeError: a mask that is not bool, or sizes that are not ints.
        RuntimeError: inside a CUDA graph capture with a mask and no `max_seqlen_k`.

    Example:
        >>> import torch
        >>> from varlen_prep import prepare_varlen
        >>> mask = torch.tensor([[True, True, True, False], [True, False, False, True]])
        >>> meta = prepare_varlen(2, 6, 4, mask)
        >>> meta.cu_seqlens_q.tolist(), meta.cu_seqlens_k.tolist(), meta.max_seqlen_k
        ([0, 6, 12], [0, 3, 5], 3)
    """
    for name, size in (("batch", batch), ("seq_q", seq_q), ("seq_kv", seq_kv)):
        checks.check_size(name, size)
    if layout not in ("packed", "in_place"):
        raise ValueError(f"layout: expected 'packed' or 'in_place', got {layout!r}.")
    place = torch.device(device) if device is not None else None
    if place is None:
        given = mask if mask is not None else mask_q
        place = given.device if isinstance(given, Tensor) else None
    keys = None if mask is None else _row_mask("mask", mask, batch, seq_kv, place)
    queries = None if mask_q is None else _row_mask("mask_q", mask_q, batch, seq_q, place)
    shape = (batch, seq_q, seq_kv)
    if keys is None and queries is None:
        q = _uniform("q", batch, seq_q, max_seqlen_q, place)
        k = _uniform("k", batch, seq_kv, max_seqlen_k, place)
        return VarlenMetadata.from_sides(q, k, shape=shape, layout="uniform")
    if layout == "in_place":
        for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if bound is not None:
                checks.check_size(name, bound)
        q, k = offsets.in_place(batch, seq_q, seq_kv, queries, keys)
        return VarlenMetadata.from_sides(q, k, shape=shape, layout="in_place")
    packed_k = None if keys is None else offsets.packed("batch * seq_kv", keys)
    if packed_k is None:
        k = _uniform("k", batch, seq_kv, max_seqlen_k, place)
    else:
        k = _with_exact_maximum(packed_k, seq_kv) if max_seqlen_k is None else _bounded("k", packed_k, max_seqlen_k)
    if queries is None:
        q = _uniform("q", batch, seq_q, max_seqlen_q, place)
    else:
        if packed_k is not None and mask_q is mask and seq_q == seq_kv:
            packed_q = packed_k
        else:
            packed_q = offsets.packed("batch * seq_q", queries)
        q = packed_q if max_seqlen_q is None else _bounded("q", packed_q, max_seqlen_q)
    return VarlenMetadata.from_sides(q, k, shape=shape, layout="packed")


def _uniform(name: str, batch: int, seq: int, bound: int | None, device: torch.device | None) -> Side:
    if bound is not None:
        checks.check_size(f"max_seqlen_{name}", bound)
        if bound < seq:
            raise ValueError(
                f"max_seqlen_{name}: expected a bound of at least {seq}, the length of every row without a mask, "
                f"got {bound}."
            )
    return offsets.uniform(f"batch * seq_{'q' if name == 'q' else 'kv'}", batch, seq, device)


def _bounded(name: str, side: Side, bound: int) -> Side:
    """A side with the caller's bound, which is looked at on the device only where it is smaller than the padded row."""
    checks.check_bound(f"max_seqlen_{name}", bound, side.max_seqlen, side.cu_seqlens.diff)
    return offsets.with_maximum(side, bound, exact=False)


def _with_exact_maximum(side: Side, seq: int) -> Side:
    if side.order is None or side.order.shape[0] == 0:
        return offsets.with_maximum(side, 0, exact=True)
    lengths = side.cu_seqlens.diff()
    (longest,) = checks.read_ints(lengths.amax(), "the longest key length of the mask", "max_seqlen_k=", seq)
    return offsets.with_maximum(side, longest, exact=True)


def _row_mask(name: str, mask: Tensor, batch: int, seq: int, device: torch.device | None) -> Tensor:
    """A user's mask as bool (batch, seq), or an error that says why it cannot be one."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: expected a bool tensor, got {type(mask).__name__}.")
    if mask.dtype != torch.bool:
        if mask.is_floating_point() or mask.is_complex():
            advice = "additive masks have no offsets: pass True where a key takes part, for example mask == 0"
        else:
            advice = (
                "pass mask.bool() if it holds only 0 and 1; labels of documents (0 = padding) go to "
                "VarlenMetadata.from_document_ids(mask.long() - 1)"
            )
        raise TypeError(f"{name}: expected torch.bool, got {mask.dtype}; {advice}.")
    ndim = mask.ndim
    if ndim not in (1, 2, 3, 4) or (ndim > 2 and any(size != 1 for size in mask.shape[1:-1])):
        raise ValueError(
            f"{name}: expected one mask per row, (seq,), (batch, seq), (batch, 1, seq) or (batch, 1, 1, seq) with "
            f"batch {batch} and seq {seq}, got {tuple(mask.shape)}. A mask that differs per query or head cannot be "
            "expressed by offsets; use causal=True or window_size= if that is what it holds."
        )
    rows = mask
    if ndim != 2:
        rows = mask.reshape(1, -1) if ndim == 1 else mask.reshape(mask.shape[0], mask.shape[-1])
    count, length = rows.shape
    # Not `in (1, seq)`: while tracing, a constant is not found in a tuple of traced sizes.
    if (count != 1 and count != batch) or (length != 1 and length != seq):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to (batch, seq) = ({batch}, {seq}), got {tuple(mask.shape)}."
        )
    if device is not None and rows.device != device:
        rows = rows.to(device)
    return rows.expand(batch, seq) if count == 1 or length == 1 else rows
