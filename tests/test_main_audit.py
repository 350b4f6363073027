"""`python -m varlen_prep audit module:function`: exit codes, JSON, errors; and why a backend is chosen."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest
import torch

import varlen_prep
from varlen_prep import __main__ as main
from varlen_prep import selection


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of the user."""
    mine = types.ModuleType("mine")
    inputs = [(torch.ones(3, 4, requires_grad=True),), (torch.ones(5, 6, requires_grad=True),)]
    mine.clean = lambda: (lambda x: x + 1, inputs)
    mine.reads = lambda: (lambda x: x * x.nonzero().sum(), inputs)
    mine.wrong = lambda: inputs
    monkeypatch.setitem(sys.modules, "mine", mine)
    return mine


def test_a_clean_function_ends_with_0(capsys: Any) -> None:
    assert main.main(["audit", "mine:clean"]) == 0
    assert ": clean\n" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--json", "audit", "mine:reads"], ["audit", "mine:reads", "--json"]])
def test_a_function_that_is_not_clean_ends_with_1_and_says_why_in_json(arguments: list[str], capsys: Any) -> None:
    assert main.main(arguments) == 1
    found = json.loads(capsys.readouterr().out)
    assert [read["operation"] for read in found["reads"]] == ["nonzero"]
    assert found["problems"]


def test_gradients_on_request(capsys: Any) -> None:
    assert main.main(["audit", "mine:clean", "--backward"]) == 0
    assert "with gradients" in capsys.readouterr().out


@pytest.mark.parametrize(("target", "text"), [
    ("mine", "expected module:function, got 'mine'"),
    ("absent_module:f", "cannot find absent_module:f: No module named"),
    ("mine:absent", "cannot find mine:absent"),
    ("mine:wrong", "to return (callable, inputs)"),
])  # fmt: skip
def test_a_wrong_target_is_an_error_that_says_what_is_wrong(target: str, text: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["audit", target])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_the_choice_says_why_those_before_it_are_passed_over(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(selection, "automatic_order", lambda *device: ("flash3", "sage", "native"))
    training = main.report()["automatic"][0]
    assert training["backend"] == "native"
    why, flash3, sage = training["why"]
    assert why == "the first of flash3, sage, native that can"
    state = {state.name: state for state in varlen_prep.backends()}
    assert flash3.startswith(f"flash3: {'; '.join(state['flash3'].reasons)}")
    assert "gradients (it is forward-only" in sage
    assert "device cpu" in sage
    main.main([])
    assert f"- not {sage}" in capsys.readouterr().out
    with varlen_prep.use_backend("reference"):
        assert main.report()["automatic"][0]["why"] == ["the scope of use_backend"]
