"""The rows of one side as two strips: the padded order above, the order that the kernel sees below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..metadata import VarlenMetadata
from .look import INK, SMALL, WHITE, colour, letter_colour, rgb, spaced, tick_width
from .rows import Rows, letter, rows_of, same_sides

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT, GAP = 0.8, 0.8


def draw_rows(ax: Axes, meta: VarlenMetadata, side: str, title: str | None = None) -> None:
    """Draws side "q" or "k" of a metadata on the host; bands show where runs of rows go, ticks are the offsets."""
    rows = rows_of(meta, side)
    total = max(rows.kernel.shape[0], 1)
    upper = HEIGHT + GAP
    ax.set(xlim=(0, total), ylim=(-0.15, (upper if rows.shape else 0) + HEIGHT + 0.1), yticks=[])
    ax.spines[:].set_visible(False)
    if rows.shape:
        _strip(ax, rows.padded, upper, "padded")
        _row_names(ax, *rows.shape, upper)
        for begin, end, place, label in _runs(rows):
            corners = [(begin, upper), (end, upper), (place + end - begin, HEIGHT), (place, HEIGHT)]
            ax.fill(*zip(*corners, strict=True), color=colour(label), alpha=0.3, linewidth=0)
    _strip(ax, rows.kernel, 0, "kernel")
    _offset_ticks(ax, rows.offsets, total)
    ax.set_title(title or _title(meta, side, rows), loc="left", pad=16 if rows.shape else 6)


def _title(meta: VarlenMetadata, side: str, rows: Rows) -> str:
    name = "Queries and keys" if same_sides(meta) else "Queries" if side == "q" else "Keys"
    one = meta.side(side)
    maximum = f"max_seqlen {one.max_seqlen} ({'exact' if one.exact else 'upper bound'})"
    return f"{name}: {int(rows.lengths.sum())} of {rows.kernel.shape[0]} rows take part, {maximum}"


def _strip(ax: Axes, labels: Tensor, bottom: float, name: str) -> None:
    """One cell for each row, with the letter of its sequence where there is room."""
    count, middle = labels.shape[0], bottom + HEIGHT / 2
    ax.text(-0.012, middle, name, transform=ax.get_yaxis_transform(), ha="right", va="center")
    if count == 0:
        ax.text(0.02, middle, "no rows", va="center", fontsize=SMALL)
        return
    ax.imshow(rgb(labels)[None].numpy(), extent=(0, count, bottom, bottom + HEIGHT), aspect="auto")
    cells = count <= 80
    if cells:
        ax.vlines(range(1, count), bottom, bottom + HEIGHT, color=WHITE, linewidth=0.8)
    for begin, end in _pieces(labels.diff() != 0):
        label = int(labels[begin])
        if label >= 0 and end - begin >= count / 45:
            ax.text(
                (begin + end - 1) // 2 + 0.5 if cells else (begin + end) / 2,
                middle,
                letter(label),
                color=letter_colour(label),
                bbox={"facecolor": colour(label), "edgecolor": "none", "pad": 1.5},
                ha="center",
                va="center_baseline",
                fontsize=SMALL,
                fontweight="bold",
            )


def _row_names(ax: Axes, batch: int, seq: int, bottom: float) -> None:
    top = bottom + HEIGHT
    for row in range(batch if seq > 0 else 0):
        if row > 0:
            ax.vlines(row * seq, bottom - 0.1, top + 0.1, color=INK, linewidth=1.2)
        if batch <= 12:
            ax.text((row + 0.5) * seq, top + 0.1, f"row {row}", ha="center", va="bottom", fontsize=SMALL)


def _runs(rows: Rows) -> list[tuple[int, int, int, int]]:
    """(first padded row, end, first kernel row, label) of all that moves in one piece."""
    labels = rows.padded
    if labels.shape[0] == 0:
        return []
    pieces = _pieces((labels.diff() != 0) | (rows.place.diff() != 1))
    return [(begin, end, int(rows.place[begin]), int(labels[begin])) for begin, end in pieces if labels[begin] >= 0]


def _pieces(breaks: Tensor) -> list[tuple[int, int]]:
    """(begin, end) of the pieces of a strip of R >= 1 cells; bool (R - 1,), True between two pieces."""
    starts = [0, *breaks.nonzero().flatten().add(1).tolist()]
    return list(zip(starts, [*starts[1:], breaks.shape[0] + 1], strict=True))


def _offset_ticks(ax: Axes, offsets: Tensor, total: int) -> None:
    values = offsets.unique().tolist()
    ax.set_xticks(spaced(values, total * tick_width(total) / 100))
    ax.tick_params(axis="x", labelsize=SMALL)
    ax.annotate(
        "offsets",
        (-0.012, 0),
        xytext=(0, -7),  # as far below the axes as tick labels are
        xycoords="axes fraction",
        textcoords="offset points",
        annotation_clip=False,
        ha="right",
        va="top",
        fontsize=SMALL,
    )
    if len(values) <= 40:
        ax.vlines(values, -0.1, HEIGHT + 0.1, color=INK, linewidth=1.2)
