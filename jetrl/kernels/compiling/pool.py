"""Kernels compiled by several processes at a time: one that finds what is needed, others that compile it.

The finder sends a `Job` for each kernel as soon as it knows of it; workers take jobs, those that take longest first.
What they compile lands in the compilers' caches on disk, where every later process finds it: a job returns nothing.
A job that fails, a worker that dies and a finder that fails are named in the `Outcome`, and the others go on.

The processes are new ones (`python -c`), not forks, which could not use the GPU, and not `multiprocessing`'s, which run
the user's script again. Each has a session of its own, so that Ctrl-C reaches only us, and we end them with everything
that they have started (nvcc). If we are killed they meet the end of their pipe and end too.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Protocol

_CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from jetrl.kernels.compiling.pool import child
child(int(sys.argv[1]))
"""
_TAIL = 300  # characters of a dead process's output that are shown


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel: `call` ("module:function") with `arguments` compiles it. Jobs of equal `key` are the same kernel.

    Those of a later `stage` begin when all earlier ones have ended; within a stage, those with more `seconds`
    (roughly) come first.
    """

    key: str
    name: str
    call: str
    arguments: tuple[Any, ...] = ()
    seconds: float = 1.0
    stage: int = 0


@dataclass(slots=True)
class Outcome:
    """What `compile_all` has done. `spent` adds up the seconds of all jobs by the first word of their names. `reached`:
    seconds from the start to the first and the last worker that was ready, the first job, the end of the search, and
    the first job of a later stage; what never came is not there."""

    found: int = 0
    done: int = 0  # of those found, failed ones included
    failures: list[tuple[str, str]] = field(default_factory=list)  # name of a job, or "the search", and why
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    reached: dict[str, float] = field(default_factory=dict)
    left: int = 0  # of those found, not done when the time was up or the last worker had died


class Watcher(Protocol):
    """Sees how far the work is."""

    def progress(self, done: int, found: int, now: Sequence[str]) -> None: ...


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    pipe: Connection
    output: Any  # a temporary file
    job: Job | None = None
    ready: bool = False

    def tail(self) -> str:
        """The end of what it has printed."""
        self.output.seek(0)
        return str(self.output.read()[-_TAIL:].decode(errors="replace")).strip()

    def end(self) -> None:
        """End it and what it has started."""
        self.pipe.close()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended
        self.process.wait()
        self.output.close()


def compile_all(
    find: str, arguments: tuple[Any, ...], *, workers: int,
    prepare: tuple[str, tuple[Any, ...]] | None = None, watcher: Watcher | None = None, limit: float = 240.0,
) -> Outcome:
    """Run the function `find` ("module:function", first argument a function that takes a `Job`) in one new process, and
    the jobs in `workers` others. Each of them first calls `prepare`, if that is given.

    After `limit` seconds what is left is left. Whatever ends this call (Ctrl-C) ends all processes.
    """
    start, outcome = time.monotonic(), Outcome()
    children: list[_Child] = []
    try:
        finder = _start("find", find, arguments)
        children.append(finder)
        for _ in range(workers):
            children.append(_start("work", *(prepare or ("", ()))))
        _Pool(children[1:], finder, outcome, watcher, start).run(start + limit)
    finally:
        for one in children:
            one.end()
    outcome.seconds = time.monotonic() - start
    return outcome


class _Pool:
    """Deals the finder's jobs to the workers until both are done."""

    def __init__(
        self, workers: list[_Child], finder: _Child, outcome: Outcome, watcher: Watcher | None, start: float
    ) -> None:
        self.workers, self.outcome, self.watcher, self.start = workers, outcome, watcher, start
        self.finder: _Child | None = finder
        self.waiting: list[Job] = []
        self.known: set[str] = set()

    def run(self, deadline: float) -> None:
        while self.workers and (self.finder is not None or self.waiting or any(w.job for w in self.workers)):
            left = deadline - time.monotonic()
            if left <= 0:
                self.outcome.left = len(self.waiting) + sum(w.job is not None for w in self.workers)
                break
            pipes = [w.pipe for w in self.workers] + ([self.finder.pipe] if self.finder is not None else [])
            for pipe in wait(pipes, timeout=min(left, 0.5)):
                self._hear(pipe)
            self._deal()
            if self.watcher is not None:
                now = [w.job.name for w in self.workers if w.job is not None]
                self.watcher.progress(self.outcome.done, self.outcome.found, now)
        if not self.workers:
            self.outcome.left = len(self.waiting)

    def _hear(self, pipe: Any) -> None:
        if self.finder is not None and pipe is self.finder.pipe:
            self._hear_finder(self.finder)
            return
        worker = next(w for w in self.workers if w.pipe is pipe)
        try:
            seconds, error = worker.pipe.recv()
        except (EOFError, OSError):
            self._lost(worker)
            return
        if worker.job is None:
            worker.ready = not error
            if not error:
                reached, now = self.outcome.reached, time.monotonic() - self.start
                reached |= {"first worker": reached.get("first worker", now), "last worker": now}
            else:
                self.outcome.failures.append(("a worker's start", error))
                self.workers.remove(worker)
            return
        self._ended(worker.job, seconds, error)
        worker.job = None

    def _hear_finder(self, finder: _Child) -> None:
        try:
            kind, value = finder.pipe.recv()
        except (EOFError, OSError):
            kind, value = "failed", f"its process ended early. {finder.tail()}".strip()
        if kind == "job":
            self._reach("first job")
            if value.key not in self.known:
                self.known.add(value.key)
                self.waiting.append(value)
                self.outcome.found += 1
            return
        if kind == "failed":
            self.outcome.failures.append(("the search", value))
        self._reach("end of the search")
        self.finder = None

    def _lost(self, worker: _Child) -> None:
        self.workers.remove(worker)
        code, output = worker.process.wait(), worker.tail()
        cause = f"its process ended early (status {code}). {output}".strip()
        if worker.job is not None:
            self._ended(worker.job, 0.0, cause)
        else:
            self.outcome.failures.append(("a worker's start", cause))

    def _ended(self, job: Job, seconds: float, error: str) -> None:
        self.outcome.done += 1
        kind = job.name.split()[0]
        self.outcome.spent[kind] = self.outcome.spent.get(kind, 0.0) + seconds
        if error:
            self.outcome.failures.append((job.name, error))

    def _deal(self) -> None:
        for worker in self.workers:
            if not worker.ready or worker.job is not None or not self.waiting:
                continue
            stage = min(job.stage for job in self.waiting)
            if stage and (self.finder is not None or any(w.job and w.job.stage < stage for w in self.workers)):
                return
            job = max((j for j in self.waiting if j.stage == stage), key=lambda j: j.seconds)
            try:
                worker.pipe.send(job)
            except OSError:
                continue  # it has died; `_hear` finds out
            self.waiting.remove(job)
            worker.job = job
            if stage:
                self._reach("later stage")

    def _reach(self, what: str) -> None:
        """Note when it was, the first time."""
        self.outcome.reached.setdefault(what, time.monotonic() - self.start)


