"""`jetrl study --add`: what is done elsewhere counts, with its origin; what is of another study or setting does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from studies import ARMS, conducted
from typer.testing import CliRunner

from jetrl import __version__
from jetrl.cli import app
from jetrl.errors import UserError
from jetrl_study import conduct as conducting
from jetrl_study.added import read_added, read_json
from jetrl_study.collect import write_json
from jetrl_study.jobs import Ended, Halt, Job
from jetrl_study.plan import Study, all_planned, find_study, load_study
from jetrl_study.state import DONE, SAME_BITS, read_state, run_folder

Data = dict[str, Any]
OTHER = {"gpu": "Another GPU <of 2026>", "cpu": "C"}


def by_name(data: Data) -> dict[str, Data]:
    return {f"{run['arm']}-s{run['seed']}": run for run in data["runs"]}


def made(study: Study, folder: Path) -> Data:
    """What a study.json of another machine holds: all runs finished, with scores made up from arm and seed."""
    runs = []
    for run in all_planned(study, folder):
        level = 0.25 * (run.arm.name == "two") + 0.125 * run.seed
        scores = [{str(p): level + 0.0625 * step for p in range(4)} for step in range(3)]
        mean = [one["0"] for one in scores]
        runs.append({
            "arm": run.arm.name, "seed": run.seed, "status": "finished", "step": 2, "digest": run.digest,
            "precision": "fp8", "engine": "jetrl", "series": {"reward/mean": {"steps": [1, 2], "values": [0.5, None]}},
            "seconds": {"steps": [0, 1, 2], "values": [0.0, 1.0, 2.0]}, "by_position": {"1": 0.0, "2": 0.5},
            "held_out": {"steps": [0, 1, 2], "mean": mean, "solved": [0.0] * 3, "scores": scores, "binary": False},
            "failures": [{"rule": "gradient", "step": 2, "text": f"made up {run.name}", "recovered": False}],
        })
    plan = {"name": study.name, "overrides": list(study.overrides), "arms": [
        {"name": arm.name, "label": arm.label, "overrides": list(arm.overrides), "break_exactness": []}
        for arm in study.arms
    ]}
    return {"study": plan, "version": __version__, "written": "2026-01-02", "environment": dict(OTHER), "runs": runs}


def saved(data: Data, folder: Path, *names: str) -> Path:
    """The data as a study.json, with only these runs if some are named."""
    data = data | {"runs": [run for name, run in by_name(data).items() if not names or name in names]}
    return write_json(data, folder / "study.json")


def test_runs_of_two_folders_are_one_study(tiny: Study, in_process: list[str], tmp_path: Path) -> None:
    """Real runs: half of them made elsewhere give the runs and differences of a study made in one place."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    conducted(tiny, whole)
    data = read_json(whole / "study.json")
    half = saved(data, tmp_path / "half", "one-s0", "one-s1")
    in_process.clear()
    status, text = conducted(tiny, out, [half])
    assert status == 0 and in_process == ["two-s0", "two-s1"]
    assert "Added from" in text and "half/study.json: 2 runs\n" in text and "4 runs, 2 done" in text
    both = read_json(out / "study.json")
    assert len(both["differences"]) == 2 and both["differences"] == data["differences"]
    timed = ("seconds", "series")  # seconds are of the clock
    for name, run in by_name(both).items():
        before = by_name(data)[name]
        if name.startswith("one"):
            assert run == before | {"added": True}
        else:
            assert {k: v for k, v in run.items() if k not in timed} == {
                k: v for k, v in before.items() if k not in timed
            }
    assert both["added"] == [{
        "file": "half/study.json", "environment": data["environment"], "written": data["written"],
        "runs": ["one-s0", "one-s1"],
    }]
    assert not (out / "runs" / "one-s0").exists() and "added" not in data


