"""`meta.plot()`: rows above, attention pattern below, legend outside of both."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from ..metadata import VarlenMetadata
from .look import GREY, INK, SMALL, STYLE, WHITE, pale, rgb
from .pattern import draw_pattern, pattern_ratio
from .rows import on_host, same_sides, unknown
from .strips import draw_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot(meta: VarlenMetadata, ax: Axes | None, causal: bool, window_size: tuple[int, int]) -> Figure:
    """See `VarlenMetadata.plot`."""
    pyplot = load_pyplot()
    if reason := unknown(meta):
        raise ValueError(f"plot: {reason}; draw metadata of real tensors, outside of compiled or captured code.")
    meta = on_host(meta)
    orders = ["kernel"] if meta.batch is None else ["padded", "kernel"]
    hides = causal or tuple(window_size) != (-1, -1)
    with pyplot.rc_context(STYLE):
        if ax is not None:
            draw_pattern(ax, meta, orders[0], causal, window_size)
            add_legend(ax, hides, loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4.5)
            root = ax.get_figure(root=True)
            assert root is not None
            return root
        sides = ["q"] if same_sides(meta) else ["q", "k"]
        heights = [len(sides) * (1.0 if meta.batch is None else 1.5), 0.9 + 4 * pattern_ratio(meta)]
        figure = pyplot.figure(figsize=(9, sum(heights)), layout="constrained")
        upper, lower = figure.subfigures(2, 1, height_ratios=heights)
        for axes, side in zip(upper.subplots(len(sides), 1, squeeze=False)[:, 0], sides, strict=True):
            draw_rows(axes, meta, side)
        for axes, order in zip(lower.subplots(1, len(orders), squeeze=False)[0], orders, strict=True):
            draw_pattern(axes, meta, order, causal, window_size)
        add_legend(lower, hides, loc="outside lower center", ncols=4)
        return figure


def load_pyplot() -> Any:
    """matplotlib.pyplot, or an error that says how to install it."""
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError(f"plot: matplotlib cannot be imported ({error}): pip install matplotlib") from error


def add_legend(where: Any, hides: bool, **place: Any) -> None:
    """What the colours of a pattern mean, on axes or a figure; `hides`: a causal or window rule was drawn."""
    patches = importlib.import_module("matplotlib.patches")
    full = rgb(torch.tensor(0, device="cpu"))
    kinds = [
        (full.tolist(), "attends (a colour is a sequence)"),
        *([(pale(full).tolist(), "hidden by causal or window")] if hides else []),
        (GREY, "takes no part"),
        (WHITE, "another sequence"),
    ]
    handles = [patches.Patch(facecolor=face, edgecolor=INK, linewidth=0.6, label=label) for face, label in kinds]
    where.legend(handles=handles, frameon=False, fontsize=SMALL, **place)