def _start(role: str, call: str, arguments: tuple[Any, ...]) -> _Child:
    ours, theirs = Pipe()
    output = tempfile.TemporaryFile()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, str(theirs.fileno()), json.dumps(sys.path)], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )
    child = _Child(process, ours, output)
    try:
        ours.send((role, call, arguments))
    except OSError:
        pass  # it has died; its pipe tells
    return child


def child(descriptor: int) -> None:
    """The whole life of a finder or a worker: `descriptor` is its end of the pipe."""
    pipe = Connection(descriptor)
    role, call, arguments = pipe.recv()
    if role == "find":
        error = _attempted(lambda: function(call)(lambda job: pipe.send(("job", job)), *arguments))
        pipe.send(("failed" if error else "end", error))
        return
    os.nice(5)  # the finder, whom all wait for, comes first
    pipe.send((0.0, _attempted(lambda: function(call)(*arguments)) if call else ""))
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        start = time.monotonic()
        error = _attempted(partial(_run, job))
        pipe.send((time.monotonic() - start, error))


def _run(job: Job) -> None:
    function(job.call)(*job.arguments)


def _attempted(work: Callable[[], object]) -> str:
    """"", or why `work` failed: another process reports it."""
    try:
        work()
    except Exception as error:
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:_TAIL]}" if text else type(error).__name__
    return ""


def function(name: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


def processors() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def entries(folder: Path) -> int:
    """Files and folders at the top of a cache; 0 where it does not exist."""
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
