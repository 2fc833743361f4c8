"""The phase in which kernels are compiled, shown: one line that changes on a terminal, a few lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.status import Status

from jetrl.report.console import Output
from jetrl.untrusted import printable


class Compiling:
    """Shows how many of the kernels found so far are compiled. Use as a context manager."""

    def __init__(
        self, workers: int, *, console: Console | None = None, interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workers, self.console = workers, console or Output()
        self._interval, self._clock = interval, clock
        self._started = self._told = clock()
        self._done = self._found = 0
        self._status: Status | None = None

    def __enter__(self) -> Compiling:
        many = "1 process" if self.workers == 1 else f"{self.workers} processes"
        self._line(f"compiling kernels in {many}, kept on disk for the next run")
        if self.console.is_terminal:
            self._status = Status("compiling kernels", console=self.console)
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
        state = "compiled" if kind is None else "interrupted:"
        seconds = self._clock() - self._started
        self._line(f"{state} {self._done} of {self._found} kernels in {seconds:.0f} s")

    def progress(self, done: int, found: int, now: Sequence[str]) -> None:
        """`done` of the `found` kernels are compiled; `now` names those under way."""
        self._done, self._found = done, found
        at = self._clock()
        text = f"compiling kernels: {done} of {found}"
        if self._status is not None:
            names = ", ".join(dict.fromkeys(name.split()[0] for name in now))
            self._status.update(f"{text}  {at - self._started:.0f} s  {names}")
        elif at - self._told >= self._interval:
            self._told = at
            self._line(f"  {text}")

    def message(self, text: str) -> None:
        """A line for the user."""
        self._line(text)

    def _line(self, text: str) -> None:
        self.console.out(printable(text), highlight=False)
        self.console.file.flush()
