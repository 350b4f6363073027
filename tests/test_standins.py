"""flash-attn 2, 3 and 4, installed or from the Hub, on stand-in modules with their signatures and traps (`standins/`).

What the real packages do on a GPU is tested in `test_kernels`; here every branch of the adapters runs without them.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import (
    Inputs,
    Recorder,
    assert_bit_equal,
    assert_near,
    assert_zero_rows,
    make_inputs,
    make_mask,
    oracle,
    poison,
    refuses,
    run,
)
from standins import _attention, flash2, flash3, flash4
from torch import Tensor

from varlen_prep import VarlenMetadata, op, prepare_varlen, varlen_attention
from varlen_prep.backends import Arguments, Request, _calls, flash, hub
from varlen_prep.backends import flash3 as flash3_backend
from varlen_prep.backends import flash4 as flash4_backend

F16, BF16 = torch.float16, torch.bfloat16
RECORDS = {
    record.name: record
    for record in (
        flash.FLASH, flash3_backend.FLASH3, flash4_backend.FLASH4, hub.FLASH_HUB, hub.FLASH3_HUB, hub.FLASH4_HUB,
    )
}  # fmt: skip
# Where each installed package is imported from.
HOMES = {"flash": "flash_attn.flash_attn_interface", "flash3": "flash_attn_interface", "flash4": "flash_attn.cute"}
RELEASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "flash": ("flash", flash2.module),
    "flash_hub": ("flash_hub", flash2.hub),
    "flash3": ("flash3", flash3.module),
    "flash3_hub": ("flash3_hub", functools.partial(flash3.module, style="hub")),
    "flash4": ("flash4", flash4.module),
    "flash4_hub": ("flash4_hub", flash4.module),
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Puts a module where its backend finds it, and allows the backend on the CPU; returns the backend's name."""

    def put(name: str, module: Any) -> str:
        record = dataclasses.replace(RECORDS[name], dtypes={"cpu": (F16, BF16)}, missing=list)
        if not hasattr(torch.ops.varlen_prep, record.op):
            op.define(record)
        monkeypatch.setitem(op.REGISTRY, name, record)
        if name in HOMES:
            monkeypatch.setitem(sys.modules, HOMES[name], module)
        else:
            monkeypatch.setitem(hub._loaded, name, module)
        return name

    return put


@pytest.fixture(params=RELEASES)
def backend(request: pytest.FixtureRequest, install: Callable[..., str]) -> str:
    name, make = RELEASES[request.param]
    return install(name, make())


def packed(lengths_q: list[int], lengths_k: list[int] | None = None, **options: Any) -> tuple[Inputs, VarlenMetadata]:
    lengths_k = lengths_q if lengths_k is None else lengths_k
    meta = VarlenMetadata.from_lengths(lengths_q, None if lengths_k is lengths_q else lengths_k)
    return make_inputs((sum(lengths_q),), (sum(lengths_k),), **{"dtype": F16, **options}), meta


def check(inputs: Inputs, meta: VarlenMetadata, backend: str, *, softcap: float = 0.0, **options: Any) -> None:
    seen = meta.materialize(**options)
    got = run(inputs, meta, backend=backend, softcap=softcap, **options)
    assert_near(got, oracle(inputs, seen, softcap=softcap), inputs.q.dtype)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 0)}, {"softcap": 2.0}], ids=str)
def test_equals_the_oracle(options: dict[str, Any], dtype: torch.dtype, backend: str) -> None:
    for lengths in ([10, 3, 1, 0, 26], [7]):
        check(*packed(lengths, dtype=dtype), backend, **options)
    check(*packed([5, 0, 13], [20, 3, 0]), backend, **options)


def test_other_head_sizes_are_widened(backend: str) -> None:
    for dim, dim_v in ((5, 5), (8, 3), (12, 16)):
        check(*packed([6, 2], dim=dim, dim_v=dim_v), backend, causal=True)


def test_functions_and_registered_operators_give_the_same_bits(install: Callable[..., str]) -> None:
    inputs, meta = packed([6, 2])
    results = []
    for style in ("plain", "hub"):
        name = install("flash3_hub" if style == "hub" else "flash3", flash3.module(style=style))
        results.append(run(inputs, meta, backend=name, causal=True, window_size=(2, 0), softcap=3.0))
    assert_bit_equal(results[1], results[0])


