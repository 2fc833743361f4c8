"""How long a study will still take, by the steps that its runs have made so far."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean


@dataclass(slots=True)
class Pace:
    """`seen`: of each run, (step, time in seconds) where a new step was seen; the first entry is of its start."""

    seen: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def note(self, name: str, step: int, now: float) -> None:
        """`name` is at `step`. One that is behind what was seen has gone back to its newest checkpoint."""
        entries = self.seen.setdefault(name, [])
        if entries and step < entries[-1][0]:
            entries.clear()
        if not entries or step > entries[-1][0]:
            entries.append((step, now))

    def left(self, running: Mapping[str, int], free: int, waiting: Sequence[int], now: float) -> float | None:
        """Seconds until all are done; None before any run has made a step.

        `running`: the last step of each run that runs; `free`: how many slots do nothing, or a warm start, which counts
        as done soon; `waiting`: how many steps each run has left that waits. A run without a pace of its own has the
        mean.
        """
        paces = {name: pace for name, entries in self.seen.items() if (pace := _seconds_per_step(entries))}
        if not paces:
            return None
        mean = fmean(paces.values())
        slots = [0.0] * free
        for name, last in running.items():
            step, at = self.seen[name][-1] if name in self.seen else (0, now)
            pace = paces.get(name, mean)
            # A step that takes longer than the others, as one with an evaluation does, takes no more off.
            slots.append(max((last - step) * pace - min(now - at, pace), 0.0))
        heapq.heapify(slots)
        for steps in waiting if slots else ():
            heapq.heapreplace(slots, slots[0] + steps * mean)
        return max(slots, default=None)


def _seconds_per_step(entries: Sequence[tuple[int, float]]) -> float | None:
    """Since the first step that was seen, so without loading and compiling; since the start while there is no later."""
    if len(entries) < 2:
        return None
    (first, begin), (last, end) = entries[1 if len(entries) > 2 else 0], entries[-1]
    return (end - begin) / (last - first)
