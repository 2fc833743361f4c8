"""Digests of tensors: 64-bit numbers by which two computations are compared bit for bit, without their tensors.

A tensor [N, K] is read as 16- or 32-bit words (bytes, where a row has an odd number). With c of them in row r folded
onto C columns,

    digest = sum over r, c of  (sum of the words of row r in column c) * odd(r * C + c)   modulo 2**64

Sums of integers do not depend on their order, so a GPU adds as it likes, and the digests of the rows that ranks hold
add up to the whole's. A word that changes by d changes the digest by d * odd, which is never 0 modulo 2**64: one
flipped bit is always seen. Words that change places are seen unless they fall into one column of one row.

Cost: every byte is read once; the sums are a 16th of the words or fewer. Nothing waits for the device until `take`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache

import torch
from torch import Tensor

from jetrl.model.shards import Part
from jetrl.parallel.world import ALONE, World
from jetrl.train.batches import PackedBatch

_FOLD, _COLUMNS = 64, 16  # words that are added to one sum at most; sums of a row that are left at least
_SUMS, _USUAL = 1 << 22, 1 << 20  # made at once; places whose factors are kept
_MULTIPLIER, _OFFSET = -7046029254386353131, 1442695040888963407
_WRAP = 1 << 64


def digest_of(value: Tensor, start: int = 0) -> Tensor:
    """The digest of a tensor of any type, 0-dimensional int64 on its device. `start`: the place of its first row in
    the whole, of which these are a rank's rows."""
    bits = _words(value)
    count, width = bits.shape
    fold = 1
    while fold < _FOLD and width % (2 * fold) == 0 and width >= 2 * fold * _COLUMNS:
        fold *= 2
    columns = width // fold
    step, total = max(1, _SUMS // max(1, columns)), torch.zeros((), dtype=torch.int64, device=value.device)
    for first in range(0, count, step):
        sums = bits[first : first + step].view(-1, fold, columns).sum(1, dtype=torch.int64)
        total += (sums.view(-1) * _odd((start + first) * columns, sums.numel(), value.device)).sum()
    return total


def _odd(first: int, count: int, device: torch.device) -> Tensor:
    """The factors of so many places, from `first` on."""
    if first + count <= _USUAL:
        return _usual(device)[first : first + count]
    place = torch.arange(first, first + count, dtype=torch.int64, device=device)
    return (place * _MULTIPLIER + _OFFSET) | 1


@cache
def _usual(device: torch.device) -> Tensor:
    """Those of the first places: for most matrices that is all, and a GPU starts half as many kernels."""
    return (torch.arange(_USUAL, dtype=torch.int64, device=device) * _MULTIPLIER + _OFFSET) | 1


def _words(value: Tensor) -> Tensor:
    """The bits of a tensor as integers [rows, words]; a vector has a row for each number."""
    value = value.detach()
    rows = value.reshape(max(1, len(value) if value.ndim else 1), -1) if value.numel() else value.reshape(0, 1)
    rows = rows.contiguous()
    size = rows.shape[1] * rows.element_size()
    kind = torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.uint8
    if rows.storage_offset() * rows.element_size() % 4:  # a view begins between two words
        rows = rows.clone()
    return rows.view(kind)


class Digests:
    """The digests of a step, by name, in the order in which they were made. They stay on the device until `take`."""

    def __init__(self) -> None:
        self._made: dict[str, Tensor] = {}
        self._within: list[str] = []

    @contextmanager
    def within(self, *names: object) -> Iterator[None]:
        """Names inside begin with these."""
        self._within += map(str, names)
        try:
            yield
        finally:
            del self._within[len(self._within) - len(names) :]

    def add(self, name: str, value: Tensor | None, start: int = 0) -> None:
        """The digest of a tensor; None has none."""
        if value is not None:
            self._made["/".join((*self._within, name))] = digest_of(value, start)

    def add_parts(self, name: str, parts: Mapping[str, Part], world: World = ALONE) -> None:
        """What this rank has of these tensors. What is whole on every rank counts once, on the first."""
        with self.within(name):
            for key, part in parts.items():
                if world.first or part.start:
                    self.add(key, part.value, part.start)

    def add_batches(self, batches: Sequence[PackedBatch]) -> None:
        """Every column of the micro-batches that this rank holds, as they go into the updates."""
        for update, batch in enumerate(batches):
            for number, micro in zip(batch.numbers, batch.micro_batches, strict=True):
                with self.within("batch", update, number):
                    for column in fields(micro):
                        if isinstance(found := getattr(micro, column.name), Tensor):
                            self.add(column.name, found)

    def take(self, world: World = ALONE) -> dict[str, int]:
        """All of them as numbers from 0 on, and none is left: one copy from each device. Collective."""
        made, self._made = self._made, {}
        values: dict[str, int] = {}
        for device in {value.device for value in made.values()}:
            names = [name for name, value in made.items() if value.device == device]
            values |= zip(names, torch.stack([made[name] for name in names]).tolist(), strict=True)
        found: dict[str, int] = {}
        for of_rank in world.gather({name: values[name] for name in made}):
            for name, value in of_rank.items():
                found[name] = (found.get(name, 0) + value) % _WRAP
        return found


class NoDigests(Digests):
    """Where nobody asks: nothing is computed."""

    def add(self, name: str, value: Tensor | None, start: int = 0) -> None:
        pass

    def add_batches(self, batches: Sequence[PackedBatch]) -> None:
        pass


UNSEEN = NoDigests()
