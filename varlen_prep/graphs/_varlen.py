"""`GraphedVarlen`: a captured region, typically prepare -> attention, with static inputs of fixed capacity.

B rows, S padded length, T packed rows, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._copies import with_own_tensors
from ..metadata import VarlenMetadata
from ._capture import GraphPool, one_cuda_device


class StaticInputs:
    """Copies of tensors and metadata that keep their addresses and take on the values of others."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        for number, one in enumerate(inputs):
            if not isinstance(one, (Tensor, VarlenMetadata)):
                raise TypeError(
                    f"inputs[{number}]: expected a tensor or VarlenMetadata, got {type(one).__name__}; a host value is "
                    "baked into the capture, so let the region close over it."
                )
        # Tensors of inference mode could not be rewritten outside of it.
        with torch.inference_mode(False):
            self.values = tuple(with_own_tensors(one) for one in inputs)

    def write(self, inputs: tuple[Any, ...]) -> None:
        """Writes all inputs, or raises and writes none."""
        if len(inputs) != len(self.values):
            raise ValueError(f"inputs: expected {len(self.values)}, as captured, got {len(inputs)}.")
        pairs = list(zip(self.values, inputs, strict=True))
        for number, (mine, given) in enumerate(pairs):
            _check(f"inputs[{number}]", mine, given)
        with torch.no_grad():
            for mine, given in pairs:
                if isinstance(mine, VarlenMetadata) or mine.shape == given.shape:
                    mine.copy_(given)
                else:
                    mine[: given.shape[0]].copy_(given)
                    mine[given.shape[0] :].zero_()


class GraphedVarlen:
    """A region of a model, captured once for a fixed capacity and replayed for any lengths within it.

    Tensors and metadata that change are inputs: they are copied into static buffers before a replay, so what the region
    prepares from them follows. What it closes over (weights, sizes, metadata made outside) is baked in.

    Floating-point inputs may have fewer rows (dimension 0) than at capture: the rest becomes 0. Every other input has
    the captured shape, because no value means "no row" in all of them; metadata may have fewer sequences, and for
    masks, lengths and document ids pad with False, 0 and -1 yourself.

    No gradient flows through a replay; a region may compute gradients and return them. Calls may come from any thread
    and stream: those that share a pool run one after another.

    Args:
        region: called with the inputs; returns a tensor or a pytree of tensors. It may not read the device: give
            `prepare_varlen` a bound and the `from_*` constructors a bound or a capacity.
        inputs: CUDA tensors and `VarlenMetadata` of one device, at full capacity: most rows, most sequences, largest
            maxima. Their values are used for warming up.
        pool: the `pool` of another `GraphedVarlen`, to share its memory.

    Raises:
        TypeError: an input that is neither a tensor nor metadata.
        ValueError: inputs that are not on one CUDA device. While updating: other shapes, dtypes or layouts, more rows
            or sequences than the capacity, a longer maximum, or an input that requires gradients; then nothing of the
            update is written.
        RuntimeError: a region that cannot be captured.

    Example:
        >>> import torch
        >>> from varlen_prep import VarlenMetadata, varlen_attention
        >>> from varlen_prep.graphs import GraphedVarlen
        >>> if torch.cuda.is_available():
        ...     q = torch.ones(8, 2, 64, dtype=torch.bfloat16, device="cuda")
        ...     def meta(lengths):
        ...         return VarlenMetadata.from_lengths(lengths, max_seqlen_q=8, capacity=4, device="cuda")
        ...     graphed = GraphedVarlen(lambda q, meta: varlen_attention(q, q, q, meta), q, meta([8]))
        ...     out = graphed(q[:5], meta([2, 3]))  # (8, 2, 64), rows 5..7 are 0
    """

    def __init__(
        self, region: Callable[..., Any], *inputs: Tensor | VarlenMetadata, pool: GraphPool | None = None
    ) -> None:
        self._static = StaticInputs(inputs)
        tensors = [x for x in pytree.tree_leaves(self._static.values) if isinstance(x, Tensor)]
        device = one_cuda_device("inputs: expected all tensors", tensors)
        self.pool = GraphPool(device) if pool is None else pool
        """The memory of this graph, which others may share."""
        self._graph, output = self.pool.capture(lambda: region(*self._static.values))
        self.output = pytree.tree_map_only(Tensor, Tensor.detach, output)
        """What the region returned: static memory, which each replay writes, and others that share the pool may."""

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The static inputs, for those who write them in place instead of calling `update`."""
        return self._static.values

    def __call__(self, *inputs: Tensor | VarlenMetadata) -> Any:
        """Updates the inputs, replays, and returns a copy of the output."""
        with self.pool.lock, self.pool.turn():
            self._static.write(inputs)
            self._graph.replay()
            return pytree.tree_map_only(Tensor, torch.clone, self.output)

    def update(self, *inputs: Tensor | VarlenMetadata) -> None:
        """Copies values into the static inputs: all of them, or none and an error."""
        with self.pool.lock, self.pool.turn():
            self._static.write(inputs)

    def replay(self) -> Any:
        """Replays on the inputs as they are and returns `output`, which the next replay overwrites."""
        with self.pool.lock, self.pool.turn():
            self._graph.replay()
        return self.output


def _check(name: str, mine: Tensor | VarlenMetadata, given: Any) -> None:
    if isinstance(mine, Tensor) and isinstance(given, Tensor):
        _check_tensor(name, mine, given)
    elif isinstance(mine, VarlenMetadata) and isinstance(given, VarlenMetadata):
        try:
            mine.check_copy(given)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    else:
        raise TypeError(f"{name}: expected {type(mine).__name__}, as captured, got {type(given).__name__}.")


def _check_tensor(name: str, mine: Tensor, given: Tensor) -> None:
    if given.dtype != mine.dtype:
        raise ValueError(f"{name}: expected {mine.dtype}, as captured, got {given.dtype}; cast it.")
    rows = mine.is_floating_point() and mine.ndim == given.ndim > 0 and mine.shape[1:] == given.shape[1:]
    if given.shape != mine.shape and not (rows and given.shape[0] < mine.shape[0]):
        allowed = " or fewer rows" if mine.is_floating_point() else ""
        raise ValueError(
            f"{name}: expected shape {tuple(mine.shape)}{allowed}, as captured, got {tuple(given.shape)}; capture with "
            "the largest shape that will come."
        )
    if given.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: no gradient flows through a replay, and this input requires one; detach it, or call under "
            "torch.no_grad()."
        )
