"""`World`: the processes of a run (ranks) and the few things that they exchange.

Everything that crosses ranks goes through here, so a run in one process is the same code with `ALONE`. Ranks must make
the same calls in the same order. Objects travel by gloo, tensors by the backend of their device (gloo or NCCL). Each
call has a time limit (`parallel.watch`), and one that fails raises `LostContact`.

A world has two groups, which are worlds too. `replicas` are the ranks that share the work: prompts and micro-batches
are dealt to them, sums go over them, and rows of masters are spread over them. `shards` are the ranks that compute one
replica's forward pass together, each with a part of every weight, so they see the same work. Runs have one shard: all
ranks are replicas, `replicas` is the world itself and `shards` is `ALONE`. `World.in_shards` makes others.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl.errors import gpu_full
from jetrl.parallel.measures import WAITS
from jetrl.parallel.progress import PROGRESS, LostContact

# torch 2.13 has given it another name, and warns of the old one
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
T = TypeVar("T")
_WAITS: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))  # of `await_all`, by group


@contextmanager
def collective(name: str, moved: Tensor | None = None) -> Iterator[None]:
    """Around every collective: counts it and its time, and turns what the backend raises into `LostContact`.

    `moved` is a tensor of it, None where it exchanges objects.
    """
    PROGRESS.begin(name)
    with contact(name, moved):
        yield


@contextmanager
def contact(name: str, moved: Tensor | None = None) -> Iterator[None]:
    """Counts the time inside, and what the backend raises there is `LostContact`: around the end of a collective that
    has begun before."""
    try:
        with WAITS.on(moved):
            yield
    except RuntimeError as error:
        if gpu_full(error):  # this rank's: what a peer lacks comes as a closed connection
            raise
        raise LostContact(f"{name}: {error}") from error


class Groups(NamedTuple):
    """What `World.in_shards` makes."""

    replicas: World
    shards: World


@dataclass(frozen=True, slots=True)
class World:
    """One process among `size`. `local_rank` numbers those of its host, and so its GPU.

    `process_group` and its `name` are those of a part of the ranks, which `rank` numbers anew; None: all of them.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    process_group: dist.ProcessGroup | None = None
    name: str = ""
    groups: Groups | None = None

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def replicas(self) -> World:
        """This rank and those of other replicas that hold the same part of each weight: they share the work."""
        return self if self.groups is None else self.groups.replicas

    @property
    def shards(self) -> World:
        """The ranks of this replica: together they hold each weight once, and do the same work."""
        return ALONE if self.groups is None else self.groups.shards

    def in_shards(self, shards: int, timeout: timedelta | None = None) -> World:
        """The same ranks as replicas of `shards` neighbours each. A collective; only of all ranks of a run.

        `timeout` is that of the new process groups. `parallel.watch` names who is late to a collective of all ranks,
        but not in these. ValueError if the replicas would not be equal.
        """
        assert self.process_group is None and self.groups is None, "a part of the ranks has no groups"
        if shards < 1 or self.size % shards:
            raise ValueError(f"{self.size} ranks cannot be replicas of {shards} ranks each.")
        if shards == 1:
            return self
        grid = [range(first, first + shards) for first in range(0, self.size, shards)]
        across = self._part("replicas", list(zip(*grid, strict=True)), timeout)
        return replace(self, groups=Groups(across, self._part("shards", grid, timeout)))

    def _part(self, kind: str, parts: Sequence[Sequence[int]], timeout: timedelta | None) -> World:
        """The one of `parts` that has this rank. Every rank makes the groups of all."""
        groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in parts]
        here = next(i for i, ranks in enumerate(parts) if self.rank in ranks)
        place = parts[here].index(self.rank)
        return World(place, len(parts[here]), self.local_rank, groups[here], f"{kind}{here}")

    def _collective(self, name: str, moved: Tensor | None = None) -> AbstractContextManager[None]:
        # a count that only some ranks have would make others look late
        return collective(name, moved) if self.process_group is None else contact(name, moved)

    def _of_run(self, rank: int) -> int:
        """The number that a rank of this world has in the run."""
        return rank if self.process_group is None else dist.get_global_rank(self.process_group, rank)

    @property
    def first(self) -> bool:
        """Whether this rank writes the run folder and the display."""
        return self.rank == 0

    def barrier(self) -> None:
        if not self.alone:
            self.gather(None)  # by gloo: it names no device, and its time limit ends a wait for a dead rank

    def await_all(self) -> None:
        """As `barrier`, but without a time limit: for work of unequal length, such as downloads. By the host alone.

        A rank that dies meanwhile is noticed as ever (`parallel.watch`).
        """
        if self.alone:
            return
        arrived, pause = self.counter(f"wait/{next(_WAITS[self.name])}"), 0.001
        here = arrived(1)
        while here < self.size:
            time.sleep(pause)
            pause = min(1.5 * pause, 0.2)
            here = arrived(0)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank. Pickled: for small or host-side values."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        with self._collective("gather"):
            dist.all_gather_object(found, value, group=self.process_group)
        return found

    def collect(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on rank 0; [] on the others. Pickled."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size if self.first else []
        with self._collective("collect"):
            dist.gather_object(value, found if self.first else None, self._of_run(0), self.process_group)
        return found

    def part(self, of: Sequence[T]) -> Sequence[T]:
        """This rank's part of a sequence: neighbours, equal numbers or one more."""
        return of[len(of) * self.rank // self.size : len(of) * (self.rank + 1) // self.size]

    def share(self, value: Any, source: int = 0) -> Any:
        """`value` of rank `source`, on every rank."""
        if self.alone:
            return value
        held = [value]
        with self._collective("share"):
            dist.broadcast_object_list(held, self._of_run(source), self.process_group)
        return held[0]

    def send_rows(self, whole: Tensor, rows: Sequence[int], senders: int) -> tuple[Tensor, Callable[[], None]]:
        """Rank s gets its `rows[s]` rows of the `whole` [sum(rows), ...] of each rank below `senders`.

        Returns [senders, rows[rank], ...] and a function to call before it is read; until then `whole` must not change,
        and both must be kept. The other ranks send nothing: their `whole` has no rows. Alone nothing is copied.
        """
        sends = self.rank < senders
        assert len(rows) == self.size and len(whole) == (sum(rows) if sends else 0) and whole.is_contiguous()
        if self.alone:
            return whole[None], lambda: None
        own = rows[self.rank]
        received = whole.new_empty(senders * own, *whole.shape[1:])
        incoming = [own if r < senders else 0 for r in range(self.size)]
        outgoing = list(rows) if sends else [0] * self.size
        with self._collective("send_rows", whole):
            work = dist.all_to_all_single(
                _plain(received), _plain(whole), incoming, outgoing, self.process_group, async_op=True
            )

        def wait() -> None:
            with contact("send_rows", whole):
                work.wait()

        return received.view(senders, own, *whole.shape[1:]), wait

    def gather_rows(self, whole: Tensor, rows: Sequence[int]) -> None:
        """Fill `whole` [sum(rows), ...] in place: rank r has its `rows[r]` rows there and gives them to all."""
        assert sum(rows) == len(whole) and len(rows) == self.size and whole.is_contiguous()
        if self.alone:
            return
        parts = list(_plain(whole).split(list(rows)))
        with self._collective("gather_rows", whole):
            if len(set(rows)) == 1:
                _all_gather(_plain(whole), parts[self.rank], self.process_group)
                return
            for source, part in enumerate(parts):
                if part.numel():
                    dist.broadcast(part, self._of_run(source), self.process_group)

    def counter(self, name: str) -> Callable[[int], int]:
        """`add(n)`: adds `n` to the number that all ranks share under `name`, at once, and returns it after that.

        It begins at 0. The call goes to the store of the run, by the host alone; no other rank takes part.
        """
        if self.alone:
            return _Counter()
        key = f"counter/{self.name and self.name + '/'}{name}"
        return lambda n: _asked(store(), key, n)


ALONE = World()


class _Counter:
    """A counter of one process."""

    value = 0

    def __call__(self, n: int) -> int:
        self.value += n
        return self.value


def _asked(of: dist.Store, key: str, n: int) -> int:
    try:
        return of.add(key, n)
    except RuntimeError as error:
        raise LostContact(f"the store of the run: {error}") from error


@lru_cache(maxsize=1)
def store() -> dist.Store:
    """This process's main thread's connection to the store that all ranks share. Other threads open their own."""
    return connect()


def connect(seconds: float = 60.0) -> dist.Store:
    """A connection to the store at MASTER_ADDR and MASTER_PORT, where torchrun or rank 0 serves it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    client = dist.TCPStore(
        address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds)
    )
    return dist.PrefixStore(f"jetrl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", client)


def _plain(tensor: Tensor) -> Tensor:
    """A view that every backend moves: gloo has no FP8."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
