"""A tiny study end to end: two arms, two seeds; results; going on after a stop; crashes; divergence as a result."""

from __future__ import annotations

import errno
import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from studies import conducted

from jetrl import __version__
from jetrl.config import load_config, resolve
from jetrl.errors import UserError
from jetrl.report import recorder
from jetrl.report.recorder import read_held_out
from jetrl.run.loop import StopRequest, run
from jetrl_study import conduct as conducting
from jetrl_study import state as states
from jetrl_study.added import read_json
from jetrl_study.collect import collect
from jetrl_study.jobs import Ended, Halt, Job
from jetrl_study.plan import Study, all_planned, load_study
from jetrl_study.state import step_of


def test_one_command_at_a_time_works_in_a_folder(tiny: Study, in_process: list[str], tmp_path: Path) -> None:
    """Also where the first was killed and its runs, which hold the lock, have not ended yet."""
    out = tmp_path / "out"
    with conducting._locked(out) as held:
        run = subprocess.Popen(["sleep", "60"], pass_fds=held)
        with pytest.raises(UserError, match=r"Another process is writing .*out. Wait until that study has ended"):
            conducted(tiny, out)
    try:
        with pytest.raises(UserError, match="Another process is writing"):
            conducted(tiny, out)
    finally:
        run.kill()
        run.wait()
    assert not in_process and conducted(tiny, out)[0] == 0