def test_page_and_json_name_the_origin_also_through_a_second_file(
    tiny: Study, in_process: list[str], tmp_path: Path
) -> None:
    first = saved(made(tiny, tmp_path), tmp_path / "first", "one-s0", "two-s0")
    conducted(tiny, tmp_path / "second", [first], seeds="0")
    second = read_json(tmp_path / "second" / "study.json")
    assert second["environment"]["gpu"] == OTHER["gpu"]  # not this machine, on which nothing ran
    assert second["environment"]["command"] == "jetrl study tiny"
    again = made(tiny, tmp_path) | {"environment": {"cpu": "A CPU"}, "written": "2026-03-04"}
    chained = by_name(second) | {"one-s1": by_name(again)["one-s1"]}
    file = saved(again | {"runs": list(chained.values()), "added": second["added"]}, tmp_path / "third")
    out = tmp_path / "out"
    assert conducted(tiny, out, [file], arms="one")[0] == 0 and not in_process
    data = read_json(out / "study.json")
    assert data["added"] == [
        {"file": "first/study.json", "environment": OTHER, "written": "2026-01-02", "runs": ["one-s0", "two-s0"]},
        {"file": "third/study.json", "environment": {"cpu": "A CPU"}, "written": "2026-03-04", "runs": ["one-s1"]},
    ]
    page = (out / "study.html").read_text()
    assert ("2 runs added from first/study.json (Another GPU &lt;of 2026&gt;, 2026-01-02); "
            "1 run added from third/study.json (A CPU, 2026-03-04).") in page
    assert "<li>Another GPU &lt;of 2026&gt;, A CPU</li>" in page and "<li>3 runs done</li>" in page
    assert "made up two-s0" in page  # failures of runs that were added, also of an arm that was not chosen


