"""What this process is doing, for those who wait for it: its phase, and how many collectives it has begun. No torch.

Ranks make the same collectives in the same order, so a rank that has begun fewer than another is one that the other
waits for. `parallel.watch` tells the other ranks and compares.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


class LostContact(RuntimeError):
    """A collective failed. Most often the cause is elsewhere: another rank has ended."""


@dataclass(slots=True)
class Progress:
    """Counters of one process."""

    phase: str = "starting"
    calls: int = 0  # collectives begun
    name: str = ""  # of the last one
    since: float = 0.0  # when that began, on `time.monotonic`
    common: bool = False  # whether all ranks are about to raise the same error (`agreement.agree`)

    def begin(self, name: str) -> None:
        """A collective begins."""
        self.calls, self.name, self.since = self.calls + 1, name, time.monotonic()


PROGRESS = Progress()


def came_by_lost_contact(error: BaseException | None) -> bool:
    """Whether `error` is, or was raised because of, a failed collective."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, LostContact):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
