"""`RowGraphs`: one captured forward per padded length of a row, replayed for each request.

n tokens of a row, bucket = a padded length that was captured.  Right padding never reaches the real rows of a causal
model, so the smallest bucket that fits gives what the row alone gives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ._capture import Captured, GraphPool, one_cuda_device
from ._mask_decisions import eager_mask_decisions

Forward = Callable[[Tensor, Tensor], Tensor]

TOO_LONG = "longer than the largest bucket"
NOT_RISING = "positions do not rise by one"
PAST_WINDOW = "positions past the context window"
GRADIENTS = "gradients enabled"
AUTOCAST = "autocast enabled outside of forward"
IN_FLIGHT = "a row in flight on another thread"


@dataclasses.dataclass
class RowStats:
    """What a `RowGraphs` has done so far; counts change while it is used."""

    buckets: tuple[int, ...]
    """Padded lengths, ascending."""
    capture_seconds: float = 0.0
    """Time that warming up and capturing took, all buckets together."""
    replays: Counter[int] = dataclasses.field(default_factory=Counter)
    """Rows that were replayed, by bucket."""
    eager: Counter[str] = dataclasses.field(default_factory=Counter)
    """Rows that ran eagerly, by reason."""


class _Bucket(NamedTuple):
    input_ids: Tensor
    position_ids: Tensor
    captured: Captured


class _Positions(NamedTuple):
    start: int
    """Host int: the first position."""
    rise: bool
    """Host: each is the one before plus 1."""
    given: Tensor | None
    """The caller's tensor, (1, n)."""


def to_stderr(line: str) -> None:
    """Shows a line of progress on the standard error stream."""
    print(line, file=sys.stderr, flush=True)


class RowGraphs:
    """The forward of a causal model, captured once per padded length, for rows of any length.

    A call pads its row on the right to the smallest bucket that fits, goes on counting positions, replays, and returns
    a copy of the real rows. The graphs share one memory pool and the static inputs are rewritten whole, so nothing of
    an earlier row is left. Models of transformers are captured with `eager_mask_decisions`, so that SDPA keeps its
    flash kernel.

    A call runs eagerly, on the row as it is, and counts the reason in `stats.eager`: the row is longer than the largest
    bucket, its positions do not rise by one, they pass `context_window`, gradients are enabled, autocast is enabled
    around the call (the capture cannot know; enter it in `forward`), or another thread's row is in flight.

    Weights may change in place between calls, not their storage. What `forward` decides on the host is decided once.

    Args:
        forward: `(input_ids, position_ids) -> tensor`, int64 (1, n) each to (1, n, ...); it may not read the device.
            For a model of transformers: `lambda ids, positions: model(input_ids=ids, position_ids=positions,
            use_cache=False).logits`.
        model: what `forward` runs; its parameters and buffers are on one CUDA device.
        buckets: host ints, the padded lengths. Each holds its output and shares everything else.
        context_window: host int (transformers: `model.config.max_position_embeddings`); rows with a position at or past
            it run eagerly, and padding never gets there. None: no bound.
        pad_id: token id of padding.
        progress: called with one line of text after each capture; None: silent.

    Raises:
        ValueError: a model on CPU, on several devices or without tensors; buckets that are empty, not positive or
            larger than the context window.
        TypeError: `forward` returns something else than a tensor.

    Example:
        >>> import torch
        >>> from varlen_prep.graphs import RowGraphs
        >>> if torch.cuda.is_available():
        ...     model = torch.nn.Embedding(100, 8, device="cuda")
        ...     rows = RowGraphs(lambda ids, positions: model(ids), model, [16, 64], progress=None)
        ...     with torch.no_grad():
        ...         assert rows(torch.arange(10)[None]).shape == (1, 10, 8)
        ...     assert rows.stats.replays == {16: 1}
    """

    def __init__(
        self,
        forward: Forward,
        model: nn.Module,
        buckets: Iterable[int],
        *,
        context_window: int | None = None,
        pad_id: int = 0,
        progress: Callable[[str], object] | None = to_stderr,
    ) -> None:
        sizes = _check_buckets(buckets, context_window)
        tensors = (*model.parameters(), *model.buffers())
        self._device = one_cuda_device("model: expected all parameters and buffers", tensors)
        self._forward = forward
        self._context_window = context_window
        self._pad_id = pad_id
        self._count = threading.Lock()
        self.stats = RowStats(tuple(sorted(sizes)))
        self._pool = GraphPool(self._device)
        self._buckets: dict[int, _Bucket] = {}
        masks = eager_mask_decisions() if _of_transformers(model) else contextlib.nullcontext()
        # Tensors of inference mode could not be rewritten outside of it.
        with masks, torch.inference_mode(False), torch.no_grad():
            for number, size in enumerate(_capture_order(sizes), 1):
                begin = time.perf_counter()
                self._buckets[size] = self._capture(size)
                seconds = time.perf_counter() - begin
                self.stats.capture_seconds += seconds
                if progress is not None:
                    progress(f"row graphs: captured {number} of {len(sizes)}, {size} tokens, {seconds:.1f} s")

    def __call__(self, input_ids: Tensor, position_ids: Tensor | int = 0) -> Tensor:
        """The forward of one row.

        Args:
            input_ids: int (1, n), on any device, n >= 1.
            position_ids: the first position, a host int, the others rise by one: nothing is read. Or int (1, n), which
                is looked at on the host: a GPU tensor costs one read.

        Returns:
            (1, n, ...) on the model's device: memory of its own, or what `forward` returned where it ran eagerly.
        """
        row = _check_row(input_ids, position_ids)
        size, reason = self._choose(input_ids.shape[1], row)
        if reason is None and not self._pool.lock.acquire(blocking=False):
            reason = IN_FLIGHT
        if reason is not None:
            with self._count:
                self.stats.eager[reason] += 1
            return self._eagerly(input_ids, row)
        try:
            self.stats.replays[size] += 1
            return self._replay(self._buckets[size], input_ids, row.start)
        finally:
            self._pool.lock.release()

    def _capture(self, size: int) -> _Bucket:
        input_ids = torch.full((1, size), self._pad_id, dtype=torch.int64, device=self._device)
        position_ids = torch.arange(size, device=self._device)[None]
        captured = self._pool.capture(lambda: self._forward(input_ids, position_ids))
        if not isinstance(captured.output, Tensor) or captured.output.shape[:2] != (1, size):
            output = captured.output
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise TypeError(
                f"forward: expected a tensor (1, {size}, ...) for {size} tokens, got {got}; return the logits or the "
                "hidden states, not the model's output object."
            )
        return _Bucket(input_ids, position_ids, captured)

    def _choose(self, length: int, row: _Positions) -> tuple[int, str | None]:
        """The bucket of a row, and why it has to run eagerly."""
        size = next((size for size in self.stats.buckets if size >= length), 0)
        window = self._context_window
        reasons = {
            TOO_LONG: size == 0,
            NOT_RISING: not row.rise,
            PAST_WINDOW: window is not None and row.start + length > window,
            GRADIENTS: torch.is_grad_enabled(),
            AUTOCAST: torch.is_autocast_enabled("cuda"),
        }
        return size, next((reason for reason, holds in reasons.items() if holds), None)

    def _eagerly(self, input_ids: Tensor, row: _Positions) -> Tensor:
        if row.given is None:
            positions = torch.arange(row.start, row.start + input_ids.shape[1], device=self._device)[None]
        else:
            positions = row.given.to(self._device, torch.int64)
        return self._forward(input_ids.to(self._device, torch.int64), positions)

    def _replay(self, bucket: _Bucket, input_ids: Tensor, start: int) -> Tensor:
        length, size = input_ids.shape[1], bucket.input_ids.shape[1]
        with self._pool.turn():
            bucket.input_ids[:, :length].copy_(input_ids)
            bucket.input_ids[:, length:].fill_(self._pad_id)
            torch.arange(start, start + size, out=bucket.position_ids[0])
            if self._context_window is not None and start + size > self._context_window:
                bucket.position_ids.clamp_(max=self._context_window - 1)
            bucket.captured.graph.replay()
            output: Tensor = bucket.captured.output[:, :length].clone()
        return output


