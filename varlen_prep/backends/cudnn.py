"""cuDNN's attention (package `nvidia-cudnn-frontend`, module `cudnn`; torch brings cuDNN itself): Hopper.

N sequences, T packed rows, H heads, D head size.  Rows stay where they are: cuDNN takes the start of every sequence in
elements ("ragged offsets") and its length, so gaps between sequences cost nothing, nor do strided rows in the forward
pass.  In this form NaN in rows of no sequence reaches nothing (9.19 on an H200); in the padded form it does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import surely
from . import _cudnn_plans, _family, _machine
from ._cudnn_plans import Key, round_up
from ._cudnn_sequences import describe
from ._record import Arguments, Backend, Request

FRONTEND = (1, 18)
LOWEST, WRONG = 91002, 91400
"""Versions of cuDNN: earlier than 9.10.2 it lacks windows that are not causal; 9.14.0 has wrong ones."""
MOST_ELEMENTS = 2**31
"""In q, and in k, for gradients."""


def forward(q: Tensor, k: Tensor, v: Tensor, args: Arguments) -> tuple[Tensor, Tensor]:
    rows = _rows(q, k, v)
    device = _cudnn_plans.on(q.device)
    plan = device.plan(_key(rows, args))
    out = q.new_empty(rows[0].shape)
    lse = q.new_empty(out.shape[:2], dtype=torch.float32)
    sequences = describe(args, plan.key, out, lse)
    device.run(plan, {**_named("q k v", rows), "out": out, "lse": lse, **sequences})
    return _family.cut_size(out, v.shape[-1]), lse.T


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    # Gradients are written at the offsets of their inputs, so these must be dense like them.
    rows = _rows(*(x.contiguous() for x in (q, k, v, dout)), out, multiple=16)
    _check_size(rows)
    device = _cudnn_plans.on(q.device)
    plan = device.plan(_key(rows[:3], args, backward=True))
    lse = lse.T.contiguous()
    # Rows of no sequence, and of one without keys or without queries, are left as they are.
    grads = tuple(x.new_zeros(x.shape) for x in rows[:3])
    sequences = describe(args, plan.key, grads[0], lse)
    device.run(plan, {**_named("q k v dout out", rows), **_named("dq dk dv", grads), "lse": lse, **sequences})
    return _family.cut(grads, q, k, v)


def warm_up(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    deterministic: bool = False,
    backward: bool = False,
) -> None:
    """Builds what calls with these sizes need, so that they can be captured in a CUDA graph; nothing is computed.

    One run of the step before its capture does the same. Sizes are rounded up, so that plans are shared: the number of
    sequences and both maxima to powers of two, and for gradients the rows to two sizes per power of two.

    Args:
        q: `(T_q, H, D)` packed rows on the GPU, as the kernel gets them: dtype, sizes and strides count, not values.
        k: `(T_k, H_kv, D)`.
        v: `(T_k, H_kv, D_v)`.
        cu_seqlens_q: `(N + 1,)` offsets; only their number counts.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: host int, rows of the longest sequence or a bound.
        max_seqlen_k: the same for keys.
        causal: as in the calls to come, as are the arguments that follow.
        window_size: (left, right), -1 is no bound.
        softmax_scale: None: `D ** -0.5`.
        deterministic: of the backward pass.
        backward: build for gradients too.

    Raises:
        RuntimeError: cuDNN has no kernel for the sizes, or a CUDA graph is being captured.

    Example:
        >>> from varlen_prep.backends.cudnn import warm_up
        >>> def prepare_capture(q, k, v, meta):  # padded (B, S, H, D), layout="in_place"
        ...     warm_up(*(x.flatten(0, 1) for x in (q, k, v)), **meta.flash_kwargs(), causal=True)
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    args = Arguments(*offsets, causal, *window_size, scale, 0.0, deterministic)
    device = _cudnn_plans.on(q.device)
    keys = [_key(_rows(q, k, v), args)]
    if backward:
        keys.append(_key(_rows(q, k, v, multiple=16), args, backward=True))
    empty = args._replace(cu_seqlens_q=torch.zeros_like(cu_seqlens_q), cu_seqlens_k=torch.zeros_like(cu_seqlens_k))
    for key in keys:
        device.plan(key)
        # Compiles its kernel; with empty sequences it fills no rows.
        describe(empty, key, q.new_empty(1, key.heads, key.head_dim), q.new_empty(1, key.heads, dtype=torch.float32))


