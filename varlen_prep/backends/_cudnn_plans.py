"""Execution plans of cuDNN's attention: what one depends on, how it is built, and where it is kept.

N sequences, T packed rows, H heads, D head size, S bound on a sequence's length.  A plan takes 0.05 to 2 s to build and
is fixed to N and S, so both are rounded up, and one plan serves many shapes: sequences beyond the given ones are empty.
Plans with dynamic shapes are not used: they have no backward pass (cuDNN 9.19), and with a shared kernel cache
another number of sequences left rows unwritten and read past the offsets.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import itertools
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

LIMIT = 128
"""Plans kept per device, each about 1 MB on the host; those that a CUDA graph holds are kept besides."""
STARTS = ("start_q", "start_out", "start_lse", "start_k", "start_v", "start_grad_k")


class Key(NamedTuple):
    """What a plan depends on."""

    backward: bool
    dtype: torch.dtype
    heads: int
    heads_kv: int
    head_dim: int
    strides: tuple[int, ...]
    """Of rows and heads, of q, k and v, in elements."""
    sequences: int
    longest_q: int
    longest_k: int
    total_q: int
    """Rows that the workspace of the backward pass has room for; 0 in the forward pass."""
    total_k: int
    left: int
    """Neighbours that a query sees, -1 if all; causal is right = 0."""
    right: int
    scale: float
    deterministic: bool

    @property
    def row_strides(self) -> tuple[int, ...]:
        """Elements from row to row, in the order of `STARTS`."""
        q, k, v = self.strides[::2]
        return q, self.heads * self.head_dim, self.heads, k, v, self.heads_kv * self.head_dim


@dataclasses.dataclass
class Plan:
    """Built for one key, on one device."""

    key: Key
    graph: Any
    uids: dict[str, int]
    workspace: int
    """Bytes."""
    captured: bool = False
    """A CUDA graph may hold its kernels."""


def round_up(size: int, least: int, steps: int = 1) -> int:
    """The next of `steps` sizes per power of two, so that few plans serve all sizes."""
    step = max(least, (1 << (size - 1).bit_length()) // (2 * steps))
    return max(1, -(-size // step)) * step


class Device:
    """The handle and the plans of one GPU, for all threads; cuDNN allows one thread at a time on a handle."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.builds = 0
        self.build_seconds = 0.0
        self._cudnn = importlib.import_module("cudnn")
        self._plans: collections.OrderedDict[Key, Plan] = collections.OrderedDict()
        self._lock = threading.Lock()
        with torch.cuda.device(device):
            self._handle = self._cudnn.create_handle()

    def plan(self, key: Key) -> Plan:
        """Built at its first use.

        Raises:
            RuntimeError: cuDNN has no kernel for it, or the current stream is captured, where nothing can be built.
        """
        with self._lock, torch.cuda.device(self.device):
            capturing = torch.cuda.is_current_stream_capturing()
            plan = self._plans.get(key)
            if plan is None:
                if capturing:
                    raise RuntimeError(
                        "backend 'cudnn': no plan is built for this call yet, and none can be built while a CUDA graph "
                        "is captured. Run the same step once before the capture, or call "
                        f"varlen_prep.backends.cudnn.warm_up with these sizes: {key}."
                    )
                plan = self._plans[key] = self._build(key)
                if len(self._plans) > LIMIT:
                    oldest = next((one for one, held in self._plans.items() if not held.captured), None)
                    if oldest not in (None, key):
                        del self._plans[oldest]
            self._plans.move_to_end(key)
            plan.captured |= capturing
            return plan

    def run(self, plan: Plan, tensors: Mapping[str, Tensor]) -> None:
        """On torch's current stream, with a workspace of torch's allocator."""
        with self._lock, torch.cuda.device(self.device):
            workspace = torch.empty(max(plan.workspace, 1), dtype=torch.uint8, device=self.device)
            stream = torch.cuda.current_stream(self.device).cuda_stream
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            buffers = {plan.uids[name]: tensor for name, tensor in tensors.items() if name in plan.uids}
            plan.graph.execute(buffers, workspace, handle=self._handle)

    def _build(self, key: Key) -> Plan:
        begin = time.perf_counter()
        try:
            graph, uids = _graph(self._cudnn, self._handle, key)
        except self._cudnn.cudnnGraphNotSupportedError as error:
            version = self._cudnn.backend_version_string()
            raise RuntimeError(
                f"backend 'cudnn': cuDNN {version} has no kernel for {key}; choose another backend."
            ) from error
        self.builds += 1
        self.build_seconds += time.perf_counter() - begin
        return Plan(key, graph, uids, graph.get_workspace_size())


