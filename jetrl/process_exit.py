"""The end of the program: Ctrl-C ends it wherever it is, and what the user's code has left does not keep it alive."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

INTERRUPTED = threading.Event()  # Ctrl-C has come before the run could say what becomes of it
_PATIENCE = 5.0  # seconds for what ends by itself, such as the idle threads of an executor
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the system for this signal when the process that started this one ends, however it does (0: no longer).
    Linux; elsewhere without effect."""
    if _LIBC is not None:
        _LIBC.prctl(_DEATH_SIGNAL, number)


@contextmanager
def ctrl_c_is_reported() -> Iterator[None]:
    """Around the program, until it sets a handler of its own: Ctrl-C says so, then raises KeyboardInterrupt.

    While a module loads, it ends the program at once, with status 130: an import may swallow any exception. (torch does
    so with numpy's, and then runs without it.) Ranks say nothing: they have one message for all (`parallel.launch`).
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as in the background of a script
        yield
        return
    owner, is_rank = os.getpid(), "RANK" in os.environ

    def interrupted(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:  # not a fork of it
            with suppress(OSError):  # past Python's buffers, which the interrupted code may be writing to
                os.write(2, b"" if is_rank else b"jetrl: interrupted.\n")
            INTERRUPTED.set()
            if _imports(frame):
                os._exit(130)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being loaded in this frame or one that called it."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


@contextmanager
def ends_in_time() -> Iterator[None]:
    """Around the program: what it leaves running gets some seconds and is named; the program ends with its status.

    Python itself would wait for such threads and processes for ever.
    """
    status = 1
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        if _left():
            threading.Thread(target=_watch, args=(status,), name="jetrl-end", daemon=True).start()


def _left() -> list[str]:
    """The names of live threads and child processes that Python would wait for when it exits."""
    own = (threading.main_thread(), threading.current_thread())
    left = [f"thread {t.name}" for t in threading.enumerate() if not t.daemon and t not in own]
    return left + [f"process {p.name}" for p in _processes()]


def _processes() -> list[Any]:
    """The live child processes of multiprocessing, which is not loaded if there are none."""
    module = sys.modules.get("multiprocessing")
    return [] if module is None else [p for p in module.active_children() if not p.daemon]


def _watch(status: int) -> None:
    threading.main_thread().join()  # returns as soon as Python begins to exit
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if not _left():
            return
    left = _left()
    print(
        f"jetrl: still running: {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}. Your code left this "
        f"behind; the program ends without waiting, with status {status}.", file=sys.stderr, flush=True,
    )
    sys.stdout.flush()
    for process in _processes():
        process.terminate()
    os._exit(status)
