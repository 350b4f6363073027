"""Compiles a real Flux transformer once for changing batches, prompts and resolutions, and proves it line by line.

    python examples/compile_flux.py                                  # small model, CPU, under three minutes
    python examples/compile_flux.py --size dev --device cuda         # the published FLUX.1-dev dimensions

diffusers' own `FluxTransformer2DModel`, with random weights, runs its attention through `varlen_prep` and is compiled
with `fullgraph=True, dynamic=True`. Prompts are padded, so the joint key mask of each row has a hole: text | pad |
image. Every line of the table is checked, and the exit code is 1 if one fails:

- differences: the compiled model against the same model run eagerly, and that against diffusers' own masked SDPA
  ("vs SDPA", no code of this library); both at most the tolerance of the dtype times the largest output;
- graphs: exactly one for all sizes above 1, and one more from the first line where a size is 1, because torch treats
  sizes 0 and 1 as constants; any other recompile fails the line;
- graph breaks and, on CUDA, host syncs of a warm forward: none.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.attention_dispatch import attention_backend
from torch import Tensor

from varlen_prep import backends
from varlen_prep.integrations.diffusers import route

# Written for this example, from a word to a paragraph. Their lengths are counted in words and punctuation marks: a
# real tokenizer would have to be downloaded, and splits long words further.
PROMPTS = [
    "Fog.",
    "A red kettle on a blue stove, morning light.",
    "Portrait of an old lighthouse keeper, oil on canvas.",
    "A tram climbs a steep street after rain; the rails mirror a pink sky, and somebody has left one yellow umbrella "
    "leaning on the stop.",
    "Macro photograph of frost on a spider's web.",
    "An isometric drawing of a tiny library built inside a hollow oak: spiral stairs, brass lamps, a cat asleep on the "
    "atlas shelf, a child reaching for the highest book, and rain behind the round window.",
    "Two chess players in a park, seen from a balcony, long shadows, late autumn, grainy film.",
    "A wide valley at dusk. In front, a shepherd counts her flock at a wooden gate, a dog beside her; in the middle, "
    "a river with three stone bridges, each with a lantern at its centre; behind, terraced hills, then a wall of blue "
    "mountains under the first stars. Soft, warm colours, visible brush strokes, no text, no frame, the mood of an "
    "evening after work is done.",
]

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "in_channels": 8,
        "num_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 40,
        "pooled_projection_dim": 24,
        "axes_dims_rope": (4, 6, 6),
    },
    "dev": {"num_layers": 19},  # everything else is the default of the class: the published FLUX.1-dev
}

# Batch, padded prompt length, height and width in pixels. torch gives one symbol to sizes that are equal when it first
# traces, so the first line has none that are; later lines may.
SHAPES = {
    "tiny": "2x23x96x128 5x41x128x80 1x17x112x96 4x56x80x144 2x79x160x96 6x33x64x176",
    "dev": "2x512x1024x1024 3x256x768x1152 1x512x1360x768 4x128x512x768 2x384x1152x896 1x77x640x640",
}
PIXELS_PER_TOKEN = 16  # the autoencoder divides by 8, and 2 x 2 patches become one token

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def main() -> int:
    args = arguments()
    torch.manual_seed(0)
    config = SIZES[args.size] | {"num_layers": args.layers, "num_single_layers": 2 * args.layers}
    torch.set_default_dtype(args.dtype)  # a float32 copy of the large size would not fit everywhere
    with torch.device(args.device):
        model = FluxTransformer2DModel(**config, guidance_embeds=True).eval()
    torch.set_default_dtype(torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    say(
        f"FluxTransformer2DModel, {args.layers} double and {2 * args.layers} single blocks, {parameters / 1e6:,.1f} M "
        f"parameters, {args.dtype}, {args.device}; backend {args.backend}, mask {'on' if args.mask else 'off'}"
    )
    if args.device == "cuda" and syncs(lambda: torch.ones((), device="cuda").item()) == 0:
        say("FAILED: the sync counter does not see a sync that was put there for it")
        return 1

    graphs: set[Any] = set()  # an entry for each graph that was compiled
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counted(args.compile_backend, graphs))
    expected: set[tuple[bool, ...]] = set()  # which sizes are 1, on the lines so far
    rows, failures = [], []
    with torch.no_grad(), route(args.backend):
        for number, shape in enumerate(args.shapes, 1):
            batch, prompt, height, width = shape
            image = (height // PIXELS_PER_TOKEN) * (width // PIXELS_PER_TOKEN)
            expected.add((batch == 1, prompt == 1, image == 1))
            inputs, valid = make_inputs(model, shape, args)
            cells = [f"{number}", f"{batch}", f"{valid} of {prompt}", f"{height}x{width}", f"{prompt + image}"]
            before = len(graphs)
            try:
                with attention_backend("native"):
                    sdpa = model(**for_sdpa(inputs))[0]
                with attention_backend("flash_varlen"):
                    eager = model(**inputs)[0]
                    with progress(f"line {number} of {len(args.shapes)}, {'x'.join(map(str, shape))}"):
                        out = compiled(**inputs)[0]
                    stalls = syncs(lambda: compiled(**inputs)) if args.device == "cuda" else None  # noqa: B023
                    milliseconds = timed(lambda: compiled(**inputs), args.device)  # noqa: B023
            except (RuntimeError, ValueError) as error:  # a graph break is an error under fullgraph=True
                broken = isinstance(error, torch._dynamo.exc.TorchDynamoException)
                rows.append([*cells, "", "", f"{len(graphs)}", "", "1" if broken else "", "", ""])
                failures.append(f"line {number}: {type(error).__name__}: {error}")
                break
            recompiles = len(graphs) - max(before, 1)
            limit = args.tolerance * max(1.0, eager.abs().max().item())
            differences = {"eager": gap(out, eager), "SDPA": gap(eager, sdpa)}
            cells += [f"{d:.1e}" for d in differences.values()] + [f"{len(graphs)}", f"{recompiles}", "0"]
            rows.append([*cells, "n/a" if stalls is None else f"{stalls}", f"{milliseconds:.1f} ms"])
            for name, difference in differences.items():
                if not difference <= limit:  # also where it is NaN
                    failures.append(f"line {number}: difference to {name} {difference:.2e} is above {limit:.2e}")
            if len(graphs) != len(expected):
                failures.append(f"line {number}: {len(graphs)} graphs so far, expected exactly {len(expected)}")
            if stalls:
                failures.append(f"line {number}: {stalls} host syncs in a warm forward, expected none")
    head = ["line", "batch", "prompt", "image", "tokens", "vs eager", "vs SDPA"]
    print_table([[*head, "graphs", "recompiles", "breaks", "syncs", "time"], *rows])
    for failure in failures:
        print(f"FAILED {failure}")
    if not failures:
        print(
            f"OK: {len(rows)} shapes, {len(graphs)} graphs of {len(expected)} expected, differences within {limit:.1e}"
        )
    return 1 if failures else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--backend", choices=[state.name for state in backends()], default="native")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 on cuda")
    parser.add_argument("--layers", type=int, help="double blocks; there are twice as many single ones")
    parser.add_argument("--mask", action=argparse.BooleanOptionalAction, default=True, help="hide padded text")
    parser.add_argument("--shapes", help="space-separated BATCHxPROMPTxHEIGHTxWIDTH, instead of the built-in list")
    parser.add_argument("--tolerance", type=float, help="instead of the dtype's")
    parser.add_argument("--compile-backend", default="inductor", help="of torch.compile; aot_eager is fast to compile")
    args = parser.parse_args()
    args.device = torch.device(args.device).type
    args.dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    args.layers = args.layers or SIZES[args.size]["num_layers"]
    args.tolerance = TOLERANCES[args.dtype] if args.tolerance is None else args.tolerance
    args.shapes = [tuple(map(int, shape.split("x"))) for shape in (args.shapes or SHAPES[args.size]).split()]
    if any(len(shape) != 4 for shape in args.shapes):
        parser.error("--shapes: expected four numbers for each, BATCHxPROMPTxHEIGHTxWIDTH")
    return args


def make_inputs(model: Any, shape: tuple[int, ...], args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Random text and image embeddings, and the joint key mask (batch, prompt + image tokens) of padded prompts."""
    batch, prompt, height, width = shape
    rows, columns = height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN
    prompts = [PROMPTS[(prompt + i) % len(PROMPTS)] for i in range(batch)]
    tokens = [len(re.findall(r"\w+|[^\w\s]", text)) for text in prompts]
    lengths = torch.tensor([min(count, prompt) for count in tokens], device=args.device)
    place: dict[str, Any] = {"device": args.device, "dtype": args.dtype}
    image_ids = torch.zeros(rows, columns, 3, **place)
    image_ids[..., 1] += torch.arange(rows, **place)[:, None]
    image_ids[..., 2] += torch.arange(columns, **place)
    config = model.config
    inputs = {
        "hidden_states": torch.randn(batch, rows * columns, config.in_channels, **place),
        "encoder_hidden_states": torch.randn(batch, prompt, config.joint_attention_dim, **place),
        "pooled_projections": torch.randn(batch, config.pooled_projection_dim, **place),
        "timestep": torch.rand(batch, **place),
        "guidance": torch.full((batch,), 3.5, **place),
        "img_ids": image_ids.flatten(0, 1),
        "txt_ids": torch.zeros(prompt, 3, **place),
        "return_dict": False,
    }
    if args.mask:
        text = torch.arange(prompt, device=args.device) < lengths[:, None]
        mask = torch.cat([text, text.new_ones(batch, rows * columns)], dim=1)
        inputs["joint_attention_kwargs"] = {"attention_mask": mask}
    return inputs, f"{lengths.min()}-{lengths.max()}"


