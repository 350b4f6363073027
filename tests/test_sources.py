"""The `from_*` constructors: lengths, ready offsets, document ids, position ids, with and without capacity."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers import assert_bit_equal, assert_zero_rows, case, cases, make_inputs, poison, refuses, run, run_python

from varlen_prep import VarlenMetadata, pack, varlen_attention

from_lengths = VarlenMetadata.from_lengths
from_cu_seqlens = VarlenMetadata.from_cu_seqlens
from_document_ids = VarlenMetadata.from_document_ids
from_position_ids = VarlenMetadata.from_position_ids


def build(one: dict[str, Any], device: str, **options: Any) -> VarlenMetadata:
    mask = one.get("mask")
    if "document_ids" in one:
        return from_document_ids(torch.tensor(one["document_ids"], device=device), **options)
    if mask is not None:
        options["mask"] = torch.tensor(mask, device=device).bool()
    return from_position_ids(torch.tensor(one["position_ids"], device=device), **options)


STARTS = [one for one in cases("positions") if not {"error", "mask"} & set(one.values[0])]
STARTS += [one for one in cases("positions") if one.id == "left-pad-filler"]


@pytest.mark.parametrize("layout", [None, "packed", "in_place"])
@pytest.mark.parametrize("one", STARTS)
def test_case_gives_the_stated_documents(one: dict[str, Any], layout: str | None, device: str) -> None:
    if layout == "in_place" and one["id"] == "left-pad-filler":
        with refuses(ValueError, "in_place", "must follow all others", "layout='packed'"):
            build(one, "cpu", layout=layout)
        return
    meta = build(one, device, layout=layout)
    assert meta.cu_seqlens_q.tolist() == one["cu_seqlens"]
    assert meta.cu_seqlens_k.tolist() == one["cu_seqlens"]
    longest = max(b - a for a, b in zip(one["cu_seqlens"], one["cu_seqlens"][1:], strict=False))
    assert meta.max_seqlen_q == meta.max_seqlen_k == one.get("max", longest) == longest
    assert (meta.exact_q, meta.exact_k) == (True, True)
    if "rows" in one:
        assert meta.order_q[: len(one["rows"])].tolist() == one["rows"]
    # The same documents without a look at the device: fixed size, filler repeats the last offset, a bound.
    spare = build(one, device, layout=layout, capacity=9)
    assert spare.cu_seqlens_q.tolist() == one["cu_seqlens"] + [one["cu_seqlens"][-1]] * (10 - len(one["cu_seqlens"]))
    assert (spare.max_seqlen_q, spare.exact_q) == (meta.seq_q, False)
    bounded = build(one, device, layout=layout, max_seqlen=longest)
    assert_bit_equal(bounded.cu_seqlens_q, meta.cu_seqlens_q)
    assert (bounded.max_seqlen_q, bounded.exact_q) == (longest, False)


def test_case_zero_tail_is_documents_of_one_row_or_masked_out(device: str) -> None:
    one = case("positions", "zero-tail")
    assert build(one, device).cu_seqlens_q.tolist() == one["cu_seqlens"]
    assert build({**one, "mask": [1, 1, 1, 0, 0, 0]}, device).cu_seqlens_q.tolist() == [0, 3]


def test_case_rotary_3d_needs_a_named_axis() -> None:
    one = case("positions", "rotary-3d")
    positions = torch.tensor(one["position_ids"])
    with refuses(ValueError, "position_ids", "(T,) or (batch, seq)", "(3, 1, 4)", "axis=0"):
        from_position_ids(positions)
    for axis in (0, 2, -1):
        assert from_position_ids(positions, axis=axis).cu_seqlens_q.tolist() == one["cu_seqlens"]
    with refuses(ValueError, "axis", "(axes, batch, seq)", "(1, 4)"):
        from_position_ids(positions[0], axis=0)


def test_case_explicit_boundaries_win_over_a_mask_of_ones() -> None:
    one = case("positions", "explicit-wins")
    explicit = from_cu_seqlens(torch.tensor(one["cu_seqlens"]))
    masked = from_position_ids(torch.tensor([0, 1, 2, 0, 1, 2]), mask=torch.tensor(one["mask"]).bool())
    inputs = make_inputs((6,), (6,))
    for causal in (False, True):
        assert_bit_equal(run(inputs, masked, causal=causal), run(inputs, explicit, causal=causal))


def test_case_segment_ids_attend_within_their_segment(device: str) -> None:
    meta = build(case("positions", "segment-ids"), device)
    v = torch.arange(4.0, device=device).view(4, 1, 1).expand(4, 1, 8)
    out = varlen_attention(torch.zeros(4, 1, 8, device=device), torch.zeros_like(v), v, meta, causal=True)
    torch.testing.assert_close(out[:, 0, 0].tolist(), [0.0, 0.5, 2.0, 2.5])


def test_case_repeat_last_has_zero_tail_in_output_and_gradients(device: str) -> None:
    one = case("capacity", "repeat-last")
    meta = build(one, device, capacity=one["capacity"])
    assert meta.cu_seqlens_q.tolist() == one["cu_seqlens"]
    assert (meta.max_seqlen_q, meta.exact_q) == (one["max"], False)
    part = torch.arange(8, device=device) < 5
    result = run(poison(make_inputs((8,), (8,), dtype=torch.float32, device=device), part, part), meta)
    for x in (result.out, *result[2:]):
        assert_zero_rows(x, part)
    assert (result.lse[:, 5:] == -torch.inf).all()


def test_case_graph_filler_repeats_the_last_offset(device: str) -> None:
    one = case("capacity", "graph-filler")
    for value in (one["cu_seqlens"], torch.tensor(one["cu_seqlens"], device=device)):
        assert from_cu_seqlens(value, capacity=one["entries"] - 1).cu_seqlens_q.tolist() == one["padded"]
    assert from_cu_seqlens(torch.tensor(one["padded"], device=device)).cu_seqlens_q.tolist() == one["padded"]


def test_case_empty_keys_filler_gives_zero(device: str) -> None:
    one = case("capacity", "empty-keys-filler")
    meta = from_cu_seqlens(one["cu_seqlens_q"], one["cu_seqlens_k"], device=device)
    result = run(make_inputs((4,), (12,), dtype=torch.float32, device=device), meta)
    assert not result.out[3].any()
    assert result.out[:3].all()
    assert (result.lse[:, 3] == -torch.inf).all()


def test_case_one_compile_keeps_the_number_of_offsets() -> None:
    one = case("capacity", "one-compile")
    for documents in one["documents"]:
        ids = torch.arange(18) * documents // 18
        assert from_document_ids(ids, capacity=one["capacity"]).cu_seqlens_q.shape == (10,)
        assert from_lengths([2] * documents, capacity=one["capacity"]).cu_seqlens_q.shape == (10,)


IDS = torch.tensor(case("capacity", "overflow")["document_ids"])
ROWS = case("capacity", "past-the-rows")["rows"]
REFUSED = {
    "overflow-documents": (lambda: from_document_ids(IDS, capacity=4),
        ValueError, "capacity", "more documents", "raise it"),
    "overflow-lengths": (lambda: from_lengths([1, 1, 1], capacity=2),
        ValueError, "capacity", "3 sequences", "2", "raise it"),
    "overflow-offsets": (lambda: from_cu_seqlens([0, 1, 2], capacity=1),
        ValueError, "capacity", "2 sequences", "raise it"),
    "capacity-tensor": (lambda: from_document_ids(IDS, capacity=torch.tensor(9)),
        TypeError, "capacity", "host int", "Tensor"),
    "capacity-without-rows": (lambda: from_document_ids(IDS[:0], capacity=-1), ValueError, "capacity", ">= 0", "-1"),
    "unsorted": (lambda: from_cu_seqlens(torch.tensor([0, 5, 3])),
        ValueError, "cu_seqlens_q", "never decrease", "[0, 5, 3]", "sort"),
    "not-from-zero": (lambda: from_cu_seqlens(torch.tensor([1, 3, 5])), ValueError, "cu_seqlens_q", "start at 0", "1"),
    "past-the-rows": (lambda: from_cu_seqlens([0, 3, 9], total_q=ROWS), ValueError, "cu_seqlens_q", "9", "8 rows"),
    "past-the-key-rows": (lambda: from_cu_seqlens([0, 3], [0, 9], total_k=8),
        ValueError, "cu_seqlens_k", "9", "8 rows"),
    "no-offset": (lambda: from_cu_seqlens(torch.zeros(0, dtype=torch.int32)),
        ValueError, "cu_seqlens_q", "at least one"),
    "no-offset-list": (lambda: from_cu_seqlens([]), ValueError, "cu_seqlens_q", "at least one"),
    "fractional-offset": (lambda: from_cu_seqlens([0, 1.5]), TypeError, "cu_seqlens_q", "int", "float"),
    "float-offsets": (lambda: from_cu_seqlens(torch.tensor([0.0, 1.0])),
        TypeError, "cu_seqlens_q", "int32 or int64", "torch.float32", "cast"),
    "two-dim-offsets": (lambda: from_cu_seqlens(torch.zeros(1, 2, dtype=torch.int32)),
        ValueError, "cu_seqlens_q", "one dimension", "(1, 2)"),
    "negative-length": (lambda: from_lengths([3, -1]), ValueError, "lengths_q", ">= 0", "-1"),
    "negative-length-tensor": (lambda: from_lengths(torch.tensor([3, -1])), ValueError, "lengths_q", ">= 0"),
    "float-length": (lambda: from_lengths([3, 1.5]), TypeError, "lengths_q", "int", "float"),
    "float-lengths": (lambda: from_lengths(torch.tensor([3.0])),
        TypeError, "lengths_q", "int32 or int64", "torch.float32", "cast"),
    "past-int32": (lambda: from_lengths([2**30, 2**30, 1]), ValueError, "lengths_q", "int32", str(2**31 + 1)),
    "past-int32-tensor": (lambda: from_lengths(torch.tensor([2**30, 2**30])),
        ValueError, "lengths_q", "int32", str(2**31 - 1)),
    "bound-too-small": (lambda: from_lengths([3, 5], max_seqlen_q=4), ValueError, "max_seqlen_q", "4", "5", "raise it"),
    "bound-too-small-tensor": (lambda: from_lengths(torch.tensor([3, 5]), max_seqlen_q=4),
        ValueError, "max_seqlen_q", "smaller than the longest"),
    "bound-too-small-keys": (lambda: from_lengths([3], torch.tensor([5]), max_seqlen_k=4),
        ValueError, "max_seqlen_k", "smaller than the longest"),
    "bound-too-small-documents": (lambda: from_document_ids(IDS * 0, max_seqlen=4),
        ValueError, "max_seqlen", "smaller than the longest"),
    "bound-tensor": (lambda: from_lengths([3], max_seqlen_q=torch.tensor(3)),
        TypeError, "max_seqlen", "host int", "Tensor", "int("),
    "sides-differ": (lambda: from_lengths([3], [1, 2]),
        ValueError, "same number of sequences", "1", "2", "empty sequence"),
    "float-ids": (lambda: from_document_ids(IDS.double()), TypeError, "document_ids", "integer", "torch.float64"),
    "bool-ids": (lambda: from_document_ids(IDS > 0), TypeError, "document_ids", "integer", "torch.bool"),
    "four-dim-ids": (lambda: from_document_ids(IDS.view(1, 1, 1, 5)),
        ValueError, "document_ids", "(batch, seq)", "(1, 1, 1, 5)"),
    "gap-in-place": (lambda: from_document_ids(torch.tensor([0, -1, 0]), layout="in_place"),
        ValueError, "in_place", "must follow all others", "layout='packed'"),
    "mask-shape": (lambda: from_position_ids(IDS, mask=torch.ones(4, dtype=torch.bool)),
        ValueError, "mask", "(5,)", "(4,)"),
    "mask-dtype": (lambda: from_position_ids(IDS, mask=torch.ones(5)),
        ValueError, "mask", "bool", "torch.float32", "mask != 0"),
    "layout": (lambda: from_document_ids(IDS, layout="flat"), ValueError, "layout", "'packed' or 'in_place'", "'flat'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_input_is_refused_with_its_text(name: str) -> None:
    call, kind, *fragments = REFUSED[name]
    with refuses(kind, *fragments):
        call()


def test_every_refused_capacity_case_is_tested() -> None:
    assert {one.id for one in cases("capacity") if "error" in one.values[0]} <= {*REFUSED, "overflow"}


SOURCES = {
    "lengths-list": lambda tensor, device: from_lengths([3, 0, 2], device=device),
    "lengths": lambda tensor, device: from_lengths(tensor([3, 0, 2])),
    "lengths-bound": lambda tensor, device: from_lengths(tensor([3, 0, 2]), max_seqlen_q=4),
    "lengths-capacity": lambda tensor, device: from_lengths(tensor([3, 0, 2]), max_seqlen_q=4, capacity=3),
    "offsets-list": lambda tensor, device: from_cu_seqlens([0, 3, 3, 5], device=device),
    "offsets": lambda tensor, device: from_cu_seqlens(tensor([0, 3, 3, 5])),
    "offsets-bound": lambda tensor, device: from_cu_seqlens(tensor([0, 3, 3, 5]), max_seqlen_q=4),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("source", SOURCES)
def test_lengths_and_offsets_agree_and_maxima_are_ints(source: str, dtype: torch.dtype, device: str) -> None:
    meta = SOURCES[source](functools.partial(torch.tensor, dtype=dtype, device=device), device)
    assert (meta.cu_seqlens_q.dtype, meta.cu_seqlens_q.device.type) == (torch.int32, device)
    assert meta.cu_seqlens_q.tolist() == meta.cu_seqlens_k.tolist() == [0, 3, 3, 5]
    assert {type(meta.max_seqlen_q), type(meta.max_seqlen_k)} == {int}
    exact = "bound" not in source and "capacity" not in source
    assert (meta.max_seqlen_q, meta.max_seqlen_k, meta.exact_q, meta.exact_k) == (
        (3, 3, True, True) if exact else (4, 4, False, False)
    )


def test_two_dim_document_ids_move_gaps_to_the_end(device: str) -> None:
    meta = from_document_ids(torch.tensor([[-1, 4, 4, -1, 4], [4, 9, 9, -1, -1]], device=device))
    assert meta.cu_seqlens_q.tolist() == [0, 2, 3, 4, 6]
    rows = torch.arange(10, device=device).view(2, 5)
    assert pack(rows, meta, "q").tolist() == [1, 2, 4, 5, 6, 7, 0, 0, 0, 0]


def test_no_sequences_and_no_rows_give_no_nan() -> None:
    no_queries = from_lengths([0, 0], [0, 3])
    for meta in (from_lengths([]), from_lengths([], capacity=2), from_document_ids(IDS[:0]), no_queries):
        assert meta.max_seqlen_q == 0
        result = run(make_inputs((0,), (int(meta.cu_seqlens_k[-1]),)), meta)
        assert not any(x.any() for x in result)


def test_offsets_stay_on_the_device_of_their_tensor() -> None:
    with torch.device("meta"):
        for meta in (
            from_cu_seqlens(torch.tensor([0, 3], device="cpu")),
            from_lengths(torch.tensor([3], device="cpu")),
            from_document_ids(IDS),
        ):
            assert meta.cu_seqlens_q.device.type == "cpu"
        assert from_lengths([3]).cu_seqlens_q.device.type == "meta"


# A device-side assert leaves the CUDA context unusable, so each runs in a process of its own.
ON_CUDA = {
    "overflow": "VarlenMetadata.from_document_ids(torch.tensor({}).cuda(), capacity=4)",
    "unsorted": "VarlenMetadata.from_cu_seqlens(torch.tensor({}).cuda(), max_seqlen_q=9)",
    "past-rows": "VarlenMetadata.from_cu_seqlens(torch.tensor({}).cuda(), max_seqlen_q=9, total_q=8)",
    "negative": "VarlenMetadata.from_lengths(torch.tensor({}).cuda(), max_seqlen_q=9)",
    "bound": "VarlenMetadata.from_lengths(torch.tensor({}).cuda(), max_seqlen_q=4)",
    "hole": "prepare_varlen(1, 3, 3, torch.tensor([{}]).cuda() > 0, layout='in_place')",
}
VALUES = {
    "overflow": ([0, 1, 2, 3, 4], [0, 1, 2, 3, 3]), "unsorted": ([0, 5, 3], [0, 3, 5]),
    "past-rows": ([0, 3, 9], [0, 3, 8]), "negative": ([3, -1], [3, 0]),
    "bound": ([3, 5], [3, 4]), "hole": ([1, 0, 1], [0, 1, 1]),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_CUDA)
def test_bad_device_values_stop_at_a_device_side_assert(name: str) -> None:
    bad, good = (
        run_python(
            "import torch; from varlen_prep import VarlenMetadata, prepare_varlen\n"
            f"{ON_CUDA[name].format(values)}\ntorch.cuda.synchronize(); print('passed')"
        )
        for values in VALUES[name]
    )
    assert "passed" in good.stdout, good.stderr
    assert "passed" not in bad.stdout
    assert "device-side assert" in bad.stderr
