"""Shapes in motion: 50 sizes of one compiled Flux model in a row, on each route.

The first pass compiles, the second is warm: what a service pays when batches, prompts and resolutions change.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from diffusion_cases import FLUX, build_flux, routes
from measure import Row, compiled, first_calls
from models import run

COUNT = {"cuda": 50, "cpu": 3}


def benchmark(device: str) -> Iterator[Row]:
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    model = build_flux(device, double=1, single=1)
    shapes = [FLUX.inputs(model, *size, device) for size in sizes(COUNT[device], device)]
    case = f"Flux, 2 blocks, {len(shapes)} shapes"
    for name, (scope, fullgraph) in routes(model, device).items():
        if name == "without attention":
            continue
        fast = compiled(model, device, fullgraph)

        def all_shapes(fast: Any = fast, scope: Any = scope) -> None:
            for inputs in shapes:
                run(scope, fast, inputs)
            if device == "cuda":
                torch.cuda.synchronize()

        first = first_calls(all_shapes, device)
        assert first.graphs > 0, f"{name}: nothing was compiled"
        begin = time.perf_counter()
        all_shapes()
        warm = (time.perf_counter() - begin) / len(shapes)
        yield Row(
            group="motion", case=case, route=name, median_us=warm * 1e6, first_s=first.first_s, graphs=first.graphs,
            breaks=first.breaks, note="warm: mean of a second pass",
        )  # fmt: skip


def sizes(count: int, device: str) -> list[tuple[tuple[int, ...], int, tuple[int, int]]]:
    """Valid text tokens of each row, text slots, image grid: all different, none 1, which torch takes for constant."""
    chosen, found = random.Random(0), {}
    while len(found) < count:
        slots = chosen.randrange(64, 513) if device == "cuda" else chosen.randrange(20, 40)
        most = 64 if device == "cuda" else 6
        grid = (chosen.randrange(most // 2, most + 1), chosen.randrange(most // 2, most + 1))
        batch = chosen.randrange(2, 6)
        found[batch, slots, grid] = (tuple(chosen.randrange(2, slots + 1) for _ in range(batch)), slots, grid)
    return list(found.values())
