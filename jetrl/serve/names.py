"""Request ids: a hash of what is asked, and of how many equal requests came before.

The id names the random stream of an answer. So equal requests are interchangeable: whichever of them comes first, the
set of their answers is the same, and so is each answer to a request that says a seed. The answer of a client that left
before it had it is the next one's.
"""

from __future__ import annotations

import json
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any

import numpy as np

from jetrl.types import SamplingParams

_FIELDS = tuple(one.name for one in fields(SamplingParams))
_REMEMBERED = 1_000_000  # distinct requests whose number is known; the oldest are forgotten, and count from 0 again


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """The id of one answer, and its place among those to equal requests."""

    place: int
    id: int


@dataclass(slots=True)
class _Count:
    next: int = 0
    free: list[int] = field(default_factory=list)  # places that were given back, in order


class Names:
    """Counts equal requests of one scope: a session, or the server."""

    def __init__(self, scope: str = "") -> None:
        self.scope = scope
        self._seen: OrderedDict[bytes, _Count] = OrderedDict()

    def take(self, tokens: Sequence[int] | np.ndarray, sampling: SamplingParams, n: int, seeded: bool) -> list[Name]:
        """Names of `n` answers. A request that says a seed gets the same names each time."""
        asked = self._digest(tokens, sampling)
        places = list(range(n))
        if not seeded:
            count = self._seen.setdefault(asked, _Count())
            self._seen.move_to_end(asked)
            places = [*count.free[:n], *range(count.next, count.next + max(0, n - len(count.free)))]
            del count.free[:n]
            count.next = max([count.next, *(place + 1 for place in places)])
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        return [Name(place, _number(asked, place)) for place in places]

    def give_back(self, tokens: Sequence[int] | np.ndarray, sampling: SamplingParams, names: Iterable[Name]) -> None:
        """Nobody got these answers: the next equal requests will."""
        count = self._seen.get(self._digest(tokens, sampling))
        for name in names if count is not None else ():
            if name.place < count.next and name.place not in count.free:  # type: ignore[union-attr]
                insort(count.free, name.place)  # type: ignore[union-attr]

    def claim(self, tokens: Sequence[int] | np.ndarray, sampling: SamplingParams, names: Iterable[Name]) -> None:
        """These names are in use again, by another attempt of the request that had them."""
        count = self._seen.get(self._digest(tokens, sampling))
        if count is not None:
            gone = {name.place for name in names}
            count.free = [place for place in count.free if place not in gone]

    def _digest(self, tokens: Sequence[int] | np.ndarray, sampling: SamplingParams) -> bytes:
        what = json.dumps([self.scope, plain(sampling)], sort_keys=True).encode()
        return blake2b(what + b"\0" + np.asarray(tokens, dtype=np.int32).tobytes(), digest_size=16).digest()


def plain(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as JSON has them."""
    return {name: getattr(sampling, name) for name in _FIELDS}


def _number(asked: bytes, place: int) -> int:
    """63 bits: positive as a signed integer of 64."""
    return int.from_bytes(blake2b(asked + place.to_bytes(8, "big"), digest_size=8).digest(), "big") >> 1
