"""A terminal that may go away while a run writes to it: that is no error of the run."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any


def forget_closed_terminal() -> None:
    """Where the terminal is gone, nothing is written to it any more: that would fail before a run is saved."""
    try:
        import termios
    except ImportError:  # not a Unix
        return
    for file in (1, 2):
        try:
            termios.tcgetattr(file)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), file)


class Lasting:
    """A file that outlives its terminal. A rank hears of that only after its launcher, and may write before."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with _without_terminal():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with _without_terminal():
            self._file.flush()


@contextmanager
def _without_terminal() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        forget_closed_terminal()
