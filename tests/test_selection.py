"""Which backend runs: by argument, by scope, automatically; refusals list all reasons and what can run instead."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from helpers import make_inputs, operators_run, refuses

from varlen_prep import VarlenMetadata, backends, prepare_varlen, selection, use_backend, varlen_attention
from varlen_prep.backends import AUTOMATIC, REGISTRY, Request

META = VarlenMetadata.from_lengths([3, 2])


def call(**options: Any) -> Any:
    q, k, v, _ = make_inputs((5,), (5,))
    return varlen_attention(q, k, v, META, **options)


def which(**options: Any) -> str:
    (name,) = operators_run(lambda: call(**options))
    return name


def request(**changes: Any) -> Request:
    usual = {
        "device": torch.device("cuda"), "dtype": torch.bfloat16, "heads": 4, "heads_kv": 2, "head_dim": 64,
        "head_dim_v": 64, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "deterministic": False,
        "backward": True, "lse": False, "equal_lengths": True,
    }  # fmt: skip
    return Request(**{**usual, **changes})


def test_every_backend_is_listed_and_usable_means_no_reasons() -> None:
    states = {state.name: state for state in backends()}
    assert {"native", "reference"} <= set(states)
    assert list(states) == list(REGISTRY)
    for state in states.values():
        assert state.usable == (not state.reasons)
        assert state.summary
        assert state.usable or state.install or state.reasons


def test_argument_wins_over_scope_and_scope_over_the_default() -> None:
    assert which() == "native_varlen"
    assert which(backend="reference") == "reference_varlen"
    with use_backend("reference"):
        assert which() == "reference_varlen"
        assert which(backend="native") == "native_varlen"
        with use_backend("native"):
            assert which() == "native_varlen"
        assert which() == "reference_varlen"
    assert which() == "native_varlen"


def test_scope_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), use_backend("reference"):
        raise KeyError
    assert which() == "native_varlen"


def test_scope_holds_on_its_own_thread_only() -> None:
    found = []
    with use_backend("reference"):
        thread = threading.Thread(target=lambda: found.append(call(softcap=0.5, backend="reference") is not None))
        thread.start()
        thread.join()
        refused = threading.Thread(target=lambda: found.append(_refused()))
        refused.start()
        refused.join()
    assert found == [True, True]


def _refused() -> bool:
    """Native has no softcap on the CPU, reference has: tells which one a thread gets."""
    try:
        call(softcap=0.5)
    except ValueError as error:
        return "softcap=0.5" in str(error)
    return False


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    for use in (lambda: call(backend="fast"), lambda: use_backend("fast").__enter__()):
        with refuses(ValueError, "backend", "native", "reference", "'fast'"):
            use()


def test_named_backend_refuses_what_it_cannot_do_and_names_who_can() -> None:
    with refuses(ValueError, "'native' cannot run", "softcap=0.5", "Backends that can", "reference"):
        call(backend="native", softcap=0.5)
    with use_backend("native"), refuses(ValueError, "'native' cannot run", "softcap=0.5"):
        call(softcap=0.5)


def test_no_backend_at_all_says_why_for_each_tried() -> None:
    x = torch.ones(1, 3, 1, 8, device="meta")
    with refuses(ValueError, "can run this call", "native: device meta", "cpu, cuda", "none"):
        varlen_attention(x, x, x, prepare_varlen(1, 3, 3, device="meta"))
    ints = torch.ones(1, 3, 1, 8, dtype=torch.int64)
    with refuses(ValueError, "native: dtype torch.int64 on cpu", "torch.float32", "none"):
        varlen_attention(ints, ints, ints, prepare_varlen(1, 3, 3))


@pytest.mark.parametrize(("changes", "fragment"), [
    ({"dtype": torch.float64}, "dtype torch.float64 on cuda"),
    ({"dtype": torch.float32, "window_size": (1, 2)}, "window_size=(1, 2) in float32"),
    ({"dtype": torch.float32, "window_size": (-1, 2)}, "window_size=(-1, 2) in float32"),
    ({"head_dim": 320}, "head size 320 (at most 256)"),
    ({"head_dim_v": 264}, "head size 264 (at most 256)"),
    ({"softcap": 1.0}, "softcap=1.0"),
    ({"deterministic": True}, "deterministic=True"),
])  # fmt: skip
def test_native_record_refuses_on_cuda_what_its_kernels_lack(changes: dict[str, Any], fragment: str) -> None:
    assert not REGISTRY["native"].reasons(request())
    assert any(fragment in reason for reason in REGISTRY["native"].reasons(request(**changes)))


@pytest.mark.parametrize("changes", [
    {"dtype": torch.float32}, {"dtype": torch.float16, "head_dim": 256}, {"window_size": (1, 2)}, {"causal": True},
    {"dtype": torch.float32, "causal": True, "window_size": (3, 0)}, {"deterministic": True, "backward": False},
    {"lse": True}, {"equal_lengths": False, "causal": True},
])  # fmt: skip
def test_native_record_takes_on_cuda_what_its_kernels_have(changes: dict[str, Any]) -> None:
    assert not REGISTRY["native"].reasons(request(**changes))


def test_all_reasons_are_listed_at_once() -> None:
    reasons = REGISTRY["native"].reasons(request(dtype=torch.float64, softcap=1.0))
    assert len(reasons) >= 2


def test_a_lack_is_looked_for_once_until_it_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes longer than a small call, and `backend=None` would look for every package in each."""
    looks, found = [], ["not installed"]

    def missing() -> list[str]:
        looks.append(True)
        return list(found)

    fast = dataclasses.replace(REGISTRY["reference"], name="fast", missing=missing)
    monkeypatch.setitem(REGISTRY, "fast", fast)
    monkeypatch.setattr(selection, "automatic_order", lambda *device: ("fast", "native"))
    asked = request(device=torch.device("cpu"), dtype=torch.float32, backward=False)
    assert [selection.select(None, asked).name for _ in range(3)] == ["native"] * 3
    assert len(looks) == 1
    with refuses(ValueError, "not installed"):
        selection.select("fast", asked)
    assert len(looks) > 1, "who asks by name is told how it is now"
    found.clear()
    assert selection.select(None, asked).name == "native"
    assert "fast" in [state.name for state in backends() if state.usable]
    assert selection.select(None, asked).name == "fast"


