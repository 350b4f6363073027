"""What the tests share: cases, factories, the float64 oracle, tolerances, and recorders of graphs and operators.

B rows, S padded length, T packed rows, H heads, D head size.  The oracle takes the dense pattern that
`VarlenMetadata.materialize` gives (tested on its own against plain loops) and knows nothing of the backends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from varlen_prep import VarlenMetadata, varlen_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLACES = [
    *[("cpu", dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)],
    *[pytest.param(("cuda", dtype), marks=pytest.mark.gpu) for dtype in (torch.float32, torch.bfloat16, torch.float16)],
]
# Absolute and relative, for outputs, LSE and gradients of order 1 against the float64 oracle on the same inputs.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
MASK_KINDS = ("full", "right", "left", "middle", "holes", "some_empty", "all_empty")
ONE_RUN = tuple(kind for kind in MASK_KINDS if kind != "holes")
# `.item()` and what waits for the device to learn a size, at the level of aten operators.
_SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "repeat_interleave.Tensor", "unique", "equal", "bincount")


def cases(file: str) -> list[Any]:
    """The cases of `data/<file>.json` as pytest parameters."""
    loaded = json.loads((Path(__file__).parent / "data" / f"{file}.json").read_text())
    return [pytest.param(case, id=case["id"]) for case in loaded]


def case(file: str, name: str) -> dict[str, Any]:
    return next(one.values[0] for one in cases(file) if one.id == name)


@contextlib.contextmanager
def refuses(kind: type[Exception] | tuple[type[Exception], ...], *fragments: str) -> Iterator[None]:
    """The error that must come, and what its text must hold: the argument, what was expected, what came, what to do."""
    with pytest.raises(kind) as caught:
        yield
    missing = [fragment for fragment in fragments if fragment not in str(caught.value)]
    assert not missing, f"{missing} not in the text: {caught.value}"


def says_to_clone(call: Callable[[], Any]) -> Any:
    """What the call returns; None if it refuses tensors of inference mode and says what to do about them."""
    try:
        return call()
    except RuntimeError as error:
        text = str(error)
    assert "nference" in text
    assert "clone" in text
    return None


def random(*shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0) -> Tensor:
    """Normal numbers that do not depend on the device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def make_mask(kind: str, batch: int, seq: int, *, seed: int = 0, device: str = "cpu") -> Tensor:
    """A bool (batch, seq) mask; the kinds of `MASK_KINDS`."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, seq + 1, (batch, 1), generator=generator)
    index = torch.arange(seq)
    if kind == "full":
        mask = torch.ones(batch, seq, dtype=torch.bool)
    elif kind == "right":
        mask = index < length
    elif kind == "left":
        mask = index >= seq - length
    elif kind == "middle":
        mask = (index >= (seq - length + 1) // 2) & (index < (seq - length + 1) // 2 + length)
    elif kind == "holes":
        mask = torch.rand(batch, seq, generator=generator) < 0.6
        mask[:, -1] |= ~mask.any(1)
    elif kind == "some_empty":
        mask = (index < length) & (torch.arange(batch) % 2 == 1)[:, None]
    else:
        mask = torch.zeros(batch, seq, dtype=torch.bool)
    return mask.to(device)


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def make_inputs(
    rows_q: tuple[int, ...], rows_k: tuple[int, ...], *, heads: int = 4, heads_kv: int = 2, dim: int = 8,
    dim_v: int | None = None, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0,
) -> Inputs:  # fmt: skip
    """q, k, v and the output's gradient: rows (B, S) give padded tensors, rows (T,) packed ones."""
    dim_v = dim if dim_v is None else dim_v
    shapes = (*rows_q, heads, dim), (*rows_k, heads_kv, dim), (*rows_k, heads_kv, dim_v), (*rows_q, heads, dim_v)
    return Inputs(*(random(*shape, dtype=dtype, device=device, seed=seed + i) for i, shape in enumerate(shapes)))


