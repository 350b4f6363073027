"""Runs the code blocks of `gallery.md`, renews the text that they print, and saves their figures.

    python docs/make_gallery.py

A `python` block may be followed by a `text` block, which gets what it printed, and by a picture, which gets its
`figure`. Blocks share their names, as in a notebook. The picture of the README's layouts is made here too.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot
from PIL import Image

from varlen_prep import prepare_varlen
from varlen_prep.pictures.look import STYLE
from varlen_prep.pictures.strips import draw_rows

DOCS = Path(__file__).parent
BLOCK = re.compile(
    r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<text>.*?)```\n)?(?:\n!\[.*?\]\((?P<picture>.*?)\)\n)?", re.DOTALL
)


def make(target: Path) -> None:
    """Writes `gallery.md` and `pictures/` below the folder `target`."""
    (target / "pictures").mkdir(parents=True, exist_ok=True)
    names: dict[str, Any] = {}
    page = BLOCK.sub(lambda block: _renewed(block, names, target), (DOCS / "gallery.md").read_text())
    (target / "gallery.md").write_text(page)
    _save(layouts(), target / "pictures" / "layouts.png")


def _renewed(block: re.Match[str], names: dict[str, Any], target: Path) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block["code"], names)
    if block["picture"]:
        _save(names["figure"], target / block["picture"])
    if block["text"] is None:
        return block[0]
    begin, end = (at - block.start() for at in block.span("text"))
    return block[0][:begin] + printed.getvalue() + block[0][end:]


def layouts() -> Any:
    """The same keys in both layouts, as the README shows them."""
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool()
    packed = prepare_varlen(3, 6, 6, mask, max_seqlen_k=6)
    in_place = prepare_varlen(3, 6, 6, mask, layout="in_place")
    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(9, 3.4), layout="constrained")
        above, below = figure.subplots(2, 1)
        draw_rows(above, packed, "k", 'layout="packed": rows that take part move to the front')
        draw_rows(below, in_place, "k", 'layout="in_place": no row moves, padding becomes sequences of its own')
    return figure


def _save(figure: Any, path: Path) -> None:
    """A small PNG that depends on nothing but the figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110)
    pyplot.close(figure)
    Image.open(buffer).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
