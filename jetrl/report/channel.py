"""`Channel`: one tracker in a thread of its own, so that a tracker that fails, hangs or raises anything ends no run.

The run puts rows into a bounded queue and goes on. A row that a tracker refuses is tried again after some seconds, and
counts as lost after three attempts; after five lost rows in a row the tracker is given up. The user reads one line when
the trouble begins, and one at the end that says what the tracker lacks. `metrics.jsonl` has all rows in any case.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jetrl.errors import UserError


class Backend(Protocol):
    """One tracker that is open. Each call may raise anything and take any time."""

    kept: Mapping[str, str]  # what track.json holds: with it a resumed run goes on in the same place

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def samples(self, table: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def close(self, failed: bool) -> None: ...


@dataclass(frozen=True)
class Limits:
    """Seconds, and numbers of rows."""

    checking: float = 60.0  # before the model is loaded
    opening: float = 120.0
    silence: float = 60.0  # after which a call that has not returned is reported
    closing: float = 60.0  # for the rows that are left, and for closing
    rows: int = 1000  # that wait for the tracker
    pauses: tuple[float, ...] = (1.0, 5.0)  # before the second and third attempt at a row
    lost_in_a_row: int = 5  # after which the tracker is given up


def error_of(call: Callable[[], object]) -> BaseException | None:
    """What the call raised, whatever it is; None if it returned."""
    try:
        call()
    except BaseException as error:  # SystemExit too: a library's exit is not ours
        return error
    return None


def cause(error: BaseException) -> str:
    """An error as part of a sentence: its type, and the first line of its text without control characters."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = "".join(c for c in (lines[0] if lines else "") if c.isprintable()).strip().rstrip(".")
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def within(name: str, seconds: float, call: Callable[[], object]) -> None:
    """Call in a thread. UserError if it raises, with its text, or if it takes longer than that."""
    result: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: result.append(error_of(call)), name=f"jetrl-track-{name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        raise UserError(
            f"{name} (track.backends) has not answered in {seconds:g} s: can its server be reached? {_CURE}"
        )
    error = result[0]
    if isinstance(error, UserError):
        raise error
    if error is not None:
        raise UserError(f"{name} (track.backends) cannot be used: {cause(error)}. {_CURE}") from error


_CURE = "Install, log in or start what it needs, or remove it from track.backends."


class Channel:
    """A tracker that is never waited for. `tell` shows a line to the user; it is called by the run's thread only."""

    def __init__(
        self, name: str, opener: Callable[[], Backend], tell: Callable[[str], None], limits: Limits | None = None
    ) -> None:
        """Open the tracker; UserError if that fails or takes too long."""
        self.name, self._tell, self._limits = name, tell, limits or Limits()
        self._items: deque[tuple[int, Callable[[Backend], None]]] = deque()
        self._changed = threading.Condition()
        self._closing, self._done = threading.Event(), threading.Event()
        self._abandoned = self._failed = self._told = False
        self._since: float | None = None  # since when the call under way has not returned
        self._at = 0  # the step of that call
        self._lost: dict[int, None] = {}
        self._error: BaseException | None = None  # the first one
        self._in_a_row = 0
        opened: list[Backend] = []
        within(name, self._limits.opening, lambda: opened.append(opener()))
        self._backend = opened[0]
        self.kept = dict(self._backend.kept)
        threading.Thread(target=self._work, name=f"jetrl-track-{name}", daemon=True).start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a row. Returns at once and raises nothing."""
        row = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
        self._put(step, lambda backend: backend.log(step, row))

    def samples(self, table: str, step: int, rows: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Send a table of samples; `rows` makes its rows, in the tracker's thread."""
        self._put(step, lambda backend: backend.samples(table, step, rows()))

    def close(self, failed: bool = False) -> None:
        """Send what waits, close the tracker (as a failed run if so), and say what it lacks. Takes bounded time."""
        if self._closing.is_set():
            return
        self._failed = failed
        self._closing.set()
        with self._changed:
            self._changed.notify()
        if not self._done.wait(min(2.0, self._limits.closing)):
            self._tell(f"waiting for {self.name} to take the last rows, at most {self._limits.closing:g} s")
            self._done.wait(max(self._limits.closing - 2.0, 0.0))
        with self._changed:
            self._abandoned = True
            if self._since is not None:
                self._lost[self._at] = None
            self._lost.update((step, None) for step, _ in self._items)
            self._items.clear()
        why = f" ({cause(self._error)})" if self._error is not None else ""
        if self._lost:
            lacks = _steps(sorted(self._lost))
            self._tell(f"{self.name} lacks {lacks}{why}. metrics.jsonl and samples.jsonl have all.")
        elif not self._done.is_set() or self._error is not None:
            self._tell(f"{self.name} has all rows, but could not be closed{why or ' in time'}.")

    def _put(self, step: int, call: Callable[[Backend], None]) -> None:
        with self._changed:
            if self._gave_up or len(self._items) >= self._limits.rows:
                self._lost[step] = None
            else:
                self._items.append((step, call))
                self._changed.notify()
            since = self._since
        silent = since is not None and time.monotonic() - since > self._limits.silence
        if not self._told and (self._lost or silent):
            self._told = True
            what = f"fails since step {min(self._lost)}" if self._lost else f"has not answered since step {self._at}"
            why = f" ({cause(self._error)})" if self._error is not None else ""
            self._tell(
                f"{self.name} {what}{why}. The run continues, and metrics.jsonl has every row; {self.name} gets the "
                f"rows that it takes, and is abandoned after {self._limits.lost_in_a_row} failures in a row. "
                "This warning is shown once."
            )

    @property
    def _gave_up(self) -> bool:
        return self._in_a_row >= self._limits.lost_in_a_row

    def _work(self) -> None:
        """The tracker's thread: rows as they come, then the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closing.is_set())
                if self._abandoned or not self._items:
                    break
                (self._at, call), self._since = self._items.popleft(), time.monotonic()
            error = self._error_of_sending(call)
            with self._changed:
                self._since = None
                if error is not None and not self._abandoned:
                    self._lost[self._at] = None
                    self._in_a_row += 1
                    if self._gave_up:
                        self._lost.update((step, None) for step, _ in self._items)
                        self._items.clear()
                else:
                    self._in_a_row = 0
        if not self._abandoned:
            error = error_of(lambda: self._backend.close(self._failed))
            self._error = self._error or error
        self._done.set()

    def _error_of_sending(self, call: Callable[[Backend], None]) -> BaseException | None:
        """What the last of three attempts raised; None if one succeeded."""
        for pause in (*self._limits.pauses, None):
            error = error_of(lambda: call(self._backend))
            if error is None or self._abandoned:
                return None
            last = error
            if pause is not None:
                self._closing.wait(pause)
        self._error = self._error or last
        return last


def _steps(steps: Sequence[int]) -> str:
    """`step 3`, or `5 steps (1, 2, 3, 4, ...)`."""
    if len(steps) == 1:
        return f"the rows of step {steps[0]}"
    shown = ", ".join(map(str, steps[:4])) + (", ..." if len(steps) > 4 else "")
    return f"the rows of {len(steps)} steps ({shown})"
