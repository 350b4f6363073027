"""Calls of the audited function: fresh copies of the inputs, gradients, differences, tensors left behind, memory."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._copies import with_own_tensors

_REPEATS = 3


class Call(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        return [one for one in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(one, Tensor)]

    def copy(self) -> Call:
        """The same with tensors of its own, so that a call may write to them; shared tensors stay shared."""
        return Call(*with_own_tensors((self.args, self.kwargs)))


class Result(NamedTuple):
    """What one call gave: the leaves of its output, detached, and the gradients."""

    outputs: list[Any]
    gradients: list[Tensor | None]


@dataclasses.dataclass(frozen=True)
class Subject:
    """The audited function, and how it is called."""

    function: Callable[..., Any]
    parameters: tuple[Tensor, ...]
    backward: bool

    @classmethod
    def of(cls, function: Callable[..., Any], backward: bool) -> Subject:
        """With the parameters of the module that it is, or whose method it is."""
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        parameters = owner.parameters() if backward and isinstance(owner, nn.Module) else ()
        return cls(function, tuple(one for one in parameters if one.requires_grad), backward)

    def run(self, call: Call) -> Result:
        """One call; with `backward` also the gradients of inputs and parameters, from fixed gradients of the outputs.

        Nothing is copied from the host, so that it can be captured; `.grad` of nothing changes.
        """
        outputs = pytree.tree_leaves(self.function(*call.args, **call.kwargs))
        gradients: list[Tensor | None] = []
        if self.backward:
            ends = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
            starts = [*dict.fromkeys(one for one in call.tensors() if one.requires_grad), *self.parameters]
            if not ends or not starts:
                raise ValueError(
                    "backward=True: expected an output that depends on an input or parameter with requires_grad=True, "
                    "got none; set requires_grad on the inputs, or leave backward out."
                )
            gradients = list(torch.autograd.grad(ends, starts, [_weights(one) for one in ends], allow_unused=True))
        return Result([one.detach() if isinstance(one, Tensor) else one for one in outputs], gradients)

    def run_seeded(self, call: Call) -> Result:
        """`run` on a copy of the inputs, with the same random numbers each time."""
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(0)  # of the current device; torch.manual_seed would change those of all
        return self.run(call.copy())


def _weights(like: Tensor) -> Tensor:
    """Gradients of the outputs that differ by element, made on the device."""
    return torch.arange(like.numel(), device=like.device).cos().view(like.shape).to(like.dtype)


def difference(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest difference, relative to the largest value that was expected; inf where they cannot be compared."""
    if len(found) != len(expected):
        return float("inf")
    return max((_difference(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)


def _difference(found: Any, expected: Any) -> float:
    if isinstance(expected, float) and isinstance(found, float):
        return _difference(torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        comparable = isinstance(expected, (bool, int, str, type(None)))
        return 0.0 if type(found) is type(expected) and (not comparable or found == expected) else float("inf")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = found.to(wide), expected.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    if same.all():
        return 0.0
    size = b.abs().masked_fill(~b.isfinite(), 0).max().item()
    largest = (a - b).abs().masked_fill(same, 0).nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()
    return largest / size if size else largest


def tolerance(results: Sequence[Result]) -> float:
    """The square root of the eps of the least exact dtype."""
    leaves = [one for result in results for one in (*result.outputs, *result.gradients) if isinstance(one, Tensor)]
    return max((torch.finfo(one.dtype).eps ** 0.5 for one in leaves if one.is_floating_point()), default=0.0)


def leaked(subject: Subject, call: Call) -> tuple[str, ...]:
    """Shape and dtype of the tensors that every further call leaves behind."""

    def alive() -> dict[int, str]:
        subject.run_seeded(call)
        gc.collect()
        # issubclass, because isinstance would ask lazy objects for their class, which loads what they stand for.
        tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
        return {id(one): f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in tensors}

    frozen = gc.get_freeze_count()
    if not frozen:
        gc.freeze()  # what is there already need not be looked at again and again
    try:
        counts = [alive() for _ in range(_REPEATS + 1)]
    finally:
        if not frozen:
            gc.unfreeze()
    growth = min(len(after) - len(before) for before, after in itertools.pairwise(counts))
    new = [text for key, text in counts[-1].items() if key not in counts[-2]]
    return tuple(new[:growth]) if growth > 0 else ()


def peak_memory(subject: Subject, calls: Sequence[Call], device: str) -> int | None:
    """Bytes that a call holds at most on the device, above its inputs: seen by a profiler, so no counter is reset."""
    if torch.autograd._profiler_enabled():
        return None
    copies = [call.copy() for call in calls]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        for copy in copies:
            subject.run(copy)
    results = profile.profiler
    assert results is not None
    held = peak = 0
    for event in results.kineto_results.events():
        if event.name() == "[memory]" and (event.device_type() == torch.autograd.DeviceType.CPU) == (device == "cpu"):
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def device_type(calls: Sequence[Call], subject: Subject) -> str:
    """ "cuda" if any input or parameter is there, else "cpu"."""
    owner = getattr(subject.function, "__self__", subject.function)
    parameters = owner.parameters() if isinstance(owner, nn.Module) else ()
    tensors = [*parameters, *(one for call in calls for one in call.tensors())]
    return "cuda" if any(one.is_cuda for one in tensors) else "cpu"
