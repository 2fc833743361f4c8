"""`Capture`: how CUDA graphs are captured, and how many were.

All graphs of a runner share one memory pool, so what a graph frees in its middle serves the others. `torch.cuda.graph`
empties torch's cache of freed memory before each capture, which the next step with prompts then takes from the driver
again, block by block. So this captures by itself, and empties the cache only where memory is short: an allocation
inside a capture cannot.

Two things end the process if they happen: a graph that the garbage collector destroys within a capture, and a capture
into a pool whose last graph is gone.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_SHORT = 2 << 30  # bytes: more than the tensors of any captured step


@contextmanager
def _uncollected() -> Iterator[None]:
    """The garbage collector rests."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Capture:
    """Captures graphs on one device. `number` and `seconds` add up until `take`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool: Any = None
        self.number, self.seconds = 0, 0.0
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs that hold the pool

    def __call__(self, step: Callable[[], T]) -> tuple[Any, T]:
        """The graph of `step`, which must have run before (that compiles its kernels), and the tensors that it returns.

        Their values are valid after a replay.
        """
        start = time.perf_counter()
        if torch.cuda.mem_get_info(self.device)[0] < _SHORT:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with _uncollected(), torch.cuda.stream(self.stream):
            if not self._alive:
                self.pool = torch.cuda.graph_pool_handle()
            # a reward or an environment in another thread may use the GPU meanwhile
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                found = step()
            finally:
                graph.capture_end()
        self._alive.add(graph)
        self.number += 1
        self.seconds += time.perf_counter() - start
        return graph, found

    def take(self) -> tuple[int, float]:
        """Graphs captured since the last call, and seconds that this took."""
        taken, self.number, self.seconds = (self.number, self.seconds), 0, 0.0
        return taken
