"""A Llama of the 1B class in training: documents packed into one row, and padded to one row each.

Forward, loss and backward; eager, compiled, and captured in a CUDA graph; this library's attention beside what
transformers does itself: SDPA, for packed rows with a mask over all tokens, and its flash-attn 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import Call, Compiling, Row, captured, compiled, first_calls, rows
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from varlen_prep import backends
from varlen_prep.integrations.transformers import BACKENDS, register
from varlen_prep.selection import automatic_order

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
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    config = LlamaConfig(**WIDTH[device], max_position_embeddings=sum(DOCUMENTS[device]), tie_word_embeddings=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device, torch.bfloat16).train()
    texts = [torch.randint(config.vocab_size, (length,), device=device) for length in DOCUMENTS[device]]
    register(capacity=len(texts))
    usable = {state.name for state in backends() if state.usable}
    best = [name for name in automatic_order(device) if name in usable][:1]
    ours = {backend: f"varlen_prep, {backend}" for backend in best}
    names = {backend: name for name, backend in BACKENDS.items()}
    implementations = {label: names[backend] for backend, label in ours.items()} | {"transformers sdpa": "sdpa"}
    if "flash3" in ours:
        implementations["transformers flash_attention_3"] = "flash_attention_3"
    eager: dict[str, Call] = {}
    fast: dict[str, Call] = {}
    compiling: dict[str, Compiling] = {}
    errors: dict[str, float] = {}
    notes: dict[str, str] = {}
    want = None
    shapes = {"padded": pad(texts), "packed": pack(texts)}
    for shape, implementation in (("padded", "sdpa"), *((s, i) for s in shapes for i in implementations.values())):
        label = next(label for label, name in implementations.items() if name == implementation)
        route = f"{label}, {shape}"
        if route in eager:
            continue
        try:
            model.set_attn_implementation(implementation)
            eager[route] = functools.partial(step, model, implementation, model, *shapes[shape])
            got = valid_logits(model, *shapes[shape])
            want = got if want is None else want
            errors[route] = ((got - want).abs().max() / want.abs().max()).item()
            assert errors[route] < LIMIT, f"{route}: logits differ by {errors[route]} of the largest"
            whole = compiled(model, device, fullgraph=not implementation.startswith("flash"))
            call = functools.partial(step, model, implementation, whole, *shapes[shape])
            compiling[route] = first_calls(call, device)
            fast[route] = call
        except (RuntimeError, ValueError, ImportError, TypeError) as error:
            notes[route] = f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
            eager.pop(route, None)
    parts = {"eager": eager, "compiled": fast}
    if device == "cuda":
        parts["CUDA graph"] = {}
        for route, call in fast.items():
            try:
                parts["CUDA graph"][route] = captured(call)
            except RuntimeError as error:
                notes[f"{route}, CUDA graph"] = f"cannot be captured: {' '.join(str(error).split())[:60]}"
                torch.cuda.synchronize()
    tokens = sum(DOCUMENTS[device])
    layers, longest = config.num_hidden_layers, max(DOCUMENTS[device])
    case = f"Llama, {layers} layers, {len(texts)} documents, {tokens} tokens, longest {longest}, forward + backward"
    for part, calls in parts.items():
        made = compiling if part == "compiled" else None
        runs = {"runs": 6, "queued": 2, "ahead": True} if device == "cuda" else {"runs": 2}
        yield from rows("llm", f"{case}, {part}", calls, device, errors=errors, compiling=made, **runs)
    for route, text in notes.items():
        yield Row(group="llm", case=case, route=route, note=text)


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
