"""Packing: rows moved per second, beside the copy rate of the card, `nonzero` + index, and a compiled gather.

B rows, S padded length, H heads, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from measure import Call, Row, compiled, rows, with_kernels
from preparation import make_mask
from torch import Tensor

from varlen_prep import VarlenMetadata, pack, prepare_varlen, unpack

SHAPES = {"cuda": [(4, 4608, 24, 128), (64, 512, 16, 64), (1, 32768, 8, 128)], "cpu": [(2, 32, 2, 8)]}


def benchmark(device: str) -> Iterator[Row]:
    for batch, seq, heads, dim in SHAPES[device]:
        torch.compiler.reset()
        mask = make_mask("hole", batch, seq, device)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        k, v = (torch.randn(batch, seq, heads, dim, device=device, dtype=dtype) for _ in range(2))
        share = mask.sum().item() / mask.numel()
        case = f"K and V of B{batch} S{seq} H{heads} D{dim}, {share:.0%} valid"
        calls = _routes(mask, k, v)
        for row in with_kernels(rows("packing", case, calls, device, syncs=True), calls, device):
            yield _with_rate(row, k, share)


def _routes(mask: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    batch, seq = mask.shape
    meta = prepare_varlen(batch, seq, seq, mask, max_seqlen_k=seq)

    def both(k: Tensor, v: Tensor, meta: VarlenMetadata) -> tuple[Tensor, Tensor]:
        return pack(k, meta, "k"), pack(v, meta, "k")

    def back(x: Tensor, meta: VarlenMetadata) -> Tensor:
        return unpack(x, meta, "k")

    def by_nonzero() -> tuple[Tensor, Tensor]:
        index = mask.flatten().nonzero().flatten()
        return k.flatten(0, 1)[index], v.flatten(0, 1)[index]

    def gather(k: Tensor, v: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        return k.flatten(0, 1).index_select(0, order), v.flatten(0, 1).index_select(0, order)

    device, packed, targets = mask.device.type, pack(k, meta, "k"), (torch.empty_like(k), torch.empty_like(v))
    fast_both, fast_back, fast_gather = (compiled(function, device) for function in (both, back, gather))
    order = meta.order_k
    assert order is not None
    valid = int(mask.sum())
    for got, expected in zip(fast_gather(k, v, order), by_nonzero(), strict=True):
        assert torch.equal(got[:valid], expected)
    for function in (both, fast_both):
        for got, expected in zip(function(k, v, meta), by_nonzero(), strict=True):
            assert torch.equal(got[:valid], expected)
            assert not got[valid:].any()
    for function in (back, fast_back):
        assert torch.equal(function(packed, meta), k.masked_fill(~mask[..., None, None], 0))
    return {
        "copy of all rows": lambda: [target.copy_(x) for target, x in zip(targets, (k, v), strict=True)],
        "varlen_prep pack": lambda: both(k, v, meta),
        "varlen_prep pack, compiled": lambda: fast_both(k, v, meta),
        "nonzero + index": by_nonzero,
        "gather of all rows, compiled": lambda: fast_gather(k, v, order),
        "varlen_prep unpack": lambda: back(packed, meta),
        "varlen_prep unpack, compiled": lambda: fast_back(packed, meta),
    }


def _with_rate(row: Row, x: Tensor, share: float) -> Row:
    """Adds gigabytes per second: read and written once, of the rows that the route has to move."""
    moved = x.numel() * x.element_size() * (1 if "unpack" in row.route else 2)
    reads = moved if row.route.startswith("copy") else moved * share
    writes = moved * share if row.route.startswith("nonzero") else moved
    microseconds = row.gpu_us or row.median_us
    assert microseconds is not None
    return dataclasses.replace(row, note=f"{(reads + writes) / microseconds / 1000:.0f} GB/s")