def test_own_runs_win_and_unfinished_ones_are_run_here(tiny: Study, in_process: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    conducted(tiny, out, arms="one", seeds="0")
    own = by_name(read_json(out / "study.json"))["one-s0"]
    data = made(tiny, tmp_path)
    by_name(data)["two-s0"]["status"] = "started"
    by_name(data)["two-s1"]["status"] = "non-finite"  # a result
    data["runs"] += [dict(data["runs"][0], arm="three"), dict(data["runs"][0], seed=7)]
    in_process.clear()
    _, text = conducted(tiny, out, [saved(data, tmp_path / "there"), saved(data, tmp_path / "copy")])
    assert in_process == ["two-s0"]
    assert "there/study.json: 2 runs, 1 not done there, 2 of other arms or seeds, 1 done already\n" in text
    assert "copy/study.json: 0 runs, 1 not done there, 2 of other arms or seeds, 3 done already\n" in text
    found = read_json(out / "study.json")
    runs = by_name(found)
    assert runs["one-s0"] == own and "added" not in runs["two-s0"]
    assert runs["two-s1"]["status"] == "non-finite" and runs["two-s1"]["added"] is True
    assert [(one["file"], one["runs"]) for one in found["added"]] == [("there/study.json", ["one-s1", "two-s1"])]
    assert found["environment"].get("gpu") != OTHER["gpu"]  # that of the folder's own runs
    # What was added before stays, whether its own study.json is named or not.
    in_process.clear()
    for again in ([out / "study.json"], []):
        conducted(tiny, out, again)
        kept = read_json(out / "study.json")
        assert not in_process and (kept["runs"], kept["added"]) == (found["runs"], found["added"])


def test_a_run_that_was_begun_here_is_not_gone_on_with(tiny: Study, in_process: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    conducted(tiny, out, arms="one", seeds="0")
    shutil.rmtree(out / "state")
    run = all_planned(tiny, out)[0]
    assert run_folder(out, run).is_dir() and not read_state(out, run).done
    in_process.clear()
    data = made(tiny, tmp_path)
    conducted(tiny, out, [saved(data, tmp_path / "there")], arms="one", seeds="0")
    assert not in_process
    assert by_name(read_json(out / "study.json"))["one-s0"] == by_name(data)["one-s0"] | {"added": True}


def test_with_nothing_left_no_gpu_is_needed(
    tiny: Study, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(conducting, "visible_gpus", lambda: pytest.fail("looked for GPUs"))
    study, out = load_study(tmp_path / "study.toml", ["device=cuda"]), tmp_path / "out"
    data = made(study, tmp_path)
    part = saved(data, tmp_path / "part", "one-s0", "one-s1", "two-s0")
    with pytest.raises(UserError, match="arm two: this study needs a GPU, and none is visible here"):
        conducted(study, out, [part])
    assert not out.exists()
    assert conducted(study, out, [part], arms="one")[0] == 0  # of what is chosen nothing is left
    assert sorted(by_name(read_json(out / "study.json"))) == ["one-s0", "one-s1", "two-s0"]
    assert conducted(study, out, [part, saved(data, tmp_path / "rest", "two-s1")])[0] == 0 and not in_process
    found = read_json(out / "study.json")
    last = next(d for d in found["differences"] if d["outcome"] == "last")
    assert last["seeds"] == [0, 1] and last["by_seed"] == [0.25, 0.25] and (out / "study.html").exists()


def test_other_settings_are_refused(tiny: Study, in_process: list[str], tmp_path: Path) -> None:
    there = saved(made(load_study(tmp_path / "study.toml", ["train.lr=1e-5"]), tmp_path), tmp_path / "there", "two-s1")
    for part in ({}, {"arms": "one", "seeds": "0"}):  # results show what is not chosen, too
        with pytest.raises(UserError, match=r"there/study.json: its run two-s1 was made with other settings.* Only "
                           r"there: train.lr=1e-5. Give the settings of that run here, or leave the file out"):
            conducted(tiny, tmp_path / "out", [there], **part)
    (tmp_path / "study.toml").write_text(ARMS.replace("fp8_rollout", "bf16"))
    with pytest.raises(UserError, match="Only there: precision=fp8_rollout. Only here: precision=bf16. Give"):
        conducted(load_study(tmp_path / "study.toml"), tmp_path / "out", [saved(made(tiny, tmp_path), tmp_path / "x")])
    changed = made(tiny, tmp_path)
    changed["runs"][0]["digest"] = "0" * 16
    with pytest.raises(UserError, match="one-s0 .*The overrides are equal, so the recipe, or jetrl itself"):
        conducted(tiny, tmp_path / "out", [saved(changed, tmp_path / "y")])
    for run in changed["runs"]:
        run["status"] = "started"  # not done: nothing of it is used
    assert conducted(tiny, tmp_path / "out", [saved(changed, tmp_path / "z")], arms="one", seeds="0")[0] == 0
    assert in_process == ["one-s0"]


@pytest.mark.parametrize("change, message", [
    (lambda d: d["study"].update(name="h200"), "is of the study h200, and this one is tiny"),
    (lambda d: d.update(version="0.0.9"), "was written by jetrl 0.0.9, and this is .*leave the file out"),
    (lambda d: d.pop("version"), "is not a study.json of `jetrl study`, or it is damaged: version: Field required"),
    (lambda d: d.update(study=[]), "or it is damaged: study"),
    (lambda d: d["runs"][1].pop("held_out"), r"or it is damaged: runs.1.held_out: Field required. Copy it again"),
    (lambda d: d["runs"][1]["held_out"]["scores"].pop(), "runs.1.held_out: .*3 steps and 2 evaluations"),
    (lambda d: d["runs"][0]["held_out"]["scores"][0].update(x=0.5), "runs.0.held_out.scores.0.x"),
    (lambda d: d["runs"][0]["held_out"]["scores"].__setitem__(0, {"9": 0.5}),
     "runs.0.held_out: its evaluations are of different"),
    (lambda d: d["runs"][0]["held_out"]["mean"].append("1"), "runs.0.held_out.mean.3: "),
    (lambda d: d["runs"][0]["held_out"].update(binary=True, scores=[{"0": 7.0}] * 3), "outside of that"),
    (lambda d: d["runs"][0]["held_out"].update(steps=[0, 2, 1]), "steps do not rise"),
    (lambda d: d["runs"][0].update(step=9), "finished at step 9, and its last evaluation is of step 2"),
    (lambda d: d["runs"][0]["held_out"].update(steps=[], mean=[], solved=[], scores=[]), "done and has no evaluation"),
    (lambda d: d["runs"][0].update(status="done"), "runs.0.status: "),
    (lambda d: d["environment"].update(load=float("inf")), "is not JSON that a study has written .it holds Infinity"),
    (lambda d: d["runs"][0]["series"]["reward/mean"]["values"].pop(), "2 steps and 1 values"),
    (lambda d: d["runs"][0]["by_position"].update({"1": float("nan")}), "it holds NaN"),
    (lambda d: d["runs"][0].update(seconds={"steps": [], "values": []}), "it has evaluations and no step"),
    (lambda d: d["runs"][0].update(seed="0"), "runs.0.seed"),
    (lambda d: d.update(added=[{"file": "x"}]), "added.0.environment: Field required"),
])
def test_files_of_something_else_are_refused(
    change: Callable[[Data], object], message: str, tiny: Study, tmp_path: Path
) -> None:
    data = made(tiny, tmp_path)
    change(data)
    file = tmp_path / "study.json"
    file.write_text(json.dumps(data))
    with pytest.raises(UserError, match=message):
        conducted(tiny, tmp_path / "out", [file])
    assert not (tmp_path / "out").exists()


def test_the_option(tiny: Study, tmp_path: Path) -> None:
    """Files that cannot be read are refused by the command, and two files count together."""
    whole, study = made(tiny, tmp_path), str(tmp_path / "study.toml")
    torn = tmp_path / "torn.json"
    torn.write_text(json.dumps(whole)[:-100])
    listed = tmp_path / "list.json"
    listed.write_text("[[1, 2]]")
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 200_000)
    for wrong, told in {
        torn: "is not JSON that a study has written", listed: "is not JSON that a study has written",
        deep: "is not JSON that a study has written", tmp_path: "is a folder. Give its study.json.",
        tmp_path / "none.json": "cannot be read (No such file or directory). Copy it again",
    }.items():
        shown = CliRunner().invoke(app, ["study", study, "--out", str(tmp_path / "out"), "--add", str(wrong)])
        assert isinstance(shown.exception, UserError), wrong
        assert f"{wrong} {told}" in str(shown.exception)
    nameless = CliRunner().invoke(app, ["study", "--add", str(torn)])
    assert "--add needs the study's name" in str(nameless.exception)
    files = [saved(whole, tmp_path / name, name) for name in ("one-s0", "two-s0")]
    shown = CliRunner().invoke(app, ["study", study, "--out", str(tmp_path / "out"), "--seeds", "0",
                                     *(part for file in files for part in ("--add", str(file)))])
    assert shown.exit_code == 0 and "2 runs, 2 done" in shown.output, shown.output
    assert [one["runs"] for one in read_json(tmp_path / "out" / "study.json")["added"]] == [["one-s0"], ["two-s0"]]


@pytest.mark.parametrize("name, least", [
    ("quick", 21), ("wgrad", 15), ("h200", 22), ("h200_1k", 26), ("h200_4k", 9), ("h200_8k", 9), ("h200_wide", 3)
])
def test_the_results_in_the_repository_can_be_added(name: str, least: int, tmp_path: Path) -> None:
    """As docs/STUDY.md says. If this fails, settings of the study have changed: run it again, or change the page."""
    study = load_study(find_study(name))
    file = Path(__file__).parents[2] / "docs" / "study" / name / "study.json"
    assert read_json(file)["version"] in SAME_BITS
    found = read_added([file], study, all_planned(study, tmp_path), tmp_path, Console(quiet=True))
    done = [run for run in read_json(file)["runs"] if run["status"] in DONE and run["seed"] in study.seeds]
    assert len(found) == len(done) >= least


def test_seeds_that_only_an_earlier_call_named_stay(tiny: Study, in_process: list[str], tmp_path: Path) -> None:
    out, more = tmp_path / "out", replace(tiny, seeds=(9, 7))
    there = saved(made(more, tmp_path), tmp_path / "there")
    conducted(tiny, out, [there], seeds="7,9")
    conducted(tiny, out, seeds="5", arms="one")
    assert conducted(tiny, out, seeds="0")[0] == 0 and in_process == ["one-s5", "one-s0", "two-s0"]
    data = read_json(out / "study.json")
    assert list(by_name(data)) == ["one-s0", "two-s0", "one-s5", "one-s7", "two-s7", "one-s9", "two-s9"]
    assert data["study"]["seeds"] == [0, 5, 7, 9]
    assert data["added"][0]["runs"] == ["one-s7", "two-s7", "one-s9", "two-s9"]
    assert data["differences"][0]["seeds"] == [0, 7, 9]


def test_a_run_that_nan_ended_before_its_first_evaluation_is_taken(
    tiny: Study, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = conducting.run_jobs

    def one_is_nan(jobs: list[Job], slots: object, halt: Halt, on_end, on_poll, held) -> None:
        (broken,) = (job for job in jobs if job.name == "two-s1")
        (tmp_path / "there" / "runs" / "two-s1" / "failed" / "step_000000").mkdir(parents=True)
        on_end(Ended(broken, 2, False))
        here([job for job in jobs if job is not broken], slots, halt, on_end, on_poll, held)

    monkeypatch.setattr(conducting, "run_jobs", one_is_nan)
    conducted(tiny, tmp_path / "there")
    data = read_json(tmp_path / "there" / "study.json")
    assert by_name(data)["two-s1"]["status"] == "non-finite" and not by_name(data)["two-s1"]["held_out"]["steps"]
    monkeypatch.setattr(conducting, "run_jobs", here)
    in_process.clear()
    for files in ([tmp_path / "there" / "study.json"], []):  # what was added is read again from the folder's own file
        status, text = conducted(tiny, tmp_path / "out", files)
        assert status == 0 and not in_process and "4 runs, 4 done" in text
        found = read_json(tmp_path / "out" / "study.json")
        assert found["runs"] == [run | {"added": True} for run in data["runs"]]
        assert found["differences"] == data["differences"]
    assert "NaN or infinity ended the run" in (tmp_path / "out" / "study.html").read_text()


def test_settings_that_change_no_bit_do_not_count(tmp_path: Path) -> None:
    plain, other = (load_study(find_study("quick"), more) for more in ([], ["rollout.merge_prefix=off"]))
    assert [r.digest for r in all_planned(plain, tmp_path)] == [r.digest for r in all_planned(other, tmp_path)]


def test_a_comparison_whose_other_arm_has_not_begun_is_left_out(
    tiny: Study, in_process: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert tiny.against == ("one",)
    there = saved(made(tiny, tmp_path), tmp_path / "there", "two-s0")
    status, text = conducted(tiny, out, [there], arms="two", seeds="0")
    data = read_json(out / "study.json")
    assert data["study"]["against"] == [] and data["differences"] == [] and (out / "study.html").exists()
    told = "Nothing is compared yet: that needs results of one and of another arm with the same seed."
    assert status == 0 and told in text and told in (out / "study.html").read_text()


def test_without_the_arms_to_compare_with_the_first_one_stands_in(
    tiny: Study, in_process: list[str], tmp_path: Path
) -> None:
    """And says so, until they have results."""
    third = '[[arm]]\nname = "three"\noverrides = ["precision=bf16"]\n'
    (tmp_path / "study.toml").write_text(ARMS + third)
    study, out = load_study(tmp_path / "study.toml"), tmp_path / "out"
    data = made(study, tmp_path)
    told = "Arms are compared with two, as one, with which this study compares, has no results here."
    _, text = conducted(study, out, [saved(data, tmp_path / "a", "two-s0", "three-s0")], arms="two,three", seeds="0")
    found = read_json(out / "study.json")
    assert told in text and told in (out / "study.html").read_text()
    assert found["study"]["against"] == ["two"] and {d["arm"] for d in found["differences"]} == {"three"}
    _, text = conducted(study, out, [saved(data, tmp_path / "b", "one-s0")], arms="two,three", seeds="0")
    found = read_json(out / "study.json")
    assert "compared" not in text and "notes" not in found and found["study"]["against"] == ["one"]
    assert {d["arm"] for d in found["differences"]} == {"two", "three"} and not in_process
