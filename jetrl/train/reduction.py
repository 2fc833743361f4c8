"""Where the gradients of one update add up: over micro-batches and ranks, in one order (`train.reduction`).

Micro-batches are dealt to lanes: of L lanes, lane l has the micro-batches l, l + L, l + 2 L, ... A rank takes a lane,
adds its gradients up in place, sends the sum to the owners of the rows (`model.shards`; vectors: to all), and takes
the next: rank r of n has the lanes r, r + n, ... Owners add what arrives in the order of lanes. So the sum depends on
the number of lanes only:

    fast    as many lanes as ranks: one exchange an update; the last bits depend on the number of ranks. In one process:
            `.grad` as kernels and autograd fill it, and nothing else.
    fixed   `train.reduction_lanes` lanes: one sum for any number of ranks. By default every micro-batch is a lane.

A rank holds whole gradients of all matrices while its lane has several micro-batches. With one it holds a few: all
ranks exchange the same matrices in the same order, that of a backward pass (last parameter first), and a matrix is sent
when its gradient is complete and all before it are sent. What is left is sent when the pass has ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from jetrl.choices import Reduction
from jetrl.kernels.qtensor import blocks_of
from jetrl.kernels.update.gradient import Gradient, first_waits, rows_in_use, sent_to
from jetrl.kernels.update.squares import ROW, row_squares
from jetrl.kernels.update.sums import add_in_order
from jetrl.model.master import Master
from jetrl.model.shards import Shard
from jetrl.parallel.world import World
from jetrl.precision.formats import BLOCK
from jetrl.train.optim import fixed_order_sum, global_grad_norm

IN_FLIGHT = 2  # matrices on their way while the backward pass goes on


@dataclass(frozen=True, slots=True)
class Round:
    """What all ranks do at once: the micro-batch of each (None: none), and how many of them, from the first on, then
    send their sum (0: the lanes go on)."""

    micro: tuple[int | None, ...]
    senders: int
    last: bool


def turns_of(count: int, lanes: int, size: int) -> list[Round]:
    """The turns of `size` ranks over `count` micro-batches in `lanes` lanes. An empty lane is none."""
    lanes = min(lanes, count)
    found = []
    for first in range(0, lanes, size):
        group = range(first, min(first + size, lanes))
        for number in range(first, count, lanes):
            own = [lane + number - first for lane in group]
            micro = tuple(own[r] if r < len(own) and own[r] < count else None for r in range(size))
            ends = number + lanes >= count
            found.append(Round(micro, len(group) if ends else 0, ends and first + size >= lanes))
    return found


def own_numbers(world: World, reduction: Reduction, lanes: int | None = None) -> Callable[[int], Sequence[int]]:
    """The micro-batches, of so many in an update, whose backward passes are this rank's turns, ascending."""

    def numbers(count: int) -> Sequence[int]:
        if world.alone:
            return range(count)
        turns = turns_of(count, _lanes(count, world, reduction, lanes), world.size)
        return sorted(own for turn in turns if (own := turn.micro[world.rank]) is not None)

    return numbers


def _lanes(count: int, world: World, reduction: Reduction, lanes: int | None) -> int:
    return world.size if reduction == "fast" else lanes or count


class GradientSum(Protocol):
    """The gradients of one update. After the last turn `.grad` of every parameter is the sum (of its own rows)."""

    turns: list[Round]

    def turn(self, turn: Round) -> AbstractContextManager[None]:
        """Around the backward pass of this rank's micro-batch, if it has one. Collective."""
        ...

    def norm(self) -> float:
        """The norm of the sum, the same on every rank. Collective."""
        ...


def gradient_sum(
    masters: Sequence[Master], count: int, world: World, reduction: Reduction, lanes: int | None = None,
    tokens: Sequence[Tensor] = (),
) -> GradientSum:
    """For `count` micro-batches of all ranks together. The parameters' `.grad` must be None.

    `lanes` are those of `fixed`; None: one for each micro-batch. What is not trained is left out.
    `tokens`, on the host: all that are looked up; if given, one process holds the gradient of those rows alone.
    Matrices must come from `sharding.shard_model` of this world, except in one process under `fast`.
    """
    if world.alone and reduction == "fast":
        return InPlace(masters, turns_of(count, 1, 1), tokens)
    return Exchanged(masters, turns_of(count, _lanes(count, world, reduction, lanes), world.size), world)


