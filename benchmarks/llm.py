"""A Llama of the 1B class in training: documents packed into one row, and padded to one row each.

Forward, loss and backward; eager, compiled, and captured in a CUDA graph; this library's attention beside what
transformers does itself: SDPA, for packed rows with a mask over all tokens, and its flash-attn 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import Call, Compiling, Row, best_kernel, captures, compiled, first_calls, rows, short
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from varlen_prep.integrations.transformers import BACKENDS, register

WIDTH: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
             "num_hidden_layers": 4, "vocab_size": 32000},
    "cpu": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_hidden_layers": 1, "vocab_size": 50},
}  # fmt: skip
DOCUMENTS = {"cuda": [64, 128, 200, 256, 350, 400, 512, 600, 700, 800, 900, 1000, 1100, 1200, 1500, 2048],
             "cpu": [3, 9, 5]}  # fmt: skip
LIMIT = 0.03
"""Largest difference of the logits to transformers' padded SDPA, as a share of the largest; bf16."""
IGNORED = -100


def benchmark(device: str) -> Iterator[Row]:
    torch._dynamo.config.recompile_limit = 64
    config = LlamaConfig(**WIDTH[device], max_position_embeddings=sum(DOCUMENTS[device]), tie_word_embeddings=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device, torch.bfloat16).train()
    texts = [torch.randint(config.vocab_size, (length,), device=device) for length in DOCUMENTS[device]]
    register(capacity=len(texts))
    lengths = DOCUMENTS[device]
    sizes = f"{len(lengths)} documents, {sum(lengths)} tokens, longest {max(lengths)}"
    case = f"Llama, {config.num_hidden_layers} layers, {sizes}, forward + backward"
    model.set_attn_implementation("sdpa")
    want = valid_logits(model, *pad(texts))
    for shape, (inputs, labels) in (("packed", pack(texts)), ("padded", pad(texts))):
        torch._dynamo.reset()
        yield from _shape(model, f"{case}, {shape}", inputs, labels, want, device)


def _shape(
    model: Any, case: str, inputs: dict[str, Tensor], labels: Tensor, want: Tensor, device: str
) -> Iterator[Row]:
    """Every implementation on the same inputs: eager, compiled, captured."""
    clock: dict[str, Any] = {"runs": 6, "queued": 2, "ahead": True} if device == "cuda" else {"runs": 2}
    measure = functools.partial(rows, "llm", device=device, **clock)
    eager: dict[str, Call] = {}
    errors: dict[str, float] = {}
    found = implementations(device)
    for route, implementation in found.items():
        try:
            model.set_attn_implementation(implementation)
            got = valid_logits(model, inputs, labels)
        except (RuntimeError, ValueError, ImportError, TypeError) as error:
            yield Row(group="llm", case=case, route=route, note=short(error))
            continue
        errors[route] = ((got - want).abs().max() / want.abs().max()).item()
        assert errors[route] < LIMIT, f"{route}: logits differ by {errors[route]} of the largest"
        eager[route] = functools.partial(step, model, implementation, model, inputs, labels)
    yield from measure(f"{case}, eager", eager, errors=errors)
    whole = [route for route in eager if not found[route].startswith("flash")]
    # By themselves: once graph breaks are compiled, torch 2.11 runs the other routes in pieces too.
    broken = [route for route in eager if route not in whole]
    for routes in (whole, broken):
        fast: dict[str, Call] = {}
        compiling: dict[str, Compiling] = {}
        for route in routes:
            forward = compiled(model, device, fullgraph=route in whole)
            call = functools.partial(step, model, found[route], forward, inputs, labels)
            try:
                compiling[route] = first_calls(call, device)
                fast[route] = call
            except RuntimeError as error:
                yield Row(group="llm", case=f"{case}, compiled", route=route, note=short(error))
        yield from measure(f"{case}, compiled", fast, errors=errors, compiling=compiling)
        if device == "cuda":
            graphs, failures = captures(fast)
            for route, text in failures.items():
                yield Row(group="llm", case=f"{case}, CUDA graph", route=route, note=text)
            yield from measure(f"{case}, CUDA graph", graphs, errors=errors)


def implementations(device: str) -> dict[str, str]:
    """Route -> what transformers calls it; ours with the best kernel."""
    best = best_kernel(device)
    ours = {backend: name for name, backend in BACKENDS.items()}[best]
    found = {"transformers sdpa": "sdpa", f"varlen_prep, {best}": ours}
    return found | ({"transformers flash_attention_3": "flash_attention_3"} if best == "flash3" else {})


def step(
    model: Any, implementation: str, forward: Callable[..., Any], inputs: dict[str, Tensor], labels: Tensor
) -> Tensor:
    """The mean loss; gradients of all weights are computed and dropped."""
    model.config._attn_implementation = implementation
    logits = forward(**inputs, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
    torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach()


@torch.no_grad()
def valid_logits(model: Any, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Of all tokens of all documents, in their order."""
    logits = model(**inputs, use_cache=False).logits.float()
    return logits[inputs.get("attention_mask", torch.ones_like(labels)).bool()]


def pack(texts: list[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """One row of all documents, with positions that restart."""
    positions = torch.cat([torch.arange(len(text), device=text.device) for text in texts])
    labels = torch.cat([shifted(text) for text in texts])
    return {"input_ids": torch.cat(texts)[None], "position_ids": positions[None]}, labels[None]


def pad(texts: list[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """One row for each document, filled up to the longest."""
    ids = pad_sequence(texts, batch_first=True)
    mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    labels = pad_sequence([shifted(text) for text in texts], batch_first=True, padding_value=IGNORED)
    return {"input_ids": ids, "attention_mask": mask}, labels


def shifted(text: Tensor) -> Tensor:
    """The next token of each, none after the last."""
    return torch.cat([text[1:], text.new_full((1,), IGNORED)])
