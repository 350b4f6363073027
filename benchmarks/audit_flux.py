"""Audits a Flux model on diffusers' own varlen route and on this library's: `python benchmarks/audit_flux.py`.

Both run the same kernel: diffusers' `flash_varlen` calls `flash_attn_varlen_func`, which is this library's here, so it
needs neither flash-attn nor a GPU. What is left is what diffusers does around it. Prints a Markdown table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models import attention_dispatch

from varlen_prep import AuditReport, audit, compat
from varlen_prep.integrations.diffusers import route

SHAPES = [(2, 5, 24), (3, 7, 40)]  # batch, prompt tokens, image tokens; no two sizes of the model agree with them


def model_of(layers: int = 1) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=4, num_layers=layers, num_single_layers=layers, attention_head_dim=8, num_attention_heads=3,
        joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(2, 2, 4),
    ).eval()  # fmt: skip


def inputs_of(batch: int, text: int, image: int) -> dict[str, Any]:
    """A joint mask with a hole in every row: text | pad | image."""
    lengths = torch.arange(batch)[:, None] % (text - 1) + 1
    valid = torch.arange(text) < lengths
    return {
        "hidden_states": torch.randn(batch, image, 4),
        "encoder_hidden_states": torch.randn(batch, text, 12),
        "pooled_projections": torch.randn(batch, 10),
        "timestep": torch.rand(batch),
        "img_ids": torch.randn(image, 3),
        "txt_ids": torch.zeros(text, 3),
        "joint_attention_kwargs": {"attention_mask": torch.cat([valid, valid.new_ones(batch, image)], 1)},
        "return_dict": False,
    }


@contextlib.contextmanager
def theirs() -> Iterator[None]:
    """diffusers' own `flash_varlen`, over this library's kernel."""
    with (
        mock.patch.object(attention_dispatch, "flash_attn_varlen_func", compat.flash_attn_varlen_func, create=True),
        mock.patch.object(attention_dispatch, "_check_attention_backend_requirements", return_value=None),
    ):
        yield


def audits() -> dict[str, AuditReport]:
    found = {}
    for title, scope in (("diffusers' own route", theirs()), ("varlen_prep", route("native"))):
        model = model_of()
        with scope, attention_dispatch.attention_backend("flash_varlen"), torch.no_grad():
            found[title] = audit(model, [inputs_of(*shape) for shape in SHAPES])
    return found


def main() -> None:
    print("| FluxTransformer2DModel, 2 blocks, `flash_varlen`, masked | graphs | breaks | lines that read |")
    print("|---|---|---|---|")
    for title, report in audits().items():
        print(f"| {title} | {report.graphs} | {len(report.breaks)} | {len(report.reads)} |")


if __name__ == "__main__":
    main()
