"""`Capture`: how CUDA graphs are captured, and how many were.

All graphs of a runner share one memory pool, so what a graph frees in its middle serves the others. `torch.cuda.graph`
empties torch's cache of freed memory before each capture, which the next step with prompts then takes from the driver
again, block by block. So this captures by itself, and empties the cache only where memory is short: an allocation
inside a capture cannot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_SHORT = 2 << 30  # bytes: more than the tensors of any captured step


class Capture:
    """Captures graphs on one device. `number` and `seconds` add up until `take`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool, self.stream = device, torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self.number, self.seconds = 0, 0.0

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
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool)
            try:
                found = step()
            finally:
                graph.capture_end()
        self.number += 1
        self.seconds += time.perf_counter() - start
        return graph, found

    def take(self) -> tuple[int, float]:
        """Graphs captured since the last call, and seconds that this took."""
        taken, self.number, self.seconds = (self.number, self.seconds), 0, 0.0
        return taken
