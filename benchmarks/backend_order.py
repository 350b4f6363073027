"""Times every usable backend on shapes that decide the order of `backend=None`: `python benchmarks/backend_order.py`.

Forward and forward + backward through `varlen_attention`, medians of CUDA-event times in microseconds over interleaved
runs; each result is checked against `native` before it is timed. Prints a Markdown table.
B rows, S padded length, H heads, D head size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from measure import RUNS, times

import varlen_prep
from varlen_prep import prepare_varlen, varlen_attention

SHAPES = {
    "B4 S4608 H24 D128, light padding": (4, 4608, 24, 128, [4608, 4400, 4250, 4180]),
    "B4 S4608 H24 D128, heavy padding": (4, 4608, 24, 128, [4608, 1000, 300, 77]),
    "B16 S512 H16 D64, half full": (16, 512, 16, 64, [512 - 32 * i for i in range(16)]),
    "B4 S128 H8 D64": (4, 128, 8, 64, [128, 100, 64, 7]),
}


def calls_for(
    shape: tuple[int, int, int, int, list[int]], layout: str, backward: bool
) -> dict[str, Callable[[], object]]:
    batch, seq, heads, dim, lengths = shape
    mask = torch.arange(seq, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    q, k, v, dout = (torch.randn(batch, seq, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_(backward)
    meta = prepare_varlen(batch, seq, seq, mask, max_seqlen_k=seq, layout=layout)
    calls, expected = {}, None
    for state in varlen_prep.backends():
        if not state.usable or state.name == "reference" or (backward and state.name.startswith("sage")):
            continue

        def call(name: str = state.name) -> object:
            out = varlen_attention(q, k, v, meta, backend=name)
            return torch.autograd.grad(out, (q, k, v), dout) if backward else out

        with torch.no_grad():
            out = varlen_attention(q, k, v, meta, backend=state.name)
        expected = out if expected is None else expected
        difference = (out.float() - expected.float()).abs().max().item()
        assert difference < 0.1, f"{state.name} differs from native by {difference}"
        calls[state.name] = call
    return calls


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, medians of {RUNS} in microseconds\n")
    rows = []
    for title, shape in SHAPES.items():
        for layout in ("packed", "in_place"):
            for backward in (False, True):
                found = times(calls_for(shape, layout, backward), "cuda")
                medians = {name: statistics.median(values) for name, values in found.items()}
                rows.append((f"{title}, {layout}, {'forward + backward' if backward else 'forward'}", medians))
    names = list(dict.fromkeys(name for _, medians in rows for name in medians))
    print("| case | " + " | ".join(names) + " |\n|" + " --- |" * (len(names) + 1))
    for title, medians in rows:
        print(f"| {title} | " + " | ".join(f"{medians[name]:.0f}" if name in medians else "-" for name in names) + " |")


if __name__ == "__main__":
    main()
