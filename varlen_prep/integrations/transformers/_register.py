"""Names for `attn_implementation`: enters this library's functions in transformers' own two tables."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import AttentionInterface, AttentionMaskInterface

from varlen_prep import backends

from ._attention import attention_function
from ._mask import Layout, mask_function

TESTED = ("5.0.0", "5.17.0", "5.25.0")
"""Versions of transformers that this module was run with, the lowest and the newest among them."""

BACKENDS: Mapping[str, str | None] = {
    "varlen_prep": None,
    **{f"varlen_prep:{state.name.replace('flash', 'fa')}": state.name for state in backends()},
}
"""Names for `attn_implementation` and the backend of each; None: that of `use_backend`, or chosen automatically.

`fa` stands for `flash`: transformers takes every name that holds "flash" for a package that it must load itself.
"""


def register(*, layout: Layout = "packed", capacity: int | None = None) -> None:
    """Makes the names of `BACKENDS` work as `attn_implementation` in transformers, for models made before and after.

    Padding on either side, packed position ids, sliding windows, caches, encoders and cross-attention give what `sdpa`
    gives, on rows that take part; rows of padding are 0 in causal attention. As with `sdpa`, positions are searched for
    documents only without `attention_mask` and with `use_cache=False`. Windows count tokens that take part.

    Args:
        layout: of padded batches: "packed", or "in_place" where the mask of every row is one contiguous run.
        capacity: most documents in a batch of packed rows. None: their number is read from the device, once per forward
            and layer type (transformers itself reads there too, unless compiled). Padding masks never need a read.

    A second call replaces the first one's arguments.

    Raises (when a model runs):
        ValueError: a pattern that differs per query (image or prefix blocks, chunks, biases), dropout, attention
            weights, gradients of attention sinks, softcap or anything else that the backend cannot do, more documents
            than `capacity` (a device-side assert on a GPU).
        TypeError: a dense mask.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from varlen_prep.integrations.transformers import register
        >>> register()
        >>> config = LlamaConfig(
        ...     vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> config._attn_implementation = "varlen_prep"  # or from_pretrained(..., attn_implementation="varlen_prep")
        >>> model = LlamaModel(config)
        >>> ids = torch.tensor([[1, 2, 3], [0, 4, 5]])
        >>> model(input_ids=ids, attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]])).last_hidden_state.shape
        torch.Size([2, 3, 8])
    """
    if layout not in ("packed", "in_place"):
        raise ValueError(f"layout: expected 'packed' or 'in_place', got {layout!r}.")
    for name, backend in BACKENDS.items():
        AttentionInterface.register(name, attention_function(backend))
        AttentionMaskInterface.register(name, mask_function(layout, capacity))
