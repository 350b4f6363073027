"""When an operator may be left out: its kernel is then called at once, without torch's dispatcher.

Dispatching an operator that is written in Python costs the host 10 to 25 us, and a gradient that is registered for
it about 100 us more; small kernels take less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled, forward_ad
from torch.compiler import is_compiling
from torch.jit import is_tracing
from torch.nn import Parameter

_PLAIN = (Tensor, Parameter)
_C, _functorch = torch._C, torch._C._functorch  # looked up once: the questions below are part of every eager call


def differentiates(*tensors: Tensor) -> bool:
    """Whether autograd records a call with these tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def refuse_transforms(*tensors: Tensor) -> None:
    """Below an operator, torch would drop the tangents of forward-mode differentiation and return zeros; under
    `torch.func.grad` it fails with advice for whoever wrote the operator."""
    if is_compiling():
        return
    if _has_tangent(*tensors):
        raise NotImplementedError("forward-mode differentiation: no varlen kernel has it; use reverse mode.")
    innermost = _functorch.peek_interpreter_stack()
    if innermost is not None and innermost.key() == _functorch.TransformType.Grad:
        raise NotImplementedError("torch.func.grad, vjp, jacrev: operators do not have them; use torch.autograd.grad.")


def transformed(*tensors: Tensor) -> bool:
    """Whether functorch or forward-mode differentiation asks for rules that the operators do not have."""
    if is_compiling():
        return False
    return _functorch.peek_interpreter_stack() is not None or _has_tangent(*tensors)


def only_autograd(*tensors: Tensor) -> bool:
    """Whether nothing but the kernel and autograd would see a call of an operator with these tensors.

    Those who would: a compiler or tracer, a dispatch or function mode (FLOP counters, selective checkpointing,
    `torch.device` scopes), a functorch transform, forward-mode differentiation, a profiler, a subclass of Tensor.
    """
    return (
        not is_compiling()
        and not _C._len_torch_dispatch_stack()
        and not _C._len_torch_function_stack()
        and _functorch.peek_interpreter_stack() is None
        and not _profiler_enabled()
        and not is_tracing()
        and not _has_tangent(*tensors)
        and all(map(_is_plain, tensors))
    )


def unwatched(*tensors: Tensor) -> bool:
    """Whether not even autograd would."""
    return only_autograd(*tensors) and not differentiates(*tensors)


def differentiable(
    operator: Any, kernel: Callable[..., Any], setup_context: Callable[..., None], gradient: Callable[..., Any],
    tensors: tuple[Tensor, ...], *rest: Any,
) -> Any:  # fmt: skip
    """Calls an operator, or, where nothing but autograd would see it, its kernel.

    Args:
        operator: with the gradient that is registered for it.
        kernel: what it runs.
        setup_context: as it is registered, (ctx, inputs, output).
        gradient: as it is registered, (ctx, *gradients of the outputs).
        tensors: the arguments that may require gradients, which come first.
        rest: the other arguments, all of them.
    """
    if not only_autograd(*tensors):
        return operator(*tensors, *rest)
    if not differentiates(*tensors):
        return kernel(*tensors, *rest)
    return recorded(kernel, setup_context, gradient, *tensors, *rest)


def recorded(
    kernel: Callable[..., Any], setup_context: Callable[..., None], gradient: Callable[..., Any], *inputs: Any
) -> Any:
    """Calls a kernel without its operator, for autograd alone; the arguments are those of `differentiable`."""
    return _Direct.apply(kernel, setup_context, gradient, *inputs)


class _Direct(torch.autograd.Function):
    """What `torch.library.register_autograd` makes, at a tenth of its cost on the host."""

    @staticmethod
    def forward(
        ctx: Any, kernel: Callable[..., Any], setup_context: Callable[..., None], gradient: Callable[..., Any],
        *inputs: Any,
    ) -> Any:  # fmt: skip
        output = kernel(*inputs)
        output = _own(output) if isinstance(output, Tensor) else tuple(map(_own, output))
        setup_context(ctx, inputs, output)
        ctx.gradient = gradient
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, None, None, *ctx.gradient(ctx, *grads)


def _own(x: Tensor) -> Tensor:
    """x, no longer as a view: autograd forbids changes in place of views that a function returns."""
    return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x


def _is_plain(x: Tensor) -> bool:
    """Neither of a subclass nor of an old `vmap`, whose tensors look like plain ones."""
    return type(x) in _PLAIN and not _functorch.is_legacy_batchedtensor(x)


def _has_tangent(*tensors: Tensor) -> bool:
    """Whether forward-mode differentiation is under way and one of the tensors carries a tangent."""
    inside = forward_ad._current_level >= 0  # there is no public question for it
    return inside and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
