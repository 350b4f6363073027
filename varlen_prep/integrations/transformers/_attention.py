"""The attention function that every layer of a transformers model calls.

B rows, S_q and S_kv padded lengths, H heads, H_kv key heads, D and D_v head sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from varlen_prep import VarlenMetadata, prepare_varlen, varlen_attention

from ._mask import VarlenMask


def attention_function(backend: str | None) -> Callable[..., tuple[Tensor, None]]:
    """An attention function for transformers that runs a backend of this library (None: the scope's, or automatic).

    It takes query (B, H, S_q, D), key (B, H_kv, S_kv, D) and value (B, H_kv, S_kv, D_v), and returns
    (B, S_q, H, D_v) and None for the weights, which no kernel keeps.
    """

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: VarlenMask | None,
        dropout: float = 0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        deterministic: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        _check(attention_mask, dropout, kwargs)
        stated = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if attention_mask is None:
            mask = _without_mask(query, key, stated, sliding_window)
        elif attention_mask.causal and not stated:
            raise ValueError(
                "is_causal: the layer says False, but the model made a causal mask for it; set config.is_causal=False "
                "(transformers 5.2 or newer), which changes the mask too."
            )
        else:
            mask = attention_mask
        meta = mask.meta
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
            meta = _given(meta, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        result = varlen_attention(
            q,
            k,
            v,
            meta,
            backend=backend,
            causal=mask.causal,
            window_size=mask.window_size,
            softmax_scale=scaling,
            softcap=softcap or 0,
            deterministic=bool(deterministic),
            return_lse=s_aux is not None,
        )
        out = result if isinstance(result, Tensor) else _with_sinks(*result, s_aux)  # type: ignore[arg-type]
        return out.reshape(query.shape[0], query.shape[2], *out.shape[-2:]), None

    return attend


def _check(attention_mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    if attention_mask is not None and not isinstance(attention_mask, VarlenMask):
        raise TypeError(
            "attention_mask: expected a mask from transformers' mask functions, which take a 2D padding mask, got "
            f"{type(attention_mask).__name__} {tuple(attention_mask.shape)}. A dense mask differs per query, which "
            "offsets cannot express; use attn_implementation='sdpa'."
        )
    if dropout:
        raise ValueError(
            f"dropout: expected 0, got {dropout}; varlen kernels run without dropout here. Set the attention dropout "
            "of the config to 0, or call model.eval()."
        )
    for name, reason in (
        ("position_bias", "a bias differs per query"),
        ("output_attentions", "no kernel keeps the weights"),
        ("indices", "keys chosen per query have no offsets"),
        ("block_indices", "keys chosen per query have no offsets"),
        ("sinks", "only sinks given as s_aux are known here"),
        ("cache", "paged caches need a kernel that reads them"),
    ):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"{name}: not supported, because {reason}; use another attn_implementation.")


def _without_mask(query: Tensor, key: Tensor, causal: bool, sliding_window: int | None) -> VarlenMask:
    """For a model that makes no mask, an image encoder for example: queries see all keys, or all up to their own."""
    batch, seq_q, seq_kv = query.shape[0], query.shape[2], key.shape[2]
    if causal and seq_q != seq_kv:
        raise ValueError(
            f"attention_mask: without one, the place of {seq_q} queries among {seq_kv} keys is not known; this model "
            "does not use transformers' mask functions, so use another attn_implementation for it."
        )
    if sliding_window is not None:
        raise ValueError(
            f"sliding_window: {sliding_window} came without a mask from transformers' mask functions, which say how it "
            "counts; use another attn_implementation for this model."
        )
    meta = prepare_varlen(batch, seq_q, seq_kv, device=query.device)
    return VarlenMask(meta=meta, causal=causal, window_size=(-1, -1))


def _given(meta: VarlenMetadata, cu_q: Tensor, cu_k: Tensor, max_q: int | None, max_k: int | None) -> VarlenMetadata:
    """Metadata of ready offsets that the caller gave to the model, trusted as flash-attn trusts them."""
    if meta.total_k is None:
        raise ValueError(
            "cu_seq_lens_q: offsets describe rows without padding and without a cache from earlier calls; give either "
            "them or attention_mask, with use_cache=False."
        )
    for name, maximum in (("max_length_q", max_q), ("max_length_k", max_k)):
        if not isinstance(maximum, (int, torch.SymInt)):
            raise TypeError(
                f"{name}: expected a host int, got {type(maximum).__name__}; VarlenMetadata.transformers_kwargs() has "
                "it as one."
            )
    return VarlenMetadata(
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max_q,  # type: ignore[arg-type]  # checked above
        max_seqlen_k=max_k,  # type: ignore[arg-type]
        exact_q=False,
        exact_k=False,
        same_lengths=cu_q is cu_k,
    )


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink adds the exponential of its logit to the sum of the softmax of its head, and nothing to the output.

    Args:
        out: (..., S_q, H, D_v); lse: (..., H, S_q); sinks: (H,).
    """
    if torch.is_grad_enabled() and (out.requires_grad or sinks.requires_grad):
        raise ValueError(
            "s_aux: attention sinks have no gradient here, because the log-sum-exp has none; call the model under "
            "torch.no_grad(), or train with another attn_implementation."
        )
    share = torch.sigmoid(lse - sinks[:, None].to(lse.dtype))
    return out * share.transpose(-1, -2)[..., None].to(out.dtype)
