"""The digests of a training step by name, by which its record is compared (`kernels.update.digest`: what one is)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from jetrl.kernels.update.digest import digests
from jetrl.model.shards import Part
from jetrl.parallel.world import ALONE, World
from jetrl.train.batches import PackedBatch

_WRAP = 1 << 64


class Named(NamedTuple):
    """A tensor with its name; `start`: the place of its first row in the whole, of which it is a rank's rows."""

    name: str
    value: Tensor
    start: int = 0


class Digests:
    """The digests of a step, by name, in the order in which they were made. They stay on the device until `take`, and
    until then nothing waits for it."""

    def __init__(self) -> None:
        self._made: list[tuple[list[str], Tensor]] = []  # names, and their digests, which one call has made
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
            self.add_all([Named(name, value, start)])

    def add_all(self, named: Sequence[Named]) -> None:
        """The digests of tensors of one device, which a GPU makes in one launch for each kind of them."""
        if named:
            names = ["/".join((*self._within, one.name)) for one in named]
            self._made.append((names, digests([one.value for one in named], [one.start for one in named])))

    def add_parts(self, name: str, parts: Mapping[str, Part], world: World = ALONE) -> None:
        """What this rank has of these tensors. What is whole on every rank counts once, on the first."""
        with self.within(name):
            self.add_all([
                Named(key, part.value, part.start) for key, part in parts.items() if world.first or part.start
            ])

    def add_batches(self, batches: Sequence[PackedBatch]) -> None:
        """Every column of the micro-batches that this rank holds, as they go into the updates."""
        for update, batch in enumerate(batches):
            for number, micro in zip(batch.numbers, batch.micro_batches, strict=True):
                with self.within("batch", update, number):
                    columns = [(column.name, getattr(micro, column.name)) for column in fields(micro)]
                    self.add_all([Named(name, value) for name, value in columns if isinstance(value, Tensor)])

    def take(self, world: World = ALONE) -> dict[str, int]:
        """All of them as numbers from 0 on, and none is left: one copy from each device. Collective."""
        made, self._made = self._made, []
        values: dict[str, int] = {name: 0 for names, _ in made for name in names}  # in their order
        for device in {of.device for _, of in made}:
            here = [(names, of) for names, of in made if of.device == device]
            numbers = torch.cat([of for _, of in here]).tolist()
            values.update(zip((name for names, _ in here for name in names), numbers, strict=True))
        found: dict[str, int] = {}
        for of_rank in world.gather(values):
            for name, value in of_rank.items():
                found[name] = (found.get(name, 0) + value) % _WRAP
        return found


class NoDigests(Digests):
    """Where nobody asks: nothing is computed."""

    def add_all(self, named: Sequence[Named]) -> None:
        pass


UNSEEN = NoDigests()
