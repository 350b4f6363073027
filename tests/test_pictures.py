"""Pictures of metadata: the text against plain loops, the pattern against `materialize`, labels that never overlap."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import MASK_KINDS, ONE_RUN, make_mask, refuses, run_python
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from varlen_prep import VarlenMetadata, prepare_varlen
from varlen_prep.pictures import text
from varlen_prep.pictures.rows import on_host

LARGE = torch.arange(4608) < torch.randint(1, 4609, (70, 1), generator=torch.Generator().manual_seed(0))
METADATA = {
    "uniform": lambda: prepare_varlen(2, 3, 4),
    "packed": lambda: prepare_varlen(3, 4, 8, make_mask("holes", 3, 8)),
    "in_place": lambda: prepare_varlen(3, 4, 8, make_mask("left", 3, 8), layout="in_place"),
    "in_place, both": lambda: prepare_varlen(
        3, 4, 8, make_mask("left", 3, 8), mask_q=make_mask("right", 3, 4), layout="in_place"
    ),
    "in_place, empty rows": lambda: prepare_varlen(3, 4, 8, make_mask("some_empty", 3, 8), layout="in_place"),
    "all empty": lambda: prepare_varlen(2, 4, 8, make_mask("all_empty", 2, 8)),
    "lengths": lambda: VarlenMetadata.from_lengths([3, 0, 2], [4, 1, 3]),
    "documents": lambda: VarlenMetadata.from_document_ids(
        torch.tensor([[0, 0, -1, 1, 1], [2, -1, 3, 3, 3]]), capacity=6
    ),
    "one row of documents": lambda: VarlenMetadata.from_document_ids(torch.tensor([0, 0, 1, 1, 1, -1])),
    "no rows": lambda: prepare_varlen(2, 3, 0),
    "no batch": lambda: prepare_varlen(0, 3, 4),
    "no sequences": lambda: VarlenMetadata.from_lengths([]),
}
LARGE_METADATA = {
    "mask": lambda: prepare_varlen(70, 300, 4608, LARGE),
    "in_place": lambda: prepare_varlen(70, 300, 4608, LARGE, mask_q=LARGE[:, :300], layout="in_place"),
    "lengths": lambda: VarlenMetadata.from_lengths(LARGE.sum(1).tolist() * 2),
    "documents": lambda: VarlenMetadata.from_document_ids(torch.arange(2**17).view(2, -1) // 700, capacity=512),
}


@pytest.fixture
def pyplot() -> Iterator[Any]:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def bars(picture: str, name: str) -> list[str]:
    """The bars of the lines of that name, in the order of the text."""
    lines = [line.split() for line in picture.splitlines() if line.startswith(f"  {name} ")]
    return [words[2] if len(words) == 4 else "" for words in lines]


@pytest.mark.parametrize("layout", ["packed", "in_place"])
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_text_shows_every_row_of_a_mask(kind: str, layout: Any) -> None:
    if layout == "in_place" and kind not in ONE_RUN:
        pytest.skip("a mask with holes has no in_place layout")
    mask = make_mask(kind, 3, 8, seed=3)
    picture = str(prepare_varlen(3, 4, 8, mask, layout=layout))
    keys = [
        "".join(letter if taken else "." for taken in row) for letter, row in zip("ABC", mask.tolist(), strict=True)
    ]
    assert bars(picture, "row") == ["AAAA", "BBBB", "CCCC", *keys]
    assert f"keys: {int(mask.sum())} of 24 rows take part" in picture
    if layout == "packed":
        moved = "".join(keys).replace(".", "")
        assert f"  kernel     {moved:.<24}\n" in picture


def test_text_shows_documents_and_padding() -> None:
    picture = str(METADATA["documents"]())
    assert bars(picture, "row") == ["AA.BB", "C.DDD"]
    assert "\nqueries and keys: 8 of 10 rows take part\n" in picture
    assert "  kernel     AABBCDDD..\n  offsets    0 2 4 5 8 8 8\n  sequences  6, of 0 to 3 rows\n" in picture


def test_text_shows_each_side_of_lengths() -> None:
    picture = str(METADATA["lengths"]())
    lines = [
        "  seq 0      AAA  3",
        "  seq 1        0",
        "  seq 2      CC  2",
        "  kernel     AAACC",
        "  offsets    0 3 3 5",
    ]
    assert "\n".join(lines) in picture
    assert bars(picture, "seq")[3:] == ["AAAA", "B", "CCC"]


def test_text_says_whether_a_maximum_is_exact() -> None:
    mask = make_mask("right", 3, 8, seed=3)
    longest = int(mask.sum(1).max())
    exact, bound = (str(prepare_varlen(3, 4, 8, mask, max_seqlen_k=given)) for given in (None, 8))
    assert f"max_seqlen {longest}, exact" in exact
    assert "max_seqlen 8, an upper bound" in bound


def readable(picture: str) -> bool:
    lines = picture.splitlines()
    return picture.isascii() and max(map(len, lines)) <= 80 and len(lines) <= 36


@pytest.mark.parametrize("name", LARGE_METADATA)
def test_text_of_a_large_batch_is_readable(name: str) -> None:
    picture = str(LARGE_METADATA[name]())
    assert readable(picture)
    assert "A character is" in picture


def test_the_check_finds_lines_that_are_too_wide_and_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = LARGE_METADATA["mask"]()
    monkeypatch.setattr(text, "BAR", 70)
    assert not readable(str(meta))
    monkeypatch.undo()
    monkeypatch.setattr(text, "LINES", 60)
    assert not readable(str(meta))


def test_elided_rows_are_counted() -> None:
    picture = str(LARGE_METADATA["mask"]())
    shown = len(bars(picture, "row")) // 2
    assert picture.count(f"  ... {70 - shown} more ...\n") == 2


def test_a_row_that_takes_part_never_looks_like_padding() -> None:
    mask = torch.zeros(1, 10_000, dtype=torch.bool)
    mask[0, [0, 5000]] = True
    (keys,) = bars(str(prepare_varlen(1, 0, 10_000, mask)), "row")[1:]
    assert (keys[0], keys.count("A"), keys.strip("A.")) == ("A", 2, "")


def test_several_documents_in_one_character_are_marked() -> None:
    ids = torch.arange(560).view(1, -1) // 25
    (row,) = bars(str(VarlenMetadata.from_document_ids(ids)), "row")
    # Ten rows a character: 25 of A, so the third character holds A and B.
    assert row.startswith("AA+BBCC+DD")


@pytest.mark.parametrize("name", METADATA)
def test_repr_is_that_of_the_dataclass(name: str) -> None:
    meta = METADATA[name]()
    assert repr(meta).startswith("VarlenMetadata(cu_seqlens_q=tensor([")
    assert f"{meta}" == str(meta) != repr(meta)


def test_text_of_fake_tensors_says_that_nothing_can_be_read() -> None:
    with FakeTensorMode():
        fake = str(prepare_varlen(2, 3, 4, make_mask("right", 2, 4), max_seqlen_k=4))
    assert "max_seqlen 4, an upper bound\n(the values are not known: the offsets are a FakeTensor on cpu)" in fake
    assert "(the values are not known: the offsets are a Tensor on meta)" in str(prepare_varlen(2, 3, 4, device="meta"))


def test_text_can_be_made_while_tracing(fresh_compiler: None) -> None:
    def told(x: Tensor, mask: Tensor) -> tuple[Tensor, str]:
        meta = prepare_varlen(2, 3, 4, mask, max_seqlen_k=4)
        return x + meta.cu_seqlens_k.sum(), str(meta)

    compiled = torch.compile(told, fullgraph=True, dynamic=True, backend="eager")
    out, picture = compiled(torch.zeros(1), make_mask("full", 2, 4))
    assert out.item() == 12
    assert picture.endswith("(the values are not known while tracing)")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*METADATA, *LARGE_METADATA])
def test_text_of_a_gpu_is_that_of_the_cpu(name: str) -> None:
    meta = {**METADATA, **LARGE_METADATA}[name]()
    assert str(meta.to("cuda")) == str(meta).replace("on cpu", "on cuda:0")


def syncs(call: Any) -> int:
    """How often the host waits for the device, as CUDA's sync debug mode counts."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            torch.cuda.set_sync_debug_mode("warn")
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(one.message) for one in caught)


