"""Calls kernel functions whose keyword arguments differ from release to release."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_ALIASES = {
    "cu_seqlens_k": ("cu_seqlens_kv",),
    "max_seqlen_k": ("max_seqlen_kv",),
    "causal": ("is_causal",),
    "return_lse": ("return_attn_probs",),
}
"""Other names that releases have used for the same argument."""


def call(
    function: Callable[..., Any], optional: dict[str, tuple[Any, Any]], unused: tuple[str, ...] = (), /, **required: Any
) -> Any:
    """Calls `function` by keyword, under the names that it has.

    Args:
        function: a kernel's Python function, or a `torch.library.custom_op`.
        optional: name to (value, default), hashable. An argument that the function lacks is left out while its value is
            the default; any other value is refused, because leaving it out would change the result.
        unused: arguments that are None, where the function has them: releases give no default to some of theirs.
        required: arguments that it must have.

    Raises:
        ValueError: naming the argument that the function lacks.
    """
    names, bound = _bind(function, tuple(required), tuple(optional.items()), unused)
    return bound(**dict(zip(names, required.values(), strict=True)))


@functools.lru_cache(maxsize=1024)
def _bind(
    function: Callable[..., Any],
    required: tuple[str, ...],
    optional: tuple[tuple[str, tuple[Any, Any]], ...],
    unused: tuple[str, ...],
) -> tuple[tuple[str, ...], Callable[..., Any]]:
    """What the function calls the required arguments, and the function with all others; kept, because finding them
    costs as much as a small call."""
    names, constant = [], {}
    for name in required:
        found = _name_of(function, name)
        if found is None:
            takes = ", ".join(sorted(_parameters(function)))
            raise ValueError(f"{_describe(function)} has no argument {name!r}; it takes {takes}.")
        names.append(found)
    for name, (value, default) in (*((name, (None, None)) for name in unused), *optional):
        found = _name_of(function, name)
        if found is not None:
            constant[found] = value
        elif value != default:
            raise ValueError(
                f"{_describe(function)} has no argument {name!r}, so {name}={value!r} is not possible; "
                "update the package or leave it at its default."
            )
    return tuple(names), functools.partial(function, **constant)


def has(function: Callable[..., Any], name: str) -> bool:
    """Whether the function takes the argument, under any of its names."""
    return _name_of(function, name) is not None


def find(module: Any, *paths: str) -> Any:
    """The first of the dotted `paths` that the module has, or an error that lists what was looked for."""
    for path in paths:
        target = module
        for part in path.split("."):
            target = getattr(target, part, None)
        if target is not None:
            return target
    raise ImportError(
        f"{getattr(module, '__name__', module)} has none of {', '.join(paths)}: "
        "this release of the package is not one that varlen_prep knows."
    )


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(getattr(function, "_init_fn", function)).parameters)


@functools.lru_cache(maxsize=1024)
def _name_of(function: Callable[..., Any], name: str) -> str | None:
    """What the function calls the argument."""
    names = _parameters(function)
    return next((known for known in (name, *_ALIASES.get(name, ())) if known in names), None)


def _describe(function: Callable[..., Any]) -> str:
    inner = getattr(function, "_init_fn", function)
    return f"{inner.__module__}.{inner.__name__}"