def _capture_order(sizes: set[int]) -> Iterator[int]:
    """Largest first: what it leaves free holds all others."""
    return iter(sorted(sizes, reverse=True))


def _of_transformers(model: nn.Module) -> bool:
    """Whether a class of transformers is in the model, also below a class of the user."""
    bases = (base for module in model.modules() for base in type(module).__mro__)
    return any(base.__module__.partition(".")[0] == "transformers" for base in bases)


def _check_buckets(buckets: Iterable[int], window: int | None) -> set[int]:
    sizes = list(buckets)
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"buckets: expected one or more ints of at least 1, got {sizes}.")
    if window is not None and max(sizes) > window:
        raise ValueError(
            f"buckets: expected at most the context window of {window} tokens, got {max(sizes)}; no row of that length "
            "could be replayed."
        )
    return set(sizes)


def _check_row(input_ids: Tensor, position_ids: Tensor | int) -> _Positions:
    integers = (torch.int64, torch.int32)
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in integers:
        got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise TypeError(f"input_ids: expected an int64 or int32 tensor, got {got}.")
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids: expected one row (1, n) of at least one token, got {tuple(input_ids.shape)}; call once for "
            "each row, without its padding."
        )
    if not isinstance(position_ids, Tensor):
        if isinstance(position_ids, bool) or not isinstance(position_ids, int):
            raise TypeError(
                f"position_ids: expected the first position (int) or a tensor, got {type(position_ids).__name__}."
            )
        if position_ids < 0:
            raise ValueError(f"position_ids: expected a first position of at least 0, got {position_ids}.")
        return _Positions(position_ids, True, None)
    if position_ids.dtype not in integers or position_ids.shape != input_ids.shape:
        raise ValueError(
            f"position_ids: expected int64 or int32 {tuple(input_ids.shape)} like input_ids, got {position_ids.dtype} "
            f"{tuple(position_ids.shape)}."
        )
    # Both answers in one read.
    jumps = (position_ids.diff() != 1).sum(1)
    start, jumped = torch.stack([position_ids[:, 0], jumps]).flatten().tolist()
    return _Positions(start, jumped == 0, position_ids)
