"""cuDNN: its adapter on a stand-in of `cudnn` with its signatures and traps, and what only the real one shows.

What it computes on a GPU is tested with the other kernels, in `test_kernels` and `test_kernels_runtime`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import (
    Inputs,
    assert_bit_equal,
    assert_near,
    assert_zero_rows,
    make_inputs,
    make_mask,
    oracle,
    poison,
    refuses,
    run,
)
from standins import cudnn as standin

from varlen_prep import VarlenMetadata, backends, op, prepare_varlen, varlen_attention
from varlen_prep.backends import Arguments, Request, _cudnn_plans, _cudnn_sequences, _machine, cudnn

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in where the backend finds it, without plans of earlier tests; the backend may run on the CPU."""
    made = standin.module()
    record = dataclasses.replace(cudnn.CUDNN, dtypes={"cpu": (F16, BF16)}, missing=list)
    monkeypatch.setitem(op.REGISTRY, "cudnn", record)
    monkeypatch.setitem(sys.modules, "cudnn", made)
    monkeypatch.setattr(_cudnn_plans, "_devices", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def packed(lengths_q: list[int], lengths_k: list[int] | None = None, **options: Any) -> tuple[Inputs, VarlenMetadata]:
    meta = VarlenMetadata.from_lengths(lengths_q, lengths_k)
    lengths_k = lengths_q if lengths_k is None else lengths_k
    return make_inputs((sum(lengths_q),), (sum(lengths_k),), **{"dtype": F16, **options}), meta


def check(inputs: Inputs, meta: VarlenMetadata, **options: Any) -> None:
    got = run(inputs, meta, backend="cudnn", **options)
    assert_near(got, oracle(inputs, meta.materialize(**options)), inputs.q.dtype)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", [(-1, -1), (3, 0), (0, 0), (2, -1), (-1, 2), (4, 9), (2**31 - 1, 2**31 - 1)])
def test_equals_the_oracle(module: Any, dtype: torch.dtype, causal: bool, window_size: tuple[int, int]) -> None:
    for lengths in (([10, 3, 1, 0, 26],), ([5, 0, 13], [20, 3, 0]), ([12, 4, 1], [3, 20, 1]), ([12], [3])):
        check(*packed(*lengths, dtype=dtype), causal=causal, window_size=window_size)


@pytest.mark.parametrize(("dim", "dim_v"), [(5, 5), (8, 3), (12, 16), (24, 24)])
def test_other_head_sizes_are_widened(module: Any, dim: int, dim_v: int) -> None:
    check(*packed([6, 2], dim=dim, dim_v=dim_v), causal=True)


def test_strided_rows_are_read_where_they_are_and_misaligned_ones_are_copied(module: Any) -> None:
    meta = VarlenMetadata.from_lengths([5, 7])
    plain = make_inputs((12,), (12,), heads=4, heads_kv=4, dtype=F16)
    expected = varlen_attention(*plain[:3], meta, backend="cudnn")
    fused = torch.stack(plain[:3], 1).unbind(1)
    shifted = [torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape) for x in plain[:3]]
    for rows in (fused, shifted, [x.transpose(0, 1).contiguous().transpose(0, 1) for x in plain[:3]]):
        assert_bit_equal(varlen_attention(*rows, meta, backend="cudnn"), expected)
    assert [graph.operands[0].stride[1:3] for graph in module.graphs] == [[8, 32], [8, 96], [96, 8]]


@pytest.mark.parametrize("layout", ["packed", "in_place"])
@pytest.mark.parametrize("kind", ["right", "left", "middle", "some_empty"])
def test_poison_in_rows_that_take_no_part(module: Any, layout: str, kind: str) -> None:
    masks = [make_mask(kind, 3, size, seed=seed) for size, seed in ((20, 0), (30, 1))]
    meta = prepare_varlen(3, 20, 30, masks[1], mask_q=masks[0], max_seqlen_k=30, layout=layout)
    clean = make_inputs((3, 20), (3, 30), dtype=F16)
    got = run(poison(clean, *masks), meta, backend="cudnn", causal=True)
    assert_bit_equal(got, run(clean, meta, backend="cudnn", causal=True))
    for x, mask in zip((got.out, got.dq, got.dk, got.dv), (masks[0], masks[0], *masks[1:] * 2), strict=True):
        assert_zero_rows(x, mask)


