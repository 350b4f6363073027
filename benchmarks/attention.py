"""Attention, forward and backward: each backend in each layout, beside the bare kernels and what users have instead.

B rows, S padded length, H heads, D head size.  The limit is the bare kernel on rows that are packed already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attention_cases import Case, Problem, cases
from bare_kernels import BARE
from measure import Call, Row, compiled, rows, short, usable_kernels
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from varlen_prep import VarlenMetadata, pack, varlen_attention

COMPILED = ("native", "flash3")
FLEX = ("Flux B4 S4608, 4608/4400", "LLM 32k tokens, 8")
"""Cases with flex_attention, which compiles anew for each of them."""
LIMITS = {"sage": 0.15}
"""Largest error of a route of this library in bf16; sage quantises q and k to int8."""


def benchmark(device: str) -> Iterator[Row]:
    torch._dynamo.config.recompile_limit = 64  # backends, layouts, gradients and batches of 1, all from one function
    for case in cases(device):
        problem = Problem(case, device)
        forward = routes(problem)
        errors, failures = {}, {}
        for name, (call, leaves) in list(forward.items()):
            try:
                with torch.no_grad():
                    out = call(*leaves)
                if not name.endswith("(wrong)"):
                    errors[name] = problem.error(out)
                    ours = not name.startswith("diffusers")
                    assert not ours or errors[name] < LIMITS.get(name.split(":")[0], 0.03), (
                        f"{name}: off by {errors[name]}"
                    )
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                failures[name] = short(error)
                del forward[name]
        calls = {name: _without_gradients(call, leaves) for name, (call, leaves) in forward.items()}
        yield from rows("forward", case.name, calls, device, errors=errors, syncs=True, **clock(case, 8))
        for name, text in failures.items():
            yield Row(group="forward", case=case.name, route=name, note=text)
        if not case.name.startswith(("Flux B1", "Flux B8")):
            # Ours compiled would be compiled once more; the backward operator is the same.
            left_out = ("sage", "compiled")
            training = {n: route for n, route in forward.items() if not any(word in n for word in left_out)}
            steps = {name: _with_gradients(call, leaves, problem.dout) for name, (call, leaves) in training.items()}
            yield from rows("forward + backward", case.name, steps, device, **clock(case, 4))


def clock(case: Case, queued: int) -> dict[str, Any]:
    """How a case is measured: as in a model, whose host is ahead; small ones as a stream of calls, host included."""
    if case.name.startswith("small"):
        return {"queued": 50}
    return {"queued": 1 if case.name.startswith("video") else queued, "ahead": True, "runs": 7}


Route = tuple[Callable[..., Tensor], tuple[Tensor, Tensor, Tensor]]


def _without_gradients(call: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> Call:
    @torch.no_grad()
    def run() -> object:
        return call(*leaves)

    return run


def _with_gradients(call: Callable[..., Tensor], leaves: tuple[Tensor, ...], dout: Tensor) -> Call:
    inputs = [x.detach().clone().requires_grad_() for x in leaves]
    dout = dout.reshape(-1)

    def run() -> object:
        out = call(*inputs)
        return torch.autograd.grad(out, inputs, dout[: out.numel()].view(out.shape))

    return run


@functools.cache
def _compiled(device: str) -> Callable[..., Tensor]:
    """One function for all cases, so that shapes in motion compile once for each backend and layout."""

    def attend(q: Tensor, k: Tensor, v: Tensor, meta: VarlenMetadata, backend: str, causal: bool) -> Tensor:
        return varlen_attention(q, k, v, meta, backend=backend, causal=causal)

    return compiled(attend, device)


def routes(problem: Problem) -> dict[str, Route]:
    """Name -> (function of the leaves, leaves); the leaves are padded, or packed for the bare kernels."""
    q, k, v, causal = problem.q, problem.k, problem.v, problem.causal
    metas, found = problem.metas(), {}
    ideal, meta = _ideal(problem, metas)
    for name in usable_kernels():
        if name == "reference" or name.endswith("_hub"):
            continue
        if name in BARE and problem.device == "cuda":
            bare = BARE[name]
            found[f"{name}: bare kernel, ideal rows"] = (lambda *x, bare=bare: bare(*x, meta, causal)), ideal
        found[f"{name}: ideal rows"] = (
            (lambda *x, name=name: varlen_attention(*x, meta, backend=name, causal=causal)),
            ideal,
        )
        for layout, prepared in metas.items():

            def ours(q: Tensor, k: Tensor, v: Tensor, meta: VarlenMetadata = prepared, name: str = name) -> Tensor:
                return varlen_attention(q, k, v, meta, backend=name, causal=causal)

            found[f"{name}: {layout}"] = ours, (q, k, v)
            if name in COMPILED:

                def fast(q: Tensor, k: Tensor, v: Tensor, meta: VarlenMetadata = prepared, name: str = name) -> Tensor:
                    return _compiled(problem.device)(q, k, v, meta, name, causal)

                found[f"{name}: {layout}, compiled"] = fast, (q, k, v)
    return found | _instead(problem)


def _ideal(problem: Problem, metas: dict[str, VarlenMetadata]) -> tuple[tuple[Tensor, ...], VarlenMetadata]:
    """Rows without padding and offsets of exactly these."""
    q, k, v = problem.q, problem.k, problem.v
    prepared = metas.get("packed") or next(iter(metas.values()))
    total = int(prepared.cu_seqlens_k[-1])
    rows_ = q.flatten(0, 1), *(pack(x, prepared, "k")[:total].contiguous() for x in (k, v))
    lengths_k = prepared.cu_seqlens_k.diff().tolist()
    meta = VarlenMetadata.from_lengths(prepared.cu_seqlens_q.diff().tolist(), lengths_k, device=problem.device)
    return rows_, meta


def _instead(problem: Problem) -> dict[str, Route]:
    """What users have without this library."""
    q, k, v, mask, causal = problem.q, problem.k, problem.v, problem.mask, problem.causal
    leaves, found = (q, k, v), {}
    grouped = q.shape[2] != k.shape[2]
    dense = None
    if causal:
        if q.shape[1] <= 8192:
            index = torch.arange(q.shape[1], device=q.device)
            dense = (problem.ids[0][:, None] == problem.ids[0]) & (index <= index[:, None])
    elif mask is not None:
        dense = mask[:, None, None]

    def sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(*heads_first, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    if dense is not None:
        found["SDPA, mask"] = (lambda *x: sdpa(*x, attn_mask=dense)), leaves
    if mask is None and not causal:
        found["SDPA, no mask"] = sdpa, leaves
    elif not causal:
        found["SDPA, mask left out (wrong)"] = sdpa, leaves
    if not causal and mask is not None and problem.case.kind == "right" and q.shape[1] == k.shape[1]:
        found["torch nested jagged"] = _nested(problem)
    if problem.device == "cuda":
        found |= _diffusers(problem) | (_flex(problem) if problem.case.name.startswith(FLEX) else {})
    return found


def _flex(problem: Problem) -> dict[str, Route]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, mask, causal = problem.q, problem.k, problem.v, problem.mask, problem.causal
    if causal:
        ids = problem.ids

        def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (ids[0, i] == ids[0, j]) & (i >= j)
    else:

        def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return mask[b, j]

    blocks = create_block_mask(rule, q.shape[0], None, q.shape[1], k.shape[1], device=problem.device, _compile=True)
    kernel = torch.compile(flex_attention, fullgraph=True)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out = kernel(*heads_first, block_mask=blocks, enable_gqa=q.shape[2] != k.shape[2])
        return out.transpose(1, 2)

    return {"flex_attention, block mask": (flex, (q, k, v))}


def _nested(problem: Problem) -> Route:
    """Self-attention over jagged rows: queries without their padding too, which is less work than the others do."""
    lengths = list(problem.case.lengths)
    parts = [
        torch.nested.nested_tensor([row[:n] for row, n in zip(x, lengths, strict=True)], layout=torch.jagged)
        for x in (problem.q, problem.k, problem.v)
    ]
    values = tuple(part.values().detach() for part in parts)
    offsets = parts[0].offsets()

    def attend(*rows_: Tensor) -> Tensor:
        heads_first = (torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in rows_)
        return scaled_dot_product_attention(*heads_first).transpose(1, 2).values()

    return attend, values


def _diffusers(problem: Problem) -> dict[str, Route]:
    """diffusers' own varlen backends over the same kernels, as its models call them."""
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError:
        return {}
    if problem.causal:
        return {}
    found = {}
    needs = {"flash_varlen": "flash", "_flash_varlen_3": "flash3"}
    usable = usable_kernels()
    for name, kernel in needs.items():
        if kernel in usable:
            theirs = _AttentionBackendRegistry._backends[AttentionBackendName(name)]
            found[f"diffusers {name}"] = (
                (lambda q, k, v, theirs=theirs: theirs(q, k, v, attn_mask=problem.mask)),
                (problem.q, problem.k, problem.v),
            )
    return found
