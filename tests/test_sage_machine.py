"""What SageAttention refuses, by its record and by what a machine or a package lacks, and its operator when compiled.

The package is the stand-in of `standins/sage.py`, and the machine is pretended.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import Recorder, assert_bit_equal, make_inputs, make_mask, operators_run, refuses
from sage_helpers import (
    HALVES,
    attend,
    install_fixture,  # noqa: F401  (a fixture)
    oldest_fixture,  # noqa: F401  (a fixture)
    packed,
    registered_fixture,  # noqa: F401  (a fixture)
    version_fixture,  # noqa: F401  (a fixture)
)
from torch import Tensor

from varlen_prep import backends, op, prepare_varlen, varlen_attention
from varlen_prep.backends import REGISTRY, Arguments, Request
from varlen_prep.backends import sage as backend


def test_lse_is_refused_and_holds_nothing(version: str) -> None:
    inputs, meta = packed([5, 7])
    with refuses(ValueError, "'sage'", "return_lse=True", "Backends that can", "native"):
        attend(inputs, meta, return_lse=True)
    arguments = (*inputs[:3], meta.cu_seqlens_q, meta.cu_seqlens_k, 7, 7, False, -1, -1)
    out, lse = torch.ops.varlen_prep.sage_attn_varlen(*arguments)
    assert (lse.shape, lse.dtype) == ((4, 12), torch.float32)
    assert (lse == torch.inf).all(), "no query has this value"
    assert_bit_equal(out, attend(inputs, meta))


def test_gradients_are_refused_not_dropped(oldest: None) -> None:
    inputs, meta = packed([5, 7])
    q = inputs.q.clone().requires_grad_()
    with refuses(ValueError, "'sage'", "gradients", "torch.no_grad()", "native"):
        attend((q, inputs.k, inputs.v), meta)
    with torch.no_grad():
        assert attend((q, inputs.k, inputs.v), meta).isfinite().all()
    arguments = (inputs.k, inputs.v, meta.cu_seqlens_q, meta.cu_seqlens_k, 7, 7, False, -1, -1)
    out, _ = torch.ops.varlen_prep.sage_attn_varlen(q, *arguments)
    with refuses(NotImplementedError, "'sage'", "forward-only", "another"):
        out.sum().backward()


def request(**changes: Any) -> Request:
    usual = {
        "device": torch.device("cuda"), "dtype": torch.bfloat16, "heads": 4, "heads_kv": 2, "head_dim": 64,
        "head_dim_v": 64, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "deterministic": False,
        "backward": False, "lse": False, "equal_lengths": False,
    }  # fmt: skip
    return Request(**{**usual, **changes})


@pytest.mark.parametrize(("changes", "fragments"), [
    ({"dtype": torch.float32}, ["dtype torch.float32 on cuda", "torch.float16, torch.bfloat16"]),
    ({"device": torch.device("cpu")}, ["device cpu", "cuda"]),
    ({"head_dim": 160, "head_dim_v": 256}, ["head size 160 (at most 128)", "head size 256 (at most 128)"]),
    ({"head_dim_v": 129}, ["head size 129 (at most 128)"]),
    ({"window_size": (3, 0)}, ["window_size=(3, 0)"]),
    ({"softcap": 2.0}, ["softcap=2.0"]),
    ({"lse": True}, ["return_lse=True"]),
    ({"backward": True}, ["gradients"]),
    ({"causal": True}, ["causal=True", "top-left"]),
    ({"causal": True, "equal_lengths": True}, []),
    ({"head_dim": 24, "head_dim_v": 128, "dtype": torch.float16}, []),
])  # fmt: skip
def test_record_refuses_exactly_what_the_kernel_lacks(changes: dict[str, Any], fragments: list[str]) -> None:
    reasons = dataclasses.replace(backend.SAGE, missing=list).reasons(request(**changes))
    assert len(reasons) == (2 if "head_dim" in changes and fragments else bool(fragments))
    assert all(fragment in "; ".join(reasons) for fragment in fragments)


def test_causal_with_lengths_that_may_differ_is_refused(oldest: None) -> None:
    inputs, meta = packed([5, 7], [6, 7])
    with refuses(ValueError, "'sage'", "causal=True", "top-left", "native"):
        attend(inputs, meta, causal=True)


def pretend(monkeypatch: pytest.MonkeyPatch, *, cuda: bool = True, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "triton" else real(name))


def test_a_fit_machine_has_no_reasons_and_nothing_is_imported(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1.0.6", "2.0.1", "2.2.0"):
        install(version)
        pretend(monkeypatch)
        assert backend.SAGE.missing() == []
        assert "sageattention" not in sys.modules


def test_every_reason_is_given_at_once(monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]) -> None:
    install("1.0.6")
    pretend(monkeypatch, cuda=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reasons = backend.SAGE.missing()
    assert reasons == [
        "package sageattention is not installed",
        "package triton is not installed",
        "no CUDA GPU is available",
    ]
    monkeypatch.setitem(REGISTRY, "sage", backend.SAGE)
    (state,) = [state for state in backends() if state.name == "sage"]
    assert (state.usable, state.reasons) == (False, tuple(reasons))
    assert state.install == "pip install sageattention"


@pytest.mark.parametrize(("machine", "fragment"), [
    ({"capability": (7, 5)}, "GPU compute capability 7.5 (it needs 8.0 or newer)"),
    ({"cuda": False}, "no CUDA GPU is available"),
])  # fmt: skip
def test_a_gpu_that_does_not_fit_is_a_reason(
    machine: dict[str, Any], fragment: str, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("1.0.6")
    pretend(monkeypatch, **machine)
    assert backend.SAGE.missing() == [fragment]


def test_rocm_is_a_reason(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("1.0.6")
    pretend(monkeypatch, capability=(9, 5))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    (reason,) = backend.SAGE.missing()
    assert "ROCm" in reason


@pytest.mark.parametrize("version", ["3.0.0", "0.9", None])
def test_unknown_versions_are_a_reason(
    version: str | None, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(version or "1.0.6")
    if version is None:
        for metadata in tmp_path.glob("*/*.dist-info"):
            (metadata / "METADATA").unlink()
            metadata.rename(metadata.with_suffix(".gone"))
    pretend(monkeypatch)
    (reason,) = backend.SAGE.missing()
    assert (version or "unknown version") in reason
    assert "1.x and 2.x" in reason


@pytest.mark.parametrize("version", ["1.0.6", "2.0.1"])
@pytest.mark.parametrize("module", ["quant_per_block_varlen", "attn_qk_int8_per_block_causal_varlen"])
def test_a_package_without_the_kernels_says_what_was_looked_for(
    module: str, version: str, install: Callable[..., None], registered: None
) -> None:
    install(version, without=module)
    inputs, meta = packed([5])
    home = "sageattention" if version == "1.0.6" else "sageattention.triton"
    with refuses(RuntimeError, f"sageattention {version}", f"{home}.{module}.", "No module named", "1.0.6"):
        attend(inputs, meta)


def test_a_kernel_with_other_parameters_is_not_called(oldest: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module: ModuleType = importlib.import_module("sageattention.attn_qk_int8_block_varlen")
    monkeypatch.setattr(module, "forward", lambda q, k, v, lengths: q)
    inputs, meta = packed([5])
    with refuses(RuntimeError, "attn_qk_int8_block_varlen.forward(q, k, v, cu_seqlens_q", "q k v lengths"):
        attend(inputs, meta)


def test_sizes_that_the_kernels_cannot_address_are_refused() -> None:
    """int32 within a sequence; int64 offsets where only the buffer is larger."""
    many = torch.zeros(40_000, dtype=torch.int32)
    row = torch.empty(8, 2, 64)

    def offsets(cu_seqlens: Tensor, longest: int, x: Tensor) -> Any:
        args = Arguments(cu_seqlens, cu_seqlens, longest, longest, False, -1, -1, 1.0, 0.0, False)
        return backend._offsets(args, 128, x, x, x)

    with refuses(ValueError, "32767 sequences", "39999"):
        offsets(many, 8, row)
    large = torch.empty(2**20, 24, 128, device="meta")
    with refuses(ValueError, "max_seqlen", "2147483647", "1000000 rows of 3072"):
        offsets(many[:3], 1_000_000, large)
    assert offsets(many[:3], 4096, large)[0].dtype == torch.int64
    assert offsets(many[:3], 4096, row)[0].dtype == torch.int32


def test_operator_passes_opcheck(version: str) -> None:
    for lengths, causal in (([100, 0, 33], False), ([64, 5], True)):
        inputs, meta = packed(lengths, dim_v=64)
        arguments = (*inputs[:3], meta.cu_seqlens_q, meta.cu_seqlens_k, 100, 100, causal, -1, -1)
        torch.library.opcheck(torch.ops.varlen_prep.sage_attn_varlen.default, arguments)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_into_one_dynamic_graph_without_reads(version: str) -> None:
    linear = torch.nn.Linear(64, 3, dtype=torch.float16)

    def model(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        meta = prepare_varlen(q.shape[0], q.shape[1], k.shape[1], mask, max_seqlen_k=k.shape[1])
        return linear(varlen_attention(q, k, v, meta, backend="sage"))

    recorder = Recorder()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=recorder)
    with torch.no_grad():
        for batch, seq_q, seq_kv in [(3, 5, 70), (5, 6, 9), (6, 11, 65), (7, 9, 13), (9, 10, 12)]:
            inputs = make_inputs((batch, seq_q), (batch, seq_kv), dim=64, dtype=torch.float16)[:3]
            mask = make_mask("holes", batch, seq_kv)
            assert_bit_equal(compiled(*inputs, mask), model(*inputs, mask))
    assert recorder.compiles == 1
    assert not recorder.syncs


@pytest.mark.usefixtures("fresh_compiler")
def test_reasons_are_found_while_tracing(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the installed packages cannot be traced: it happens once, and its result is a constant."""
    install("1.0.6")
    with monkeypatch.context() as patch:
        pretend(patch)
        assert backend.SAGE.missing() == []
    record = dataclasses.replace(backend.SAGE, dtypes={"cpu": HALVES})
    if not hasattr(torch.ops.varlen_prep, record.op):
        op.define(record)
    monkeypatch.setitem(REGISTRY, "sage", record)
    inputs, meta = packed([5, 7])
    compiled = torch.compile(lambda q, k, v: attend((q, k, v), meta), fullgraph=True, backend="eager")
    assert_bit_equal(compiled(*inputs[:3]), attend(inputs, meta))
    assert operators_run(lambda: attend(inputs, meta)) == ["sage_attn_varlen"]
