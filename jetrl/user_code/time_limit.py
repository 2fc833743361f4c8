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
_NAME = "PyThreadState_SetAsyncExc"  # (thread, exception or NULL)
_raise_in = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)((_NAME, ctypes.pythonapi))
_clear_in = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)((_NAME, ctypes.pythonapi))


class TooSlow(Exception):
    """Code took longer than its limit."""


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
                _clear_in(thread, None)

    def look(self) -> None:
        while True:
            time.sleep(_PERIOD)
            with self.lock:
                now = time.monotonic()
                for thread in [thread for thread, deadline in self.deadlines.items() if deadline < now]:
                    del self.deadlines[thread]
                    _raise_in(thread, TooSlow)


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
