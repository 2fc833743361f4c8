"""Runs side by side: each is a process of its own (`jetrl train`), in one of N slots with its threads and its GPU.

The processes have a session of their own, so that Ctrl-C reaches only the study, which asks them to stop: SIGTERM gives
up a rollout and saves the steps before. A second Ctrl-C kills them; the next call goes on from their last checkpoints.
Should the study itself be killed, its processes get SIGTERM too (Linux).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from jetrl.errors import OutOfMemory
from jetrl.process_exit import end_with_parent

_POLL = 0.2


@dataclass(frozen=True, slots=True)
class Job:
    """A command whose output goes to `log`. It waits until all jobs named in `after` have succeeded."""

    name: str
    arguments: tuple[str, ...]  # of jetrl
    log: Path
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended. `status` None: it never began, because it was stopped or a job before it failed. `again`: it ran
    out of GPU memory next to others, and will run again."""

    job: Job
    status: int | None
    asked: bool  # whether it was asked to stop
    seconds: float = 0.0
    again: bool = False


@dataclass(slots=True)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    slot: int
    start: float
    asked: bool = False
    shared: bool = False  # whether there was ever another one on its GPU


@dataclass(slots=True)
class Halt:
    """Whether the study was asked to stop: by a signal, or because its time is over."""

    deadline: float | None = None  # of time.monotonic
    signals: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def asked(self) -> bool:
        return self.signals > 0 or (self.deadline is not None and time.monotonic() >= self.deadline)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Counts SIGINT and SIGTERM instead of ending the program."""

        def count(number: int, frame: FrameType | None) -> None:
            self.signals += 1

        before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def share_of_cores(count: int) -> int:
    """The threads of each of `count` runs side by side."""
    return max(1, (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1) // count)


def environments(count: int, threads: int, gpus: Sequence[str]) -> list[dict[str, str]]:
    """The variables of each slot: its threads, and one of the GPUs in turn (none: as they are)."""
    slots = []
    for slot in range(count):
        own = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        slots.append({**os.environ, **own})
    return slots


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def run_jobs(
    jobs: Sequence[Job], slots: Sequence[dict[str, str]], halt: Halt, on_end: Callable[[Ended], None],
    on_poll: Callable[[Sequence[str], Sequence[str]], None], held: Sequence[int] = (),
) -> None:
    """Run all jobs, at most one in a slot. One that fails does not stop the others; one that runs out of GPU memory and
    was not alone there runs again at the end, alone. `on_poll(names that run, names that wait)`. The processes keep the
    descriptors `held` open."""
    waiting, again, running = list(jobs), list[Job](), list[_Running]()
    succeeded, over = set[str](), set[str]()
    try:
        while running or ((waiting or again) and not halt.asked):
            for one in [r for r in running if r.process.poll() is not None]:
                running.remove(one)
                end = Ended(one.job, one.process.returncode, one.asked, time.monotonic() - one.start)
                if end.status == OutOfMemory.status and one.shared and not one.asked:
                    again.append(one.job)
                    on_end(replace(end, again=True))
                    continue
                over.add(one.job.name)
                if end.status == 0:
                    succeeded.add(one.job.name)
                on_end(end)
            if halt.asked:
                _ask(running, halt.signals > 1)
            else:
                _start(waiting, running, slots, succeeded, over, on_end, held)
                _start_again(again, running, slots, held)
            gpus = [_gpu(slots, one.slot) for one in running]
            for one, gpu in zip(running, gpus, strict=True):
                one.shared |= gpus.count(gpu) > 1
            on_poll([one.job.name for one in running], [job.name for job in (*waiting, *again)])
            if running:
                time.sleep(_POLL)
    finally:  # an error here leaves no process behind
        _ask(running, kill=True)
    for job in (*waiting, *again):
        on_end(Ended(job, None, True))


def _gpu(slots: Sequence[dict[str, str]], slot: int) -> str | None:
    return slots[slot].get("CUDA_VISIBLE_DEVICES")


def _start(
    waiting: list[Job], running: list[_Running], slots: Sequence[dict[str, str]], succeeded: set[str], over: set[str],
    on_end: Callable[[Ended], None], held: Sequence[int],
) -> None:
    """Fill the free slots with jobs that need not wait; jobs that wait for a failed one will never run."""
    for job in [j for j in waiting if any(name in over - succeeded for name in j.after)]:
        waiting.remove(job)
        over.add(job.name)
        on_end(Ended(job, None, False))
    free = [slot for slot in range(len(slots)) if slot not in {one.slot for one in running}]
    for job in [j for j in waiting if all(name in succeeded for name in j.after)][: len(free)]:
        waiting.remove(job)
        running.append(_begun(job, free.pop(0), slots, held))


def _start_again(
    again: list[Job], running: list[_Running], slots: Sequence[dict[str, str]], held: Sequence[int]
) -> None:
    """Start what ran out of memory, one on each GPU that is idle, which it is once no other job can start."""
    for slot in range(len(slots)):
        if again and _gpu(slots, slot) not in {_gpu(slots, one.slot) for one in running}:
            running.append(_begun(again.pop(0), slot, slots, held))


def _begun(job: Job, slot: int, slots: Sequence[dict[str, str]], held: Sequence[int]) -> _Running:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jetrl", *job.arguments], stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, env=slots[slot], start_new_session=True, preexec_fn=end_with_parent,
            pass_fds=held,
        )
    return _Running(job, process, slot, time.monotonic())


def _ask(running: Sequence[_Running], kill: bool) -> None:
    """Ask each process once to stop, or kill it with all that it started."""
    for one in running:
        if kill:
            with suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
            one.asked = True
        elif not one.asked:
            one.process.terminate()
            one.asked = True


def newest_step(log: Path) -> str:
    """The newest "step/steps" in a warm start's output, as `report.console` writes it; empty before the first."""
    newest = _text(log).rpartition(" warm start: ")[2]  # earlier ones were given up
    found = re.findall(r"^step +(\d+/\d+)\b", newest, re.MULTILINE)
    return found[-1] if found else ""


def tail(log: Path, lines: int = 6) -> str:
    """The end of a job's output."""
    return "\n".join(_text(log).strip().splitlines()[-lines:])


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
