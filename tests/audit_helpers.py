"""What the tests of the audit share: lines found in the source of a function, and input sets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from helpers import make_inputs, make_mask
from torch import Tensor

from varlen_prep import AuditReport, prepare_varlen, varlen_attention
from varlen_prep.auditing import Place

SHAPES = [(3, 5, 7), (4, 6, 9)]


def line_of(function: Callable[..., Any], text: str) -> tuple[str, int]:
    """File and number of the one line of a function that holds a text."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [i for i, line in enumerate(lines) if text in line]
    return inspect.getsourcefile(function), first + found


def lines(findings: Any) -> set[tuple[str, int]]:
    """Where findings of a report are."""
    places: list[Place] = [one.place for one in findings]
    return {(place.file, place.line) for place in places}


def operations(report: AuditReport) -> dict[tuple[str, int], str]:
    """What reads, by line."""
    return {(read.place.file, read.place.line): read.operation for read in report.reads}


def input_sets(
    device: str = "cpu", dtype: torch.dtype = torch.float32, kind: str = "holes"
) -> list[tuple[Tensor, ...]]:
    """q, k, v that require gradients, and a key mask, in two shapes of distinct sizes."""
    sets = []
    for seed, (batch, seq_q, seq_kv) in enumerate(SHAPES):
        q, k, v, _ = make_inputs((batch, seq_q), (batch, seq_kv), dim=16, dtype=dtype, device=device, seed=seed)
        mask = make_mask(kind, batch, seq_kv, seed=seed, device=device)
        sets.append((q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), mask))
    return sets


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A masked layer on this library: nothing is read, because the bound is given."""
    meta = prepare_varlen(q.shape[0], q.shape[1], k.shape[1], mask, max_seqlen_k=k.shape[1])
    return varlen_attention(q, k, v, meta)


def attend_exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same with the exact maximum: the one documented read."""
    meta = prepare_varlen(q.shape[0], q.shape[1], k.shape[1], mask)
    return varlen_attention(q, k, v, meta)
