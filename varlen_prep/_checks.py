"""Checks on arguments and on tensor values, with the same error texts everywhere.

Sizes and types are checked on the host. Values of tensors are never read from a GPU: there the check becomes a
device-side assert, which stops the program instead of letting a wrong offset through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1


def require(condition: Tensor, message: str) -> None:
    """Fails with `message` unless the one-element bool tensor `condition` holds.

    On CPU this is a `ValueError`. On a GPU it is a device-side assert, and under `torch.compile` an assert node
    (`RuntimeError` on CPU): both stop the program without a read by the host.
    """
    if condition.device.type == "cpu" and not torch.compiler.is_compiling():
        if not bool(condition):
            raise ValueError(message)
    else:
        torch._assert_async(condition, message)


def check_size(name: str, value: Any) -> None:
    """A size or a maximum is a host int (a SymInt while tracing), never a tensor, and not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        advice = "give a bound that is known on the host, or read it once with int(...)"
        if not isinstance(value, Tensor):
            advice = "convert it with int(...)"
        raise TypeError(f"{name}: expected a host int, got {type(value).__name__}; {advice}.")
    if torch.compiler.is_compiling():
        torch._check(value >= 0)  # it may be a number that was read from the device
    elif value < 0:
        raise ValueError(f"{name}: expected an int >= 0, got {value}.")


def check_int32_offsets(name: str, rows: int) -> None:
    """Offsets are int32: refuse a row count that they cannot hold."""
    if rows > INT32_MAX:
        raise ValueError(
            f"{name}: offsets are int32 and hold at most {INT32_MAX} rows, got {rows}; split the batch into several "
            "calls."
        )


def check_bound(name: str, bound: int, limit: int | None, lengths: Callable[[], Tensor]) -> None:
    """A bound may be loose, never too small: rows past it would silently be left out by the kernels.

    `limit` is a length that no sequence can pass (host int) or None. A bound of at least `limit` needs no look at the
    values; a smaller one is compared with `lengths()` (ints, any shape, on the device).
    """
    check_size(name, bound)
    if limit is not None and surely(bound >= limit):
        return
    require(
        (lengths() <= bound).all(),
        f"{name}: the bound is smaller than the longest sequence; pass a bound that no sequence exceeds.",
    )


def surely(condition: Any) -> bool:
    """Whether a comparison of sizes holds for certain; traced sizes are not guarded on, which would compile again."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads much that eager code never needs

    return statically_known_true(condition)


def read_ints(values: Tensor, name: str, bound: str, limit: int) -> list[int]:
    """Reads a small int tensor on the host: the one documented sync of the library.

    `name` is what is wanted and `bound` the argument that makes the read unnecessary; both go into the error that is
    raised inside a CUDA graph capture, where nothing can be read. Values are in [0, limit], which the compiler is told.
    """
    if values.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} would be read from the device, which a CUDA graph capture does not allow; "
            f"give {bound} (a host int that no value exceeds), or prepare the metadata before the capture."
        )
    read: list[int] = values.tolist() if values.ndim > 0 else [values.item()]  # type: ignore[list-item]
    for value in read:
        torch._check(value >= 0)
        torch._check(value <= limit)
    return read
