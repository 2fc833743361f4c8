"""Ranks that must agree: refused before anything is computed if they differ, and one rank's mistake raised on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jetrl.errors import UserError
from jetrl.parallel.calls import PROGRESS
from jetrl.parallel.world import World

MISTAKES: tuple[type[Exception], ...] = (UserError, FloatingPointError)  # what `agree` carries to all ranks


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


def agree(world: World, error: Exception | None) -> None:
    """All ranks raise if one of them has an `error`: the first such rank's, by its text. A collective.

    Errors are UserErrors, or FloatingPointErrors (values that are no numbers). Where several ranks met the same one, it
    is raised as it is; else its text says which rank's it is.
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
    PROGRESS.common = True
    everywhere = len(failed) == world.size and len(set(found)) == 1
    if everywhere and error is not None:
        raise error
    raise MISTAKES[number](text if everywhere else f"rank {failed[0]}: {text}") from error


@contextmanager
def together(world: World) -> Iterator[None]:
    """What is done inside may fail on one rank by a user's mistake; then it fails on all, at the end (a collective).

    Collectives must not stand inside: ranks with a mistake would leave them out. Other errors pass at once and end the
    run (`parallel.launch`).
    """
    mistake: Exception | None = None
    try:
        yield
    except MISTAKES as error:
        mistake = error
    agree(world, mistake)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
