"""What the tests of graphs share: a capture that is only claimed, small models of transformers, a recorder of SDPA."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    masking_utils,
)

from varlen_prep.graphs._capture import Captured

VOCABULARY, WINDOW = 48, 8
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "attn_implementation": "sdpa",
    "initializer_range": 0.2,  # logits of order 1
    "pad_token_id": 0,
}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
ARCHITECTURES = ("llama", "qwen2", "gemma3")


def tiny(architecture: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Random weights: Llama with all heads, Qwen2 with two key heads, Gemma3 with sliding windows of 8 tokens."""
    torch.manual_seed(0)
    if architecture == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2))
    elif architecture == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, num_hidden_layers=2, num_key_value_heads=2))
    else:
        layers = {"num_hidden_layers": 3, "layer_types": LAYERS, "sliding_window": WINDOW}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **layers, num_key_value_heads=2, head_dim=16))
    return model.to(device, dtype).eval()


def logits_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda ids, positions: model(input_ids=ids, position_ids=positions, use_cache=False).logits


def row(length: int, *, seed: int = 0, device: str = "cpu") -> Tensor:
    """Token ids (1, length), none of them 0."""
    generator = torch.Generator().manual_seed(100 * length + seed)
    return torch.randint(1, VOCABULARY, (1, length), generator=generator).to(device)


class Attention(NamedTuple):
    """Arguments of one SDPA call that decide which kernel runs."""

    mask: Tensor | None
    is_causal: bool
    shape: torch.Size

    @property
    def kind(self) -> tuple[bool, bool, torch.Size]:
        return self.mask is not None, self.is_causal, self.shape


@contextlib.contextmanager
def recorded_sdpa() -> Iterator[list[Attention]]:
    """The SDPA calls of a model of transformers."""
    calls: list[Attention] = []
    real = nn.functional.scaled_dot_product_attention

    def record(query: Tensor, *args: Any, attn_mask: Tensor | None = None, is_causal: bool = False, **options: Any):
        calls.append(Attention(attn_mask, is_causal, query.shape))
        return real(query, *args, attn_mask=attn_mask, is_causal=is_causal, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", record)
        yield calls


_claimed = threading.local()


@contextlib.contextmanager
def claimed_capture() -> Iterator[None]:
    """This thread's current stream says that it captures."""
    _claimed.on = True
    try:
        yield
    finally:
        _claimed.on = False


@contextlib.contextmanager
def captures_can_be_claimed() -> Iterator[None]:
    """Puts the answer of `claimed_capture` where torch's own answer is, for every thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: getattr(_claimed, "on", False))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: getattr(_claimed, "on", False))
        yield


def mask(
    positions: Tensor | None = None, padding: Tensor | None = None, *, seq: int = 6, make: str = "create_causal_mask"
) -> Tensor | None:
    """What transformers makes for SDPA, None where it leaves the mask out; positions (1, seq), default 0, 1, ..."""
    x = torch.zeros(1, seq, SIZES["hidden_size"])
    given = {
        "config": Gemma3TextConfig(**SIZES, num_hidden_layers=3, layer_types=LAYERS, sliding_window=WINDOW),
        "inputs_embeds": x,
        "input_embeds": x,  # the name before 5.2
        "attention_mask": padding,
        "cache_position": torch.arange(seq),
        "past_key_values": None,
        "cache": None,  # the name since 5.20
        "position_ids": torch.arange(seq)[None] if positions is None else positions,
    }
    function = getattr(masking_utils, make)
    taken = set(inspect.signature(function).parameters)
    if "cache" in taken:
        taken -= {"past_key_values"}  # shown beside its successor since 5.25
    return function(**{name: value for name, value in given.items() if name in taken})


class StandInGraph:
    """Runs the function again, into the memory of its first result, as a replay does."""

    def __init__(self, function: Callable[[], Any], output: Any) -> None:
        self.function, self.output = function, output

    def replay(self) -> None:
        torch.utils._pytree.tree_map(lambda old, new: old.copy_(new), self.output, self.function())


class StandInPool:
    """`GraphPool` without a GPU: the same host side, and captures that are only claimed."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()

    def capture(self, function: Callable[[], Any]) -> Captured:
        with claimed_capture():
            output = function()
        return Captured(StandInGraph(function, output), output)

    def turn(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def without_gpu(patch: pytest.MonkeyPatch, module: Any) -> None:
    """Lets `RowGraphs` or `GraphedVarlen` (in `module`) work on the CPU."""
    patch.setattr(module, "GraphPool", StandInPool)
    patch.setattr(module, "one_cuda_device", lambda expected, tensors: torch.device("cpu"))


def poison(pool: Any) -> torch.cuda.CUDAGraph:
    """A graph whose replay fills the free memory of a `GraphPool` with NaN, in blocks of many sizes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.handle, stream=pool._stream):
        sizes = [2**20] * 32 + [2**17] * 64 + [2**14] * 64 + [2**11] * 64 + [2**9] * 64
        blocks = [torch.full((size // 4,), torch.nan, device=pool.device) for size in sizes]
        del blocks
    return graph
