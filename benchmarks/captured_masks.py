"""What a captured model of transformers gains from the masks of eager: `python benchmarks/captured_masks.py`.

A few layers of Llama at the width of a 1B model, bf16, one row without padding, at 512 to 8192 tokens: eager; captured,
where transformers keeps a mask and SDPA its kernel for masks; and captured within `eager_mask_decisions`, where SDPA
gets `is_causal=True`. Each output is compared with eager before it is timed. Prints a Markdown table; `--out` also
writes it, with a CSV. `--smoke` runs the eager route alone at a tiny size, on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from measure import Row, rows
from report import markdown, write_csv
from run import versions
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from varlen_prep.graphs import GraphedVarlen, eager_mask_decisions

LENGTHS = {"cuda": [512, 1024, 2048, 4096, 8192], "cpu": [16]}
SIZES = {
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    "cpu": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
}
LAYERS = 4


def benchmark(device: str) -> Iterator[Row]:
    config = LlamaConfig(
        **SIZES[device],
        num_hidden_layers=LAYERS,
        vocab_size=32000,
        max_position_embeddings=max(LENGTHS[device]),
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaModel(config).to(torch.bfloat16).eval()

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        return model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state

    for length in LENGTHS[device]:
        ids = torch.randint(config.vocab_size, (1, length), device=device)
        positions = torch.arange(length, device=device)[None]
        with torch.no_grad():
            calls, errors = _routes(forward, ids, positions)
            case = f"{LAYERS} layers, hidden {config.hidden_size}, {length} tokens"
            yield from rows("captured masks", case, calls, device, errors=errors, syncs=True)


def _routes(
    forward: Callable[[Tensor, Tensor], Tensor], ids: Tensor, positions: Tensor
) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """The routes, and the largest distance of each to eager, relative to eager's largest value."""
    calls: dict[str, Callable[[], object]] = {"eager": lambda: forward(ids, positions)}
    expected, errors = forward(ids, positions), {}
    if ids.is_cuda:
        masked = GraphedVarlen(forward, ids, positions)
        with eager_mask_decisions(positions):
            flash = GraphedVarlen(forward, ids, positions)
        calls |= {"captured, mask of transformers": masked.replay, "captured, varlen_prep": flash.replay}
        for name, graphed in (("captured, mask of transformers", masked), ("captured, varlen_prep", flash)):
            errors[name] = ((graphed.replay() - expected).abs().max() / expected.abs().max()).item()
            if errors[name] > 0.05:
                raise AssertionError(f"{name}: differs from eager by {errors[name]:.3f}")
    return calls, errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for captured_masks.md and captured_masks.csv")
    parser.add_argument("--smoke", action="store_true", help="is the script alive? On the CPU, without captures")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; --smoke runs without one")
    begin, device = time.perf_counter(), "cpu" if args.smoke else "cuda"
    if args.smoke:
        torch.set_num_threads(1)  # the tensors are small
    found = list(benchmark(device))
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    text = f"# captured masks\n\n{name}; {versions()}\n\n{markdown(found)}"
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "captured_masks.md").write_text(text)
        write_csv(args.out / "captured_masks.csv", found)
    print(f"{len(found)} rows in {time.perf_counter() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
