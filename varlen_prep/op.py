"""One operator schema for every kernel: definition, fake, autograd, FLOP formula and vmap refusal.

T packed rows, H heads, D head size, N sequences.  A backend brings two plain functions; this module makes of them
`varlen_prep::<op>` and `varlen_prep::<op>_backward`, which trace, differentiate and can be named in the save list of
selective activation checkpointing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ._checks import INT32_MAX
from ._direct import recorded, refuse_transforms, unwatched
from .backends import REGISTRY, Arguments, Backend, lse_dtype

NAMESPACE = "varlen_prep"
_ARGUMENTS = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, "
    "int window_size_left, int window_size_right, float? softmax_scale=None, float softcap=0.0, "
    "bool deterministic=False"
)


def define(backend: Backend) -> None:
    """Registers the operators of one backend; called once for each, at import."""
    name = f"{NAMESPACE}::{backend.op}"
    schemas = {
        backend.op: f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)",
        f"{backend.op}_backward": "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    }
    kernels: tuple[Any, ...] = (functools.partial(_forward, backend), functools.partial(_backward, backend))
    fakes: tuple[Any, ...] = (_fake_forward, _fake_backward)
    flops: tuple[Any, ...] = (functools.partial(_flops, 2), functools.partial(_backward_flops, 5))
    for (short, schema), kernel, fake, flop in zip(schemas.items(), kernels, fakes, flops, strict=True):
        op = f"{NAMESPACE}::{short}"
        torch.library.define(op, schema, tags=(torch.Tag.pt2_compliant_tag,))
        # Not to be traced into, where an operator is called from a frame that runs eagerly after a graph break.
        torch.library.impl(op, "CompositeExplicitAutograd", torch._disable_dynamo(kernel))
        torch.library.register_fake(op, fake)
        torch.library.register_vmap(op, functools.partial(_refuse_vmap, op))
        register_flop_formula(getattr(torch.ops.varlen_prep, short), get_raw=True)(flop)
    torch.library.register_autograd(name, functools.partial(_autograd, backend), setup_context=_setup_context)
    torch.library.register_autograd(f"{name}_backward", functools.partial(_refuse_second_derivative, name))


def operator(backend: Backend) -> Any:
    """The operator of a backend, `torch.ops.varlen_prep.<op>.default`."""
    return getattr(torch.ops.varlen_prep, backend.op).default


def call(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, lse: bool, backward: bool, direct: bool
) -> tuple[Tensor, Tensor]:
    """The operator with all its arguments, or, with `direct`, its kernel at once: where only autograd sees the call.

    Without `lse` what comes back for it may be anything; `backward` says whether autograd records the call.
    """
    result: tuple[Tensor, Tensor]
    if not direct:
        result = operator(backend)(q, k, v, *arguments)
    elif not backward:
        result = _forward(backend, q, k, v, *arguments, read_lse=lse)
    else:
        kernel, gradient = functools.partial(_forward, backend), functools.partial(_autograd, backend)
        result = recorded(kernel, _setup_context, gradient, q, k, v, *arguments)
    return result


def _arguments(q: Tensor, rest: tuple[Any, ...], lse: bool = True) -> Arguments:
    """Fills in what the caller left out: the schema's defaults, and the scale."""
    if len(rest) < 10:
        rest += (None, 0.0, False)[len(rest) - 7 :]
    scale = q.shape[-1] ** -0.5 if rest[7] is None else rest[7]
    return Arguments._make((*rest[:7], scale, *rest[8:], lse))


def _forward(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, *rest: Any, read_lse: bool = True
) -> tuple[Tensor, Tensor]:
    args = _arguments(q, rest, read_lse)
    _check_rows(q, k, args)
    if _nothing_attends(q, k, args):
        out, lse = _fake_forward(q, k, v)
        return out.zero_(), lse.fill_(-torch.inf)
    out, lse = backend.forward(q, k, v, args)
    if args.lse and lse.shape != (q.shape[1], q.shape[0]):
        raise RuntimeError(
            f"backend {backend.name!r}: expected a log-sum-exp (heads, total_q) = {(q.shape[1], q.shape[0])}, got "
            f"{tuple(lse.shape)}; this release of its package is not one that varlen_prep knows."
        )
    return out.contiguous(), lse.contiguous() if args.lse else lse


