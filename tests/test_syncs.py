"""On a GPU, nothing waits for the device, as CUDA's sync debug mode sees it; what does wait is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import make_inputs, make_mask
from torch import Tensor

from varlen_prep import VarlenMetadata, prepare_varlen, varlen_attention

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def _sync_free_metadata() -> dict[str, Callable[[], VarlenMetadata]]:
    """Every path without an exact maximum, on CUDA tensors that exist already."""
    mask, mask_q = make_mask("right", 3, 16, device="cuda"), make_mask("left", 3, 16, seed=1, device="cuda")
    ids = torch.tensor([0] * 20 + [1] * 20 + [-1] * 8, device="cuda")
    lengths = torch.tensor([20, 28], device="cuda")
    offsets = torch.tensor([0, 20, 48], device="cuda")
    make = VarlenMetadata
    return {
        "no_mask": lambda: prepare_varlen(3, 16, 16, device="cuda"),
        "mask": lambda: prepare_varlen(3, 16, 16, mask, max_seqlen_k=16),
        "masks": lambda: prepare_varlen(3, 16, 16, mask, mask_q=mask_q, max_seqlen_k=16),
        "in_place": lambda: prepare_varlen(3, 16, 16, mask, layout="in_place"),
        "in_place_masks": lambda: prepare_varlen(3, 16, 16, mask, mask_q=mask_q, layout="in_place"),
        "lengths": lambda: make.from_lengths(lengths, max_seqlen_q=28),
        "lengths_capacity": lambda: make.from_lengths(lengths, max_seqlen_q=48, capacity=4),
        "host_lengths": lambda: make.from_lengths([20, 28], device="cuda"),
        "host_lengths_capacity": lambda: make.from_lengths([20, 28], capacity=4, device="cuda"),
        "offsets": lambda: make.from_cu_seqlens(offsets, max_seqlen_q=28),
        "documents": lambda: make.from_document_ids(ids, capacity=4),
        "documents_packed": lambda: make.from_document_ids(ids.view(3, 16), capacity=6),
        "documents_bound": lambda: make.from_document_ids(ids, capacity=4, max_seqlen=20),
        "positions": lambda: make.from_position_ids(ids, capacity=48),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [
    "no_mask", "mask", "masks", "in_place", "in_place_masks", "lengths", "lengths_capacity", "host_lengths",
    "host_lengths_capacity", "offsets", "documents", "documents_packed", "documents_bound", "positions",
])  # fmt: skip
def test_nothing_waits_for_the_device_from_metadata_to_gradients(name: str, dtype: torch.dtype) -> None:
    make = _sync_free_metadata()[name]
    meta = make()
    rows = (3, 16) if meta.seq_q == 16 else (48,)
    q, k, v, dout = (x.requires_grad_() for x in make_inputs(rows, rows, dim=32, dtype=dtype, device="cuda"))
    dout = dout.detach()

    def step() -> Tensor:
        meta = make()
        out, _ = varlen_attention(q, k, v, meta, return_lse=True)
        return torch.autograd.grad(out, (q, k, v), dout)[0]

    for _ in range(2):  # loads kernels, fills the caches of the allocators
        step()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        dq = step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            dq.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_exact_maximum_is_the_one_wait_of_a_masked_forward() -> None:
    mask = make_mask("holes", 3, 16, device="cuda")
    prepare_varlen(3, 16, 16, mask)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchroniz"):
            prepare_varlen(3, 16, 16, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
