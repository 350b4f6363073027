"""A kernel is called without its operator only where nothing else would see the call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from helpers import Recorder, assert_bit_equal, make_mask, random, refuses
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from varlen_prep import VarlenMetadata, op, pack, prepare_varlen, unpack, varlen_attention
from varlen_prep._direct import unwatched


class Sub(Tensor):
    pass


def traced() -> bool:
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(unwatched(x))
        return x + 1

    torch.compile(function, backend=Recorder(), fullgraph=True)(torch.zeros(2))
    return seen[-1]


def transformed() -> bool:
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(unwatched(x))
        return x

    torch.vmap(function)(torch.zeros(2))
    return seen[-1]


def with_tangent() -> bool:
    with forward_ad.dual_level():
        return unwatched(forward_ad.make_dual(torch.zeros(2), torch.ones(2)))


def within(scope: Callable[[], Any]) -> Callable[[], bool]:
    def ask() -> bool:
        with scope():
            return unwatched(torch.zeros(2))

    return ask


def profiled() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


WATCHERS: dict[str, Callable[[], bool]] = {
    "compiler": traced,
    "functorch": transformed,
    "tangent": with_tangent,
    "dispatch mode": within(lambda: FlopCounterMode(display=False)),
    "function mode": within(lambda: torch.device("cpu")),
    "profiler": within(profiled),
    "subclass": lambda: unwatched(torch.zeros(2), torch.zeros(2).as_subclass(Sub)),
    "gradient": lambda: unwatched(torch.zeros(2), torch.nn.Parameter(torch.zeros(2))),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_who_watches_sees_the_operator(watcher: str) -> None:
    assert not WATCHERS[watcher]()


def test_nobody_watches_a_plain_call() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert unwatched(torch.zeros(2))
    with torch.no_grad():
        assert unwatched(parameter)
    with torch.inference_mode():
        assert unwatched(parameter, torch.zeros(2))


@pytest.fixture(name="dispatched")
def dispatched_fixture(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the attention operators that are called."""
    calls: list[str] = []
    operator = op.operator

    def recording(backend: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(backend.op)
            return operator(backend)(*arguments)

        return call

    monkeypatch.setattr(op, "operator", recording)
    return calls


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("layout", ["packed", "in_place"])
def test_both_ways_give_the_same(layout: Any, gradients: bool, dispatched: list[str]) -> None:
    mask = make_mask("right", 3, 7, seed=0)
    mask[1] = False  # a row without keys
    leaves = [random(3, 7, 2, 8).requires_grad_(gradients) for _ in range(3)]
    bound = {"max_seqlen_k": 7} if layout == "packed" else {}

    def attend(watched: bool) -> tuple[Tensor, ...]:
        with FlopCounterMode(display=False) if watched else contextlib.nullcontext():
            meta = prepare_varlen(3, 7, 7, mask, layout=layout, **bound)
            out, lse = varlen_attention(*leaves, meta, return_lse=True)
            moved = unpack(pack(leaves[1], meta, "k"), meta, "k")
            other = varlen_attention(*leaves, meta)
            grads = torch.autograd.grad((out * 2 + other + moved).sum(), leaves) if gradients else ()
            return meta.cu_seqlens_k, moved, other, out, lse, *grads

    plain = attend(False)
    assert not dispatched
    watched = attend(True)
    assert dispatched == ["native_varlen"] * 2
    for one, same in zip(plain, watched, strict=True):
        assert_bit_equal(one, same)
    assert torch.equal(plain[2], plain[3])
    assert plain[4][1].eq(-torch.inf).all()
    if gradients:
        assert not plain[6][1].any(), "masked keys"


def test_second_derivatives_are_refused_without_the_operator_too(dispatched: list[str]) -> None:
    x = random(5, 2, 8).requires_grad_()
    out = varlen_attention(x, x, x, VarlenMetadata.from_lengths([5]))
    with refuses(NotImplementedError, "second derivative"):
        torch.autograd.grad(torch.autograd.grad(out.sum(), x, create_graph=True)[0].sum(), x)
    assert not dispatched


def test_gradients_survive_saved_tensor_hooks_and_checkpoints() -> None:
    x, meta = random(5, 2, 8).requires_grad_(), VarlenMetadata.from_lengths([2, 3])
    attend = functools.partial(varlen_attention, meta=meta)
    want = torch.autograd.grad(attend(x, x, x).sum(), x)[0]
    with torch.autograd.graph.save_on_cpu():
        assert_bit_equal(torch.autograd.grad(attend(x, x, x).sum(), x)[0], want)
    out = torch.utils.checkpoint.checkpoint(attend, x, x, x, use_reentrant=False)
    assert_bit_equal(torch.autograd.grad(out.sum(), x)[0], want)


def test_batched_gradients_go_through_the_operator(dispatched: list[str]) -> None:
    """Tensors of torch's older vmap look like plain ones, and kernels cannot take them."""
    mask = make_mask("right", 3, 7, seed=0)
    meta = prepare_varlen(3, 7, 7, mask, max_seqlen_k=7)
    q = random(3, 7, 2, 8).requires_grad_()
    out = varlen_attention(q, q, q, meta)
    douts = random(4, *out.shape)
    got = torch.autograd.grad(out, q, douts, is_grads_batched=True, retain_graph=True)[0]
    want = torch.stack([torch.autograd.grad(out, q, dout, retain_graph=True)[0] for dout in douts])
    torch.testing.assert_close(got, want)


LAYOUTS = ["packed", "in_place"]


def two_rows(layout: Any) -> VarlenMetadata:
    """The last key of the first row and the first of the second take no part."""
    mask = torch.tensor([[True, True, False], [False, True, True]])
    return prepare_varlen(2, 3, 3, mask, layout=layout, **({"max_seqlen_k": 3} if layout == "packed" else {}))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("move", [pack, unpack])
def test_moving_rows_has_every_derivative(move: Callable[..., Tensor], layout: Any) -> None:
    meta = two_rows(layout)
    x = random(2, 3, 2) if move is pack else random(6, 2)

    def function(x: Tensor) -> Tensor:
        return move(x, meta, "k")

    want = torch.autograd.functional.jacobian(function, x)
    assert want.any()
    assert_bit_equal(torch.func.jacrev(function)(x), want)
    assert_bit_equal(torch.func.jacfwd(function)(x), want)
    assert_bit_equal(torch.func.jvp(function, (x,), (torch.ones_like(x),))[1], want.flatten(function(x).ndim).sum(-1))
    squares = torch.func.hessian(lambda x: function(x).square().sum())(x)
    taken = want.flatten(function(x).ndim).flatten(0, -2).sum(0)  # how often each number of x comes out
    assert_bit_equal(squares.view(x.numel(), -1), 2 * taken.diag())
    batch = torch.stack([x, 2 * x])
    assert_bit_equal(torch.func.vmap(function)(batch), torch.stack([function(x), function(2 * x)]))


def test_forward_mode_over_reverse_mode_is_refused() -> None:
    q = random(5, 2, 8).requires_grad_()
    out = varlen_attention(q, q, q, VarlenMetadata.from_lengths([5]))
    with forward_ad.dual_level(), refuses(NotImplementedError, "forward-mode"):
        torch.autograd.grad(out, q, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_unpacked_for_training_by_metadata_made_for_inference(layout: Any) -> None:
    with torch.inference_mode():
        meta = two_rows(layout)
    x = random(6, 2).requires_grad_()
    assert torch.autograd.grad(unpack(x, meta, "k").sum(), x)[0].sum() == 8


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", ["direct", "operator", "compiled"])
def test_fills_are_exact(layout: Any, way: str) -> None:
    meta = two_rows(layout)
    cases = [(torch.int64, 2**63 - 1), (torch.int64, 2**53 + 1), (torch.complex64, 1j), (torch.float64, 0.1)]
    for dtype, fill in [*cases, (torch.float32, np.float32(2)), (torch.int64, np.int64(3))]:
        function = functools.partial(unpack, x=torch.ones(6, dtype=dtype), meta=meta, side="k", fill=fill)
        if way == "compiled" and not isinstance(fill, np.generic):
            torch._dynamo.reset()
            function = functools.partial(torch.compile(unpack, backend="eager"), **function.keywords)
        with FlopCounterMode(display=False) if way == "operator" else contextlib.nullcontext():
            assert function()[0, 2].item() == torch.tensor(fill, dtype=dtype).item(), (dtype, fill)


def test_a_fill_that_is_a_tensor_is_refused() -> None:
    meta = prepare_varlen(1, 2, 2, torch.tensor([[True, False]]), max_seqlen_k=2)
    with refuses(TypeError, "fill: expected a number"):
        unpack(torch.ones(2, 1), meta, "k", fill=torch.ones(()))  # type: ignore[arg-type]


def test_results_may_be_changed_in_place() -> None:
    """With one head the reference kernel returns a view."""
    q, meta = random(6, 1, 8).requires_grad_(), VarlenMetadata.from_lengths([4, 2])
    for backend in ("native", "reference"):
        out = varlen_attention(q, q, q, meta, backend=backend)
        assert_bit_equal(varlen_attention(q, q, q, meta, backend=backend).mul_(2), out * 2)


@pytest.mark.parametrize("option", ["causal", "deterministic"])
def test_flags_are_bools(option: str) -> None:
    q = random(5, 2, 8)
    with refuses(TypeError, f"{option}: expected a bool"):
        varlen_attention(q, q, q, VarlenMetadata.from_lengths([5]), **{option: "no"})  # type: ignore[arg-type]


class _WithoutGradient(torch.autograd.Function):
    """Says nothing about the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("watched", [False, True])
def test_an_output_without_gradient_gives_none(watched: bool) -> None:
    x = random(5, 2, 8).requires_grad_()
    with FlopCounterMode(display=False) if watched else contextlib.nullcontext():
        out = varlen_attention(x, x, x, VarlenMetadata.from_lengths([5]))
        _WithoutGradient.apply(out).sum().backward()
    assert x.grad is None or not x.grad.any()
