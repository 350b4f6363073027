"""Which backend runs a call: by name, by scope, or automatically; and what can run here and why not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .backends import AUTOMATIC, REGISTRY, Backend, Request


class _Scope(threading.local):
    """The backend of the innermost `use_backend` on this thread.

    torch.compile guards on an attribute of the instance. It cannot trace a context variable, does not guard on a class
    default, and compiles again for an attribute that appears or goes.
    """

    def __init__(self) -> None:
        self.name: str | None = None


_scope = _Scope()
_looked: dict[Callable[[], list[str]], tuple[str, ...]] = {}
_looks = 0


class BackendState(NamedTuple):
    """One row of `backends()`."""

    name: str
    usable: bool
    reasons: tuple[str, ...]
    """Every reason why it cannot run on this machine; empty when usable."""
    install: str | None
    """The pip line that installs its package; None: nothing to install."""
    summary: str


def backends() -> list[BackendState]:
    """Every backend of the library, usable here or not, with all reasons why not; looks for packages anew.

    Example:
        >>> from varlen_prep import backends
        >>> [state.name for state in backends() if state.usable][:2]
        ['native', 'reference']
    """
    rows = []
    for backend in REGISTRY.values():
        reasons = _missing(backend.name, True)
        rows.append(BackendState(backend.name, not reasons, reasons, backend.install, backend.summary))
    return rows


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within this scope, on this thread, `varlen_attention` without `backend=` uses the named backend.

    Scopes nest; an explicit `backend=` wins. A compiled function is compiled once for each choice.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> from varlen_prep import use_backend
        >>> with use_backend("reference"):
        ...     pass
    """
    find(name)
    before = _scope.name
    _scope.name = name
    try:
        yield
    finally:
        _scope.name = before


def state() -> tuple[str | None, int]:
    """What a choice depends on besides the call: the scope, and how often this process has looked for packages."""
    return _scope.name, _looks


def find(name: str) -> Backend:
    """The backend of that name, or an error that lists the known ones."""
    if name not in REGISTRY:
        raise ValueError(f"backend: expected one of {', '.join(REGISTRY)}, got {name!r}.")
    return REGISTRY[name]


def select(name: str | None, request: Request) -> Backend:
    """The backend for a call. A named one (argument or scope) runs or raises; it is never replaced.

    Without a name the first that can run the call is taken, in the order measured for the GPU; of packages that are
    installed meanwhile it learns from `backends()`.
    """
    name = name if name is not None else _scope.name
    if name is not None:
        backend = find(name)
        if reasons := _reasons(backend, request, True):
            raise ValueError(f"backend {name!r} cannot run this call: {_text(backend, reasons)}. {_advice(request)}")
        return backend
    order = automatic_order(request.device.type, request.device.index)
    for candidate in order:
        if not _reasons(REGISTRY[candidate], request):
            return REGISTRY[candidate]
    tried = [f"{name}: {_text(REGISTRY[name], _reasons(REGISTRY[name], request))}" for name in order]
    raise ValueError(f"no backend that is chosen by itself can run this call: {' | '.join(tried)}. {_advice(request)}")


def _reasons(backend: Backend, request: Request, again: bool = False) -> list[str]:
    """Every reason why this call cannot run here, of the machine and of the call."""
    return [*_missing(backend.name, again), *backend.reasons(request)]


def _missing(name: str, again: bool = False) -> tuple[str, ...]:
    """What the machine lacks for a backend; looking for packages cannot be traced, so tracing takes the answer.

    The answer is kept, because a look costs more than a small call; with `again` a lack is looked for anew.
    """
    global _looks
    missing = REGISTRY[name].missing
    reasons = _looked.get(missing)
    if reasons is None or (again and reasons):
        _looks += 1
        reasons = _looked[missing] = tuple(missing())
    return reasons


def automatic_order(device_type: str, index: int | None = None) -> tuple[str, ...]:
    """The names that `backend=None` tries on a device, best first.

    Example:
        >>> from varlen_prep.selection import automatic_order
        >>> automatic_order("cpu")
        ('native',)
    """
    if device_type != "cuda" or torch.version.hip is not None:
        return ("native",)
    return AUTOMATIC.get(torch.cuda.get_device_capability(index), ("native",))


# The mark of torch.compiler.assume_constant_result, which would import the whole compiler for those who never compile.
for _function in (_missing, automatic_order):
    setattr(_function, "_dynamo_marked_constant", True)  # noqa: B010


def _text(backend: Backend, reasons: list[str]) -> str:
    """The reasons, with the line that installs the package where it is the package that lacks."""
    lacks = any("not installed" in reason for reason in reasons) and backend.install
    return "; ".join(reasons) + (f" (to install it: {backend.install})" if lacks else "")


def _advice(request: Request) -> str:
    able = [backend.name for backend in REGISTRY.values() if not _reasons(backend, request)]
    return f"Backends that can, by name (backend=...): {', '.join(able) or 'none'}."
