"""Inputs, the oracle and small models of the tests of diffusers' backends, and the check that nothing stays behind.

The oracle is diffusers' own "native" backend (SDPA with a mask), run by the same dispatch function or the same model.
"""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from diffusers.models.modeling_utils import ModelMixin

from varlen_prep.integrations.diffusers import BACKENDS, _memo, _routes

NAMES = list(BACKENDS)
MASKS = {
    "right": [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0]],
    "left": [[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1, 1]],
    "hole": [[1, 1, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0, 1]],
    "empty row": [[0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]],
}


def mask_of(kind: str) -> torch.Tensor:
    return torch.tensor(MASKS[kind], dtype=torch.bool)


def qkv(seq_q=5, seq_kv=7, heads=6, heads_kv=6, batch=3, dtype=torch.float32, requires_grad=False):
    generator = torch.Generator().manual_seed(seq_q)
    shapes = ((batch, seq_q, heads, 8), (batch, seq_kv, heads_kv, 8), (batch, seq_kv, heads_kv, 8))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(requires_grad) for s in shapes]


def sdpa(q, k, v, mask=None, **kwargs):
    """diffusers' dense backend; rows without keys, where SDPA may write anything, are 0."""
    mask = None if mask is None else mask.expand(q.shape[0], k.shape[1])
    out = dispatch_attention_fn(q, k, v, attn_mask=mask, backend="native", **kwargs)
    return out if mask is None else out.masked_fill(~mask.any(1)[:, None, None, None], 0)


def routed(q, k, v, name="flash_varlen", **kwargs):
    return dispatch_attention_fn(q, k, v, backend=name, **kwargs)


def tiny_flux(layers=1) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=4, num_layers=layers, num_single_layers=layers, attention_head_dim=8, num_attention_heads=3,
        joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(2, 2, 4),
    ).eval()  # fmt: skip


def flux_inputs(batch=2, text=5, height=4, width=6, masked=True):
    """A joint mask with a hole in every row: text | pad | image."""
    generator = torch.Generator().manual_seed(batch * 100 + text)
    image = height * width
    inputs = {
        "hidden_states": torch.randn(batch, image, 4, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 12, generator=generator),
        "pooled_projections": torch.randn(batch, 10, generator=generator),
        "timestep": torch.rand(batch, generator=generator),
        "img_ids": torch.randn(image, 3, generator=generator),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }
    if masked:
        mask = torch.ones(batch, text + image, dtype=torch.bool)
        for row in range(batch):
            mask[row, 1 + row % (text - 1) : text] = False
        inputs["joint_attention_kwargs"] = {"attention_mask": mask}
    return inputs


def flux_sdpa(model, inputs):
    inputs = dict(inputs)
    if kwargs := inputs.get("joint_attention_kwargs"):
        inputs["joint_attention_kwargs"] = {"attention_mask": kwargs["attention_mask"][:, None, None, :]}
    with attention_backend("native"):
        return model(**inputs)[0]


class Layers(ModelMixin):
    """Attends twice with the same mask; `between` runs in the middle of the forward."""

    def __init__(self, between=lambda mask: None):
        super().__init__()
        self.between = between

    def forward(self, q, k, v, mask=None):
        first = routed(q, k, v, attn_mask=mask)
        self.between(mask)
        return first, routed(q, k, v, attn_mask=mask)


@pytest.fixture(autouse=True)
def untouched():
    """No test may leave anything behind in diffusers, nor start from something that another one left."""
    before = state()
    torch._dynamo.reset()
    yield
    assert state() == before
    assert (_routes._scopes, _routes._installed) == ([], None)
    assert (_memo._scope.eager, _memo._scope.traced) == (None, None)


def state():
    return (
        dict(Registry._backends), list(Registry._backends), dict(Registry._constraints),
        {name: set(names) for name, names in Registry._supported_arg_names.items()},
        set(Registry._supports_context_parallel), Registry._active_backend,
        attention_dispatch._check_attention_backend_requirements,
        attention_dispatch._maybe_download_kernel_for_backend, dict(vars(ModelMixin)),
    )  # fmt: skip
