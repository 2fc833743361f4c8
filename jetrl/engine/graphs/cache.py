"""`GraphCache`: the steps of one engine that are CUDA graphs, of all kinds, by what they are captured for.

A step runs plainly at first, which compiles its kernels, and is captured right after; from then on it is replayed.
Where a size that was not met before can be served by a step that is there, a rule of its kind decides
(`own_or_larger`, `mixed.choose`).

Graphs hold the addresses of weights, of the engine's cache and of their inputs. Publishing writes new weights to the
old addresses. Who moves the weights calls `check_addresses`; who moves anything else, `clear` or `drop`.

A capture gives back memory that torch has freed, where memory is short. If that is not enough, the step that was not
used for longest goes: one for each that comes, and never one of the last `_LEAST`, or few steps would take each
other's place again and again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from jetrl.engine.graphs.capture import Capture

_LEAST = 8  # steps that stay, however short memory is

Key = tuple[type[Any], Any]  # kind and size: sizes of two kinds may be equal as tuples
S = TypeVar("S", bound=tuple[Any, ...])
R = TypeVar("R")
I = TypeVar("I")  # noqa: E741
F = TypeVar("F")


def padded_batch(n: int) -> int:
    """The smallest captured size that holds `n` rows: powers of two to 16, then multiples of 16, from 256 on of 64."""
    if n <= 16:
        return 1 << (n - 1).bit_length()
    step = 16 if n <= 256 else 64
    return -(-n // step) * step


class DecodeSize(Protocol):
    """A size of steps in which every sequence draws."""

    @property
    def rows(self) -> int: ...

    def holds(self, other: Any) -> bool: ...


D = TypeVar("D", bound=DecodeSize)


def own_or_larger(held: Collection[D], need: D, times: int) -> D:
    """The step for `need`, requested for the `times`-th time: its own, or one that is there with up to twice the rows.

    A capture costs as much as several steps. As a batch runs out, each size is needed once or twice: not worth it.
    """
    fits = [size for size in held if size.holds(need) and size.rows <= 2 * need.rows]
    return min(fits) if fits and times < 3 and need not in held else need  # type: ignore[type-var]


@dataclass(slots=True)
class HeldStep(Generic[S, I, F]):
    """A step, the tensors that it reads and writes, and what it returns: a graph knows their memory only."""

    size: S
    inputs: I
    step: Callable[[], F]
    graph: Any = None  # torch.cuda.CUDAGraph
    found: F | None = None  # of a replay


class GraphCache:
    """The captured steps of one engine, all of `model`. `number` and `seconds` add up until `take`."""

    def __init__(self, capture: Capture, model: Any) -> None:
        self.device, self._capture, self._model = capture.device, capture, model
        self._held: dict[Key, HeldStep[Any, Any, Any]] = {}  # used last comes last
        self._asked: Counter[Key] = Counter()
        self._at: Any = None  # the model's addresses when the first step was asked for
        self.number, self.seconds = 0, 0.0

    def sizes(self, kind: type[S]) -> list[S]:
        """Of the steps of this kind that are there."""
        return [size for of, size in self._held if of is kind]

    def choose(self, need: S, rule: Callable[[Collection[S], S, int], R]) -> R:
        """The size that serves `need`: what the rule says of the sizes that are there and how often this was asked."""
        if self._at is None:
            self._at = self._model.addresses()
        key = type(need), need
        self._asked[key] += 1
        return rule(self.sizes(type(need)), need, self._asked[key])

    def held(self, size: S, make: Callable[[S], HeldStep[S, I, F]]) -> HeldStep[S, I, F]:
        """The step of this size, made if it is not there."""
        key = type(size), size
        found = self._held.pop(key, None)
        self._held[key] = found = make(size) if found is None else found
        return found

    def run(self, held: HeldStep[S, I, F]) -> F:
        """One run; the first is plain, and its capture follows. What a replay returns is overwritten by the next."""
        if held.graph is not None:
            held.graph.replay()
            return held.found  # type: ignore[return-value]
        first = held.step()
        start = time.perf_counter()
        self._make_room()
        held.graph, held.found = self._capture(held.step)
        self.number += 1
        self.seconds += time.perf_counter() - start
        return first

    def _make_room(self) -> None:
        if self._capture.make_room() or len(self._held) <= _LEAST:
            return
        oldest = next(iter(self._held))
        del self._held[oldest], self._asked[oldest]  # so it has to prove again that it is needed
        self._capture.make_room()

    def take(self) -> tuple[int, float]:
        """Graphs captured since the last call, and seconds that this took."""
        taken, self.number, self.seconds = (self.number, self.seconds), 0, 0.0
        return taken

    def drop(self, kind: type[Any]) -> None:
        """Drop the steps of one kind, and forget what was asked of it."""
        self._held = {key: held for key, held in self._held.items() if key[0] is not kind}
        self._asked = Counter({key: times for key, times in self._asked.items() if key[0] is not kind})

    def clear(self) -> None:
        """Drop all: the memory that they read moves."""
        self._held.clear()
        self._asked.clear()
        self._at = None

    def check_addresses(self) -> None:
        """Drop all if the weights have moved."""
        if self._at is not None and self._at != self._model.addresses():
            self.clear()
