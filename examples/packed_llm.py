"""Trains a small Llama on packed documents and on the same documents padded, and proves that nothing else differs.

    python examples/packed_llm.py                                   # CPU, about two minutes
    python examples/packed_llm.py --device cuda --hidden 1024 --layers 8 --longest 2048

transformers' own `LlamaForCausalLM`, with random weights, twice from the same start: "packed" lays all documents of a
step end to end in one row, with positions that restart, and attends through `varlen_prep`; "padded" gives each document
a row of its own and attends through transformers' SDPA. Both are compiled with `fullgraph=True, dynamic=True` and
checkpoint their activations. The exit code is 1 unless

- the losses of every step agree within the tolerance of the dtype, and fall;
- each run compiled exactly one graph, though every step has other lengths;
- another text in one document leaves the loss of every token of the others bit-equal, and the same check sees the leak
  that is planted for it by positions that do not restart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from varlen_prep import backends
from varlen_prep.integrations.transformers import BACKENDS, register

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
IGNORED = -100  # the label of a place without a next token


def main() -> int:
    args = arguments()
    # With a fixed number of offsets nothing is read from the device.
    register(capacity=args.documents)
    names = {backend: name for name, backend in BACKENDS.items()}
    steps = [documents(args, seed) for seed in range(args.steps)]
    backend = args.backend or "chosen automatically"
    say(f"{args.steps} steps of {args.documents} documents, {args.dtype}, {args.device}; backend {backend}")
    packed = train("packed", names[args.backend], [pack(step) for step in steps], args)
    padded = train("padded", "sdpa", [pad(step) for step in steps], args)
    print_table([["run", "first loss", "last loss", "graphs", "tokens/s", "peak memory"], packed.row(), padded.row()])

    failures = []
    gap = max(abs(a - b) for a, b in zip(packed.losses, padded.losses, strict=True))
    if not gap <= args.tolerance:  # also where it is NaN
        failures.append(f"losses differ by {gap:.2e}, more than {args.tolerance:.2e}")
    if not packed.losses[-1] < packed.losses[0]:
        failures.append(f"the loss did not fall: {packed.losses[0]:.3f}, then {packed.losses[-1]:.3f}")
    for run in (packed, padded):
        if run.graphs != 1:
            failures.append(f"{run.name}: {run.graphs} graphs, expected exactly 1")
    leaks = [touched(packed.loss, steps[0], args, restart) for restart in (True, False)]
    if leaks[0] != [1]:
        failures.append(f"a change in document 1 reached documents {leaks[0]}, expected only itself")
    if leaks[1] == [1]:
        failures.append("the planted leak was not seen, so the check proves nothing")
    for failure in failures:
        print(f"FAILED {failure}")
    if not failures:
        print(f"OK: losses within {gap:.1e}, no leak between {args.documents} documents, planted leak seen")
    return 1 if failures else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 on cuda")
    parser.add_argument("--backend", choices=[state.name for state in backends()], help="default: chosen automatically")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--documents", type=int, default=16, help="in every step")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest document")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tolerance", type=float, help="instead of the dtype's")
    parser.add_argument("--compile-backend", default="inductor", help="of torch.compile; aot_eager is fast to compile")
    args = parser.parse_args()
    args.device = torch.device(args.device).type
    args.dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    args.tolerance = TOLERANCES[args.dtype] if args.tolerance is None else args.tolerance
    if args.documents < 3 or args.steps < 2 or args.longest < 8:
        parser.error("expected at least 3 documents, 2 steps and 8 tokens")
    return args


def documents(args: argparse.Namespace, seed: int) -> list[Tensor]:
    """Texts of very different lengths, each counting up from a random token: something that can be learnt."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(args.documents, generator=generator)
    lengths = (4 * (args.longest / 4) ** share).long().tolist()  # as many of 4 to 8 tokens as of 64 to 128
    starts = torch.randint(100, (args.documents,), generator=generator).tolist()
    return [
        ((start + torch.arange(length)) % 100).to(args.device) for start, length in zip(starts, lengths, strict=True)
    ]


