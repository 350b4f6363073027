"""CUDA graphs: captured rows of a causal model, captured varlen regions, and transformers' masks inside a capture.

Importing this loads torch alone and touches no GPU.
"""

from ._mask_decisions import eager_mask_decisions as eager_mask_decisions
from ._rows import RowGraphs as RowGraphs
from ._rows import RowStats as RowStats
from ._varlen import GraphedVarlen as GraphedVarlen

__all__ = ["GraphedVarlen", "RowGraphs", "RowStats", "eager_mask_decisions"]
