"""Real captures: `RowGraphs` and `GraphedVarlen` give what eager gives, whatever memory, streams and order they get.

B rows, S padded length, T packed rows, H heads, D head size.  Three kinds of faults are looked for, each beside a
planted one that the same look finds: stale offsets, rows that nobody wrote, and graphs of one pool in another order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import assert_bit_equal, assert_near, case, make_inputs, make_mask, run
from torch import Tensor, nn

pytest.importorskip("transformers")

from graphs_helpers import ARCHITECTURES, logits_of, poison, recorded_sdpa, row, tiny

from varlen_prep import VarlenMetadata, prepare_varlen, varlen_attention
from varlen_prep.graphs import GraphedVarlen, RowGraphs, _rows

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BUCKETS = (16, 32, 64)
ROWS = [(1, 0), (15, 0), (16, 3), (17, 0), (31, 40), (3, 0), (64, 0), (40, 7), (5, 0)]  # length, first position


def rows_of(model: nn.Module, buckets: Any = BUCKETS, **options: Any) -> RowGraphs:
    return RowGraphs(logits_of(model), model, buckets, **{"progress": None, **options})


def alone(model: nn.Module, length: int, start: int) -> Tensor:
    positions = torch.arange(start, start + length, device=DEVICE)[None]
    with torch.no_grad():
        return logits_of(model)(row(length, device=DEVICE), positions)


# Rows


@pytest.mark.parametrize("largest_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_replays_equal_eager_in_memory_full_of_nan(
    architecture: str, dtype: torch.dtype, largest_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not largest_first:
        monkeypatch.setattr(_rows, "_capture_order", sorted)
    model, exact = tiny(architecture, device=DEVICE, dtype=dtype), tiny(architecture, device=DEVICE)
    exact.load_state_dict(model.state_dict())  # in float32, the weights of the other dtype
    rows = rows_of(model)
    fill = poison(rows._pool)
    errors, eager_errors = [], []
    for length, start in ROWS:
        expected = alone(exact, length, start)
        fill.replay()
        with torch.no_grad():
            out = rows(row(length, device=DEVICE), start)
        assert out.shape == expected.shape
        assert out.isfinite().all()
        errors.append((out - expected).abs().max().item())
        eager_errors.append((alone(model, length, start) - expected).abs().max().item())
    assert rows.stats.replays == {16: 5, 32: 2, 64: 2}
    assert not rows.stats.eager
    # Kernels differ with the padded length, so the bits do; the distance to float32 does not.
    assert max(errors) <= max(3 * max(eager_errors), 1e-3)


def test_the_fill_reaches_memory_that_a_graph_does_not_write() -> None:
    """The test above would see it."""
    parameter = nn.Linear(4, 4, device=DEVICE)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        unwritten = torch.empty(1, ids.shape[1], 64, device=DEVICE)
        return unwritten + 0

    rows = RowGraphs(forward, parameter, BUCKETS, progress=None)
    poison(rows._pool).replay()
    with torch.no_grad():
        assert rows(row(16, device=DEVICE)).isnan().all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_captured_attention_gets_the_arguments_of_eager(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(architecture, device=DEVICE, dtype=torch.bfloat16)

    def kinds(call: Callable[[], Any]) -> list[Any]:
        with recorded_sdpa() as calls:
            call()
        return [one.kind for one in calls]

    for size in BUCKETS:
        eager = kinds(lambda size=size: alone(model, size, 0))
        assert any(not has_mask and is_causal for has_mask, is_causal, _ in eager)
        assert all(has_mask != is_causal for has_mask, is_causal, _ in eager)
        captured = kinds(lambda size=size: rows_of(model, [size]))
        assert captured[-len(eager) :] == eager
    monkeypatch.setattr(_rows, "_of_transformers", lambda model: False)
    assert all(has_mask for has_mask, _, _ in kinds(lambda: rows_of(model, [64]))[-len(eager) :])


def test_gradients_and_a_second_thread_run_eagerly() -> None:
    model = tiny("llama", device=DEVICE)
    rows = rows_of(model)
    assert rows(row(5, device=DEVICE)).requires_grad

    def call() -> Tensor:
        with torch.no_grad():
            return rows(row(5, device=DEVICE))

    with rows._pool.lock, ThreadPoolExecutor(1) as executor:
        out = executor.submit(call).result(60)
    assert_near(out, alone(model, 5, 0), torch.float32)
    assert rows.stats.eager == {_rows.GRADIENTS: 1, _rows.IN_FLIGHT: 1}
    assert not rows.stats.replays


def test_threads_with_streams_of_their_own_get_their_own_rows() -> None:
    model = tiny("llama", device=DEVICE)
    rows = rows_of(model)
    expected = [alone(model, *one) for one in ROWS]
    torch.cuda.synchronize()

    def work(offset: int) -> list[tuple[int, Tensor]]:
        outputs = []
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for step in range(60):
                number = (step + offset) % len(ROWS)
                outputs.append((number, rows(row(ROWS[number][0], device=DEVICE), ROWS[number][1])))
            torch.cuda.current_stream().synchronize()
        return outputs

    with ThreadPoolExecutor(3) as executor:
        for outputs in executor.map(work, range(3)):
            for number, out in outputs:
                torch.testing.assert_close(out, expected[number], atol=1e-3, rtol=0)
    assert rows.stats.replays.total() + rows.stats.eager.total() == 180
    assert rows.stats.replays.total() > 0


def slow(ids: Tensor, positions: Tensor) -> Tensor:
    """Reads its input long after the launch: another row's input must not be there yet."""
    torch.cuda._sleep(100_000_000)
    return ids * 2


