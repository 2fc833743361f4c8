"""Trajectories as bytes, for other ranks. Most of them read only a few: those of their own micro-batches.

So token ids and log-probs arrive as `Numbers`, which stand for a tuple and become one when they are read. The rest
(lengths, texts, rewards of turns) is there at once. Values do not change: a log-prob is sent in FP32 where it is one.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from jetrl.types import Segment, Trajectory

N = TypeVar("N", int, float)


class Numbers(Sequence[N]):
    """A tuple of numbers, kept as an array's bytes until it is read. It equals that tuple, and has its hash."""

    __slots__ = ("_data", "_kind", "_read")

    def __init__(self, kind: str, data: bytes) -> None:
        self._kind, self._data = kind, data
        self._read: tuple[N, ...] | None = None

    @classmethod
    def of(cls, values: Sequence[N], kinds: str) -> Numbers[N]:
        """In the first of these kinds of `array` that holds the values as they are."""
        for kind in kinds:
            try:
                held = array(kind, values)
            except OverflowError:
                continue
            if tuple(held) == tuple(values):
                return cls(kind, held.tobytes())
        raise ValueError(f"numbers that are none of the kinds {kinds} of an array: {tuple(values)[:8]}")

    def __len__(self) -> int:
        return len(self._data) // array(self._kind).itemsize

    @overload
    def __getitem__(self, place: int) -> N: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[N, ...]: ...

    def __getitem__(self, place: int | slice) -> N | tuple[N, ...]:
        return self._whole()[place]

    def __iter__(self) -> Iterator[N]:
        return iter(self._whole())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Numbers):
            return self._whole() == other._whole()
        return self._whole() == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._whole())

    def __repr__(self) -> str:
        return repr(self._whole())

    def __reduce__(self) -> tuple[Any, ...]:
        return Numbers, (self._kind, self._data)

    def _whole(self) -> tuple[N, ...]:
        if self._read is None:
            self._read = tuple(memoryview(self._data).cast(self._kind).tolist())  # type: ignore[call-overload]
        return self._read


def dumps(trajectories: Mapping[int, Trajectory]) -> bytes:
    """The trajectories by number, for `pickle.loads`. Prompts that are one object remain one."""
    made: dict[int, Numbers[Any]] = {}

    def once(values: Sequence[Any], kinds: str) -> Sequence[Any]:
        if not values or isinstance(values, Numbers):
            return values
        if id(values) not in made:  # the trajectories keep them alive meanwhile
            made[id(values)] = Numbers.of(values, kinds)
        return made[id(values)]

    def reduced(s: Segment) -> tuple[Any, ...]:
        tokens, logprobs = once(s.tokens, "iq"), once(s.logprobs, "fd")
        return Segment, (s.author, tokens, s.text, logprobs, s.reward, s.messages, s.opened)

    written = io.BytesIO()
    pickler = pickle.Pickler(written, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {Segment: reduced}  # type: ignore[assignment]
    pickler.dump(dict(trajectories))
    return written.getvalue()
