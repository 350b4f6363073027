"""Turns routes on and off: which entries of diffusers' table of backends belong to this library now.

B rows, S_q and S_kv padded lengths, H heads.

diffusers finds a backend by name in one table of the process; while routes are on, the entries of its varlen names are
replaced, so `model.set_attention_backend(name)` and `attention_backend(name)` work unchanged. Turn routes on and off
while no other thread runs a model.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from varlen_prep import backends

from ._attention import ARGUMENTS, Layout, attention
from ._memo import shared_by_layers

TESTED = ("0.39.0", "0.40.0", "0.41.0", "0.42.1")
"""Versions of diffusers that this module was run with. It replaces private names, which another version may lack."""

BACKENDS: Mapping[str, str] = {
    "flash_varlen": "flash",
    "flash_varlen_hub": "flash_hub",
    "_flash_varlen_3": "flash3",
    "_flash_3_varlen_hub": "flash3_hub",
    "sage_varlen": "sage",
}
"""Names of diffusers that can be routed, and the backend of this library that runs the same kernel."""

_REGISTRY = "_AttentionBackendRegistry"
_CHECKS = ("_check_attention_backend_requirements", "_maybe_download_kernel_for_backend")
_TABLES = ("_backends", "_constraints", "_supported_arg_names", "_supports_context_parallel", "_active_backend")


class _Routes(NamedTuple):
    """One scope or installation."""

    backends: dict[str, str]
    layout: Layout
    active: Any
    """diffusers' active backend when these routes were turned on."""


_lock = threading.RLock()
_scopes: list[_Routes] = []  # innermost last; an installation lies below all scopes
_installed: _Routes | None = None
_undo = contextlib.ExitStack()  # puts back everything that is replaced in diffusers now


@contextlib.contextmanager
def route(backend: str | Mapping[str, str] | None = None, *, layout: Layout = "packed") -> Iterator[None]:
    """Within this scope, diffusers' varlen attention backends run through this library.

    Key masks are bool and broadcast over queries and heads: (S_kv,), (B or 1, S_kv), (B or 1, 1, S_kv),
    (B or 1, 1, 1, S_kv), or expanded from these. Nothing is read from the device. With `return_lse=True` the
    log-sum-exp is float32 (B, S_q, H), the order that diffusers' own operators exchange (flash kernels: (B, H, S_q)).
    Causal masks are aligned to the bottom-right corner, as in flash-attn. Fewer key than query heads are always
    accepted, with `enable_gqa` or without.

    Args:
        backend: name of a backend of this library for all five names of diffusers; or a mapping from names of diffusers
            to backends, which leaves the other names alone (`{"flash_varlen": "flash4"}`); None: `BACKENDS`, the
            kernel that each name stands for.
        layout: "packed", or "in_place" where every row of a mask has one contiguous run of True.

    Scopes nest, and the inner one wins. On exit, also after an exception, diffusers is as it was; if its active backend
    is then one of these names, it becomes what it was on entry. Processors of a model keep the name that
    `set_attention_backend` gave them: use `model.reset_attention_backend()`.

    Raises:
        ValueError: a name that diffusers or this library does not have. While routed: a mask that differs per query or
            per head, a mask together with `is_causal` or a window, dropout, context parallelism, or anything that the
            kernel cannot do.
        RuntimeError: diffusers lacks something that is replaced here. While routed: the backend of a name that
            diffusers is asked to use cannot run on this machine.

    Example:
        >>> import torch
        >>> from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
        >>> from varlen_prep.integrations.diffusers import route
        >>> q = k = v = torch.ones(2, 5, 4, 8)
        >>> mask = torch.tensor([[True, True, False, False, True], [True] * 5])
        >>> with route("native"), attention_backend("flash_varlen"):
        ...     dispatch_attention_fn(q, k, v, attn_mask=mask).shape
        torch.Size([2, 5, 4, 8])
    """
    routes = _routes(backend, layout)
    try:
        with _lock:
            _scopes.append(routes)
            _apply()
        yield
    finally:
        with _lock:
            _scopes[:] = [other for other in _scopes if other is not routes]
            _apply()
            _deactivate(routes)


def install(backend: str | Mapping[str, str] | None = None, *, layout: Layout = "packed") -> None:
    """Routes diffusers' varlen attention backends until `uninstall`; arguments and errors are those of `route`.

    A second call replaces the first one's arguments; a `route` scope wins over both.

    Example:
        >>> from varlen_prep.integrations.diffusers import install, uninstall
        >>> install("native")
        >>> uninstall()
    """
    global _installed
    with _lock:
        routes = _routes(backend, layout)
        before, _installed = _installed, routes if _installed is None else routes._replace(active=_installed.active)
        try:
            _apply()
        except BaseException:
            _installed = before
            _apply()
            raise


