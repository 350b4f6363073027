"""An audit leaves the compiler, the generators, logs and warnings as it found them, also after an exception."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Recorder
from torch import Tensor
from torch._dynamo import config, convert_frame, eval_frame, pgo, utils

from varlen_prep import audit

INPUTS = [(torch.ones(3, 4),), (torch.ones(5, 6),)]


def _fails(x: Tensor) -> Tensor:
    raise RuntimeError("mine")


def _fails_when_compiled(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()
    return _broken(x)


def _broken(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x + 1
    return x - 1


def _skipped(x: Tensor) -> Tensor:
    for _ in range(2):
        if x.sum() > 0:
            x = x + 1
    return x


def _state() -> dict[str, Any]:
    """Everything global that an audit touches."""
    log = torch._logging.getArtifactLogger("torch._dynamo.symbolic_convert", "graph_breaks")
    parent = logging.getLogger("torch._dynamo")
    return {
        "config": {name: getattr(config, name) for name in ("recompile_limit", "suppress_errors")},
        "stance": copy.copy(eval_frame._stance),
        "counters": {key: dict(value) for key, value in utils.counters.items()},
        "attempted": set(convert_frame.input_codes.seen_ids),
        "history": None if pgo._CODE_STATE is None else dict(pgo._CODE_STATE),
        "warned": list(utils.graph_break_dup_warning_checker.set),
        "log": (log.level, list(log.handlers), log.propagate, log.disabled, parent.level),
        "random": torch.get_rng_state().tolist(),
        "default dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "frozen": gc.get_freeze_count(),
        "determinism": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.mark.parametrize("function", [_fails, _fails_when_compiled, _broken, _skipped, lambda x: x + 1])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_global_state_is_what_it_was(function: Callable[..., Any], fullgraph: bool) -> None:
    torch.compile(lambda x: _broken(x), backend="eager")(torch.ones(2))  # something to be left alone
    before = _state()
    if function is _fails:
        with pytest.raises(RuntimeError, match="mine"):
            audit(function, INPUTS, fullgraph=fullgraph)
    else:
        audit(function, INPUTS, fullgraph=fullgraph)
    assert _state() == before


def test_the_check_of_state_sees_a_change() -> None:
    before = _state()
    torch.rand(1)
    utils.counters["frames"]["ok"] += 1
    changed = {key for key, value in _state().items() if value != before[key]}
    assert changed == {"random", "counters"}


def test_code_of_the_user_stays_compiled_and_nothing_of_the_audit_stays() -> None:
    def own(x: Tensor) -> Tensor:
        return x * 3

    def branches(x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    recorder = Recorder()
    compiled = torch.compile(own, backend=recorder, dynamic=True)
    compiled(torch.ones(3, 4))
    audit(own, INPUTS)
    audit(lambda x: own(branches(_skipped(x))), INPUTS, compile_backend="aot_eager")
    compiled(torch.ones(5, 6))
    assert recorder.compiles == 1
    for function, kept in ((own, 1), (_skipped, 0), (branches, 0)):
        assert len(eval_frame._debug_get_cache_entry_list(function.__code__)) == kept


def test_a_function_that_was_given_up_in_the_audit_is_compiled_afterwards() -> None:
    def sometimes(x: Tensor, break_here: bool) -> Tensor:
        for _ in range(2):
            if break_here:
                torch._dynamo.graph_break()
            x = x + 1
        return x

    report = audit(lambda x: sometimes(x, True), INPUTS)
    assert report.breaks
    recorder = Recorder()
    torch.compile(sometimes, backend=recorder)(torch.ones(3), False)
    assert recorder.compiles == 1, "the compiler must not remember that it skipped the function"


def test_code_of_the_user_that_breaks_stays_compiled() -> None:
    def breaks(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    recorder = Recorder()
    compiled = torch.compile(breaks, backend=recorder, dynamic=True)
    compiled(torch.ones(3, 4))
    first = audit(breaks, INPUTS)
    second = audit(breaks, INPUTS)
    compiled(torch.ones(5, 6))
    assert recorder.compiles == 2
    # What is compiled already, here and in the first audit, is no recompile of the second.
    assert (first.graphs, first.recompiles) == (second.graphs, second.recompiles) == (2, ())


def test_inputs_and_gradients_of_the_user_are_not_touched() -> None:
    module = torch.nn.Linear(4, 2)
    x = torch.ones(3, 4, requires_grad=True)

    def writes(x: Tensor) -> Tensor:
        y = module(x.clone())
        x.detach().zero_()
        return y

    audit(writes, [(x,)], backward=True)
    assert (x == 1).all()
    assert x.grad is None
    assert module.weight.grad is None


def test_warnings_of_the_function_reach_the_user() -> None:
    def warns(x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            warnings.warn("of the function", UserWarning, stacklevel=1)
        return x + 1

    with pytest.warns(UserWarning, match="of the function"):
        audit(warns, INPUTS)
