"""SageAttention, on a stand-in package that computes as its kernels do (`standins/sage.py`), traps included.

What the real package does on a GPU is measured apart.  Tolerances are those of int8 scores.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import (
    Recorder,
    assert_bit_equal,
    make_inputs,
    make_mask,
    operators_run,
    oracle,
    poison,
    random,
    refuses,
)
from standins import sage as standin
from torch import Tensor

from varlen_prep import VarlenMetadata, backends, op, prepare_varlen, varlen_attention
from varlen_prep.backends import REGISTRY, Arguments, Request
from varlen_prep.backends import sage as backend

HALVES = (torch.float16, torch.bfloat16)
LENGTHS = [100, 33, 1, 257, 65, 0]
# Early builds of 2.2.0 lack the mask of the lanes, as 1.0.6 and 2.0.1 do.
VERSIONS = {"1.0.6": {}, "2.0.1": {}, "2.2.0": {}, "2.2.0-early": {"masks": False}}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a stand-in of some version where `import sageattention` finds it."""
    cached = backend._load, backend._reasons

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "sageattention"]:
            monkeypatch.delitem(sys.modules, name)
        for function in cached:
            function.cache_clear()
        importlib.invalidate_caches()

    def put(version: str, **options: Any) -> None:
        folder = tmp_path / f"site{len(list(tmp_path.iterdir()))}"
        standin.install(folder, version.split("-")[0], **options)
        monkeypatch.syspath_prepend(folder)
        forget()

    yield put
    forget()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend by its name, allowed on the CPU and without a look at this machine."""
    record = dataclasses.replace(backend.SAGE, dtypes={"cpu": HALVES}, missing=list)
    if not hasattr(torch.ops.varlen_prep, record.op):
        op.define(record)
    monkeypatch.setitem(REGISTRY, record.name, record)


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest, install: Callable[..., None], registered: None) -> str:
    install(request.param, **VERSIONS[request.param])
    return request.param


@pytest.fixture
def oldest(install: Callable[..., None], registered: None) -> None:
    """1.0.6: every trap at once."""
    install("1.0.6")


def packed(
    lengths_q: list[int], lengths_k: list[int] | None = None, *, dim: int = 64, dtype: torch.dtype = torch.float16,
    **options: Any,
) -> tuple[Any, VarlenMetadata]:  # fmt: skip
    lengths_k = lengths_q if lengths_k is None else lengths_k
    meta = VarlenMetadata.from_lengths(lengths_q, None if lengths_k is lengths_q else lengths_k)
    rows = (sum(lengths_q),), (sum(lengths_k),)
    return make_inputs(*rows, heads=4, heads_kv=2, dim=dim, dtype=dtype, **options), meta


def attend(inputs: Any, meta: VarlenMetadata, **options: Any) -> Tensor:
    return varlen_attention(*inputs[:3], meta, backend="sage", **options)


def assert_close_to_oracle(out: Tensor, inputs: Any, seen: Tensor, *, scale: float | None = None) -> None:
    error = (out.double() - oracle(inputs, seen, scale=scale).out).abs()
    assert error.max() < 0.06
    assert error.pow(2).mean().sqrt() < 0.005


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_oracle_for_lengths_that_are_no_multiple_of_a_block(
    causal: bool, dim: int, dtype: torch.dtype, version: str
) -> None:
    inputs, meta = packed(LENGTHS, dim=dim, dtype=dtype)
    out = attend(inputs, meta, causal=causal)
    assert (out.dtype, out.shape) == (dtype, inputs.q.shape)
    assert_close_to_oracle(out, inputs, meta.materialize(causal=causal))


@pytest.mark.parametrize("dim", [64, 128])
def test_every_weight_goes_to_true_keys(dim: int, version: str) -> None:
    """V = 1 must give 1: nothing of the lanes past the last key is left."""
    lengths = [1, 63, 64, 65, 2, 127, 128, 129]
    inputs, meta = packed([130] * len(lengths), lengths, dim=dim)
    inputs = inputs._replace(v=torch.ones_like(inputs.v))
    assert (attend(inputs, meta) - 1).abs().max() < 2e-3


@pytest.mark.parametrize("dim", [64, 128])
def test_logits_far_below_zero_keep_their_weight(dim: int, version: str) -> None:
    """The lanes have logit 0: against logits of -30 they would take everything, and no division could undo it."""
    inputs, meta = packed(LENGTHS, dim=dim)
    direction = torch.ones(dim, dtype=torch.float16)
    inputs = inputs._replace(q=inputs.q * 0.3 + direction, k=inputs.k * 0.3 - 30 * dim**-0.5 * direction)
    scores = torch.einsum("qhd,khd->hqk", inputs.q[:, ::2].double(), inputs.k.double()) * dim**-0.5
    assert scores.max() < -20
    assert_close_to_oracle(attend(inputs, meta), inputs, meta.materialize())


@pytest.mark.parametrize("scale", [0.0, -0.1, 1.0])
def test_any_scale_is_right(scale: float, version: str) -> None:
    inputs, meta = packed(LENGTHS)
    inputs = inputs._replace(q=inputs.q * 0.2)
    assert_close_to_oracle(attend(inputs, meta, softmax_scale=scale), inputs, meta.materialize(), scale=scale)


@pytest.mark.parametrize(("dim", "dim_v"), [(8, 8), (40, 40), (63, 64), (64, 63), (64, 72), (80, 80), (128, 16)])
def test_other_head_sizes_are_widened_with_zeros(dim: int, dim_v: int, version: str) -> None:
    inputs, meta = packed([70, 64, 3], dim=dim, dim_v=dim_v)
    for causal in (False, True):
        out = attend(inputs, meta, causal=causal)
        assert out.shape == (137, 4, dim_v)
        assert_close_to_oracle(out, inputs, meta.materialize(causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_widening_changes_no_bit(causal: bool, oldest: None) -> None:
    inputs, meta = packed(LENGTHS, dim=40)
    zeros = torch.nn.functional.pad
    wide = [zeros(inputs.q, (0, 23)), zeros(inputs.k, (0, 23)), inputs.v]
    assert_bit_equal(attend(inputs, meta, causal=causal), attend(wide, meta, causal=causal, softmax_scale=40**-0.5))


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_of_the_caller_is_written_to(causal: bool, version: str) -> None:
    inputs, meta = packed(LENGTHS)
    inputs = inputs._replace(k=inputs.k + 3)
    before = [x.clone() for x in inputs]
    attend(inputs, meta, causal=causal)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [5.0, torch.nan, torch.inf])
def test_documents_do_not_touch_each_other_bit_for_bit(value: float, causal: bool, dim: int, version: str) -> None:
    """Not through the mean of K, not through a scale past those of a sequence."""
    inputs, meta = packed([100, 33, 60, 40], dim=dim)
    before = attend(inputs, meta, causal=causal)
    row = torch.arange(233)
    document = (row >= 133) & (row < 193)
    changed = poison(inputs, ~document, ~document, value)
    after = attend(changed, meta, causal=causal)
    assert before[~document].isfinite().all()
    assert_bit_equal(after[~document], before[~document])


@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_equals_its_sequences_one_by_one(causal: bool, version: str) -> None:
    inputs, meta = packed(LENGTHS)
    out = attend(inputs, meta, causal=causal)
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    for begin, end in zip([0, *ends], ends, strict=False):
        one = VarlenMetadata.from_lengths([end - begin])
        assert_bit_equal(attend([x[begin:end] for x in inputs[:3]], one, causal=causal), out[begin:end])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_rows_past_the_last_offset_may_hold_anything(dim: int, causal: bool, version: str) -> None:
    inputs, meta = packed(LENGTHS, dim=dim)
    longer = [torch.cat([x, torch.full((37, *x.shape[1:]), torch.nan, dtype=x.dtype)]) for x in inputs[:3]]
    out = attend(longer, meta, causal=causal)
    assert (out[-37:] == 0).all()
    assert_bit_equal(out[:-37], attend(inputs, meta, causal=causal))


@pytest.mark.parametrize("layout", ["packed", "in_place"])
@pytest.mark.parametrize("kind", ["full", "right", "left", "middle", "some_empty", "all_empty"])
def test_padding_may_hold_nan_in_both_layouts(kind: str, layout: str, version: str) -> None:
    mask = make_mask(kind, 4, 70)
    part = make_mask(kind, 4, 50, seed=1)
    inputs = poison(make_inputs((4, 50), (4, 70), dim=64, dtype=torch.float16), part, mask)
    meta = prepare_varlen(4, 50, 70, mask, mask_q=part, layout=layout)
    out = attend(inputs, meta)
    assert (out[~part] == 0).all()
    assert_close_to_oracle(out, inputs, meta.materialize())


@pytest.mark.parametrize("layout", ["packed", "in_place"])
def test_causal_self_attention_under_a_mask_is_right_or_refused(layout: str, oldest: None) -> None:
    mask = make_mask("left", 3, 90)
    inputs = poison(make_inputs((3, 90), (3, 90), dim=64, dtype=torch.float16), mask, mask)
    meta = prepare_varlen(3, 90, 90, mask, mask_q=mask, layout=layout)
    if not meta.equal_lengths:
        with refuses(ValueError, "top-left"):
            attend(inputs, meta, causal=True)
    else:
        assert_close_to_oracle(attend(inputs, meta, causal=True), inputs, meta.materialize(causal=True))


@pytest.mark.parametrize("dim", [40, 64, 128])
def test_no_keys_give_zero_and_no_queries_give_nothing(dim: int, version: str) -> None:
    inputs, meta = packed([5, 0, 7, 3], [0, 9, 64, 65], dim=dim)
    out = attend(inputs, meta)
    assert (out[:5] == 0).all()
    assert_close_to_oracle(out, inputs, meta.materialize())
    for lengths in ([0, 0], [4, 3]):
        empty, none = packed(lengths, [0, 0], dim=dim)
        assert (attend(empty, none) == 0).all()


def test_no_sequences_at_all_are_no_error(version: str) -> None:
    inputs, _ = packed([5], dim=128)
    offsets = torch.zeros(1, dtype=torch.int32)
    out, _ = torch.ops.varlen_prep.sage_attn_varlen(*inputs[:3], offsets, offsets, 5, 5, False, -1, -1)
    assert out.shape == inputs.q.shape


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_any_bound_of_the_maximum_gives_the_same_bits(dim: int, causal: bool, version: str) -> None:
    inputs, meta = packed(LENGTHS, dim=dim)
    loose = dataclasses.replace(meta, max_seqlen_q=10**9, max_seqlen_k=10**9, exact_q=False, exact_k=False)
    assert_bit_equal(attend(inputs, loose, causal=causal), attend(inputs, meta, causal=causal))


def test_strided_rows_equal_contiguous_ones(version: str) -> None:
    fused = random(456, 3, 4, 64, dtype=torch.float16)
    meta = VarlenMetadata.from_lengths(LENGTHS)
    expected = attend([x.contiguous() for x in fused.unbind(1)], meta)
    assert_bit_equal(attend(fused.unbind(1), meta), expected)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in fused.unbind(1)]
    assert turned[0].stride(-1) != 1
    assert_bit_equal(attend(turned, meta), expected)


def _count_passes(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The outputs of the attention kernel, call by call. Rows that it does not write hold 0.5: old memory."""
    kernels, outputs = backend._load(), []

    def counted(*args: Any, **options: Any) -> Tensor:
        assert args[5] <= len(args[0]), "the grid is larger than the rows"
        outputs.append(kernels.attend(*args, **options).nan_to_num_(0.5))
        return outputs[-1]

    monkeypatch.setattr(backend, "_load", lambda: kernels._replace(attend=counted))
    return outputs


