"""Writes what a benchmark found: CSV with every number, Markdown tables, and PNG plots."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from measure import Row

FIELDS = [field.name for field in dataclasses.fields(Row)]
COLUMNS = {
    "median_us": ("median", "{:.0f}"),
    "spread": ("10-90 %", "{}"),
    "gpu_us": ("on the GPU", "{:.0f}"),
    "kernels": ("kernels", "{}"),
    "syncs": ("syncs", "{}"),
    "megabytes": ("MB", "{:.1f}"),
    "error": ("error", "{:.4f}"),
    "first_s": ("first calls, s", "{:.1f}"),
    "graphs": ("graphs", "{}"),
    "breaks": ("breaks", "{}"),
    "note": ("", "{}"),
}


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def read_csv(path: Path) -> list[Row]:
    """The rows of `write_csv`, numbers as numbers."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Row)}

    def value(name: str, text: str) -> object:
        if kinds[name] == "str":
            return text
        return None if text == "" else int(text) if kinds[name].startswith("int") else float(text)

    with path.open(newline="") as file:
        return [Row(**{name: value(name, text) for name, text in line.items()}) for line in csv.DictReader(file)]


def markdown(rows: Sequence[Row]) -> str:
    """A table for each case, routes as rows, microseconds; columns in which nothing was measured are left out."""
    parts = []
    for (group, case), found in _by_case(rows):
        parts.append(f"### {group}: {case}\n\n{_table(found)}\n")
    return "\n".join(parts)


def _by_case(rows: Sequence[Row]) -> Iterable[tuple[tuple[str, str], list[Row]]]:
    ordered = sorted(rows, key=lambda row: (row.group, row.case))
    return [(key, list(found)) for key, found in itertools.groupby(ordered, lambda row: (row.group, row.case))]


def _table(rows: Sequence[Row]) -> str:
    cells = [[row.route, *(_cell(row, name) for name in COLUMNS)] for row in rows]
    titles = ["route", *(title for title, _ in COLUMNS.values())]
    kept = [0, *(i for i in range(1, len(titles)) if any(line[i] for line in cells))]
    lines = [[line[i] for i in kept] for line in [titles, ["---"] * len(titles), *cells]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(row: Row, name: str) -> str:
    if name == "spread":
        return "" if row.low_us is None else f"{row.low_us:.0f}-{row.high_us:.0f}"
    value = getattr(row, name)
    return "" if value is None else COLUMNS[name][1].format(value)


def plot(folder: Path, group: str, rows: Sequence[Row]) -> list[Path]:
    """One bar chart for each case, fastest first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for (_, case), found in _by_case([row for row in rows if row.group == group and row.median_us is not None]):
        found = sorted(found, key=lambda row: row.median_us or 0, reverse=True)
        figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.28 * len(found)), layout="constrained")
        ours = ["#0072b2" if _is_ours(row.route) else "#bbbbbb" for row in found]
        bars = axes.barh([row.route for row in found], [row.median_us for row in found], color=ours)
        axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
        axes.set(xlabel="microseconds, median")
        figure.suptitle(f"{group}: {case}", fontsize=9, x=0.01, ha="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
        name = "".join(c if c.isalnum() else "-" for c in f"{group} {case}".lower())
        written.append(folder / f"{'-'.join(filter(None, name.split('-')))}.png")
        figure.savefig(written[-1], dpi=100, metadata={"Software": None})
        pyplot.close(figure)
    return written


def _is_ours(route: str) -> bool:
    return "varlen_prep" in route or (": " in route and "bare" not in route)