def _backward(
    backend: Backend, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    args = _arguments(q, rest)
    if backend.backward is None:
        raise NotImplementedError(f"backend {backend.name!r} is forward-only: choose another one for training.")
    if _nothing_attends(q, k, args):
        return tuple(grad.zero_() for grad in _fake_backward(dout, q, k, v))
    return tuple(grad.contiguous() for grad in backend.backward(dout, q, k, v, out, lse, args))


def _nothing_attends(q: Tensor, k: Tensor, args: Arguments) -> bool:
    sizes = (q.numel(), k.numel(), args.cu_seqlens_q.shape[0] - 1, args.max_seqlen_q, args.max_seqlen_k)
    return 0 in sizes


def _check_rows(q: Tensor, k: Tensor, args: Arguments) -> None:
    """Kernels read the offsets unseen; on a GPU the constructors check the last one where the rows are known."""
    if args.cu_seqlens_q.shape != args.cu_seqlens_k.shape:
        raise ValueError(
            "cu_seqlens_q, cu_seqlens_k: expected the same number of offsets, got "
            f"{args.cu_seqlens_q.shape[0]} and {args.cu_seqlens_k.shape[0]}."
        )
    _check_offsets("q", q, args.cu_seqlens_q)
    _check_offsets("k", k, args.cu_seqlens_k)


def _check_offsets(name: str, x: Tensor, cu_seqlens: Tensor) -> None:
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens_{name}: expected int32, got {cu_seqlens.dtype}.")
    if cu_seqlens.is_cpu and (last := int(cu_seqlens[-1])) > x.shape[0]:
        raise ValueError(f"cu_seqlens_{name}: the last offset is {last}, but {name} has only {x.shape[0]} rows.")


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q.dtype))


def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp, which has no gradient
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k)


def _autograd(backend: Backend, ctx: Any, dout: Tensor | None, dlse: None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    if dout is None:
        return (None,) * (5 + len(ctx.options))
    refuse_transforms(dout)
    given = (dout, q, k, v, out, lse)
    if unwatched(*given):
        grads = _backward(backend, *given, cu_seqlens_q, cu_seqlens_k, *ctx.options)
    else:
        grads = getattr(torch.ops.varlen_prep, f"{backend.op}_backward")(
            *given, cu_seqlens_q, cu_seqlens_k, *ctx.options
        )
    return (*grads, *[None] * (2 + len(ctx.options)))


def _refuse_second_derivative(op: str, *_: Any) -> Any:
    raise NotImplementedError(f"{op} has no second derivative: no varlen kernel has one.")


def _refuse_vmap(op: str, *_: Any) -> Any:
    raise NotImplementedError(f"{op} does not support vmap: give the sequences as one packed batch instead.")


def _flops(matmuls: int, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *rest: Any, **_: Any) -> int:
    """2 multiply-adds per matrix product over the pairs of each sequence; causal and window are not discounted."""
    pairs = _pairs(cu_seqlens_q, cu_seqlens_k, rest[0], rest[1])
    return 2 * pairs * q.shape[1] * (q.shape[2] * (matmuls - matmuls // 2) + v.shape[2] * (matmuls // 2))


def _backward_flops(matmuls: int, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, **_: Any) -> int:
    """Five products: the scores again, dV and dP over D_v, dQ and dK over D."""
    return _flops(matmuls, q, k, v, *rest)


def _pairs(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int) -> int:
    """Query-key pairs of all sequences; without values (fake or meta tensors) the bound from the maxima."""
    if cu_seqlens_q.is_meta or isinstance(cu_seqlens_q, torch._subclasses.FakeTensor):
        return min((cu_seqlens_q.shape[0] - 1) * max_seqlen_q * max_seqlen_k, INT32_MAX**2)
    return int((cu_seqlens_q.diff().long() * cu_seqlens_k.diff().long()).sum())


for _backend in REGISTRY.values():
    define(_backend)
