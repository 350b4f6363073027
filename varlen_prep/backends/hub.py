"""Kernels from the Hugging Face Hub, or from a local folder of that shape, through the `kernels` library.

The functions of `flash`, `flash3`, `flash4` and `sage` run here on a module that `kernels` loads. What is loaded is
kept by the name of the backend, for the whole process; operators look it up when they run, so that code compiled
earlier uses what was loaded last.  Nothing is loaded at import, by `backends()`, while tracing or while a CUDA graph is
captured.  Read in `kernels` 0.12 and 0.16.2.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import _machine, flash, flash3, flash4, sage
from ._record import Backend, Request
from ._sage_kernels import Kernels, find_kernels


class _Default(NamedTuple):
    """Where the kernel of a backend comes from unless the user says otherwise, and the GPUs it is built for."""

    repo: str
    version: int
    lowest: tuple[int, int]
    highest: tuple[int, int] | None = None


DEFAULTS = {
    "flash_hub": _Default("kernels-community/flash-attn2", 3, (8, 0)),
    "flash3_hub": _Default("kernels-community/flash-attn3", 1, (9, 0), (9, 0)),
    "flash4_hub": _Default("kernels-community/flash-attn4", 0, (9, 0)),
    "sage_hub": _Default("SageAttention/sage-attention", 3, (8, 0)),
}

_loaded: dict[str, Any] = {}
_lock = threading.RLock()


def load_hub_kernel(
    name: str,
    *,
    repo: str | None = None,
    version: int | None = None,
    revision: str | None = None,
    path: str | os.PathLike[str] | None = None,
    trust_remote_code: bool | list[str] = False,
) -> None:
    """Loads the kernel of a `*_hub` backend, for this process; downloads it unless it is in the local cache.

    Call it before `torch.compile` or a CUDA graph capture. Otherwise the first eager call of the backend does what
    `load_hub_kernel(name)` does. A second call replaces the kernel, also for code that is compiled already; if it
    fails, what was loaded before stays.

    Args:
        name: "flash_hub", "flash3_hub", "flash4_hub" or "sage_hub".
        repo: `owner/name` on the Hub; None: the default of `varlen_prep.backends.hub.DEFAULTS`.
        version: major version of the kernel; wins over the default. Another repository needs this or `revision`.
        revision: branch, tag or commit instead of a version.
        path: folder of a kernel on this machine (it holds `build/<variant>/`, or is such a variant) instead of `repo`.
        trust_remote_code: handed to `kernels` as it is. False: only publishers that the Hub marks as trusted. A folder
            (`path`, or the variable LOCAL_KERNELS of `kernels`) is trusted because you name it.

    Raises:
        ValueError: an unknown name; version and revision at once; another repository without either; path with any of
            the others.
        RuntimeError: `kernels` is missing or too old, or could not load the kernel; its own words are included.

    Example:
        >>> from varlen_prep import load_hub_kernel
        >>> load_hub_kernel("flash3_hub", version=1)  # doctest: +SKIP
    """
    default = _default(name)
    if version is not None and revision is not None:
        raise ValueError(
            f"version, revision: expected one of them, got version={version!r} and revision={revision!r}; a version is "
            "a stable number, a revision a branch, tag or commit."
        )
    if path is not None:
        others = {
            "repo": repo,
            "version": version,
            "revision": revision,
            "trust_remote_code": trust_remote_code or None,
        }
        if given := [other for other, value in others.items() if value is not None]:
            raise ValueError(f"path: a local folder has no {', '.join(given)}; leave out one or the other.")
        _load(name, "get_local_kernel", Path(path))
        return
    pin = {key: value for key, value in (("version", version), ("revision", revision)) if value is not None}
    if not pin and repo not in (None, default.repo):
        raise ValueError(
            f"version, revision: expected one of them for repository {repo!r}, got none; the default version "
            f"{default.version} belongs to {default.repo!r}."
        )
    trust = {"trust_remote_code": trust_remote_code} if trust_remote_code is not False else {}
    _load(name, "get_kernel", repo or default.repo, **(pin or {"version": default.version}), **trust)


def _load(name: str, loader: str, source: Any, **options: Any) -> None:
    described = " ".join([f"{source}", *(f"{key}={value!r}" for key, value in options.items())])
    with _lock:
        try:
            function = getattr(importlib.import_module("kernels"), loader)
        except (ImportError, AttributeError) as error:
            raise RuntimeError(f"{name}: no kernels.{loader} ({error}): pip install -U kernels") from error
        _check_signature(name, function, options)
        try:
            module = function(source, **options)
            _loaded[name] = _sage_kernels(module) if name == "sage_hub" else module
        except Exception as error:
            raise RuntimeError(f"{name}: could not load {described}: {type(error).__name__}: {error}") from error


def _check_signature(name: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Releases of `kernels` differ; one without `trust_remote_code` checks no publisher at all."""
    needs = {**options, "trust_remote_code": False} if function.__name__ == "get_kernel" else options
    try:
        inspect.signature(function).bind("", **needs)
    except TypeError as error:
        raise RuntimeError(
            f"{name}: kernels {_machine.version('kernels')} does not fit: its {function.__name__} "
            f"cannot be called with {', '.join(needs) or 'a folder alone'} ({error}): pip install -U 'kernels>=0.14'"
        ) from error


