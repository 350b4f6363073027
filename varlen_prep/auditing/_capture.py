"""Capture in a CUDA graph, and replays after the inputs were rewritten in place."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._report import Capture
from ._running import Call, Result, Subject, difference, tolerance

_WARM_UPS = 3
"""Calls before a capture, as torch.cuda.make_graphed_callables makes them."""


def capture(subject: Subject, calls: list[Call]) -> Capture:
    """Captures the first call and replays it on the values of the others of its shapes, or on other floats."""
    static = calls[0].copy()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with _own_generator():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                subject.run(static)
        torch.cuda.current_stream().wait_stream(stream)
        try:
            with _ends_always() as pool, torch.cuda.graph(graph, pool=pool, stream=stream):
                result = subject.run(static)
        except Exception as error:
            return Capture(error=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        changed, others = _other_values(calls)
        if not others:
            return Capture(error=None)
        differences = []
        for other in others:
            expected = subject.run(other.copy())
            with torch.no_grad():
                for target, source in zip(static.tensors(), other.tensors(), strict=True):
                    target.copy_(source)
            graph.replay()
            differences.append(_distance(result, expected))
    return Capture(error=None, changed=changed, difference=max(differences), limit=tolerance([result]))


def _distance(found: Result, expected: Result) -> float:
    pairs = (found.outputs, expected.outputs), (found.gradients, expected.gradients)
    return max(difference(*pair) for pair in pairs)


def _other_values(calls: list[Call]) -> tuple[str, list[Call]]:
    """Calls like the first with other values, and what is changed; the first comes last, as values may shrink again."""
    alike = [call for call in calls[1:] if _form(call) == _form(calls[0])]
    if alike:
        return "the inputs (to those of the other input sets)", [*alike, calls[0]]
    other = calls[0].copy()
    floats = [one for one in other.tensors() if one.is_floating_point()]
    with torch.no_grad():
        for one in floats:
            one.copy_(one.flip(*range(one.ndim)) * 0.5 + 0.25)
    return "the float inputs", [other] if floats else []


def _form(call: Call) -> object:
    """Everything that a replay cannot change: structure, host values, shapes, dtypes."""
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    return structure, [(one.shape, one.dtype) if isinstance(one, Tensor) else one for one in leaves]


@contextlib.contextmanager
def _ends_always() -> Iterator[Any]:
    """A memory pool for one capture. Torch leaves the stream and the pool of a capture that CUDA aborted in use."""
    before, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # of a function that returns its input
            yield pool
    except Exception:
        torch.cuda.set_stream(before)
        with contextlib.suppress(RuntimeError):  # torch itself ends it where an error of Python stopped the capture
            torch._C._cuda_endAllocateToPool(before.device_index, pool)
            torch._C._cuda_releasePool(before.device_index, pool)
        raise


@contextlib.contextmanager
def _own_generator() -> Iterator[None]:
    """The default generator works on a state of its own: a capture that fails leaves its state in capture mode."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(before)