@pytest.mark.gpu
def test_text_reads_a_gpu_once() -> None:
    meta = METADATA["packed"]().to("cuda")
    assert syncs(lambda: str(meta)) == 1
    assert syncs(lambda: (meta.cu_seqlens_q.cpu(), meta.order_k.cpu())) == 2
    for name in ("cu_seqlens_q", "cu_seqlens_k", "order_k", "inverse_k"):
        assert getattr(on_host(meta), name).equal(getattr(meta, name).cpu())


@pytest.mark.gpu
def test_text_inside_a_capture_says_that_nothing_can_be_read() -> None:
    meta = METADATA["packed"]().to("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        picture = str(meta)
        meta.cu_seqlens_k + 1
    assert picture.endswith("(the values cannot be read while a CUDA graph is captured)")


def pattern(meta: VarlenMetadata, order: str, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """bool (R_q, R_k): what `materialize` says, all rows of the batch one after the other, in either order."""
    seen = meta.materialize(causal=causal, window_size=window_size)
    if seen.ndim == 3:
        seen = torch.block_diag(*seen.int()).bool() if seen.shape[0] > 0 else seen.new_zeros(0, 0)
        # block_diag takes a block of no columns for one of a row.
        batch, seq_q, seq_kv = meta.batch or 0, meta.seq_q or 0, meta.seq_kv or 0
        seen = seen.view(batch * seq_q, batch * seq_kv)
    if order == "kernel":
        seen = seen if meta.order_q is None else seen[meta.order_q]
        seen = seen if meta.order_k is None else seen[:, meta.order_k]
    return seen


@pytest.mark.parametrize("options", [(False, (-1, -1)), (True, (-1, -1)), (False, (1, 0))], ids=str)
@pytest.mark.parametrize("order", ["padded", "kernel"])
@pytest.mark.parametrize("name", METADATA)
def test_the_pattern_is_that_of_materialize(name: str, order: str, options: tuple[bool, tuple[int, int]]) -> None:
    from varlen_prep.pictures.look import GREY, rgb
    from varlen_prep.pictures.pattern import pattern_image
    from varlen_prep.pictures.rows import rows_of

    meta = METADATA[name]()
    image = pattern_image(meta, order, *options)
    rows = rows_of(meta, "q")
    labels = rows.padded if order == "padded" else rows.kernel
    grey = rgb(torch.tensor(-1))
    assert grey.mul(255).round().tolist() == [int(GREY[i : i + 2], 16) for i in (1, 3, 5)]
    full = (image == rgb(labels)[:, None]).all(-1) & (image != grey).any(-1)
    assert full.equal(pattern(meta, order, *options))


def overlaps(figure: Any) -> list[tuple[str, str]]:
    """Pairs of texts of a figure that lie on each other."""
    from matplotlib.text import Text

    figure.canvas.draw()
    texts = [one for one in figure.findobj(Text) if one.get_visible() and one.get_text().strip()]
    boxes = [(one.get_text(), one.get_window_extent()) for one in texts]
    return [(a, b) for (a, box), (b, other) in itertools.combinations(boxes, 2) if box.overlaps(other)]


@pytest.mark.parametrize("name", [*METADATA, *(f"large {name}" for name in LARGE_METADATA)])
def test_no_labels_of_a_figure_overlap(name: str, pyplot: Any) -> None:
    make = METADATA.get(name) or LARGE_METADATA[name.removeprefix("large ")]
    figure = make().plot(causal=True)
    assert overlaps(figure) == []
    (legend,) = [box for part in (figure, *figure.subfigs) for box in part.legends]
    assert not any(legend.get_window_extent().overlaps(axes.get_window_extent()) for axes in figure.axes)


def test_the_check_finds_labels_that_overlap(pyplot: Any) -> None:
    figure = METADATA["packed"]().plot()
    axes = figure.axes[0]
    axes.set_xticks([0, 0.1], ["first", "second"])
    assert ("first", "second") in overlaps(figure)


def legend_of(figure: Any) -> list[str]:
    (legend,) = [box for part in (figure, *figure.subfigs) for box in part.legends]
    return [one.get_text() for one in legend.get_texts()]


def test_a_figure_shows_rows_and_pattern_in_both_orders(pyplot: Any) -> None:
    figure = METADATA["packed"]().plot()
    titles = [axes.get_title(loc="left") or axes.get_title() for axes in figure.axes]
    assert titles[2:] == ["Padded order", "Kernel order"]
    assert titles[0] == "Queries: 12 of 12 rows take part, max_seqlen 4 (exact)"
    assert titles[1].startswith("Keys: ")
    assert legend_of(figure) == ["attends (a colour is a sequence)", "takes no part", "another sequence"]


def test_the_legend_names_what_a_rule_hides(pyplot: Any) -> None:
    meta = METADATA["packed"]()
    assert "hidden by causal or window" in legend_of(meta.plot(causal=True))
    assert "hidden by causal or window" in legend_of(meta.plot(window_size=(1, -1)))


def test_packed_rows_have_one_order(pyplot: Any) -> None:
    assert [axes.get_title() for axes in METADATA["lengths"]().plot().axes][2:] == ["Kernel order"]


def test_axes_of_the_caller_get_the_pattern_alone(pyplot: Any) -> None:
    figure, (left, right) = pyplot.subplots(1, 2)
    assert METADATA["packed"]().plot(right) is figure
    assert (len(left.images), len(right.images), figure.axes) == (0, 1, [left, right])
    assert right.get_legend() is not None


def test_a_figure_without_values_is_refused(pyplot: Any) -> None:
    with refuses(ValueError, "plot", "the values are not known", "Tensor on meta"):
        prepare_varlen(2, 3, 4, device="meta").plot()


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with refuses(ImportError, "plot", "matplotlib", "pip install"):
        METADATA["uniform"]().plot()


def test_text_imports_no_matplotlib() -> None:
    pytest.importorskip("matplotlib")
    code = (
        "import sys, varlen_prep; meta = varlen_prep.prepare_varlen(2, 3, 4)\n"
        "str(meta); print('matplotlib' in sys.modules)\n"
        "import varlen_prep.pictures.figure; print('matplotlib' in sys.modules)\n"
        "meta.plot(); print('matplotlib' in sys.modules)"
    )
    assert run_python(code).stdout.split() == ["False", "False", "True"]