class Batch(NamedTuple):
    inputs: dict[str, Tensor]
    labels: Tensor
    """(B, S): the next token of the same document, or IGNORED."""
    tokens: int


def pack(texts: list[Tensor], restart: bool = True) -> Batch:
    """One row of all documents; `restart` gives each its own positions."""
    lengths = [len(text) for text in texts]
    ids = torch.cat(texts)
    positions = torch.cat([torch.arange(n, device=ids.device) for n in lengths]) if restart else ids.new_ones(len(ids))
    if not restart:
        positions = positions.cumsum(0) - 1
    labels = torch.cat([torch.cat([text[1:], text.new_full((1,), IGNORED)]) for text in texts])
    return Batch({"input_ids": ids[None], "position_ids": positions[None]}, labels[None], len(ids))


def pad(texts: list[Tensor]) -> Batch:
    """One row for each document, filled up to the longest."""
    rows = [torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    labels = [torch.cat([text[1:], text.new_full((1,), IGNORED)]) for text in texts]
    rows.append(torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED))
    return Batch({"input_ids": rows[0], "attention_mask": mask}, rows[1], sum(map(len, texts)))


class Run(NamedTuple):
    name: str
    loss: Callable[[Batch], Tensor]
    """The loss of every place (B, S), 0 where it is ignored, through the trained and compiled model."""
    losses: list[float]
    graphs: int
    speed: float
    memory: int

    def row(self) -> list[str]:
        ends = [f"{self.losses[0]:.4f}", f"{self.losses[-1]:.4f}"]
        return [self.name, *ends, f"{self.graphs}", f"{self.speed:,.0f}", f"{self.memory / 2**20:,.2f} MiB"]


def train(name: str, implementation: str, batches: list[Batch], args: argparse.Namespace) -> Run:
    """Trains a model from the same start on these batches; one step for each."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=args.documents * args.longest,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation=implementation)
    model = model.to(args.device, args.dtype).train()
    checkpointing = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    checkpointing({"use_reentrant": False})
    # The package kernels (0.19) notes in every forward which kernels are active: needless in the recomputation.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    graphs: set[Any] = set()

    def loss(inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        logits = model(**inputs, use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counted(args.compile_backend, graphs))

    def step(batch: Batch) -> Tensor:
        mean = compiled(batch.inputs, batch.labels).sum() / (batch.labels != IGNORED).sum()
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        return mean.detach()

    say(f"{name}: compiling with {args.compile_backend}")
    losses, speeds = [], []
    for batch in batches:
        wait(args.device)
        begin = time.perf_counter()
        losses.append(step(batch))
        wait(args.device)
        speeds.append(batch.tokens / (time.perf_counter() - begin))
    speed = statistics.median(speeds[1:])  # the first step compiles
    memory = peak_memory(lambda: compiled(batches[0].inputs, batches[0].labels).sum().backward(), args.device)
    return Run(name, lambda b: compiled(b.inputs, b.labels), [x.item() for x in losses], len(graphs), speed, memory)


def touched(loss: Callable[[Batch], Tensor], texts: list[Tensor], args: argparse.Namespace, restart: bool) -> list[int]:
    """The documents in which the loss of any token changes when document 1 holds another text."""
    other = [texts[0], (texts[1] + 50) % 100, *texts[2:]]
    before, after = (loss(pack(x, restart)).detach()[0] for x in (texts, other))
    parts = (before != after).split([len(text) for text in texts])
    return [number for number, part in enumerate(parts) if part.any()]


def counted(name: str, graphs: set[Any]) -> Callable[..., Any]:
    """The compiler backend of that name, noting every graph that it is given."""
    compiler = torch._dynamo.lookup_backend(name)

    def compile_graph(module: Any, example_inputs: Any) -> Any:
        # torch may trace once more to treat some Python floats as constants; the id stays the same.
        graphs.add(torch._guards.CompileContext.current_compile_id())
        return compiler(module, example_inputs)

    return compile_graph


def peak_memory(run: Callable[[], Any], device: str) -> int:
    """Bytes that a warm call needs at most, beyond what lives before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    now = peak = 0
    for _, size in changes:
        now += size
        peak = max(peak, now)
    return peak


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_table(rows: list[list[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
