"""Small models of real architectures with random weights, and what their tests share.

B rows, S padded length.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.testing import assert_close

from varlen_prep.integrations.transformers import register

register()

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
MIXED = GROUPED | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
SEQ2SEQ = {
    "vocab_size": 40, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


class Architecture(NamedTuple):
    model: str
    """Class in transformers."""
    config: dict[str, Any]
    layer_types: int = 1
    """How many kinds of mask one forward makes."""
    peer: str = "sdpa"
    """The implementation of transformers to compare with."""
    backend: str | None = None
    """Of this library, where the automatic one lacks something."""


DECODERS = {
    "llama": Architecture("LlamaForCausalLM", GROUPED),
    "qwen2": Architecture("Qwen2ForCausalLM", MIXED | {"use_sliding_window": True}, 2),
    "qwen3": Architecture("Qwen3ForCausalLM", GROUPED | {"head_dim": 16}),
    "mistral": Architecture("MistralForCausalLM", GROUPED | {"sliding_window": 4}),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", MIXED | {"head_dim": 8, "attn_logit_softcapping": 0.1}, 2, "eager", "reference"
    ),
    "gemma3": Architecture("Gemma3ForCausalLM", MIXED | {"head_dim": 8}, 2),
    "phi3": Architecture("Phi3ForCausalLM", GROUPED),
    "gpt_neox": Architecture("GPTNeoXForCausalLM", SIZES),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
        | {"eos_token_id": None, "pad_token_id": 0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", GROUPED),
    "cohere2": Architecture("Cohere2ForCausalLM", MIXED, 2),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        MIXED
        | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        2,
        "eager",
    ),
    "deepseek_v3": Architecture(  # v heads are smaller than q and k heads
        "DeepseekV3ForCausalLM",
        SIZES
        | {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
        | {"v_head_dim": 8, "first_k_dense_replace": 2},
    ),
}
CROSS = {
    "bart": Architecture("BartForConditionalGeneration", SEQ2SEQ, 3),
    "bert_decoder": Architecture("BertLMHeadModel", SIZES | {"is_decoder": True, "add_cross_attention": True}, 2),
}
ENCODERS = {
    "bert": Architecture("BertModel", SIZES),
    "roberta": Architecture("RobertaModel", SIZES),
    "modernbert": Architecture(
        "ModernBertModel",
        SIZES | {"global_attn_every_n_layers": 2, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2},
        2,
    ),
}


def build(architecture: Architecture, implementation: str, device: str = "cpu", dtype: Any = torch.float32) -> Any:
    """A model with weights that depend on the architecture alone, away from their small initial size."""
    cls = getattr(transformers, architecture.model)
    config = cls.config_class(**copy.deepcopy(architecture.config))
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval().to(device, dtype)


def pair(architecture: Architecture, **options: Any) -> tuple[Any, Any]:
    """transformers' own model and ours."""
    name = "varlen_prep" if architecture.backend is None else f"varlen_prep:{architecture.backend}"
    return build(architecture, architecture.peer, **options), build(architecture, name, **options)


def before(version: str) -> bool:
    return Version(transformers.__version__) < Version(version)


@contextlib.contextmanager
def registered(**options: Any) -> Iterator[None]:
    """`register` with options, and without them afterwards."""
    register(**options)
    try:
        yield
    finally:
        register()


def tokens(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randint(3, 40, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def padding(side: str, batch: int = 3, seq: int = 11, device: str = "cpu") -> Tensor:
    """A 2D mask whose rows have different lengths, the first without padding."""
    length = torch.tensor([seq, 4, 7])[:batch, None]
    index = torch.arange(seq)
    return (index < length if side == "right" else index >= seq - length).long().to(device)


def positions_of(mask: Tensor) -> Tensor:
    """What generate() gives left-padded rows, so that padding moves no position."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def packed_positions(device: str = "cpu") -> Tensor:
    """Two rows of documents with different cuts, one of which does not restart at 0."""
    row = [[*range(4), *range(6), 0], [*range(5, 8), *range(1), *range(2, 9)]]
    return torch.tensor(row, device=device)


@torch.no_grad()
def assert_equal_rows(
    ours: Callable[..., Any], theirs: Callable[..., Any], part: Tensor | None = None, limit: float = 2e-5, **inputs: Any
) -> Tensor:
    """The first output of both, equal on rows that take part (bool (B, S)); returns ours."""
    a, b = (model(**inputs)[0] for model in (ours, theirs))
    scale = max(1.0, b.abs().max().item())
    kept = slice(None) if part is None else part.bool()
    assert_close(a[kept], b[kept], atol=limit * scale, rtol=limit)
    return a
