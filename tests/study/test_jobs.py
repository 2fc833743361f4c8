"""Processes side by side: slots, order, failures that stop nothing else, and stopping."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from jetrl.study import jobs
from jetrl.study.jobs import Ended, Halt, Job, environments, run_jobs, tail

SCRIPT = """\
import os, signal, sys, time
name, seconds, status = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
if status == 143:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
print(name, "in", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
time.sleep(seconds)
sys.exit(0 if status == 143 else status)
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run jobs (name, seconds, status, after) of a small script in place of jetrl."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    popen = jobs.subprocess.Popen

    def instead(command: list[str], **how):
        return popen([sys.executable, str(script), *command[3:]], **how)

    monkeypatch.setattr(jobs.subprocess, "Popen", instead)

    def run(
        given: list[tuple], count: int = 2, halt: Halt | None = None, on_poll=None
    ) -> tuple[dict[str, Ended], list[int]]:
        made = [Job(n, (n, str(s), str(status)), tmp_path / f"{n}.log", after) for n, s, status, after in given]
        ended: dict[str, Ended] = {}
        most: list[int] = [0]
        run_jobs(made, environments(count, 1, ["4", "5"]), halt or Halt(), lambda e: ended.update({e.job.name: e}),
                 on_poll or (lambda names, waiting: most.append(len(names))))
        return ended, most

    return run


def test_slots_threads_and_gpus() -> None:
    slots = environments(3, 2, ["0", "7"])
    assert [(s["CUDA_VISIBLE_DEVICES"], s["OMP_NUM_THREADS"]) for s in slots] == [("0", "2"), ("7", "2"), ("0", "2")]
    assert int(environments(1, None, [])[0]["OMP_NUM_THREADS"]) >= 1


def test_one_that_fails_does_not_stop_the_others(ran, tmp_path: Path) -> None:
    ended, most = ran([("warm", 0, 0, ()), ("bad", 0, 3, ()), ("a", 0.2, 0, ("warm",)), ("b", 0.2, 0, ("warm",)),
                       ("c", 0, 0, ("bad",)), ("d", 0, 0, ("c",))])
    assert {name: end.status for name, end in ended.items()} == {
        "warm": 0, "bad": 3, "a": 0, "b": 0, "c": None, "d": None
    }
    assert not any(end.asked for end in ended.values()) and max(most) == 2
    assert tail(tmp_path / "a.log").startswith("a in ") and tail(tmp_path / "none.log") == ""


def test_what_runs_and_what_waits_is_told(ran) -> None:
    told: list[tuple[list[str], list[str]]] = []
    ran([("a", 0.3, 0, ()), ("b", 0, 0, ("a",)), ("c", 0, 0, ())], 1, on_poll=lambda *names: told.append(names))
    assert told[0] == (["a"], ["b", "c"]) and told[-1] == ([], [])
    assert [names for names in told if names[0] == ["b"]][0] == (["b"], ["c"])


def test_time_that_is_over_stops_what_runs_and_begins_nothing(ran) -> None:
    start = time.monotonic()
    ended, _ = ran([("a", 60, 143, ()), ("b", 60, 143, ())], 1, Halt(start + 1.5))
    assert ended["a"].status == 130 and ended["a"].asked and ended["b"].status is None and ended["b"].asked
    assert time.monotonic() - start < 20


def test_a_second_signal_kills(ran) -> None:
    halt = Halt()

    def press() -> None:
        for _ in range(2):
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGINT)

    with halt.caught():
        thread = threading.Thread(target=press)
        thread.start()
        ended, _ = ran([("deaf", 60, 0, ())], 1, halt)
        thread.join()
    assert halt.signals == 2 and ended["deaf"].status in (-signal.SIGKILL, -signal.SIGTERM) and ended["deaf"].asked


def test_an_error_in_between_leaves_no_process(ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list = []
    popen = jobs.subprocess.Popen
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda *a, **k: made.append(popen(*a, **k)) or made[-1])

    def fails(names: object, waiting: object) -> None:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        ran([("a", 60, 0, ())], 1, on_poll=fails)
    assert made[0].wait(10) == -signal.SIGKILL
