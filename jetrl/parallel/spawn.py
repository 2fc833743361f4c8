"""`spawn`: several ranks on this machine, by torch's elastic launcher. One process watches, prints one message.

Ranks are processes with a session of their own, so a terminal's Ctrl-C reaches only this one, which hands it on: to
each rank as SIGINT, once for each time that the user asked. A rank then stops as a run in one process does: at the
first one after the step, at the second at once. SIGTERM and SIGHUP count as Ctrl-C; SIGHUP once, for a terminal that is
closed may send it again. If ranks still live 10 s after the second, or at the third, they are ended. What ranks other
than 0 print goes to a file, which is shown if one of them crashes.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from jetrl.errors import UserError
from jetrl.parallel.launch import LAUNCHER, SPAWNED, hangup
from jetrl.untrusted import printable

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from jetrl.parallel.watch import Failure

_PATIENCE = 10.0  # seconds from the second Ctrl-C, or from a rank's last word, to the end of those that still live


def spawn(nproc: int, argv: Sequence[str], *, num_threads: int | None = None, program: Sequence[str] = ()) -> int:
    """Run `python -m jetrl.cli *argv` in `nproc` ranks; returns the status. A failure is reported on standard error.

    Each rank has `num_threads` CPU threads, or its part of the cores. `program` is what runs instead of
    `-m jetrl.cli`. UserError if `nproc` is no number of ranks, or inside of a rank.
    """
    if nproc < 1:
        raise UserError(f"--nproc {nproc}: start at least one rank.")
    if "RANK" in os.environ:
        raise UserError("--nproc starts ranks, but this process is a rank of torchrun already. Leave out one of them.")
    if not argv and not program:
        raise UserError("--nproc: there is nothing to run.")
    with tempfile.TemporaryDirectory(prefix="jetrl-ranks-") as folder, _environment(nproc, num_threads, folder):
        status, message = _launch(nproc, [*(program or ("-m", "jetrl.cli")), *argv], Path(folder))
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a rank that was ended could not show the cursor again
    if message:
        print(printable(f"jetrl: {message}"), file=sys.stderr, flush=True)
    return status


def _launch(nproc: int, argv: Sequence[str], folder: Path) -> tuple[int, str]:
    """The status and the message."""
    import logging

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the launcher's log repeats what we tell in one message
    quiet = {rank: Std.NONE if rank == 0 else Std.ALL for rank in range(nproc)}
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=nproc, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", local_addr="127.0.0.1", max_restarts=0, monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=quiet),
        signals_to_handle="SIGQUIT",  # the others are handed on
    )
    with SignalForwarder(folder, nproc) as hand:
        try:
            elastic_launch(config, sys.executable)(*argv)
        except ChildFailedError as error:
            return _cause(error.failures, folder, hand.asked)
        except SignalException as error:
            return (130, "interrupted.") if hand.asked else (128 + int(error.sigval), f"ended by {error.sigval.name}.")
        finally:
            logging.disable(logging.NOTSET)
    return 0, ""


@contextmanager
def _environment(nproc: int, num_threads: int | None, folder: str) -> Iterator[None]:
    """What ranks find in their environment; this process's own is as before at the end."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    before, default = dict(os.environ), {"OMP_NUM_THREADS": str(max(1, cores // nproc)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    threads = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
    set_by_us = {SPAWNED: folder, LAUNCHER: str(os.getpid())} | threads
    os.environ.update(default | before | set_by_us)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class SignalForwarder:
    """Hands the user's signals on to the ranks, as soon as each has given its process id, and ends ranks that do not
    end themselves: the launcher asks them by SIGTERM, which does not reach one that is stopped, for 30 s."""

    def __init__(self, folder: Path, nproc: int) -> None:
        self.folder, self.nproc, self.asked = folder, nproc, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jetrl-signals", daemon=True)
        self._before: dict[int, object] = {}

    def __enter__(self) -> SignalForwarder:
        for number in (signal.SIGINT, signal.SIGTERM, *hangup()):
            self._before[number] = signal.signal(number, self._ask)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()  # it looks into the folder, which is removed next
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked += not (self.asked and number not in (signal.SIGINT, signal.SIGTERM))

    def _run(self) -> None:
        sent = [0] * self.nproc
        second = failed = 0.0
        while not self._over.wait(0.1):
            for rank, pid in self._pids().items():
                if sent[rank] < min(self.asked, 2):
                    sent[rank] += 1
                    _kill(pid, signal.SIGINT)
            if self.asked >= 2:
                second = second or time.monotonic()
                if self.asked >= 3 or time.monotonic() - second > _PATIENCE:
                    os.kill(os.getpid(), signal.SIGQUIT)  # the launcher's own way: it ends the ranks
                    return
            if failed or any(self.folder.glob("logs/**/error.json")):
                failed = failed or time.monotonic()
                if time.monotonic() - failed > _PATIENCE:
                    for pid in self._pids().values():
                        _kill(pid, signal.SIGKILL)
                    return

    def _pids(self) -> dict[int, int]:
        files = {rank: self.folder / f"{rank}.pid" for rank in range(self.nproc)}
        return {rank: int(file.read_text()) for rank, file in files.items() if file.exists()}


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended


def _cause(failures: dict[int, ProcessFailure], folder: Path, asked: int) -> tuple[int, str]:
    """Status and message of a failed launch. A rank that said why it ends comes before one that was killed, and that
    before those which the launcher ended."""
    known = [failure for failure in map(_said, failures.values()) if failure is not None]
    for kind in ("mistake", "bug", "lost", "status", "interrupted"):
        if found := [f for f in known if f.kind == kind]:
            first = found[0]
            if kind == "status":  # rank 0 has said the rest of what there is to say
                return first.status, first.text
            return first.status, first.message() + (f"\n{first.trace.rstrip()}" if first.trace else "")
    if asked:
        return 130, "interrupted."
    order = {-signal.SIGTERM: 3, -signal.SIGABRT: 2}  # the launcher's own, and a backend's that lost contact
    rank = min(failures, key=lambda r: (order.get(failures[r].exitcode, 0 if failures[r].exitcode < 0 else 1), r))
    code, pid = failures[rank].exitcode, failures[rank].pid
    if code >= 0:
        return 1, f"rank {rank} (process {pid}) ended with status {code} and no message.{_tail(folder, rank)}"
    why = " Most likely the machine ran out of memory." if -code == signal.SIGKILL else ""
    return 1, f"rank {rank} (process {pid}) was ended by {signal.Signals(-code).name}.{why}{_tail(folder, rank)}"


def _said(failure: ProcessFailure) -> Failure | None:
    """What a rank wrote of its own end."""
    from jetrl.parallel.watch import Failure

    data = failure.error_file_data.get("message")
    extra = data.get("extraInfo", {}) if isinstance(data, dict) else {}
    return Failure(**extra["failure"]) if "failure" in extra else None


def _tail(folder: Path, rank: int) -> str:
    """The last lines that a rank other than 0 wrote to standard error."""
    files = sorted(folder.glob(f"logs/**/{rank}/stderr.log"))
    lines = files[0].read_text(errors="replace").splitlines()[-20:] if files else []
    return "\nIts last lines:\n" + "\n".join(lines) if lines else ""