def test_gradients_of_strided_rows(module: Any) -> None:
    inputs = make_inputs((150,), (150,), heads=4, heads_kv=4, dim=16, dtype=F16)
    meta = VarlenMetadata.from_lengths([90, 60])
    fused = torch.stack(inputs[:3], 1).unbind(1)
    got = run(Inputs(*fused, inputs.dout), meta, backend="cudnn", causal=True)
    torch.testing.assert_close(tuple(got), tuple(run(inputs, meta, backend="cudnn", causal=True)))


def test_keys_without_queries_and_rows_past_the_offsets_have_zero_gradients(module: Any) -> None:
    inputs = make_inputs((160,), (200,), dtype=F16)
    offsets = (torch.tensor(x, dtype=torch.int32) for x in ([0, 70, 70, 150], [0, 50, 100, 150]))
    dout, q, k, v = inputs.dout, *inputs[:3]
    args = Arguments(*offsets, 80, 50, False, -1, -1, 0.3, 0.0, False)
    out, lse = cudnn.forward(q, k, v, args)
    dq, dk, dv = cudnn.backward(dout, q, k, v, out, lse.contiguous(), args)
    assert (dq[150:] == 0).all()
    for grad in (dk, dv):
        assert (grad[50:100] == 0).all()
        assert (grad[150:] == 0).all()
        assert (grad[:50] != 0).any()


def shapes(count: int) -> list[tuple[int, int]]:
    """(batch, length) pairs, all different."""
    pairs = itertools.product(range(1, 21), range(20, 1000, 37))
    generator = torch.Generator().manual_seed(0)
    pairs = list(pairs)
    return [pairs[i] for i in torch.randperm(len(pairs), generator=generator)[:count]]


