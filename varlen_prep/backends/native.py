"""torch alone: its flash-attention kernel on CPU per sequence, its varlen kernels on CUDA. The default backend."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _family, _native_cpu, _native_cuda
from ._record import Arguments, Backend, Request


def _forward(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    return (_native_cuda if q.is_cuda else _native_cpu).forward(q, k, v, args)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    return (_native_cuda if q.is_cuda else _native_cpu).backward(dout, q, k, v, out, lse, args)


def _refuse(request: Request) -> list[str]:
    return _native_cuda.refuse(request) if request.device.type == "cuda" else []


NATIVE = Backend(
    name="native",
    op="native_varlen",
    forward=_forward,
    backward=_backward,
    dtypes={
        "cpu": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
        "cuda": (torch.float16, torch.bfloat16, torch.float32),
    },
    summary="torch alone: flash on CUDA fp16/bf16, memory-efficient on CUDA fp32, flash for CPU per sequence",
    refuse=_refuse,
    overreach=_family.OVERREACH,
)
