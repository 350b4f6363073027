"""Times, kernels, syncs and errors: what every benchmark of the suite measures with."""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache

import varlen_prep
from varlen_prep.selection import automatic_order

Call = Callable[[], object]
RUNS, WARM_UP = 20, 4
HEAD_START = 2_000_000
"""Clock cycles that the GPU waits, about a millisecond."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One route of one case; None where it was not measured."""

    group: str
    case: str
    route: str
    median_us: float | None = None
    low_us: float | None = None
    """The tenth percentile, as `high_us` is the ninetieth."""
    high_us: float | None = None
    gpu_us: float | None = None
    """Time in kernels and copies alone."""
    kernels: int | None = None
    syncs: int | None = None
    megabytes: float | None = None
    """Memory allocated at the peak, above what was there before."""
    error: float | None = None
    """Largest absolute difference to the oracle."""
    first_s: float | None = None
    """Seconds of the first call or calls, with all compiling."""
    graphs: int | None = None
    """Graphs compiled in them."""
    breaks: int | None = None
    """Graph breaks in them."""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Compiling:
    """What the first call, or calls, of a compiled function took."""

    first_s: float
    graphs: int
    breaks: int


def first_calls(call: Call, device: str) -> Compiling:
    """Runs the call for the first time, without what routes before it left in the caches of compiled code."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    with fresh_cache():
        begin = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    return Compiling(seconds, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


def compiled(function: Callable[..., Any], device: str, fullgraph: bool = True) -> Callable[..., Any]:
    """As users compile it; on a CPU, where only the scripts are tested, the graph runs eagerly."""
    backend = "inductor" if device == "cuda" else "eager"
    return torch.compile(function, fullgraph=fullgraph, dynamic=True, backend=backend)


def times(
    calls: Mapping[str, Call], device: str, runs: int = RUNS, queued: int = 1, ahead: bool = False
) -> dict[str, list[float]]:
    """Microseconds of each call, sorted; interleaved in changing order, so that heat and clocks treat all alike.

    With `queued`, that many calls follow each other in one measurement, and their mean counts: the host prepares the
    next call while the GPU works. With `ahead`, the GPU first waits a millisecond, in which the host gets ahead of it,
    as it is in the middle of a model: then the host's part counts only where it is longer than that of the GPU.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    clock = functools.partial(_cuda_microseconds, ahead=ahead) if device == "cuda" else _cpu_microseconds
    names, order = list(calls), random.Random(0)
    for step in range(WARM_UP + runs):
        order.shuffle(names)
        for name in names:
            value = clock(calls[name], queued)
            if step >= WARM_UP:
                found[name].append(value)
    return {name: sorted(values) for name, values in found.items()}


def _cuda_microseconds(call: Call, queued: int, ahead: bool) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if ahead:
        torch.cuda._sleep(HEAD_START)
    start.record()
    for _ in range(queued):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / queued


def _cpu_microseconds(call: Call, queued: int) -> float:
    start = time.perf_counter()
    for _ in range(queued):
        call()
    return (time.perf_counter() - start) * 1e6 / queued


def captured(call: Call) -> Call:
    """The replay of a CUDA graph of the call: no host work but the launch."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def captures(calls: Mapping[str, Call]) -> tuple[dict[str, Call], dict[str, str]]:
    """The replays of the calls that can be captured, and why the others cannot."""
    graphs, failures = {}, {}
    for name, call in calls.items():
        if syncs := count_syncs(call):  # a capture that fails leaves torch's random state inside it
            failures[name] = f"cannot be captured: {syncs} syncs"
            continue
        try:
            graphs[name] = captured(call)
        except RuntimeError as error:
            failures[name] = f"cannot be captured: {short(error)}"
            torch.cuda.synchronize()
    return graphs, failures


def short(error: Exception) -> str:
    """An error in a line of a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"


def usable_kernels() -> list[str]:
    """Backends that can run here."""
    return [state.name for state in varlen_prep.backends() if state.usable]


def best_kernel(device: str) -> str:
    """The backend that is chosen automatically."""
    usable = usable_kernels()
    return next(name for name in automatic_order(device) if name in usable)


def rows(
    group: str,
    case: str,
    calls: Mapping[str, Call],
    device: str,
    *,
    errors: Mapping[str, float] | None = None,
    notes: Mapping[str, str] | None = None,
    compiling: Mapping[str, Compiling] | None = None,
    syncs: bool = False,
    runs: int = RUNS,
    queued: int = 1,
    ahead: bool = False,
) -> list[Row]:
    """A row for each call; `syncs` counts them, and the memory, in one more call on a GPU."""
    found = []
    for name, values in times(calls, device, runs, queued, ahead).items():
        more: dict[str, Any] = {}
        if syncs and device == "cuda":
            more = {"syncs": count_syncs(calls[name]), "megabytes": peak_memory(calls[name])}
        if compiling and name in compiling:
            more |= dataclasses.asdict(compiling[name])
        found.append(
            Row(
                group=group,
                case=case,
                route=name,
                median_us=statistics.median(values),
                low_us=values[len(values) // 10],
                high_us=values[-1 - len(values) // 10],
                error=(errors or {}).get(name),
                note=(notes or {}).get(name, ""),
                **more,
            )
        )
    return found


def with_kernels(found: Iterable[Row], calls: Mapping[str, Call], device: str) -> Iterator[Row]:
    """The rows with what their calls put on the GPU.

    To be asked for when all is timed: every run of the profiler makes later launches slower.
    """
    for row in found:
        if device == "cuda":
            kernels, microseconds = device_work(calls[row.route])
            row = dataclasses.replace(row, kernels=kernels, gpu_us=microseconds)
        yield row


def peak_memory(call: Call) -> float:
    """Megabytes that one call allocates at its peak, above what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def device_work(call: Call) -> tuple[int, float]:
    """How many kernels, copies and fills a call puts on the device, and their microseconds."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            call()
            torch.cuda.synchronize()
        events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return len(events), sum(event.self_device_time_total for event in events)


def count_syncs(call: Call) -> int:
    """Host syncs that torch sees in one call."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def attention_error(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, samples: list[tuple[int, int]]
) -> float:
    """Largest absolute difference to float64 at sampled (row, query) places.

    Args:
        out, q, k, v: padded (B, S, H, D), (B, S, H_kv, D).
        allowed: bool (number of samples, S_kv), the keys that each sample sees; True somewhere.
        samples: (row, query) pairs.
    """
    row = torch.tensor([sample[0] for sample in samples])
    query = torch.tensor([sample[1] for sample in samples])
    worst = 0.0
    for one in row.unique().tolist():
        chosen = query[row == one].to(q.device)
        seen = allowed[(row == one).to(allowed.device)]
        group = q.shape[2] // k.shape[2]
        k_, v_ = (x[one].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[one, chosen].double(), k_) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        want = torch.einsum("hqk,khd->qhd", weights, v_)
        worst = max(worst, (out[one, chosen].double() - want).abs().max().item())
    return worst
