"""`Capture`: how a CUDA graph is captured. `cache.GraphCache` alone calls it.

All graphs of a runner share one memory pool, so what a graph frees in its middle serves the others. `torch.cuda.graph`
empties torch's cache of freed memory before each capture, which the next step with prompts then takes from the driver
again, block by block. So this captures by itself, and empties the cache only where memory is short (`make_room`): an
allocation inside a capture cannot.

Two things end the process if they happen: a graph that the garbage collector destroys within a capture, and a capture
into a pool whose last graph is gone.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_SHORT = 2 << 30  # bytes: more than the tensors of any captured step
_TIGHT = 256 << 20  # bytes: with less, the next capture may find none


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
    """Captures graphs on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool: Any = None
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs that hold the pool

    def make_room(self) -> bool:
        """Before a capture: give back what torch has freed, where memory is short. False: it is short even so."""
        if self._free() >= _SHORT:
            return True
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return self._free() >= _TIGHT

    def _free(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def __call__(self, step: Callable[[], T]) -> tuple[Any, T]:
        """The graph of `step`, which must have run before (that compiles its kernels), and what it returns: tensors
        whose values are valid after a replay."""
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
        return graph, found
