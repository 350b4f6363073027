"""`VarlenMetadata`: everything a varlen kernel must know about a ragged batch, made once per forward.

B rows, S padded length, N sequences, T packed rows.  Made by `prepare_varlen` (shapes and masks) or by the `from_*`
constructors (lengths, document ids, position ids, ready offsets); read by `varlen_attention`, `pack` and `unpack`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from . import dense
from .constructors import Constructors
from .offsets import Side, check_rewritable, with_capacity
from .pictures import Pictures

Layout = Literal["uniform", "packed", "in_place"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class VarlenMetadata(Constructors, Pictures):
    """Sequence offsets of queries and keys, and how rows are laid out.

    A pytree: tensors and ints are leaves, so it passes through `torch.compile`, `torch.export`, checkpointing, pickle
    and deepcopy. Tensors may be rewritten in place between replays of a CUDA graph (`copy_`); host values may not
    change, since a capture has baked them in.

    Example:
        >>> from varlen_prep import VarlenMetadata
        >>> meta = VarlenMetadata.from_lengths([2, 1]).to("cpu")
        >>> meta.materialize(causal=True).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        >>> meta.flash_kwargs()["max_seqlen_q"], meta.transformers_kwargs()["max_length_q"]
        (2, 2)
        >>> meta.copy_(VarlenMetadata.from_lengths([1, 2])).cu_seqlens_q.tolist()
        [0, 1, 3]
    """

    cu_seqlens_q: Tensor
    """Device, int32 (N + 1,). Starts at 0, never decreases; may repeat (empty sequence) and end before the last row."""
    cu_seqlens_k: Tensor
    """Device, int32 (N + 1,), as `cu_seqlens_q`, for keys and values."""
    max_seqlen_q: int
    """Host int. No query sequence is longer."""
    max_seqlen_k: int
    """Host int. No key sequence is longer."""
    exact_q: bool
    """Host. True: `max_seqlen_q` is the longest length; False: an upper bound."""
    exact_k: bool
    """Host. True: `max_seqlen_k` is the longest length; False: an upper bound."""
    total_q: int | None = None
    """Host int: query rows that take part, where that is known without reading the device; else None."""
    total_k: int | None = None
    """Host int: key rows that take part, where that is known without reading the device; else None."""
    order_q: Tensor | None = None
    """Device, int64 (B * seq_q,): padded row held by each packed row, valid rows first. None: no query row moves."""
    order_k: Tensor | None = None
    """Device, int64 (B * seq_kv,), as `order_q`, for keys and values."""
    inverse_q: Tensor | None = None
    """Device, int64 (B * seq_q,): packed row of each padded row, the inverse of `order_q`; None with it."""
    inverse_k: Tensor | None = None
    """Device, int64 (B * seq_kv,): the inverse of `order_k`; None with it."""
    batch: int | None = None
    """Host int B of the padded shape, or None for packed input."""
    seq_q: int | None = None
    """Host int: padded query length, or None for packed input."""
    seq_kv: int | None = None
    """Host int: padded key length, or None for packed input."""
    same_lengths: bool = False
    """Host. True: both sides share their offsets, so query and key lengths agree; False: not known here."""
    layout: Layout = "packed"
    """Host. "uniform": no mask; "packed": valid rows come first; "in_place": no row moves, gaps are sequences."""

    @classmethod
    def from_sides(cls, q: Side, k: Side, *, shape: tuple[int, int, int] | None, layout: Layout) -> VarlenMetadata:
        """Joins the offsets of both sides; `shape` is (batch, seq_q, seq_kv) or None for packed input."""
        if q.cu_seqlens.shape[0] != k.cu_seqlens.shape[0]:
            raise ValueError(
                f"queries and keys: expected the same number of sequences, got {q.cu_seqlens.shape[0] - 1} and "
                f"{k.cu_seqlens.shape[0] - 1}; give an empty sequence where one side has none."
            )
        batch, seq_q, seq_kv = shape if shape is not None else (None, None, None)
        return cls(
            cu_seqlens_q=q.cu_seqlens,
            cu_seqlens_k=k.cu_seqlens,
            max_seqlen_q=q.max_seqlen,
            max_seqlen_k=k.max_seqlen,
            exact_q=q.exact,
            exact_k=k.exact,
            total_q=q.total,
            total_k=k.total,
            order_q=q.order,
            order_k=k.order,
            inverse_q=q.inverse,
            inverse_k=k.inverse,
            batch=batch,
            seq_q=seq_q,
            seq_kv=seq_kv,
            same_lengths=q.cu_seqlens is k.cu_seqlens,
            layout=layout,
        )

    def side(self, name: str) -> Side:
        """The fields of one side, "q" or "k"."""
        if name == "q":
            return Side(self.cu_seqlens_q, self.max_seqlen_q, self.exact_q, self.total_q, self.order_q, self.inverse_q)
        if name == "k":
            return Side(self.cu_seqlens_k, self.max_seqlen_k, self.exact_k, self.total_k, self.order_k, self.inverse_k)
        raise ValueError(f"side: expected 'q' or 'k', got {name!r}.")

    @property
    def equal_lengths(self) -> bool:
        """Host. Whether query and key lengths of every sequence are known to agree."""
        return self.same_lengths or (self.layout == "uniform" and self.seq_q == self.seq_kv)

    def padded_shape(self, side: str) -> tuple[int, int]:
        """(batch, seq) of one side; a `ValueError` for metadata of packed rows, which has none."""
        seq = self.seq_q if side == "q" else self.seq_kv
        if self.batch is None or seq is None:
            raise ValueError("this metadata describes packed rows (T, ...), which have no padded shape.")
        return self.batch, seq

    def runs(self, side: str, rows: int | None = None) -> tuple[Tensor, Tensor] | None:
        """Which rows take part, in the order in which a kernel sees them.

        Args:
            side: "q" or "k".
            rows: number of rows in the buffer; None: that of the padded shape.

        Returns:
            int32 `(begin, end)` on the device, (1,) or in place (B,): the buffer is so many stretches of equal length,
            and in each the rows from begin to end take part.  None where every row is known to.
        """
        one = self.side(side)
        if rows is None:
            rows = math.prod(self.padded_shape(side))
        if one.total is not None and one.total == rows:
            return None
        if self.layout != "in_place" or rows == 0:
            return one.cu_seqlens[:1], one.cu_seqlens[-1:]
        batch, _ = self.padded_shape(side)
        # The valid run is the middle one of the sequences of each padded row.
        begin = one.cu_seqlens[:-1].view(batch, -1)
        middle = begin.shape[1] // 2
        return begin[:, middle], begin[:, middle + 1]

    def materialize(self, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        """The dense attention pattern, for tests and pictures: True where a query sees a key.

        Returns:
            bool on the device: `(batch, seq_q, seq_kv)` in the padded order, batch 1 for ids given as `(T,)`; or
            `(T_q, T_k)` for lengths and offsets, whose last offset is read if the number of rows is not known.
        """
        q, k = self._coordinates("q"), self._coordinates("k")
        lengths = self.cu_seqlens_q.diff(), self.cu_seqlens_k.diff()
        return dense.allowed(q, k, lengths, causal, window_size)

    def _coordinates(self, side: str) -> dense.Coordinates:
        """Sequence and position of each row, `(batch, seq)` or `(T,)`."""
        one = self.side(side)
        if self.batch is None:
            total = one.total if one.total is not None else int(one.cu_seqlens[-1])
            return dense.coordinates(one.cu_seqlens, torch.arange(total, device=one.cu_seqlens.device))
        batch, seq = self.padded_shape(side)
        rows = one.inverse if one.inverse is not None else torch.arange(batch * seq, device=one.cu_seqlens.device)
        return dense.coordinates(one.cu_seqlens, rows.view(batch, seq))

    def copy_(self, other: VarlenMetadata) -> VarlenMetadata:
        """Rewrites the tensors of this metadata with those of `other`, keeping their addresses, for a captured graph.

        Host values stay, because the capture has baked them in: they must hold for `other` too.

        Args:
            other: metadata of the same layout and padded shape, with at most as many sequences, on any device.

        Returns:
            self.

        Raises:
            ValueError: `other` has more sequences, a longer maximum, or a host value that this object cannot take on.
        """
        self.check_copy(other)
        for name in ("q", "k"):
            mine, theirs = self.side(name), other.side(name)
            offsets = with_capacity(theirs.cu_seqlens, mine.cu_seqlens.shape[0] - 1)
            mine.cu_seqlens.copy_(offsets, non_blocking=mine.cu_seqlens.is_cuda)
            for target, source in ((mine.order, theirs.order), (mine.inverse, theirs.inverse)):
                if target is not None and source is not None:
                    target.copy_(source, non_blocking=target.is_cuda)
        return self

    def check_copy(self, other: VarlenMetadata) -> None:
        """The checks of `copy_`, on host values alone; nothing is written."""
        if (self.layout, self.batch, self.seq_q, self.seq_kv) != (other.layout, other.batch, other.seq_q, other.seq_kv):
            raise ValueError(
                f"other: expected layout and padded shape {(self.layout, self.batch, self.seq_q, self.seq_kv)}, got "
                f"{(other.layout, other.batch, other.seq_q, other.seq_kv)}; capture once for each."
            )
        if self.same_lengths and not other.same_lengths:
            raise ValueError(
                "other: queries and keys share their offsets in this metadata, in the other they differ; prepare both "
                "from lengths or masks of the same kind."
            )
        if self.layout == "in_place" and self.cu_seqlens_q.shape != other.cu_seqlens_q.shape:
            raise ValueError("other: expected masks on the same sides in the in_place layout; capture once for each.")
        for name in ("q", "k"):
            check_rewritable(self.side(name), other.side(name), name)

    def to(self, device: torch.device | str) -> VarlenMetadata:
        """The same metadata with its tensors on `device`; host values stay."""
        # Without blocking only to a GPU, whose stream keeps the order; a host read would come before the data.
        to_gpu = torch.device(device).type == "cuda"
        return self._map(lambda x: x.to(device, non_blocking=to_gpu))

    def trainable(self) -> VarlenMetadata:
        """Metadata that autograd can save: tensors made under `torch.inference_mode` are copied.

        `varlen_attention`, `pack` and `unpack` call it where gradients are needed. Compiled code cannot ask a tensor
        for its mode: call it yourself before handing such metadata to a compiled training step.
        """
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return self
        tensors = (self.cu_seqlens_q, self.cu_seqlens_k, self.order_q, self.order_k)
        if not any(x is not None and x.is_inference() for x in tensors):
            return self
        return self._map(torch.clone)

    def _map(self, function: Callable[[Tensor], Tensor]) -> VarlenMetadata:
        """The same metadata with a function applied to each of its tensors, once to one that both sides share."""
        changes: dict[str, Any] = {}
        for name in ("cu_seqlens", "order", "inverse"):
            q, k = getattr(self, f"{name}_q"), getattr(self, f"{name}_k")
            changes[f"{name}_q"] = None if q is None else function(q)
            changes[f"{name}_k"] = None if k is None else changes[f"{name}_q"] if k is q else function(k)
        return dataclasses.replace(self, **changes)

    def flash_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `flash_attn_varlen_func`: `cu_seqlens_q` and `_k`, `max_seqlen_q` and `_k`."""
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return {name: getattr(self, name) for name in names}

    def transformers_kwargs(self) -> dict[str, Any]:
        """The same under the names of transformers models: `cu_seq_lens_q`, ..., `max_length_q`, `max_length_k`."""
        return {
            "cu_seq_lens_q": self.cu_seqlens_q,
            "cu_seq_lens_k": self.cu_seqlens_k,
            "max_length_q": self.max_seqlen_q,
            "max_length_k": self.max_seqlen_k,
        }
