"""`Finding`: one line of what the doctor says; and how a call that may fail in any way becomes one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

Level = Literal["ok", "note", "bad"]  # bad: must be fixed to train; note: good to know, or optional
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what to do if that is a problem."""

    section: str
    what: str
    found: str
    level: Level = "ok"
    cure: str | None = None


def attempted(call: Callable[[], T]) -> T | str:
    """The result of a call, or its error as text in one line.

    The one place where any exception counts as an answer: a broken library fails at its import with whatever its
    first lines happen to raise (ImportError, OSError for a shared object, AssertionError), compilers have their own
    classes, and reporting that is what the doctor is for.
    """
    try:
        return call()
    except Exception as error:
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text}" if text else type(error).__name__


def size(num_bytes: float) -> str:
    """`1.5 GiB`, `12 MiB`."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