_devices: dict[torch.device, Device] = {}
_devices_lock = threading.Lock()


def on(device: torch.device) -> Device:
    """The one record of a GPU, made at its first use."""
    found = _devices.get(device)
    if found is None:
        with _devices_lock:
            found = _devices[device] = _devices.get(device) or Device(device)
    return found


def _graph(cudnn: Any, handle: Any, key: Key) -> tuple[Any, dict[str, int]]:
    """The graph with its plan built, and the number of each tensor in it."""
    types = cudnn.data_type
    io = types.BFLOAT16 if key.dtype == torch.bfloat16 else types.HALF
    graph = cudnn.pygraph(
        io_data_type=io, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=handle
    )
    uids: dict[str, int] = {}
    numbers = itertools.count(1)

    def number(name: str) -> int:
        return uids.setdefault(name, next(numbers))

    def integers(name: str, count: int, data_type: Any) -> Any:
        shape, stride = [count, 1, 1, 1], [1, 1, 1, 1]
        return graph.tensor(name=name, dim=shape, stride=stride, data_type=data_type, uid=number(name))

    lengths = [integers(name, key.sequences, types.INT32) for name in ("lengths_q", "lengths_k")]
    # Only what an operation reads is part of a graph, so the other pass's offsets are left out.
    names = STARTS if key.backward else STARTS[:-1]
    starts = {name: integers(name, key.sequences + 1, types.INT64) for name in names}
    q_side, k_side = (key.heads, key.longest_q), (key.heads_kv, key.longest_k)

    def layout(side: tuple[int, int], dim: int, strides: tuple[int, ...] | None = None) -> tuple[list[int], list[int]]:
        """Shape (N, H, S, D) and its strides; `strides`: of rows and heads, None if nothing lies between them."""
        heads, longest = side
        row, head = strides or (heads * dim, dim)
        return [key.sequences, heads, longest, dim], [longest * row, head, row, 1]

    def read(name: str, start: str, shape: tuple[list[int], list[int]], data_type: Any = io) -> Any:
        x = graph.tensor(name=name, dim=shape[0], stride=shape[1], data_type=data_type, uid=number(name))
        x.set_ragged_offset(starts[start])
        return x

    def write(x: Any, name: str, start: str, shape: tuple[list[int], list[int]], data_type: Any = io) -> None:
        x.set_output(True).set_dim(shape[0]).set_stride(shape[1]).set_data_type(data_type).set_uid(number(name))
        x.set_ragged_offset(starts[start])

    dim, strides = key.head_dim, key.strides
    rows = {
        "q": read("q", "start_q", layout(q_side, dim, strides[:2])),
        "k": read("k", "start_k", layout(k_side, dim, strides[2:4])),
        "v": read("v", "start_v", layout(k_side, dim, strides[4:])),
    }
    options: dict[str, Any] = {
        "attn_scale": key.scale, "use_padding_mask": True, "seq_len_q": lengths[0], "seq_len_kv": lengths[1],
    }  # fmt: skip
    if (key.left, key.right) != (-1, -1):
        options["diagonal_alignment"] = cudnn.diagonal_alignment.BOTTOM_RIGHT
    if key.left >= 0:
        options["diagonal_band_left_bound"] = key.left + 1  # the first neighbour that is not seen
    if key.right >= 0:
        options["diagonal_band_right_bound"] = key.right
    out, lse = layout(q_side, dim), layout(q_side, 1)
    if not key.backward:
        results = graph.sdpa(name="attention", **rows, generate_stats=True, **options)
        write(results[0], "out", "start_out", out)
        write(results[1], "lse", "start_lse", lse, types.FLOAT)
    else:
        grads = graph.sdpa_backward(
            name="attention_backward",
            **rows,
            o=read("out", "start_out", out),
            dO=read("dout", "start_out", out),
            stats=read("lse", "start_lse", lse, types.FLOAT),
            # Without them the workspace has room for N * S rows.
            max_total_seq_len_q=key.total_q,
            max_total_seq_len_kv=key.total_k,
            use_deterministic_algorithm=key.deterministic,
            **options,
        )
        write(grads[0], "dq", "start_out", out)
        write(grads[1], "dk", "start_grad_k", layout(k_side, dim))
        write(grads[2], "dv", "start_grad_k", layout(k_side, dim))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, uids
