"""Makes `VarlenMetadata` a pytree: tensors, maxima and the padded shape are leaves, flags are context."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.utils import _pytree as pytree

from .metadata import VarlenMetadata

_CONTEXT = ("exact_q", "exact_k", "same_lengths", "layout")
_LEAVES = tuple(f.name for f in dataclasses.fields(VarlenMetadata) if f.name not in _CONTEXT)


def _flatten(meta: VarlenMetadata) -> tuple[list[Any], tuple[Any, ...]]:
    present = tuple(name for name in _LEAVES if getattr(meta, name) is not None)
    return [getattr(meta, name) for name in present], (present, *(getattr(meta, name) for name in _CONTEXT))


def _flatten_with_keys(meta: VarlenMetadata) -> tuple[list[Any], tuple[Any, ...]]:
    leaves, context = _flatten(meta)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(context[0], leaves, strict=True)], context


def _unflatten(leaves: Any, context: tuple[Any, ...]) -> VarlenMetadata:
    present, *rest = context
    return VarlenMetadata(**dict(zip(present, leaves, strict=True)), **dict(zip(_CONTEXT, rest, strict=True)))


def _context_from_json(context: list[Any]) -> tuple[Any, ...]:
    present, *rest = context
    return (tuple(present), *rest)


pytree.register_pytree_node(
    VarlenMetadata,
    _flatten,
    _unflatten,
    serialized_type_name="varlen_prep.VarlenMetadata",
    to_dumpable_context=list,
    from_dumpable_context=_context_from_json,
    flatten_with_keys_fn=_flatten_with_keys,
)
