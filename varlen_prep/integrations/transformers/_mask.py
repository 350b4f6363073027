"""The mask function: what a model knows about its batch becomes one `VarlenMask` per forward and layer type.

B rows, S_q and S_kv padded lengths.  transformers hands over sizes, places in the whole sequence, a padding mask, and a
function (row, head, query, key) -> whether the query sees the key. Which of its own patterns that function is follows
from the other arguments. Where documents begin is asked of the function itself, by calling it on neighbouring tokens:
nothing is read but the number of documents, and that only without a capacity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from varlen_prep import VarlenMetadata, prepare_varlen

Layout = Literal["packed", "in_place"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class VarlenMask:
    """What all layers of one type share: it travels through the model as their `attention_mask`."""

    meta: VarlenMetadata
    """Of the padded shape (B, S_q, S_kv)."""
    causal: bool
    """Host. Queries see no later key."""
    window_size: tuple[int, int]
    """Host. (left, right) neighbours that a query sees besides its own place; -1 is no bound."""

    @property
    def shape(self) -> tuple[int | None, int, int | None, int | None]:
        """That of the dense mask it stands for: transformers takes a mask of four dimensions for a finished one."""
        return self.meta.batch, 1, self.meta.seq_q, self.meta.seq_kv

    @property
    def ndim(self) -> int:
        return 4


def mask_function(layout: Layout, capacity: int | None) -> Callable[..., VarlenMask]:
    """A mask function for transformers, with the arguments of its `sdpa_mask`; see `register` for the two here."""

    def prepare(
        *,
        batch_size: int,
        kv_length: int,
        kv_offset: int,
        mask_function: Callable[..., Tensor],
        q_length: int = 0,
        q_offset: int | Tensor = 0,
        cache_position: Tensor | None = None,
        attention_mask: Tensor | VarlenMask | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        use_vmap: bool = False,
        device: torch.device | None = None,
        config: Any = None,
        **kwargs: Any,
    ) -> VarlenMask:
        if isinstance(attention_mask, VarlenMask):  # generate() makes the masks before it calls the model
            return attention_mask
        if cache_position is not None:  # what versions before 5.4 say instead of q_length, q_offset and device
            q_length, device = cache_position.shape[0], cache_position.device
            q_offset = 0 if kv_length == q_length and kv_offset == 0 else cache_position[0]
        causal = "allow_is_bidirectional_skip" not in kwargs  # only the bidirectional patterns are given it
        skippable = allow_is_causal_skip if causal else kwargs["allow_is_bidirectional_skip"]  # not with documents
        documents = attention_mask is None and q_length == kv_length and not skippable
        composed = mask_function.__name__ == "and_mask"  # __qualname__ does not trace on torch 2.11
        known = composed and (documents or local_size is not None)
        if use_vmap or not (known or mask_function in (causal_mask_function, bidirectional_mask_function)):
            raise ValueError(
                f"mask_function: {mask_function.__name__} differs per query (an image, prefix, block or custom "
                "pattern of this model), which offsets cannot express; use attn_implementation='sdpa' or "
                "'flex_attention'."
            )
        if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
            if kv_offset + kv_length > local_size:
                raise ValueError(
                    f"attention_chunk_size: {kv_offset + kv_length} keys are more than one chunk of {local_size}, and "
                    "chunked attention has no offsets here; use attn_implementation='sdpa'."
                )
            local_size = None
        if local_size is not None and not causal and q_length != kv_length:
            raise ValueError(
                f"local_size: a bidirectional window of {q_length} queries over {kv_length} keys; where the queries "
                "lie among the keys is not said, so use attn_implementation='sdpa'."
            )
        window_size = (-1, -1) if local_size is None else (local_size - 1, 0) if causal else (local_size, local_size)
        if composed and documents:
            meta = _documents(mask_function, batch_size, q_length, causal, capacity, device)
        else:
            sizes = (batch_size, q_length, kv_length)
            aligned = causal or local_size is not None
            meta = _padded(sizes, attention_mask, q_offset, kv_offset, aligned, layout, device)
        return VarlenMask(meta=meta, causal=causal, window_size=window_size)

    return prepare


def _padded(
    sizes: tuple[int, int, int],
    padding: Tensor | None,
    q_offset: int | Tensor,
    kv_offset: int,
    aligned: bool,
    layout: Layout,
    device: torch.device | None,
) -> VarlenMetadata:
    """Rows with padding, or with a cache whose end is not written yet.

    Args:
        sizes: (B, S_q, S_kv).
        padding: bool (B, length of everything so far), True = takes part; what it does not cover takes no part.
        q_offset: place of the first query in the whole sequence, a tensor where the cache keeps it on the device.
        kv_offset: that of the first key.
        aligned: queries have places among the keys (causal or a window), and pad queries take no part.
    """
    batch, seq_q, seq_kv = sizes
    keys = queries = None
    if padding is not None:
        missing = kv_offset + seq_kv - padding.shape[1]
        padding = torch.nn.functional.pad(padding, (0, missing)) if missing > 0 else padding
        keys = padding[:, kv_offset : kv_offset + seq_kv]
    if aligned:
        if padding is not None:
            if not isinstance(q_offset, Tensor) and q_offset == kv_offset and seq_q == seq_kv:
                queries = keys  # the same object, so that both sides share their offsets
            else:
                queries = padding.index_select(1, torch.arange(seq_q, device=padding.device) + q_offset)
        # Keys must end with the last query: the buffer of a static cache goes on.
        if isinstance(q_offset, Tensor) or kv_offset + seq_kv != q_offset + seq_q:
            written = torch.arange(kv_offset, kv_offset + seq_kv, device=device) < q_offset + seq_q
            if keys is None or queries is None:
                keys, layout = written.expand(batch, seq_kv), "in_place"
                queries = torch.ones(batch, seq_q, dtype=torch.bool, device=device)
            else:
                keys = keys & written
    return prepare_varlen(batch, seq_q, seq_kv, keys, mask_q=queries, max_seqlen_k=seq_kv, layout=layout, device=device)


def _documents(
    mask_function: Callable[..., Tensor],
    batch: int,
    seq: int,
    causal: bool,
    capacity: int | None,
    device: torch.device | None,
) -> VarlenMetadata:
    """Documents packed in rows: one goes on where a row sees the row before it."""
    row = torch.arange(batch, device=device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=device)
    index = torch.arange(seq, device=device)[None]
    before = (index - 1).clamp(min=0)
    if causal:
        torch._assert_async(
            ~(mask_function(row, head, before, index) & (before < index)).any(),
            "mask_function: a row sees a later one, as in blocks of image tokens, which offsets cannot express "
            "together with documents; use attn_implementation='sdpa'.",
        )
    begins = ~mask_function(row, head, index, before).expand(batch, seq)  # a plain window knows no rows
    # Positions that skip a number at every beginning, whatever the model's own restart at.
    return VarlenMetadata.from_position_ids(index + begins.cumsum(1), capacity=capacity)
