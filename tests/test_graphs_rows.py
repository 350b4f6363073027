"""`RowGraphs`: which rows are replayed and which run eagerly, that both give what the row alone gives, and refusals.

The host side is tested without a GPU: graphs are functions that run again, captures are only claimed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import assert_bit_equal, refuses
from torch import Tensor, nn

pytest.importorskip("transformers")

from graphs_helpers import (
    ARCHITECTURES,
    VOCABULARY,
    WINDOW,
    Attention,
    StandInGraph,
    captures_can_be_claimed,
    logits_of,
    recorded_sdpa,
    row,
    tiny,
    without_gpu,
)
from transformers import PretrainedConfig, PreTrainedModel

from varlen_prep.graphs import RowGraphs, RowStats, _rows

CONTEXT = 24


class Causal(nn.Module):
    """Every token sees those before it, and its position; positions past the table raise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, 4), nn.Embedding(CONTEXT, 4)
        self.double()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return (self.tokens(input_ids) * self.places(position_ids)).cumsum(1)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    without_gpu(monkeypatch, _rows)
    with captures_can_be_claimed():
        yield


def make(buckets: Any = (4, 8, 16), model: nn.Module | None = None, **options: Any) -> tuple[RowGraphs, nn.Module]:
    model = Causal() if model is None else model
    return RowGraphs(model, model, buckets, **{"progress": None, **options}), model


def assert_like_eager(rows: RowGraphs, model: nn.Module, ids: Tensor, start: int = 0) -> None:
    positions = torch.arange(start, start + ids.shape[1])[None]
    with torch.no_grad():
        torch.testing.assert_close(rows(ids, start), model(ids, positions))
        torch.testing.assert_close(rows(ids, positions), model(ids, positions))


# Replays


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("buckets", [(4, 8, 16), [16, 8, 4, 8], (16,), range(1, 17)])
def test_every_length_is_replayed_in_the_smallest_bucket_that_fits(buckets: Any) -> None:
    rows, model = make(buckets)
    sizes = sorted(set(buckets))
    assert rows.stats.buckets == tuple(sizes)
    for length in range(1, 17):
        rows.stats.replays.clear()
        assert_like_eager(rows, model, row(length), start=length % 3)
        assert rows.stats.replays == {min(size for size in sizes if size >= length): 2}
    assert not rows.stats.eager


@pytest.mark.usefixtures("on_cpu")
def test_a_model_that_is_not_causal_would_differ() -> None:
    """The comparison above can fail."""
    model = Causal()
    rows = RowGraphs(lambda ids, positions: model(ids, positions).flip(1).cumsum(1).flip(1), model, [8], progress=None)
    with torch.no_grad():
        padded, alone = rows(row(5)), model(row(5), torch.arange(5)[None]).flip(1).cumsum(1).flip(1)
    assert not torch.allclose(padded, alone)


@pytest.mark.usefixtures("on_cpu")
def test_nothing_of_an_earlier_row_is_left_in_the_static_inputs() -> None:
    rows, _ = make([8], pad_id=7)
    with torch.no_grad():
        rows(row(8), 3)
        rows(row(3), 2)
    bucket = rows._buckets[8]
    assert bucket.input_ids.tolist() == [[*row(3)[0].tolist(), 7, 7, 7, 7, 7]]
    assert bucket.position_ids.tolist() == [list(range(2, 10))]


@pytest.mark.usefixtures("on_cpu")
def test_results_are_copies() -> None:
    rows, _ = make([8])
    with torch.no_grad():
        first = rows(row(5))
        kept = first.clone()
        second = rows(row(5, seed=1))
    assert_bit_equal(first, kept)
    assert not torch.equal(first, second)
    assert first.shape == (1, 5, 4)
    assert first.untyped_storage().nbytes() == 5 * 4 * 8  # the padding is not kept alive