class InPlace:
    """One process adds up where kernels and autograd do."""

    def __init__(self, masters: Sequence[Master], turns: list[Round], tokens: Sequence[Tensor] = ()) -> None:
        self._masters, self.turns, self._tokens = masters, turns, tokens
        self._waiting = ExitStack()  # from the first turn to the last, or the first that fails

    @contextmanager
    def turn(self, turn: Round) -> Iterator[None]:
        if turn is self.turns[0] and not turn.last:
            matrices = [m.gradient for m in self._masters if m.trained and m.param.ndim > 1]
            self._waiting.enter_context(first_waits(matrices))
            for table in matrices if self._tokens else ():
                if table.only_looked_up:
                    self._waiting.enter_context(rows_in_use(table, _in_use(self._tokens, table.param)))
        try:
            yield
        except BaseException:
            self._waiting.close()
            raise
        if turn.last:
            self._waiting.close()

    def norm(self) -> float:
        return global_grad_norm(m.param for m in self._masters)


def _in_use(tokens: Sequence[Tensor], table: Tensor) -> Tensor:
    """The rows of `table` that these tokens look up, ascending."""
    seen = torch.zeros(table.shape[0], dtype=torch.bool)
    for some in tokens:
        seen[some] = True
    return seen.nonzero()[:, 0].to(table.device)


class _Flight(NamedTuple):
    """A matrix's gradient on its way; `whole` is kept until it has left, `received` [senders, own rows, K]."""

    param: nn.Parameter
    whole: Tensor
    received: Tensor
    wait: Callable[[], None]


class Exchanged:
    """The sum over lanes, which the ranks exchange. A `GradientSink`."""

    def __init__(self, masters: Sequence[Master], turns: list[Round], world: World) -> None:
        self._world, self.turns = world, turns
        trained = [m for m in masters if m.trained]
        self._vectors = [m.gradient for m in trained if m.param.ndim == 1]
        self._matrices = [m for m in reversed(trained) if m.param.ndim > 1]
        self._plan = [m.gradient for m in self._matrices]  # the order of exchanges
        self._place = {gradient: i for i, gradient in enumerate(self._plan)}
        self._shards = [_cut_in(m, world) for m in self._matrices]
        self._buffers: dict[Gradient, Tensor] = {}
        self._flying: deque[_Flight] = deque()
        self._vector_sum: Tensor | None = None
        self._senders = self._sent = 0
        self._left: list[int] = []

    @contextmanager
    def turn(self, turn: Round) -> Iterator[None]:
        self._senders = turn.senders
        # without an exchange nothing is ever complete
        self._left = [gradient.sources if turn.senders else 1 << 30 for gradient in self._plan]
        self._sent = 0
        with sent_to(self, self._plan):
            yield
        if turn.senders:
            self._send(len(self._plan))
            self._land(0)
            self._add_vectors()
        if turn.last:
            self._finish()

    def buffer(self, gradient: Gradient) -> Tensor:
        held = self._buffers.get(gradient)
        if held is None:
            place = self._place[gradient]
            assert place >= self._sent, f"matrix {place} from the end got a gradient after its sum was sent"
            held = self._buffers[gradient] = self._whole(place, self._shards[place].num_rows)
        return held

    def done(self, gradient: Gradient) -> None:
        self._left[self._place[gradient]] -= 1
        complete = self._sent
        while complete < len(self._plan) and self._left[complete] <= 0:
            complete += 1
        self._send(complete)

    def _whole(self, place: int, rows: int) -> Tensor:
        gradient = self._plan[place]
        shape = (rows, *gradient.param.shape[1:])
        return torch.zeros(shape, dtype=gradient.dtype, device=gradient.param.device)

    def _send(self, stop: int) -> None:
        """Begin the exchanges up to the plan's entry `stop`; add up those that have arrived meanwhile."""
        sends = self._world.rank < self._senders
        for place in range(self._sent, stop):
            cut = self._shards[place]
            whole = self._buffers.pop(self._plan[place], None)
            if whole is None:  # an idle rank, or no gradient in this micro-batch
                whole = self._whole(place, cut.num_rows if sends else 0)
            received, wait = self._world.send_rows(whole, cut.rows, self._senders)
            self._flying.append(_Flight(self._matrices[place].param, whole, received, wait))
            self._land(IN_FLIGHT)
        self._sent = max(self._sent, stop)

    def _land(self, leave: int) -> None:
        while len(self._flying) > leave:
            param, _, received, wait = self._flying.popleft()
            wait()
            if not param.numel():
                continue  # no rows here: `.grad` stays None, and the optimizer passes it by
            if param.grad is None and len(received) == 1:
                param.grad = received[0]  # as it is: nothing to add
            else:
                param.grad = add_in_order(param.grad, received)

    def _add_vectors(self) -> None:
        """Gather the vectors' gradients and add them, of all ranks, in the same order on each."""
        if not self._vectors:
            return
        own = torch.cat([_zeros_for(g) if g.param.grad is None else g.param.grad for g in self._vectors])
        for gradient in self._vectors:
            gradient.param.grad = None
        rows = own.new_zeros(self._world.size, len(own))
        rows[self._world.rank] = own
        self._world.gather_rows(rows, [1] * self._world.size)
        for row in rows[: self._senders]:
            self._vector_sum = row.clone() if self._vector_sum is None else self._vector_sum.add_(row)

    def _finish(self) -> None:
        if self._vector_sum is not None:
            parts = self._vector_sum.split([g.param.numel() for g in self._vectors])
            for gradient, part in zip(self._vectors, parts, strict=True):
                gradient.param.grad = part

    def norm(self) -> float:
        return sharded_grad_norm(self._matrices, [g.param for g in self._vectors], self._world)


