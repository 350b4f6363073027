"""Fixtures of the tests of SageAttention: a stand-in of any version, and the backend on the CPU by its name."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_inputs, oracle
from standins import sage as standin
from torch import Tensor

from varlen_prep import VarlenMetadata, op, varlen_attention
from varlen_prep.backends import REGISTRY
from varlen_prep.backends import sage as backend

HALVES = (torch.float16, torch.bfloat16)
LENGTHS = [100, 33, 1, 257, 65, 0]
# Early builds of 2.2.0 lack the mask of the lanes, as 1.0.6 and 2.0.1 do.
VERSIONS = {"1.0.6": {}, "2.0.1": {}, "2.2.0": {}, "2.2.0-early": {"masks": False}}


@pytest.fixture(name="install")
def install_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a stand-in of some version where `import sageattention` finds it."""
    cached = backend._load, backend._reasons

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "sageattention"]:
            monkeypatch.delitem(sys.modules, name)
        for function in cached:
            function.cache_clear()
        importlib.invalidate_caches()

    def put(version: str, **options: Any) -> None:
        folder = tmp_path / f"site{len(list(tmp_path.iterdir()))}"
        standin.install(folder, version.split("-")[0], **options)
        monkeypatch.syspath_prepend(folder)
        forget()

    yield put
    forget()


@pytest.fixture(name="registered")
def registered_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend by its name, allowed on the CPU and without a look at this machine."""
    record = dataclasses.replace(backend.SAGE, dtypes={"cpu": HALVES}, missing=list)
    if not hasattr(torch.ops.varlen_prep, record.op):
        op.define(record)
    monkeypatch.setitem(REGISTRY, record.name, record)


@pytest.fixture(name="version", params=VERSIONS)
def version_fixture(request: pytest.FixtureRequest, install: Callable[..., None], registered: None) -> str:
    install(request.param, **VERSIONS[request.param])
    return request.param


@pytest.fixture(name="oldest")
def oldest_fixture(install: Callable[..., None], registered: None) -> None:
    """1.0.6: every trap at once."""
    install("1.0.6")


def packed(
    lengths_q: list[int], lengths_k: list[int] | None = None, *, dim: int = 64, dtype: torch.dtype = torch.float16,
    **options: Any,
) -> tuple[Any, VarlenMetadata]:  # fmt: skip
    lengths_k = lengths_q if lengths_k is None else lengths_k
    meta = VarlenMetadata.from_lengths(lengths_q, None if lengths_k is lengths_q else lengths_k)
    rows = (sum(lengths_q),), (sum(lengths_k),)
    return make_inputs(*rows, heads=4, heads_kv=2, dim=dim, dtype=dtype, **options), meta


def attend(inputs: Any, meta: VarlenMetadata, **options: Any) -> Tensor:
    return varlen_attention(*inputs[:3], meta, backend="sage", **options)


def assert_close_to_oracle(out: Tensor, inputs: Any, seen: Tensor, *, scale: float | None = None) -> None:
    error = (out.double() - oracle(inputs, seen, scale=scale).out).abs()
    assert error.max() < 0.06
    assert error.pow(2).mean().sqrt() < 0.005
