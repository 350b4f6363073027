"""Compiles the audited function, counts what the compiler makes of it, and leaves the compiler as it was.

Graphs come from a compiler backend that keeps what it is given and runs it operator by operator. Breaks come from the
compiler's log, because those without operators before them never reach a backend; guards come from its metrics.
The compiler keeps code and flags by code object; those that the audit adds are taken away again, which needs
some of its private names (checked by the tests on the oldest and newest torch).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import linecache
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import _places
from ._reads import Reads
from ._report import GraphBreak, Place, Recompile

_BREAK = re.compile(r"in user code at (.+):(\d+)\nGraph Break Reason: (.+)")
_EXPLAINED = re.compile(r"^(?:Graph Break Reason: )?(.+)\n  Explanation: (.+)$", re.MULTILINE)
_MISMATCH = re.compile(r"size mismatch at index \d+\. expected (\d+)")
_GUARDED_LINE = re.compile(r" # (\S+\.py):(\d+) in (\S+)")
_LIMIT = 64
"""Recompiles of one function; the default of 8 would hide some."""


class Compiled:
    """The function as the compiler sees it, and what it made of it."""

    def __init__(self, function: Callable[..., Any], reads: Reads, *, backward: bool, **options: Any) -> None:
        # By compilation: to treat Python floats as constants, torch traces and compiles once more under the same one.
        self._compiled: set[Any] = set()
        self.breaks: dict[tuple[str, int], GraphBreak] = {}
        self.recompiles: dict[Recompile, None] = {}
        self._fixed_sizes: dict[int, str] = {}
        """By number, the line that fixed a size to it; a recompile for another size says only the number."""
        self._reads, self._backward = reads, backward
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch 2.13 and newer
            options["isolate_recompiles"] = True
        self._function, self._options = function, options
        self.backends: list[Callable[..., Any]] = []
        """By which the compiler tells the audit's code from other code."""
        self.run = self.compiled_by(self._keep_and_run)

    @property
    def graphs(self) -> int:
        return len(self._compiled)

    def compiled_by(self, backend: str | Callable[..., Any]) -> Callable[..., Any]:
        """The function compiled by another backend, in a code object that nothing else has."""

        def compile_graph(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            find = torch._dynamo.lookup_backend
            return (find(backend) if isinstance(backend, str) else backend)(graph, example_inputs)

        self.backends.append(compile_graph)
        return torch.compile(own_code(self._function), backend=compile_graph, **self._options)

    def _keep_and_run(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        self._compiled.add(torch._guards.CompileContext.current_compile_id())
        self._note_fixed_sizes()
        compile_graph = aot_autograd(fw_compiler=self._forward, bw_compiler=self._gradients)
        return compile_graph(graph, example_inputs)

    def _forward(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func

        graphs = [one.graph for one in graph.modules() if isinstance(one, torch.fx.GraphModule)]
        for node in (node for one in graphs for node in one.nodes if node.op == "call_function"):
            stack = functools.partial(_places.from_text, node.stack_trace)
            self._reads.add_operator(node.target, node.args, node.kwargs, stack, "graph")
        return make_boxed_func(graph.forward)

    def _gradients(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        """A backward graph, which may be compiled although nobody asks for gradients."""
        from torch._functorch.aot_autograd import make_boxed_func

        return self._forward(graph, example_inputs) if self._backward else make_boxed_func(graph.forward)

    def _note_fixed_sizes(self) -> None:
        mode = torch._guards.TracingContext.get().fake_mode
        if mode is None or mode.shape_env is None:
            return
        for size, line in ((guard.expr, guard.sloc.maybe_user_loc) for guard in mode.shape_env.guards):
            if size.is_Equality and size.lhs.is_Symbol and size.rhs.is_Integer and line is not None:
                self._fixed_sizes.setdefault(int(size.rhs), line)

    def add_recompile(self, metrics: Any) -> None:
        """Takes up what the compiler noted about one compilation, if that was a recompile."""
        reason = metrics.recompile_reason
        if reason is None or "BACKEND_MATCH" in reason:  # the first one with this backend beside code of the user's
            return
        _, _, guard = reason.partition(": ")
        line = guard
        if (mismatch := _MISMATCH.search(guard)) and int(mismatch[1]) in self._fixed_sizes:
            line = self._fixed_sizes[int(mismatch[1])]
        place = _guarded_line(line, metrics.co_filename)
        if place is None:
            place = _places.at(metrics.co_filename, metrics.co_firstlineno, metrics.co_name)
        if not _places.is_of_user(place.file):
            place = _places.of_function(self._function)
        self.recompiles[Recompile(guard=guard.partition("  #")[0].strip() or reason, place=place)] = None


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A caller of the function whose code object nothing else has, so the compiler has seen neither."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


@contextlib.contextmanager
def watched(compiled: Compiled) -> Iterator[None]:
    """Within: breaks and recompiles go to `compiled`. After: the compiler's caches and flags are as before."""
    from torch._dynamo import config, convert_frame, pgo, utils

    metrics = utils.get_compilation_metrics()
    attempted = convert_frame.input_codes
    known = len(attempted.seen)
    counters = {key: collections.Counter(value) for key, value in utils.counters.items()}
    history = pgo._CODE_STATE, pgo._INIT_CODE_STATE
    warned = utils.graph_break_dup_warning_checker
    warned_before = warned.set.copy()
    warned.reset()
    # What earlier calls of the same lines had as sizes would make them dynamic from the start.
    pgo._CODE_STATE, pgo._INIT_CODE_STATE = collections.defaultdict(pgo.CodeState), None
    try:
        with (
            config.patch(recompile_limit=_LIMIT, suppress_errors=False),
            torch.compiler.set_stance("default"),
            _breaks(compiled.breaks),
        ):
            yield
    finally:
        for one in utils.get_compilation_metrics():
            if not any(one is before for before in metrics):
                compiled.add_recompile(one)
        for i, reference in enumerate(attempted.seen):
            if (code := reference()) is not None:
                _forget(code, compiled.backends, i < known)
                if i >= known:
                    attempted.seen_ids.discard(id(code))
        del attempted.seen[known:]
        warned.set = warned_before
        pgo._CODE_STATE, pgo._INIT_CODE_STATE = history
        utils.counters.clear()
        utils.counters.update(counters)


def _forget(code: Any, backends: list[Callable[..., Any]], known: bool) -> None:
    """Takes away what the compiler holds for a code object because of the audit, also the mark that it is skipped.

    Where the user's own compiled code hangs on the same object nothing is taken away: only all of it could be.
    """
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(code)
    own = [entry for entry in entries if getattr(entry.backend, "compiler_fn", None) in backends]
    if len(own) == len(entries) and (own or not known):
        torch._dynamo.reset_code(code)


@contextlib.contextmanager
def _breaks(found: dict[tuple[str, int], GraphBreak]) -> Iterator[None]:
    """Reads the compiler's log of graph breaks, whose level and handlers are put back; its warnings are not shown."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if one := _parse_break(record.getMessage()):
                found.setdefault((one.place.file, one.place.line), one)

    log = torch._logging.getArtifactLogger("torch._dynamo.symbolic_convert", "graph_breaks")
    parent = logging.getLogger("torch._dynamo")
    before = log.level, log.handlers, log.propagate, log.disabled, parent.level
    try:
        log.setLevel(logging.DEBUG)
        log.handlers, log.propagate, log.disabled = [Handler()], False, False
        parent.setLevel(logging.ERROR)
        yield
    finally:
        log.setLevel(before[0])
        log.handlers, log.propagate, log.disabled = before[1:4]
        parent.setLevel(before[4])


def _parse_break(text: str) -> GraphBreak | None:
    header = _BREAK.search(text)
    if header is None:
        return None
    file, line, reason = header.groups()
    if explained := _EXPLAINED.search(text):
        reason = f"{explained[1]}: {explained[2]}"
    _, _, traceback = text.rpartition("User code traceback:\n")
    stack = _places.from_text(traceback)
    return GraphBreak(reason=reason, place=stack[-1] if stack else _places.at(file, int(line)))


def _guarded_line(text: str, file: str) -> Place | None:
    """The line that a guard ends with. The start of its path is cut off; it is completed from files that were read."""
    found = _GUARDED_LINE.findall(text)
    if not found:
        return None
    short, line, function = found[-1]  # before it may stand the first use of the value
    full = next((one for one in (file, *linecache.cache) if one.endswith(short)), short)
    return _places.at(full, int(line), function)