def for_sdpa(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs with the mask as SDPA wants it: (batch, 1, 1, keys)."""
    if "joint_attention_kwargs" not in inputs:
        return inputs
    mask = inputs["joint_attention_kwargs"]["attention_mask"]
    return inputs | {"joint_attention_kwargs": {"attention_mask": mask[:, None, None, :]}}


def counted(name: str, graphs: set[Any]) -> Callable[..., Any]:
    """The compiler backend of that name, noting every graph that it is given."""
    compiler = torch._dynamo.lookup_backend(name)

    def compile_graph(module: Any, example_inputs: Any) -> Any:
        # torch may trace and compile once more to treat some Python floats as constants; the id stays the same.
        graph = torch._guards.CompileContext.current_compile_id()
        again = " again" if graph in graphs else ""
        graphs.add(graph)
        say(f"  graph {len(graphs)}{again}: {len(module.graph.nodes)} nodes, compiling with {name}")
        return compiler(module, example_inputs)

    return compile_graph


def syncs(run: Callable[[], Any]) -> int:
    """How often a call makes the host wait for the GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def timed(run: Callable[[], Any], device: str) -> float:
    """Milliseconds of one warm call."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    run()
    wait()
    return 1000 * (time.perf_counter() - begin)


def gap(a: Tensor, b: Tensor) -> float:
    return (a.float() - b.float()).abs().max().item()


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Says what runs, and every ten seconds that it still does."""
    say(what)
    begin, done = time.perf_counter(), threading.Event()

    def tick() -> None:
        while not done.wait(10):
            say(f"  ... {time.perf_counter() - begin:.0f} s")

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_table(rows: list[list[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
