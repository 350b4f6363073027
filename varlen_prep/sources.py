"""One side's offsets from lengths, ready offsets, document ids and position ids: the work of the `from_*` constructors.

N sequences, T rows.  Host data (lists, and CPU tensors outside a compiled region) gives exact maxima without touching
the device; device data needs a bound or one read.  `capacity` fixes the number of sequences, so that shapes do not
depend on the data: missing sequences are empty, too many are an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from . import _checks as checks
from .moves import from_counts, permutation
from .offsets import Side, with_capacity


def from_lengths(
    side: str, lengths: Tensor | Sequence[int], bound: int | None, capacity: int | None, device: torch.device | None
) -> Side:
    """The side "q" or "k" from its lengths; `bound` is its maximum or None."""
    name = f"lengths_{side}"
    if not isinstance(lengths, Tensor):
        return _from_host_lengths(side, list(lengths), bound, capacity, device)
    _check_offsets_tensor(name, lengths)
    lengths = lengths.to(device) if device is not None else lengths
    _check_capacity(name, lengths.shape[0], capacity)
    counts = lengths.cumsum(0)
    if lengths.shape[0] > 0:
        checks.require(
            (lengths >= 0).all() & (counts[-1] <= checks.INT32_MAX),
            f"{name}: expected lengths >= 0 that add up to at most {checks.INT32_MAX} (int32 offsets).",
        )
    return _with_maximum(side, from_counts(counts), lengths, bound, capacity)


def from_cu_seqlens(
    side: str,
    cu_seqlens: Tensor | Sequence[int],
    bound: int | None,
    total: int | None,
    capacity: int | None,
    device: torch.device | None,
) -> Side:
    """The side "q" or "k" from ready offsets; `total` is the number of rows that they may address, or None."""
    name = f"cu_seqlens_{side}"
    if isinstance(cu_seqlens, Tensor):
        _check_offsets_tensor(name, cu_seqlens)
        device = device if device is not None else cu_seqlens.device
        if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            cu_seqlens = cu_seqlens.tolist()
    if not isinstance(cu_seqlens, Tensor):
        return _from_host_offsets(side, name, list(cu_seqlens), bound, total, capacity, device)
    cu_seqlens = cu_seqlens.to(device)
    _check_capacity(name, cu_seqlens.shape[0] - 1, capacity)
    lengths = cu_seqlens.diff()
    limit = checks.INT32_MAX if total is None else total
    checks.require(
        (cu_seqlens[0] == 0) & (lengths >= 0).all() & (cu_seqlens[-1] <= limit),
        f"{name}: expected offsets that start at 0, never decrease and end at {limit} at most.",
    )
    return _with_maximum(side, cu_seqlens.to(torch.int32), lengths, bound, capacity)


def from_starts(start: Tensor, valid: Tensor | None, bound: int | None, capacity: int | None, move_rows: bool) -> Side:
    """Offsets of documents from where they begin.

    Args:
        start: bool (B, S), True at the first row of each document; never at a row that takes no part.
        valid: bool (B, S), or None when every row takes part.
        bound: bound on the document length, or None.
        capacity: number of sequences, or None: then the count is read from the device.
        move_rows: rows that take no part may lie anywhere, and `order` moves them to the end. Otherwise they may
            only follow all others.
    """
    batch, seq = start.shape
    rows = batch * seq
    checks.check_int32_offsets("rows", rows)
    for name, size in (("capacity", capacity), ("max_seqlen", bound)):
        if size is not None:
            checks.check_size(name, size)
    if rows == 0:
        cu_seqlens = torch.zeros((capacity or 0) + 1, dtype=torch.int32, device=start.device)
        return Side(cu_seqlens, bound or 0, bound is None, 0)
    start = start.flatten()
    documents = start.cumsum(0)  # how many have begun, this row's included
    index = torch.arange(rows, device=start.device)
    rank, order, inverse = index + 1, None, None
    total: int | None = rows
    if valid is not None:
        valid = valid.flatten()
        rank, total = valid.cumsum(0), None
        if move_rows:
            order, inverse = permutation(valid, rank)
        else:
            checks.require(
                (valid == (index < rank[-1])).all(),
                "layout='in_place': rows that take no part must follow all others; use layout='packed'.",
            )

    def longest() -> Tensor:
        first = torch.where(start, rank - 1, 0).cummax(0).values
        length = rank - first
        return (length if valid is None else torch.where(valid, length, 0)).amax()

    exact = False
    if capacity is not None:
        checks.require(documents[-1] <= capacity, "capacity: there are more documents than the capacity; raise it.")
    elif bound is None and not torch.compiler.is_compiling():
        read = torch.stack([documents[-1], longest()])
        capacity, bound = checks.read_ints(read, "the number of documents", "capacity=", rows)
        exact = True
    else:  # traced, a second number would be a second read: the row length is the bound
        (capacity,) = checks.read_ints(documents[-1], "the number of documents", "capacity=", rows)
    if bound is None:
        bound = seq
    elif not exact:
        checks.check_bound("max_seqlen", bound, seq, longest)
    # The n-th document begins at the first row where n have begun; past the last one this is the end of the rows.
    number = torch.arange(1, capacity + 2, device=start.device)
    begin = torch.searchsorted(documents, number)
    before = torch.zeros(rows + 1, dtype=torch.int32, device=start.device)
    before[1:] = rank
    return Side(before[begin], bound, exact, total, order, inverse)


def _from_host_lengths(
    side: str, lengths: list[int], bound: int | None, capacity: int | None, device: torch.device | None
) -> Side:
    name = f"lengths_{side}"
    for length in lengths:
        checks.check_size(f"{name}: every length", length)
    return _from_host_offsets(side, name, [0, *accumulate(lengths)], bound, None, capacity, device)


def _from_host_offsets(
    side: str,
    name: str,
    offsets: list[int],
    bound: int | None,
    total: int | None,
    capacity: int | None,
    device: torch.device | None,
) -> Side:
    for offset in offsets:
        checks.check_size(f"{name}: every offset", offset)
    if not offsets:
        raise ValueError(f"{name}: expected at least one offset, the 0 that it starts with; got none.")
    if offsets[0] != 0:
        raise ValueError(f"{name}: expected offsets that start at 0, got {offsets[0]} first.")
    longest = 0
    for begin, end in pairwise(offsets):
        if end < begin:
            raise ValueError(f"{name}: expected offsets that never decrease, got {offsets}; sort the sequences first.")
        longest = max(longest, end - begin)
    if total is not None and offsets[-1] > total:
        raise ValueError(f"{name}: the last offset is {offsets[-1]}, but there are only {total} rows.")
    checks.check_int32_offsets(name, offsets[-1])
    if bound is not None:
        checks.check_size(f"max_seqlen_{side}", bound)
        if bound < longest:
            raise ValueError(
                f"max_seqlen_{side}: the bound {bound} is smaller than the longest sequence, {longest}; raise it."
            )
    _check_capacity(name, len(offsets) - 1, capacity)
    if capacity is not None:
        offsets = offsets + [offsets[-1]] * (capacity + 1 - len(offsets))
    return Side(
        _to_device(offsets, device),
        longest if bound is None else bound,
        bound is None,
        offsets[-1] if capacity is None else None,
    )


def _to_device(offsets: list[int], device: torch.device | None) -> Tensor:
    """int32 offsets on the device; to a GPU through pinned memory, because a copy from pageable memory syncs."""
    if torch.compiler.is_compiling():
        return torch.tensor(offsets, dtype=torch.int32, device=device)
    device = device if device is not None else torch.get_default_device()
    if device.type != "cuda":
        return torch.tensor(offsets, dtype=torch.int32, device=device)
    return torch.tensor(offsets, dtype=torch.int32, device="cpu", pin_memory=True).to(device, non_blocking=True)


def _with_maximum(side: str, cu_seqlens: Tensor, lengths: Tensor, bound: int | None, capacity: int | None) -> Side:
    exact = bound is None
    if bound is None:
        bound = 0
        if lengths.shape[0] > 0:
            (bound,) = checks.read_ints(
                lengths.amax(), f"the longest length of side {side!r}", f"max_seqlen_{side}=", checks.INT32_MAX
            )
    elif lengths.shape[0] > 0:
        checks.check_bound(f"max_seqlen_{side}", bound, None, lambda: lengths)
    if capacity is not None:
        cu_seqlens = with_capacity(cu_seqlens, capacity)
    return Side(cu_seqlens, bound, exact)


def _check_offsets_tensor(name: str, values: Tensor) -> None:
    if values.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {values.dtype}; cast it.")
    if values.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {tuple(values.shape)}; flatten it.")


def _check_capacity(name: str, sequences: int, capacity: int | None) -> None:
    if capacity is None:
        return
    checks.check_size("capacity", capacity)
    if sequences > capacity:
        raise ValueError(f"capacity: {name} has {sequences} sequences, more than capacity {capacity}; raise it.")