def test_a_stream_of_shapes_builds_few_plans_and_keeps_a_bounded_number(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys(limit: int) -> list[Any]:
        monkeypatch.setattr(_cudnn_plans, "LIMIT", limit)
        monkeypatch.setattr(_cudnn_plans, "_devices", {})
        for batch, length in shapes(200):
            q = torch.empty(batch * length, 1, 8, dtype=F16)
            offsets = torch.arange(batch + 1, dtype=torch.int32) * length
            cudnn.warm_up(q, q, q, offsets, offsets, length, length, backward=True)
        return list(_cudnn_plans.on(q.device)._plans)

    kept = keys(1000)
    record = _cudnn_plans.on(torch.device("cpu"))
    assert record.builds == len(kept) == len(set(kept)) < 100
    assert len([key for key in kept if not key.backward]) <= 16
    assert len(keys(5)) == 5
    assert _cudnn_plans.on(torch.device("cpu")).builds > record.builds


def test_sizes_are_rounded_up_to_few_and_never_down() -> None:
    for least, steps in ((4, 1), (128, 1), (128, 2)):
        found = [_cudnn_plans.round_up(size, least, steps) for size in range(5000)]
        assert all(size <= up <= max(2 * size, least) and up % least == 0 for size, up in enumerate(found))
        assert len(set(found)) <= steps * 12


def test_what_a_plan_depends_on_makes_another(module: Any) -> None:
    inputs, meta = packed([130, 70], dim=16)
    calls: list[dict[str, Any]] = [
        {}, {"causal": True}, {"window_size": (3, -1)}, {"window_size": (4, -1)}, {"softmax_scale": 0.5},
    ]  # fmt: skip
    for number, options in enumerate(calls, 1):
        for _ in range(2):
            varlen_attention(*inputs[:3], meta, backend="cudnn", **options)
        assert len(module.graphs) == number
    # Determinism only counts backward.
    varlen_attention(*inputs[:3], meta, backend="cudnn", deterministic=True)
    assert len(module.graphs) == len(calls)
    run(inputs, meta, backend="cudnn", deterministic=True)
    assert [graph.deterministic for graph in module.graphs if graph.backward] == [True]


def test_a_window_as_wide_as_the_longest_sequence_is_none(module: Any) -> None:
    for size, bounds in ((8, (9, 8)), (9, (None, None)), (2**31 - 1, (None, None))):
        for options in ({"window_size": (size, -1)}, {"window_size": (-1, size)}):
            inputs, meta = packed([10, 3])
            check(inputs, meta, **options)
            found = module.graphs[-1].options
            asked = 0 if options["window_size"][0] == size else 1
            assert (found["left"], found["right"])[asked] == bounds[asked]


def test_a_build_inside_a_capture_is_refused_and_warm_up_makes_it_unnecessary(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, meta = packed([6, 2])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with refuses(RuntimeError, "'cudnn'", "captured", "once before", "warm_up"):
        varlen_attention(*inputs[:3], meta, backend="cudnn")
    assert module.graphs == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cudnn.warm_up(*inputs[:3], **meta.flash_kwargs(), causal=True, backward=True)
    assert module.streams == [], "nothing runs"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run(inputs, meta, backend="cudnn", causal=True)
    assert len(module.graphs) == 2


def test_a_captured_plan_is_kept(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cudnn_plans, "LIMIT", 2)
    inputs, meta = packed([6, 2])
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    varlen_attention(*inputs[:3], meta, backend="cudnn")
    capturing = True
    varlen_attention(*inputs[:3], meta, backend="cudnn")
    capturing = False
    for scale in (1.0, 2.0, 3.0, 4.0):
        varlen_attention(*inputs[:3], meta, backend="cudnn", softmax_scale=scale)
    scales = [key.scale for key in _cudnn_plans.on(inputs.q.device)._plans]
    assert scales == [8**-0.5, 4.0]


def test_threads_share_plans_and_take_turns_on_the_handle(module: Any) -> None:
    """The stand-in insists on turns: it fails where two threads are on one handle."""
    inputs, meta = packed([6, 2])
    expected = varlen_attention(*inputs[:3], meta, backend="cudnn")
    results, errors = in_threads(lambda _: varlen_attention(*inputs[:3], meta, backend="cudnn"))
    assert errors == []
    for out in results:
        assert_bit_equal(out, expected)
    assert (len(module.handles), len(module.graphs)) == (1, 1)


def test_the_stand_in_catches_threads_that_take_no_turns(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, meta = packed([6, 2])
    varlen_attention(*inputs[:3], meta, backend="cudnn")
    monkeypatch.setattr(_cudnn_plans.on(inputs.q.device), "_lock", contextlib.nullcontext())
    _, errors = in_threads(lambda _: varlen_attention(*inputs[:3], meta, backend="cudnn"))
    assert any("two threads" in str(error) for error in errors)


def in_threads(call: Callable[[int], Any], count: int = 4, times: int = 10) -> tuple[list[Any], list[Exception]]:
    """What calls in several threads at once returned and raised."""
    results: list[Any] = []
    errors: list[Exception] = []
    gate = threading.Barrier(count)

    def work(number: int) -> None:
        gate.wait()
        for _ in range(times):
            try:
                results.append(call(number))
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, errors


def test_a_call_that_cudnn_has_no_kernel_for_says_so(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def decline(graph: Any) -> None:
        raise standin.cudnnGraphNotSupportedError("no engine")

    monkeypatch.setattr(standin.Graph, "check_support", decline)
    inputs, meta = packed([6, 2])
    with refuses(RuntimeError, "cuDNN 9.19.0", "no kernel", "another backend"):
        varlen_attention(*inputs[:3], meta, backend="cudnn")
    assert not _cudnn_plans.on(inputs.q.device)._plans


def request(**changes: Any) -> Request:
    usual = {
        "device": torch.device("cuda"), "dtype": BF16, "heads": 4, "heads_kv": 2, "head_dim": 64, "head_dim_v": 64,
        "causal": False, "window_size": (-1, -1), "softcap": 0.0, "deterministic": False, "backward": True, "lse": True,
        "equal_lengths": False,
    }  # fmt: skip
    return Request(**{**usual, **changes})


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert cudnn.CUDNN.reasons(request(head_dim=256)) == []
    refused: dict[str, Any] = {"head_dim": 264, "softcap": 1.0, "dtype": torch.float32}
    for name, value in refused.items():
        (reason,) = cudnn.CUDNN.reasons(request(**{name: value}))
        assert str(value) in reason


@pytest.mark.parametrize(("installed", "frontend", "version", "capability", "fragments"), [
    (True, "1.32.0", 91900, (9, 0), []),
    (True, None, 91900, (9, 0), []),
    (True, None, 91900, (10, 0), ["10.0 (it needs 9.0)"]),
    (False, None, 91900, (9, 0), ["not installed"]),
    (True, "1.17.0", 91900, (9, 0), ["1.17.0 (it needs 1.18"]),
    (True, "1.18.0", 90800, (9, 0), ["cuDNN 9.8.0 (it needs 9.10.2"]),
    (True, "1.18.0", 91400, (9, 0), ["cuDNN 9.14.0"]),
    (True, "1.18.0", None, (9, 0), ["cuDNN 0.0.0"]),
    (False, None, 90800, (8, 0), ["not installed", "8.0 (it needs 9.0"]),
])  # fmt: skip
def test_what_a_machine_lacks(
    installed: bool, frontend: str | None, version: int | None, capability: tuple[int, int], fragments: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(_machine, "has_module", lambda name: installed)
    monkeypatch.setattr(_machine, "version", lambda name: frontend)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    reasons = cudnn.CUDNN.missing()
    assert len(reasons) == len(fragments)
    for reason, fragment in zip(reasons, fragments, strict=True):
        assert fragment in reason


# From here on the real package, on a GPU.


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Warnings are the package's own."""
    return pytest.mark.gpu(pytest.mark.filterwarnings("ignore")(test))


@pytest.fixture
def real() -> Iterator[_cudnn_plans.Device]:
    """The record of the GPU, with its plans."""
    state = next(state for state in backends() if state.name == "cudnn")
    if not state.usable:
        pytest.skip("; ".join(state.reasons))
    return _cudnn_plans.on(torch.device("cuda", torch.cuda.current_device()))


def on_gpu(lengths: list[int], **options: Any) -> tuple[Inputs, VarlenMetadata]:
    rows = (sum(lengths),)
    inputs = make_inputs(rows, rows, **{"dim": 64, "dtype": BF16, "device": "cuda", **options})
    return inputs, VarlenMetadata.from_lengths(lengths, device="cuda")


@gpu
def test_new_shapes_reuse_plans_and_stay_right(real: _cudnn_plans.Device) -> None:
    generator = torch.Generator().manual_seed(0)
    before = real.builds
    cases = [torch.randint(0, length + 1, (batch,), generator=generator).tolist() for batch, length in shapes(60)]
    for lengths in cases:
        inputs, meta = on_gpu([*lengths, 1], heads=3, heads_kv=3, dim=32)
        got, expected = (run(inputs, meta, backend=name, causal=True) for name in ("cudnn", "native"))
        for name, a, b in zip(got._fields, got, expected, strict=True):
            torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2, msg=lambda m, n=f"{lengths}, {name}": f"{n}: {m}")
    # Two for each shape without rounding.
    assert 0 < real.builds - before <= 60
    before = real.builds
    for lengths in cases[-10:]:
        inputs, meta = on_gpu([*lengths[:-1], 1, 1], heads=3, heads_kv=3, dim=32)
        run(inputs, meta, backend="cudnn", causal=True)
    assert real.builds - before <= 5


@gpu
def test_a_capture_without_its_plan_is_refused_and_warm_up_allows_it(real: _cudnn_plans.Device) -> None:
    inputs, meta = on_gpu([100, 60], heads=5, heads_kv=5)  # heads that no other test has
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="warm_up"), torch.cuda.graph(graph):
            varlen_attention(*inputs[:3], meta, backend="cudnn")
        torch.cuda.synchronize()
        cudnn.warm_up(*inputs[:3], **meta.flash_kwargs())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = varlen_attention(*inputs[:3], meta, backend="cudnn")
        graph.replay()
        assert_bit_equal(out, varlen_attention(*inputs[:3], meta, backend="cudnn"))


@gpu
def test_a_replay_outlives_the_plans_that_are_dropped(
    real: _cudnn_plans.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cudnn_plans, "LIMIT", 1)
    monkeypatch.setattr(real, "_plans", collections.OrderedDict())
    inputs, meta = on_gpu([90, 40], heads=6, heads_kv=6)
    with torch.no_grad():
        expected = varlen_attention(*inputs[:3], meta, backend="cudnn")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = varlen_attention(*inputs[:3], meta, backend="cudnn")
        for scale in (0.1, 0.2, 0.3):
            varlen_attention(*inputs[:3], meta, backend="cudnn", softmax_scale=scale)
        assert len(real._plans) == 2
        out.fill_(7)
        graph.replay()
        assert_bit_equal(out, expected)


@gpu
def test_it_runs_on_the_current_stream(real: _cudnn_plans.Device) -> None:
    """On the stream of an earlier call it would read q before the side stream has written it."""
    inputs, meta = on_gpu([2000, 1000], heads=8, heads_kv=8, dim=128)
    with torch.no_grad():
        expected = varlen_attention(*inputs[:3], meta, backend="cudnn")
        q = torch.zeros_like(inputs.q)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            q.copy_(inputs.q)
            out = varlen_attention(q, *inputs[1:3], meta, backend="cudnn")
        side.synchronize()
        assert_bit_equal(out, expected)
        assert_bit_equal(varlen_attention(q, *inputs[1:3], meta, backend="cudnn"), expected)


@gpu
def test_threads_on_streams_of_their_own(real: _cudnn_plans.Device) -> None:
    cases = [on_gpu([100 + 50 * number, 30], heads=4, heads_kv=2) for number in range(4)]
    expected = [run(inputs, meta, backend="native", causal=True) for inputs, meta in cases]
    torch.cuda.synchronize()

    def call(number: int) -> tuple[int, Any]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            got = run(*cases[number], backend="cudnn", causal=True)
            stream.synchronize()
        return number, got

    results, errors = in_threads(call, times=5)
    assert errors == []
    for number, got in results:
        torch.testing.assert_close(tuple(got), tuple(expected[number]), atol=3e-2, rtol=3e-2)


@gpu
def test_a_deterministic_backward_repeats_its_bits(real: _cudnn_plans.Device) -> None:
    inputs, meta = on_gpu([1024, 700], heads=8, heads_kv=8, dim=128)
    first = run(inputs, meta, backend="cudnn", deterministic=True)
    for _ in range(5):
        assert_bit_equal(run(inputs, meta, backend="cudnn", deterministic=True), first)


@gpu
@pytest.mark.parametrize(("dim", "dim_v"), [(8, 8), (40, 40), (72, 72), (96, 64), (192, 128), (256, 256)])
def test_head_sizes(real: _cudnn_plans.Device, dim: int, dim_v: int) -> None:
    inputs, meta = on_gpu([130, 1, 70], heads=4, heads_kv=2, dim=dim, dim_v=dim_v)
    got, expected = (run(inputs, meta, backend=name, causal=True) for name in ("cudnn", "reference"))
    for name, a, b in zip(got._fields, got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=5e-2, rtol=5e-2, msg=lambda m, n=name: f"{n}: {m}")


@gpu
def test_rows_of_a_fused_projection_are_not_copied_and_give_the_same(real: _cudnn_plans.Device) -> None:
    inputs, meta = on_gpu([100, 60], heads=4, heads_kv=4)
    fused = torch.stack(inputs[:3], 1).unbind(1)
    assert not fused[0].is_contiguous()
    got = run(Inputs(*fused, inputs.dout), meta, backend="cudnn", causal=True)
    expected = run(inputs, meta, backend="cudnn", causal=True)
    torch.testing.assert_close(tuple(got), tuple(expected), atol=2e-2, rtol=2e-2)
    assert_bit_equal(got.out, expected.out)


@gpu
@pytest.mark.parametrize(("sequences", "backward"), [(300, False), (256, True)])
def test_offsets_past_two_to_the_31st_element(real: _cudnn_plans.Device, sequences: int, backward: bool) -> None:
    length, heads, dim = 2048, 32, 128
    if torch.cuda.mem_get_info()[0] < 70 * 2**30:
        pytest.skip("needs 70 GB of free memory")
    x = torch.randn(sequences * length, heads, dim, device="cuda", dtype=BF16)
    assert x.numel() > 2**31 or backward
    offsets = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * length
    args = Arguments(offsets, offsets, length, length, True, -1, -1, dim**-0.5, 0.0, False)
    out, lse = cudnn.forward(x, x, x, args)
    last = x[-length:].clone()
    alone = args._replace(cu_seqlens_q=offsets[:2], cu_seqlens_k=offsets[:2])
    out_alone, lse_alone = cudnn.forward(last, last, last, alone)
    torch.testing.assert_close(out[-length:], out_alone, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse[:, -length:], lse_alone, atol=1e-3, rtol=1e-3)
    if backward:
        grads = cudnn.backward(x, x, x, x, out, lse.contiguous(), args)
        grads_alone = cudnn.backward(last, last, last, last, out_alone, lse_alone.contiguous(), alone)
        for got, expected in zip(grads, grads_alone, strict=True):
            torch.testing.assert_close(got[-length:], expected, atol=5e-2, rtol=5e-2)


def test_gradients_past_two_to_the_31st_element_are_refused() -> None:
    x = torch.empty(300 * 2048, 32, 128, device="meta", dtype=BF16)
    offsets = torch.zeros(2, dtype=torch.int32, device="meta")
    args = Arguments(offsets, offsets, 2048, 2048, True, -1, -1, 1.0, 0.0, False)
    with refuses(ValueError, "2**31", "(614400, 32, 128)", "split the batch"):
        cudnn.backward(x, x, x, x, x, x[..., 0], args)


CASES = [
    ([5, 0, 130, 1, 64], [200, 33, 0, 7, 64]),
    ([150, 70], [20, 3]),
    ([0, 0, 3], [4, 100, 0]),
    ([9] * 40, [3] * 40),
]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("right", [-1, 0, 2])
@pytest.mark.parametrize(("lengths_q", "lengths_k"), CASES)
@gpu
def test_the_triton_kernel_describes_what_torch_does(
    lengths_q: list[int], lengths_k: list[int], right: int, backward: bool
) -> None:
    """On a CPU: `TRITON_INTERPRET=1`, where triton is installed."""
    triton_describes_like_torch(lengths_q, lengths_k, right, backward, "cuda")


def triton_describes_like_torch(
    lengths_q: list[int], lengths_k: list[int], right: int, backward: bool, device: str
) -> None:
    kernel = pytest.importorskip("varlen_prep.backends._cudnn_triton")
    meta = VarlenMetadata.from_lengths(lengths_q, lengths_k, device=device)
    rows, heads, dim = sum(lengths_q), 3, 700
    offsets = meta.cu_seqlens_q, meta.cu_seqlens_k
    args = Arguments(*offsets, max(lengths_q), max(lengths_k), False, -1, right, 1.0, 0.0, False)
    q, k = (torch.empty(max(x, 1), heads, dim, dtype=F16, device=device) for x in (rows, sum(lengths_k)))
    key = cudnn._key([q, k, k], args, backward)._replace(right=right)
    filled = [(torch.full_like(q, 7), torch.full((q.shape[0], heads), 7.0, device=device)) for _ in range(2)]
    expected = _cudnn_sequences.torch_describe(args, key, *filled[0])
    lengths, starts = kernel.describe(*offsets, key.sequences, right, backward, key.row_strides, *filled[1], 5)
    assert_bit_equal(tuple(lengths), (expected["lengths_q"], expected["lengths_k"]))
    used = expected["start_q"].shape[0]
    # Where a sequence has no rows for cuDNN, its start is not read.
    assert_bit_equal(tuple(starts[:, :used]), tuple(expected[name] for name in _cudnn_plans.STARTS))
    out, lse = filled[1]
    hidden = torch.ones(q.shape[0], dtype=torch.bool, device=device)
    for begin, length in zip((starts[2] // heads).tolist(), lengths[0].tolist(), strict=False):
        hidden[begin : begin + length] = False
    want = hidden[:rows, None] & (not backward)
    assert torch.equal(out[:rows].flatten(1) == 0, want.expand(-1, heads * dim))
    assert torch.equal(lse[:rows] == -torch.inf, want.expand(-1, heads))
