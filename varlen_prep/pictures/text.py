"""`str(meta)`: the rows of a metadata as text of at most 80 columns, in ASCII, whatever the size of the batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..metadata import VarlenMetadata
from .rows import LETTERS, PADDING, Rows, letter, on_host, rows_of, same_sides, unknown

COLUMNS = 80
BAR = 56
"""Characters of a bar; longer rows are scaled down."""
LINES = 8
"""Bars of one side; those in the middle are left out and counted."""
_INDENT = 13


def text(meta: VarlenMetadata) -> str:
    """The picture; where the values cannot be read (tracing, fake tensors, capture), what is known without them."""
    shape = "packed rows" if meta.batch is None else f"batch {meta.batch}, seq_q {meta.seq_q}, seq_kv {meta.seq_kv}"
    head = f"VarlenMetadata: {shape}, layout {meta.layout}, on {meta.cu_seqlens_q.device}"
    sides = [("q", "queries and keys")] if same_sides(meta) else [("q", "queries"), ("k", "keys")]
    if reason := unknown(meta):
        known = [line for side, name in sides for line in (name, *_host_values(meta, side))]
        return "\n".join([head, *known, f"({reason})"])
    meta = on_host(meta)
    drawn = [(side, name, rows_of(meta, side)) for side, name in sides]
    # One scale for both sides, so that their bars can be compared.
    scale = max(_per_character(_longest_bar(rows)) for _, _, rows in drawn)
    kernel_scale = max((_per_character(rows.kernel.shape[0]) for _, _, rows in drawn if rows.moved), default=scale)
    lines = [head]
    for side, name, rows in drawn:
        lines += ["", f"{name}: {int(rows.lengths.sum())} of {rows.kernel.shape[0]} rows take part"]
        lines += [*_bars(rows, scale), *_kernel(rows, kernel_scale), *_host_values(meta, side, rows)]
    return "\n".join([*lines, *_legend(scale, kernel_scale, rows.lengths.shape[0])])


def _line(name: str, value: str) -> str:
    return f"  {name:<{_INDENT - 2}}{value}".rstrip()


def _host_values(meta: VarlenMetadata, side: str, rows: Rows | None = None) -> list[str]:
    one = meta.side(side)
    sequences = str(one.cu_seqlens.shape[0] - 1)
    if rows is not None and rows.lengths.shape[0] > 0:
        gaps = f" ({sequences} with the gaps)" if meta.layout == "in_place" else ""
        sequences = f"{rows.lengths.shape[0]}{gaps}, of {int(rows.lengths.min())} to {int(rows.lengths.max())} rows"
    maximum = f"{one.max_seqlen}, {'exact' if one.exact else 'an upper bound'}"
    return [_line("sequences", sequences), _line("max_seqlen", maximum)]


def _longest_bar(rows: Rows) -> int:
    return rows.shape[1] if rows.shape else int(rows.lengths.max()) if rows.lengths.shape[0] else 0


def _per_character(longest: int) -> int:
    return max(math.ceil(longest / BAR), 1)


def _bars(rows: Rows, scale: int) -> list[str]:
    """A bar for each row of the batch, or for each sequence of packed rows, with the number of rows that take part."""
    name, count = ("row", rows.shape[0]) if rows.shape else ("seq", rows.lengths.shape[0])
    hidden = max(count - LINES, 0)
    padded = rows.padded.view(rows.shape) if rows.shape else None
    lines = []
    for index in [*range(count - hidden - 1), *range(max(count - 1, 0), count)]:
        labels = torch.full((int(rows.lengths[index]),), index, device="cpu") if padded is None else padded[index]
        lines.append(_line(f"{name} {index}", f"{_bar(labels, scale)}  {int((labels != PADDING).sum())}"))
    if hidden:
        lines.insert(-1, f"  ... {hidden} more ...")
    return lines


def _bar(labels: Tensor, scale: int) -> str:
    """One character for `scale` rows; it is padding only where none of them takes part."""
    if labels.shape[0] == 0:
        return ""
    return "".join(_character(cell[cell != PADDING]) for cell in labels.split(scale))


def _character(labels: Tensor) -> str:
    if labels.shape[0] == 0:
        return letter(PADDING)
    first = int(labels[0])
    return letter(first) if bool((labels == first).all()) else "+"


def _kernel(rows: Rows, scale: int) -> list[str]:
    bar = _bar(rows.kernel, scale) if rows.moved else "the same rows, none is moved"
    room, last = COLUMNS - _INDENT, str(int(rows.offsets[-1]))
    offsets = " ".join(map(str, rows.offsets[:room].tolist()))
    if len(offsets) > room or rows.offsets.shape[0] > room:
        offsets = f"{offsets[: room - len(last) - 5].rsplit(' ', 1)[0]} ... {last}"
    return [_line("kernel", bar), _line("offsets", offsets)]


def _legend(scale: int, kernel_scale: int, sequences: int) -> list[str]:
    again = f" (after {LETTERS[-1]} comes {LETTERS[0]} again)" if sequences > len(LETTERS) else ""
    lines = ["", f"A letter is a sequence{again}, '.' takes no part."]
    if scale > 1 or kernel_scale > 1:
        of_kernel = f", in kernel lines {kernel_scale}" if kernel_scale != scale else ""
        lines.append(f"A character is {scale} row{'s' * (scale > 1)}{of_kernel}; '+' holds several sequences.")
    return lines
