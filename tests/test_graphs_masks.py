"""`eager_mask_decisions`: what transformers' masks are inside a capture, for whom, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_bit_equal, assert_near, refuses, run_python
from torch import Tensor

pytest.importorskip("transformers")

from graphs_helpers import (
    ARCHITECTURES,
    LAYERS,
    WINDOW,
    captures_can_be_claimed,
    claimed_capture,
    logits_of,
    mask,
    recorded_sdpa,
    row,
    tiny,
)
from transformers import masking_utils

from varlen_prep.graphs import _mask_decisions, eager_mask_decisions

NAMES = (_mask_decisions._SEARCH, *_mask_decisions._SKIPS, _mask_decisions._TRACING)
JUMP = torch.tensor([[0, 1, 2, 0, 1, 2]])


def replaced() -> dict[str, Any]:
    return {name: getattr(masking_utils, name) for name in NAMES}


@pytest.fixture
def real_captures() -> None:
    """Asked for by tests in which torch itself answers whether a stream captures."""


@pytest.fixture(autouse=True)
def _transformers_is_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    before = replaced()
    real = "real_captures" in request.fixturenames
    with contextlib.nullcontext() if real else captures_can_be_claimed():
        yield
    assert replaced() == before


def captured_mask(*args: Any, **options: Any) -> Tensor | None:
    with claimed_capture():
        return mask(*args, **options)


# What is decided


def test_the_mask_is_there_without_the_context_gone_inside_and_back_after() -> None:
    assert mask() is None
    assert captured_mask() is not None
    with eager_mask_decisions():
        assert captured_mask() is None
    assert captured_mask() is not None


@pytest.mark.parametrize("seq", [WINDOW - 1, WINDOW, 2 * WINDOW])
@pytest.mark.parametrize(
    "make", ["create_causal_mask", "create_sliding_window_causal_mask", "create_bidirectional_mask"]
)
def test_every_kind_of_mask_is_that_of_eager(make: str, seq: int) -> None:
    eager = mask(seq=seq, make=make)
    with eager_mask_decisions():
        inside = captured_mask(seq=seq, make=make)
    assert (inside is None) == (eager is None) == (seq < WINDOW or "sliding" not in make)
    assert_bit_equal(inside, eager)


def test_positions_with_a_jump_keep_the_mask_of_transformers() -> None:
    without = captured_mask(JUMP)
    with eager_mask_decisions(JUMP):
        assert_bit_equal(captured_mask(JUMP), without)
        assert captured_mask() is not None
    assert_bit_equal(mask(JUMP), without)


@pytest.mark.parametrize("positions", [
    torch.arange(6), torch.arange(6)[None] + 40, torch.arange(6, dtype=torch.int32).expand(3, 2, 6), torch.zeros(1, 1),
])  # fmt: skip
def test_positions_that_rise_by_one_are_single_sequences(positions: Tensor) -> None:
    with eager_mask_decisions(positions):
        assert captured_mask() is None


@pytest.mark.parametrize("positions", [
    [[0, 1, 2, 3], [0, 1, 0, 1]], [[3, 2, 1, 0]], [[0, 0, 0, 0]], [[0, 1, 3, 4]], [[[0, 1, 2, 3]], [[0, 0, 1, 1]]],
])  # fmt: skip
def test_one_row_that_does_not_rise_by_one_is_enough_to_keep_the_mask(positions: list[Any]) -> None:
    with eager_mask_decisions(torch.tensor(positions)):
        assert captured_mask() is not None


def test_a_padding_mask_stays_in_a_capture_because_it_cannot_be_read() -> None:
    for padding in (torch.ones(1, 6, dtype=torch.int64), torch.tensor([[0, 0, 1, 1, 1, 1]])):
        without = captured_mask(padding=padding)
        with eager_mask_decisions():
            assert_bit_equal(captured_mask(padding=padding), without)
        assert without is not None


def test_a_value_on_the_device_is_never_read() -> None:
    """The offset of a static cache is such a value, and eager reads it: here reading raises."""
    unreadable = torch.zeros((), device="meta")
    causal, bidirectional = (getattr(masking_utils, name) for name in _mask_decisions._SKIPS)
    sizes = {"query_length": 6, "q_length": 6, "kv_length": 12, "kv_offset": unreadable, "q_offset": unreadable}
    given = {name: sizes[name] for name in inspect.signature(causal).parameters if name in sizes}
    lengths = {name: sizes[name] for name in inspect.signature(bidirectional).parameters if name in sizes}
    with pytest.raises((RuntimeError, NotImplementedError)):
        bidirectional(unreadable, **lengths)
    with eager_mask_decisions(), claimed_capture():
        causal, bidirectional = (getattr(masking_utils, name) for name in _mask_decisions._SKIPS)
        assert causal(None, **given) is False
        assert bidirectional(unreadable, **lengths) is False


def test_outside_of_a_capture_nothing_changes() -> None:
    with eager_mask_decisions():
        assert mask() is None
        assert_bit_equal(mask(JUMP), captured_mask_without_context := mask(JUMP))
        assert captured_mask_without_context is not None
        assert mask(padding=torch.tensor([[0, 1, 1, 1, 1, 1]])) is not None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sdpa_of_a_model_gets_the_arguments_of_eager(architecture: str) -> None:
    model = tiny(architecture)
    ids, positions = row(2 * WINDOW), torch.arange(2 * WINDOW)[None]

    def run(capture: bool) -> tuple[list[Any], Tensor]:
        with torch.no_grad(), recorded_sdpa() as calls, claimed_capture() if capture else contextlib.nullcontext():
            out = logits_of(model)(ids, positions)
        return [call.kind for call in calls], out

    eager, expected = run(capture=False)
    full = [kind == "full_attention" for kind in LAYERS] if architecture == "gemma3" else [True, True]
    assert [(has_mask, is_causal) for has_mask, is_causal, _ in eager] == [(not f, f) for f in full]
    with eager_mask_decisions():
        inside, out = run(capture=True)
    assert inside == eager
    assert_bit_equal(out, expected)
    assert all(has_mask for has_mask, _, _ in run(capture=True)[0])  # and without the context it does not


def test_compilers_trace_transformers_as_it_is() -> None:
    with eager_mask_decisions():
        compiled = torch.compile(
            lambda x: masking_utils.find_packed_sequence_indices(x), fullgraph=True, backend="eager"
        )
        assert_bit_equal(compiled(torch.arange(6)[None]), torch.zeros(1, 6, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sdpa_in_a_real_capture_gets_the_arguments_of_eager(architecture: str, real_captures: None) -> None:
    model = tiny(architecture, device="cuda", dtype=torch.bfloat16)
    ids, positions = row(2 * WINDOW, device="cuda"), torch.arange(2 * WINDOW, device="cuda")[None]

    def capture() -> tuple[list[Any], torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), recorded_sdpa() as calls, torch.cuda.graph(graph):
            out = logits_of(model)(ids, positions)
        return calls, graph, out

    with torch.no_grad(), recorded_sdpa() as eager:
        expected = logits_of(model)(ids, positions)
    with torch.no_grad():
        logits_of(model)(ids, positions // 2)  # loads the kernels of the path with masks
    with eager_mask_decisions(positions):
        calls, graph, out = capture()
    graph.replay()
    assert [call.kind for call in calls] == [call.kind for call in eager]
    for inside, outside in zip(calls, eager, strict=True):
        assert_bit_equal(inside.mask, outside.mask)
    assert_near(out, expected, torch.bfloat16)
    assert all(call.mask is not None and not call.is_causal for call in capture()[0])  # without the context


@pytest.mark.gpu
def test_positions_with_a_jump_keep_their_documents_apart_in_a_real_capture(real_captures: None) -> None:
    model, ids = tiny("llama", device="cuda"), row(6, device="cuda")
    positions = JUMP.cuda()
    with torch.no_grad():
        expected = logits_of(model)(ids, positions)
        graph = torch.cuda.CUDAGraph()
        with eager_mask_decisions(positions), torch.cuda.graph(graph):
            out = logits_of(model)(ids, positions)
    graph.replay()
    assert_near(out, expected, torch.float32)


@pytest.mark.gpu
def test_positions_on_a_gpu_are_refused_in_a_real_capture(real_captures: None) -> None:
    positions = JUMP.cuda()
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        positions.add(1)  # torch warns of empty graphs
        with refuses(RuntimeError, "position_ids", "before the capture"), eager_mask_decisions(positions):
            pass


# Concurrency and cleaning up


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result(timeout=30)


def test_two_threads_that_enter_take_turns_and_both_are_served() -> None:
    first_inside, second_tries, order = threading.Event(), threading.Event(), []

    def first() -> bool:
        with eager_mask_decisions():
            first_inside.set()
            second_tries.wait(30)
            served = all(captured_mask() is None for _ in range(20))
            order.append("first leaves")
        return served

    def second() -> bool:
        first_inside.wait(30)
        second_tries.set()
        with eager_mask_decisions():
            order.append("second enters")
            return captured_mask() is None

    with ThreadPoolExecutor(2) as executor:
        assert all(future.result(30) for future in [executor.submit(first), executor.submit(second)])
    assert order == ["first leaves", "second enters"]
    assert captured_mask() is not None


def test_many_threads_that_enter_and_leave_at_once_restore_transformers() -> None:
    def work() -> list[bool]:
        seen = []
        for _ in range(30):
            with eager_mask_decisions():
                seen.append(captured_mask() is None)
            seen.append(captured_mask() is not None)
        return seen

    with ThreadPoolExecutor(6) as executor:
        assert all(all(future.result(60)) for future in [executor.submit(work) for _ in range(6)])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nested_contexts_exit_in_any_order_and_only_the_last_restores(order: tuple[int, int]) -> None:
    before = replaced()
    contexts = [eager_mask_decisions(), eager_mask_decisions()]
    for context in contexts:
        context.__enter__()
    contexts[order[0]].__exit__(None, None, None)
    assert captured_mask() is None
    contexts[order[1]].__exit__(None, None, None)
    assert captured_mask() is not None
    assert replaced() == before


def test_the_inner_context_decides() -> None:
    with eager_mask_decisions():
        with eager_mask_decisions(JUMP):
            assert captured_mask(JUMP) is not None
            with eager_mask_decisions():
                assert captured_mask() is None
        assert captured_mask() is None


def test_an_exception_inside_restores_transformers_and_lets_others_in() -> None:
    before = replaced()
    with pytest.raises(ZeroDivisionError), eager_mask_decisions(), claimed_capture():
        1 / 0  # noqa: B018
    assert replaced() == before
    assert captured_mask() is not None
    with eager_mask_decisions():
        assert captured_mask() is None
    assert in_thread(_serves)


def _serves() -> bool:
    with eager_mask_decisions():
        return captured_mask() is None


def test_an_exception_in_the_inner_of_two_contexts_leaves_the_outer_one() -> None:
    with eager_mask_decisions():
        with pytest.raises(ZeroDivisionError), eager_mask_decisions(JUMP):
            1 / 0  # noqa: B018
        assert captured_mask() is None
    assert captured_mask() is not None


def test_an_exception_inside_a_decision_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> bool:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(masking_utils, _mask_decisions._SKIPS[0], fail)
        with eager_mask_decisions(), claimed_capture():
            with pytest.raises(ZeroDivisionError):
                mask()
            assert masking_utils.is_tracing() is True


def test_a_bystander_sees_transformers_as_it_is() -> None:
    """Even while it captures itself; and it does not wait."""
    with eager_mask_decisions():
        assert in_thread(lambda: captured_mask() is not None)
        assert in_thread(lambda: mask() is None)
        assert in_thread(lambda: mask(JUMP) is not None)
        assert captured_mask() is None


def test_a_replacement_that_somebody_puts_in_meanwhile_stays_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    name, seen = "find_packed_sequence_indices", []
    monkeypatch.setattr(masking_utils, name, getattr(masking_utils, name))  # back to this after the test
    with monkeypatch.context() as patch:
        with eager_mask_decisions():
            ours = getattr(masking_utils, name)

            def theirs(position_ids: Tensor) -> Tensor | None:
                seen.append(position_ids)
                return ours(position_ids)

            patch.setattr(masking_utils, name, theirs)
            assert captured_mask() is None
        assert getattr(masking_utils, name) is theirs
        assert captured_mask() is not None
        assert len(seen) == 2
        with eager_mask_decisions():
            assert captured_mask() is None
        assert getattr(masking_utils, name) is theirs
    # What they put back is that of the first context, which does nothing any more.
    assert getattr(masking_utils, name) is ours
    assert captured_mask() is not None
    with eager_mask_decisions():
        assert captured_mask() is None


# What is refused


def test_positions_cannot_be_read_in_a_capture() -> None:
    on_a_gpu = types.SimpleNamespace(is_cuda=True)
    with claimed_capture(), refuses(RuntimeError, "position_ids", "before"), eager_mask_decisions(on_a_gpu):
        pass


def test_without_transformers_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refuses(ImportError, "pip install 'transformers=="), eager_mask_decisions():
        pass


def test_a_version_without_a_name_is_refused_before_anything_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(masking_utils, "is_tracing")
        before = {name: getattr(masking_utils, name) for name in NAMES[:-1]}
        with refuses(RuntimeError, "is_tracing", "install one of"), eager_mask_decisions():
            pass
        assert {name: getattr(masking_utils, name) for name in NAMES[:-1]} == before


@pytest.mark.parametrize(
    ("after", "loaded"), [("", "False False"), ("eager_mask_decisions().__enter__()", "True False")]
)
def test_the_import_loads_no_transformers_and_initialises_no_gpu(after: str, loaded: str) -> None:
    code = "import sys, torch; from varlen_prep.graphs import eager_mask_decisions\n"
    ended = run_python(f"{code}{after}\nprint('transformers' in sys.modules, torch.cuda.is_initialized())")
    assert ended.stdout.strip() == loaded, ended.stderr


def test_the_benchmark_runs_without_a_gpu_and_writes_what_it_finds(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    command = [sys.executable, str(root / "benchmarks" / "captured_masks.py"), "--smoke", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "captured_masks.md").read_text() == ended.stdout[:-1]
    assert "\n| eager | " in ended.stdout
    assert (tmp_path / "captured_masks.csv").read_text().count("\n") == 2
