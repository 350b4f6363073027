"""Calls kernel functions whose arguments differ from release to release."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

_ALIASES = {
    "cu_seqlens_k": ("cu_seqlens_kv",),
    "max_seqlen_k": ("max_seqlen_kv",),
    "causal": ("is_causal",),
    "return_lse": ("return_attn_probs",),
}
"""Other names that releases have used for the same argument."""


@functools.lru_cache(maxsize=1024)
def bind(
    function: Callable[..., Any],
    required: tuple[str, ...],
    optional: tuple[tuple[str, Any, Any], ...] = (),
    unused: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """`function` as one of the `required` arguments alone, by position; kept, because making it takes longer than a
    small kernel.

    Args:
        function: a kernel's Python function, or a `torch.library.custom_op`, whose function is called without its
            dispatch: an operator of this library has been dispatched already, or nothing would see it.
        required: names of the arguments that it must have.
        optional: (name, value, default). An argument that the function lacks is left out while its value is the
            default; any other value is refused, because leaving it out would change the result.
        unused: arguments that are None, where the function has them: releases give no default to some of theirs.

    Raises:
        ValueError: naming the argument that the function lacks, or that nothing is known about.
    """
    parameters = _parameters(function)
    values = {name: parameter.default for name, parameter in parameters.items()}
    names = []
    for name in required:
        found = _name_of(function, name)
        if found is None:
            raise ValueError(f"{_describe(function)} has no argument {name!r}; it takes {', '.join(sorted(values))}.")
        names.append(found)
    for name, value, default in (*((name, None, None) for name in unused), *optional):
        found = _name_of(function, name)
        if found is not None:
            values[found] = value
        elif value != default:
            raise ValueError(
                f"{_describe(function)} has no argument {name!r}, so {name}={value!r} is not possible; "
                "update the package or leave it at its default."
            )
    if unknown := [name for name in values if values[name] is inspect.Parameter.empty and name not in names]:
        raise ValueError(
            f"{_describe(function)} needs {', '.join(unknown)}: this release of the package is not one that "
            "varlen_prep knows."
        )
    order = list(values)
    filled, places = list(values.values()), [order.index(name) for name in names]
    run = _python(function)

    def call(*given: Any) -> Any:
        arguments = filled.copy()
        for place, value in zip(places, given, strict=True):
            arguments[place] = value
        return run(*arguments)

    return call


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


def _python(function: Callable[..., Any]) -> Callable[..., Any]:
    """The Python function of a `torch.library.custom_op`, or the function itself."""
    inner: Callable[..., Any] = getattr(function, "_init_fn", function)
    return inner


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """By name, in order, those that can be given by position: releases add others that keep their defaults."""
    parameters = inspect.signature(_python(function)).parameters
    return {name: one for name, one in parameters.items() if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}


@functools.lru_cache(maxsize=1024)
def _name_of(function: Callable[..., Any], name: str) -> str | None:
    """What the function calls the argument."""
    names = _parameters(function)
    return next((known for known in (name, *_ALIASES.get(name, ())) if known in names), None)


def _describe(function: Callable[..., Any]) -> str:
    inner = _python(function)
    return f"{inner.__module__}.{inner.__name__}"
