"""What ranks measure of themselves in a step: the time in which they wait for exchanges, and the peak of GPU memory.

An exchange of host values waits on the host, and counts by the clock. One of GPU tensors waits on the device: two
events around it, on the stream that computes, say how long that stream stood still. So an exchange that ends while the
backward pass goes on counts as nothing. Nothing waits for the events until `seconds` is asked, after the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jetrl.parallel.world import World


class Waits:
    """Seconds that this process waits in exchanges, between `start` and `seconds`."""

    def __init__(self) -> None:
        self.counting = False
        self._host = 0.0
        self._free: list[torch.cuda.Event] = []
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """Count from zero."""
        self.counting, self._host = True, 0.0
        self._recycle()

    @contextmanager
    def on(self, moved: Tensor | None = None) -> Iterator[None]:
        """Around what waits for an exchange of `moved`; None: of host values."""
        if not self.counting:
            yield
        elif moved is not None and moved.is_cuda:
            first, last = self._event(), self._event()
            first.record()
            try:
                yield
            finally:
                last.record()
                self._pairs.append((first, last))
        else:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._host += time.perf_counter() - start

    def seconds(self) -> float:
        """The sum since `start`, which ends the counting. Waits for the device."""
        self.counting = False
        if self._pairs:
            self._pairs[-1][1].synchronize()
        total = self._host + sum(first.elapsed_time(last) for first, last in self._pairs) / 1e3
        self._recycle()
        return total

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

    def _recycle(self) -> None:
        self._free += [event for pair in self._pairs for event in pair]
        self._pairs = []


WAITS = Waits()


def rank_metrics(world: World) -> dict[str, float]:
    """Of all ranks: `perf/communication_s`, the mean wait since `WAITS.start`, and peaks of GPU memory so far.

    {} for one process; no memory without a GPU. Collective.
    """
    if world.alone:
        return {}
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    found = world.gather((WAITS.seconds(), peak))
    metrics = {"perf/communication_s": sum(waited for waited, _ in found) / world.size}
    peaks = [peak for _, peak in found if peak is not None]
    if len(peaks) == world.size:
        metrics |= {"perf/memory_peak_gib_max": max(peaks), "perf/memory_peak_gib_mean": sum(peaks) / world.size}
    return metrics