def _module(name: str) -> Any:
    """What is loaded for a backend; an eager call loads the default if nothing is."""
    if name not in _loaded:
        with _lock:
            if name not in _loaded:
                if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(f"{name}: {_not_loaded(name)} before the CUDA graph capture.")
                load_hub_kernel(name)
    return _loaded[name]


def _not_loaded(name: str) -> str:
    return f"its kernel is not loaded yet: call varlen_prep.load_hub_kernel({name!r})"


def _default(name: str) -> _Default:
    if name not in DEFAULTS:
        raise ValueError(f"name: expected one of {', '.join(DEFAULTS)}, got {name!r}.")
    return DEFAULTS[name]


def _missing(name: str) -> list[str]:
    found = [] if _machine.has_module("kernels") else ["package kernels is not installed: pip install kernels"]
    return found + _machine.gpu_reasons(DEFAULTS[name].lowest, DEFAULTS[name].highest)


def _refuse(name: str, of_kernel: Callable[[Request], list[str]], request: Request) -> list[str]:
    found = of_kernel(request)
    if torch.compiler.is_compiling() and name not in _loaded:
        return [*found, f"{_not_loaded(name)} before torch.compile or torch.export"]
    absent = _left_out(name)
    uses = {
        "FP16": request.dtype == torch.float16,
        "LOCAL": request.window_size != (-1, -1),
        "SOFTCAP": request.softcap != 0,
        "BACKWARD": request.backward,
        "VARLEN": True,
    }
    return found + [
        f"the loaded build leaves out {feature}" for feature, used in uses.items() if used and feature in absent
    ]


def _left_out(name: str) -> tuple[str, ...]:
    """Features that the loaded build of flash-attn 3 was made without."""
    config = getattr(getattr(_loaded.get(name), "flash_attn_config", None), "CONFIG", {})
    prefix = "FLASHATTENTION_DISABLE_"
    return tuple(
        flag[len(prefix) :] for flag, on in config.get("build_flags", {}).items() if on and flag.startswith(prefix)
    )


# The mark of torch.compiler.assume_constant_result, see `selection`.
_left_out._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _sage_kernels(module: Any) -> Kernels:
    """The Triton kernels of a module that is laid out as SageAttention 1.x or 2.x (under `triton`) is."""
    homes = [module.__name__, f"{module.__name__}.triton"]
    home = next((home for home in homes if _holds(home, "quant_per_block_varlen")), None)
    if home is None:
        raise ImportError(
            f"no varlen kernels: looked for the module quant_per_block_varlen in {' and '.join(homes)}. "
            "A build with `sageattn` alone cannot run packed sequences; name a repository or a folder that has them."
        )
    return find_kernels(home, f"of module {module.__name__}")


def _holds(package: str, module: str) -> bool:
    try:
        return importlib.util.find_spec(f"{package}.{module}") is not None
    except ModuleNotFoundError:
        return False


def _record(
    name: str, op: str, base: Backend, forward: Callable[..., Any], backward: Callable[..., Any] | None
) -> Backend:
    """The capability record of the same kernel from the Hub; `forward` and `backward` take a loader of its module."""
    module = functools.partial(_module, name)
    return dataclasses.replace(
        base,
        name=name,
        op=op,
        forward=functools.partial(forward, module),
        backward=None if backward is None else functools.partial(backward, module),
        summary=f"{base.summary}; from the Hub ({DEFAULTS[name].repo})",
        install="pip install kernels",
        missing=functools.partial(_missing, name),
        refuse=functools.partial(_refuse, name, base.refuse),
    )


FLASH_HUB = _record("flash_hub", "flash_attn_2_hub_varlen", flash.FLASH, flash.forward, flash.backward)
FLASH3_HUB = _record("flash3_hub", "flash_attn_3_hub_varlen", flash3.FLASH3, flash3.forward, flash3.backward)
FLASH4_HUB = _record("flash4_hub", "flash_attn_4_hub_varlen", flash4.FLASH4, flash4.forward, flash4.backward)
SAGE_HUB = _record("sage_hub", "sage_attn_hub_varlen", sage.SAGE, sage.forward, None)
