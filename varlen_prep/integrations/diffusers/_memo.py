"""One preparation for all layers of a model forward that attend with the same mask and shape.

A memo exists only from the beginning to the end of the outermost model forward of a thread, so every forward, every
CUDA graph capture and every trace prepares anew. Inside it a mask counts as the same only if it is the same object and
has not been changed in place: a tensor's version counter tells. Outside of a model forward nothing is kept.

Under `torch.compile` the layers share while they are traced, because the compiler merges equal preparations only in
graphs with a backward. Tracing hides version counters, so they are read there from the tracer's own fake tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime
from torch.fx.experimental.symbolic_shapes import statically_known_true

from varlen_prep import VarlenMetadata, prepare_varlen

_MOST = 8  # preparations kept at a time: a model that makes a new mask in each layer must not collect them all


class _Scope(threading.local):
    """The memos of this thread. Set for each thread here: torch.compile guards on whether an attribute exists."""

    def __init__(self) -> None:
        self.eager: _Memo | None = None
        self.traced: list[_Entry] | None = None


_scope = _Scope()


class _Memo(NamedTuple):
    entries: list[_Entry]
    capturing: bool
    """The forward as a whole is being captured; a capture that starts inside a forward must prepare for itself."""


class _Entry(NamedTuple):
    key: tuple[Any, ...]
    sizes: tuple[int, int, int]
    mask: Tensor | None  # held, so that its id stays its own
    meta: VarlenMetadata


def prepare(query: Tensor, key: Tensor, mask: Tensor | None, layout: Literal["packed", "in_place"]) -> VarlenMetadata:
    """`prepare_varlen` without a read of the device, shared within a model forward.

    Args:
        query: (B, S_q, H, D).
        key: (B, S_kv, H_kv, D).
        mask: bool key mask as `prepare_varlen` takes it, or None.
        layout: as for `prepare_varlen`.
    """
    sizes = (query.shape[0], query.shape[1], key.shape[1])
    entries = _entries()
    identity = _identity(mask, query) if entries is not None else None
    signature = (identity, layout, query.device)
    if entries is not None and identity is not None:
        for entry in entries:
            # Sizes that are not known to be equal count as different, without a guard that would add a graph.
            if entry.key == signature and all(
                statically_known_true(a == b) for a, b in zip(entry.sizes, sizes, strict=True)
            ):
                return entry.meta
    meta = prepare_varlen(*sizes, mask, max_seqlen_k=sizes[2], layout=layout, device=query.device)
    if entries is not None and identity is not None:
        if len(entries) == _MOST:
            del entries[0]
        entries.append(_Entry(signature, sizes, mask, meta))
    return meta


@contextlib.contextmanager
def shared_by_layers(model_class: Any) -> Iterator[None]:
    """While this is on, layers of one forward of a model of this class share their preparations.

    `_call_impl` is replaced and not `__call__`, which a compiled model binds when it is compiled.
    """
    before, own = model_class._call_impl, vars(model_class).get("_call_impl")

    def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        traced = torch.compiler.is_dynamo_compiling()
        if (_scope.traced if traced else _scope.eager) is not None:  # a model inside a model
            return before(self, *args, **kwargs)
        if traced:
            _scope.traced = []
        else:
            _scope.eager = _Memo([], _capturing())
        try:
            return before(self, *args, **kwargs)
        finally:
            if traced:
                _scope.traced = None
            else:
                _scope.eager = None

    model_class._call_impl = _call_impl
    try:
        yield
    finally:
        if own is None:
            del model_class._call_impl
        else:
            model_class._call_impl = own


def _entries() -> list[_Entry] | None:
    """What this forward has prepared; None outside of a forward, or where nothing may be shared."""
    if torch.compiler.is_dynamo_compiling():
        # A block that is compiled by itself inside an eager forward has no memo: it must not bake the eager one in.
        return _scope.traced
    eager = _scope.eager
    return eager.entries if eager is not None and eager.capturing == _capturing() else None


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _identity(mask: Tensor | None, query: Tensor) -> tuple[int, ...] | None:
    """Equal for equal contents of a mask within a forward; None where changes in place cannot be seen."""
    if torch.compiler.is_dynamo_compiling():
        anchor = query if mask is None else mask  # noqa: F841, read by _look
        comptime(_look)
        trace, tensor, version = _looked()
        if version < 0:
            return None
        return (trace,) if mask is None else (trace, tensor, version)
    inference = torch.is_inference_mode_enabled()  # what is made in this mode should not be used outside of it
    if mask is None:
        return (inference,)
    return None if mask.is_inference() else (inference, id(mask), mask._version)  # inference tensors have no versions


_numbers = itertools.count()
_seen = threading.local()


def _look(context: Any) -> None:
    """Runs while `_identity` is traced: which trace, which tensor and which version of it `anchor` is.

    Numbers are never used twice, so what a broken graph leaves behind cannot match in the graph that resumes it.
    """
    fake = context.get_local("anchor").as_fake()
    trace, tensor = (vars(x).setdefault("_varlen_prep_number", next(_numbers)) for x in (fake.fake_mode, fake))
    _seen.identity = (trace, tensor, -1 if fake.is_inference() else fake._version)


@torch.compiler.assume_constant_result
def _looked() -> tuple[int, int, int]:
    return _seen.identity
