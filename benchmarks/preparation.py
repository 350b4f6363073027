"""Preparation: metadata from masks and document ids, beside what diffusers, transformers and flash-attn do for it.

B rows, S padded length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from measure import Call, Row, compiled, rows, with_kernels
from torch import Tensor
from torch.nn.functional import pad

from varlen_prep import VarlenMetadata, prepare_varlen

SHAPES = {
    "cuda": [(1, 128), (4, 4608), (64, 4096), (256, 512), (8, 32768)],
    "cpu": [(2, 64)],
}
DOCUMENTS = {"cuda": [1, 64, 512], "cpu": [4]}
CAPACITY = 512
QUEUED = 20
"""Preparations in a row in one measurement: what one costs the host, or the GPU where that takes longer."""


def benchmark(device: str) -> Iterator[Row]:
    torch._dynamo.config.recompile_limit = 64
    measured = list(_all(device))  # all is timed before anything is profiled
    for found, calls in measured:
        yield from with_kernels(found, calls, device)


Measured = tuple[list[Row], dict[str, Call]]


def _all(device: str) -> Iterator[Measured]:
    prepare = compiled(
        lambda mask: prepare_varlen(*mask.shape, mask.shape[1], mask, max_seqlen_k=mask.shape[1]), device
    )
    for batch, seq in SHAPES[device]:
        for kind in ("right", "left", "hole"):
            yield _masks(device, batch, seq, kind, prepare)
    from_ids = compiled(lambda ids: VarlenMetadata.from_document_ids(ids, capacity=CAPACITY), device)
    for documents in DOCUMENTS[device]:
        yield _documents(device, documents, from_ids)


def make_mask(kind: str, batch: int, seq: int, device: str) -> Tensor:
    """Lengths spread from 1/4 of the row to all of it."""
    length = torch.linspace(seq // 4, seq, batch).long().to(device)[:, None]
    index = torch.arange(seq, device=device)
    if kind == "left":
        return index >= seq - length
    mask = index < length
    return mask & (index % 7 != 3) if kind == "hole" else mask


def _masks(device: str, batch: int, seq: int, kind: str, prepare: Callable[[Tensor], VarlenMetadata]) -> Measured:
    mask = make_mask(kind, batch, seq, device)
    want = pad(mask.sum(-1).cumsum(0), (1, 0)).int()

    def packed(mask: Tensor) -> VarlenMetadata:
        return prepare_varlen(batch, seq, seq, mask, max_seqlen_k=seq)

    def in_place(mask: Tensor) -> VarlenMetadata:
        return prepare_varlen(batch, seq, seq, mask, layout="in_place")

    calls: dict[str, Call] = {
        "varlen_prep, packed": lambda: packed(mask),
        "varlen_prep, packed, compiled": lambda: prepare(mask),
        "varlen_prep, packed, exact maximum": lambda: prepare_varlen(batch, seq, seq, mask),
    }
    if kind != "hole":
        calls["varlen_prep, in_place"] = lambda: in_place(mask)
    calls |= _others(mask, device)
    for name, call in calls.items():
        if "in_place" not in name:
            assert torch.equal(_offsets(call()), want), name
    return rows("preparation", f"B{batch} S{seq}, {kind} mask", calls, device, syncs=True, queued=QUEUED), calls


def _offsets(result: object) -> Tensor:
    """The key offsets that a route made."""
    return result.cu_seqlens_k if isinstance(result, VarlenMetadata) else result  # type: ignore[return-value]


def _others(mask: Tensor, device: str) -> dict[str, Call]:
    """What users have without this library, on the mask; compiled as well, with the graph breaks that they have."""
    return {name: functools.partial(function, mask) for name, function in _their_functions(device).items()}


@functools.cache
def _their_functions(device: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Name -> function of a mask that returns key offsets; one of each, so that shapes in motion compile once."""
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    try:
        from diffusers.models import attention_dispatch

        theirs = attention_dispatch._prepare_for_flash_attn_or_sage_varlen

        def alone(mask: Tensor) -> Tensor:
            batch, seq = mask.shape
            return theirs(batch, seq, seq, attn_mask=mask, device=mask.device)[1][1]

        def with_indices(mask: Tensor) -> Tensor:
            """As its models do in each layer: offsets, and where the valid rows are; ours has both too."""
            mask.flatten().nonzero(as_tuple=False).flatten()
            return alone(mask)

        found |= {"diffusers": alone, "diffusers, with the rows to pack": with_indices}
    except (ImportError, AttributeError):
        pass
    try:
        from transformers.modeling_flash_attention_utils import _get_unpad_data

        found["transformers _get_unpad_data"] = lambda mask: _get_unpad_data(mask)[1]
    except ImportError:
        pass
    if device == "cuda":
        try:
            from flash_attn.bert_padding import unpad_input

            def unpad(mask: Tensor) -> Tensor:
                return unpad_input(torch.empty(*mask.shape, 1, device=device, dtype=torch.bfloat16), mask)[2]

            found["flash_attn.bert_padding"] = unpad
        except ImportError:
            pass
    return found | {f"{name}, compiled": compiled(call, device, fullgraph=False) for name, call in found.items()}


def _documents(device: str, documents: int, from_ids: Callable[[Tensor], VarlenMetadata]) -> Measured:
    total = 32768 if device == "cuda" else 128
    bounds = torch.linspace(0, total, documents + 1).int().to(device)
    index = torch.arange(total, device=device)
    ids = torch.bucketize(index, bounds, right=True)
    positions = index - bounds[ids - 1]

    calls: dict[str, Call] = {
        "varlen_prep, document ids": lambda: VarlenMetadata.from_document_ids(ids, capacity=CAPACITY),
        "varlen_prep, document ids, compiled": lambda: from_ids(ids),
        "varlen_prep, position ids": lambda: VarlenMetadata.from_position_ids(positions, capacity=CAPACITY),
    }
    try:
        from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

        calls["transformers prepare_fa_kwargs_from_position_ids"] = lambda: prepare_fa_kwargs_from_position_ids(
            positions[None]
        )[0][1]
    except ImportError:
        pass
    for name, call in calls.items():
        assert torch.equal(_offsets(call())[: documents + 1], bounds), name
    case = f"{total} tokens, {documents} documents"
    return rows("preparation", case, calls, device, syncs=True, queued=QUEUED), calls