def test_two_arms_two_seeds(tiny: Study, in_process: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, text = conducted(tiny, out)
    assert status == 0 and in_process == ["one-s0", "two-s0", "one-s1", "two-s1"] and "4 of 4" in text
    data = read_json(out / "study.json")
    runs = {(r["arm"], r["seed"]): r for r in data["runs"]}
    one, two = runs["one", 0], runs["two", 0]
    assert [r["status"] for r in data["runs"]] == ["finished"] * 4 and one["held_out"]["steps"] == [0, 1, 2]
    assert set(one["series"]["parity/logprob_abs_diff_mean"]["values"]) == {0.0}
    assert set(one["by_position"]) >= {"1", "2"}
    assert not any(one["by_position"].values()) and max(two["by_position"].values()) > 0
    binary = all(run["held_out"]["binary"] for run in data["runs"])
    assert data["score"] == ("accuracy" if binary else "reward") and len(one["held_out"]["scores"][0]) == 4
    rows = read_held_out(out / "runs" / "one-s0")
    assert sorted(rows) == [0, 1, 2] and rows[2]["problems"] == [0, 1, 2, 3]
    assert {d["outcome"]: d["seeds"] for d in data["differences"]} == {"last": [0, 1], "mean": [0, 1]}
    last = next(d for d in data["differences"] if d["outcome"] == "last")
    by_hand = [runs["two", s]["held_out"]["mean"][-1] - runs["one", s]["held_out"]["mean"][-1] for s in (0, 1)]
    assert last["by_seed"] == pytest.approx(by_hand, abs=1e-5) and last["verdict"] == "too few seeds"
    page = (out / "study.html").read_text()
    assert "A tiny study &lt;of two arms&gt;" in page and page.count("<svg") >= 8 and "exactly 0" in page
    assert "http" not in page.replace("http://www.w3.org", "") and "nan" not in page.lower().split("<style>")[0]
    assert not (out / "runs" / "one-s0" / "checkpoints").exists()  # a finished run's are not kept

    in_process.clear()
    assert conducted(tiny, out)[0] == 0 and not in_process  # all done: nothing runs again
    assert read_json(out / "study.json")["runs"] == data["runs"]


def test_results_are_written_as_runs_end(
    tiny: Study, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is lost in the second run leaves study.json and page of the first, which another one adds."""
    out, here = tmp_path / "out", conducting.run_jobs

    def lost(jobs: list[Job], slots: object, halt: Halt, on_end, on_poll, held) -> None:
        here(jobs[:1], slots, halt, on_end, on_poll, held)
        assert not (out / "study.json").exists()
        on_poll([jobs[1].name], [])
        raise SystemExit

    monkeypatch.setattr(conducting, "run_jobs", lost)
    with pytest.raises(SystemExit):
        conducted(tiny, out)
    assert [(r["arm"], r["status"]) for r in read_json(out / "study.json")["runs"]] == [("one", "finished")]
    assert "<svg" in (out / "study.html").read_text()
    monkeypatch.setattr(conducting, "run_jobs", here)
    in_process.clear()
    conducted(tiny, tmp_path / "another", [out / "study.json"])
    assert in_process == ["two-s0", "one-s1", "two-s1"]


def test_results_that_cannot_be_written_end_no_run(
    tiny: Study, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole, tried = tmp_path / "out", conducting._results, []

    def only_at_the_end(*args: Any) -> Any:
        tried.append(1)
        if len(tried) < 4:
            raise OSError(errno.EIO, "I/O error")
        return whole(*args)

    monkeypatch.setattr(conducting, "_results", only_at_the_end)
    status, text = conducted(tiny, out)
    assert status == 0 and len(in_process) == 4 and len(tried) == 4
    assert text.count("the results so far are not written (OSError(5, 'I/O error')); tried again when the next") == 3
    assert len(read_json(out / "study.json")["runs"]) == 4


def test_an_evaluation_without_its_row_does_not_count(tiny: Study, in_process: list[str], tmp_path: Path) -> None:
    """As in a run that is being written, or whose machine went away."""
    out = tmp_path / "out"
    conducted(tiny, out, arms="one", seeds="0")
    metrics = out / "runs" / "one-s0" / "metrics.jsonl"
    rows = metrics.read_text().splitlines(keepends=True)
    for kept in (2, 1, 0):
        metrics.write_text("".join(rows[:kept]))
        (run,) = collect(tiny.only("one", "0"), out, all_planned(tiny.only("one", "0"), out))["runs"]
        assert run["held_out"]["steps"] == [0, 1, 2][:kept] == run["seconds"]["steps"]


def test_parts_add_up_and_other_settings_are_refused(tiny: Study, in_process: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    conducted(tiny, out, arms="two", seeds="1")
    assert [r["arm"] for r in read_json(out / "study.json")["runs"]] == ["two"]
    conducted(tiny, out, seeds="1")
    assert in_process == ["two-s1", "one-s1"]
    data = read_json(out / "study.json")
    assert [(r["arm"], r["seed"]) for r in data["runs"]] == [("one", 1), ("two", 1)] and len(data["differences"]) == 2
    in_process.clear()
    for seeds in ("1", "0", "7"):  # before the first run, also where only the results would show the other settings
        with pytest.raises(UserError, match="other settings"):
            conducted(load_study(tmp_path / "study.toml", ["train.lr=1e-5"]), out, seeds=seeds)
    assert not in_process


def test_a_stopped_run_goes_on_from_its_checkpoint_elsewhere(
    tiny: Study, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    conducted(tiny, whole, arms="one", seeds="0")

    def stopped_after_one(jobs: list[Job], slots: object, halt: Halt, on_end, on_poll, held) -> None:
        config = resolve(load_config(jobs[0].arguments[1]), cuda_available=False)
        stop = StopRequest()
        monkeypatch.setattr(stop, "anywhere", lambda: step_of(Path(config.output_dir) / config.name) >= 1)
        run(config, Path(config.output_dir) / config.name, ["test"], stop)
        on_end(Ended(jobs[0], 130, True))

    out = tmp_path / "out"
    here = conducting.run_jobs
    monkeypatch.setattr(conducting, "run_jobs", stopped_after_one)
    status, text = conducted(tiny, out, arms="one", seeds="0")
    assert status == 0 and "stopped after step 1" in text and "Not finished: 1 of 1 run." in text
    assert read_json(out / "study.json")["runs"][0]["status"] == "started"
    monkeypatch.setattr(conducting, "run_jobs", here)
    moved = tmp_path / "another" / "machine"
    moved.parent.mkdir()
    shutil.move(out, moved)
    assert conducted(tiny, moved, arms="one", seeds="0")[0] == 0
    a, b = (read_json(o / "study.json")["runs"][0] for o in (whole, moved))
    same = ("status", "step", "digest", "held_out", "by_position", "failures")
    assert {k: a[k] for k in same} == {k: b[k] for k in same}  # to the bit, as if it had never stopped


def test_a_folder_keeps_its_number_of_threads(
    tiny: Study, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm starts belong to a number of threads: with others, arms of a seed would start from different ones."""
    found: list[int] = []
    made = conducting.environments
    monkeypatch.setattr(conducting, "share_of_cores", lambda count: 8 // count)
    monkeypatch.setattr(conducting, "environments", lambda count, threads, gpus: found.append(threads) or made(
        count, threads, gpus))
    for jobs in (2, 1):
        conducting.conduct(tiny, tiny.only("one", "0"), tmp_path / "a", jobs, None, None, Console(quiet=True))
    conducting.conduct(tiny, tiny.only("one", "0"), tmp_path / "a", 1, 4, None, Console(quiet=True))
    conducting.conduct(tiny, tiny.only("one", "0"), tmp_path / "b", 2, 3, None, Console(quiet=True))
    assert found == [4, 4, 4, 3]
    with pytest.raises(UserError, match="was begun with 4, and a warm start belongs to a number of threads"):
        conducting.conduct(tiny, tiny.only("one", "0"), tmp_path / "a", 1, 2, None, Console(quiet=True))


def test_other_settings_are_taken_as_long_as_nothing_was_made(
    tiny: Study, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = conducting.run_jobs
    monkeypatch.setattr(conducting, "run_jobs", lambda *rest: None)  # stopped in the warm start
    conducted(tiny, tmp_path / "out", arms="one", seeds="0")
    monkeypatch.setattr(conducting, "run_jobs", here)
    other = load_study(tmp_path / "study.toml", ["train.lr=1e-5"])
    assert conducted(other, tmp_path / "out", arms="one", seeds="0")[0] == 0 and in_process == ["one-s0"]
    with pytest.raises(UserError, match="one-s0 was made with other settings; its config.toml has them"):
        conducted(tiny, tmp_path / "out", arms="one", seeds="0")


def test_a_run_whose_folder_was_removed_runs_again(tiny: Study, in_process: list[str], tmp_path: Path) -> None:
    """Also where results of other folders were added, so that study.json is read again, which has its old results."""
    there, out = tmp_path / "there", tmp_path / "out"
    conducted(tiny, there, arms="two", seeds="0")
    in_process.clear()
    conducted(tiny, out, [there / "study.json"])
    data = read_json(out / "study.json")
    assert in_process == ["one-s0", "one-s1", "two-s1"]
    for add in ([], [out / "study.json"]):
        shutil.rmtree(out / "runs" / "one-s1")
        in_process.clear()
        status, text = conducted(tiny, out, add)
        assert status == 0 and in_process == ["one-s1"] and "4 runs, 3 done" in text
        again = read_json(out / "study.json")
        assert [run.get("added", False) for run in again["runs"]] == [False, True, False, False]
        assert again["differences"] == data["differences"]
    shutil.rmtree(out / "runs" / "one-s1")
    conducted(tiny, out, seeds="0")  # not chosen, and no result any more
    assert [(run["arm"], run["seed"]) for run in read_json(out / "study.json")["runs"]] == [
        ("one", 0), ("two", 0), ("two", 1)
    ]


def test_another_version_number_is_refused(
    tiny: Study, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conducted(tiny, tmp_path / "out", arms="one", seeds="0")
    monkeypatch.setattr(states, "__version__", "0.9.1")
    in_process.clear()
    with pytest.raises(UserError, match=rf"was begun with jetrl {__version__}, and this is 0\.9\.1: .*another --out"):
        conducted(tiny, tmp_path / "out", arms="two", seeds="0")
    assert not in_process and conducted(tiny, tmp_path / "new", arms="two", seeds="0")[0] == 0


def test_several_commits_are_told(
    tiny: Study, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By page, JSON and output; also those of runs that were resumed or added."""
    def at(commit: str | None) -> None:
        monkeypatch.setattr(recorder, "describe_environment", lambda command: {"cpu": "C", "git_commit": commit})

    out, told = tmp_path / "out", "Several commits of jetrl made these runs"
    at("a" * 40)
    _, text = conducted(tiny, out, arms="one")
    assert told not in text and {(*run["commits"],) for run in read_json(out / "study.json")["runs"]} == {("a" * 10,)}
    at("b" * 40)
    _, text = conducted(tiny, out, arms="two", seeds="0")
    line = f"{told}, and arms may differ by what changed between them: {'a' * 10} (2 runs), {'b' * 10} (1 run)."
    assert line in text and line in (out / "study.html").read_text()
    at(None)  # an installed package
    _, text = conducted(tiny, tmp_path / "other", [out / "study.json"])
    assert line in text and "commits" not in read_json(tmp_path / "other" / "study.json")["runs"][-1]
    env = out / "runs" / "two-s0" / "env.json"
    again = {"git_commit": "c" * 40, "git_dirty": True}
    env.write_text(json.dumps(json.loads(env.read_text()) | {"resumed": [again]}))
    assert states.commits_of(env.parent) == ["b" * 10, "c" * 10 + " + changes"]


def test_a_stopped_warm_start_is_told(tiny: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(jobs: list[Job], slots: object, halt: Halt, on_end, on_poll, held) -> None:
        warm = Job("warm-start-s0", ("sft", "one-s0.toml"), tmp_path / "warm.log")
        on_end(Ended(warm, -15, True, 72.0))
        on_end(Ended(jobs[0], None, True))

    monkeypatch.setattr(conducting, "run_jobs", stopped)
    status, text = conducted(tiny, tmp_path / "out")
    assert status == 0 and "warm-start-s0: given up, and made from its beginning next time" in text
    assert "next time; it had 1:12, so give --stop-after more" in text
    assert "Not finished: 4 of 4 runs." in text


@pytest.mark.parametrize("full", ["collect.write_json", "state._write"])
def test_a_full_disk_hides_no_crash(
    full: str, tiny: Study, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where the results cannot be written, nor where the state of another run cannot."""
    out, here, open_file = tmp_path / "out", conducting.run_jobs, Path.write_text

    def no_space(path: Path, *text: str, **how: str) -> int:
        if path.parent == (out if full == "collect.write_json" else out / "state"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_file(path, *text, **how)

    def one_fails(jobs: list[Job], slots: object, halt: Halt, on_end, on_poll, held) -> None:
        jobs[0].log.parent.mkdir(parents=True)
        jobs[0].log.write_text("KeyError: 'ours'")
        on_end(Ended(jobs[0], 1, False))
        monkeypatch.setattr(Path, "write_text", no_space)
        here(jobs[1:2], slots, halt, on_end, on_poll, held)

    monkeypatch.setattr(conducting, "run_jobs", one_fails)
    console = Console(record=True, width=200, file=io.StringIO())
    with pytest.raises(UserError, match=r"cannot write .*/out/.*: no space left"):
        conducting.conduct(tiny, tiny, out, 1, 1, None, console)
    text = console.export_text()
    assert "one-s0 crashed; its output ends with\nKeyError: 'ours'" in text and "1 crashed: one-s0." in text


def test_a_crash_is_an_error_and_a_divergence_is_a_result(
    tiny: Study, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, here = tmp_path / "out", conducting.run_jobs

    def some_fail(jobs: list[Job], slots: object, halt: Halt, on_end, on_poll, held) -> None:
        by_name = {job.name: job for job in jobs}
        here([by_name["one-s0"]], slots, halt, on_end, on_poll, held)
        by_name["two-s0"].log.parent.mkdir(parents=True)
        by_name["two-s0"].log.write_text("Traceback\nKeyError: 'ours'")
        on_end(Ended(by_name["two-s0"], 1, False))
        (out / "runs" / "one-s1" / "failed" / "step_000002").mkdir(parents=True)
        on_end(Ended(by_name["one-s1"], 2, False))
        here([by_name["two-s1"]], slots, halt, on_end, on_poll, held)

    monkeypatch.setattr(conducting, "run_jobs", some_fail)
    status, text = conducted(tiny, out)
    assert status == 1 and "KeyError: 'ours'" in text and "1 crashed: two-s0" in text
    data = read_json(out / "study.json")
    found = {f"{r['arm']}-s{r['seed']}": r for r in data["runs"]}
    assert {name: r["status"] for name, r in found.items()} == {
        "one-s0": "finished", "one-s1": "non-finite", "two-s1": "finished"  # two-s0 has recorded nothing
    }
    assert [(f["rule"], f["step"]) for f in found["one-s1"]["failures"]] == [("non-finite", 2)]
    assert json.loads((out / "state" / "one-s1.json").read_text())["step"] == 2
