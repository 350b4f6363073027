"""One preparation per forward of a diffusers model: who shares it, who must not, and when it ends."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.modeling_utils import ModelMixin
from diffusers_helpers import (
    Layers,
    flux_inputs,
    flux_sdpa,
    mask_of,
    qkv,
    routed,
    sdpa,
    tiny_flux,
    untouched,  # noqa: F401  (an autouse fixture)
)

from varlen_prep.integrations.diffusers import _memo, route


@pytest.fixture
def prepared(monkeypatch):
    """The calls of prepare_varlen that the integration makes."""
    calls, real = [], _memo.prepare_varlen

    def counting(*args, **kwargs):
        calls.append((args, kwargs))
        return real(*args, **kwargs)

    monkeypatch.setattr(_memo, "prepare_varlen", counting)
    return calls


def test_layers_of_a_forward_share_one_preparation(prepared):
    model = tiny_flux(layers=2)
    for masked in (True, False):
        with route("native"), attention_backend("flash_varlen"):
            for _ in range(3):
                model(**flux_inputs(masked=masked))
        assert len(prepared) == 3
        assert all(kwargs["max_seqlen_k"] == args[2] for args, kwargs in prepared)  # the bound: nothing is read
        prepared.clear()


def test_nothing_is_kept_outside_of_a_model(prepared):
    q, k, v = qkv()
    mask = mask_of("hole")
    with route("native"):
        routed(q, k, v, attn_mask=mask)
        mask.data.logical_not_()  # not even the version counter shows it
        torch.testing.assert_close(routed(q, k, v, attn_mask=mask), sdpa(q, k, v, mask))
    assert len(prepared) == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_different_masks_and_shapes_do_not_share(compiled, prepared):
    class Mixed(ModelMixin):
        def forward(self, q, k, v, masks):
            return [routed(q[:, :n], k, v, attn_mask=mask) for n in (5, 4) for mask in masks]

    q, k, v = qkv()
    masks = [mask_of("hole"), mask_of("right"), None, mask_of("hole")]
    call = torch.compile(Mixed(), fullgraph=True, dynamic=True, backend="eager") if compiled else Mixed()
    with route("native"):
        outs = call(q, k, v, masks)
    expected = [sdpa(q[:, :n], k, v, mask) for n in (5, 4) for mask in masks]
    torch.testing.assert_close(outs, expected)
    assert compiled or len(prepared) == 8


def test_kept_preparations_are_bounded():
    kept = []

    class Many(ModelMixin):
        def forward(self, q, k, v):
            for _ in range(20):
                routed(q, k, v, attn_mask=mask_of("hole"))
                kept.append(len(_memo._scope.eager.entries))

    with route("native"):
        Many()(*qkv())
    assert max(kept) == _memo._MOST


@pytest.mark.parametrize("compiled", [False, True])
def test_mask_changed_in_place_between_layers(compiled):
    q, k, v = qkv()
    mask, after = mask_of("hole"), ~mask_of("hole")
    expected = sdpa(q, k, v, mask), sdpa(q, k, v, after)
    model = Layers(between=lambda mask: mask.logical_not_())
    call = torch.compile(model, fullgraph=True, dynamic=True, backend="eager") if compiled else model
    with route("native"):
        torch.testing.assert_close(call(q, k, v, mask), expected)
        torch.testing.assert_close(call(q, k, v, mask), expected[::-1])


@pytest.mark.parametrize("dynamic", [True, False])
def test_mask_changed_in_place_between_broken_graphs(dynamic):
    @torch.compiler.disable
    def between(mask):
        mask.logical_not_()

    q, k, v = qkv()
    mask, after = mask_of("hole"), ~mask_of("hole")
    expected = sdpa(q, k, v, mask), sdpa(q, k, v, after)
    with route("native"):
        call = torch.compile(Layers(between), dynamic=dynamic, backend="eager")
        torch.testing.assert_close(call(q, k, v, mask), expected)
        torch.testing.assert_close(call(q, k, v, mask), expected[::-1])


@pytest.mark.parametrize("mask_mode", [False, True])
def test_inference_then_training(mask_mode, prepared):
    with torch.inference_mode(mask_mode):
        mask = mask_of("hole")
    q, k, v = qkv(requires_grad=True)
    model = Layers()
    with route("native"):
        with torch.inference_mode():
            model(q, k, v, mask)
        assert len(prepared) == (2 if mask_mode else 1)  # an inference tensor does not show changes in place
        out = model(q, k, v, mask)[1]
        out.square().sum().backward()
    ours = [x.grad for x in (q, k, v)]
    q, k, v = qkv(requires_grad=True)
    sdpa(q, k, v, mask.clone()).square().sum().backward()
    torch.testing.assert_close(ours, [x.grad for x in (q, k, v)])


def test_inference_mode_inside_a_forward(prepared):
    class Mixed(ModelMixin):
        def forward(self, q, k, v, mask):
            with torch.inference_mode():
                routed(q, k, v, attn_mask=mask)
            return routed(q, k, v, attn_mask=mask)

    q, k, v = qkv(requires_grad=True)
    with route("native"):
        Mixed()(q, k, v, mask_of("hole")).sum().backward()
    assert len(prepared) == 2
    assert v.grad.isfinite().all()


def test_forward_ends_its_memo_after_an_exception(prepared):
    def fail(mask):
        raise KeyError

    q, k, v = qkv()
    with route("native"):
        with pytest.raises(KeyError):
            Layers(fail)(q, k, v, mask_of("hole"))
        assert _memo._scope.eager is None


def test_inner_models_share_with_the_outer_one(prepared):
    class Outer(ModelMixin):
        def __init__(self):
            super().__init__()
            self.inner = Layers()

        def forward(self, q, k, v, mask):
            return self.inner(q, k, v, mask), routed(q, k, v, attn_mask=mask)

    with route("native"):
        Outer()(*qkv(), mask_of("hole"))
    assert len(prepared) == 1


def test_capture_that_starts_inside_a_forward_prepares_for_itself(prepared, monkeypatch):
    capturing = [False]
    monkeypatch.setattr(_memo, "_capturing", lambda: capturing[0])

    def start(mask):
        capturing[0] = True

    with route("native"):
        Layers(start)(*qkv(), mask_of("hole"))
        assert len(prepared) == 2
        Layers()(*qkv(), mask_of("hole"))  # all of it inside one capture
        assert len(prepared) == 3


def test_threads_do_not_share(prepared):
    barrier = threading.Barrier(2, timeout=60)
    q, k, v = qkv()
    masks = [mask_of("hole"), mask_of("right")]
    outs = [None, None]
    with route("native"):

        def work(i):
            outs[i] = Layers(lambda mask: barrier.wait())(q, k, v, masks[i])[1]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    torch.testing.assert_close(outs, [sdpa(q, k, v, mask) for mask in masks])
    assert len(prepared) == 2


def test_gradient_checkpointing():
    expected, model = tiny_flux(layers=2).train(), tiny_flux(layers=2).train()
    flux_sdpa(expected, flux_inputs()).square().sum().backward()
    model.enable_gradient_checkpointing()
    with route("native"), attention_backend("flash_varlen"):
        model(**flux_inputs())[0].square().sum().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
