"""The look that all figures share: a sequence has one colour and one letter everywhere, padding is grey."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .rows import PADDING

# Okabe and Ito's colours, which stay apart in colour-blind eyes; without the yellow, too pale on white.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
GREY, INK, WHITE = "#DDDDDD", "#333333", "#FFFFFF"
PALE = 0.25
"""How much of its colour is left of what the causal or window rule hides."""
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": WHITE,
    "axes.facecolor": WHITE,
}
SMALL = 9


def colour(label: int) -> str:
    """Of a sequence, or of padding."""
    return COLOURS[label % len(COLOURS)] if label >= 0 else GREY


def letter_colour(label: int) -> str:
    """Of a letter on the colour of its sequence: dark on the light ones."""
    red, green, blue = _parts(colour(label))
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else WHITE


def rgb(labels: Tensor) -> Tensor:
    """float (..., 3): the colour of each label."""
    palette = torch.tensor([_parts(one) for one in (*COLOURS, GREY)], device="cpu")
    return palette[torch.where(labels == PADDING, len(COLOURS), labels % len(COLOURS))]


def pale(colours: Tensor) -> Tensor:
    """Colours (..., 3) mixed with white."""
    return 1 - (1 - colours) * PALE


def tick_width(number: int) -> int:
    """Characters that the largest tick needs, with the space to the next."""
    return len(str(number)) + 1


def spaced(values: list[int], distance: float) -> list[int]:
    """Rising values without those that are too near to the one kept before, so that their ticks do not overlap."""
    kept: list[int] = []
    for value in values:
        if not kept or value - kept[-1] >= distance:
            kept.append(value)
    return kept


def _parts(hexadecimal: str) -> list[float]:
    return [int(hexadecimal[i : i + 2], 16) / 255 for i in (1, 3, 5)]
