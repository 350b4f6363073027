"""nvidia-cudnn-frontend (`cudnn`) on the CPU: the calls that the backend makes, with their signatures and traps.

Traps: what a plan was built for is fixed (number of sequences, bounds on lengths and rows), and a call beyond it reads
or writes where it must not; rows of queries without keys are not written, nor any gradient of a sequence that has
queries or keys alone; gradients are written at the offsets of their inputs; buffers must start at multiples of 16
bytes; a missing buffer is a null pointer; one handle runs on one thread at a time; a right bound leaves queries
without keys.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import _attention as kernel


class cudnnGraphNotSupportedError(RuntimeError):  # noqa: N801 (the real name)
    pass


def module() -> Any:
    """A fresh `cudnn`, with `handles`, `graphs` and `streams` of what was made and set through it."""
    made = SimpleNamespace(
        cudnnGraphNotSupportedError=cudnnGraphNotSupportedError,
        data_type=SimpleNamespace(
            BFLOAT16=torch.bfloat16, HALF=torch.float16, FLOAT=torch.float32, INT32=torch.int32, INT64=torch.int64
        ),
        diagonal_alignment=SimpleNamespace(TOP_LEFT="top left", BOTTOM_RIGHT="bottom right"),
        heur_mode=SimpleNamespace(A="A", FALLBACK="fallback"),
        backend_version_string=lambda: "9.19.0",
        handles=[],
        graphs=[],
        streams=[],
    )

    def create_handle() -> Any:
        made.handles.append(SimpleNamespace(busy=threading.Lock()))
        return made.handles[-1]

    def set_stream(handle: Any, stream: int) -> None:
        assert handle in made.handles
        made.streams.append(stream)

    def pygraph(
        *, io_data_type: Any, intermediate_data_type: Any, compute_data_type: Any, handle: Any,
        is_dynamic_shape_enabled: bool = False, kernel_cache: Any = None,
    ) -> Graph:  # fmt: skip
        assert intermediate_data_type == compute_data_type == torch.float32
        assert not is_dynamic_shape_enabled
        assert kernel_cache is None
        made.graphs.append(Graph(io_data_type, handle))
        return made.graphs[-1]

    made.create_handle, made.set_stream, made.pygraph = create_handle, set_stream, pygraph
    return made


class GraphTensor:
    """A tensor of a graph: what is known of it, without values."""

    def __init__(self, dim: Any = None, stride: Any = None, data_type: Any = None, uid: int | None = None) -> None:
        self.dim, self.stride, self.data_type, self.uid = dim, stride, data_type, uid
        self.output = False
        self.ragged_offset: GraphTensor | None = None

    def set_output(self, value: bool) -> GraphTensor:
        self.output = value
        return self

    def set_dim(self, dim: list[int]) -> GraphTensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> GraphTensor:
        self.stride = stride
        return self

    def set_data_type(self, data_type: Any) -> GraphTensor:
        self.data_type = data_type
        return self

    def set_uid(self, uid: int) -> GraphTensor:
        self.uid = uid
        return self

    def set_ragged_offset(self, offset: GraphTensor) -> GraphTensor:
        self.ragged_offset = offset
        return self

    def rows(self, buffers: dict[int, Tensor], sequence: int, length: int) -> Tensor:
        """(length, H, D) of one sequence, a view into the caller's memory."""
        assert length <= self.dim[2], "longer than the plan's bound"
        buffer = buffers[self.uid]
        assert buffer.dtype == self.data_type
        begin = int(buffers[self.ragged_offset.uid][sequence]) + buffer.storage_offset()
        _, heads, _, dim = self.dim
        return buffer.as_strided((length, heads, dim), (self.stride[2], self.stride[1], self.stride[3]), begin)