def _zeros_for(gradient: Gradient) -> Tensor:
    return torch.zeros(gradient.param.shape, dtype=gradient.dtype, device=gradient.param.device)


def _cut_in(master: Master, world: World) -> Shard:
    cut = master.shard
    assert cut is not None and cut.world == world, "shard_model has not run for this world"
    return cut


@torch.no_grad()
def sharded_grad_norm(masters: Sequence[Master], vectors: Sequence[Tensor], world: World) -> float:
    """sqrt of the sum of squares of all gradients, in float64, in one order for any number of ranks. Collective.

    Matrices have sums over runs of 4096 elements within blocks of 128 rows, from each block's first element on; each
    rank makes those of its rows, and all ranks add all of them as `global_grad_norm` does.
    """
    cuts, matrices = [_cut_in(m, world) for m in masters], [m.param for m in masters]
    counts = [
        [_num_sums(cut.parts(r), p.shape[1]) for r in range(world.size)] for cut, p in zip(cuts, matrices, strict=True)
    ]
    totals = [sum(of_rank) for of_rank in zip(*counts, strict=True)]
    every = torch.zeros(sum(totals), dtype=torch.float64, device=(*matrices, *vectors)[0].device)
    own = every.split(totals)[world.rank].split([c[world.rank] for c in counts])
    for p, cut, out in zip(matrices, cuts, own, strict=True):
        if p.grad is not None:
            _squares(p.grad, cut.parts(world.rank), out)
    world.gather_rows(every, totals)
    by_rank = [part.split([c[r] for c in counts]) for r, part in enumerate(every.split(totals))]
    sums = [by_rank[r][i] for i in range(len(matrices)) for r in range(world.size)]
    for vector in vectors:
        assert vector.grad is not None
        sums.append(every.new_empty(-(-vector.numel() // ROW)))
        row_squares(vector.grad, sums[-1])
    return math.sqrt(float(fixed_order_sum(torch.cat(sums))))


def _runs(sections: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Rows that may be summed in one go: a section, if its blocks of 128 rows end where runs of 4096 elements end."""
    if BLOCK * width % ROW == 0:
        return sections
    return tuple(stop - start for start, stop in blocks_of(sections))


def _num_sums(sections: tuple[int, ...], width: int) -> int:
    return sum(-(-rows * width // ROW) for rows in _runs(sections, width))


def _squares(gradient: Tensor, sections: tuple[int, ...], out: Tensor) -> None:
    runs = _runs(sections, gradient.shape[1])
    counts = [-(-rows * gradient.shape[1] // ROW) for rows in runs]
    for part, sums in zip(gradient.split(runs), out.split(counts), strict=True):
        row_squares(part, sums)
