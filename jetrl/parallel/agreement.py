"""Ranks that must agree: refused before anything is computed if they differ, and one rank's mistake raised on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from jetrl.errors import UserError
from jetrl.parallel.progress import PROGRESS
from jetrl.parallel.world import World

T = TypeVar("T")


class GivenUp(BaseException):
    """A signal ended a rollout or an evaluation; the run's state is what it was before."""


MISTAKES: tuple[type[BaseException], ...] = (UserError, FloatingPointError, GivenUp)  # what `agree` carries to all


def same_everywhere(world: World, **values: object) -> None:
    """UserError on every rank, naming the ranks and what differs, if one of `values` is not the same everywhere.

    Values are compared as text; give digests of what is large. A collective.
    """
    found = world.gather({name: str(value) for name, value in values.items()})
    if all(one == found[0] for one in found):
        return
    lines = []
    for name in {name: None for one in found for name in one}:
        by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(found):
            by_value.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(by_value) > 1:
            parts = [f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items()]
            lines.append(f"{name} is {', '.join(parts)}")
    PROGRESS.common = True
    raise UserError(f"The ranks of this run differ: {'; '.join(lines)}. Start all of them from the same files.")


def agree(world: World, error: BaseException | None, named: bool = True) -> None:
    """All ranks raise if one of them has an `error`: the first such rank's, by its text. A collective.

    Errors are UserErrors, FloatingPointErrors (values that are no numbers), or GivenUp. Where all ranks met the same
    one, it is raised as it is; else its text says which rank's it is, if `named`.
    """
    if world.alone:
        if error is not None:
            raise error
        return
    kind = next((i for i, one in enumerate(MISTAKES) if isinstance(error, one)), None)
    assert error is None or kind is not None, f"agree() is for users' mistakes, not for {error!r}"
    found = world.gather(None if error is None else (kind, str(error)))
    failed = [rank for rank, one in enumerate(found) if one is not None]
    if not failed:
        return
    number, text = found[failed[0]]
    PROGRESS.common = MISTAKES[number] is not GivenUp  # which ends a phase, not the run
    everywhere = len(failed) == world.size and len(set(found)) == 1
    if everywhere and error is not None:
        raise error
    raise MISTAKES[number](text if everywhere or not named else f"rank {failed[0]}: {text}") from error


@contextmanager
def together(world: World) -> Iterator[None]:
    """What is done inside may fail on one rank by a user's mistake; then it fails on all, at the end (a collective).

    Collectives must not stand inside: ranks with a mistake would leave them out. Other errors pass at once and end the
    run (`parallel.launch`).
    """
    mistake: BaseException | None = None
    try:
        yield
    except MISTAKES as error:
        mistake = error
    agree(world, mistake)


def on_rank0(world: World, make: Callable[[], T]) -> T:
    """`make()` of rank 0, on every rank: for the disk, and for code of the user's that need not repeat itself.

    The others wait without a time limit. A mistake is raised on all. No collective may stand in `make`.
    """
    if world.alone:
        return make()
    made: T | None = None
    mistake: BaseException | None = None
    if world.first:
        try:
            made = make()
        except MISTAKES as error:
            mistake = error
    world.await_all()
    agree(world, mistake, named=False)
    return world.share(made)  # type: ignore[no-any-return]


def on_every_rank(world: World, make: Callable[[], T]) -> T:
    """`make()` on every rank, and on each machine by one first: what it downloads, the others find there.

    No rank has a time limit. A mistake is raised on all. No collective may stand in `make`.
    """
    if world.alone:
        return make()
    made: list[T] = []
    mistake: BaseException | None = None
    for leads in (True, False):
        if (world.local_rank == 0) is leads:
            try:
                made.append(make())
            except MISTAKES as error:
                mistake = error
        world.await_all()
    agree(world, mistake)
    return made[0]


def gather_from_ranks(world: World, make: Callable[[], T]) -> list[T]:
    """`make()` on every rank at once; what each has made, in rank order, on all of them.

    No rank has a time limit: for the disk. A mistake is raised on all. No collective may stand in `make`.
    """
    if world.alone:
        return [make()]
    made: T | None = None
    mistake: BaseException | None = None
    try:
        made = make()
    except MISTAKES as error:
        mistake = error
    world.await_all()
    agree(world, mistake)
    return world.gather(made)


def common(error: UserError) -> UserError:
    """`error`, which every rank is about to raise alike: it is reported as the run's, not as one rank's."""
    PROGRESS.common = True
    return error


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
