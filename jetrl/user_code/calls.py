"""Calls of the user's code in the background, each with a time limit.

Plain functions run in daemon threads, coroutines on one event loop in another. A call that is late is abandoned:
nothing waits for it any more, its thread ends whenever it returns, and another takes its place. Nothing in this module
keeps a finished program alive.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from jetrl.errors import told
from jetrl.user_code.guard import OUR_THREADS

_PATIENCE = 0.5  # seconds in which a healthy event loop answers


class Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.blocked = False  # a coroutine holds it up: it gets no further work
        self.events = asyncio.new_event_loop()
        self.ending = False
        threading.Thread(target=self._run, name=f"{OUR_THREADS}-loop", daemon=True).start()

    def _run(self) -> None:
        """Until `end`. asyncio leaves the loop if the user's own task calls `sys.exit`; that must end no other."""
        while not self.ending:
            with suppress(SystemExit, KeyboardInterrupt):
                self.events.run_forever()

    def answers(self) -> bool:
        """Whether it makes progress; not while a coroutine blocks it."""
        beat = threading.Event()
        self.events.call_soon_threadsafe(beat.set)
        return beat.wait(_PATIENCE)

    def end(self) -> None:
        """Cancel what still runs on it, and stop. Returns at once."""

        def cancel() -> None:
            for task in asyncio.all_tasks(self.events):
                task.cancel()
            self.ending = True
            self.events.call_soon(self.events.stop)  # after the cancelled tasks' last turn

        self.events.call_soon_threadsafe(cancel)


@dataclass(slots=True, eq=False)
class Call:
    """A function, or with `loop` a coroutine function, and what came of it: `value`, or `error`, or it was `late`.

    As a context manager it takes the time and keeps any exception of the user's code as a value.
    """

    run: Callable[[], Any]
    time_limit: float
    loop: Loop | None = None
    future: Future[None] | None = None  # of a coroutine: what cancels it
    value: Any = None
    error: BaseException | None = None
    started: float | None = None
    ended: float | None = None
    written_off: bool = False
    blocking: bool = False  # it was abandoned while its loop did not answer

    def __enter__(self) -> None:
        self.started = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error, self.ended = error, time.monotonic()
        return True

    @property
    def late(self) -> bool:
        """Whether it took longer than its limit, even if it has ended since."""
        if self.written_off or self.started is None:
            return self.written_off
        return (time.monotonic() if self.ended is None else self.ended) - self.started > self.time_limit

    def describe_error(self, called: Any = None) -> str:
        """The exception with the user's line that raised it, or that of `called` if it could not be called."""
        assert self.error is not None
        return told(self.error, called)


class Background:
    """Runs at most `max_concurrent` calls at the same time; the others wait in order."""

    def __init__(self, max_concurrent: int) -> None:
        self.max_concurrent = max_concurrent
        self._lock = threading.Condition()  # of all that follows; notified when a call ends
        self._waiting: deque[Call] = deque()
        self._running: set[Call] = set()
        self._idle: list[_Worker] = []
        self._over: deque[Call] = deque()
        self._loop: Loop | None = None

    def loop(self) -> Loop:
        """The event loop for new conversations."""
        if self._loop is None:
            self._loop = Loop()
        return self._loop

    def submit(self, call: Call) -> None:
        """Run it as soon as there is room. Returns at once."""
        with self._lock:
            self._waiting.append(call)
            self._fill()

    def collect(self) -> list[Call]:
        """The calls that have ended or become late since the last time."""
        with self._lock:
            over = [*self._over]
            self._over.clear()
        return over + self._write_off()

    def wait(self, longest: float) -> None:
        """Wait until a call has ended or a running one is late, but at most `longest` seconds."""
        with self._lock:
            deadlines = [c.started + c.time_limit for c in self._running if c.started is not None]
            patience = min([longest, *(d - time.monotonic() for d in deadlines)])
            self._lock.wait_for(lambda: self._over, timeout=max(0.0, patience) + 1e-3)

    def stop(self) -> None:
        """End the threads that wait for work."""
        with self._lock:
            for worker in self._idle:
                worker.inbox.put(None)
            self._idle.clear()
        if self._loop is not None:
            self._loop.end()
            self._loop = None

    def _fill(self) -> None:
        """Start waiting calls while there is room. The caller holds the lock."""
        while self._waiting and len(self._running) < self.max_concurrent:
            call = self._waiting.popleft()
            self._running.add(call)
            if call.loop is not None:
                self._begin_coroutine(call, call.loop)
                continue
            worker = self._idle.pop() if self._idle else _Worker(self)
            worker.inbox.put(call)

    def _begin_coroutine(self, call: Call, loop: Loop) -> None:
        """Start it on its conversation's loop, or another if that one is blocked. The caller holds the lock."""
        call.loop = self.loop() if loop.blocked else loop
        call.future = asyncio.run_coroutine_threadsafe(self._run_coroutine(call, call.loop), call.loop.events)

    async def _run_coroutine(self, call: Call, loop: Loop) -> None:
        with self._lock:
            if call.loop is not loop:  # it waited on a blocked loop, and runs on another now
                return
            call.started = time.monotonic()
        with call:
            call.value = await call.run()
        self.finish(call, None)

    def finish(self, call: Call, worker: _Worker | None) -> bool:
        """A call has ended, in the worker's thread. False: it was abandoned, and so is the worker."""
        with self._lock:
            if call.written_off:
                return False
            self._running.remove(call)
            if worker is not None:
                self._idle.append(worker)
            self._fill()
            self._over.append(call)
            self._lock.notify_all()
        return True

    def _write_off(self) -> list[Call]:
        with self._lock:
            late = [c for c in self._running if c.ended is None and c.late]
            for call in late:
                call.written_off = True
                self._running.remove(call)
                if call.future is not None:
                    call.future.cancel()
            self._fill()
        for loop in {call.loop for call in late if call.loop is not None and not call.loop.blocked}:
            if not loop.answers():
                self._leave(loop)
        for call in late:
            call.blocking = call.loop is not None and call.loop.blocked
        return late

    def _leave(self, loop: Loop) -> None:
        """A coroutine blocks this loop: calls that have not begun there run on another."""
        with self._lock:
            loop.blocked = True
            if self._loop is loop:
                self._loop = None
            for call in [c for c in self._running if c.loop is loop and c.started is None]:
                if call.future is not None:
                    call.future.cancel()
                self._begin_coroutine(call, loop)


class _Worker(threading.Thread):
    """A daemon thread that runs one call at a time."""

    def __init__(self, background: Background) -> None:
        super().__init__(name=OUR_THREADS, daemon=True)
        self.background = background
        self.inbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        """Run until `stop`, or until a call of this thread was abandoned."""
        while (call := self.inbox.get()) is not None:
            with call:
                call.value = call.run()
            if not self.background.finish(call, self):
                return
            call = None
