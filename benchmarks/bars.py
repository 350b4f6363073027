"""The bars that the library is held to, from the rows of a folder of results: `python benchmarks/bars.py FOLDER`.

Each is a ratio of medians of one run, or a count; what was not measured is listed as such.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from measure import Row
from report import read_csv

Rows = list[Row]


@dataclasses.dataclass(frozen=True)
class Bar:
    """A claim, its limit, and what was found; None: not measured."""

    claim: str
    limit: str
    found: float | None
    met: bool | None


def bars(rows: Rows) -> Iterator[Bar]:
    yield from _attention(rows)
    yield from _preparation(rows)
    yield from _moves(rows)
    yield from _models(rows)


def markdown(found: list[Bar]) -> str:
    lines = ["| bar | limit | found | met |", "|---|---|---|---|"]
    words = {True: "yes", False: "**no**", None: "not measured"}
    for bar in found:
        value = "" if bar.found is None else f"{bar.found:.4g}" if abs(bar.found) < 1000 else f"{bar.found:.0f}"
        lines.append(f"| {bar.claim} | {bar.limit} | {value} | {words[bar.met]} |")
    return "\n".join(lines) + "\n"


def _most(claim: str, limit: float, found: float | None) -> Bar:
    return Bar(claim, f"at most {limit:g}", found, None if found is None else found <= limit)


def _least(claim: str, limit: float, found: float | None) -> Bar:
    return Bar(claim, f"at least {limit:g}", found, None if found is None else found >= limit)


def _times(rows: Rows, group: str, case: str) -> dict[str, float]:
    """Route -> median, of the case that begins so."""
    return _medians([row for row in rows if row.group == group and row.case.startswith(case)])


def _medians(rows: Rows) -> dict[str, float]:
    return {row.route: row.median_us for row in rows if row.median_us is not None}


def _ratio(times: dict[str, float], one: Callable[[str], bool], other: Callable[[str], bool]) -> float | None:
    """The fastest of the routes that the first chooses over the fastest of the second."""
    ours, theirs = ([time for name, time in times.items() if chosen(name)] for chosen in (one, other))
    return min(ours) / min(theirs) if ours and theirs else None


def _is(name: str) -> Callable[[str], bool]:
    return lambda route: route == name


def _attention(rows: Rows) -> Iterator[Bar]:
    flux = "Flux B4 S4608, "
    for kernel in ("native", "flash3"):
        bare = _is(f"{kernel}: bare kernel, ideal rows")
        full = _times(rows, "forward", f"{flux}no mask")
        name = f"{kernel} over the bare kernel"
        yield _most(f"{name}, no mask, compiled", 1.02, _ratio(full, _is(f"{kernel}: uniform, compiled"), bare))
        yield _most(f"{name}, no mask, eager", 1.05, _ratio(full, _is(f"{kernel}: uniform"), bare))
        for lengths, limit in (("4608/4400/4250/4180", 1.06), ("4608/1000/300/77", 1.05)):
            masked = _times(rows, "forward", flux + lengths)
            layouts = tuple(f"{kernel}: {layout}" for layout in ("packed", "in_place"))
            best = _ratio(masked, lambda route, layouts=layouts: route.startswith(layouts), bare)
            yield _most(f"{name}, key lengths {lengths}, best layout", limit, best)
        holes = _ratio(_times(rows, "forward", f"{flux}holes"), _is(f"{kernel}: packed, compiled"), bare)
        yield _most(f"{name}, holes, packed, compiled", 1.1, holes)
    syncs = [row.syncs for row in rows if row.case == f"{flux}no mask" and row.route.endswith(": uniform")]
    yield _most("syncs without a mask", 0, max((n for n in syncs if n is not None), default=None))
    for lengths, limit in (("4608/4400/4250/4180", 0.6), ("4608/1000/300/77", 0.25)):
        masked = _times(rows, "forward", flux + lengths)
        best = _ratio(masked, lambda route: ": packed" in route or ": in_place" in route, _is("SDPA, mask"))
        yield _most(f"best kernel over SDPA with a mask, key lengths {lengths}", limit, best)
    small = _times(rows, "forward", "small B4 S128, no mask")
    for kernel in ("native", "flash3"):
        names = f"{kernel}: uniform", f"{kernel}: bare kernel, ideal rows"
        extra = small[names[0]] - small[names[1]] if all(name in small for name in names) else None
        yield _most(f"{kernel}, B4 S128, eager: microseconds more than the bare kernel", 15, extra)


def _preparation(rows: Rows) -> Iterator[Bar]:
    case = [row for row in rows if row.group == "preparation" and row.case.startswith("B64 S4096")]
    compiled = [row for row in case if row.route == "varlen_prep, packed, compiled"]
    for name, limit in (("kernels", 3), ("syncs", 0), ("gpu_us", 20)):
        values = [getattr(row, name) for row in compiled if getattr(row, name) is not None]
        yield _most(f"preparation with a bound, compiled, B64 S4096: {name}", limit, max(values, default=None))
    ratios = []
    for title in dict.fromkeys(row.case for row in rows if row.group == "preparation" and "mask" in row.case):
        times = _times(rows, "preparation", title)
        ratios.append(_ratio(times, _is("varlen_prep, packed"), _is("diffusers, with the rows to pack")))
    measured = [ratio for ratio in ratios if ratio is not None]
    typical = statistics.median(measured) if measured else None
    claim = "preparation with a bound, eager, over diffusers, which finds the rows to pack too: median of all shapes"
    yield _most(claim, 0.5, typical)


def _moves(rows: Rows) -> Iterator[Bar]:
    """Gigabytes per second stand in the notes, for the rows that are moved."""
    for case in dict.fromkeys(row.case for row in rows if row.group == "packing"):
        rates = {row.route: float(row.note.split()[0]) for row in rows if row.case == case and row.note}
        share = rates["varlen_prep pack"] / rates["copy of all rows"]
        yield _least(f"pack, {case}: share of the rate of a copy", 0.7, share)


def _models(rows: Rows) -> Iterator[Bar]:
    for family in ("Flux", "Qwen-Image"):
        chosen = [row for row in rows if row.group == "models" and row.case.startswith(family)]
        times = _medians([row for row in chosen if row.case.endswith("compiled")])
        best = min((route for route in times if route.startswith("varlen_prep")), key=times.__getitem__, default="")
        name = best.removeprefix("varlen_prep, ") or "best kernel"
        mine, masked, hub = _is(best), "diffusers SDPA, mask", "diffusers _flash_3_varlen_hub"
        beside_hub = _medians([row for row in chosen if row.case.endswith("beside the hub route")])
        for theirs, found in ((masked, times), (hub, beside_hub)):
            yield _least(f"{family}, compiled, {name}: speed over {theirs}", 1.08, _ratio(found, _is(theirs), mine))
        limit = _ratio(times, mine, _is(f"limit: no attention + bare {name}"))
        yield _most(f"{family}, compiled, {name}: over no attention + the bare kernel", 1.03, limit)
        first = {row.route: row.first_s for row in chosen if row.first_s is not None}
        compiling = _ratio(first, mine, _is(hub))
        yield _most(f"{family}, {name}: time to compile over that of {hub}", 1 / 3, compiling)
    graphs = [row.graphs for row in rows if row.group == "motion" and row.route.startswith("varlen_prep")]
    yield _most("graphs for 50 shapes", 1, max((n for n in graphs if n is not None), default=None))


def read_all(folder: Path) -> Rows:
    return [row for path in sorted(folder.glob("*.csv")) for row in read_csv(path)]


if __name__ == "__main__":
    print(markdown(list(bars(read_all(Path(sys.argv[1]))))), end="")
