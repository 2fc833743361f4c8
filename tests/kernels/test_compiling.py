"""Kernels compiled by several processes: all of them, once, in order, and what happens when something fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import compiling_jobs
import pytest
from compiling_jobs import job

from jetrl.kernels.compiling.pool import Job, Outcome, compile_all, entries, processors


class Seen:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def progress(self, done: int, found: int, now: Sequence[str]) -> None:
        self.calls.append((done, found))


def compiled(
    folder: Path, jobs: list[Job], *, fails: bool = False, broken: bool = False, workers: int = 2, limit: float = 60.0,
    watcher: Seen | None = None,
) -> Outcome:
    return compile_all(
        "compiling_jobs:search", (jobs, fails), workers=workers, watcher=watcher, limit=limit,
        prepare=("compiling_jobs:prepare", (str(folder), broken)),
    )


def test_every_kernel_is_compiled_once_in_other_processes(tmp_path: Path) -> None:
    seen = Seen()
    outcome = compiled(tmp_path, [job(tmp_path, f"k{i}") for i in range(6)], watcher=seen)
    assert (outcome.found, outcome.done, outcome.failures, outcome.left) == (6, 6, [], 0)
    assert sorted((tmp_path / "log").read_text().split()) == [f"k{i}" for i in range(6)]
    assert str(os.getpid()) not in {(tmp_path / f"k{i}").read_text() for i in range(6)}
    assert len(list(tmp_path.glob("worker-*"))) == 2
    assert seen.calls[-1] == (6, 6) and seen.calls == sorted(seen.calls)
    assert outcome.spent["Stand-in"] >= 6 * 0.05 and outcome.seconds < 60


def test_long_jobs_come_first_and_a_later_stage_last(tmp_path: Path) -> None:
    first, others = job(tmp_path, "first"), [job(tmp_path, f"k{i}", stage=1, seconds=float(i)) for i in range(5)]
    last = job(tmp_path, "last", stage=2, seconds=100.0)
    outcome = compiled(tmp_path, [last, *others, first], workers=1)
    assert outcome.done == 7
    # From stage 1 on nothing begins before the search has ended, so the order does not depend on the search's speed.
    assert (tmp_path / "log").read_text().split() == ["first", "k4", "k3", "k2", "k1", "k0", "last"]
    at = outcome.reached
    assert 0 < at["first job"] <= at["end of the search"] <= at["later stage"] <= outcome.seconds
    assert at["first worker"] == at["last worker"] <= at["later stage"]


def test_a_failed_job_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    outcome = compiled(tmp_path, [job(tmp_path, "bad", how="raises"), *(job(tmp_path, f"k{i}") for i in range(4))])
    assert outcome.failures == [("Stand-in bad", "ValueError: no kernel for bad")]
    assert outcome.done == 5 and len((tmp_path / "log").read_text().split()) == 4


def test_a_dead_worker_is_told_with_its_last_words(tmp_path: Path) -> None:
    jobs = [job(tmp_path, "dead", how="dies", seconds=9.0), *(job(tmp_path, f"k{i}") for i in range(4))]
    outcome = compiled(tmp_path, jobs)
    ((name, why),) = outcome.failures
    assert name == "Stand-in dead" and "status 7" in why and "the compiler's last words" in why
    assert len((tmp_path / "log").read_text().split()) == 4


def test_without_any_worker_left_the_rest_is_left(tmp_path: Path) -> None:
    jobs = [job(tmp_path, "dead", how="dies", stage=1, seconds=9.0), job(tmp_path, "k", stage=1)]
    outcome = compiled(tmp_path, jobs, workers=1)  # stage 1: the search has ended, so `k` is known
    assert (outcome.done, outcome.left) == (1, 1) and not (tmp_path / "k").exists()


def test_workers_that_cannot_start_are_told(tmp_path: Path) -> None:
    outcome = compiled(tmp_path, [job(tmp_path, "k")], broken=True)
    assert outcome.failures == [("a worker's start", "ImportError: no such compiler")] * 2 and not outcome.done


def test_a_search_that_fails_is_told_and_what_it_found_is_compiled(tmp_path: Path) -> None:
    outcome = compiled(tmp_path, [job(tmp_path, "k0"), job(tmp_path, "k1")], fails=True)
    assert outcome.failures == [("the search", "RuntimeError: the search broke off")]
    assert outcome.done == 2 and (tmp_path / "k1").exists()


def gone(pid: int) -> bool:
    """Whether a process has ended (it may wait to be reaped by whoever has adopted it)."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def ended(folder: Path) -> bool:
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not all(map(gone, pids)):
        time.sleep(0.05)
    return all(map(gone, pids))


def test_when_the_time_is_up_what_is_left_is_left_and_nothing_runs_on(tmp_path: Path) -> None:
    outcome = compiled(tmp_path, [job(tmp_path, "slow", how="hangs")], limit=8.0)
    assert outcome.left == 1 and not outcome.failures
    assert ended(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_whatever_ends_us_ends_the_workers_and_what_they_started(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from compiling_jobs import job; from jetrl.kernels.compiling.pool import compile_all\n"
        "compile_all('compiling_jobs:search', ([job(Path(sys.argv[1]), 'slow', how='hangs')], False), workers=1)\n"
    )
    tests = str(Path(compiling_jobs.__file__).parent)
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), tests], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(timeout=20)
    if number == signal.SIGINT:
        assert process.stderr is not None and b"KeyboardInterrupt" in process.stderr.read()
        assert ended(tmp_path)
    else:  # nobody could end the job under way; the worker meets the end of its pipe after it
        worker, child = map(int, (tmp_path / "pids").read_text().split())
        os.kill(child, signal.SIGKILL)
        assert ended(tmp_path)


def test_processors_and_entries(tmp_path: Path) -> None:
    assert 1 <= processors() <= (os.cpu_count() or 1)
    (tmp_path / "a").mkdir()
    assert entries(tmp_path) == 1 and entries(tmp_path / "none") == 0
