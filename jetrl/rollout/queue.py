"""The shared queue of a rollout: which rank runs which trajectories. What they say does not depend on it.

Trajectories have numbers; `group` neighbours share a prompt, and on one rank its pages. If all fit into the ranks'
slots at once, each rank gets an equal part by load at the start, and nothing is left to share. Else each fills its
slots, and the rest is a list of chunks that every rank knows: whole groups, and near the end smaller ones down to one
trajectory (remaining / (2 * ranks): guided self-scheduling, Polychronopoulos and Kuck 1987). A rank that has a free
slot takes the next chunk by one addition to a counter in the run's store, so none is idle while trajectories are left.

"Rank" here is a replica (`World.replicas`). Where a replica has several shards, the first of them asks, and the others
do as it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, count
from typing import Protocol

from jetrl.parallel.world import World

_FAILED = 1 << 40  # added to the count of ended trajectories by a rank that gives up
_PERIOD = 0.5  # seconds between two looks at that count
_NUMBERS = count(1)  # of all queues of this process: each has counters of its own in the store


class Abandoned(Exception):
    """Another rank has failed; this one need not go on."""


class Source(Protocol):
    """Where a rollout's driver gets trajectories from, by number."""

    @property
    def empty(self) -> bool:
        """Whether `take` has given everything."""
        ...

    def take(self, live: int, resting: int, waiting: int) -> Sequence[int]:
        """The next ones to start, for a driver that has `live` unfinished ones. `waiting` of them have no slot yet,
        `resting` need none while their environments work."""
        ...

    def report(self, ended: int) -> int:
        """Tell how many of its own have ended; returns how many have ended everywhere, as far as is known."""
        ...


class Everything:
    """All `number` trajectories at once, for one process."""

    def __init__(self, number: int) -> None:
        self.number, self.empty = number, number == 0

    def take(self, live: int, resting: int, waiting: int) -> Sequence[int]:
        if self.empty:
            return ()
        self.empty = True
        return range(self.number)

    def report(self, ended: int) -> int:
        return ended


class SharedQueue:
    """One rank's view of the queue of one rollout."""

    def __init__(
        self, own: range, rest: Sequence[range], slots: int, next_chunk: Callable[[int], int],
        ended: Callable[[int], int], clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rest, self.slots, self.empty = rest, slots, not (own or rest)
        self._own, self._next, self._ended, self._clock = own, next_chunk, ended, clock
        self._told = self._known = 0
        self._looked = clock()

    def take(self, live: int, resting: int, waiting: int) -> Sequence[int]:
        """The first part, or as many chunks as it takes to fill the slots.

        Resting conversations come back, so they free as many slots at most as there are.
        """
        taken, self._own = list(self._own), range(0)
        busy = live - min(resting, self.slots)
        while self.rest and not self.empty and busy + len(taken) < self.slots and not waiting:
            place = self._next(1) - 1
            self.empty = place >= len(self.rest)
            taken += () if self.empty else self.rest[place]
        self.empty |= not self.rest
        return taken

    def report(self, ended: int) -> int:
        """Asks the store twice a second at most. `Abandoned` if another rank has failed."""
        now = self._clock()
        if now - self._looked >= _PERIOD:
            self._looked = now
            self._known = self._ended(ended - self._told)
            self._told = ended
            if self._known >= _FAILED:
                raise Abandoned
        return max(self._known, ended)

    def fail(self) -> None:
        """Let the other ranks know that this one gives up."""
        self._ended(_FAILED)


class LedQueue:
    """A queue as all shards of a replica see it: the first one asks `queue`, and each hears the same at each call.

    So they must make the same calls, as engines do that compute each step together.
    """

    def __init__(self, queue: SharedQueue, shards: World) -> None:
        self._queue, self._shards, self.rest, self.empty = queue, shards, queue.rest, queue.empty

    def take(self, live: int, resting: int, waiting: int) -> Sequence[int]:
        queue = self._queue
        found = (queue.take(live, resting, waiting), queue.empty) if self._shards.first else None
        taken, self.empty = self._shards.share(found)
        return taken  # type: ignore[no-any-return]

    def report(self, ended: int) -> int:
        known: int | None = None
        if self._shards.first:
            with suppress(Abandoned):
                known = self._queue.report(ended)
        if (known := self._shards.share(known)) is None:
            raise Abandoned
        return known

    def fail(self) -> None:
        self._queue.fail()


class Queues:
    """The shared queues of a run, one for each rollout. Every rank opens the same ones in the same order.

    `slots` is the number of sequences that one replica's engine runs at once.
    """

    def __init__(self, world: World, slots: int) -> None:
        assert slots >= 1
        self.world, self.slots = world, slots

    def open(self, loads: Sequence[float], group: int) -> SharedQueue | LedQueue:
        """The queue of the next rollout, of one trajectory for each of `loads` (its expected work, in any unit)."""
        replicas, name = self.world.replicas, f"rollout/{next(_NUMBERS)}"
        own, rest = shares(loads, group, self.slots, replicas.size)
        queue = SharedQueue(
            own[replicas.rank], rest, self.slots, self.world.counter(f"{name}/next"),
            self.world.counter(f"{name}/ended"),
        )
        return queue if self.world.shards.alone else LedQueue(queue, self.world.shards)


def shares(loads: Sequence[float], group: int, slots: int, size: int) -> tuple[list[range], list[range]]:
    """The first part of each of `size` ranks, and the chunks of the rest in the order in which they are taken."""
    number = len(loads)
    if number > slots * size:
        each = slots // group * group or slots
        own = [range(r * each, (r + 1) * each) for r in range(size)]
        return own, chunks(size * each, number, group, size)
    total = list(accumulate(loads, initial=0.0))
    edges = [0]
    for r in range(1, size):
        wanted = total[-1] * r / size
        edge = min(range(edges[-1], number + 1), key=lambda i: (abs(total[i] - wanted), i))
        whole = round(edge / group) * group  # a group stays on one rank where that costs an eighth of a part at most
        near = edges[-1] <= whole <= number and abs(total[whole] - wanted) <= total[-1] / size / 8
        edges.append(whole if near else edge)
    own = [range(a, b) for a, b in zip(edges, [*edges[1:], number], strict=True)]
    if max(map(len, own)) > slots:  # short ones on one rank: they would wait there
        own = [range(number * r // size, number * (r + 1) // size) for r in range(size)]
    return own, []


def chunks(first: int, number: int, group: int, size: int) -> list[range]:
    """Trajectories `first` to `number` - 1 in chunks: groups, in the end parts of groups, never of two groups."""
    found, at = [], first
    while at < number:
        length = max(1, min(group, (number - at) // (2 * size)))
        end = min(at + length, (at // group + 1) * group, number)
        found.append(range(at, end))
        at = end
    return found
