"""Inside a CUDA graph capture, transformers makes the mask decisions of eager inference.

transformers takes a stream capture for tracing. There it keeps the mask of packed sequences, because it cannot read
whether there are any, and before 5.18 also a causal mask that no padding makes necessary; either keeps SDPA from its
flash kernel. Three kinds of private functions of `transformers.masking_utils` are replaced while a context is open:
the search for packed sequences, the decisions to leave a mask out, and the question whether something is traced.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._capture import capturing

TESTED = ("5.0.0", "5.17.0", "5.25.0")
"""Versions of transformers that this module was run with. It replaces private names, which another version may lack."""

_SEARCH = "find_packed_sequence_indices"
_SKIPS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
_TRACING = "is_tracing"


class _Scope(NamedTuple):
    """One open context."""

    single: bool
    """Every row is one sequence."""


class _Thread(threading.local):
    """What this thread has open; every thread has its own."""

    def __init__(self) -> None:
        self.scopes: list[_Scope] = []  # innermost last
        self.deciding = False
        """Within a decision that needs no value from the device."""


_thread = _Thread()
_undo = contextlib.ExitStack()  # puts back what is replaced in transformers now; used with `capturing` held


@contextlib.contextmanager
def eager_mask_decisions(position_ids: Tensor | None = None) -> Iterator[None]:
    """While this thread's current stream captures, transformers masks unpadded single sequences as it does in eager.

    Packed sequences are not searched for, and where no padding mask is given, SDPA gets `attn_mask=None` and its
    `is_causal` flag in the layers in which eager inference does so; sliding-window layers keep the mask that eager
    gives them. A padding mask, and a static cache, keep what transformers does with them in a capture.

    Nothing can be read in a capture: without an argument, the caller states that no row holds several sequences. With
    `position_ids` this is looked at once, on entry; if some row does not rise by one, packed sequences stay what
    transformers makes of them, which is right for them and slow.

    Acts on the thread that entered, and only while its current stream captures; other threads that build masks
    meanwhile see transformers as it is. Contexts nest, the inner one decides. One thread at a time is inside: others
    wait, as torch allows one capture at a time in a process. After the last exit, also by an exception, transformers is
    as it was; a replacement that somebody else put in meanwhile stays.

    Args:
        position_ids: int (..., seq), on any device (a GPU is read once), the positions of what will be captured; None:
            every row is one sequence.

    Raises:
        ImportError: transformers is missing.
        RuntimeError: transformers lacks something that is replaced here, or positions are given while capturing.

    Example:
        >>> from varlen_prep.graphs import eager_mask_decisions
        >>> with eager_mask_decisions():
        ...     pass  # with torch.cuda.graph(graph): logits = model(input_ids, position_ids=position_ids).logits
    """
    module = _masking_utils()
    scope = _Scope(single=position_ids is None or _rises_by_one(position_ids))
    with capturing:
        if not _thread.scopes:
            _install(module)
        _thread.scopes.append(scope)
        try:
            yield
        finally:
            _thread.scopes[:] = [other for other in _thread.scopes if other is not scope]
            if not _thread.scopes:
                _undo.close()


def _is_capturing() -> bool:
    """Whether the current stream of this thread captures."""
    # Asked first, because builds without CUDA raise at the second question.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _rises_by_one(position_ids: Tensor) -> bool:
    if position_ids.is_cuda and _is_capturing():
        raise RuntimeError(
            "position_ids would be read from the device, which a CUDA graph capture does not allow; enter "
            "eager_mask_decisions before the capture, or without positions if every row is one sequence."
        )
    return bool((position_ids.diff(dim=-1) == 1).all())


def _masking_utils() -> ModuleType:
    """transformers' module of masks, after a look at whether it has all that is replaced here."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"eager_mask_decisions needs transformers: pip install 'transformers=={TESTED[-1]}'."
        ) from error
    module = importlib.import_module("transformers.masking_utils")
    if missing := [name for name in (_SEARCH, *_SKIPS, _TRACING) if not hasattr(module, name)]:
        raise RuntimeError(
            f"transformers {transformers.__version__} has no {', '.join(missing)} in transformers.masking_utils; "
            f"eager_mask_decisions was run with transformers {', '.join(TESTED)}: install one of these."
        )
    return module


def _install(module: ModuleType) -> None:
    _replace(module, _SEARCH, _search)
    for name in _SKIPS:
        _replace(module, name, _skip)
    _replace(module, _TRACING, _tracing)


def _replace(module: ModuleType, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(module, name)
    ours = make(original)

    def restore() -> None:
        # What somebody put over ours stays; ours, which it may call, then passes every call on.
        if getattr(module, name) is ours:
            setattr(module, name, original)

    setattr(module, name, ours)
    _undo.callback(restore)


def _acts() -> bool:
    """Whether this thread captures rows of one sequence each inside a context."""
    # Compilers trace into the replacements: they must see transformers as it is.
    if torch.compiler.is_compiling() or not _thread.scopes:
        return False
    return _thread.scopes[-1].single and _is_capturing()


def _search(original: Callable[..., Any]) -> Callable[..., Any]:
    def find_packed_sequence_indices(*args: Any, **kwargs: Any) -> Any:
        return None if _acts() else original(*args, **kwargs)

    return find_packed_sequence_indices


def _skip(original: Callable[..., Any]) -> Callable[..., Any]:
    """A decision to leave a mask out, made as in eager where it depends on host values alone."""

    def ignore_mask(*args: Any, **kwargs: Any) -> Any:
        # A padding mask decides by its values, and so does the offset of a static cache.
        if not _acts() or any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
            return original(*args, **kwargs)
        _thread.deciding = True
        try:
            return original(*args, **kwargs)
        finally:
            _thread.deciding = False

    return ignore_mask


def _tracing(original: Callable[..., Any]) -> Callable[..., Any]:
    def is_tracing(*args: Any, **kwargs: Any) -> Any:
        return False if _thread.deciding else original(*args, **kwargs)

    return is_tracing
