"""The diffusion models of the benchmarks, and the routes that their attention takes.

B rows, text slots and image tokens; weights are random, widths as published.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel
from diffusers.models import attention_dispatch
from measure import best_kernel, usable_kernels
from torch import Tensor

from varlen_prep import compat
from varlen_prep.integrations.diffusers import route

TEXT = {"cuda": (512, 300, 150, 40), "cpu": (6, 2)}
"""Valid text tokens of each row; the first has no padding."""
GRID = {"cuda": (64, 64), "cpu": (2, 3)}
"""Image tokens of a row."""
TINY: dict[str, Any] = {"in_channels": 8, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 12}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model and its inputs."""

    name: str
    build: Callable[[str, int], torch.nn.Module]
    """(device, blocks) -> model in bf16."""
    inputs: Callable[[torch.nn.Module, tuple[int, ...], int, tuple[int, int], str], dict[str, Any]]
    """(model, valid text tokens, text slots, image rows and columns, device) -> keyword arguments."""
    attentions: Callable[[int], int]
    """Attention calls of a model with so many blocks."""


def flux(device: str, blocks: int) -> torch.nn.Module:
    return build_flux(device, double=blocks, single=3 * blocks)


def build_flux(device: str, double: int, single: int) -> torch.nn.Module:
    tiny = {**TINY, "pooled_projection_dim": 10, "axes_dims_rope": (4, 6, 6)} if device == "cpu" else {}
    return _build(FluxTransformer2DModel, device, num_layers=double, num_single_layers=single, **tiny)


def flux_inputs(model: Any, valid: tuple[int, ...], slots: int, grid: tuple[int, int], device: str) -> dict[str, Any]:
    batch, image, config = len(valid), grid[0] * grid[1], model.config
    place: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    ids = torch.zeros(*grid, 3, **place)
    ids[..., 1] += torch.arange(grid[0], **place)[:, None]
    ids[..., 2] += torch.arange(grid[1], **place)
    text = text_mask(valid, slots, device)
    return {
        "hidden_states": torch.randn(batch, image, config.in_channels, **place),
        "encoder_hidden_states": torch.randn(batch, slots, config.joint_attention_dim, **place),
        "pooled_projections": torch.randn(batch, config.pooled_projection_dim, **place),
        "timestep": torch.rand(batch, **place),
        "img_ids": ids.flatten(0, 1),
        "txt_ids": torch.zeros(slots, 3, **place),
        "joint_attention_kwargs": {"attention_mask": joint_mask(text, image)[:, None, None]},
        "return_dict": False,
    }


def qwen(device: str, blocks: int) -> torch.nn.Module:
    tiny = {**TINY, "out_channels": 2, "axes_dims_rope": (4, 6, 6)} if device == "cpu" else {}
    return _build(QwenImageTransformer2DModel, device, num_layers=2 * blocks, **tiny)


def qwen_inputs(model: Any, valid: tuple[int, ...], slots: int, grid: tuple[int, int], device: str) -> dict[str, Any]:
    batch, config = len(valid), model.config
    place: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    return {
        "hidden_states": torch.randn(batch, grid[0] * grid[1], config.in_channels, **place),
        "encoder_hidden_states": torch.randn(batch, slots, config.joint_attention_dim, **place),
        "encoder_hidden_states_mask": text_mask(valid, slots, device),
        "timestep": torch.rand(batch, **place),
        "img_shapes": [[(1, *grid)]] * batch,
        "return_dict": False,
    }


FLUX = Family("Flux", flux, flux_inputs, lambda blocks: 4 * blocks)
QWEN = Family("Qwen-Image", qwen, qwen_inputs, lambda blocks: 2 * blocks)


def _build(cls: Any, device: str, **config: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return cls(**config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def text_mask(valid: tuple[int, ...], slots: int, device: str) -> Tensor:
    return torch.arange(slots, device=device) < torch.tensor(valid, device=device)[:, None]


def joint_mask(text: Tensor, image: int) -> Tensor:
    """bool (B, text slots + image): a hole after the text of each row."""
    return torch.cat([text, text.new_ones(text.shape[0], image)], dim=1)


@torch.library.custom_op("varlen_prep_benchmarks::nothing", mutates_args=())
def nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Instead of attention: takes no time, but q, k and v must be there."""
    return torch.empty_like(q)


@nothing.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


Scope = Callable[[], contextlib.AbstractContextManager[None]]


def routes(model: torch.nn.Module, device: str) -> dict[str, tuple[Scope, bool]]:
    """Name -> (the scope in which the model is run, whether it compiles to one graph); ours with the best kernel."""
    best = best_kernel(device)
    found: dict[str, tuple[Scope, bool]] = {
        "diffusers SDPA, mask": (lambda: _chosen(model, "native"), True),
        f"varlen_prep, {best}": (lambda: _ours(model, best), True),
        "without attention": (lambda: _without(model), True),
    }
    # Last: once its graph breaks are compiled, the routes of diffusers above run in pieces too.
    if device == "cpu" or "flash3" in usable_kernels():
        found["diffusers _flash_3_varlen_hub"] = (lambda: _hub(model, device), False)
    return found


@contextlib.contextmanager
def _chosen(model: torch.nn.Module, name: str) -> Iterator[None]:
    """The model's attention runs on this backend of diffusers.

    Not by the active backend of the process, which a model compiled by torch 2.11 does not ask for again.
    """
    for module in model.modules():
        if hasattr(processor := getattr(module, "processor", None), "_attention_backend"):
            processor._attention_backend = attention_dispatch.AttentionBackendName(name)
    yield


@contextlib.contextmanager
def _ours(model: torch.nn.Module, backend: str) -> Iterator[None]:
    with route({"flash_varlen": backend}), _chosen(model, "flash_varlen"):
        yield


@contextlib.contextmanager
def _hub(model: torch.nn.Module, device: str) -> Iterator[None]:
    """diffusers' route for the FA3 hub kernel, over the FA3 that is installed; on a CPU over this library's kernel."""
    if device == "cuda":
        from flash_attn_interface import flash_attn_varlen_func as kernel
    else:
        kernel = compat.flash_attn_varlen_func
    name = attention_dispatch.AttentionBackendName._FLASH_3_VARLEN_HUB
    with (
        mock.patch.object(attention_dispatch._HUB_KERNELS_REGISTRY[name], "kernel_fn", kernel),
        _chosen(model, name.value),
    ):
        yield


@contextlib.contextmanager
def _without(model: torch.nn.Module) -> Iterator[None]:
    def instead(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
        return nothing(query, key, value)

    name = attention_dispatch.AttentionBackendName._FLASH_VARLEN_3
    table = attention_dispatch._AttentionBackendRegistry._backends
    with mock.patch.dict(table, {name: instead}), _chosen(model, name.value):
        yield