def _rows(*tensors: Tensor, multiple: int = 8) -> list[Tensor]:
    """One head size that cuDNN takes (in the backward pass, one whose workspace it sizes by rows), and aligned."""
    rows = _family.one_size(*tensors, multiple=multiple)
    return [x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format) for x in rows]


def _is_aligned(x: Tensor) -> bool:
    """To 16 bytes, at every row and head; 0 is the stride of an expanded tensor."""
    return x.data_ptr() % 16 == 0 and all(stride and stride % 8 == 0 for stride in x.stride()[:2])


def _key(rows: list[Tensor], args: Arguments, backward: bool = False) -> Key:
    q, k, v = rows
    longest_q, longest_k = min(args.max_seqlen_q, q.shape[0]), min(args.max_seqlen_k, k.shape[0])
    left, right = args.window_size_left, 0 if args.causal else args.window_size_right
    return Key(
        backward=backward,
        dtype=q.dtype,
        heads=q.shape[1],
        heads_kv=k.shape[1],
        head_dim=q.shape[2],
        strides=(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        sequences=round_up(args.cu_seqlens_q.shape[0] - 1, least=4),
        longest_q=round_up(longest_q, least=128),
        longest_k=round_up(longest_k, least=128),
        total_q=round_up(q.shape[0], least=128, steps=2) if backward else 0,
        total_k=round_up(k.shape[0], least=128, steps=2) if backward else 0,
        # A bound that no query reaches is none, and needs no masking.
        left=left if left < longest_k - 1 else -1,
        right=right if right < longest_q - 1 else -1,
        scale=args.softmax_scale,
        deterministic=args.deterministic and backward,
    )


def _check_size(rows: list[Tensor]) -> None:
    """The backward kernel counts elements of its buffers in 32 bits; the forward one in 64."""
    for x in rows[:2]:
        if _elements(*x.shape) > MOST_ELEMENTS:
            raise ValueError(
                f"backend 'cudnn': expected at most 2**31 elements for gradients, rows rounded up to "
                f"{round_up(x.shape[0], least=128, steps=2)}, got rows {tuple(x.shape)}; split the batch, or choose "
                "another backend."
            )


def _elements(rows: int, heads: int, size: int) -> int:
    """That the backward kernel counts."""
    return round_up(rows, least=128, steps=2) * heads * size


def _named(names: str, tensors: list[Tensor] | tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(names.split(), tensors, strict=True))


def _refuse(request: Request) -> list[str]:
    """Known before anything runs, so that another backend is chosen."""
    found = _family.refuse_head_size(request)
    if request.backward:
        size = -(-max(request.head_dim, request.head_dim_v) // 16) * 16
        for name, rows, heads in (("q", request.rows_q, request.heads), ("k", request.rows_k, request.heads_kv)):
            # Traced rows cannot be rounded up; `_check_size` looks again.
            count = rows * heads * size if torch.compiler.is_compiling() else _elements(rows, heads, size)
            if surely(count > MOST_ELEMENTS):
                found.append(f"gradients of {name} with {rows} rows (its kernel counts up to 2**31 elements)")
    return found


def _missing() -> list[str]:
    found = []
    if not _machine.has_module("cudnn"):
        found.append("package nvidia-cudnn-frontend is not installed")
    elif (version := _machine.version("nvidia-cudnn-frontend")) is not None and tuple(
        map(int, version.split(".")[:2])
    ) < FRONTEND:
        found.append(f"nvidia-cudnn-frontend {version} (it needs {'.'.join(map(str, FRONTEND))} or newer)")
    # Others are not measured: what NaN in padding reaches there, and how much the workspace holds.
    machine = _machine.gpu_reasons((9, 0), (9, 0))
    if not machine and ((cudnn := torch.backends.cudnn.version() or 0) < LOWEST or cudnn == WRONG):
        machine = [f"cuDNN {_dotted(cudnn)} (it needs {_dotted(LOWEST)} or newer, except {_dotted(WRONG)})"]
    return found + machine


def _dotted(version: int) -> str:
    """91002 is 9.10.2."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


CUDNN = Backend(
    name="cudnn",
    op="cudnn_varlen",
    forward=forward,
    backward=backward,
    dtypes={"cuda": _family.HALF},
    summary="cuDNN's attention: Hopper, one small package, plans built at the first call of each kind",
    install="pip install nvidia-cudnn-frontend",
    missing=_missing,
    refuse=_refuse,
    overreach=_family.OVERREACH,
)
