"""`python -m varlen_prep`: says what is here, and its check can fail."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from helpers import run_python

import varlen_prep
from varlen_prep import __main__ as main
from varlen_prep.backends import REGISTRY


def test_every_backend_is_listed_with_all_reasons_and_its_pip_line(capsys):
    assert main.main([]) == 0
    text = capsys.readouterr().out
    for state in varlen_prep.backends():
        assert state.name in text
        for reason in state.reasons:
            assert reason in text
        if any("not installed" in reason for reason in state.reasons):
            assert f"> {state.install}" in text
    assert f"torch {torch.__version__}" in text


def test_the_automatic_choice_is_the_one_that_attention_makes(capsys, monkeypatch):
    assert main.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["backend"] for row in found["automatic"] if row["call"].startswith("cpu")] == ["native", "native"]
    assert {state["name"] for state in found["backends"]} == {*REGISTRY}
    with varlen_prep.use_backend("reference"):
        assert main.report()["automatic"][0]["backend"] == "reference"


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_the_check_covers_every_usable_backend_and_passes(backend):
    rows = [row for row in main.check() if row["backend"] == backend and row["device"] == "cpu"]
    assert {row["dtype"] for row in rows} == {"float32", "float16", "bfloat16"}
    assert all(row["ok"] for row in rows)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_wrong_kernel_is_found_and_the_exit_code_says_so(part, monkeypatch, capsys):
    """A plausible fault: a scale that is not forwarded."""
    native = REGISTRY["native"]
    right = getattr(native, part)

    def wrong(*arguments):
        return right(*arguments[:-1], arguments[-1]._replace(softmax_scale=1.0))

    record = dataclasses.replace(native, **{part: wrong}, op=f"native_with_a_wrong_{part}_varlen")
    varlen_prep.op.define(record)
    monkeypatch.setitem(REGISTRY, "native", record)
    assert main.main(["--check"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_check_passes_on_the_gpu():
    rows = [row for row in main.check() if row["device"] == "cuda"]
    assert rows
    assert all(row["ok"] for row in rows), [row for row in rows if not row["ok"]]


def test_it_runs_as_a_module():
    ended = run_python(
        "import runpy, sys; sys.argv = ['varlen_prep']; runpy.run_module('varlen_prep', run_name='__main__')"
    )
    assert ended.returncode == 0, ended.stderr
    assert "native" in ended.stdout
