"""Which runs are compared, and up to which step: synthetic runs, differences computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jetrl.report.recorder import Recorder
from jetrl_study.collect import _differences, _held_out, scores
from jetrl_study.figures import interval
from jetrl_study.plan import Arm, Study, find_study, load_study

PROBLEMS = 8


def a_run(arm: str, seed: int, status: str, *evaluations: int) -> dict[str, Any]:
    """A run whose problems have other scores at each evaluation, every fifth step from 0."""
    draw = np.random.default_rng([len(arm), ord(arm[0]), seed])
    held = [{str(p): float(draw.integers(2)) for p in range(PROBLEMS)} for _ in evaluations]
    return {"arm": arm, "seed": seed, "status": status, "held_out": {"steps": list(evaluations), "scores": held}}


def mean(run: dict[str, Any], *places: int) -> float:
    return float(np.mean([list(run["held_out"]["scores"][place].values()) for place in places]))


@pytest.fixture
def study() -> Study:
    arms = tuple(Arm(name, name.upper(), (), ()) for name in ("a", "b", "c"))
    return replace(load_study(find_study("quick")), arms=arms, against=("a",))


def found(study: Study, *runs: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["arm"], one["outcome"]): one for one in _differences(study, runs, "a")}


def test_finished_runs_are_compared_to_their_end_and_leave_others_out(study: Study) -> None:
    a = [a_run("a", seed, "finished", 0, 5, 10) for seed in range(3)]
    b = [a_run("b", 0, "finished", 0, 5, 10), a_run("b", 1, "started", 0, 5), a_run("b", 2, "finished", 0, 5, 10)]
    both = found(study, *a, *b)
    assert {key[0] for key in both} == {"b"}, "nothing of the third arm"
    for outcome, places in (("last", [2]), ("mean", [1, 2])):
        one = both["b", outcome]
        assert one["seeds"] == [0, 2] and "to_step" not in one and one["verdict"] == "too few seeds"
        assert one["by_seed"] == pytest.approx([mean(b[s], *places) - mean(a[s], *places) for s in (0, 2)], abs=1e-6)


def test_without_a_finished_pair_runs_are_compared_as_far_as_all_have_come(study: Study) -> None:
    far = (0, 5, 10, 15)
    a = [a_run("a", 0, "finished", *far), a_run("a", 1, "started", *far), a_run("a", 2, "started", 0, 5, 10)]
    b = [a_run("b", 0, "started", *far), a_run("b", 1, "started", *far), a_run("b", 2, "started", 0, 5, 10)]
    c = [a_run("c", 0, "started", 0, 5), a_run("c", 1, "started", 0), a_run("c", 2, "new")]
    every = found(study, *a, *b, *c)
    for outcome, places in (("last", [2]), ("mean", [1, 2])):
        one = every["b", outcome]
        assert (one["seeds"], one["to_step"], one["verdict"]) == ([0, 1, 2], 10, "not finished")
        assert one["by_seed"] == pytest.approx([mean(b[s], *places) - mean(a[s], *places) for s in range(3)], abs=1e-6)
        assert interval(one).endswith("] to step 10: not finished")
    early = every["c", "mean"]  # its other seeds have no evaluation after the start
    assert (early["seeds"], early["to_step"]) == ([0], 5)
    assert early["mean"] == pytest.approx(mean(c[0], 1) - mean(a[0], 1))
    assert interval(early).endswith("(1 seed) to step 5: not finished")


def test_a_run_that_nan_ended_counts_with_its_last_evaluation(study: Study) -> None:
    a, b = a_run("a", 0, "finished", 0, 5, 10), a_run("b", 0, "non-finite", 0, 5)
    one = found(study, a, b)["b", "last"]
    assert "to_step" not in one and one["mean"] == pytest.approx(mean(b, 1) - mean(a, 2), abs=1e-6)
    c, a2 = a_run("c", 0, "non-finite", 0, 5), a_run("a", 0, "started", 0, 5, 10)
    one = found(study, a2, c)["c", "mean"]
    assert one["to_step"] == 10 and one["mean"] == pytest.approx(mean(c, 1) - mean(a2, 1, 2), abs=1e-6)
    early = a_run("b", 0, "non-finite", 0), a_run("b", 1, "started", 0, 5)
    one = found(study, a2, a_run("a", 1, "started", 0, 5), *early)["b", "last"]
    assert (one["seeds"], one["to_step"]) == ([0, 1], 5), "NaN before the first evaluation after the start counts, too"
    assert one["by_seed"][0] == pytest.approx(mean(early[0], 0) - mean(a2, 1), abs=1e-6)


def test_nothing_is_compared_before_an_evaluation_after_the_start(study: Study) -> None:
    assert not found(study, a_run("a", 0, "started", 0), a_run("b", 0, "started", 0))
    assert not found(study, a_run("a", 0, "started", 0, 5), a_run("b", 1, "started", 0, 5)), "no seed in common"
    whole = a_run("a", 0, "finished", 0, 5), a_run("b", 0, "finished", 0, 5)
    assert scores([whole], "last")[0].shape == (1, PROBLEMS)


def test_what_an_evaluation_did_not_score_counts_in_no_mean(tmp_path: Path) -> None:
    rows = [[[1.0, None], [None, None], [0.0, 0.0]], [[0.5, 0.5], [1.0, None], [None, 0.0]]]
    with Recorder(tmp_path / "run") as recorder:
        for step, rewards in enumerate(rows):
            recorder.write_held_out(step, {"task": "t", "problems": [0, 1, 2], "rewards": rewards})
    found = _held_out(tmp_path / "run", {0, 1})
    assert found["scores"] == [{"0": 1.0, "2": 0.0}, {"0": 0.5, "1": 1.0, "2": 0.0}]
    assert found["mean"] == [0.5, 0.5] and found["solved"] == [0.5, 0.333333] and not found["binary"]
    run = {"held_out": found}
    mine, theirs = scores([(run, run)], "last")
    assert mine.tolist() == theirs.tolist() == [[0.5, 0.0]]  # the problems that every evaluation has a score of
