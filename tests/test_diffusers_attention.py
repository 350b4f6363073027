"""diffusers' varlen backends through this library: values, gradients, masks, and what an attention call refuses.

The oracle is diffusers' own "native" backend (SDPA with a mask), run by the same dispatch function or the same model.
"""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from diffusers.models.attention_dispatch import attention_backend
from diffusers_helpers import (
    MASKS,
    NAMES,
    flux_inputs,
    flux_sdpa,
    mask_of,
    qkv,
    routed,
    sdpa,
    tiny_flux,
    untouched,  # noqa: F401  (an autouse fixture)
)

from varlen_prep.integrations.diffusers import route


@pytest.mark.parametrize("kind", [None, *MASKS])
@pytest.mark.parametrize("name", NAMES)
def test_every_name_gives_what_sdpa_gives(name, kind):
    q, k, v = qkv()
    mask = None if kind is None else mask_of(kind)
    with route("native"):
        out = routed(q, k, v, name, attn_mask=mask)
    torch.testing.assert_close(out, sdpa(q, k, v, mask))


@pytest.mark.parametrize("kind", ["right", "left", "empty row"])
def test_in_place_layout(kind):
    mask = mask_of(kind)
    mask[1] = True
    q, k, v = qkv()
    with route("native", layout="in_place"):
        torch.testing.assert_close(routed(q, k, v, attn_mask=mask), sdpa(q, k, v, mask))
        with pytest.raises(ValueError, match="a hole"):
            routed(q, k, v, attn_mask=mask_of("hole"))


@pytest.mark.parametrize("name", NAMES)
def test_flux_model(name):
    model, inputs = tiny_flux(), flux_inputs()
    expected = flux_sdpa(model, inputs), flux_sdpa(model, flux_inputs(masked=False))
    with route("native"):
        with attention_backend(name):
            torch.testing.assert_close(model(**inputs)[0], expected[0])
        model.set_attention_backend(name)
        torch.testing.assert_close(model(**inputs)[0], expected[0])
        torch.testing.assert_close(model(**flux_inputs(masked=False))[0], expected[1])


def test_flux_gradients():
    expected, model = tiny_flux(), tiny_flux()
    flux_sdpa(expected, flux_inputs()).square().sum().backward()
    with route("native"), attention_backend("flash_varlen"):
        model(**flux_inputs())[0].square().sum().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype, monkeypatch):
    monkeypatch.setattr(Registry, "_checks_enabled", True)  # diffusers' own checks would want CUDA and half
    q, k, v = qkv(dtype=dtype)
    mask = mask_of("hole")
    with route("native"):
        torch.testing.assert_close(routed(q, k, v, attn_mask=mask), sdpa(q, k, v, mask))


ROWS = [True, False, True, True, False, True, True]


@pytest.mark.parametrize(
    ("shape", "batched"),
    [
        ((7,), False), ((1, 7), False), ((3, 7), True), ((1, 1, 7), False), ((3, 1, 7), True), ((1, 1, 1, 7), False),
        ((3, 1, 1, 7), True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("expanded", [False, True])
def test_mask_spellings(shape, batched, expanded):
    keys = mask_of("hole") if batched else torch.tensor([ROWS])
    mask = keys.view(shape)
    if expanded:
        mask = mask.expand({3: (-1, 5, -1), 4: (-1, 6, 5, -1)}.get(mask.ndim, mask.shape))
    q, k, v = qkv()
    with route("native"):
        torch.testing.assert_close(routed(q, k, v, attn_mask=mask), sdpa(q, k, v, keys))


@pytest.mark.parametrize("name", NAMES)
def test_lse_is_batch_seq_heads(name):
    q, k, v = qkv()
    mask = mask_of("empty row")
    with route("native"):
        out, lse = routed(q, k, v, name, attn_mask=mask, attention_kwargs={"return_lse": True})
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) * 8**-0.5
    expected = scores.masked_fill(~mask[:, None, None, :], -torch.inf).logsumexp(-1)
    assert lse.shape == (3, 5, 6)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, expected)
    torch.testing.assert_close(out, sdpa(q, k, v, mask))


def test_grouped_query_heads():
    q, k, v = qkv(heads=6, heads_kv=2)
    mask = mask_of("hole")
    with route("native"):
        out = routed(q, k, v, attn_mask=mask, enable_gqa=True)
        assert torch.equal(out, routed(q, k, v, attn_mask=mask))  # as diffusers' own flash backends
    torch.testing.assert_close(out, sdpa(q, k, v, mask, enable_gqa=True))


def test_causal_window_and_scale():
    q, k, v = qkv()
    distance = torch.arange(7) - torch.arange(5)[:, None] - (7 - 5)  # 0: the query's own place, bottom-right

    def dense(seen, scale=8**-0.5):
        q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q_, k_, v_, attn_mask=seen, scale=scale)
        return out.transpose(1, 2)

    with route("native"):
        torch.testing.assert_close(routed(q, k, v, is_causal=True), dense(distance <= 0))
        window = routed(q, k, v, attention_kwargs={"window_size": (2, 1)})
        torch.testing.assert_close(window, dense((distance >= -2) & (distance <= 1)))
        torch.testing.assert_close(routed(q, k, v, scale=0.3), dense(distance < 99, scale=0.3))


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"attn_mask": torch.ones(3, 5, 7, dtype=torch.bool)}, ValueError, "differs per query or head"),
        ({"attn_mask": torch.ones(3, 6, 5, 7, dtype=torch.bool)}, ValueError, "differs per query or head"),
        ({"attn_mask": torch.ones(2, 7, dtype=torch.bool)}, ValueError, "broadcasts to (batch, seq) = (3, 7)"),
        ({"attn_mask": torch.zeros(3, 7)}, TypeError, "expected torch.bool, got torch.float32"),
        ({"attn_mask": torch.ones(3, 7, dtype=torch.bool), "is_causal": True}, ValueError, "with is_causal=True"),
        (
            {"attn_mask": torch.ones(3, 7, dtype=torch.bool), "attention_kwargs": {"window_size": (1, 1)}},
            ValueError,
            "which queries take part",
        ),
        ({"dropout_p": 0.1}, ValueError, "dropout_p: expected 0, got 0.1"),
        ({"parallel_config": object()}, ValueError, "Context parallelism gives each rank a part of every row"),
    ],
)
def test_refusals(kwargs, error, text):
    with route("native"), pytest.raises(error, match=re.escape(text)):
        routed(*qkv(), **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_a_name_of_diffusers_lacks_are_not_dropped(name):
    q, k, v = qkv()
    with route("native"):
        with pytest.raises(ValueError, match="dropout_p: expected 0"):
            routed(q, k, v, name, dropout_p=0.1)
        window = {"attention_kwargs": {"window_size": (1, 0)}}
        assert torch.equal(routed(q, k, v, name, **window), routed(q, k, v, "flash_varlen", **window))
        assert not torch.equal(routed(q, k, v, name, **window), routed(q, k, v, name))