@pytest.mark.parametrize(("dim_v", "passes"), [(128, 2), (127, 1)])
def test_a_second_pass_runs_only_where_lanes_count_and_no_column_is_free(
    dim_v: int, passes: int, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, meta = packed([100, 64], dim=128, dim_v=dim_v)
    outputs = _count_passes(monkeypatch)
    attend(inputs, meta)
    assert len(outputs) == (1 if version == "2.2.0" else passes)


def test_the_second_pass_skips_sequences_without_such_lanes(oldest: None, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, meta = packed([130, 100, 0, 64, 7, 128], [64, 65, 3, 0, 1, 192], dim=64)
    outputs = _count_passes(monkeypatch)
    out = attend(inputs, dataclasses.replace(meta, max_seqlen_q=10**9, exact_q=False))
    ran = (outputs[1] != 0.5).all(2).all(1).nonzero().flatten()
    assert_bit_equal(ran, torch.cat([torch.arange(130, 230), torch.arange(294, 301)]))
    assert_close_to_oracle(out, inputs, meta.materialize())


def test_the_stand_in_has_the_traps_that_the_tests_above_look_for(oldest: None) -> None:
    import sageattention

    inputs, meta = packed([100, 33, 60, 40])
    offsets = meta.cu_seqlens_q, meta.cu_seqlens_k, meta.max_seqlen_q, meta.max_seqlen_k

    def bare(k: Tensor, **options: Any) -> Tensor:
        return sageattention.sageattn_varlen(inputs.q, k, inputs.v, *offsets, **options)

    written = inputs.k + 3
    assert not torch.equal(bare(written) * 0 + written[:1, :1], inputs.k[:1, :1] + 3), "K is not written to"
    wrong = (bare(inputs.k.clone(), smooth_k=False).double() - oracle(inputs, meta.materialize()).out).abs().max()
    assert wrong > 0.1, "the lanes do not count"
    changed = inputs.k.clone()
    changed[133:] += 5
    before, after = bare(inputs.k.clone())[:100], bare(changed)[:100]
    assert not torch.equal(before, after), "the mean does not mix sequences"
    assert bare(inputs.k.clone(), is_causal=True)[-40:].isnan().any(), "no scale is read past the end"


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
