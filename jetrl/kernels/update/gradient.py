"""How the gradients of master weights are kept: in which type, and where backward passes add them up.

A matrix's gradient is added in place: to `param.grad`, or to a buffer of a sink, which has the whole matrix's shape
where the parameter itself is only a rank's rows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from jetrl.errors import UserError
from jetrl.kernels.dispatch import backend_of


def grad_dtype(master: Tensor) -> torch.dtype:
    """The type of `master.grad`: its own, unless `Gradient.accumulate_in` has set another."""
    return getattr(master, "grad_dtype", None) or master.dtype


class GradientSink(Protocol):
    """Takes the gradients of matrices during a backward pass."""

    def buffer(self, gradient: Gradient) -> Tensor:
        """Where to add this gradient: the whole matrix, contiguous, of type `gradient.dtype`."""
        ...

    def done(self, gradient: Gradient) -> None:
        """One source of this gradient has been added (see `Gradient.sources`)."""
        ...


@dataclass(slots=True, eq=False)
class Gradient:
    """The gradient of one master, the parameter `param`: backward passes add to it here, and the sum is `param.grad`.

    Until `accumulate_in` it is autograd that adds up, as for any parameter.
    """

    param: Tensor
    sources: int = 1  # how often a backward pass adds: twice for an embedding that is the lm_head too
    only_looked_up: bool = False  # a table of which nothing reads all rows
    in_place: bool = False
    sink: GradientSink | None = None
    _waits: bool = False  # `first_waits`
    _first: Tensor | None = None
    _rows: Tensor | None = None  # `rows_in_use`
    _row_sum: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type in which it is added up."""
        return grad_dtype(self.param)

    def accumulate_in(self, dtype: torch.dtype) -> None:
        """Keep `param.grad` in `dtype`, and let backward passes add a matrix's in place.

        With BF16 masters, FP32 gradients add up micro-batches without rounding to BF16. In place means that a matrix's
        gradient never passes through autograd: its hooks and `torch.autograd.grad` do not work for this parameter.
        """
        self.in_place = True
        if self.param.dtype == dtype:
            return
        if not hasattr(self.param, "grad_dtype"):
            raise UserError(f"train.grad_dtype = {dtype} needs a newer torch than {torch.__version__}: upgrade it")
        self.param.grad_dtype = dtype

    def add(self, into: Callable[[Tensor], object], alone: Callable[[], Tensor]) -> Tensor | None:
        """Add to the sum in place, by `into(sum)`; None then. Where autograd adds up, what it gets: `alone()`."""
        if (kept := self.place()) is None:
            return alone().to(self.dtype)
        into(kept)
        self.done()
        return None

    def place(self) -> Tensor | None:
        """What to add to: the sink's buffer, or `param.grad`, zeros if it did not exist. Call `done` afterwards.

        None where autograd is to add up.
        """
        if self.sink is not None:
            return self.sink.buffer(self)
        if not self.in_place:
            return None
        self._widen_first()
        if self.param.grad is None:
            self.param.grad = torch.zeros(self.param.shape, dtype=self.dtype, device=self.param.device)
        return self.param.grad

    def done(self) -> None:
        """A backward pass has added to what `place` gave."""
        if self.sink is not None:
            self.sink.done(self)

    def begins(self) -> bool:
        """Whether `place` would make zeros only to add to them: `begin` may take the gradient instead."""
        return self.in_place and self.sink is None and self.param.grad is None

    def begin(self, rounded: Tensor) -> None:
        """Take `rounded`, a gradient in BF16, where `begins`."""
        if self._first is not None:
            self.param.grad = backend_of(rounded).sum_of_two(self._first, rounded)
            self._first = None
        elif self._waits and self.dtype == torch.float32:
            self._first = rounded
        else:
            self.param.grad = rounded.to(self.dtype)

    def _widen_first(self) -> None:
        if self._first is not None:
            self.param.grad = self._first.to(self.dtype)
            self._first = None

    def rows(self, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        """What to add the gradients of the rows `tokens` [T] to, and the place of each in it; as `place`."""
        if self._rows is None:
            kept = self.place()
            return None if kept is None else (kept, tokens)
        table, rows = self.param, self._rows
        assert table.grad is None, "the whole gradient is made when all look-ups are done"
        if self._row_sum is None:
            self._row_sum = torch.zeros(len(rows), *table.shape[1:], dtype=self.dtype, device=table.device)
        place = torch.searchsorted(rows, tokens).clamp_(max=len(rows) - 1)
        torch._assert_async((rows[place] == tokens).all(), "a row was looked up that is not in use")  # type: ignore[call-overload]
        return self._row_sum, place


@contextmanager
def sent_to(sink: GradientSink, gradients: Iterable[Gradient]) -> Iterator[None]:
    """Within this block, backward passes give these gradients, of matrices, to `sink`."""
    held = list(gradients)
    for gradient in held:
        gradient.sink = sink
    try:
        yield
    finally:
        for gradient in held:
            gradient.sink = None


@contextmanager
def first_waits(gradients: Iterable[Gradient]) -> Iterator[None]:
    """Within this block, the first gradient of a matrix that is in BF16 anyway waits for the second.

    Both are then added in one pass: 8 bytes a weight in place of 6 to widen the first and 10 to add. What waits at the
    end is widened, so the bits are the same.
    """
    held = list(gradients)
    for gradient in held:
        gradient._first, gradient._waits = None, True  # no first one of an update that failed
    try:
        yield
    finally:
        for gradient in held:
            gradient._waits = False
            gradient._widen_first()


@contextmanager
def rows_in_use(gradient: Gradient, rows: Tensor) -> Iterator[None]:
    """Within this block, look-ups add to `rows` [U] of the gradient of a table [V, D] alone, which is kept as [U, D].

    `rows` are ascending and all that will be looked up: the tokens of an update are few of a large vocabulary. At the
    end `.grad` is the whole gradient, with zeros elsewhere, so the bits are the same.
    """
    gradient._row_sum, gradient._rows = None, rows  # no sum of an update that failed
    try:
        yield
    finally:
        kept, gradient._row_sum, gradient._rows = gradient._row_sum, None, None
        if kept is not None:
            table = gradient.param
            whole = torch.zeros(table.shape, dtype=kept.dtype, device=kept.device)
            whole[rows] = kept
            table.grad = whole