@pytest.mark.parametrize("planted", [False, True])
def test_a_stream_waits_for_the_row_of_another_stream(planted: bool) -> None:
    rows = RowGraphs(slow, nn.Linear(4, 4, device=DEVICE), [8], progress=None)
    if planted:
        rows._pool.turn = contextlib.nullcontext  # type: ignore[method-assign]
    ids = [row(8, seed=seed, device=DEVICE) for seed in range(2)]
    streams = [torch.cuda.Stream() for _ in ids]
    torch.cuda.synchronize()
    outputs = []
    for one, stream in zip(ids, streams, strict=True):
        with torch.no_grad(), torch.cuda.stream(stream):
            outputs.append(rows(one))
    torch.cuda.synchronize()
    assert torch.equal(outputs[0], ids[0] * 2) is not planted


def test_a_row_never_waits_for_the_device_unless_its_positions_are_there() -> None:
    model = tiny("qwen2", device=DEVICE)
    rows = rows_of(model)
    ids, positions = row(20, device=DEVICE), torch.arange(20, device=DEVICE)[None]
    with torch.no_grad():
        rows(ids)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            rows(ids, 7)
            with pytest.raises(RuntimeError, match="synchroniz"):
                rows(ids, positions)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_autocast_inside_of_forward_is_captured() -> None:
    model = nn.Linear(64, 64, device=DEVICE)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(ids[..., None] / 48 + torch.zeros(64, device=DEVICE))

    rows = RowGraphs(forward, model, [16], progress=None)
    fill = poison(rows._pool)
    ids = row(10, device=DEVICE)
    with torch.no_grad():
        fill.replay()
        out, expected = rows(ids), forward(ids, ids)
    assert out.dtype == torch.bfloat16
    assert_near(out, expected, torch.bfloat16)


# Varlen regions

LENGTHS = [[16, 9, 12], [3, 1, 2], [16, 16, 16], [0, 0, 0], [0, 7, 16], [16, 9, 12]]


def mask_of(lengths: list[int]) -> Tensor:
    return torch.arange(16, device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]


def prepare(mask: Tensor, layout: Any = "packed") -> VarlenMetadata:
    return prepare_varlen(3, 16, 16, mask, mask_q=mask, layout=layout, max_seqlen_k=16)


def packed(lengths: list[int], capacity: int = 3, bound: int = 8) -> VarlenMetadata:
    return VarlenMetadata.from_lengths(lengths, max_seqlen_q=bound, capacity=capacity, device=DEVICE)


def attend(q: Tensor, k: Tensor, v: Tensor, meta: VarlenMetadata) -> Tensor:
    return varlen_attention(q, k, v, meta, causal=True)


