"""Copies of pytrees whose tensors have memory of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def with_own_tensors(tree: Any) -> Any:
    """The same pytree with each tensor cloned once, so that tensors that are shared stay shared; leaves of autograd."""
    copies: dict[int, Tensor] = {}

    def copy(x: Tensor) -> Tensor:
        if id(x) not in copies:
            copies[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        return copies[id(x)]

    return pytree.tree_map_only(Tensor, copy, tree)
