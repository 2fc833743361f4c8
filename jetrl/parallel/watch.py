"""`Watch`: the thread of each rank that notices when the run cannot go on, and ends this process then.

Every rank tells the store, once a second, that it lives, its phase, and how many collectives it has begun. Rank 0 looks
at all ranks, the others at rank 0. The run cannot go on when
- a rank has said why it ends (`post`: the first one to say so is the cause, whatever follows from it elsewhere),
- a rank has said nothing for `SILENCE` seconds: its process is gone, stopped or stuck,
- a rank has not begun a collective that another began `limit` seconds ago. A collective cannot end before all have
  begun it, so this holds for every backend, also where calls return at once and the GPU waits,
- the store is gone: the launcher, or rank 0, has ended,
- the store does not answer for `SILENCE` seconds: its process is stopped, or its machine is gone. The thread that
  waits for it cannot tell, so a second one looks after the first,
- torch's launcher has ended, which started this rank and would end it: other machines have lost it already.
A long phase is no hang: only a collective that others wait in has a limit.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from os import _exit  # the user's code runs under a guard that replaces `os._exit`
from typing import Literal

import torch.distributed as dist

from jetrl.parallel.progress import PROGRESS

Kind = Literal["mistake", "bug", "lost", "interrupted", "status"]
PERIOD, SILENCE, GRACE, PATIENCE = 1.0, 25.0, 3.0, 10.0  # seconds; all of them together stay below a minute
SAME = 1.0  # seconds that the error of one rank waits for the same of all
_CAUSE = "cause"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run ends, as rank `rank` has it. `common`: all ranks met the same error."""

    rank: int
    kind: Kind
    text: str
    trace: str = ""
    common: bool = False
    status: int = 1

    def message(self) -> str:
        """What the user reads."""
        if self.common or self.kind in ("lost", "interrupted"):
            return self.text
        return f"rank {self.rank}: {self.text}"


@dataclass(slots=True)
class _Beat:
    """What a rank last said of itself, and when that changed, on this process's clock."""

    said: str = ""
    changed: float = 0.0

    def get(self, key: str) -> str:
        return str(json.loads(self.said).get(key, "")) if self.said else ""


def who(rank: int, beat: str) -> str:
    """A rank by number, host and process id, as far as it has said so."""
    if not beat:
        return f"rank {rank}"
    said = json.loads(beat)
    return f"rank {rank} (process {said['pid']} on {said['host']}, last seen in {said['phase']})"


