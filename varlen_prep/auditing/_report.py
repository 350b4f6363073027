"""What an audit found: small records, and the report that prints, asserts, and turns into JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A line of code."""

    file: str
    """Empty where no line is known."""
    line: int
    function: str
    source: str
    """The text of the line; empty where the file cannot be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphBreak:
    """The compiler gave up here and left the line to Python."""

    reason: str
    place: Place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recompile:
    """Something was compiled again."""

    guard: str
    """The condition of the earlier graph that the new inputs do not meet."""
    place: Place
    """The line that asked for the guard, else the function that was compiled again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostRead:
    """A line at which the host needs a value that the device computes, so that it waits for the device."""

    operation: str
    """What reads: "item" (also an `if`, `int` or `bool` on a tensor, and `tolist`), "nonzero", "bool index", ..."""
    place: Place
    caller: Place | None
    """The outermost line of the audited code that leads there, if that is another one."""
    seen: tuple[str, ...]
    """Where: "graph", a node of a traced graph; "cuda", the host waited for the GPU, eager or compiled; "eager", code
    outside of graphs read a CPU tensor, which waits for nothing here but would on a GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capture:
    """Capture in a CUDA graph, of the function as it is (not compiled)."""

    error: str | None
    """Why it was not captured; None: it was."""
    changed: str | None = None
    """Which inputs were rewritten in place before the replays."""
    difference: float | None = None
    """Largest difference between a replay and eager, relative to the largest value of eager."""
    limit: float = 0.0
    """The square root of the dtype's eps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What `audit` saw. `print` it, assert it (`assert_clean`), or take it as a dictionary (`to_dict`)."""

    name: str
    device: str
    torch: str
    """Version of torch."""
    input_sets: int
    backward: bool
    graphs: int
    """Graphs that were compiled, all input sets and recompiles together."""
    breaks: tuple[GraphBreak, ...]
    """One for each line and reason."""
    recompiles: tuple[Recompile, ...]
    reads: tuple[HostRead, ...]
    """One for each line."""
    compile_error: str | None
    """Compiling raised this; None: it did not."""
    difference: float | None
    """Largest difference between compiled and eager outputs, relative to the largest value; None: not compiled."""
    gradient_difference: float | None
    """The same of the gradients."""
    limit: float
    """The square root of the eps of the least exact dtype among the results."""
    leaked: tuple[str, ...]
    """Shape and dtype of each tensor that one more eager call leaves behind."""
    peak_memory: int | None
    """Bytes that eager calls hold at most, above their inputs; None: a profiler was running already."""
    capture: Capture | None
    """None: not tried."""

    @property
    def syncs(self) -> tuple[HostRead, ...]:
        """The reads that count: in graphs and on the GPU; with graph breaks also those of code outside of graphs.

        Eager code may read a CPU tensor at no cost, and take another path on a GPU or when it is compiled.
        """
        if self.breaks or self.compile_error:
            return self.reads
        return tuple(read for read in self.reads if set(read.seen) & {"graph", "cuda"})

    def problems(self, *, max_graphs: int = 1, max_syncs: int = 0) -> list[str]:
        """Every reason why this is not clean, one line each; empty: it is clean. Arguments: see `assert_clean`."""
        found = []
        if self.compile_error:
            found.append(f"it does not compile: {self.compile_error}")
        if self.graphs > max_graphs:
            found.append(f"{self.graphs} graphs, at most {max_graphs} allowed")
        if self.graphs > max_graphs:
            found += [
                f"recompiled for {short(one.place)}, where this did not hold: {one.guard}" for one in self.recompiles
            ]
        if max_graphs <= 1:
            found += [f"graph break at {short(one.place)}: {one.reason}" for one in self.breaks]
        if len(self.syncs) > max_syncs:
            places = ", ".join(f"{one.operation} at {short(one.place)}" for one in self.syncs)
            found.append(f"{len(self.syncs)} host reads, at most {max_syncs} allowed: {places}")
        pairs = (("outputs", self.difference), ("gradients", self.gradient_difference))
        for what, value in pairs:
            if value is not None and not value <= self.limit:
                found.append(f"compiled {what} differ from eager by {value:.1e} of their size")
        if self.leaked:
            found.append(f"each call leaves {len(self.leaked)} tensors behind: {', '.join(self.leaked)}")
        if self.capture is not None and self.capture.error is not None:
            found.append(f"no CUDA graph: {self.capture.error}")
        elif self.capture is not None and not (self.capture.difference or 0) <= self.capture.limit:
            found.append(
                f"a CUDA graph replays stale values: it differs from eager by {self.capture.difference:.1e} of its "
                f"size after {self.capture.changed} were rewritten in place"
            )
        return found

    def assert_clean(self, max_graphs: int = 1, max_syncs: int = 0) -> None:
        """Fails unless everything is as a compiled, sync-free, capturable function should be.

        Args:
            max_graphs: graphs over all input sets; more than 1 also allows graph breaks.
            max_syncs: lines that may read the device (`syncs`).

        Raises:
            AssertionError: with every problem, and the whole report.
        """
        problems = self.problems(max_graphs=max_graphs, max_syncs=max_syncs)
        if problems:
            raise AssertionError("\n".join([*(f"- {problem}" for problem in problems), "", str(self)]))

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers, for `json.dumps`; a difference without size is "inf"."""
        found = _plain(dataclasses.asdict(self))
        return {**found, "syncs": len(self.syncs), "problems": self.problems()}

    def __str__(self) -> str:
        from ._text import render

        return render(self)


def short(place: Place) -> str:
    """A place in one word."""
    return f"{place.file.rpartition('/')[2]}:{place.line}" if place.file else "an unknown line"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