def test_the_choice_is_kept_for_calls_of_the_same_shapes_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], selection.select
    monkeypatch.setattr(selection, "select", lambda *args: asked.append(args) or real(*args))
    for options in ({}, {"causal": True}, {"softcap": 2.0, "backend": "reference"}, {"return_lse": True}):
        before = len(asked)
        for _ in range(3):
            call(**options)
        assert len(asked) == before + 1, options
    for _ in range(2):
        with use_backend("reference"):
            call()
        call()
    assert len(asked) == before + 2, "only the scope is new"
    for _ in range(2):
        with refuses(ValueError, "softcap", "native"):
            call(softcap=2.0, backend="native")
        with refuses(ValueError, "5 rows"):
            varlen_attention(*make_inputs((4,), (4,))[:3], META)


def test_a_kept_choice_ends_when_a_package_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    found, ran = ["not installed"], []

    def forward(*args: Any) -> Any:
        ran.append(True)
        return REGISTRY["reference"].forward(*args)

    fast = dataclasses.replace(REGISTRY["reference"], name="fast", missing=lambda: list(found), forward=forward)
    monkeypatch.setitem(REGISTRY, "fast", fast)
    monkeypatch.setattr(selection, "automatic_order", lambda *device: ("fast", "native"))
    call()
    found.clear()
    call()
    assert not ran
    backends()
    call()
    assert ran


def test_what_depends_on_a_switch_of_torch_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(asked: Request) -> list[str]:
        on = torch.are_deterministic_algorithms_enabled()
        return ["the switch is off"] if asked.deterministic and not on else []

    monkeypatch.setitem(REGISTRY, "native", dataclasses.replace(REGISTRY["native"], refuse=refuse))
    torch.use_deterministic_algorithms(True)
    try:
        call(deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)
    with refuses(ValueError, "the switch is off"):
        call(deterministic=True)


@pytest.mark.parametrize(
    ("rows", "backward", "name"), [(10**6, True, "native"), (10**6, False, "cudnn"), (10**5, True, "cudnn")]
)
def test_cudnn_is_not_chosen_for_gradients_that_it_cannot_count(
    rows: int, backward: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REGISTRY, "cudnn", dataclasses.replace(REGISTRY["cudnn"], missing=list))
    monkeypatch.setattr(selection, "automatic_order", lambda *device: AUTOMATIC[9, 0][-2:])
    asked = request(rows_q=rows, rows_k=8, heads=24, head_dim=128, head_dim_v=128, backward=backward)
    assert selection.select(None, asked).name == name
    assert selection.select(None, asked._replace(rows_q=8, rows_k=rows, heads_kv=24)).name == name
    assert any("2**31" in reason for reason in REGISTRY["cudnn"].reasons(asked)) == (name == "native")


@pytest.mark.parametrize(("rows", "fits"), [(400_000, True), (524_288, True), (524_289, False)])
def test_cudnn_counts_to_the_last_row(rows: int, fits: bool) -> None:
    asked = request(heads=32, heads_kv=1, head_dim=128, head_dim_v=128, rows_q=rows, rows_k=8)
    assert (not REGISTRY["cudnn"].reasons(asked)) == fits
