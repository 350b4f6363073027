"""The real kernels on a real GPU, each through the same tests; a kernel that is not installed skips with its reasons.

Correctness is against the float64 oracle; the traps are those that the bare packages are known for.
"""

from __future__ import annotations

import pytest
import torch
from helpers import Inputs, assert_bit_equal, assert_zero_rows, make_inputs, make_mask, oracle, poison, run
from kernels_helpers import MARKS, backend_fixture, trains_fixture  # noqa: F401  (fixtures)

from varlen_prep import VarlenMetadata, prepare_varlen, varlen_attention
from varlen_prep.backends import REGISTRY

pytestmark = MARKS
HALF = (torch.bfloat16, torch.float16)
# Sage quantises q and k to int8.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
QUANTISED = 1.5e-1
LENGTHS = [100, 33, 1, 257, 65, 0]


def check(backend: str, inputs: Inputs, meta: VarlenMetadata, **options) -> None:
    """Forward, log-sum-exp and gradients, as far as the backend has them, against the oracle."""
    seen = meta.materialize(causal=options.get("causal", False), window_size=options.get("window_size", (-1, -1)))
    expected = oracle(inputs, seen)
    record = REGISTRY[backend]
    if record.backward is None:
        with torch.no_grad():
            got = {"out": varlen_attention(*inputs[:3], meta, backend=backend, **options)}
    else:
        got = run(inputs, meta, backend=backend, **options)._asdict()
    limit = TOLERANCE[inputs.q.dtype] if record.lse else QUANTISED
    for name, value in got.items():
        want = getattr(expected, name)
        if name == "lse":
            assert torch.equal(value == -torch.inf, want == -torch.inf), "lse: other rows see no key"
        finite = want[want.isfinite()].abs()
        scale = max(1.0, finite.max().item()) if finite.numel() else 1.0
        torch.testing.assert_close(
            value.double(), want, atol=limit * scale, rtol=limit, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("heads", "heads_kv"), [(8, 8), (8, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_lengths(backend, dtype, dim, heads, heads_kv, causal):
    meta = VarlenMetadata.from_lengths(LENGTHS, device="cuda")
    rows = (sum(LENGTHS),)
    inputs = make_inputs(rows, rows, heads=heads, heads_kv=heads_kv, dim=dim, dtype=dtype, device="cuda")
    check(backend, inputs, meta, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [([5, 0, 130, 1, 64], [200, 33, 0, 7, 64]), ([150, 70], [20, 3]), ([0, 0, 3], [4, 100, 0])],
)
def test_lengths_that_differ_and_empty_sides(backend, trains, causal, lengths_q, lengths_k):
    meta = VarlenMetadata.from_lengths(lengths_q, lengths_k, device="cuda")
    inputs = make_inputs((sum(lengths_q),), (sum(lengths_k),), dim=64, dtype=torch.bfloat16, device="cuda")
    if causal and not REGISTRY[backend].bottom_right:
        with torch.no_grad(), pytest.raises(ValueError, match="bottom-right"):
            varlen_attention(*inputs[:3], meta, backend=backend, causal=True)
        return
    check(backend, inputs, meta, causal=causal)


@pytest.mark.parametrize("window_size", [(3, 0), (0, 0), (40, 7), (5, -1), (-1, 5), (300, 0), (1000, 1000)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"), [([100, 65, 1], [100, 65, 1]), ([20, 130], [200, 131]), ([150, 90], [65, 1])]
)
def test_windows(backend, window_size, causal, lengths_q, lengths_k):
    meta = VarlenMetadata.from_lengths(lengths_q, lengths_k, device="cuda")
    inputs = make_inputs((sum(lengths_q),), (sum(lengths_k),), dim=64, dtype=torch.bfloat16, device="cuda")
    if not REGISTRY[backend].window:
        with torch.no_grad(), pytest.raises(ValueError, match="window_size"):
            varlen_attention(*inputs[:3], meta, backend=backend, window_size=window_size)
        return
    check(backend, inputs, meta, causal=causal, window_size=window_size)


@pytest.mark.parametrize("layout", ["packed", "in_place"])
@pytest.mark.parametrize("sides", ["k", "q", "both"])
@pytest.mark.parametrize("kind", ["right", "left", "middle", "holes", "some_empty", "all_empty"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_masks_with_poison_in_rows_that_take_no_part(backend, trains, layout, sides, kind, value):
    if kind == "holes" and layout == "in_place":
        pytest.skip("in_place needs one run per row")
    batch, seq_q, seq_kv = 3, 150, 200
    mask = make_mask(kind, batch, seq_kv, device="cuda") if sides != "q" else None
    mask_q = make_mask(kind, batch, seq_q, device="cuda", seed=1) if sides != "k" else None
    meta = prepare_varlen(batch, seq_q, seq_kv, mask, mask_q=mask_q, max_seqlen_k=seq_kv, layout=layout, device="cuda")
    clean = make_inputs((batch, seq_q), (batch, seq_kv), dim=64, dtype=torch.bfloat16, device="cuda")
    dirty = poison(clean, mask_q, mask, value)
    if not trains:
        with torch.no_grad():
            out, expected = (varlen_attention(*x[:3], meta, backend=backend) for x in (dirty, clean))
        assert_bit_equal(out, expected)
        check(backend, clean, meta)
        return
    with torch.no_grad():
        out, expected_out = (varlen_attention(*x[:3], meta, backend=backend) for x in (dirty, clean))
    assert_bit_equal(out, expected_out)
    got, expected = run(dirty, meta, backend=backend), run(clean, meta, backend=backend)
    assert_bit_equal((got.out, got.lse), (expected.out, expected.lse))
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), atol=2e-2, rtol=2e-2)
    if mask_q is not None:
        assert_zero_rows(got.out, mask_q)
        assert_zero_rows(got.dq, mask_q)
    if mask is not None:
        assert_zero_rows(got.dk, mask)
        assert_zero_rows(got.dv, mask)
    check(backend, clean, meta)


@pytest.fixture(name="fresh_memory_is_nan")
def fresh_memory_fixture():
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["packed", "in_place"])
@pytest.mark.parametrize("kind", ["right", "left", "middle", "some_empty"])
def test_rows_that_are_not_written_are_not_read(backend, layout, kind, fresh_memory_is_nan):
    """Without gradients only rows near a sequence are cleared; gaps here are longer than that."""
    batch, seq = 4, 3000
    mask = make_mask(kind, batch, seq, device="cuda")
    bound = {"max_seqlen_k": seq} if layout == "packed" else {}
    meta = prepare_varlen(batch, seq, seq, mask, layout=layout, **bound)
    clean = make_inputs((batch, seq), (batch, seq), dim=64, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        out = varlen_attention(*poison(clean, None, mask, torch.nan)[:3], meta, backend=backend)
    seen = meta.materialize()
    expected = oracle(clean, seen).out
    limit = TOLERANCE[torch.bfloat16] if REGISTRY[backend].lse else QUANTISED
    assert (out - expected).abs().max() <= limit


def test_in_place_equals_packed(backend, trains):
    mask = make_mask("right", 4, 300, device="cuda")
    inputs = make_inputs((4, 300), (4, 300), dim=128, dtype=torch.bfloat16, device="cuda")
    metas = [prepare_varlen(4, 300, 300, mask, mask_q=mask, max_seqlen_k=300, layout=x) for x in ("packed", "in_place")]
    if not trains:
        with torch.no_grad():
            packed, in_place = (varlen_attention(*inputs[:3], meta, backend=backend) for meta in metas)
        torch.testing.assert_close(packed, in_place, atol=2e-2, rtol=2e-2)
        return
    packed, in_place = (run(inputs, meta, backend=backend, causal=True) for meta in metas)
    for a, b in zip(packed, in_place, strict=True):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


def test_rows_past_the_last_offset_are_zero_forward_and_backward(backend, trains):
    meta = VarlenMetadata.from_lengths(torch.tensor([70, 30], device="cuda"), max_seqlen_q=80)
    inputs = make_inputs((160,), (160,), dim=64, dtype=torch.bfloat16, device="cuda")
    part = torch.arange(160, device="cuda") < 100
    dirty = poison(inputs, part, part)
    if not trains:
        with torch.no_grad():
            out = varlen_attention(*dirty[:3], meta, backend=backend)
        assert_zero_rows(out, part)
        return
    got = run(dirty, meta, backend=backend, causal=True)
    for x in (got.out, got.dq, got.dk, got.dv):
        assert_zero_rows(x, part)
    assert (got.lse[:, 100:] == -torch.inf).all()


def test_one_document_does_not_touch_the_others(backend):
    meta = VarlenMetadata.from_lengths([70, 33, 90], device="cuda")
    inputs = make_inputs((193,), (193,), dim=64, dtype=torch.bfloat16, device="cuda")
    changed = Inputs(*(x.clone() for x in inputs))
    for x in changed:
        x[70:103] = x[70:103].flip(0) * 3
    with torch.no_grad():
        a, b = (varlen_attention(*x[:3], meta, backend=backend) for x in (inputs, changed))
    assert_bit_equal((a[:70], a[103:]), (b[:70], b[103:]))


def test_heads_equal_rows_keeps_the_lse_layout(backend):
    if not REGISTRY[backend].lse:
        pytest.skip("no log-sum-exp")
    inputs = make_inputs((8,), (8,), heads=8, heads_kv=8, dim=64, dtype=torch.bfloat16, device="cuda")
    check(backend, inputs, VarlenMetadata.from_lengths([3, 5], device="cuda"))


def test_a_scale_is_forwarded(backend):
    inputs = make_inputs((100,), (100,), dim=64, dtype=torch.bfloat16, device="cuda")
    meta = VarlenMetadata.from_lengths([100], device="cuda")
    with torch.no_grad():
        out = varlen_attention(*inputs[:3], meta, backend=backend, softmax_scale=0.25)
    expected = oracle(inputs, meta.materialize(), scale=0.25).out
    torch.testing.assert_close(out.double(), expected, atol=QUANTISED, rtol=QUANTISED)


def test_single_queries_with_empty_rows_and_grouped_heads(backend):
    if not REGISTRY[backend].bottom_right:
        pytest.skip("causal needs equal lengths here")
    meta = VarlenMetadata.from_lengths([1, 0, 1], [3, 0, 5], device="cuda")
    check(
        backend,
        make_inputs((2,), (8,), heads=9, heads_kv=3, dim=64, dtype=torch.bfloat16, device="cuda"),
        meta,
        causal=True,
    )