def test_lse_is_heads_by_rows_also_where_both_numbers_agree(backend: str) -> None:
    for rows in (4, 9):
        inputs, meta = packed([rows - 3, 3], heads=4)
        _, lse = varlen_attention(*inputs[:3], meta, backend=backend, return_lse=True)
        assert (lse.shape, lse.dtype) == ((4, rows), torch.float32)
        assert_near(lse, oracle(inputs, meta.materialize()).lse, F16)


def test_lse_of_a_query_without_keys_is_minus_infinity_and_its_gradients_are_zero(backend: str) -> None:
    inputs, meta = packed([4, 3, 2], [0, 5, 1])
    got = run(inputs, meta, backend=backend, causal=True)
    assert (got.lse[:, :4] == -torch.inf).all()
    # Of two queries and one key the first sees none.
    assert (got.lse[:, 7] == -torch.inf).all()
    assert (got.dq[:4] == 0).all()
    assert all(x.isfinite().all() for x in (got.out, got.dq, got.dk, got.dv))
    check(inputs, meta, backend, causal=True)


LACKS = {"softcap": 0.0, "deterministic": False}


def lacking(name: str, without: dict[str, Any], renamed: dict[str, str] | None = None) -> Any:
    """A release of the module without some arguments, or with other names for them."""
    module = RELEASES[name][1]()
    for holder in (module, getattr(module, "flash_attn_interface", None), getattr(module, "interface", None)):
        for attribute, function in vars(holder).items() if holder is not None else ():
            if attribute.strip("_").startswith("flash_attn_") and callable(function):
                inner = getattr(function, "_init_fn", function)
                known = inner.__code__.co_varnames[: inner.__code__.co_argcount]
                fits = {key: value for key, value in without.items() if key in known}
                setattr(
                    holder,
                    attribute,
                    _attention.altered(inner, fits, {k: v for k, v in (renamed or {}).items() if k in known}),
                )
    return module


@pytest.mark.parametrize("name", ["flash", "flash_hub", "flash3", "flash3_hub", "flash4"])
def test_arguments_that_a_release_lacks_are_dropped_at_their_default_and_else_refused_by_name(
    name: str, install: Callable[..., str]
) -> None:
    install(name, lacking(name, LACKS))
    inputs, meta = packed([6, 2])
    check(inputs, meta, name, causal=True)
    with refuses(ValueError, "softcap", "2.0", "default"):
        run(inputs, meta, backend=name, softcap=2.0)
    with refuses(ValueError, "deterministic", "True"):
        run(inputs, meta, backend=name, deterministic=True)


def test_an_argument_that_nothing_is_known_about_is_refused_by_name() -> None:
    def kernel(q: Tensor, news: Tensor, scale: float = 1.0, *, later: int = 0) -> None: ...

    with refuses(ValueError, "kernel needs news", "not one that varlen_prep knows"):
        _calls.bind(kernel, ("q",))


def test_the_function_of_a_registered_operator_is_called_without_a_second_dispatch() -> None:
    @torch.library.custom_op("varlen_prep_tests::scaled", mutates_args=())
    def scaled(x: Tensor, causal: bool, scale: float = 1.0) -> Tensor:
        return x * scale

    x = torch.ones(2)
    run = _calls.bind(scaled, ("x", "causal"), (("scale", 3.0, 1.0),))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert_bit_equal(run(x, True), 3 * x)
        scaled(x, True)
    assert [event.name for event in profile.events()].count("varlen_prep_tests::scaled") == 1


@pytest.mark.parametrize(
    ("name", "window"), [("flash3", {"window_size": (-1, -1)}), ("flash4", {"window_size": (None, None)})]
)
def test_a_release_without_windows_is_refused_for_a_window_only(
    name: str, window: dict[str, Any], install: Callable[..., str]
) -> None:
    install(name, lacking(name, window))
    inputs, meta = packed([6, 2])
    check(inputs, meta, name)
    with refuses(ValueError, "window_size", "3"):
        run(inputs, meta, backend=name, window_size=(3, 0))


