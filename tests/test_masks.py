"""`prepare_varlen`: masks to offsets, maxima and rows; every spelling of a mask; every refusal with its text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    MASK_KINDS,
    ONE_RUN,
    assert_bit_equal,
    assert_zero_rows,
    case,
    cases,
    make_inputs,
    make_mask,
    poison,
    refuses,
    run,
)

from varlen_prep import VarlenMetadata, pack, prepare_varlen, varlen_attention

BACKENDS = ("native", "reference")
LAYOUTS = ("packed", "in_place")
GOOD = [one for one in cases("masks") if "error" not in one.values[0]]
BAD = {
    "per-query-4d": (ValueError, "mask", "(batch, 1, 1, seq)", "(1, 1, 3, 3)", "causal=True"),
    "per-head-4d": (ValueError, "mask", "(batch, 1, 1, seq)", "(1, 2, 1, 2)", "causal=True"),
    "ones-4d-full": (ValueError, "mask", "(batch, 1, 1, seq)", "(2, 1, 3, 3)", "causal=True"),
    "label-mask": (TypeError, "mask", "torch.bool", "torch.int64", "mask.bool()", "from_document_ids"),
    "float-mask": (TypeError, "mask", "torch.bool", "torch.float32", "mask == 0"),
    "int32-wrap": (ValueError, "batch * seq_q", "at most 2147483647", "2147483650", "split the batch"),
}


def mask_of(one: dict[str, Any], key: str = "mask") -> torch.Tensor | None:
    value = one.get(key)
    shape = one.get("mask_shape", [one.get("batch"), one.get("seq_kv")])
    if value is None:
        return None
    if value == "ones":
        return torch.ones(shape, dtype=torch.bool)
    if value == "lower triangular":
        return torch.ones(shape, dtype=torch.bool).tril()
    mask = torch.tensor(value)
    return mask if mask.is_floating_point() or mask.max() > 1 else mask.bool()


def prepare(one: dict[str, Any], device: str = "cpu", **options: Any) -> VarlenMetadata:
    mask, mask_q = (None if m is None else m.to(device) for m in (mask_of(one), mask_of(one, "mask_q")))
    return prepare_varlen(one["batch"], one["seq_q"], one["seq_kv"], mask, mask_q=mask_q, device=device, **options)


def layouts_of(one: dict[str, Any]) -> tuple[str, ...]:
    mask = mask_of(one)
    rows = [] if mask is None else mask.flatten(1).tolist()
    has_hole = any("01" in "".join("1" if seen else "0" for seen in row).strip("0") for row in rows)
    return LAYOUTS[:1] if has_hole else LAYOUTS


@pytest.mark.parametrize("one", GOOD)
def test_case_gives_the_stated_offsets_maxima_and_rows(one: dict[str, Any], device: str) -> None:
    meta = prepare(one, device)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        cu_seqlens = getattr(meta, name)
        assert cu_seqlens.dtype == torch.int32
        assert cu_seqlens.device.type == device
        if name in one:
            assert cu_seqlens.tolist() == one[name]
    assert type(meta.max_seqlen_q) is int
    assert type(meta.max_seqlen_k) is int
    assert meta.exact_k
    if "max_seqlen_q" in one:
        assert meta.max_seqlen_q == one["max_seqlen_q"]
    if "max_seqlen_k" in one:
        assert meta.max_seqlen_k == one["max_seqlen_k"]
    if "key_rows" in one:
        rows = torch.arange(one["batch"] * one["seq_kv"], device=device).view(one["batch"], -1)
        total = int(meta.cu_seqlens_k[-1])
        assert pack(rows, meta, "k")[:total].tolist() == one["key_rows"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("one", "layout"), [
    pytest.param(one.values[0], layout, id=f"{one.id}-{layout}") for one in GOOD for layout in layouts_of(one.values[0])
])  # fmt: skip
def test_case_attends_to_the_stated_keys(one: dict[str, Any], layout: str, backend: str, device: str) -> None:
    batch, seq_q, seq_kv = one["batch"], one["seq_q"], one["seq_kv"]
    meta = prepare(one, device, layout=layout)
    q = torch.zeros(batch, seq_q, 2, 8, device=device)
    v = torch.arange(batch * seq_kv, dtype=torch.float32, device=device).view(batch, seq_kv, 1, 1).expand(-1, -1, 2, 8)
    out, lse = varlen_attention(q, torch.zeros_like(v), v, meta, backend=backend, return_lse=True)
    mask, mask_q = mask_of(one), mask_of(one, "mask_q")
    keys = torch.ones(batch, seq_kv, dtype=torch.bool) if mask is None else mask.reshape(batch, seq_kv)
    for b in range(batch):
        rows = [b * seq_kv + j for j in range(seq_kv) if keys[b, j]]
        for i in range(seq_q):
            taking = bool(rows) and (mask_q is None or bool(mask_q[b, i]))
            torch.testing.assert_close(out[b, i, 0, 0].item(), sum(rows) / len(rows) if taking else 0.0)
            assert lse[b, 0, i].item() == pytest.approx(np.log(len(rows)) if taking else -np.inf)


@pytest.mark.parametrize("one", GOOD)
def test_case_keeps_poison_out_of_gradients(one: dict[str, Any], device: str) -> None:
    mask, mask_q = (None if m is None else m.to(device) for m in (mask_of(one), mask_of(one, "mask_q")))
    part_k = None if mask is None else mask.reshape(one["batch"], one["seq_kv"])
    inputs = make_inputs(
        (one["batch"], one["seq_q"]), (one["batch"], one["seq_kv"]), dtype=torch.float32, device=device
    )
    for layout in layouts_of(one):
        result = run(poison(inputs, mask_q, part_k), prepare(one, device, layout=layout))
        for x in (result.dk, result.dv):
            assert_zero_rows(x, torch.ones_like(x[..., 0, 0], dtype=torch.bool) if part_k is None else part_k)
        for x in (result.out, result.dq):
            assert_zero_rows(x, torch.ones_like(x[..., 0, 0], dtype=torch.bool) if mask_q is None else mask_q)


@pytest.mark.parametrize("name", BAD)
def test_case_is_refused_with_its_text(name: str) -> None:
    one = case("masks", name)
    assert BAD[name][0].__name__ in one["error"]
    with refuses(*BAD[name]):
        prepare(one)


def test_every_refused_case_is_tested() -> None:
    assert {one.id for one in cases("masks")} - {one.id for one in GOOD} == set(BAD)


def test_label_mask_goes_to_document_ids_as_the_error_says() -> None:
    meta = VarlenMetadata.from_document_ids(mask_of(case("masks", "label-mask")) - 1)
    assert meta.cu_seqlens_q.tolist() == [0, 4, 7, 10, 18, 21, 22]
    assert meta.max_seqlen_q == 8


def test_mask_of_ones_gives_what_no_mask_gives(device: str) -> None:
    one = case("masks", "all-ones")
    inputs = make_inputs((2, 16), (2, 16), dtype=torch.float32, device=device)
    plain = run(inputs, prepare_varlen(2, 16, 16, device=device))
    for options in ({}, {"max_seqlen_k": 16}):
        assert_bit_equal(run(inputs, prepare(one, device, **options)), plain)


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (3, 17), (16, 300)])
def test_offsets_equal_the_numpy_cumulative_sum(kind: str, batch: int, seq: int, device: str) -> None:
    mask = make_mask(kind, batch, seq, device=device)
    expected = np.concatenate([[0], np.cumsum(mask.cpu().numpy().sum(1))]).astype(np.int32)
    for bound in (None, seq, seq + 5):
        meta = prepare_varlen(batch, 3, seq, mask, max_seqlen_k=bound)
        assert np.array_equal(meta.cu_seqlens_k.cpu().numpy(), expected)
        assert meta.max_seqlen_k == (int(np.diff(expected).max()) if bound is None else bound)
        assert meta.exact_k is (bound is None)


def test_every_spelling_of_a_mask_means_the_same() -> None:
    rows = make_mask("holes", 3, 5)
    want = prepare_varlen(3, 2, 5, rows)
    for mask in (rows[:, None], rows[:, None, None], rows.t().contiguous().t()):
        got = prepare_varlen(3, 2, 5, mask)
        assert_bit_equal((got.cu_seqlens_k, got.order_k), (want.cu_seqlens_k, want.order_k))
    shared = rows[0]
    want = prepare_varlen(3, 2, 5, shared.expand(3, 5))
    for mask in (shared, shared[None], shared[None, None], shared[None, None, None]):
        got = prepare_varlen(3, 2, 5, mask)
        assert_bit_equal((got.cu_seqlens_k, got.order_k), (want.cu_seqlens_k, want.order_k))


def test_no_mask_allocates_offsets_and_nothing_else() -> None:
    meta = prepare_varlen(2, 6, 4)
    assert (meta.cu_seqlens_q.tolist(), meta.cu_seqlens_k.tolist()) == ([0, 6, 12], [0, 4, 8])
    assert [meta.order_q, meta.order_k, meta.inverse_q, meta.inverse_k] == [None] * 4
    assert (meta.layout, meta.exact_q, meta.exact_k, meta.max_seqlen_q, meta.max_seqlen_k) == (
        "uniform", True, True, 6, 4,
    )  # fmt: skip


@pytest.mark.parametrize(("batch", "seq_q", "seq_kv"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0), (1, 1, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_and_single_sizes_give_zeros_and_no_nan(batch: int, seq_q: int, seq_kv: int, layout: str) -> None:
    mask, mask_q = torch.ones(batch, seq_kv, dtype=torch.bool), torch.ones(batch, seq_q, dtype=torch.bool)
    inputs = make_inputs((batch, seq_q), (batch, seq_kv))
    metas = [
        prepare_varlen(batch, seq_q, seq_kv),
        prepare_varlen(batch, seq_q, seq_kv, mask, layout=layout),
        prepare_varlen(batch, seq_q, seq_kv, mask, mask_q=mask_q, layout=layout),
        prepare_varlen(batch, seq_q, seq_kv, mask_q=mask_q, layout=layout),
    ]
    for meta in metas:
        result = run(inputs, meta)
        if min(batch, seq_q, seq_kv) == 0:
            assert not any(x.any() for x in (result.out, *result[2:]))
            assert (result.lse == -torch.inf).all()
        else:
            assert all(x.isfinite().all() for x in result)


@pytest.mark.parametrize("kind", ONE_RUN)
def test_in_place_moves_no_row_and_has_a_fixed_number_of_sequences(kind: str) -> None:
    mask, mask_q = make_mask(kind, 3, 8, seed=1), make_mask(kind, 3, 6, seed=2)
    for options, columns in (({"mask": mask}, 3), ({"mask_q": mask_q}, 3), ({"mask": mask, "mask_q": mask_q}, 5)):
        meta = prepare_varlen(3, 6, 8, layout="in_place", **options)
        assert (meta.order_q, meta.order_k) == (None, None)
        assert (meta.max_seqlen_q, meta.max_seqlen_k, meta.exact_q, meta.exact_k) == (6, 8, False, False)
        for cu_seqlens, seq in ((meta.cu_seqlens_q, 6), (meta.cu_seqlens_k, 8)):
            assert cu_seqlens.shape[0] <= columns * 3 + 1
            assert cu_seqlens[-1] == 3 * seq
            # No gap spans two rows: every row's beginning is an offset, so none is longer than the maximum.
            assert {0, seq, 2 * seq} <= set(cu_seqlens.tolist())
            assert ((cu_seqlens.diff() >= 0) & (cu_seqlens.diff() <= seq)).all()


@pytest.mark.parametrize(("error", "arguments", "options"), [
    ((ValueError, "mask", "in_place", "hole", "layout='packed'"),
     (1, 3, 3, torch.tensor([[True, False, True]])), {"layout": "in_place"}),
    ((ValueError, "mask_q", "in_place", "hole", "layout='packed'"),
     (1, 3, 3), {"mask_q": torch.tensor([[True, False, True]]), "layout": "in_place"}),
    ((ValueError, "max_seqlen_k", "smaller than the longest", "pass a bound"),
     (1, 3, 3, torch.tensor([[True, False, True]])), {"max_seqlen_k": 1}),
    ((ValueError, "max_seqlen_k", "at least 3", "got 2"), (1, 3, 3), {"max_seqlen_k": 2}),
    ((ValueError, "max_seqlen_q", "at least 3", "got 2"), (1, 3, 3), {"max_seqlen_q": 2}),
    ((TypeError, "max_seqlen_k", "host int", "Tensor", "int(", "bound"),
     (1, 3, 3, torch.ones(1, 3, dtype=torch.bool)), {"max_seqlen_k": torch.tensor(3)}),
    ((ValueError, "layout", "'packed' or 'in_place'", "'flat'"), (1, 3, 3), {"layout": "flat"}),
    ((ValueError, "batch", ">= 0", "got -1"), (-1, 3, 3), {}),
    ((TypeError, "seq_kv", "host int", "float"), (1, 3, 3.0), {}),
    ((TypeError, "mask", "bool tensor", "list"), (1, 3, 2, [[True, False]]), {}),
    ((ValueError, "mask", "(2, 4)", "(2, 3)"), (2, 3, 4, torch.ones(2, 3, dtype=torch.bool)), {}),
    ((ValueError, "mask_q", "(2, 3)", "(3, 3)"), (2, 3, 4), {"mask_q": torch.ones(3, 3, dtype=torch.bool)}),
    ((TypeError, "mask_q", "torch.bool", "torch.int32", "mask.bool()"),
     (2, 3, 4), {"mask_q": torch.ones(2, 3, dtype=torch.int32)}),
])  # fmt: skip
def test_wrong_argument_is_refused_with_its_text(
    error: tuple[Any, ...], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with refuses(*error):
        prepare_varlen(*arguments, **options)
