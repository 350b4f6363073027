"""Fixtures of every test: devices, dtypes, the skip of GPU tests, and the Hypothesis profiles."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICES, PLACES
from hypothesis import HealthCheck, settings

from varlen_prep import _request

# Their assertions say as much as those of the tests.
pytest.register_assert_rewrite("diffusers_helpers", "sage_helpers", "transformers_helpers")
# The tensors are small: threads would only wait for each other.
torch.set_num_threads(1)
# Derandomised, so that a failure in CI is a failure everywhere; `--hypothesis-profile=search` looks further.
_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=50, suppress_health_check=_CHECKS)
settings.register_profile("search", deadline=None, max_examples=1000, suppress_health_check=_CHECKS)
settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


# Session scope, because Hypothesis runs one test function many times.
@pytest.fixture(params=DEVICES, scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[0]}-{str(place[1])[6:]}", scope="session")
def place(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """(device, dtype) pairs that the native backend takes."""
    return request.param


@pytest.fixture(autouse=True)
def no_kept_answers() -> None:
    """Tests change the table of backends; a choice that was kept knows the table as it was."""
    _request._kept.cache_clear()


@pytest.fixture
def fresh_compiler() -> None:
    """No compiled code of earlier tests, so that graphs can be counted."""
    torch._dynamo.reset()