def uninstall() -> None:
    """Ends `install` and puts diffusers back; without an installation it does nothing."""
    global _installed
    with _lock:
        if _installed is not None:
            routes, _installed = _installed, None
            _apply()
            _deactivate(routes)


def _routes(backend: str | Mapping[str, str] | None, layout: Layout) -> _Routes:
    if layout not in ("packed", "in_place"):
        raise ValueError(f"layout: expected 'packed' or 'in_place', got {layout!r}.")
    if backend is None:
        table = dict(BACKENDS)
    else:
        table = dict.fromkeys(BACKENDS, backend) if isinstance(backend, str) else dict(backend)
    if unknown := [name for name in table if name not in BACKENDS]:
        raise ValueError(f"backend: expected names among {', '.join(BACKENDS)}, got {unknown}.")
    known = [state.name for state in backends()]
    if backend is not None and (unknown := [name for name in table.values() if name not in known]):
        raise ValueError(f"backend: expected one of {', '.join(known)}, got {unknown[0]!r}.")
    return _Routes(table, layout, _registry()._active_backend)


def _dispatch() -> Any:
    """diffusers' module of attention backends, after a look at whether it has all that is replaced here."""
    try:
        diffusers = importlib.import_module("diffusers")
    except ImportError as error:
        raise ImportError(f"this integration needs diffusers: pip install 'diffusers=={TESTED[-1]}'.") from error
    module = importlib.import_module("diffusers.models.attention_dispatch")
    missing = [name for name in (_REGISTRY, "AttentionBackendName", *_CHECKS) if not hasattr(module, name)]
    if not missing:
        missing += [f"{_REGISTRY}.{name}" for name in _TABLES if not hasattr(module._AttentionBackendRegistry, name)]
        names = {member.value for member in module.AttentionBackendName}
        missing += [f"the backend {name!r}" for name in BACKENDS if name not in names]
    if missing:
        raise RuntimeError(
            f"diffusers {diffusers.__version__} has no {', '.join(missing)}; this integration was run with diffusers "
            f"{', '.join(TESTED)}: install one of these."
        )
    return module


def _registry() -> Any:
    return _dispatch()._AttentionBackendRegistry


def _apply() -> None:
    """Makes diffusers agree with `_installed` and `_scopes`."""
    _undo.close()
    routes: dict[str, tuple[str, Layout]] = {}
    for one in [_installed, *_scopes]:
        if one is not None:
            routes.update({name: (backend, one.layout) for name, backend in one.backends.items()})
    if not routes:
        return
    module, registry = _dispatch(), _registry()
    _undo.enter_context(shared_by_layers(importlib.import_module("diffusers.models.modeling_utils").ModelMixin))
    for name, (backend, layout) in routes.items():
        key = module.AttentionBackendName(name)
        _replace(registry._backends, key, attention(backend, layout))
        _replace(registry._constraints, key, [])
        _replace(registry._supported_arg_names, key, set(ARGUMENTS))
        if name in registry._supports_context_parallel:
            registry._supports_context_parallel.remove(name)
            _undo.callback(registry._supports_context_parallel.add, name)
    check, download = (getattr(module, name) for name in _CHECKS)
    for name, function in zip(_CHECKS, (_requirements(check, routes), _unless_routed(download, routes)), strict=True):
        _undo.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, function)


def _replace(table: dict[Any, Any], key: Any, value: Any) -> None:
    _undo.callback(table.__setitem__, key, table[key])
    table[key] = value


def _deactivate(routes: _Routes) -> None:
    """The active backend must not stay on a name that only worked through these routes."""
    registry = _registry()
    if registry._active_backend in routes.backends:
        registry.set_active_backend(routes.active)


def _requirements(check: Callable[[Any], None], routes: Mapping[str, tuple[str, Layout]]) -> Callable[[Any], None]:
    """diffusers' check of what a backend needs, with this library's check for routed names."""

    def check_requirements(backend: Any) -> None:
        if backend not in routes:
            return check(backend)
        name = routes[backend][0]
        states = {state.name: state for state in backends()}
        advice = f"route {backend.value!r} to another one of {', '.join(states)}, for example route('native')"
        if name not in states:
            raise RuntimeError(f"backend {name!r} is not part of this version of varlen_prep; {advice}.")
        if reasons := states[name].reasons:
            install = f"{states[name].install}, or " if states[name].install else ""
            raise RuntimeError(f"backend {name!r} cannot run here: {'; '.join(reasons)}. Do {install}{advice}.")

    return check_requirements


def _unless_routed(download: Callable[[Any], None], routes: Mapping[str, Any]) -> Callable[[Any], None]:
    """diffusers' download of a hub kernel, which routed names do not need."""

    def maybe_download(backend: Any) -> None:
        if backend not in routes:
            download(backend)

    return maybe_download
