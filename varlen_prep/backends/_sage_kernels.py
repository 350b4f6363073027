"""Finds the Triton kernels of SageAttention 1.x and 2.x that `sage` calls, and checks that they are the known ones."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

_QUANTIZE = (
    "Input Output Scale cu_seqlens_input cu_seqlens_scale stride_ih stride_in stride_oh stride_on sm_scale H C BLK"
)
_ATTEND = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q q_scale k_scale cu_seqlens_q_scale cu_seqlens_k_scale output_dtype"
)


class Kernels(NamedTuple):
    """The pieces of the package that are used."""

    quantize: Any
    """Triton kernel (rows, int8 rows, scales, offsets, offsets of scales, strides, factor, ...)."""
    attend: Callable[..., Tensor]
    """(int8 q, int8 k, float16 v, offsets, maximum, scales, offsets of scales, output_dtype) -> out."""
    attend_causal: Callable[..., Tensor]
    """The same, aligned to the top-left corner."""
    counts_lanes: bool
    """`attend` counts the lanes past the last key, up to a multiple of 64, as keys of logit 0."""


def find_kernels(home: str, label: str) -> Kernels:
    """The kernels in the modules under `home`; `label` names the package or its version in errors.

    Raises:
        RuntimeError: they are not where 1.0.6, 2.0.1 and 2.2.0 have them.
    """
    attend_module = f"{home}.attn_qk_int8_block_varlen"
    quantize = _find(label, f"{home}.quant_per_block_varlen", "quant_per_block_int8_kernel", _QUANTIZE)
    attend = _find(label, attend_module, "forward", _ATTEND)
    attend_causal = _find(label, f"{home}.attn_qk_int8_per_block_causal_varlen", "forward", _ATTEND)
    # 2.2.0 was the version for weeks before the line that hides the lanes: read the source. A needless correction
    # costs time, a missing one is wrong.
    source = inspect.getsource(importlib.import_module(attend_module))
    return Kernels(quantize, attend, attend_causal, "tl.where(k_mask, 0, float('-inf'))" not in source)


def _find(label: str, module: str, name: str, parameters: str) -> Any:
    """A kernel (a Triton one keeps its function in `fn`) with exactly these parameters."""
    try:
        found = getattr(importlib.import_module(module), name)
        got = " ".join(inspect.signature(getattr(found, "fn", found)).parameters)
    except (ModuleNotFoundError, AttributeError) as error:
        found, got = None, str(error)
    if got != parameters:
        raise RuntimeError(
            f"sageattention {label}: expected {module}.{name}({', '.join(parameters.split())}), found {got}; install "
            "1.0.6, 2.0.1 or 2.2.0, or choose another backend."
        )
    return found
