"""A kernel is called without its operator only where nothing else would see the call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Recorder, assert_bit_equal, make_mask, random
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from varlen_prep import op, pack, prepare_varlen, unpack, varlen_attention
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


@pytest.mark.parametrize("layout", ["packed", "in_place"])
def test_both_ways_give_the_same(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    operator = op.operator
    monkeypatch.setattr(op, "operator", lambda backend: calls.append(backend.op) or operator(backend))
    mask = make_mask("right", 3, 7, seed=0)
    mask[1] = False  # a row without keys
    q, k, v = (random(3, 7, 2, 8) for _ in range(3))

    def attend(watched: bool) -> tuple[Tensor, ...]:
        with FlopCounterMode(display=False) if watched else contextlib.nullcontext():
            bound = {"max_seqlen_k": 7} if layout == "packed" else {}
            meta = prepare_varlen(3, 7, 7, mask, layout=layout, **bound)
            both = varlen_attention(q, k, v, meta, return_lse=True)
            moved = unpack(pack(k, meta, "k"), meta, "k")
            return meta.cu_seqlens_k, moved, varlen_attention(q, k, v, meta), *both

    plain = attend(False)
    assert not calls
    watched = attend(True)
    assert calls == ["native_varlen"] * 2
    for one, other in zip(plain, watched, strict=True):
        assert_bit_equal(one, other)
    assert torch.equal(plain[2], plain[3])
    assert plain[4][1].eq(-torch.inf).all()
