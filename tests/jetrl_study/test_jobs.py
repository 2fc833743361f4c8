"""Processes side by side: slots, order, failures that stop nothing else, and stopping."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from jetrl.errors import OutOfMemory
from jetrl.report.console import Display
from jetrl_study import jobs
from jetrl_study.jobs import Ended, Halt, Job, environments, newest_step, run_jobs, share_of_cores, tail

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
    assert share_of_cores(1) >= share_of_cores(2) >= share_of_cores(1000) == 1


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


def test_time_that_is_over_stops_what_runs_and_begins_nothing(ran, tmp_path: Path) -> None:
    start, halt = time.monotonic(), Halt()

    def over_once_it_runs(*_: object) -> None:
        if tail(tmp_path / "a.log"):
            halt.deadline = halt.deadline or time.monotonic()

    ended, _ = ran([("a", 60, 143, ()), ("b", 60, 143, ())], 1, halt, over_once_it_runs)
    assert ended["a"].status == 130 and ended["a"].asked and ended["b"].status is None and ended["b"].asked
    assert time.monotonic() - start < 50


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


class Clock:
    """Time that passes only while `run_jobs` sleeps: what these tests order by time does not hang on the machine."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class OnGpu:
    """A process on a GPU that ends with status 3 where more are on it, after 0.5 s, than it can bear."""

    pid = 1 << 30  # of no process

    def __init__(self, clock: Clock, gpu: set[OnGpu], seconds: float, most: int) -> None:
        self.clock, self.gpu, self.seconds, self.most = clock, gpu, seconds, most
        self.began, self.crowd, self.returncode = clock.now, 0, None
        gpu.add(self)

    def poll(self) -> int | None:
        ran = self.clock.now - self.began
        if not self.crowd and ran > 0.5:  # all that start together are here
            self.crowd = len(self.gpu)
        full = self.crowd > self.most
        if self.returncode is None and self.crowd and ran > (1.0 if full else 0.5 + self.seconds):  # all have counted
            self._end(OUT_OF_MEMORY if full else 0)
        return self.returncode

    def terminate(self) -> None:
        self._end(130)

    def _end(self, status: int) -> None:
        self.returncode = status
        self.gpu.discard(self)


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run jobs (name, seconds, how many may be on its GPU, after), for at most `limit` seconds."""
    clock, on = Clock(), dict[str, set[OnGpu]]()

    def started(command: list[str], **how) -> OnGpu:
        gpu = on.setdefault(how["env"]["CUDA_VISIBLE_DEVICES"], set())
        return OnGpu(clock, gpu, float(command[4]), int(command[5]))

    monkeypatch.setattr(jobs, "time", clock)
    monkeypatch.setattr(jobs.subprocess, "Popen", started)

    def run(
        given: list[tuple], count: int, gpus: list[str], limit: float = 300.0
    ) -> tuple[list[Ended], list[set[str]]]:
        made = [Job(n, (n, str(s), str(most)), tmp_path / f"{n}.log", tuple(after)) for n, s, most, *after in given]
        ended, ran = list[Ended](), list[set[str]]()

        def poll(names: list[str], _: object) -> None:
            if not ran or ran[-1] != set(names):
                ran.append(set(names))
            assert len(ran) < 50, "it goes on for ever"

        run_jobs(made, environments(count, 1, gpus), Halt(clock.now + limit), ended.append, poll)
        return ended, ran

    return run


def test_what_ran_out_of_memory_next_to_others_runs_again_at_the_end_alone(full) -> None:
    ended, ran = full([("a", 1.0, 9), ("b", 1.0, 9), ("c", 0.1, 2), ("d", 2.0, 9)], 3, ["0"])
    assert [e.job.name for e in ended if e.again] == ["c"]
    assert sorted((e.job.name, e.status) for e in ended if not e.again) == [("a", 0), ("b", 0), ("c", 0), ("d", 0)]
    assert ran[0] == {"a", "b", "c"} and {"a", "b", "d"} in ran, "its slot is free for the next one"
    assert ended[-1].job.name == "c" and [names for names in ran if names][-1] == {"c"}


def test_those_that_run_out_of_memory_together_run_again_one_after_the_other(full) -> None:
    ended, ran = full([("a", 0.1, 1), ("b", 0.1, 1), ("c", 0.1, 1)], 3, ["0"])
    assert [e.again for e in ended] == [True] * 3 + [False] * 3 and {e.status for e in ended[3:]} == {0}
    assert all(len(names) < 2 for names in ran[ran.index({ended[3].job.name}):])


def test_each_gpu_takes_one_that_ran_out_of_memory(full) -> None:
    given = [(name, 1.0, 1) for name in "abcd"]
    ended, ran = full(given, 4, ["0", "1"])
    assert len([e for e in ended if e.again]) == 4 and {e.status for e in ended if not e.again} == {0}
    assert any(len(names) == 2 for names in ran[-4:])


def test_a_warm_start_without_memory_runs_again_before_its_arms(full) -> None:
    ended, _ = full([("warm", 0.1, 1), ("other", 0.1, 9), ("arm", 0.1, 9, "warm")], 2, ["0"])
    assert [(e.job.name, e.again) for e in ended if e.job.name != "other"] == [
        ("warm", True), ("warm", False), ("arm", False)
    ]
    assert all(e.status == 0 for e in ended if not e.again)


def test_what_is_too_large_alone_has_failed(full) -> None:
    ended, _ = full([("a", 0.1, 0)], 2, ["0"])
    assert [(e.status, e.again) for e in ended] == [(OUT_OF_MEMORY, False)]
    ended, _ = full([("a", 0.1, 0), ("b", 0.1, 9)], 2, ["0", "1"])  # next to one on another GPU
    assert sorted((e.job.name, e.status, e.again) for e in ended) == [("a", OUT_OF_MEMORY, False), ("b", 0, False)]
    ended, _ = full([(name, 0.1, 0) for name in "abcd"], 4, ["0", "1"])
    assert sorted(e.job.name for e in ended if not e.again) == list("abcd")
    assert len(ended) == 8 and {e.status for e in ended} == {OUT_OF_MEMORY}


def test_other_failures_next_to_others_are_not_tried_again(ran) -> None:
    ended, _ = ran([("a", 0.5, 2, ()), ("b", 2.0, 0, ())], 2)
    assert ended["a"].status == 2 and not ended["a"].again


def test_a_stop_leaves_what_waits_for_its_second_try(full) -> None:
    ended, _ = full([("a", 30.0, 9), ("b", 0.1, 1)], 2, ["0"], limit=3.0)
    assert [(e.job.name, e.again) for e in ended] == [("b", True), ("a", False), ("b", False)]
    assert ended[-1].status is None and ended[-1].asked


def test_the_newest_step_is_read_from_what_a_warm_start_prints(tmp_path: Path) -> None:
    log = tmp_path / "warm.log"
    assert newest_step(log) == ""
    for _ in range(2):  # the first one was given up
        with log.open("a") as file, Display(600, "a-s0 warm start", console=Console(file=file, width=80)) as display:
            file.flush()
            assert newest_step(log) == ""
            for step in (7, 8, 120):
                display.step({"step": step, "policy/loss": 0.5, "time/step": 1.0})
                file.flush()
                assert newest_step(log) == f"{step}/600"
