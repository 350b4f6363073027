"""What a backend is: two plain functions and a record of what the kernel can do and what it needs.

T packed rows, H heads, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Arguments(NamedTuple):
    """The arguments that follow q, k, v (and dout, ..., lse) in every operator, with the scale filled in."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window_size_left: int
    window_size_right: int
    softmax_scale: float
    softcap: float
    deterministic: bool
    lse: bool = True
    """Whether anyone reads the log-sum-exp; otherwise it need not be brought into the form of the contract."""


class Request(NamedTuple):
    """What a call asks of a kernel, known on the host before anything runs."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    deterministic: bool
    backward: bool
    lse: bool
    equal_lengths: bool
    """Query and key lengths of every sequence are known to agree: both sides have the same offsets tensor."""
    rows_q: int = 0
    """Rows of q, those that take no part included; a SymInt while tracing, as is `rows_k`."""
    rows_k: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """The capability record of one kernel."""

    name: str
    """What users write: `backend="native"`."""
    op: str
    """Name of its operator in the `varlen_prep` namespace; stable, for selective checkpointing."""
    forward: Callable[[Tensor, Tensor, Tensor, Arguments], tuple[Tensor, Tensor]]
    """(q (T_q, H, D), k (T_k, H_kv, D), v (T_k, H_kv, D_v), arguments) -> (out (T_q, H, D_v), lse (H, T_q)).

    Rows inside the offsets must be right: 0 and -inf without keys. Rows past the last offset may hold anything.
    """
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None
    """(dout, q, k, v, out, lse, arguments) -> (dq, dk, dv), 0 where nothing attends; None: forward only."""
    dtypes: Mapping[str, tuple[torch.dtype, ...]]
    """Data types by device type."""
    summary: str
    """One line for the table of kernels."""
    install: str | None = None
    """The pip line that makes it usable; None: nothing to install."""
    missing: Callable[[], list[str]] = list
    """Reasons why it cannot run on this machine at all; empty: it can."""
    refuse: Callable[[Request], list[str]] = lambda request: []
    """Reasons against a call, beyond those that the other fields say."""
    window: bool = True
    """Has sliding windows."""
    softcap: bool = False
    """Has softcap."""
    lse: bool = True
    """Returns the log-sum-exp."""
    bottom_right: bool = True
    """Aligns causal masks to the bottom-right corner; False: to the top-left, right only where lengths agree."""
    finite_padding: bool = False
    """Rows that take no part must be finite, because the kernel lets NaN in them reach rows that do: those of v in the
    forward pass (0 times NaN), those of q, k, v and dout in the backward pass."""
    overreach: int = -1
    """Rows past the end of a sequence that its forward kernel may read, as its tiles are larger; -1: any number."""
    captures: bool = True
    """Its calls can be captured in a CUDA graph."""

    def reasons(self, request: Request) -> list[str]:
        """Every reason why the kernel cannot do this call, on a machine that has it; empty: it can."""
        found = []
        allowed = self.dtypes.get(request.device.type)
        if allowed is None:
            found.append(f"device {request.device.type} (it runs on {', '.join(self.dtypes)})")
        elif request.dtype not in allowed:
            found.append(f"dtype {request.dtype} on {request.device.type} (it takes {', '.join(map(str, allowed))})")
        if request.backward and self.backward is None:
            found.append("gradients (it is forward-only: call it under torch.no_grad(), or choose another backend)")
        if request.lse and not self.lse:
            found.append("return_lse=True (its kernel does not return the log-sum-exp)")
        if request.softcap and not self.softcap:
            found.append(f"softcap={request.softcap} (its kernel has none)")
        if request.window_size != (-1, -1) and not self.window:
            found.append(f"window_size={request.window_size} (its kernel has none)")
        if request.causal and not self.bottom_right and not request.equal_lengths:
            found.append(
                "causal=True where query and key lengths may differ (it aligns to the top-left corner, this library to "
                "the bottom-right)"
            )
        return found + self.refuse(request)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, except for float64 input: its gradients would lose half of their digits."""
    return torch.float64 if dtype == torch.float64 else torch.float32
