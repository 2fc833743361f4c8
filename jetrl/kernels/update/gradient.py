"""How the gradients of master weights are kept: in which type, and where backward passes add them up.

A matrix's gradient is added in place: to `master.grad`, or to a buffer of the master's sink, which has the whole
matrix's shape where the master itself is only a rank's rows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from jetrl.errors import UserError
from jetrl.kernels.dispatch import backend_of


def grad_dtype(master: Tensor) -> torch.dtype:
    """The type of `master.grad`: its own, unless `accumulate_in` has set another."""
    return getattr(master, "grad_dtype", None) or master.dtype


def accumulate_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Keep all parameters' gradients in `dtype`; backward passes add those of matrices to `.grad` in place.

    With BF16 masters, FP32 gradients add up micro-batches without rounding to BF16. In place means that a matrix's
    gradient never passes through autograd, so its hooks and `torch.autograd.grad` do not work for these parameters.
    """
    for param in module.parameters():
        param.adds_in_place = True  # type: ignore[attr-defined]
        if param.dtype == dtype:
            continue
        if not hasattr(param, "grad_dtype"):
            raise UserError(f"train.grad_dtype = {dtype} needs a newer torch than {torch.__version__}: upgrade it")
        param.grad_dtype = dtype


class GradientSink(Protocol):
    """Takes the gradients of matrices during a backward pass."""

    def buffer(self, master: Tensor) -> Tensor:
        """Where to add this master's gradient: the whole matrix, contiguous, `grad_dtype(master)`."""
        ...

    def done(self, master: Tensor) -> None:
        """One source of this master's gradient has been added (see `num_sources`)."""
        ...


@contextmanager
def sent_to(sink: GradientSink, masters: Iterable[Tensor]) -> Iterator[None]:
    """Within this block, backward passes give the gradients of these matrices to `sink`."""
    held = list(masters)
    for master in held:
        master.sink = sink  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for master in held:
            del master.sink  # type: ignore[attr-defined]


def num_sources(master: Tensor) -> int:
    """How often a backward pass adds to this gradient: twice for an embedding that is the lm_head too."""
    return getattr(master, "num_sources", 1)


def grad_done(master: Tensor) -> None:
    """A backward pass has added to what `grad_in_place` gave."""
    if (sink := getattr(master, "sink", None)) is not None:
        sink.done(master)


@contextmanager
def first_waits(masters: Iterable[Tensor]) -> Iterator[None]:
    """Within this block, the first gradient of a matrix that is in BF16 anyway waits so for the second.

    Both are then added in one pass: 8 bytes a weight in place of 6 to widen the first and 10 to add. What waits at the
    end is widened, so the bits are the same.
    """
    held = list(masters)
    for master in held:
        master.__dict__.pop("first_gradient", None)  # of an update that failed
        master.first_waits = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for master in held:
            del master.first_waits  # type: ignore[attr-defined]
            if (first := master.__dict__.pop("first_gradient", None)) is not None:
                master.grad = first.to(grad_dtype(master))


@contextmanager
def rows_in_use(table: Tensor, rows: Tensor) -> Iterator[None]:
    """Within this block, look-ups add to `rows` [U] of the gradient of `table` [V, D] alone, which is kept as [U, D].

    `rows` are ascending and all that will be looked up: the tokens of an update are few of a large vocabulary. At the
    end `.grad` is the whole gradient, with zeros elsewhere, so the bits are the same.
    """
    table.__dict__.pop("row_gradient", None)  # of an update that failed
    table.rows_in_use = rows  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del table.rows_in_use  # type: ignore[attr-defined]
        if (kept := table.__dict__.pop("row_gradient", None)) is not None:
            whole = torch.zeros(table.shape, dtype=kept.dtype, device=kept.device)
            whole[rows] = kept
            table.grad = whole


def rows_in_place(table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
    """What to add the gradients of the rows `tokens` [T] to, and the place of each in it; as `grad_in_place`."""
    rows = getattr(table, "rows_in_use", None)
    if rows is None:
        grad = grad_in_place(table)
        return None if grad is None else (grad, tokens)
    assert table.grad is None, "the whole gradient is made when all look-ups are done"
    if (kept := table.__dict__.get("row_gradient")) is None:
        kept = torch.zeros(len(rows), *table.shape[1:], dtype=grad_dtype(table), device=table.device)
        table.row_gradient = kept  # type: ignore[attr-defined]
    place = torch.searchsorted(rows, tokens).clamp_(max=len(rows) - 1)
    torch._assert_async((rows[place] == tokens).all(), "a row was looked up that is not in use")  # type: ignore[call-overload]
    return kept, place


def begin_in_place(master: Tensor, rounded: Tensor) -> None:
    """Take `rounded`, a gradient in BF16, where `begins_in_place`."""
    if (first := master.__dict__.pop("first_gradient", None)) is not None:
        master.grad = backend_of(rounded).sum_of_two(first, rounded)
    elif getattr(master, "first_waits", False) and grad_dtype(master) == torch.float32:
        master.first_gradient = rounded  # type: ignore[attr-defined]
    else:
        master.grad = rounded.to(grad_dtype(master))


def begins_in_place(master: Tensor) -> bool:
    """Whether `grad_in_place` would add to zeros that it makes for this: `begin_in_place` may take it instead."""
    in_place = getattr(master, "adds_in_place", False) and getattr(master, "sink", None) is None
    return bool(in_place) and master.grad is None


def grad_in_place(master: Tensor) -> Tensor | None:
    """What to add the gradient to: the sink's buffer, or `master.grad`, zeros if it did not exist.

    None where autograd is to accumulate it. Call `grad_done` afterwards.
    """
    if (sink := getattr(master, "sink", None)) is not None:
        return sink.buffer(master)
    if not getattr(master, "adds_in_place", False):
        return None
    if (first := master.__dict__.pop("first_gradient", None)) is not None:
        master.grad = first.to(grad_dtype(master))
    if master.grad is None:
        master.grad = torch.zeros(master.shape, dtype=grad_dtype(master), device=master.device)
    return master.grad