def test_a_release_with_windows_of_another_form_is_refused_by_name(install: Callable[..., str]) -> None:
    """flash-attn up to 2.6 has one pair instead, and returns eight values of which the second is q."""
    renamed = {"window_size_left": "window_size", "window_size_right": "other"}
    inputs, meta = packed([6, 2])
    with refuses(ValueError, "window_size_left", "window_size"):
        run(inputs, meta, backend=install("flash", lacking("flash", {}, renamed)))


@pytest.mark.parametrize("renamed", [
    {"cu_seqlens_k": "cu_seqlens_kv", "max_seqlen_k": "max_seqlen_kv"}, {"causal": "is_causal"},
    {"sequed_q": "seqused_q", "sequed_k": "seqused_k"},
])  # fmt: skip
@pytest.mark.parametrize("name", ["flash", "flash_hub", "flash3", "flash3_hub", "flash4"])
def test_renamed_arguments_are_found(name: str, renamed: dict[str, str], install: Callable[..., str]) -> None:
    check(*packed([6, 2], [3, 9]), install(name, lacking(name, {}, renamed)), causal=True)


def test_an_argument_under_no_known_name_is_an_error_that_lists_what_there_is(install: Callable[..., str]) -> None:
    inputs, meta = packed([6, 2])
    name = install("flash4", lacking("flash4", {}, {"cu_seqlens_k": "offsets"}))
    with refuses(ValueError, "cu_seqlens_k", "offsets", "max_seqlen_k"):
        run(inputs, meta, backend=name)


@pytest.mark.parametrize("name", ["flash4", "flash4_hub"])
def test_nothing_comes_by_position_after_v(name: str, install: Callable[..., str]) -> None:
    """The fourth positional argument of flash-attn 4 is qv: the stand-in asserts that it stays None."""
    inputs, meta = packed([6, 2])
    install(name, flash4.module())
    check(inputs, meta, name)
    with pytest.raises(AssertionError, match="qv"):
        flash4.module().flash_attn_varlen_func(*inputs[:3], meta.cu_seqlens_q, meta.cu_seqlens_k, 6, 6)


