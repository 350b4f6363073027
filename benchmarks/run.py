"""Runs the whole suite on the GPU that it finds and writes CSV, Markdown and plots.

    python benchmarks/run.py                                     # everything
    python benchmarks/run.py --only preparation attention        # some parts
    python benchmarks/run.py --device cpu --out somewhere        # tiny sizes: are the scripts alive?

Times are medians of interleaved runs in microseconds, measured with CUDA events around several calls in a row: of
attention and models with the host ahead of the GPU, as it is in the middle of a model; of preparations, small calls and
the rest with the host's part where that is longer. "On the GPU" is the time in kernels alone. Clocks are left as they
are. Each result is checked against the oracle before it is timed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import sys
import time
from importlib import metadata
from pathlib import Path

import bars
import torch
from report import markdown, plot, write_csv

PARTS = ("attention", "models", "motion", "llm", "captured_masks", "preparation", "packing")
PACKAGES = (
    "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "sageattention", "nvidia-cudnn-frontend", "diffusers",
    "transformers",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, help="folder; default: benchmarks/results/<date>-<gpu>-torch<version>")
    parser.add_argument("--no-plots", action="store_true")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)  # the tensors are small
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    label = f"{datetime.date.today()}-{gpu.lower().replace(' ', '-')}-torch{torch.__version__.split('+')[0]}"
    folder = args.out or Path(__file__).parent / "results" / label
    folder.mkdir(parents=True, exist_ok=True)
    machine = f"{gpu}; {versions()}"
    for part in args.only:
        begin, rows = time.perf_counter(), []
        for row in importlib.import_module(part).benchmark(args.device):
            rows.append(row)
            value = "-" if row.median_us is None else f"{row.median_us:9.0f} us"
            print(f"{part}  {row.case:45.45}  {row.route:45.45} {value}  {row.note[:60]}", flush=True)
            write_csv(folder / f"{part}.csv", rows)
            (folder / f"{part}.md").write_text(f"# {part}\n\n{machine}\n\n{markdown(rows)}")
        if not args.no_plots:
            for group in dict.fromkeys(row.group for row in rows):
                plot(folder, group, rows)
        print(f"{part}: {len(rows)} rows in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    table = bars.markdown(list(bars.bars(bars.read_all(folder))))
    (folder / "bars.md").write_text(f"# Bars\n\n{machine}\n\n{table}")
    print(f"written to {folder}", file=sys.stderr)


def versions() -> str:
    found = [f"Python {sys.version.split()[0]}", f"torch {torch.__version__}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


if __name__ == "__main__":
    main()
