"""When an operator may be left out: its kernel is then called at once, without torch's dispatcher.

Dispatching an operator that is written in Python costs the host about 10 us, as much as a small kernel takes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

_PLAIN = (Tensor, Parameter)


def has_tangent(*tensors: Tensor) -> bool:
    """Whether forward-mode differentiation is under way and one of the tensors carries a tangent."""
    inside = forward_ad._current_level >= 0  # there is no public question for it
    return inside and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def unwatched(*tensors: Tensor) -> bool:
    """Whether nothing but the kernel would see a call of an operator with these tensors.

    Those who would: a compiler or tracer, a dispatch or function mode (FLOP counters, selective checkpointing,
    `torch.device` scopes), a functorch transform, a profiler, a subclass of Tensor, and differentiation.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.autograd._profiler_enabled()
        and not torch.jit.is_tracing()
        and not has_tangent(*tensors)
        and all(type(x) in _PLAIN for x in tensors)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    )
