"""The report as text of at most 80 columns."""

from __future__ import annotations

import textwrap
from pathlib import Path

from ._report import AuditReport, Place

_WIDTH = 80


def render(report: AuditReport) -> str:
    """The whole report: a summary, then each finding with its line."""
    problems = report.problems()
    title = f"Audit of {report.name}: {'not clean' if problems else 'clean'}"
    sets = f"{report.input_sets} input set{'s' if report.input_sets > 1 else ''}"
    where = f"torch {report.torch}, {report.device}, {sets}{', with gradients' * report.backward}"
    lines = [*_wrap(title), *_wrap(where), ""]
    for name, value in _summary(report):
        lines += _wrap(f"{name:<20}{value}", first="  ", rest=" " * 22)
    for heading, findings in _findings(report):
        if findings:
            lines += ["", heading]
        for place, text in findings:
            lines += [*_place(place), *_wrap(text, first="    ")]
    return "\n".join(lines)


def _summary(report: AuditReport) -> list[tuple[str, str]]:
    elsewhere = len(report.reads) - len(report.syncs)
    reads = str(len(report.syncs))
    if elsewhere:
        reads += f", and {elsewhere} of CPU tensors in eager code only"
    rows = [("graphs", str(report.graphs)), ("graph breaks", str(len(report.breaks)))]
    rows += [("recompiles", str(len(report.recompiles))), ("host reads", reads)]
    if report.compile_error:
        rows.append(("does not compile", report.compile_error))
    if report.difference is not None:
        rows.append(("compiled - eager", f"{report.difference:.2g} of the largest output"))
    if report.gradient_difference is not None:
        rows.append(("", f"{report.gradient_difference:.2g} of the largest gradient"))
    leaked = f"{len(report.leaked)} left behind by each call: {', '.join(report.leaked)}" if report.leaked else "0"
    rows.append(("leaked tensors", leaked))
    rows.append(("peak memory", "not measured" if report.peak_memory is None else _bytes(report.peak_memory)))
    return [*rows, ("CUDA graph", _capture(report))]


def _capture(report: AuditReport) -> str:
    capture = report.capture
    if capture is None:
        return "not tried"
    if capture.error is not None:
        return f"not captured: {capture.error}"
    if capture.difference is None:
        return "captured; no input could be changed for a replay"
    stale = "" if capture.difference <= capture.limit else "STALE, "
    return f"captured; replay - eager: {stale}{capture.difference:.2g}, after {capture.changed} were rewritten"


def _findings(report: AuditReport) -> list[tuple[str, list[tuple[Place, str]]]]:
    reads = []
    for read in report.reads:
        caller = f", called from {_file(read.caller)}:{read.caller.line}" if read.caller else ""
        reads.append((read.place, f"-> {read.operation} (seen: {', '.join(read.seen)}){caller}"))
    return [
        ("Graph breaks", [(one.place, f"-> {one.reason}") for one in report.breaks]),
        ("Recompiles", [(one.place, f"-> this no longer held: {one.guard}") for one in report.recompiles]),
        ("Host reads", reads),
    ]


def _place(place: Place) -> list[str]:
    if not place.file:
        return ["  a line that is not known (autograd engine or generated code)"]
    where = f"{_file(place)}:{place.line}" + (f" in {place.function}" if place.function else "")
    source = textwrap.shorten(place.source, _WIDTH - 4, placeholder=" ...")
    return [*_wrap(where, first="  ", rest="    "), *([f"    {source}"] if source else [])]


def _file(place: Place) -> str:
    """The last parts of a path, enough to tell files apart."""
    return "/".join(Path(place.file).parts[-3:]).lstrip("/")


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit} above the inputs" if unit == "B" else f"{count:.1f} {unit} above the inputs"
        count /= 1024
    return f"{count:.1f} GiB above the inputs"


def _wrap(text: str, first: str = "", rest: str | None = None) -> list[str]:
    indent = first + "   " if rest is None else rest
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
