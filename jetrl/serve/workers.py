"""`serve_workers`: one front over several engines, each in a process of its own with a whole copy of the weights.

The process that starts them computes nothing: it waits until each has its model, starts the front with a pipe to each,
and then tells of what has ended. A worker serves until its pipe to the front or its line to this process is closed, so
none is left behind, however this process ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from jetrl.engine.engine import PagedEngine
from jetrl.errors import OutOfMemory, UserError, of_system
from jetrl.model.weights import checksum
from jetrl.serve.address import FrontSettings
from jetrl.serve.engine_side import serve_engine
from jetrl.serve.server import front_ended, front_process
from jetrl.serve.service import About

_PATIENCE = 8.0  # seconds until a worker that does not end is ended
_PERIOD = 0.5  # seconds between two looks at `stop`
Build = Callable[[], tuple[PagedEngine, About, str]]  # an engine, what clients are told, the formats in words


@dataclass(frozen=True, slots=True)
class Worker:
    """A process with an engine. `front`: the front's end of the pipe to it; `line`: what it tells of its start, and
    while this end is open it serves."""

    number: int
    process: Any  # multiprocessing's
    front: Connection
    line: Connection

    def __str__(self) -> str:
        return f"Worker {self.number} (process {self.process.pid})"


@dataclass(frozen=True, slots=True)
class _Ready:
    about: About
    formats: str
    checksum: str  # of the published weights


def require_gpus(count: int, device: str) -> bool:
    """Whether workers compute on GPUs, one each; UserError where there are fewer than `count`."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return False
    if count > (there := torch.cuda.device_count()):
        raise UserError(
            f"--nproc {count}: {there} GPU{'s are' if there > 1 else ' is'} visible here, and each worker needs one of "
            f"its own. Set --nproc to at most {there}, or show more GPUs by CUDA_VISIBLE_DEVICES."
        )
    return True


@contextmanager
def running_workers(build: Build, count: int, gpus: bool) -> Iterator[list[Worker]]:
    """Processes that call `build`, each with its part of the cores; with `gpus`, number i has GPU i. They end with the
    block, or when their lines are closed."""
    context = multiprocessing.get_context("spawn")
    workers: list[Worker] = []
    try:
        for number in range(count):
            (front, pipe), (line, its) = context.Pipe(), context.Pipe()
            process = context.Process(
                target=_work, args=(number, count, pipe, its, build, gpus), name=f"jetrl-serve-{number}"
            )
            process.start()
            workers.append(Worker(number, process, front, line))
            pipe.close()  # the process has them
            its.close()
        yield workers
    finally:
        _let_go(workers)
        deadline = time.monotonic() + _PATIENCE
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        for worker in workers:
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.front.close()


def start_of(workers: Sequence[Worker]) -> tuple[About, str]:
    """Waits until all have their models; what clients are told, and the formats. UserError where one cannot serve, or
    where two would give other answers."""
    try:
        found = _all_ready(workers)
    except BaseException:
        for worker in workers:  # they load, and look at nothing else
            worker.process.terminate()
        raise
    first = found[0]
    for number, other in sorted(found.items()):
        for what, one, two in (
            ("compute different flows", other.about.flow_digest, first.about.flow_digest),
            ("have different weights", other.checksum, first.checksum),
        ):
            if one != two:
                raise UserError(
                    f"Workers 0 and {number} {what} ({two} and {one}), so answers would depend on who gives them. "
                    "Choose GPUs of one kind with CUDA_VISIBLE_DEVICES, and see that nobody writes to the model's "
                    "folder."
                )
    return first.about, first.formats


def _all_ready(workers: Sequence[Worker]) -> dict[int, _Ready]:
    found: dict[int, _Ready] = {}
    while len(found) < len(workers):
        left = {worker.line: worker for worker in workers if worker.number not in found}
        for line in wait(list(left)):
            worker = left[line]  # type: ignore[index]  # what `wait` was given
            try:
                said = worker.line.recv()
            except EOFError:
                worker.process.join(_PATIENCE)
                raise UserError(f"{worker} {_how(worker.process)} before it could serve; see above.") from None
            if isinstance(said, UserError):
                raise type(said)(f"Worker {worker.number}: {said}")
            found[worker.number] = said
    return found


def serve_workers(
    build: Build, count: int, gpus: bool, listener: socket.socket, settings: FrontSettings,
    say: Callable[[About, str, str], object], tell: Callable[[str], object], stop: Callable[[], bool] = lambda: False,
) -> None:
    """Serve until `stop`, an interrupt, or the end of the front or of all workers, which is a UserError.

    `say` gets the model, its formats and the address; `tell` which worker has ended.
    """
    with running_workers(build, count, gpus) as workers:
        about, formats = start_of(workers)
        with front_process(listener, [worker.front for worker in workers], about, settings) as (url, front):
            try:
                say(about, formats, url)
                _look_after(workers, front, tell, stop)
            finally:
                _let_go(workers)  # the front ends when they have


def _look_after(
    workers: Sequence[Worker], front: Any, tell: Callable[[str], object], stop: Callable[[], bool]
) -> None:
    """Tell of workers that end. UserError where nobody is left, or the front has ended."""
    left = list(workers)
    while not stop():
        ended = wait([front.sentinel, *(worker.process.sentinel for worker in left)], _PERIOD)
        if front.sentinel in ended:
            raise front_ended(front)
        for worker in [worker for worker in left if worker.process.sentinel in ended]:
            left.remove(worker)
            worker.process.join()
            tell(f"{worker} {_how(worker.process)}: its open requests have failed. {len(left)} of {len(workers)} "
                 "workers go on.")
        if not left:
            raise UserError("All workers have ended; see above.")


def _how(process: Any) -> str:
    """How a process has ended."""
    if process.exitcode is None or process.exitcode >= 0:
        return f"has ended with status {process.exitcode}"
    why = ", most likely because the machine ran out of memory" if process.exitcode == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-process.exitcode).name}{why}"


def _let_go(workers: Sequence[Worker]) -> None:
    """They serve no longer."""
    for worker in workers:
        worker.line.close()


def _work(number: int, count: int, pipe: Connection, line: Connection, build: Build, gpus: bool) -> None:
    """What the process of a worker runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process' to answer: it closes the line
    import torch

    try:
        if gpus:
            torch.cuda.set_device(number)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // count))
        engine, about, formats = build()
        engine.expect([about.max_position] * engine.settings.max_num_seqs)
        assert engine.weights is not None
        ready: Any = _Ready(about, formats, checksum(engine.weights.tensors))
    except UserError as error:
        ready = OutOfMemory(str(error)) if isinstance(error, OutOfMemory) else UserError(str(error))
    except OSError as error:
        if (text := of_system(error)) is None:
            raise
        ready = UserError(text)
    try:
        line.send(ready)
    except OSError:  # nobody waits any longer
        return
    if isinstance(ready, _Ready):
        serve_engine(engine, pipe, line.poll)  # of a line that was closed, poll says so