class Watch(threading.Thread):
    """One for each rank, from `launch.join` to `launch.leave`."""

    def __init__(self, store: dist.Store, rank: int, size: int, limit: float, tell: Callable[[Failure], None]) -> None:
        super().__init__(name="jetrl-watch", daemon=True)
        self.store, self.rank, self.size, self.limit, self.tell = store, rank, size, limit, tell
        self.beats = {r: _Beat(changed=time.monotonic()) for r in range(size) if r != rank}
        self.cause: Failure | None = None
        self._lock = threading.Lock()  # the connection serves one call at a time
        self._over = threading.Event()  # no more beats
        self._left = threading.Event()  # and the store is no longer needed
        self._said = threading.Lock()  # taken by the one that tells
        self._number, self._own = 0, ""  # of beats; the last one
        self._turns = 0  # of the first thread: grows while the store answers
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def start(self) -> None:
        super().start()
        threading.Thread(target=self._look_after, name="jetrl-watch-2", daemon=True).start()

    def run(self) -> None:
        while not self._over.wait(PERIOD):
            try:
                self.beat()
                self._look(range(self.size) if self.rank == 0 else (0,))
                cause = self.found() or self._judged()
            except RuntimeError as error:  # of the connection
                if self._over.is_set():
                    return
                cause = self.store_lost(error)
            self._turns += 1
            if cause is not None:
                self._end()

    def tell_once(self, failure: Failure) -> None:
        """The message of this process, unless it has given one: its threads meet the same end."""
        if self._said.acquire(blocking=False):
            self.tell(failure)

    def store_lost(self, error: Exception | None = None) -> Failure:
        """The cause where there is no store to ask: the connection has failed, or nothing answers. All ranks notice; of
        those that torch's launcher has started, one on each machine tells."""
        how = _line(error) if error else f"no answer for {SILENCE:.0f} s"
        cause = Failure(self.rank, "lost", (
            f"rank {self.rank} has lost the run's store ({how}): the launcher or rank 0 has ended"
            f"{'.' if error else ' or is stopped, or its machine is gone.'}"
        ))
        if self._launcher is None or os.environ["LOCAL_RANK"] == "0":
            self.tell_once(cause)
        else:
            self._said.acquire(blocking=False)
        return cause

    def beat(self, left: bool = False) -> None:
        """Tell the others where this rank is."""
        self._number += 1
        said = {
            "beat": self._number, "pid": os.getpid(), "host": socket.gethostname(), "phase": PROGRESS.phase,
            "calls": PROGRESS.calls, "left": left,
        }
        with self._lock:
            self._own = json.dumps(said)
            self.store.set(f"beat/{self.rank}", self._own)

    def missing(self) -> list[int]:
        """The ranks that have never given a sign of life."""
        with self._lock:
            return [r for r in range(self.size) if not self.store.check([f"beat/{r}"])]

    def everywhere(self, text: str) -> bool:
        """Whether every rank asks this with the same text, that of its error, within a moment."""
        end, key = time.monotonic() + SAME, f"same/{sha256(text.encode()).hexdigest()}"
        with self._lock:
            count = self.store.add(key, 1)
        while count < self.size:
            if time.monotonic() > end or self.found() is not None:
                return False
            time.sleep(0.05)
            with self._lock:
                count = self.store.add(key, 0)
        return True

    def post(self, failure: Failure) -> Failure:
        """Give `failure` as the cause of the run's end; returns the cause, which is another's if that was first."""
        with self._lock:
            held = self.store.compare_set(_CAUSE, "", json.dumps(asdict(failure)))
        self.cause = Failure(**json.loads(held))
        return self.cause

    def found(self) -> Failure | None:
        """The cause, if any rank has given one."""
        with self._lock:
            if self.cause is None and self.store.check([_CAUSE]):
                self.cause = Failure(**json.loads(self.store.get(_CAUSE)))
        return self.cause

    def lost_contact(self, error: BaseException, trace: str) -> Failure:
        """The cause of a failed collective: what another rank gives in the next seconds, or who has fallen silent."""
        if self.cause is not None:
            return self.cause
        self._look(self.beats)
        start = time.monotonic()
        while time.monotonic() - start < PATIENCE:
            if (cause := self.found()) is not None:
                return cause
            time.sleep(0.1)
        self._look(self.beats)
        silent = [r for r, beat in self.beats.items() if beat.changed <= start]
        if silent:
            return self.post(self._silence(silent))
        return self.post(Failure(self.rank, "bug", f"{type(error).__name__}: {error}", trace))

    def leave(self) -> None:
        """The run is over for this rank."""
        self._over.set()
        self.beat(left=True)
        self._left.set()
        self._lock.acquire(timeout=GRACE)

    def give_up(self, status: int) -> None:
        """The process is about to end by an error: by itself, or else by force after `PATIENCE` seconds.

        Python ends while this thread lives, and torch aborts a process that ends in the middle of a call to the store.
        So there are no more: the connection's lock is taken for good. (Where the store does not answer, it cannot be.)
        """
        self._over.set()
        self._lock.acquire(timeout=GRACE)
        end = threading.Timer(PATIENCE, _exit, (status,))
        end.daemon = True
        end.start()
        self._left.set()

    def _look(self, ranks: Iterable[int]) -> None:
        for r in [r for r in ranks if r != self.rank]:
            with self._lock:
                said = self.store.get(f"beat/{r}").decode() if self.store.check([f"beat/{r}"]) else ""
            if said != self.beats[r].said:
                self.beats[r] = _Beat(said, time.monotonic())

    def _judged(self) -> Failure | None:
        """The cause as this rank sees it, given to all; None while there is none."""
        if self._launcher not in (None, os.getppid()):
            return self._posted(Failure(self.rank, "lost", (
                f"{who(self.rank, self._own)}: its launcher (process {self._launcher}) has ended."
            )))
        now, here = time.monotonic(), [r for r, b in self.beats.items() if b.get("left") != "True"]
        judged = here if self.rank == 0 else [r for r in here if r == 0]
        if silent := [r for r in judged if now - self.beats[r].changed > SILENCE]:
            return self._posted(self._silence(silent))
        if not PROGRESS.calls or now - PROGRESS.since < self.limit:
            return None
        if self.rank != 0:
            self._look(here)  # rank 0 may be in time and another one late
        if late := [r for r in here if int(self.beats[r].get("calls") or 0) < PROGRESS.calls]:
            names = ", ".join(who(r, self.beats[r].said) for r in late)
            verb = "has" if len(late) == 1 else "have"
            return self._posted(Failure(self.rank, "lost", (
                f"{names} {verb} not come to {PROGRESS.name} (call {PROGRESS.calls}), in which rank {self.rank} has "
                f"waited for {self.limit:.0f} s. If that phase may take longer, raise train.collective_timeout."
            )))
        return None

    def _silence(self, silent: list[int]) -> Failure:
        names = ", ".join(who(r, self.beats[r].said) for r in silent)
        return Failure(self.rank, "lost", (
            f"{names}: no sign of life. The process was killed (out of memory?), is stopped, or its machine is gone."
        ))

    def _posted(self, failure: Failure) -> Failure:
        cause = self.post(failure)
        if cause == failure:
            self.tell_once(failure)
        return cause

    def _look_after(self) -> None:
        """The second thread: while the first one waits for the store. It counts its own turns, not seconds: none pass
        where this process itself was stopped."""
        seen = since = 0
        while not self._left.wait(PERIOD):
            seen, since = self._turns, since + 1 if seen == self._turns else 0
            if since * PERIOD > SILENCE:
                self.store_lost()
                self._end()

    def _end(self) -> None:
        """End this process. Its main thread gets a moment to do so itself; it may wait in a collective for ever."""
        if not self._left.wait(GRACE):
            sys.stdout.flush()
            sys.stderr.flush()
            _exit(1)


def _line(error: BaseException) -> str:
    """The first line of an error's text; the backend's go on with stack frames."""
    return (str(error).splitlines() or [type(error).__name__])[0]