@pytest.mark.usefixtures("on_cpu")
def test_padding_never_gets_past_the_context_window() -> None:
    rows, model = make([8], context_window=CONTEXT)
    for start in range(CONTEXT - 8, CONTEXT - 2):
        assert_like_eager(rows, model, row(3), start=start)
    assert rows.stats.replays == {8: 12}
    unbounded, _ = make([8])
    with torch.no_grad(), pytest.raises(IndexError):
        unbounded(row(3), CONTEXT - 3)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("made_in", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("used_in", [torch.inference_mode, torch.no_grad])
def test_graphs_made_in_one_mode_are_used_in_another(made_in: Any, used_in: Any) -> None:
    with made_in():
        rows, model = make()
    with used_in():
        assert_like_eager(rows, model, row(6))
    assert rows.stats.replays == {8: 2}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_both_integer_types_are_taken(dtype: torch.dtype) -> None:
    rows, model = make()
    with torch.no_grad():
        expected = model(row(5), torch.arange(5)[None])
        assert_bit_equal(rows(row(5).to(dtype), torch.arange(5, dtype=dtype)[None]), expected)
        assert_bit_equal(
            rows(row(5).to(dtype), torch.zeros(1, 5, dtype=dtype)), model(row(5), torch.zeros(1, 5).long())
        )


# Eager calls, and why


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("reason", "length", "positions"), [
    (_rows.TOO_LONG, 17, 0),
    (_rows.NOT_RISING, 6, torch.tensor([[0, 1, 2, 0, 1, 2]])),
    (_rows.NOT_RISING, 2, torch.tensor([[1, 1]])),
    (_rows.PAST_WINDOW, 4, CONTEXT - 3),
    (_rows.PAST_WINDOW, 1, torch.tensor([[CONTEXT]])),
    (_rows.TOO_LONG, 20, torch.zeros(1, 20, dtype=torch.int64)),  # the first of several reasons counts
])  # fmt: skip
def test_a_row_that_no_graph_holds_runs_as_it_is(reason: str, length: int, positions: Tensor | int) -> None:
    seen: list[Tensor] = []

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        seen.append(positions)
        return ids * 100 + positions

    rows = RowGraphs(forward, nn.Linear(1, 1), (4, 8, 16), context_window=CONTEXT, progress=None)
    ids = row(length)
    with torch.no_grad():
        out = rows(ids, positions)
    given = positions if isinstance(positions, Tensor) else torch.arange(positions, positions + length)[None]
    assert_bit_equal(out, ids * 100 + given)
    assert_bit_equal(seen[-1], given)
    assert rows.stats.eager == {reason: 1}
    assert not rows.stats.replays


@pytest.mark.usefixtures("on_cpu")
def test_gradients_run_eagerly_and_flow() -> None:
    rows, model = make()
    out = rows(row(5))
    (gradient,) = torch.autograd.grad(out.sum(), model.tokens.weight)
    expected = torch.autograd.grad(model(row(5), torch.arange(5)[None]).sum(), model.tokens.weight)
    assert_bit_equal(gradient, expected[0])
    assert rows.stats.eager == {_rows.GRADIENTS: 1}
    with torch.no_grad():
        assert not rows(row(5)).requires_grad


@pytest.mark.usefixtures("on_cpu")
def test_autocast_around_the_call_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = make()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    with torch.no_grad():
        rows(row(5))
    assert rows.stats.eager == {_rows.AUTOCAST: 1}


class Blocking(StandInGraph):
    """Waits in the middle of a replay until it is told to go on."""

    def __init__(self, function: Callable[[], Any], output: Any) -> None:
        super().__init__(function, output)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def replay(self) -> None:
        self.inside.set()
        assert self.go_on.wait(30)
        super().replay()


@pytest.mark.usefixtures("on_cpu")
def test_a_second_thread_runs_eagerly_while_a_row_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphs_helpers.StandInGraph", Blocking)
    rows, model = make([8])
    graph = rows._buckets[8].captured.graph

    def call(seed: int) -> Tensor:
        with torch.no_grad():
            return rows(row(6, seed=seed))

    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(call, 1)
        assert graph.inside.wait(30)
        second = call(2)
        assert rows.stats.eager == {_rows.IN_FLIGHT: 1}
        graph.go_on.set()
        for seed, out in ((1, first.result(30)), (2, second), (3, call(3))):
            torch.testing.assert_close(out, model(row(6, seed=seed), torch.arange(6)[None]), check_layout=False)
    assert rows.stats.replays == {8: 2}


@pytest.mark.usefixtures("on_cpu")
def test_many_threads_get_their_own_rows_and_every_row_is_counted() -> None:
    rows, model = make()

    def call(seed: int) -> bool:
        length = 1 + seed % 16
        with torch.no_grad():
            expected = model(row(length, seed=seed), torch.arange(length)[None])
            return torch.allclose(rows(row(length, seed=seed)), expected)

    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(call, range(400)))
    assert rows.stats.replays.total() + rows.stats.eager.total() == 400
    assert set(rows.stats.eager) <= {_rows.IN_FLIGHT}


