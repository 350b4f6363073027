"""Lines of the user's code: out of a running stack, and out of the text that torch keeps with graphs and logs."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ._report import Place

_HERE = Path(__file__).parent
_CALLERS = (str(_HERE / "_running.py"), str(_HERE / "_compiling.py"))
"""The modules that call the audited function: its code begins below them."""
# A wait for the GPU is told as a warning, so Python's own frames lie between it and its line.
_NOT_THE_USERS = (
    str(_HERE), str(Path(torch.__file__).parent), warnings.__file__, "<eval_with_key>", "<string>", "<frozen",
)  # fmt: skip
_FRAME = re.compile(r'File "(.+?)", line (\d+)(?:, in ([^\s,]+))?')
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
UNKNOWN = Place(file="", line=0, function="", source="")
"""Where no line is known: work of the autograd engine and of generated code."""


def from_running_code() -> tuple[Place, ...]:
    """The user's frames that lead to this call, outermost first."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return _of_user(frames[::-1])


def from_text(text: str | None) -> tuple[Place, ...]:
    """The user's frames in a traceback that was printed, outermost first."""
    return _of_user([(file, int(line), function or "") for file, line, function in _FRAME.findall(text or "")])


def at(file: str, line: int, function: str = "") -> Place:
    """A place with its line of source, where the file can be read."""
    if resumed := _RESUMED.fullmatch(function):  # what the compiler calls the rest of a function after a break
        function = resumed[1]
    return Place(file=file, line=line, function=function, source=linecache.getline(file, line).strip())


def of_function(function: Callable[..., Any]) -> Place:
    """Where a callable is defined; unknown where it has no Python code."""
    method = getattr(function, "forward", function)
    code = getattr(inspect.unwrap(method), "__code__", None)
    return UNKNOWN if code is None else at(code.co_filename, code.co_firstlineno, code.co_name)


def is_of_user(file: str) -> bool:
    """Not of torch, not generated, not of the audit itself."""
    return not file.startswith(_NOT_THE_USERS)


def _of_user(frames: list[tuple[str, int, str]]) -> tuple[Place, ...]:
    """The user's frames below the call of the audited function."""
    calls = [i for i, (file, *_) in enumerate(frames) if file in _CALLERS]
    inner = frames[calls[-1] + 1 :] if calls else frames
    return tuple(at(*frame) for frame in inner if is_of_user(frame[0]))