class Graph:
    def __init__(self, io: torch.dtype, handle: Any) -> None:
        self.io, self.handle = io, handle
        self.inputs: list[GraphTensor] = []
        self.outputs: list[GraphTensor] = []
        self.built = False

    def tensor(
        self, dim: list[int], stride: list[int], data_type: Any, name: str = "", uid: int | None = None
    ) -> GraphTensor:
        assert uid not in [one.uid for one in self.inputs], "a number is given twice"
        self.inputs.append(GraphTensor(dim, stride, data_type, uid))
        return self.inputs[-1]

    def sdpa(
        self, name: str, q: GraphTensor, k: GraphTensor, v: GraphTensor, *, generate_stats: bool, **options: Any
    ) -> list[GraphTensor]:  # fmt: skip
        assert generate_stats
        self.backward, self.operands, self.options = False, (q, k, v), _checked(**options)
        self.outputs = [GraphTensor(), GraphTensor()]
        return self.outputs

    def sdpa_backward(
        self, name: str, q: GraphTensor, k: GraphTensor, v: GraphTensor, o: GraphTensor, dO: GraphTensor,  # noqa: N803
        stats: GraphTensor, *, max_total_seq_len_q: int, max_total_seq_len_kv: int, use_deterministic_algorithm: bool,
        **options: Any,
    ) -> list[GraphTensor]:  # fmt: skip
        self.backward, self.operands, self.options = True, (q, k, v, o, dO, stats), _checked(**options)
        self.totals = max_total_seq_len_q, max_total_seq_len_kv
        self.deterministic = use_deterministic_algorithm
        if q.dim[3] % 16:
            raise cudnnGraphNotSupportedError("the workspace would have room for every bound")
        if q.dim[2] == k.dim[2] == 1:
            raise cudnnGraphNotSupportedError("s_q = s_kv = 1 is not supported.")
        self.outputs = [GraphTensor() for _ in range(3)]
        return self.outputs

    def validate(self) -> None:
        for one in (*self.operands, *self.outputs):
            assert len(one.dim) == len(one.stride) == 4
            assert one.stride[3] == 1
            assert one.ragged_offset is not None
            assert one.uid is not None
        assert all(one.output for one in self.outputs)
        used = {one.uid for one in (*self.operands, *self.outputs)}
        assert len(used) == len(self.operands) + len(self.outputs), "a number is given twice"
        if self.operands[0].dim[3] > 256 or self.operands[0].dim[3] % 8:
            raise cudnnGraphNotSupportedError("hidden_dim should be multiple of 8, at most 256")

    def build_operation_graph(self) -> None: ...

    def create_execution_plans(self, modes: list[Any]) -> None:
        assert modes == ["A", "fallback"]

    def check_support(self) -> None: ...

    def build_plans(self) -> None:
        self.built = True

    def get_workspace_size(self) -> int:
        return 64

    def execute(self, tensor_dict: dict[int, Tensor], workspace: Tensor, handle: Any) -> None:
        assert self.built
        assert handle is self.handle
        assert handle.busy.acquire(blocking=False), "two threads on one handle"
        try:
            time.sleep(0.001)
            self._check(tensor_dict, workspace)
            self._run(tensor_dict)
        finally:
            handle.busy.release()

    def _check(self, buffers: dict[int, Tensor], workspace: Tensor) -> None:
        assert workspace.dtype == torch.uint8
        assert workspace.numel() >= self.get_workspace_size()
        needed = {one.uid for one in (*self.inputs, *self.outputs)}
        assert needed <= set(buffers), "a null pointer"
        for uid in needed:
            assert buffers[uid].data_ptr() % 16 == 0, "misaligned"
        for one in self.inputs:
            if one.ragged_offset is None:
                assert buffers[one.uid].dtype == one.data_type
                assert buffers[one.uid].numel() >= one.dim[0]
                assert buffers[one.uid].is_contiguous()
        if self.backward:
            for one, total in zip(self.outputs[:2], self.totals, strict=True):
                assert buffers[one.uid].shape[0] <= total, "past the workspace"

    def _run(self, buffers: dict[int, Tensor]) -> None:
        lengths = [buffers[one.uid].tolist() for one in self.options["lengths"]]
        for sequence in range(self.operands[0].dim[0]):
            sizes = lengths[0][sequence], lengths[1][sequence]
            if self.backward and (0 in sizes) and any(sizes):
                raise AssertionError("what is written for queries or keys alone depends on the kernel")
            if 0 not in sizes:
                self._one(buffers, sequence, *sizes)

    def _one(self, buffers: dict[int, Tensor], sequence: int, size_q: int, size_k: int) -> None:
        sides = "qkk" if not self.backward else "qkkqqq"
        sizes = {"q": size_q, "k": size_k}
        rows = [one.rows(buffers, sequence, sizes[side]) for one, side in zip(self.operands, sides, strict=True)]
        args = self._arguments(size_q, size_k)
        if not self.backward:
            results: Any = kernel.REFERENCE.forward(*rows[:3], args)
            assert (results[1] > -torch.inf).all(), "a query without keys"
            results = results[0], results[1].T[..., None]
            sides = "qq"
        else:
            q, k, v, out, dout, stats = rows
            results = kernel.REFERENCE.backward(dout, q, k, v, out, stats[..., 0].T, args)
            sides = "qkk"
        if self.backward:
            for grad, one in zip(self.outputs, self.operands[:3], strict=True):
                starts = [buffers[x.ragged_offset.uid][sequence] for x in (grad, one)]
                assert torch.equal(*starts), "written at the offset of its input"
        for one, side, result in zip(self.outputs, sides, results, strict=True):
            one.rows(buffers, sequence, sizes[side]).copy_(result)

    def _arguments(self, size_q: int, size_k: int) -> kernel.Arguments:
        offsets = (torch.tensor([0, size], dtype=torch.int32) for size in (size_q, size_k))
        options = self.options
        left = -1 if options["left"] is None else options["left"] - 1
        right = -1 if options["right"] is None else options["right"]
        return kernel.Arguments(*offsets, size_q, size_k, False, left, right, options["scale"], 0.0, False)


def _checked(
    *, attn_scale: float, use_padding_mask: bool, seq_len_q: GraphTensor, seq_len_kv: GraphTensor,
    diagonal_alignment: str = "top left", diagonal_band_left_bound: int | None = None,
    diagonal_band_right_bound: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    assert use_padding_mask
    for bound, least in ((diagonal_band_left_bound, 1), (diagonal_band_right_bound, 0)):
        if bound is not None:
            assert bound >= least
            assert diagonal_alignment == "bottom right"
    return {
        "scale": attn_scale,
        "lengths": (seq_len_q, seq_len_kv),
        "left": diagonal_band_left_bound,
        "right": diagonal_band_right_bound,
    }
