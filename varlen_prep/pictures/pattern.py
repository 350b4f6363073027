"""The attention pattern as a picture, in the padded order or in the order that the kernel sees.

R_q, R_k rows of both sides, all rows of the batch one after the other.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import dense
from ..metadata import VarlenMetadata
from .look import INK, SMALL, pale, rgb, spaced, tick_width
from .rows import PADDING, Rows, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 600
"""Rows of a pattern that are drawn; of more, every second, third, ... is."""
FLATTEST = 0.4


def draw_pattern(ax: Axes, meta: VarlenMetadata, order: str, causal: bool, window_size: tuple[int, int]) -> None:
    """Which query (down) sees which key (across), of a metadata on the host, in the "padded" or "kernel" order."""
    q, k = rows_of(meta, "q"), rows_of(meta, "k")
    height, width = (max(rows.kernel.shape[0], 1) for rows in (q, k))
    step = math.ceil(max(height, width) / LARGEST)
    image = pattern_image(meta, order, causal, window_size, step)
    if image.numel() > 0:
        ax.imshow(image.numpy(), extent=(0, width, height, 0), interpolation="nearest")
    # Square cells, unless that would be a narrow strip.
    ax.set_aspect("equal" if FLATTEST <= height / width <= 1 / FLATTEST else "auto")
    ax.set(xlim=(0, width), ylim=(height, 0), xlabel="keys", ylabel="queries")
    ax.set_title(f"{order.capitalize()} order" + (f" (1 of {step} rows)" if step > 1 else ""))
    edges_q, edges_k = _edges(q, order), _edges(k, order)
    ax.set_yticks(spaced(edges_q, 0.05 * height / pattern_ratio(meta)))
    ax.set_xticks(spaced(edges_k, 0.024 * width * tick_width(width)))
    ax.tick_params(labelsize=SMALL)
    if len(edges_q) <= 20:
        ax.hlines(edges_q, 0, width, color=INK, linewidth=0.6, alpha=0.5)
    if len(edges_k) <= 20:
        ax.vlines(edges_k, 0, height, color=INK, linewidth=0.6, alpha=0.5)


def pattern_ratio(meta: VarlenMetadata) -> float:
    """Height to width of a pattern, at most 1."""
    queries, keys = (max(rows_of(meta, side).kernel.shape[0], 1) for side in ("q", "k"))
    return min(max(queries / keys, FLATTEST), 1.0)


def pattern_image(
    meta: VarlenMetadata, order: str, causal: bool, window_size: tuple[int, int], step: int = 1
) -> Tensor:
    """float (R_q, R_k, 3) of every `step`-th row: full colour where a query sees a key, pale where a rule hides it."""
    q, k = rows_of(meta, "q"), rows_of(meta, "k")
    index_q, index_k = _index(q, order, step), _index(k, order, step)
    lengths = q.offsets.diff(), k.offsets.diff()
    at_q, at_k = dense.coordinates(q.offsets, index_q), dense.coordinates(k.offsets, index_k)
    seen = dense.allowed(at_q, at_k, lengths, causal, window_size)
    label_q, label_k = q.kernel[index_q][:, None], k.kernel[index_k][None, :]
    full = rgb(label_q.expand(seen.shape))
    image = torch.where((label_q == label_k)[..., None], pale(full), torch.ones_like(full))
    image = torch.where(seen[..., None], full, image)
    padding = (label_q == PADDING) | (label_k == PADDING)
    return torch.where(padding[..., None], rgb(torch.full_like(label_q, PADDING)), image)


def _index(rows: Rows, order: str, step: int) -> Tensor:
    """The kernel's numbers of the rows that are drawn."""
    index = rows.place if order == "padded" else torch.arange(rows.kernel.shape[0], device="cpu")
    return index[::step].contiguous()


def _edges(rows: Rows, order: str) -> list[int]:
    """Where rows of the batch meet, or the offsets."""
    if order == "kernel" or rows.shape is None:
        edges: list[int] = rows.offsets.unique().tolist()
        return edges
    batch, seq = rows.shape
    return [row * seq for row in range(batch + 1)] if seq > 0 else [0]
