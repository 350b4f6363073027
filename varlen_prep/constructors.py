"""The `from_*` constructors of `VarlenMetadata`: one for each way in which people describe ragged batches.

T packed rows, N sequences.  Each checks its arguments, lets `sources` compute the offsets, and joins the two sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from . import sources
from .offsets import Side, with_maximum

if TYPE_CHECKING:
    from .metadata import VarlenMetadata


class Constructors:
    """Base of `VarlenMetadata`."""

    @classmethod
    def from_sides(cls, q: Side, k: Side, *, shape: tuple[int, int, int] | None, layout: Any) -> VarlenMetadata:
        raise NotImplementedError

    @classmethod
    def from_lengths(
        cls,
        lengths_q: Tensor | Sequence[int],
        lengths_k: Tensor | Sequence[int] | None = None,
        *,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        capacity: int | None = None,
        device: torch.device | str | None = None,
    ) -> VarlenMetadata:
        """Metadata of packed rows `(T, ...)` from the length of each sequence.

        Args:
            lengths_q: (N,) lengths >= 0: a list of host ints (exact maxima, no sync), or an int32/int64 tensor.
            lengths_k: the same for keys and values; None: those of the queries.
            max_seqlen_q: host int that no query length exceeds. None with a tensor: the longest is read from the
                device (one sync).
            max_seqlen_k: the same for keys; None with `lengths_k=None`: the queries' maximum.
            capacity: fixed number of sequences; missing ones are empty. With bounds too, `copy_` can rewrite the result
                for other lengths.
            device: where the offsets go; None: the tensor's device, or torch's default device.

        Raises:
            ValueError: a negative length, a bound that is too small, more sequences than `capacity` (a device-side
                assert where the values are on a GPU), or sides with different numbers of sequences.
            TypeError: lengths that are not ints, or a maximum that is a tensor.

        Example:
            >>> from varlen_prep import VarlenMetadata
            >>> meta = VarlenMetadata.from_lengths([3, 2], [5, 0])
            >>> meta.cu_seqlens_q.tolist(), meta.cu_seqlens_k.tolist(), meta.max_seqlen_k
            ([0, 3, 5], [0, 5, 5], 5)
        """
        place = _device(device)
        q = sources.from_lengths("q", lengths_q, max_seqlen_q, capacity, place)
        if lengths_k is not None or max_seqlen_k is not None:
            k = sources.from_lengths("k", lengths_q if lengths_k is None else lengths_k, max_seqlen_k, capacity, place)
            k = k if lengths_k is not None else with_maximum(q, k.max_seqlen, k.exact)
        else:
            k = q
        return cls.from_sides(q, k, shape=None, layout="packed")

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens_q: Tensor | Sequence[int],
        cu_seqlens_k: Tensor | Sequence[int] | None = None,
        *,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        total_q: int | None = None,
        total_k: int | None = None,
        capacity: int | None = None,
        device: torch.device | str | None = None,
    ) -> VarlenMetadata:
        """Metadata of packed rows `(T, ...)` from ready offsets, which are checked.

        Args:
            cu_seqlens_q: (N + 1,) offsets, int32 or int64, starting at 0 and never decreasing: a host list or a tensor.
            cu_seqlens_k: the same for keys and values; None: those of the queries.
            max_seqlen_q, max_seqlen_k, capacity, device: as for `from_lengths`.
            total_q, total_k: rows of the buffers, if the offsets shall be checked against them.

        Raises:
            ValueError: offsets that do not start at 0, decrease, or pass the rows (host data and CPU tensors; a
                device-side assert where they are on a GPU).
            TypeError: another dtype.

        Example:
            >>> from varlen_prep import VarlenMetadata
            >>> meta = VarlenMetadata.from_cu_seqlens([0, 3, 5])
            >>> meta.max_seqlen_q, meta.exact_q
            (3, True)
        """
        place = _device(device)
        q = sources.from_cu_seqlens("q", cu_seqlens_q, max_seqlen_q, total_q, capacity, place)
        if cu_seqlens_k is not None or max_seqlen_k is not None or total_k is not None:
            keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
            k = sources.from_cu_seqlens("k", keys, max_seqlen_k, total_k, capacity, place)
            k = k if cu_seqlens_k is not None else with_maximum(q, k.max_seqlen, k.exact)
        else:
            k = q
        return cls.from_sides(q, k, shape=None, layout="packed")

    @classmethod
    def from_document_ids(
        cls,
        document_ids: Tensor,
        *,
        max_seqlen: int | None = None,
        capacity: int | None = None,
        layout: Literal["packed", "in_place"] | None = None,
    ) -> VarlenMetadata:
        """Metadata from a document id per row: a new document begins at every change, and at every row of a batch.

        Args:
            document_ids: int `(T,)` or `(batch, seq)`; ids need not rise or be unique; negative = takes no part.
            max_seqlen: host int that no document exceeds. None: the row length with `capacity`, else read.
            capacity: fixed number of sequences. None: the number of documents is a tensor size, so it is read from
                the device (one sync), and with it the longest length, except in a compiled region.
            layout: "in_place" (default for one dimension, whose rows count as packed already): no row moves, and rows
                that take no part may only follow all others. "packed" (default for two): they may lie anywhere, and
                `pack` moves them to the end. The metadata's own `layout` is "packed" in both: valid rows come first.

        Raises:
            ValueError: more documents than `capacity`, a bound that is too small, a gap before the end in the
                in_place layout (device-side asserts where the ids are on a GPU), or ids that are not 1-D or 2-D.
            TypeError: ids that are not ints.

        Example:
            >>> import torch
            >>> from varlen_prep import VarlenMetadata
            >>> ids = torch.tensor([0, 0, 0, 1, 1, -1, -1, -1])
            >>> VarlenMetadata.from_document_ids(ids, capacity=4).cu_seqlens_q.tolist()
            [0, 3, 5, 5, 5]
        """
        ids = _two_dims("document_ids", document_ids)
        valid = ids >= 0
        start = valid & _row_begins(ids != ids.roll(1, 1))
        layout = layout or ("in_place" if document_ids.ndim == 1 else "packed")
        return cls._from_starts(start, valid, max_seqlen, capacity, layout)

    @classmethod
    def from_position_ids(
        cls,
        position_ids: Tensor,
        *,
        mask: Tensor | None = None,
        axis: int | None = None,
        max_seqlen: int | None = None,
        capacity: int | None = None,
        layout: Literal["packed", "in_place"] | None = None,
    ) -> VarlenMetadata:
        """Metadata from positions: a new document begins wherever a position is not the previous one plus 1.

        Args:
            position_ids: int `(T,)` or `(batch, seq)`, or `(axes, batch, seq)` rotary positions with `axis`.
            mask: bool, True = takes part, of the positions' shape; None: every row does.
            axis: which of the rotary axes counts the tokens (the text axis).
            max_seqlen, capacity: as for `from_document_ids`.
            layout: "packed" (default) or "in_place", as for `from_document_ids`; without a mask no row moves in
                either.

        Raises:
            ValueError, TypeError: as for `from_document_ids`; three dimensions without `axis`; a mask of another
                shape or dtype.

        Example:
            >>> import torch
            >>> from varlen_prep import VarlenMetadata
            >>> positions = torch.tensor([0, 1, 2, 0, 1])
            >>> VarlenMetadata.from_position_ids(positions, capacity=4).cu_seqlens_q.tolist()
            [0, 3, 5, 5, 5]
        """
        if isinstance(position_ids, Tensor) and position_ids.ndim == 3:
            if axis is None:
                raise ValueError(
                    f"position_ids: expected (T,) or (batch, seq), got {tuple(position_ids.shape)}; "
                    "name the axis of rotary positions that counts tokens (axis=0)."
                )
            if not -position_ids.shape[0] <= axis < position_ids.shape[0]:
                raise ValueError(f"axis: expected one of {position_ids.shape[0]} rotary axes, got {axis}.")
            position_ids = position_ids[axis]
        elif axis is not None:
            raise ValueError(f"axis: expected (axes, batch, seq) positions with it, got {tuple(position_ids.shape)}.")
        positions = _two_dims("position_ids", position_ids)
        start = _row_begins(positions != positions.roll(1, 1) + 1)
        valid = None
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != position_ids.shape:
                raise ValueError(
                    f"mask: expected bool {tuple(position_ids.shape)}, got {mask.dtype} {tuple(mask.shape)}; "
                    "compare it with 0 (mask != 0) if it holds numbers."
                )
            valid = mask.view(positions.shape)
            start = valid & (start | ~valid.roll(1, 1))
        return cls._from_starts(start, valid, max_seqlen, capacity, layout or "packed")

    @classmethod
    def _from_starts(
        cls, start: Tensor, valid: Tensor | None, bound: int | None, capacity: int | None, layout: str
    ) -> VarlenMetadata:
        if layout not in ("packed", "in_place"):
            raise ValueError(f"layout: expected 'packed' or 'in_place', got {layout!r}.")
        side = sources.from_starts(start, valid, bound, capacity, move_rows=layout == "packed")
        batch, seq = start.shape
        return cls.from_sides(side, side, shape=(batch, seq, seq), layout="packed")


def _device(device: torch.device | str | None) -> torch.device | None:
    return torch.device(device) if device is not None else None


def _two_dims(name: str, ids: Tensor) -> Tensor:
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name}: expected an integer tensor, got {type(ids).__name__}; use torch.tensor(...).")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name}: expected an integer tensor, got {ids.dtype}.")
    if ids.ndim not in (1, 2):
        raise ValueError(f"{name}: expected (T,) or (batch, seq), got {tuple(ids.shape)}.")
    # Narrow and unsigned types would wrap around in the arithmetic on them.
    ids = ids.to(torch.int64)
    return ids.reshape(1, -1) if ids.ndim == 1 else ids


def _row_begins(changes: Tensor) -> Tensor:
    """The same, with True at the first column: what came before it is in another row (`roll` brings the last column).

    Slices [:, 1:] would have a size of 1 for rows of 2, which compiles again.
    """
    changes[:, :1] = True
    return changes