@pytest.mark.parametrize("window_size", [(-1, -1), (2, -1), (-1, 2), (-1, 5), (2, 1), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_open_sides_of_a_window(causal: bool, window_size: tuple[int, int], backend: str) -> None:
    """flash-attn 4 takes None for them, flash-attn 2 drops or opens bounds where queries outnumber keys."""
    for lengths in (([9, 3], [9, 3]), ([12, 4], [3, 20]), ([12], [3])):
        check(*packed(*lengths), backend, causal=causal, window_size=window_size)


def test_maxima_reach_the_kernel_as_ints(backend: str, fresh_compiler: None) -> None:
    """The stand-ins insist on it. Eager, compiled with symbols, and past a loose bound."""

    def step(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return varlen_attention(q, k, v, prepare_varlen(*mask.shape, mask.shape[1], mask), backend=backend)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=Recorder())
    for batch, seq in ((3, 5), (4, 7), (5, 9)):
        mask = make_mask("right", batch, seq)
        inputs = make_inputs((batch, seq), (batch, seq), dtype=F16)
        meta = prepare_varlen(batch, seq, seq, mask, max_seqlen_k=100)
        expected = varlen_attention(*inputs[:3], meta, backend=backend)
        assert_bit_equal(compiled(*inputs[:3], mask), expected)


def test_a_tensor_as_a_maximum_never_reaches_the_kernel(backend: str) -> None:
    inputs, meta = packed([6, 2])
    longest = torch.tensor(6)
    with refuses(TypeError, "max_seqlen_k", "host int", "Tensor"):
        prepare_varlen(2, 6, 6, torch.ones(2, 6, dtype=torch.bool), max_seqlen_k=longest)
    operator = op.operator(op.REGISTRY[backend])
    arguments = (*inputs[:3], meta.cu_seqlens_q, meta.cu_seqlens_k)
    expected = operator(*arguments, 6, 6, False, -1, -1)
    try:
        got = operator(*arguments, longest, longest, False, -1, -1)
    except (TypeError, RuntimeError):
        return
    assert_bit_equal(got, expected)


def request(**changes: Any) -> Request:
    usual = {
        "device": torch.device("cuda"), "dtype": BF16, "heads": 4, "heads_kv": 2, "head_dim": 64, "head_dim_v": 64,
        "causal": False, "window_size": (-1, -1), "softcap": 0.0, "deterministic": False, "backward": True, "lse": True,
        "equal_lengths": False,
    }  # fmt: skip
    return Request(**{**usual, **changes})


@pytest.mark.parametrize("name", RECORDS)
def test_only_half_precision_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for dtype in (F16, BF16):
        assert RECORDS[name].reasons(request(dtype=dtype)) == []
    (reason,) = RECORDS[name].reasons(request(dtype=torch.float32))
    assert "torch.float32" in reason
    assert "torch.bfloat16" in reason
    (reason,) = RECORDS[name].reasons(request(device=torch.device("cpu")))
    assert "device cpu" in reason


def test_rows_of_a_full_precision_are_refused_by_name_and_run_elsewhere_without_one(backend: str) -> None:
    inputs, meta = packed([6, 2], dtype=torch.float32)
    with refuses(ValueError, repr(backend), "dtype torch.float32", "native"):
        varlen_attention(*inputs[:3], meta, backend=backend)
    assert_near(varlen_attention(*inputs[:3], meta), oracle(inputs, meta.materialize()).out, torch.float32)


def test_a_build_without_fp16_is_refused_before_it_is_called(install: Callable[..., str]) -> None:
    name = install("flash3_hub", flash3.module(style="hub", dtypes=(BF16,)))
    check(*packed([6, 2], dtype=BF16), name)
    inputs, meta = packed([6, 2])
    with refuses(ValueError, repr(name), "leaves out FP16", "native"):
        varlen_attention(*inputs[:3], meta, backend=name)


@pytest.mark.parametrize(("flag", "changes"), [
    ("SOFTCAP", {"softcap": 1.0}), ("LOCAL", {"window_size": (3, 0)}), ("BACKWARD", {"backward": True}), ("VARLEN", {}),
])  # fmt: skip
def test_what_else_a_build_leaves_out_is_a_reason_only_where_it_is_used(
    flag: str, changes: dict[str, Any], install: Callable[..., str]
) -> None:
    module = flash3.module(style="hub")
    install("flash3_hub", module)
    plain = request(backward=False)
    assert hub.FLASH3_HUB.reasons(plain) == []
    module.flash_attn_config.CONFIG["build_flags"][f"FLASHATTENTION_DISABLE_{flag}"] = True
    assert hub.FLASH3_HUB.reasons(plain) == ([] if changes else ["the loaded build leaves out VARLEN"])
    assert hub.FLASH3_HUB.reasons(plain._replace(**changes)) == [f"the loaded build leaves out {flag}"]


def test_rows_past_the_last_offset_are_zero_forward_and_backward(backend: str) -> None:
    """The stand-ins leave NaN there, in out, LSE and all gradients, and NaN comes in."""
    meta = VarlenMetadata.from_lengths(torch.tensor([6, 2]), max_seqlen_q=7)
    part = torch.arange(12) < 8
    inputs = make_inputs((12,), (12,), dtype=F16)
    got = run(poison(inputs, part, part), meta, backend=backend, causal=True)
    for x in (got.out, got.dq, got.dk, got.dv):
        assert_zero_rows(x, part)
    assert (got.lse[:, 8:] == -torch.inf).all()
    # The metadata without spare rows; the spare keys changed no bit.
    exact = VarlenMetadata.from_lengths([6, 2])
    expected = run(Inputs(*(x[:8] for x in inputs)), exact, backend=backend, causal=True)
    assert_bit_equal(got.out[:8], expected.out)
    assert_near(got.dk[:8], expected.dk, F16)


def test_keys_of_a_sequence_without_queries_have_zero_gradients(backend: str) -> None:
    inputs, meta = packed([150, 0, 150], [100, 100, 100])
    got = run(inputs, meta, backend=backend)
    assert (got.dk[100:200] == 0).all()
    assert (got.dv[100:200] == 0).all()
    check(inputs, meta, backend)


@pytest.mark.parametrize("layout", ["packed", "in_place"])
@pytest.mark.parametrize("kind", ["right", "left", "middle", "some_empty", "all_empty"])
@pytest.mark.parametrize("sides", ["q", "k", "both"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_padding_may_hold_anything(value: float, sides: str, kind: str, layout: str, backend: str) -> None:
    """Past-the-end reads meet it, and a gap is no longer than the maximum: its rows are written."""
    mask = make_mask(kind, 3, 11) if sides != "q" else None
    mask_q = make_mask(kind, 3, 9, seed=1) if sides != "k" else None
    meta = prepare_varlen(3, 9, 11, mask, mask_q=mask_q, layout=layout)
    clean = make_inputs((3, 9), (3, 11), dtype=F16)
    got = run(poison(clean, mask_q, mask, value), meta, backend=backend)
    expected = run(clean, prepare_varlen(3, 9, 11, mask, mask_q=mask_q), backend=backend)
    assert_near(got, expected, F16)
    for x, part in ((got.out, mask_q), (got.dq, mask_q), (got.dk, mask), (got.dv, mask)):
        if part is not None:
            assert_zero_rows(x, part)


@pytest.mark.parametrize("name", ["flash3", "flash4"])
def test_bare_kernels_do_spread_what_lies_past_the_end(name: str) -> None:
    """The twin of the test above: without care the stand-ins fail as the kernels do."""
    inputs, meta = packed([3, 4])
    inputs.v[3:] = torch.nan
    module, adapter = RELEASES[name][1](), {"flash3": flash3_backend, "flash4": flash4_backend}[name]
    args = Arguments(meta.cu_seqlens_q, meta.cu_seqlens_k, 4, 4, False, -1, -1, 1.0, 0.0, False)
    out, _ = adapter.forward(lambda: module, *inputs[:3], args)
    assert out[:3].isnan().all()


def test_single_queries_with_empty_rows_and_grouped_heads(backend: str) -> None:
    """A maximum of 1 selects a decoding path in flash-attn 2 that takes every sequence to have one query."""
    inputs, meta = packed([1, 0, 1], [3, 0, 5], heads=9, heads_kv=3, dim=64)
    assert meta.max_seqlen_q == 1
    assert varlen_attention(*inputs[:3], meta, backend=backend, causal=True).shape == (2, 9, 64)
    check(inputs, meta, backend, causal=True)
    with pytest.raises(RuntimeError, match="shape"):
        flash2.module()._flash_attn_varlen_forward(
            *inputs[:3], meta.cu_seqlens_q, meta.cu_seqlens_k, 1, 5, 0.0, 0.125, True
        )


def test_private_names_that_a_package_lacks_are_listed(install: Callable[..., str]) -> None:
    inputs, meta = packed([6, 2])
    lost = SimpleNamespace(__name__="_kernel_0", flash_attn_func=None)
    looked_for = {
        "flash_hub": "_flash_attn_varlen_forward, flash_attn_interface._flash_attn_varlen_forward",
        "flash3_hub": "_flash_attn_forward, flash_attn_interface._flash_attn_forward",
        "flash4_hub": "flash_attn_varlen_func, interface.flash_attn_varlen_func",
    }
    for name, names in looked_for.items():
        with refuses(ImportError, "_kernel_0", names):
            varlen_attention(*inputs[:3], meta, backend=install(name, lost))


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("capability", [(9, 0), (9, 4), (9, 5)])
def test_an_amd_gpu_is_not_hopper(capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert any("ROCm" in reason for reason in RECORDS[name].missing())
    monkeypatch.setattr(torch.version, "hip", None)
    assert not any("ROCm" in reason for reason in RECORDS[name].missing())


def test_operators_pass_opcheck(backend: str) -> None:
    inputs, meta = packed([3, 0, 4], [5, 2, 0])
    rows = [x.requires_grad_() for x in inputs[:3]]
    arguments = (*rows, meta.cu_seqlens_q, meta.cu_seqlens_k, 4, 5, True, -1, -1)
    torch.library.opcheck(op.operator(op.REGISTRY[backend]), arguments)
