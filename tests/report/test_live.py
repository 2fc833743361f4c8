"""report.html while a run goes on: when it is written, that it costs little and ends no run, and after an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import numbers, tiny_run

from jetrl.errors import UserError
from jetrl.report import live
from jetrl.report.live import LiveReport
from jetrl.report.recorder import NoRecorder, Recorder

FAILS_AT_3 = """\
import itertools
from pathlib import Path
steps = itertools.count()  # a call for the gold answer, or an evaluation, is one, too
def reward(completions, answer, **_):
    page = Path(__file__).parent / "runs" / "tiny" / "report.html"
    seen = Path(__file__).with_name("seen")
    seen.write_text((seen.read_text() if seen.exists() else "") + ("page\\n" if page.exists() else "none\\n"))
    if FAILS and next(steps) > 3:
        raise RuntimeError("the sandbox is gone")
    return [len(set(c) & set(a)) / len(set(a)) for c, a in zip(completions, answer)]
"""


class Time:
    """A clock; a page takes `page` seconds on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, page: float = 0.0) -> None:
        self.now, self.pages = 1000.0, 0
        monkeypatch.setattr(live.time, "monotonic", lambda: self.now)

        def written(*_: object, **__: object) -> None:
            self.now += page
            self.pages += 1

        monkeypatch.setattr(live, "write_report", written)


@pytest.mark.parametrize(("seconds_of_a_page", "pages"), [(0.0, 20), (1.0, 2), (60.0, 1)])
def test_pages_take_a_small_share_of_the_time(
    seconds_of_a_page: float, pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time(monkeypatch, seconds_of_a_page)
    with Recorder(tmp_path) as recorder, LiveReport(tmp_path, recorder, print) as page:
        assert not page.due  # nothing is recorded yet
        for step in range(100):
            recorder.write(step, {"x": 1.0})
            if page.due:
                page.update()
            time.now += 1.0
    assert time.pages == pages


def test_a_rank_that_records_nothing_writes_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    with LiveReport(tmp_path, NoRecorder(), print) as page:
        assert not page.due
        page.finish()
    assert time.pages == 0


@pytest.mark.parametrize("error", [UserError("no space left."), OSError("x"), KeyError("reward")], ids=repr)
def test_what_keeps_a_page_from_the_disk_is_told_once_and_ends_nothing(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    told: list[str] = []
    monkeypatch.setattr(live, "write_report", fails)
    with Recorder(tmp_path) as recorder:
        recorder.write(0, {"x": 1.0})
        with pytest.raises(ZeroDivisionError), LiveReport(tmp_path, recorder, told.append) as page:
            page.update()
            page.update()
            assert len(told) == 1 and "The run continues" in told[0] and str(error).rstrip(".") in told[0]
            raise ZeroDivisionError  # that of the run is the one that counts
        with pytest.raises(type(error)):
            page.finish()
    assert len(told) == 2


def fails_or_not(folder: Path, fails: bool, changes: dict[str, object] | None = None) -> Path:
    folder.mkdir()
    (folder / "mine.py").write_text(FAILS_AT_3.replace("FAILS", str(fails)))
    return tiny_run(folder, {"task.reward": f"{folder}/mine.py:reward", "eval.eval_interval": 0} | (changes or {}))


def test_a_run_has_its_report_from_the_start_and_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fails_or_not(tmp_path / "whole", False)
    assert set((tmp_path / "whole" / "seen").read_text().split()[-4:]) == {"page"}
    page = tmp_path / "failed" / "runs" / "tiny" / "report.html"
    with pytest.raises(UserError, match="the sandbox is gone"):
        fails_or_not(tmp_path / "failed", True)
    rows = numbers(page.parent)
    assert 1 < len(rows) < 5 and rows == numbers(whole)[: len(rows)]
    assert f"{rows[-1]['step']} of 4 steps" in page.read_text()


def test_a_page_after_each_step_changes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seldom = tiny_run(tmp_path / "seldom")
    monkeypatch.setattr(live, "SELDOM", 0.0)
    monkeypatch.setattr(live, "SHARE", 1e9)
    assert numbers(tiny_run(tmp_path / "often")) == numbers(seldom)