def poison(inputs: Inputs, part_q: Tensor | None, part_k: Tensor | None, value: float = torch.nan) -> Inputs:
    """The same with `value` in every row that takes no part (bool per row; None: all rows take part)."""

    def fill(x: Tensor, part: Tensor | None) -> Tensor:
        return x if part is None else x.masked_fill(~part[..., None, None], value)

    return Inputs(*(fill(x, part) for x, part in zip(inputs, (part_q, part_k, part_k, part_q), strict=True)))


class Result(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def run(inputs: Inputs, meta: VarlenMetadata, **options: Any) -> Result:
    """`varlen_attention` forward and backward."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out, lse = varlen_attention(q, k, v, meta, return_lse=True, **options)
    return Result(out.detach(), lse, *torch.autograd.grad(out, (q, k, v), inputs.dout))


def oracle(inputs: Inputs, seen: Tensor, *, scale: float | None = None, softcap: float = 0.0) -> Result:
    """A plain dense softmax in float64: `seen` is bool (..., S_q, S_k). Rows without keys: output 0, LSE -inf."""
    leaves = [x.detach().double() for x in inputs[:3]]
    rows = (seen.any(-1), seen.any(-2), seen.any(-2))
    q, k, v = (x.masked_fill_(~row[..., None, None], 0).requires_grad_() for x, row in zip(leaves, rows, strict=True))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # One more key that nobody sees: the arithmetic below also holds without keys.
    groups = q.shape[-2] // k.shape[-2]
    wide_k, wide_v = (nn.functional.pad(x, (0, 0, 0, 0, 0, 1)).repeat_interleave(groups, -2) for x in (k, v))
    scores = torch.einsum("...qhd,...khd->...hqk", q, wide_k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~nn.functional.pad(seen, (0, 1))[..., None, :, :], -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("...hqk,...khd->...qhd", weights / total.clamp_min(1e-300), wide_v)
    lse = (top + total.log())[..., 0].detach()
    dout = inputs.dout.double().masked_fill(~rows[0][..., None, None], 0)
    return Result(out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout))


def assert_near(actual: Any, expected: Any, dtype: torch.dtype) -> None:
    """Within the tolerance of `dtype`; tuples name the field that differs."""
    pairs = list(zip(actual, expected, strict=True)) if isinstance(actual, tuple) else [(actual, expected)]
    for name, (a, b) in zip(getattr(actual, "_fields", range(len(pairs))), pairs, strict=True):
        torch.testing.assert_close(
            a.double(), b.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype],
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


def assert_bit_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, atol=0, rtol=0, equal_nan=True)


def assert_zero_rows(x: Tensor, part: Tensor) -> None:
    """Rows that take no part are exactly 0 (so not NaN), the others finite."""
    assert (x[~part] == 0).all()
    assert x[part].isfinite().all()


class Recorder:
    """A compiler backend that runs eagerly and keeps what it was given: graphs, forward operators, inputs."""

    def __init__(self) -> None:
        self.compiles = 0
        self.operators: list[str] = []
        self.inputs: list[Any] = []

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.compiles += 1
        self.inputs += example_inputs
        backend = aot_autograd(fw_compiler=self._forward, bw_compiler=self._run, inference_compiler=self._forward)
        return backend(graph, example_inputs)

    def _forward(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        self.operators += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return self._run(graph, example_inputs)

    @staticmethod
    def _run(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        return make_boxed_func(graph.forward)

    @property
    def syncs(self) -> list[str]:
        """Operators that read the device from the host."""
        return [name for name in self.operators if any(part in name for part in _SYNCS)]


def operators_run(function: Any) -> list[str]:
    """Names of this library's operators that ran, in order, compiled code included.

    It runs twice, because a profile of the first call would also show what tracing calls.
    """
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return [event.name.split("::")[1] for event in profile.events() if event.name.startswith("varlen_prep::")]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter that imports what this one would."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
