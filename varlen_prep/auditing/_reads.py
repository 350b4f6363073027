"""Where the host reads the device: nodes of traced graphs, operators of eager code, and CUDA's own warnings."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import _places
from ._report import HostRead, Place

_READS = {
    "_local_scalar_dense": "item",
    "is_nonzero": "item",
    "nonzero": "nonzero",
    "nonzero_numpy": "nonzero",
    "masked_select": "masked_select",
    "_unique": "unique",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "unique_dim_consecutive": "unique",
    "bincount": "bincount",
    "equal": "equal",
}
"""Operators whose result is on the host or has a size that the values decide, and what users call them."""

_WAIT = "wait for the GPU"


class Reads:
    """The reads that were found, one for each line."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._found: dict[Place, HostRead] = {}

    def add(self, operation: str, stack: tuple[Place, ...], seen: str) -> None:
        place = stack[-1] if stack else _places.UNKNOWN
        caller = stack[0] if len(stack) > 1 else None
        known = self._found.get(place)
        if known is None:
            self._found[place] = HostRead(operation=operation, place=place, caller=caller, seen=(seen,))
            return
        names, where = known.operation.split(", "), known.seen
        if operation not in names and operation != _WAIT:  # which operation waits is known already
            names.append(operation)
        where = where if seen in where else (*where, seen)
        self._found[place] = dataclasses.replace(known, operation=", ".join(names), seen=where)

    def add_operator(self, operator: Any, args: Any, kwargs: Any, stack: Callable[[], Any], seen: str) -> None:
        """Adds a call of an aten operator if it reads; `seen` is "graph" or "eager"."""
        read = operation(operator, args, kwargs)
        if read is None:
            return
        name, tensor = read
        if tensor.device.type == self._device:  # a read of a CPU tensor beside a model on a GPU waits for nothing
            self.add(name, stack(), "cuda" if seen == "eager" and tensor.is_cuda else seen)

    def found(self) -> tuple[HostRead, ...]:
        """All of them. A wait inside of compiled code has no line; it is left out where a line is known that waits."""
        known = [read for place, read in self._found.items() if place != _places.UNKNOWN]
        waits = any({"graph", "cuda"} & {*read.seen} for read in known)
        return tuple(known if waits else self._found.values())


def operation(operator: Any, args: Any, kwargs: Any) -> tuple[str, Tensor] | None:
    """What a call of an aten operator reads, and from which tensor; None: nothing.

    Args:
        operator: an `OpOverload`.
        args: its arguments; real tensors, fakes, or nodes of a graph that hold fakes.
        kwargs: its keyword arguments.
    """
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten":
        return None
    args, kwargs = _values(args), _values(kwargs)
    name = operator._schema.name.removeprefix("aten::")
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if first is None:
        return None
    if name in _READS:
        return _READS[name], first
    if name == "repeat_interleave" and kwargs.get("output_size") is None and operator._overloadname == "Tensor":
        return "repeat_interleave without output_size", first
    if name in ("index", "index_put", "index_put_", "_unsafe_index"):
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                return "bool index", index
    if name == "_to_copy" and first.device.type != "cpu" and torch.device(kwargs.get("device") or "meta").type == "cpu":
        return "copy to the CPU", first
    return None


def _values(args: Any) -> Any:
    """Nodes of a graph replaced by the fakes that they hold."""
    return torch.fx.node.map_arg(args, lambda node: node.meta.get("val"))


class _Operators(TorchDispatchMode):
    """Sees every aten operator, also those inside of functions written in C++, and those of a backward pass."""

    supports_higher_order_operators = True

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._reads.add_operator(func, args, kwargs, _places.from_running_code, "eager")
        return func(*args, **kwargs)


class _Methods(TorchFunctionMode):
    """Sees the methods that read the memory of a CPU tensor without an operator."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and args[0].device.type == "cpu":
            self._reads.add_operator(
                torch.ops.aten._local_scalar_dense.default, args, {}, _places.from_running_code, "eager"
            )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def eager_reads(reads: Reads) -> Iterator[None]:
    """Finds the reads of eager code within."""
    with _Methods(reads), _Operators(reads):
        yield


@contextlib.contextmanager
def cuda_waits(reads: Reads) -> Iterator[None]:
    """Finds where the host waits for the GPU within, as CUDA's sync debug mode sees it; nothing if no GPU is in use."""
    if not torch.cuda.is_initialized():
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Warning | str, *rest: Any, **options: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                reads.add(_WAIT, _places.from_running_code(), "cuda")
            else:
                shown(message, *rest, **options)

        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
