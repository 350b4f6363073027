"""`audit`: runs a function eagerly and compiled and reports what would make it break, wait, recompile or go stale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from . import _capture, _compiling, _running
from ._reads import Reads, cuda_waits, eager_reads
from ._report import AuditReport, Capture, HostRead, short
from ._running import Call, Result, Subject


def audit(
    fn: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...] | dict[str, Any]],
    *,
    backward: bool = False,
    capture: bool | Literal["if cuda"] = "if cuda",
    compile_backend: str | Callable[..., Any] | None = None,
    dynamic: bool | None = True,
    fullgraph: bool = False,
) -> AuditReport:
    """Runs a function on each set of inputs, eagerly and compiled, and reports what stands in the way of one graph.

    Each call gets copies of the inputs and the same random numbers; what the function writes elsewhere stays. The state
    of the compiler, of the random generators and of CUDA is afterwards what it was.

    Args:
        fn: a callable or module whose result depends on its inputs only; not compiled yet.
        inputs: input sets: a tuple of arguments or a dict of keyword arguments each, with tensors on the CPU or on the
            current GPU. Give different shapes, to see recompiles, and different values of the first shapes, which are
            then written into a captured graph.
        backward: also compute gradients of inputs and parameters that require them, and compare them.
        capture: whether to capture the calls in a CUDA graph; "if cuda": if an input or parameter is on a GPU.
        compile_backend: a backend of torch.compile whose results are compared with eager ("inductor"); None: the
            traced graphs are run operator by operator, which takes no time to compile.
        dynamic: as in torch.compile; None lets shapes become dynamic when they first change, at one recompile.
        fullgraph: as in torch.compile: the first graph break is a `compile_error`, but `.item()`, `nonzero` and the
            like become part of the graph, where they are found as host reads.

    Returns:
        An `AuditReport`: print it, or call its `assert_clean`.

    Raises:
        TypeError: an input set that is neither a tuple nor a dict.
        ValueError: no inputs, nothing to differentiate, or `capture=True` without a GPU.
        Exception: what the function raises when it is called eagerly.

    Example:
        >>> import torch
        >>> from varlen_prep import audit
        >>> def longest(mask):
        ...     return mask.sum(1).max().item()
        >>> report = audit(longest, [(torch.ones(2, 3, dtype=torch.bool),)])
        >>> [(read.operation, read.place.function) for read in report.reads]
        [('item', 'longest')]
    """
    calls = _calls(inputs)
    subject = Subject.of(fn, backward)
    device = _running.device_type(calls, subject)
    if capture == "if cuda":
        capture = device == "cuda"
    elif capture and device != "cuda":
        raise ValueError("capture: expected inputs on a CUDA device, got none there; move them, or give capture=False.")
    reads = Reads(device)
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        eager = [subject.run_seeded(call) for call in calls]
        with eager_reads(reads), cuda_waits(reads):
            for call in calls:
                subject.run_seeded(call)
        compiled = _compiling.Compiled(fn, reads, backward=backward, dynamic=dynamic, fullgraph=fullgraph)
        results, error = _run_compiled(subject, compiled, calls, reads, compile_backend)
        leaked = _running.leaked(subject, calls[0])
        peak = _running.peak_memory(subject, calls, device)
        captured = _try_capture(subject, calls, reads.found()) if capture else None
    return AuditReport(
        name=getattr(fn, "__qualname__", type(fn).__name__),
        device=torch.cuda.get_device_name() if device == "cuda" else "CPU",
        torch=torch.__version__,
        input_sets=len(calls),
        backward=backward,
        graphs=compiled.graphs,
        breaks=tuple(compiled.breaks.values()),
        recompiles=tuple(compiled.recompiles),
        reads=reads.found(),
        compile_error=error,
        difference=_largest([one.outputs for one in results], [one.outputs for one in eager]),
        gradient_difference=_largest([one.gradients for one in results], [one.gradients for one in eager])
        if backward
        else None,
        limit=_running.tolerance(eager),
        leaked=leaked,
        peak_memory=peak,
        capture=captured,
    )


def _calls(inputs: Sequence[tuple[Any, ...] | dict[str, Any]]) -> list[Call]:
    """The input sets in one form; errors that say which set is wrong."""
    if not isinstance(inputs, (list, tuple)) or not inputs:
        raise ValueError(f"inputs: expected a list of at least one input set, got {inputs!r}; give [(x, y), ...].")
    for i, one in enumerate(inputs):
        if not isinstance(one, (tuple, dict)):
            raise TypeError(
                f"inputs[{i}]: expected a tuple of arguments or a dict of keyword arguments, got "
                f"{type(one).__name__}; write (x,) for one argument."
            )
    return [Call((), one) if isinstance(one, dict) else Call(tuple(one), {}) for one in inputs]


def _run_compiled(
    subject: Subject,
    compiled: _compiling.Compiled,
    calls: list[Call],
    reads: Reads,
    backend: str | Callable[..., Any] | None,
) -> tuple[list[Result], str | None]:
    """Results of compiled calls, and the error that ended them; `compiled` and `reads` take up what is seen."""
    traced = Subject(compiled.run, subject.parameters, subject.backward)
    try:
        with _compiling.watched(compiled):
            results = [traced.run_seeded(call) for call in calls]
            with cuda_waits(reads):
                for call in calls:
                    traced.run_seeded(call)
            if backend is not None:
                traced = Subject(compiled.compiled_by(backend), subject.parameters, subject.backward)
                results = [traced.run_seeded(call) for call in calls]
    except Exception as error:
        return [], f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return results, None


def _largest(found: list[Any], expected: list[Any]) -> float | None:
    """The largest difference over the input sets; None if there are no results."""
    if not found:
        return None
    return max(_running.difference(*pair) for pair in zip(found, expected, strict=True))


def _try_capture(subject: Subject, calls: list[Call], reads: tuple[HostRead, ...]) -> Capture:
    """A capture, unless the host is known to wait: that would only make it fail."""
    for read in reads:
        if "cuda" in read.seen:
            return Capture(error=f"the host waits for the GPU: {read.operation} at {short(read.place)}")
    return _capture.capture(subject, calls)
