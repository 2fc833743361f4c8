"""How long a study will still take: steps seen at given times, and the lines that a user reads."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from jetrl.errors import OutOfMemory
from jetrl_study import conduct as conducting
from jetrl_study.jobs import Ended, Halt, Job
from jetrl_study.pace import Pace
from jetrl_study.plan import Study, all_planned
from jetrl_study.state import run_folder


def test_no_estimate_before_a_step() -> None:
    pace = Pace()
    assert pace.left({}, 0, [], 0.0) is None
    pace.note("a", 0, 10.0)
    pace.note("a", 0, 40.0)
    assert pace.left({"a": 60}, 0, [], 40.0) is None


def test_the_time_before_the_first_step_counts_only_while_there_is_no_other() -> None:
    pace = Pace()
    for step, now in ((0, 100.0), (0, 130.0), (2, 160.0)):
        pace.note("a", step, now)
    assert pace.left({"a": 60}, 0, [], 160.0) == 58 * 30
    assert pace.left({"a": 60}, 0, [], 175.0) == 58 * 30 - 15, "since that step some time has passed"
    pace.note("a", 5, 190.0)
    assert pace.left({"a": 60}, 0, [], 190.0) == 55 * 10
    assert pace.left({"a": 60}, 0, [], 9999.0) == 54 * 10, "a long evaluation is no progress"
    assert pace.left({"a": 5}, 0, [], 9999.0) == 0


def test_a_run_that_went_back_to_a_checkpoint_begins_there() -> None:
    pace = Pace()
    for step, now in ((25, 0.0), (15, 30.0), (16, 60.0)):
        pace.note("a", step, now)
    assert pace.seen["a"] == [(15, 30.0), (16, 60.0)] and pace.left({"a": 40}, 0, [], 60.0) == 24 * 30


def test_a_run_that_goes_on_begins_where_it_was() -> None:
    pace = Pace()
    for step, now in ((50, 0.0), (52, 20.0)):
        pace.note("a", step, now)
    assert pace.left({"a": 60}, 0, [], 20.0) == 8 * 10


def test_runs_that_wait_take_the_slot_that_is_free_first() -> None:
    pace = Pace()
    for name, each in (("a", 1.0), ("b", 3.0)):
        for step in range(3):
            pace.note(name, step, step * each)
    now = {"a": 12, "b": 12}  # 10 steps left: 10 and 30 seconds after their last steps, at 2 and 6; 9 and 30 at 6
    assert pace.left(now, 0, [], 6.0) == 30
    assert pace.left(now, 0, [20], 6.0) == 9 + 40, "after a; the mean run takes 2 seconds a step"
    assert pace.left(now, 0, [10, 10], 6.0) == 9 + 20 + 20
    assert pace.left(now, 1, [10, 10], 6.0) == 30, "a slot that makes a warm start"
    assert pace.left(now, 6, [20] * 6, 6.0) == 40, "slots that wait for a warm start"
    assert pace.left({**now, "new": 22}, 0, [], 6.0) == 44, "of another run, not seen yet: the mean pace"
    assert pace.left({}, 0, [5], 6.0) is None, "nothing runs"


@pytest.mark.parametrize(("deadline", "wanted"), [
    (None, "about 2:57 left; "), (190.0, "about 2:57 left, stopped in 2:10; "), (3000.0, "about 2:57 left; "),
])
def test_the_line_of_progress(
    deadline: float | None, wanted: str, tiny: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(conducting.time, "monotonic", lambda: clock[0])
    shown = io.StringIO()
    runs = {run.name: run for run in all_planned(tiny, tmp_path)}
    last = next(iter(runs.values())).config.train.steps
    console = Console(file=shown, width=400, color_system=None)
    going = conducting.Conduct(tiny, tmp_path, runs, console, Halt(deadline, began=0.0), lambda: None, 2, last_line=0.0)

    def seen(at: float, step: int, *waiting: str) -> str:
        folder = run_folder(tmp_path, runs["one-s0"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
        clock[0] = at
        going.polled(["one-s0", "warm-start-s1"], waiting)
        text, *_ = shown.getvalue(), shown.seek(0), shown.truncate()
        return text

    begun = run_folder(tmp_path, runs["two-s1"])  # waits to go on, with a step left
    begun.mkdir(parents=True)
    (begun / "metrics.jsonl").write_text('{"step": 1}\n')
    assert last == 2
    assert seen(1.0, 0) == "", "not yet"
    assert seen(30.0, 0) == "  0:30: 0 of 4 runs done; one-s0 0/2, warm-start-s1\n"
    line = seen(60.0, 1, "two-s0", "one-s1", "two-s1")
    # A step took 59 seconds: 59 more for this run; 118, 118 and 59 for those that wait, the first in the other slot.
    assert line == f"  1:00: 0 of 4 runs done, {wanted}one-s0 1/2, warm-start-s1\n"
    going.halt.signals = 1
    assert seen(90.0, 1) == "  1:30: 0 of 4 runs done, stopping; one-s0 1/2, warm-start-s1\n"


def test_a_run_without_memory_is_no_crash(tiny: Study, tmp_path: Path) -> None:
    shown = io.StringIO()
    runs = {run.name: run for run in all_planned(tiny, tmp_path)}
    going = conducting.Conduct(tiny, tmp_path, runs, Console(file=shown, width=400, color_system=None), Halt(), dict, 3)
    going.pace.note("one-s0", 1, 10.0)
    for name in ("one-s0", "warm-start-s1"):
        going.ended(Ended(Job(name, (), tmp_path / "log"), OutOfMemory.status, False, 1.0, again=True))
        assert shown.getvalue().endswith(
            f"  {name}: out of GPU memory next to others; runs again at the end, alone (fewer --jobs avoid this)\n"
        )
    assert not going.crashed and not going.done and not going.pace.seen
