"""A limit of time for Python code that is not jetrl's, in any thread: `time_limit`.

One thread watches all that run under a limit, so that a use costs a microsecond. It raises `TooSlow` in the thread that
is late, at its next step of Python: loops end so, a single call of C code (a huge multiplication) does not.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PERIOD = 0.5  # seconds between two looks
_raise_in = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)  # (thread, exception)
)


class TooSlow(Exception):
    """Code took longer than its limit."""


class _Over(Exception):
    """Takes the place of a `TooSlow` that was not raised yet."""


class _Watch:
    """Deadlines by thread, and the thread that looks at them, from the first use on."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.deadlines: dict[int, float] = {}
        self.thread: threading.Thread | None = None

    def begin(self, thread: int, seconds: float) -> None:
        with self.lock:
            self.deadlines[thread] = time.monotonic() + seconds
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self.look, name="jetrl-time-limit", daemon=True)
                self.thread.start()

    def end(self, thread: int) -> None:
        with self.lock:
            if self.deadlines.pop(thread, None) is None:  # it was late: what was not raised yet must not come later
                _settle(thread)

    def look(self) -> None:
        while True:
            time.sleep(_PERIOD)
            with self.lock:
                now = time.monotonic()
                for thread in [thread for thread, deadline in self.deadlines.items() if deadline < now]:
                    del self.deadlines[thread]
                    _raise_in(thread, TooSlow)


def _settle(thread: int) -> None:
    """Leave nothing to be raised in this thread, the caller's. To set NULL would leave the interpreter's mark that
    something is to be raised in some thread: all Python is slower then, and Python 3.11 hangs under a profiler, a
    debugger or coverage. Raising something, and catching it, takes the mark away."""
    try:
        _raise_in(thread, _Over)
        while True:  # it comes at the next jump
            pass
    except _Over:
        pass


_WATCH = _Watch()
if hasattr(os, "register_at_fork"):  # a forked process has neither the thread nor, perhaps, a free lock
    os.register_at_fork(after_in_child=lambda: _WATCH.__init__())  # type: ignore[misc]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Inside it, code that takes longer ends with `TooSlow`. Not to be nested in one thread."""
    thread = threading.get_ident()
    _WATCH.begin(thread, seconds)
    try:
        yield
    finally:
        _WATCH.end(thread)