@pytest.mark.usefixtures("on_cpu")
def test_a_replay_that_fails_does_not_block_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, model = make([8])
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(StandInGraph, "replay", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rows(row(5))
    assert_like_eager(rows, model, row(5))
    assert not rows.stats.eager


# Captures


@pytest.mark.usefixtures("on_cpu")
def test_the_largest_bucket_is_captured_first_with_progress_and_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    sizes, lines = [], []

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        sizes.append(ids.shape[1])
        return ids

    rows = RowGraphs(forward, nn.Linear(1, 1), [4, 16, 8], progress=lines.append)
    assert sizes == [16, 8, 4]
    assert [line.rsplit(", ", 1)[0] for line in lines] == [
        f"row graphs: captured {number} of 3, {size} tokens" for number, size in ((1, 16), (2, 8), (3, 4))
    ]
    assert rows.stats == RowStats(buckets=(4, 8, 16), capture_seconds=rows.stats.capture_seconds)
    assert rows.stats.capture_seconds > 0
    assert capsys.readouterr() == ("", "")
    RowGraphs(forward, nn.Linear(1, 1), [4])
    assert capsys.readouterr().err.startswith("row graphs: captured 1 of 1, 4 tokens, ")


class Wrapped(nn.Module):
    """A user's own class around a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return logits_of(self.inner)(input_ids, position_ids)


def kinds(calls: list[Attention]) -> list[tuple[bool, bool]]:
    return [call.kind[:2] for call in calls]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_of_transformers_is_captured_with_the_masks_of_eager(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Wrapped(tiny(architecture))
    with recorded_sdpa() as calls:
        rows, _ = make([2 * WINDOW], model)
    with torch.no_grad(), recorded_sdpa() as eager:
        expected = model(row(2 * WINDOW), torch.arange(2 * WINDOW)[None])
    assert kinds(calls) == kinds(eager)
    with torch.no_grad():
        torch.testing.assert_close(rows(row(2 * WINDOW)), expected)
    monkeypatch.setattr(_rows, "_of_transformers", lambda model: False)
    with recorded_sdpa() as calls:
        make([2 * WINDOW], model)
    assert kinds(calls) == [(True, False)] * len(eager)


class Remote(PreTrainedModel):
    """Code that came with a checkpoint: no module of transformers inside, its masks all the same."""

    config_class = PretrainedConfig

    def __init__(self) -> None:
        super().__init__(PretrainedConfig())


def test_models_of_transformers_are_known_by_their_classes() -> None:
    assert _rows._of_transformers(Remote())
    assert not _rows._of_transformers(Causal())


@pytest.mark.usefixtures("on_cpu")
def test_other_models_are_captured_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rows, "eager_mask_decisions", lambda: 1 / 0)
    make([4])


# Refusals


@pytest.mark.parametrize(("model", "found"), [
    (nn.Linear(2, 2), "cpu"),
    (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "cpu, meta"),
    (nn.ReLU(), "none at all"),
])  # fmt: skip
def test_models_that_are_not_on_one_gpu_are_refused(model: nn.Module, found: str) -> None:
    with refuses(ValueError, "model: expected all parameters and buffers on one CUDA device", f"got {found};", ".to("):
        RowGraphs(model, model, [4])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("buckets", [(), [0], [4, -1], [4.0], [True], ["4"]])
def test_buckets_that_are_no_lengths_are_refused(buckets: Any) -> None:
    with refuses(ValueError, "buckets: expected one or more ints", str(list(buckets))):
        make(buckets)


@pytest.mark.usefixtures("on_cpu")
def test_a_bucket_past_the_context_window_is_refused() -> None:
    make([CONTEXT], context_window=CONTEXT)
    with refuses(ValueError, "buckets: expected at most the context window of 24", "got 25"):
        make([4, CONTEXT + 1], context_window=CONTEXT)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("output", [None, (1, 2), torch.zeros(4), torch.zeros(1, 3), torch.zeros(2, 4)])
def test_a_forward_that_returns_no_rows_is_refused(output: Any) -> None:
    with refuses(TypeError, "forward: expected a tensor (1, 4, ...)", "return the logits"):
        RowGraphs(lambda ids, positions: output, nn.Linear(1, 1), [4], progress=None)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("error", "fragment", "ids", "positions"), [
    (TypeError, "input_ids: expected an int64 or int32 tensor, got list", [[1, 2]], 0),
    (TypeError, "input_ids: expected an int64 or int32 tensor, got torch.float32", torch.ones(1, 3), 0),
    (ValueError, "input_ids: expected one row (1, n)", torch.ones(2, 3, dtype=torch.int64), 0),
    (ValueError, "input_ids: expected one row (1, n)", torch.ones(3, dtype=torch.int64), 0),
    (ValueError, "input_ids: expected one row (1, n)", torch.ones(1, 0, dtype=torch.int64), 0),
    (ValueError, "position_ids: expected a first position of at least 0, got -1", row(3), -1),
    (TypeError, "position_ids: expected the first position (int) or a tensor, got float", row(3), 0.0),
    (TypeError, "position_ids: expected the first position (int) or a tensor, got bool", row(3), True),
    (ValueError, "position_ids: expected int64 or int32 (1, 3) like input_ids", row(3), torch.arange(3)),
    (ValueError, "position_ids: expected int64 or int32 (1, 3) like input_ids", row(3), torch.ones(1, 3)),
])  # fmt: skip
def test_calls_without_one_row_are_refused(error: Any, fragment: str, ids: Any, positions: Any) -> None:
    rows, _ = make()
    with torch.no_grad(), refuses(error, fragment):
        rows(ids, positions)
    assert rows.stats.eager.total() == rows.stats.replays.total() == 0
