"""Properties that hold for every batch, drawn by Hypothesis: isolation, bounds, layouts, order, poison, offsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from helpers import (
    Inputs,
    assert_bit_equal,
    assert_near,
    assert_zero_rows,
    make_inputs,
    make_mask,
    oracle,
    poison,
    random,
    run,
)
from hypothesis import example, given
from hypothesis import strategies as st

from varlen_prep import VarlenMetadata, pack, prepare_varlen, unpack

SEEDS = st.integers(0, 2**20)
RUNS = st.sampled_from(["full", "right", "left", "middle", "some_empty", "all_empty"])
KINDS = st.one_of(RUNS, st.just("holes"))
HEADS = st.sampled_from([(1, 1), (4, 2), (6, 3), (3, 1)])
WINDOWS = st.sampled_from([(-1, -1), (0, 0), (2, 0), (1, 2), (-1, 1), (3, -1)])
OPTIONS = st.fixed_dictionaries({"causal": st.booleans(), "window_size": WINDOWS})
LENGTHS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


@st.composite
def padded(draw: Any, kinds: Any = KINDS) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
    """Inputs with NaN or Inf in every row that takes no part, the key mask and the query mask."""
    batch, seq_q, seq_kv, seed = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(SEEDS)
    heads, heads_kv = draw(HEADS)
    mask, mask_q = make_mask(draw(kinds), batch, seq_kv, seed=seed), make_mask(draw(kinds), batch, seq_q, seed=seed + 1)
    inputs = make_inputs(
        (batch, seq_q), (batch, seq_kv), heads=heads, heads_kv=heads_kv, dim=draw(st.sampled_from([4, 8])),
        dim_v=draw(st.sampled_from([4, 8, 12])), dtype=draw(DTYPES), seed=seed,
    )  # fmt: skip
    return poison(inputs, mask_q, mask, draw(st.sampled_from([torch.nan, torch.inf, -6e4]))), mask, mask_q


def by_row(inputs: Inputs, b: int) -> Inputs:
    return Inputs(*(x[b : b + 1] for x in inputs))


@given(padded(), OPTIONS, st.sampled_from(["native", "reference"]))
def test_results_equal_the_oracle_and_rows_without_part_are_zero(
    drawn: tuple[Inputs, torch.Tensor, torch.Tensor], options: dict[str, Any], backend: str
) -> None:
    inputs, mask, mask_q = drawn
    meta = prepare_varlen(*mask_q.shape, mask.shape[1], mask, mask_q=mask_q)
    result = run(inputs, meta, backend=backend, **options)
    assert_near(result, oracle(inputs, meta.materialize(**options)), inputs.q.dtype)
    for x, part in ((result.out, mask_q), (result.dq, mask_q), (result.dk, mask), (result.dv, mask)):
        assert_zero_rows(x, part)


@given(padded(), OPTIONS)
def test_batch_equals_a_loop_over_its_rows(
    drawn: tuple[Inputs, torch.Tensor, torch.Tensor], options: dict[str, Any]
) -> None:
    inputs, mask, mask_q = drawn
    whole = run(inputs, prepare_varlen(*mask_q.shape, mask.shape[1], mask, mask_q=mask_q), **options)
    for b in range(mask.shape[0]):
        row = slice(b, b + 1)
        meta = prepare_varlen(1, mask_q.shape[1], mask.shape[1], mask[row], mask_q=mask_q[row])
        assert_bit_equal(tuple(x[row] for x in whole), tuple(run(by_row(inputs, b), meta, **options)))


@given(padded(RUNS), OPTIONS)
def test_in_place_equals_packed(drawn: tuple[Inputs, torch.Tensor, torch.Tensor], options: dict[str, Any]) -> None:
    inputs, mask, mask_q = drawn
    for masks in ({"mask": mask, "mask_q": mask_q}, {"mask_q": mask_q}, {"mask": mask}):
        clean = poison(inputs, None if "mask_q" in masks else ~torch.zeros_like(mask_q), None)
        clean = Inputs(*(x.nan_to_num(0, 0, 0) if len(masks) == 1 else x for x in clean))
        used = options if "mask_q" in masks else {}
        packed, in_place = (
            prepare_varlen(*mask_q.shape, mask.shape[1], layout=layout, **masks) for layout in ("packed", "in_place")
        )
        assert_bit_equal(packed.materialize(**used), in_place.materialize(**used))
        assert_near(run(clean, in_place, **used), run(clean, packed, **used), inputs.q.dtype)


@given(padded(), st.integers(0, 20), OPTIONS)
def test_any_bound_gives_the_same_output(
    drawn: tuple[Inputs, torch.Tensor, torch.Tensor], spare: int, options: dict[str, Any]
) -> None:
    inputs, mask, mask_q = drawn
    shape = (*mask_q.shape, mask.shape[1])
    exact = prepare_varlen(*shape, mask, mask_q=mask_q)
    bounds = {"max_seqlen_k": exact.max_seqlen_k + spare, "max_seqlen_q": int(mask_q.sum(1).max()) + spare}
    bounded = prepare_varlen(*shape, mask, mask_q=mask_q, **bounds)
    assert (bounded.max_seqlen_k, bounded.max_seqlen_q) == tuple(bounds.values())
    assert_bit_equal(tuple(run(inputs, bounded, **options)), tuple(run(inputs, exact, **options)))


@given(LENGTHS, SEEDS, OPTIONS, st.sampled_from(["native", "reference"]))
def test_changing_one_document_leaves_the_others_bit_equal(
    lengths: list[tuple[int, int]], seed: int, options: dict[str, Any], backend: str
) -> None:
    lengths_q, lengths_k = (list(side) for side in zip(*lengths, strict=True))
    meta = VarlenMetadata.from_lengths(lengths_q, lengths_k)
    inputs = make_inputs((sum(lengths_q),), (sum(lengths_k),), dtype=torch.float32, seed=seed)
    chosen = seed % len(lengths)
    part_q, part_k = (
        torch.repeat_interleave(torch.arange(len(lengths)) != chosen, torch.tensor(side))
        for side in (lengths_q, lengths_k)
    )
    before = run(inputs, meta, backend=backend, **options)
    for value in (7.0, torch.nan):
        if value != value and backend == "reference":
            continue  # one dense product over all documents: 0 * NaN is NaN there
        after = run(poison(inputs, part_q, part_k, value), meta, backend=backend, **options)
        for field, part in ((0, part_q), (2, part_q), (3, part_k), (4, part_k)):
            assert_bit_equal(before[field][part], after[field][part])
        assert_bit_equal(before.lse[:, part_q], after.lse[:, part_q])


@given(LENGTHS, SEEDS, OPTIONS)
def test_permuting_documents_permutes_the_results(
    lengths: list[tuple[int, int]], seed: int, options: dict[str, Any]
) -> None:
    lengths_q, lengths_k = (list(side) for side in zip(*lengths, strict=True))
    inputs = make_inputs((sum(lengths_q),), (sum(lengths_k),), dtype=torch.float32, seed=seed)
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    rows_q, rows_k = (
        torch.cat([torch.arange(sum(side)).split(side)[n] for n in order]) for side in (lengths_q, lengths_k)
    )
    rows = (rows_q, rows_k, rows_k, rows_q)
    moved = Inputs(*(x[index] for x, index in zip(inputs, rows, strict=True)))
    meta = VarlenMetadata.from_lengths(lengths_q, lengths_k)
    permuted = VarlenMetadata.from_lengths([lengths_q[n] for n in order], [lengths_k[n] for n in order])
    a, b = run(inputs, meta, **options), run(moved, permuted, **options)
    assert_bit_equal((a.out[rows_q], a.lse[:, rows_q], a.dq[rows_q], a.dk[rows_k], a.dv[rows_k]), tuple(b))


@given(LENGTHS, st.integers(0, 4), st.booleans())
def test_lengths_give_the_cumulative_sum_with_and_without_capacity(
    lengths: list[tuple[int, int]], spare: int, as_tensor: bool
) -> None:
    sides = [list(side) for side in zip(*lengths, strict=True)]
    given_sides = [torch.tensor(side) for side in sides] if as_tensor else sides
    for capacity in (None, len(lengths) + spare):
        meta = VarlenMetadata.from_lengths(*given_sides, capacity=capacity)
        filler = [0] * (0 if capacity is None else spare)
        for cu_seqlens, side in zip((meta.cu_seqlens_q, meta.cu_seqlens_k), sides, strict=True):
            expected = np.concatenate([[0], np.cumsum(side + filler)]).astype(np.int32)
            assert np.array_equal(cu_seqlens.numpy(), expected)
        assert (meta.max_seqlen_q, meta.max_seqlen_k) == (max(sides[0]), max(sides[1]))
        again = VarlenMetadata.from_cu_seqlens(meta.cu_seqlens_q, meta.cu_seqlens_k)
        assert_bit_equal((again.cu_seqlens_q, again.cu_seqlens_k), (meta.cu_seqlens_q, meta.cu_seqlens_k))


def documents_by_loop(starts: list[list[bool]], valid: list[list[bool]]) -> list[int]:
    """Offsets where every start opens a document and every valid row lengthens the last one."""
    lengths: list[int] = []
    for row_starts, row_valid in zip(starts, valid, strict=True):
        for begins, taking in zip(row_starts, row_valid, strict=True):
            if begins:
                lengths.append(0)
            if taking:
                lengths[-1] += 1
    return [0, *np.cumsum(lengths, dtype=int).tolist()]


@st.composite
def grids(draw: Any, low: int) -> list[list[int]]:
    width = draw(st.integers(1, 10))
    return draw(st.lists(st.lists(st.integers(low, 3), min_size=width, max_size=width), min_size=1, max_size=3))


@given(grids(-1), st.integers(0, 3))
@example([[-1, -1]], 0)
def test_document_ids_equal_a_loop(ids: list[list[int]], spare: int) -> None:
    valid = [[one >= 0 for one in row] for row in ids]
    starts = [[one >= 0 and (i == 0 or row[i - 1] != one) for i, one in enumerate(row)] for row in ids]
    expected = documents_by_loop(starts, valid)
    number, longest = len(expected) - 1, max(np.diff(expected), default=0)
    exact = VarlenMetadata.from_document_ids(torch.tensor(ids))
    assert exact.cu_seqlens_q.tolist() == expected
    assert (exact.max_seqlen_q, exact.exact_q) == (longest, True)
    spared = VarlenMetadata.from_document_ids(torch.tensor(ids), capacity=number + spare)
    assert spared.cu_seqlens_q.tolist() == expected + [expected[-1]] * spare
    rows = torch.arange(torch.tensor(ids).numel()).view(len(ids), -1)
    assert pack(rows, exact, "q")[: expected[-1]].tolist() == rows[torch.tensor(valid)].tolist()


@given(grids(0), SEEDS)
def test_position_ids_equal_a_loop_with_and_without_a_mask(positions: list[list[int]], seed: int) -> None:
    for kind in ("full", "holes", "right", "left", "all_empty"):
        valid = make_mask(kind, len(positions), len(positions[0]), seed=seed)
        starts = [
            [bool(v[i]) and (i == 0 or not v[i - 1] or row[i] != row[i - 1] + 1) for i in range(len(row))]
            for row, v in zip(positions, valid, strict=True)
        ]
        expected = documents_by_loop(starts, valid.tolist())
        mask = None if kind == "full" else valid
        for capacity in (None, valid.numel()):
            meta = VarlenMetadata.from_position_ids(torch.tensor(positions), mask=mask, capacity=capacity)
            assert meta.cu_seqlens_q[: len(expected)].tolist() == expected
            assert (meta.cu_seqlens_q[len(expected) :] == expected[-1]).all()


@given(KINDS, st.integers(1, 5), st.integers(1, 20), SEEDS)
def test_pack_and_unpack_are_inverse(kind: str, batch: int, seq: int, seed: int) -> None:
    mask = make_mask(kind, batch, seq, seed=seed)
    meta = prepare_varlen(batch, seq, seq, mask, mask_q=mask)
    x = random(batch, seq, 2, seed=seed)
    for side in ("q", "k"):
        packed = pack(x, meta, side)
        assert_bit_equal(packed[: int(mask.sum())], x[mask])
        assert_bit_equal(unpack(packed, meta, side), x.masked_fill(~mask[..., None], 0))
        assert_bit_equal(pack(unpack(packed, meta, side), meta, side), packed)
