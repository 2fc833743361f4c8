"""Processes side by side: slots, order, failures that stop nothing else, and stopping."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from jetrl.errors import OutOfMemory
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


OUT_OF_MEMORY = OutOfMemory.status


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run jobs (name, seconds, how many may run on its GPU) of a script that is out of memory when there are more."""
    script = tmp_path / "job.py"
    script.write_text(FULL)
    popen = jobs.subprocess.Popen
    monkeypatch.setattr(
        jobs.subprocess, "Popen",
        lambda command, **how: popen([sys.executable, str(script), str(tmp_path), *command[3:]], **how),
    )

    def run(given: list[tuple[str, float, int]], count: int, gpus: list[str]) -> tuple[list[Ended], list[list[str]]]:
        made = [Job(name, (name, str(s), str(most)), tmp_path / f"{name}.log") for name, s, most in given]
        ended, polled = list[Ended](), list[list[str]]()
        run_jobs(made, environments(count, 1, gpus), Halt(), ended.append, lambda names, _: polled.append(list(names)))
        return ended, polled

    return run


FULL = """\
import os, sys, time
from pathlib import Path
name, seconds, most = sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
gpu = Path(sys.argv[1]) / f"gpu{os.environ.get('CUDA_VISIBLE_DEVICES')}"
gpu.mkdir(exist_ok=True)
(gpu / name).touch()
time.sleep(0.4)  # until all that start together are here
crowd = len(list(gpu.iterdir()))
print(name, "of", crowd, flush=True)
time.sleep(0.4 if crowd > most else seconds)  # until all have counted
(gpu / name).unlink()
sys.exit(3 if crowd > most else 0)
"""


def test_what_ran_out_of_memory_next_to_others_runs_again_with_fewer(full) -> None:
    ended, polled = full([("a", 1.5, 9), ("b", 1.5, 9), ("c", 0.1, 2)], 3, ["0"])
    assert [(e.job.name, e.status, e.slots) for e in ended if e.slots] == [("c", OUT_OF_MEMORY, 2)]
    assert sorted((e.job.name, e.status) for e in ended if not e.slots) == [("a", 0), ("b", 0), ("c", 0)]
    assert max(len(names) for names in polled) == 3
    again = next(i for i, names in enumerate(polled) if "c" not in names)
    assert max(len(names) for names in polled[again:]) == 2  # its slot stays empty


def test_two_that_run_out_of_memory_together_both_run_again_one_after_the_other(full) -> None:
    ended, polled = full([("a", 0.1, 1), ("b", 0.1, 1)], 2, ["0"])
    assert [e.slots for e in ended] == [1, 1, None, None] and [e.status for e in ended[2:]] == [0, 0]
    assert [names for i, names in enumerate(polled) if not i or names != polled[i - 1]][1:3] in (
        [["a"], ["b"]], [["b"], ["a"]], [["a"], []], [["b"], []],
    )


def test_what_is_too_large_alone_has_failed(full) -> None:
    ended, _ = full([("a", 0.1, 0)], 2, ["0"])
    assert [(e.status, e.slots) for e in ended] == [(OUT_OF_MEMORY, None)]
    ended, _ = full([("a", 0.1, 0), ("b", 0.1, 9)], 2, ["0", "1"])  # next to one on another GPU
    assert sorted((e.job.name, e.status, e.slots) for e in ended) == [("a", OUT_OF_MEMORY, None), ("b", 0, None)]


def test_what_is_too_large_everywhere_ends_after_few_tries(full) -> None:
    ended, _ = full([(name, 0.1, 0) for name in "abcd"], 4, ["0", "1"])
    assert sorted(e.job.name for e in ended if e.slots is None) == list("abcd")
    assert len(ended) == 8 and {e.status for e in ended} == {OUT_OF_MEMORY}
    assert min(e.slots for e in ended if e.slots) == 2  # one on each GPU
