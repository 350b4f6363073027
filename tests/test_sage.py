"""SageAttention, on a stand-in package that computes as its kernels do (`standins/sage.py`), traps included.

What the real package does on a GPU is measured apart.  Tolerances are those of int8 scores.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers import assert_bit_equal, make_inputs, make_mask, oracle, poison, random, refuses
from sage_helpers import (
    HALVES,
    LENGTHS,
    assert_close_to_oracle,
    attend,
    install_fixture,  # noqa: F401  (a fixture)
    oldest_fixture,  # noqa: F401  (a fixture)
    packed,
    registered_fixture,  # noqa: F401  (a fixture)
    version_fixture,  # noqa: F401  (a fixture)
)
from torch import Tensor

from varlen_prep import VarlenMetadata, prepare_varlen
from varlen_prep.backends import sage as backend


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
