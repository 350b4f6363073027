"""Captures functions as CUDA graphs that share one memory pool."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

WARM_UPS = 2  # eager runs before a capture: kernels are loaded, compiled and tuned, workspaces are allocated

capturing = threading.RLock()
"""Held while something is captured: torch allows one capture at a time in a process."""


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    output: Any
    """What the captured function returned: memory of the pool, which each replay writes."""


class GraphPool:
    """Graphs that share memory, so that only one of them may run at a time.

    `lock` keeps host threads apart; `turn` keeps streams apart, where work goes on after the call that launched it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        self.lock = threading.Lock()
        # One stream for all captures: a pool hands memory on only within a stream.
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()

    def capture(self, function: Callable[[], Any]) -> Captured:
        """Warms `function` up on the side stream, then captures it there.

        Raises:
            RuntimeError: autocast is on around the capture with its cache, whose tensors do not outlive it.
        """
        if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
            raise RuntimeError(
                "autocast: the capture would use weights that autocast has cast and frees on exit; enter autocast "
                "inside the captured function, or with cache_enabled=False."
            )
        with capturing, torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on allocating and reading while this one captures.
            with torch.cuda.graph(graph, pool=self.handle, stream=self._stream, capture_error_mode="thread_local"):
                output = function()
        return Captured(graph, output)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The current stream waits until the last user of the pool is done with it."""
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)


def one_cuda_device(expected: str, tensors: Iterable[Tensor]) -> torch.device:
    """The device of all tensors; `expected` begins the error: the argument, and what of it is looked at."""
    devices = {x.device for x in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        found = ", ".join(sorted(map(str, devices))) or "none at all"
        raise ValueError(
            f"{expected} on one CUDA device, got {found}; graphs are captured on one GPU: move everything there with "
            ".to('cuda')."
        )
    return devices.pop()
