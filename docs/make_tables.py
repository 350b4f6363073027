"""Rewrites the README's table of kernels from the capability records.

    python docs/make_tables.py

A kernel from the Hub shares the row of its package, whose record it has but for where it comes from.
"""

from __future__ import annotations

import re
from pathlib import Path

from varlen_prep.backends import REGISTRY, Backend

README = Path(__file__).parent.parent / "README.md"
COLUMNS = ("name", "kernel", "runs on", "gradients", "log-sum-exp", "windows", "softcap")
TABLE = re.compile(r"^\| name \| .*\n(?:\|.*\n)+", re.MULTILINE)
HUB = "_hub"


def kernels() -> str:
    """The table as Markdown: a row for each record, with that of its Hub twin."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    rows += [_row(backend) for backend in REGISTRY.values() if not backend.name.endswith(HUB)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def renewed(page: str) -> str:
    """A page with the table as it should be."""
    if len(TABLE.findall(page)) != 1:
        raise ValueError("expected one table that begins with '| name |'.")
    return TABLE.sub(lambda _: kernels(), page)


def _row(backend: Backend) -> tuple[str, ...]:
    names = [backend.name, *([backend.name + HUB] if backend.name + HUB in REGISTRY else [])]
    places = [
        f"{device.replace('cpu', 'CPU').replace('cuda', 'CUDA')} {_dtypes(backend, device)}"
        for device in backend.dtypes
    ]
    has = (backend.backward is not None, backend.lse, backend.window, backend.softcap)
    return (
        ", ".join(f"`{name}`" for name in names),
        backend.summary,
        "; ".join(places),
        *("yes" if one else "no" for one in has),
    )


def _dtypes(backend: Backend, device: str) -> str:
    short = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
    return ", ".join(short[str(dtype).removeprefix("torch.")] for dtype in backend.dtypes[device])


if __name__ == "__main__":
    README.write_text(renewed(README.read_text()))