def inputs_of(rows: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Tensor]:
    return list(make_inputs(rows, rows, dim=32, dtype=dtype, device=DEVICE, seed=seed)[:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("prepared", ["inside", "outside"])
@pytest.mark.parametrize("layout", ["packed", "in_place"])
def test_offsets_follow_the_lengths_and_padding_is_zero(layout: str, prepared: str, dtype: torch.dtype) -> None:
    def region(q: Tensor, k: Tensor, v: Tensor, what: Tensor | VarlenMetadata) -> Tensor:
        return attend(q, k, v, prepare(what, layout) if isinstance(what, Tensor) else what)

    def given(lengths: list[int]) -> Tensor | VarlenMetadata:
        return mask_of(lengths) if prepared == "inside" else prepare(mask_of(lengths), layout)

    graphed = GraphedVarlen(region, *inputs_of((3, 16), dtype), given(LENGTHS[0]))
    fill = poison(graphed.pool)
    for step, lengths in enumerate(LENGTHS):
        inputs, mask = inputs_of((3, 16), dtype, seed=step), mask_of(lengths)
        fill.replay()
        out = graphed(*inputs, given(lengths))
        assert_near(out, attend(*inputs, prepare(mask)), dtype)
        assert not out[~mask].any()


def test_metadata_that_a_region_closes_over_goes_stale() -> None:
    """The test above would see it."""
    inputs, meta = inputs_of((3, 16)), prepare(mask_of(LENGTHS[0]))
    graphed = GraphedVarlen(lambda q, k, v, mask: attend(q, k, v, meta), *inputs, mask_of(LENGTHS[0]))
    assert not torch.allclose(graphed(*inputs, mask_of(LENGTHS[1])), attend(*inputs, prepare(mask_of(LENGTHS[1]))))


def test_packed_rows_shrink_and_grow_in_memory_full_of_nan() -> None:
    grow = case("capacity", "shrink-then-grow")
    graphed = GraphedVarlen(attend, *inputs_of((8,)), packed(grow["captured_lengths"]))
    fill = poison(graphed.pool)
    for step, lengths in enumerate([*grow["replayed_lengths"], [8, 0, 0], [1], [3, 3, 2]]):
        total = sum(lengths)
        inputs = [x[:total] for x in inputs_of((8,), seed=step)]
        fill.replay()
        out = graphed(*inputs, packed(lengths))
        assert_near(out[:total], attend(*inputs, packed(lengths)), torch.bfloat16)
        assert not out[total:].any()


def test_rows_that_a_region_does_not_write_are_seen() -> None:
    """The tests above would see them."""
    graphed = GraphedVarlen(lambda x: torch.empty_like(x) + 0, torch.zeros(8, 64, device=DEVICE))
    poison(graphed.pool).replay()
    assert graphed(torch.zeros(8, 64, device=DEVICE)).isnan().all()


@pytest.mark.parametrize("replayed", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("captured", [(0, 1, 2), (2, 1, 0)])
def test_graphs_of_one_pool_are_captured_and_replayed_in_any_order(captured: Any, replayed: Any) -> None:
    capacities, pool, graphs = (8, 32, 64), None, {}
    for number in captured:
        size = capacities[number]
        meta = packed([size // 2, size // 2], bound=size)
        graphs[number] = GraphedVarlen(attend, *inputs_of((size,)), meta, pool=pool)
        pool = graphs[number].pool
    fill = poison(pool)
    outputs = []
    for step, number in enumerate(replayed * 2):
        size = capacities[number]
        lengths = [step, size - step - 1]
        inputs = inputs_of((size,), seed=step)
        fill.replay()
        out = graphs[number](*inputs, packed(lengths, bound=size))
        outputs.append((out, attend(*inputs, packed(lengths, bound=size))))
    for out, expected in outputs:  # what was returned has not been written over since
        assert_near(out, expected, torch.bfloat16)


def test_a_region_returns_its_gradients() -> None:
    inputs = make_inputs((3, 16), (3, 16), dim=32, dtype=torch.bfloat16, device=DEVICE)

    def region(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        out = attend(q, k, v, prepare(mask))
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    graphed = GraphedVarlen(region, *leaves, inputs.dout, mask_of(LENGTHS[0]))
    fill = poison(graphed.pool)
    for lengths in LENGTHS:
        fill.replay()
        results = graphed(*inputs, mask_of(lengths))
        expected = run(inputs, prepare(mask_of(lengths)), causal=True)
        assert_near(results, (expected.out, *expected[2:]), torch.bfloat16)


@pytest.mark.parametrize("planted", [False, True])
def test_a_stream_waits_for_the_region_of_another_stream(planted: bool) -> None:
    def region(x: Tensor) -> Tensor:
        torch.cuda._sleep(100_000_000)
        return x * 2

    graphed = GraphedVarlen(region, torch.zeros(8, device=DEVICE))
    if planted:
        graphed.pool.turn = contextlib.nullcontext  # type: ignore[method-assign]
    given = [torch.full((8,), float(number), device=DEVICE) for number in (1, 2)]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    outputs = []
    for one, stream in zip(given, streams, strict=True):
        with torch.cuda.stream(stream):
            outputs.append(graphed(one))
    torch.cuda.synchronize()
    assert torch.equal(outputs[0], given[0] * 2) is not planted


def test_an_update_and_a_replay_never_wait_for_the_device() -> None:
    mask, inputs = mask_of(LENGTHS[1]), inputs_of((3, 16))
    graphed = GraphedVarlen(lambda q, k, v, meta: attend(q, k, v, meta), *inputs, prepare(mask))
    graphed(*inputs, prepare(mask))
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        out = graphed(*inputs, prepare(mask))
        with pytest.raises(RuntimeError, match="synchroniz"):
            out.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_region_that_reads_the_device_says_so() -> None:
    def region(mask: Tensor) -> Tensor:
        return prepare_varlen(3, 16, 16, mask).cu_seqlens_k

    with pytest.raises(RuntimeError, match="CUDA graph capture does not allow"):
        GraphedVarlen(region, mask_of(LENGTHS[0]))
    graphed = GraphedVarlen(lambda mask: prepare(mask).cu_seqlens_k, mask_of(LENGTHS[0]))  # and torch has recovered
    assert_bit_equal(graphed(make_mask("full", 3, 16, device=DEVICE)), prepare(mask_of([16] * 3)).cu_seqlens_k)
