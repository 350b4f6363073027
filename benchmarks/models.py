"""Whole diffusion models at published width, with padded prompts: eager, compiled, and captured in a CUDA graph.

Beside the routes of diffusers: SDPA with a mask, and its own varlen route over the same flash-attn 3.  The limit is the
compiled model without attention plus the bare kernel on rows that are packed already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from bare_kernels import BARE
from diffusion_cases import FLUX, GRID, QWEN, TEXT, Family, Scope, joint_mask, routes, text_mask
from measure import Call, Compiling, Row, captures, compiled, first_calls, rows, usable_kernels
from torch import Tensor

from varlen_prep import VarlenMetadata

BLOCKS = {"cuda": 1, "cpu": 1}
HUB_CASE = "compiled, beside the hub route"
LIMIT = 0.05
"""Largest difference to diffusers' SDPA, as a share of the largest output; bf16."""


def benchmark(device: str) -> Iterator[Row]:
    torch._dynamo.config.recompile_limit = 64
    for family in (FLUX, QWEN):
        torch._dynamo.reset()
        yield from _family(family, device)


def _family(family: Family, device: str) -> Iterator[Row]:
    blocks, valid, grid = BLOCKS[device], TEXT[device], GRID[device]
    model = family.build(device, blocks)
    inputs = family.inputs(model, valid, max(valid), grid, device)
    case = (
        f"{family.name}, {family.attentions(blocks)} blocks, B{len(valid)}, {max(valid)} + {grid[0] * grid[1]} tokens"
    )
    clock: dict[str, Any] = {"runs": 8, "queued": 3, "ahead": True} if device == "cuda" else {"runs": 2}
    chosen = routes(model, device)
    eager = {name: functools.partial(run, scope, model, inputs) for name, (scope, _) in chosen.items()}
    want = next(iter(eager.values()))().float()  # SDPA is the first
    errors = {name: _error(name, call, want) for name, call in eager.items() if name != "without attention"}
    yield from rows("models", f"{case}, eager", eager, device, errors=errors, **clock)
    fast = {
        name: functools.partial(run, scope, compiled(model, device, fullgraph), inputs)
        for name, (scope, fullgraph) in chosen.items()
    }
    compiling: dict[str, Compiling] = {}

    def measure(part: str, names: list[str], more: Mapping[str, Call]) -> list[Row]:
        for name in names:
            if name not in compiling:
                compiling[name] = first_calls(fast[name], device)
                assert compiling[name].graphs > 0, f"{name}: nothing was compiled"
        calls = {name: fast[name] for name in names}
        errors = {name: _error(name, call, want) for name, call in calls.items() if name != "without attention"}
        return rows("models", f"{case}, {part}", {**calls, **more}, device, errors=errors, compiling=compiling, **clock)

    hub = [name for name in chosen if name.endswith("hub")]
    limits = {}
    if device == "cuda":
        limits = _limits(fast["without attention"], family.attentions(blocks), valid, grid)
    yield from measure("compiled", [name for name in chosen if name not in hub], limits)
    if device == "cuda":
        graphs, failures = captures({name: fast[name] for name in compiling})
        yield from rows("models", f"{case}, CUDA graph", graphs, device, **clock)
        for name, text in failures.items():
            yield Row(group="models", case=f"{case}, CUDA graph", route=name, note=text)
    # By itself: once its graph breaks are compiled, torch 2.11 runs the routes of diffusers in pieces too.
    ours = [name for name in compiling if name.startswith("varlen_prep")]
    if hub:
        yield from measure(HUB_CASE, ours + hub, {})


def _error(name: str, call: Call, want: Tensor) -> float:
    """The largest difference, as a share of the largest output."""
    error = (call().float() - want).abs().max().item() / want.abs().max().item()
    assert error < LIMIT, f"{name} differs by {error} of the largest output"
    return error


@torch.no_grad()
def run(scope: Scope, model: Callable[..., Any], inputs: dict[str, Any]) -> Tensor:
    """The model's output on one route."""
    with scope():
        return model(**inputs)[0]


def _limits(without: Call, attentions: int, valid: tuple[int, ...], grid: tuple[int, int]) -> dict[str, Call]:
    """The model without attention and then the bare kernels, on rows that are packed already: on as warm a GPU."""
    mask = joint_mask(text_mask(valid, max(valid), "cuda"), grid[0] * grid[1])
    lengths = mask.sum(1).tolist()
    meta = VarlenMetadata.from_lengths([mask.shape[1]] * len(valid), lengths, device="cuda")
    q = torch.randn(mask.numel(), 24, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(sum(lengths), 24, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    @torch.no_grad()
    def both(kernel: str) -> None:
        without()
        for _ in range(attentions):
            BARE[kernel](q, k, v, meta)

    kernels = [name for name in usable_kernels() if name in BARE and name != "sage"]
    return {f"limit: no attention + bare {name}": functools.partial(both, name) for name in kernels}
