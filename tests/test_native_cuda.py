"""The CUDA half of `native` on the CPU: torch's operators are stand-ins with the real schemas and traps."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_near, assert_zero_rows, make_inputs, oracle, run
from standins import aten

from varlen_prep import VarlenMetadata, op
from varlen_prep.backends import REGISTRY, _native_cuda

LENGTHS = [([5, 1, 0, 4, 3, 0], [5, 7, 3, 0, 2, 0]), ([40], [9]), ([9], [40]), ([3, 70], [3, 70])]


@pytest.fixture(autouse=True)
def cuda_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend `native` runs its CUDA functions, on CPU tensors."""
    monkeypatch.setattr(_native_cuda, "_aten", aten.operators())
    record = dataclasses.replace(
        REGISTRY["native"], name="native_cuda", op="native_cuda_varlen", forward=_native_cuda.forward,
        backward=_native_cuda.backward, dtypes={"cpu": (torch.float32, torch.float16, torch.bfloat16)},
        refuse=_native_cuda.refuse,
    )  # fmt: skip
    if not hasattr(torch.ops.varlen_prep, record.op):
        op.define(record)
    monkeypatch.setitem(REGISTRY, "native_cuda", record)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softmax_scale": 0.2}])
@pytest.mark.parametrize(("dim", "dim_v"), [(8, 8), (12, 5)])
def test_equals_the_oracle(dtype, lengths, options, dim, dim_v):
    meta = VarlenMetadata.from_lengths(*lengths)
    inputs = make_inputs((sum(lengths[0]),), (sum(lengths[1]),), dim=dim, dim_v=dim_v, dtype=dtype)
    got = run(inputs, meta, backend="native_cuda", **options)
    expected = oracle(inputs, meta.materialize(causal="causal" in options), scale=options.get("softmax_scale"))
    assert_near(got, expected, dtype)


@pytest.mark.parametrize("window_size", [(2, 1), (0, 0), (3, -1), (-1, 2), (50, 50)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_windows_of_the_flash_kernel_equal_the_oracle(lengths, causal, window_size):
    meta = VarlenMetadata.from_lengths(*lengths)
    inputs = make_inputs((sum(lengths[0]),), (sum(lengths[1]),), dtype=torch.float16)
    got = run(inputs, meta, backend="native_cuda", causal=causal, window_size=window_size)
    assert_near(got, oracle(inputs, meta.materialize(causal=causal, window_size=window_size)), torch.float16)


def test_float32_windows_with_equal_lengths_equal_the_oracle():
    meta = VarlenMetadata.from_lengths([5, 40, 1])
    inputs = make_inputs((46,), (46,), dtype=torch.float32)
    got = run(inputs, meta, backend="native_cuda", causal=True, window_size=(3, 0))
    assert_near(got, oracle(inputs, meta.materialize(causal=True, window_size=(3, 0))), torch.float32)


def test_single_queries_with_empty_rows_and_grouped_heads():
    meta = VarlenMetadata.from_lengths([1, 0, 1], [3, 0, 5])
    inputs = make_inputs((2,), (8,), heads=9, heads_kv=3, dim=64, dtype=torch.float16)
    got = run(inputs, meta, backend="native_cuda", causal=True)
    assert_near(got, oracle(inputs, meta.materialize(causal=True)), torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_past_the_last_offset_are_zero(dtype):
    meta = VarlenMetadata.from_lengths(torch.tensor([3, 2]), max_seqlen_q=4)
    got = run(make_inputs((8,), (8,), dtype=dtype), meta, backend="native_cuda")
    for x in (got.out, got.dq, got.dk, got.dv):
        assert_zero_rows(x, torch.arange(8) < 5)


def test_elements_that_do_not_lie_side_by_side_are_copied():
    inputs = make_inputs((6,), (6,), dtype=torch.float16)
    strided = inputs._replace(q=inputs.q.transpose(0, 2).contiguous().transpose(0, 2))
    assert strided.q.stride(-1) != 1
    meta = VarlenMetadata.from_lengths([6])
    assert_near(run(strided, meta, backend="native_cuda"), run(inputs, meta, backend="native_cuda"), torch.float16)


def test_deterministic_gradients_are_the_users_choice(monkeypatch):
    request = SimpleNamespace(
        deterministic=True, backward=True, dtype=torch.float16, head_dim=8, head_dim_v=8, window_size=(-1, -1)
    )
    assert "use_deterministic_algorithms" in _native_cuda.refuse(request)[0]
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert _native_cuda.refuse(request) == []
