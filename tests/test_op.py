"""The operators themselves: opcheck, gradients, names, selective checkpointing, FLOPs, refusals."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers import TOLERANCE, assert_near, make_inputs, random, refuses, run
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from varlen_prep import VarlenMetadata, varlen_attention
from varlen_prep.backends import _native_cpu

OPERATORS = ("native_varlen", "reference_varlen")
LENGTHS_Q, LENGTHS_K = [3, 0, 2, 1], [4, 2, 0, 3]


def forward_arguments(device: str, dtype: torch.dtype, *, grad: bool = True, causal: bool = False) -> list[Any]:
    meta = VarlenMetadata.from_lengths(LENGTHS_Q, LENGTHS_K, device=device)
    q, k, v, _ = make_inputs((6,), (9,), dim_v=16, dtype=dtype, device=device)
    rows = [x.requires_grad_(grad) for x in (q, k, v)]
    return [*rows, meta.cu_seqlens_q, meta.cu_seqlens_k, meta.max_seqlen_q, meta.max_seqlen_k, causal, -1, -1]


def operator(name: str) -> Any:
    return getattr(torch.ops.varlen_prep, name).default


OPCHECK_PLACES = [
    ("cpu", torch.float64),
    pytest.param(("cuda", torch.float32), marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("spot", OPCHECK_PLACES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_forward_and_backward_operators_pass_opcheck(name: str, spot: tuple[str, torch.dtype]) -> None:
    tolerance = {"atol": TOLERANCE[spot[1]], "rtol": TOLERANCE[spot[1]]}
    for options in ((), (0.5,), (0.5, 0.0, False)):
        torch.library.opcheck(operator(name), (*forward_arguments(*spot, causal=bool(options)), *options), **tolerance)
    arguments = forward_arguments(*spot, grad=False)
    out, lse = operator(name)(*arguments)
    backward = getattr(torch.ops.varlen_prep, f"{name}_backward").default
    given = (torch.ones_like(out), *arguments[:3], out, lse, *arguments[3:])
    torch.library.opcheck(backward, given, **tolerance)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_equal_finite_differences(name: str, causal: bool) -> None:
    q, k, v, *rest = forward_arguments("cpu", torch.float64, causal=causal)
    assert torch.autograd.gradcheck(lambda q, k, v: operator(name)(q, k, v, *rest)[0], (q, k, v))


def test_operators_keep_their_names_and_schema() -> None:
    """Saved selective-checkpoint lists and exported programs name them."""
    for name in OPERATORS:
        rest = (
            "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, "
            "int window_size_left, int window_size_right, float? softmax_scale=None, float softcap=0., "
            "bool deterministic=False) -> (Tensor, Tensor"
        )
        forward = f"varlen_prep::{name}(Tensor q, Tensor k, Tensor v, {rest})"
        saved = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
        backward = f"varlen_prep::{name}_backward({saved}, {rest}, Tensor)"
        assert (str(operator(name)._schema), str(operator(f"{name}_backward")._schema)) == (forward, backward)


def _step(context: Any, meta: VarlenMetadata, inputs: Any) -> tuple[Tensor, ...]:
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    options = {} if context is None else {"context_fn": context}

    def block(q: Tensor, k: Tensor, v: Tensor, meta: VarlenMetadata) -> Tensor:
        return varlen_attention(q * 2, k * 2, v * 2, meta)

    out = checkpoint(block, q, k, v, meta, use_reentrant=False, **options)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.dout)


def _save_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op == torch.ops.varlen_prep.native_varlen.default
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("how", [_save_attention, [operator("native_varlen")]], ids=["policy", "list"])
def test_selective_checkpointing_does_not_recompute_the_operator(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = VarlenMetadata.from_lengths(LENGTHS_Q, LENGTHS_K)
    inputs = make_inputs((6,), (9,))
    calls = []

    def counted(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return forward(*arguments)

    forward = _native_cpu.forward
    monkeypatch.setattr(_native_cpu, "forward", counted)
    plain = _step(None, meta, inputs)
    assert len(calls) == 2, "plain checkpointing computes it again"
    selective = _step(functools.partial(create_selective_checkpoint_contexts, how), meta, inputs)
    assert len(calls) == 2 + 1
    assert_near(selective, plain, torch.float64)


def test_flops_equal_the_count_by_hand(device: str) -> None:
    """2 per multiply-add; forward QK^T and PV, backward again QK^T, then dV, dP, dQ, dK. D is 8, D_v is 16."""
    pairs, heads = 3 * 4 + 1 * 3, 4
    arguments = forward_arguments(device, torch.float32)
    with FlopCounterMode(display=False) as counter:
        out, _ = operator("native_varlen")(*arguments)
    assert counter.get_total_flops() == 2 * pairs * heads * (8 + 16)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * heads * (3 * 8 + 2 * 16)


@pytest.mark.parametrize("name", OPERATORS)
def test_vmap_is_refused_with_its_text(name: str) -> None:
    q, k, v, *rest = forward_arguments("cpu", torch.float64, grad=False)
    batched = [x.expand(2, *x.shape) for x in (q, k, v)]
    with refuses(NotImplementedError, f"varlen_prep::{name}", "vmap", "one packed batch"):
        torch.func.vmap(lambda q, k, v: operator(name)(q, k, v, *rest)[0])(*batched)


@pytest.mark.parametrize("name", OPERATORS)
def test_lse_has_no_gradient(name: str) -> None:
    """Neither silently zero nor wrong: it is refused, or the LSE is detached. The output's gradient is untouched."""
    out, lse = operator(name)(*forward_arguments("cpu", torch.float64))
    if lse.requires_grad:
        with refuses(NotImplementedError, "log-sum-exp", "detach"):
            lse.sum().backward()
    meta = VarlenMetadata.from_lengths(LENGTHS_Q, LENGTHS_K)
    q, k, v, _ = make_inputs((6,), (9,))
    out, lse = varlen_attention(q.requires_grad_(), k, v, meta, return_lse=True)
    assert (out.requires_grad, lse.requires_grad) == (True, False)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("change", "error"), [
    ({3: torch.tensor([0, 3, 3, 5, 6])}, (TypeError, "cu_seqlens_q", "int32", "torch.int64")),
    ({4: torch.tensor([0, 4, 6, 6, 9])}, (TypeError, "cu_seqlens_k", "int32", "torch.int64")),
    ({3: torch.tensor([0, 3, 3, 5, 7], dtype=torch.int32)}, (ValueError, "cu_seqlens_q", "7", "6 rows")),
    ({4: torch.tensor([0, 4, 6, 6, 12], dtype=torch.int32)}, (ValueError, "cu_seqlens_k", "12", "9 rows")),
    ({4: torch.tensor([0, 4, 6, 9], dtype=torch.int32)}, (ValueError, "cu_seqlens", "5", "4")),
], ids=["int64-q", "int64-k", "past-q", "past-k", "sides-differ"])  # fmt: skip
def test_wrong_offsets_are_refused_by_the_operator_itself(
    name: str, change: dict[int, Tensor], error: tuple[Any, ...]
) -> None:
    arguments = forward_arguments("cpu", torch.float64, grad=False)
    for position, value in change.items():
        arguments[position] = value
    with refuses(*error):
        operator(name)(*arguments)


def test_results_are_fresh_contiguous_tensors() -> None:
    arguments = forward_arguments("cpu", torch.float64, grad=False)
    before = [x.clone() for x in arguments[:3]]
    for name in OPERATORS:
        out, lse = operator(name)(*arguments)
        assert out.is_contiguous()
        assert lse.is_contiguous()
        assert (out.shape, lse.shape) == ((6, 4, 16), (4, 6))
        assert all(torch.equal(a, b) for a, b in zip(arguments[:3], before, strict=True)), "inputs were written to"


@pytest.mark.parametrize("deterministic", [False, True])
def test_repeated_runs_are_bit_equal_on_the_cpu(deterministic: bool) -> None:
    meta = VarlenMetadata.from_lengths(LENGTHS_Q, LENGTHS_K)
    inputs = make_inputs((6,), (9,), dtype=torch.float32)
    first, second = (run(inputs, meta, deterministic=deterministic) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_second_derivative_is_refused_not_wrong() -> None:
    q = random(4, 2, 8).requires_grad_()
    out = varlen_attention(q, q, q, VarlenMetadata.from_lengths([4]))

    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="native_varlen has no second derivative"):
        torch.autograd.grad(grad.pow(2).sum(), q)
