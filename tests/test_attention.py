"""`varlen_attention` against the float64 oracle and the contract: alignment, empty sequences, poison, LSE, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    MASK_KINDS,
    TOLERANCE,
    assert_bit_equal,
    assert_near,
    assert_zero_rows,
    case,
    make_inputs,
    make_mask,
    oracle,
    poison,
    random,
    refuses,
    run,
)

from varlen_prep import VarlenMetadata, prepare_varlen, varlen_attention

BACKENDS = ("native", "reference")
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal-window": {"causal": True, "window_size": (2, 0)},
    "window": {"window_size": (1, 2)},
    "left-only": {"window_size": (2, -1)},
    "right-only": {"window_size": (-1, 1)},
    "scale": {"softmax_scale": 0.25},
}


def skip_inexpressible(
    place: tuple[str, torch.dtype], options: dict[str, Any], backend: str = "native", backward: bool = True
) -> None:
    windowed = "window_size" in options and (backward or not options.get("causal"))
    if backend == "native" and place == ("cuda", torch.float32) and windowed:
        pytest.skip("the float32 CUDA kernel refuses such windows (test_selection.py)")


def seen_by(meta: VarlenMetadata, options: dict[str, Any]) -> torch.Tensor:
    return meta.materialize(causal=options.get("causal", False), window_size=options.get("window_size", (-1, -1)))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_masks_on_both_sides_equal_the_oracle_under_nan(kind: str, name: str, place: tuple[str, torch.dtype]) -> None:
    skip_inexpressible(place, OPTIONS[name])
    device, dtype = place
    mask, mask_q = make_mask(kind, 3, 9, seed=3, device=device), make_mask(kind, 3, 7, seed=4, device=device)
    inputs = poison(make_inputs((3, 7), (3, 9), dtype=dtype, device=device), mask_q, mask)
    results = []
    for layout in ("packed",) if kind == "holes" else ("packed", "in_place"):
        meta = prepare_varlen(3, 7, 9, mask, mask_q=mask_q, max_seqlen_k=9, layout=layout)
        seen = seen_by(meta, OPTIONS[name])
        assert not seen[~mask_q].any()
        assert not seen.transpose(1, 2)[~mask].any()
        results.append(run(inputs, meta, **OPTIONS[name]))
        scale = OPTIONS[name].get("softmax_scale")
        assert_near(results[-1], oracle(inputs, seen, scale=scale), dtype)
        assert_zero_rows(results[-1].out, mask_q)
        assert_zero_rows(results[-1].dq, mask_q)
        assert_zero_rows(results[-1].dk, mask)
        assert_zero_rows(results[-1].dv, mask)
    assert_near(results[-1], results[0], dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [
    ([5, 1, 0, 4, 3, 0], [5, 7, 3, 0, 2, 0]), ([9], [4]), ([4], [9]), ([1, 1], [300, 1]), ([130, 2], [129, 2]),
])  # fmt: skip
def test_packed_lengths_with_a_garbage_tail_equal_the_oracle(
    lengths: tuple[list[int], list[int]], name: str, backend: str, place: tuple[str, torch.dtype]
) -> None:
    skip_inexpressible(place, OPTIONS[name], backend)
    device, dtype = place
    meta = VarlenMetadata.from_lengths(*lengths, device=device)
    total_q, total_k = (sum(side) for side in lengths)
    inputs = make_inputs((total_q + 2,), (total_k + 3,), dtype=dtype, device=device)
    part_q, part_k = (torch.arange(total + n, device=device) < total for total, n in ((total_q, 2), (total_k, 3)))
    result = run(poison(inputs, part_q, part_k), meta, backend=backend, **OPTIONS[name])
    for x, part in zip((result.out, *result[2:]), (part_q, part_q, part_k, part_k), strict=True):
        assert_zero_rows(x, part)
    assert (result.lse[:, total_q:] == -torch.inf).all()
    valid = type(inputs)(*(x[:n] for x, n in zip(inputs, (total_q, total_k, total_k, total_q), strict=True)))
    out, lse, dq, dk, dv = result
    cut = type(result)(out[:total_q], lse[:, :total_q], dq[:total_q], dk[:total_k], dv[:total_k])
    assert_near(cut, oracle(valid, seen_by(meta, OPTIONS[name]), scale=OPTIONS[name].get("softmax_scale")), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "heads_kv", "dim", "dim_v"), [
    (4, 4, 8, 8), (4, 2, 8, 8), (6, 1, 16, 16), (4, 2, 8, 24), (4, 2, 24, 8), (9, 3, 64, 64), (2, 2, 20, 12),
    (3, 3, 1, 1),
])  # fmt: skip
def test_heads_and_head_sizes_equal_the_oracle(
    heads: int, heads_kv: int, dim: int, dim_v: int, backend: str, place: tuple[str, torch.dtype]
) -> None:
    device, dtype = place
    inputs = make_inputs(
        (2, 5), (2, 7), heads=heads, heads_kv=heads_kv, dim=dim, dim_v=dim_v, dtype=dtype, device=device
    )
    meta = prepare_varlen(2, 5, 7, make_mask("holes", 2, 7, device=device))
    result = run(inputs, meta, backend=backend)
    assert result.out.shape == (2, 5, heads, dim_v)
    assert_near(result, oracle(inputs, meta.materialize()), dtype)


def test_case_gqa_equals_repeated_heads_and_refuses_the_indivisible(place: tuple[str, torch.dtype]) -> None:
    device, dtype = place
    one = case("attention", "gqa")
    q, k, v, _ = make_inputs((2, 5), (2, 5), heads=one["heads"], heads_kv=one["heads_kv"], dtype=dtype, device=device)
    meta = prepare_varlen(2, 5, 5, device=device)
    repeated = (x[:, :, [0, 0, 1, 1]] for x in (k, v))
    assert_near(varlen_attention(q, k, v, meta), varlen_attention(q, *repeated, meta), dtype)
    with refuses(ValueError, "q", "multiple of the 2 key heads", "3 heads"):
        varlen_attention(q[:, :, :3], k, v, meta)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [
    "bottom-right-short-k", "bottom-right-long-k", "window", "window-counts", "per-sequence-shift", "empty-kv-merge",
])  # fmt: skip
def test_case_on_lengths(name: str, backend: str, place: tuple[str, torch.dtype]) -> None:
    device, dtype = place
    one = case("attention", name)
    options = {"causal": one.get("causal", False), "window_size": tuple(one.get("window_size", (-1, -1)))}
    windowed = {} if options["window_size"] == (-1, -1) else options
    skip_inexpressible(place, windowed, backend, backward=False)
    meta = VarlenMetadata.from_lengths(one["lengths_q"], one["lengths_k"], device=device)
    total = sum(one["lengths_k"])
    v = torch.arange(total, device=device, dtype=dtype)[:, None, None].expand(-1, 2, 8)
    q = torch.zeros(sum(one["lengths_q"]), 2, 8, device=device, dtype=dtype)
    out, lse = varlen_attention(q, torch.zeros_like(v), v, meta, backend=backend, return_lse=True, **options)
    values, seen = out[:, 0, 0].double().cpu(), lse[0].double().exp().cpu()
    hidden = {"bottom-right-short-k": [0, 1, 2], "empty-kv-merge": [1]}.get(name, [])
    assert (lse[0] == -torch.inf).nonzero().flatten().tolist() == hidden
    if name == "window":
        values, expected = values[one["row"]], one["value"]
    elif name == "window-counts":
        values, expected = seen, one["keys_seen"]
    elif name == "per-sequence-shift":
        # Sequence 0 sees 4 and 5 of its keys (shift 3), sequence 1 sees 1 to 4 (shift 0).
        values, expected = seen, [4, 5, 1, 2, 3, 4]
    else:
        expected = one.get("out", [0.5, 0.0])
    assert_near(values, torch.tensor(expected), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["packed", "in_place"])
def test_case_left_padded_causal(layout: str, backend: str, device: str) -> None:
    one = case("attention", "left-padded-causal")
    mask = torch.tensor(one["mask"], device=device).bool()
    meta = prepare_varlen(2, 4, 4, mask, mask_q=mask, layout=layout)
    v = torch.arange(4.0, device=device)[None, :, None, None].expand(2, 4, 2, 8)
    out = varlen_attention(torch.zeros_like(v), torch.zeros_like(v), v, meta, backend=backend, causal=True)
    torch.testing.assert_close(out[0, :, 0, 0].tolist(), one["expect_row0"])
    torch.testing.assert_close(out[1, :, 0, 0].tolist(), [0.0, 0.5, 1.0, 1.5])


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (1, 1)}])
@pytest.mark.parametrize("layout", ["packed", "in_place"])
def test_case_causal_with_a_key_mask_needs_the_queries_to_be_stated(layout: str, options: dict[str, Any]) -> None:
    mask = torch.tensor(case("attention", "right-padded-causal-needs-mask-q")["mask"]).bool()
    q, k, v, _ = make_inputs((1, 4), (1, 4))
    with refuses(ValueError, "causal=True", "mask_q", "prepare_varlen", "all True"):
        varlen_attention(q, k, v, prepare_varlen(1, 4, 4, mask, layout=layout), **options)
    stated = prepare_varlen(1, 4, 4, mask, mask_q=torch.ones(1, 4, dtype=torch.bool), layout=layout)
    # Two keys for four queries: the last query sees both, the one before it one, the first two none.
    lse = varlen_attention(q * 0, k, v, stated, causal=True, return_lse=True)[1]
    torch.testing.assert_close(lse[0, 0].exp().tolist(), [0.0, 0.0, 1.0, 2.0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_scale_is_forwarded_and_has_its_default(backend: str) -> None:
    one = case("attention", "scale")
    inputs = make_inputs((5,), (5,), dim=one["head_dim"])
    meta = VarlenMetadata.from_lengths([5])
    for options, scale in (({}, 1 / 8), ({"softmax_scale": 0.25}, 0.25), ({"softmax_scale": 0.0}, 0.0)):
        expected = oracle(inputs, meta.materialize(), scale=scale)
        assert_near(run(inputs, meta, backend=backend, **options), expected, torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_isolation_documents_do_not_touch_each_other(backend: str, device: str) -> None:
    documents = case("attention", "isolation")["documents"]
    meta = VarlenMetadata.from_lengths(documents, device=device)
    inputs = make_inputs((6,), (6,), dtype=torch.float32, device=device)
    changed = type(inputs)(*(x.clone().index_fill_(0, torch.tensor([1], device=device), 9.0) for x in inputs))
    before, after = (run(x, meta, backend=backend, causal=True) for x in (inputs, changed))
    for a, b in zip((before.out, *before[2:]), (after.out, *after[2:]), strict=True):
        assert_bit_equal(a[3:], b[3:])
        assert not torch.equal(a[:3], b[:3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_queries_give_keys_gradients_of_exactly_zero(backend: str, device: str) -> None:
    meta = VarlenMetadata.from_cu_seqlens([0, 150, 150, 300], [0, 100, 200, 300], device=device)
    result = run(make_inputs((300,), (300,), dtype=torch.float32, device=device), meta, backend=backend)
    for x in (result.dk, result.dv):
        assert not x[100:200].any()
        assert x[:100].abs().sum(-1).all()
        assert x[200:].abs().sum(-1).all()


def test_maximum_of_one_with_empty_rows_and_grouped_heads_keeps_its_shape(place: tuple[str, torch.dtype]) -> None:
    device, dtype = place
    meta = VarlenMetadata.from_cu_seqlens([0, 1, 1, 2], [0, 3, 3, 8], device=device)
    inputs = make_inputs((2,), (8,), heads=9, heads_kv=3, dim=64, dtype=dtype, device=device)
    result = run(inputs, meta, causal=True)
    assert result.out.shape == (2, 9, 64)
    assert_near(result, oracle(inputs, meta.materialize(causal=True)), dtype)


@pytest.mark.parametrize("heads", [2, 6])
def test_lse_is_heads_by_rows_float32_and_detached(heads: int, device: str) -> None:
    """6 rows: with 6 heads a transposed LSE has the right shape, so its values are compared."""
    for meta, rows, shape in (
        (VarlenMetadata.from_lengths([4, 2], device=device), (6,), (heads, 6)),
        (prepare_varlen(1, 6, 6, make_mask("holes", 1, 6, device=device)), (1, 6), (1, heads, 6)),
        (prepare_varlen(1, 6, 6, make_mask("left", 1, 6, device=device), layout="in_place"), (1, 6), (1, heads, 6)),
    ):
        inputs = make_inputs(rows, rows, heads=heads, heads_kv=heads, dtype=torch.float32, device=device)
        lse = run(inputs, meta).lse
        assert (lse.shape, lse.dtype, lse.requires_grad) == (shape, torch.float32, False)
        assert_near(lse, oracle(inputs, meta.materialize()).lse, torch.float32)


def test_softcap_equals_the_oracle_where_the_kernel_has_it() -> None:
    inputs = make_inputs((5,), (5,))
    meta = VarlenMetadata.from_lengths([3, 2])
    result = run(inputs, meta, backend="reference", softcap=0.5)
    assert_near(result, oracle(inputs, meta.materialize(), softcap=0.5), torch.float64)
    assert not torch.allclose(result.out, run(inputs, meta).out)


def test_strided_inputs_and_gradients_equal_contiguous_ones(place: tuple[str, torch.dtype]) -> None:
    device, dtype = place
    fused = random(2, 3, 6, 4, 8, dtype=dtype, device=device).transpose(1, 2)  # (2, 6, 3, 4, 8)
    meta = prepare_varlen(2, 6, 6, make_mask("right", 2, 6, device=device), layout="in_place")
    inputs = make_inputs((2, 6), (2, 6), dtype=dtype, device=device)
    strided = type(inputs)(*fused.unbind(2), random(2, 4, 6, 8, dtype=dtype, device=device, seed=7).transpose(1, 2))
    assert_bit_equal(run(strided, meta), run(type(inputs)(*(x.contiguous() for x in strided)), meta))


def test_wrong_tensors_are_refused_with_their_text() -> None:
    q, k, v, _ = make_inputs((2, 5), (2, 7))
    meta = prepare_varlen(2, 5, 7)
    wrong = {
        (TypeError, "one dtype", "torch.float32", "torch.float64", "cast"): (q.float(), k, v),
        (ValueError, "(batch, seq, heads, head_dim)", "(rows, heads, head_dim)"): (q[None], k[None], v[None]),
        (ValueError, "same rows and heads", "(2, 6, 2, 8)"): (q, k, v[:, :6]),
        (ValueError, "q", "metadata describes (2, 5)", "(2, 4, 4, 8)"): (q[:, :4], k, v),
        (ValueError, "k", "metadata describes (2, 7)", "(2, 6, 2, 8)"): (q, k[:, :6], v[:, :6]),
        (ValueError, "one device", "meta", "device=q.device", "meta.to(q.device)"): (q.to("meta"), k, v),
    }
    for error, tensors in wrong.items():
        with refuses(*error):
            varlen_attention(*tensors, meta)
    with refuses(ValueError, "q", "describes 6 rows", "got 5"):
        varlen_attention(q[0], k[0], v[0], VarlenMetadata.from_lengths([6], [7]))


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_in_place_takes_no_more_memory_than_the_unmasked_call(backward: bool) -> None:
    """An S x S mask (64 MiB here) or one copy of a (B, S, H, D) tensor (32 MiB) would show.

    The backward kernel itself takes 128 float32 rows of workspace a sequence, and in_place has five a row.
    """
    batch, seq = 2, 8192
    mask = make_mask("right", batch, seq, device="cuda")
    metas = (
        prepare_varlen(batch, seq, seq, device="cuda"),
        prepare_varlen(batch, seq, seq, mask, mask_q=mask, layout="in_place"),
        prepare_varlen(batch, seq, seq, mask, mask_q=mask, max_seqlen_k=seq),
    )
    inputs = make_inputs((batch, seq), (batch, seq), heads=8, heads_kv=8, dim=128, dtype=torch.bfloat16, device="cuda")
    peaks = []
    for meta in metas:
        for _ in range(2):  # the first call also pays for workspaces
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            if backward:
                run(inputs, meta, backend="native")
            else:
                varlen_attention(*inputs[:3], meta, backend="native")
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak)
    workspace = 128 * (5 - 1) * batch * 8 * 128 * 4 if backward else 0
    assert peaks[1] <= peaks[0] + workspace + 2**19
    assert peaks[2] > peaks[0] + 2**24, "the packed copy must show, or this test cannot fail"


def test_tolerances_are_far_below_the_values() -> None:
    """A wrong key, scale or alignment changes results by far more than the tolerance allows."""
    inputs = make_inputs((5,), (5,))
    meta = VarlenMetadata.from_lengths([3, 2])
    right, wrong = oracle(inputs, meta.materialize()), oracle(inputs, meta.materialize(causal=True))
    assert (right.out - wrong.out).abs().max() > 10 * max(TOLERANCE.values())


@pytest.mark.parametrize(("options", "kind", "fragments"), [
    ({"softmax_scale": torch.tensor(0.3)}, TypeError, ["softmax_scale", "a number, got a tensor", "scale q"]),
    ({"softcap": torch.tensor(5.0)}, TypeError, ["softcap", "a number, got a tensor"]),
    ({"window_size": 4}, ValueError, ["window_size", "(left, right)", "got 4"]),
    ({"window_size": (-2, 0)}, ValueError, ["window_size", "-1 (no bound)", "(-2, 0)"]),
])  # fmt: skip
def test_options_of_the_wrong_kind_are_refused(options: dict[str, Any], kind: type, fragments: list[str]) -> None:
    q = random(5, 2, 8)
    with refuses(kind, *fragments):
        varlen_attention(q, q, q, VarlenMetadata.from_lengths([5]), **options)


def test_tensors_and_metadata_that_do_not_fit_say_what_to_do() -> None:
    x, packed, padded = random(1, 5, 2, 8), VarlenMetadata.from_lengths([5]), prepare_varlen(1, 5, 5)
    with refuses(ValueError, "q: ", "(rows, heads, head_dim)", "(1, 5, 2, 8)", "q.flatten(0, 1)"):
        varlen_attention(x, x, x, packed)
    with refuses(ValueError, "q: ", "(1, 5)", "(1, 2, 5, 8)", "heads come after rows"):
        varlen_attention(*[x.transpose(1, 2)] * 3, padded)
    with refuses(TypeError, "meta: ", "VarlenMetadata", "NoneType", "prepare_varlen"):
        varlen_attention(x, x, x, None)  # type: ignore[arg-type]
