"""The attention function that stands in diffusers' table of backends.

B rows, S_q and S_kv padded lengths, H heads, H_kv key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from varlen_prep import varlen_attention

from ._memo import prepare

Layout = Literal["packed", "in_place"]

ARGUMENTS = (
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "window_size", "return_lse",
    "_parallel_config",
)  # fmt: skip
"""Names under which diffusers may pass arguments to `attention(...)`; it drops others."""


def attention(backend: str, layout: Layout) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """An attention function for diffusers that runs a backend of this library.

    It takes query (B, S_q, H, D), key and value (B, S_kv, H_kv, D) and the other `ARGUMENTS`; returns the output like
    query, and with `return_lse` also the log-sum-exp (B, S_q, H).
    """

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # the kernels tell from the shapes
        window_size: tuple[int, int] = (-1, -1),
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if _parallel_config is not None:
            raise ValueError(
                "_parallel_config: expected None. Context parallelism gives each rank a part of every row and merges "
                "the parts inside diffusers' own backends, so offsets made from one part would describe the wrong "
                "sequences; use one of diffusers' own backends for it."
            )
        if dropout_p != 0:
            raise ValueError(f"dropout_p: expected 0, got {dropout_p}; varlen kernels run without dropout here.")
        if attn_mask is not None and (is_causal or tuple(window_size) != (-1, -1)):
            raise ValueError(
                "attn_mask: expected None with is_causal=True or window_size=. A key mask does not say which queries "
                "take part, and the alignment depends on them; call prepare_varlen with mask_q= and varlen_attention."
            )
        meta = prepare(query, key, attn_mask if attn_mask is None else _key_mask(attn_mask), layout)
        result = varlen_attention(
            query,
            key,
            value,
            meta,
            backend=backend,
            causal=is_causal,
            window_size=window_size,
            softmax_scale=scale,
            return_lse=return_lse,
        )
        return (result[0], result[1].transpose(1, 2)) if isinstance(result, tuple) else result

    return attend


def _key_mask(mask: Tensor) -> Tensor:
    """A mask that was expanded over heads and queries, back to size 1 there; others as they are."""
    for dim in range(1, mask.ndim - 1):
        if mask.shape[dim] != 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask
