"""Marks and fixtures of the tests of the real kernels: each kernel that can run here, the others skip with reasons."""

from __future__ import annotations

import os

import pytest

import varlen_prep
from varlen_prep.backends import REGISTRY

MARKS = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_compiler"),
    # The packages' own: deprecations, and what the compiler of flash-attn 4 has to say.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(name="backend", params=[name for name in REGISTRY if name != "reference"])
def backend_fixture(request: pytest.FixtureRequest) -> str:
    state = next(state for state in varlen_prep.backends() if state.name == request.param)
    if request.param.endswith("_hub") and "LOCAL_KERNELS" not in os.environ:
        pytest.skip("would download: set LOCAL_KERNELS to local kernel folders")
    if not state.usable:
        pytest.skip("; ".join(state.reasons))
    if request.param.endswith("_hub"):
        varlen_prep.load_hub_kernel(request.param)
    return request.param


@pytest.fixture(name="trains")
def trains_fixture(backend: str) -> bool:
    return REGISTRY[backend].backward is not None
