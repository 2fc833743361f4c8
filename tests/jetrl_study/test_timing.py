"""How long arms train until they reach equal scores."""

from __future__ import annotations

from typing import Any

import pytest

from jetrl_study.timing import SHARE, seconds_to_goal


def a_run(
    arm: str, seed: int, scores: list[float], seconds: list[float | None], status: str = "finished"
) -> dict[str, Any]:
    steps = list(range(0, 5 * len(scores), 5))
    return {"arm": arm, "seed": seed, "status": status, "held_out": {"steps": steps, "mean": scores},
            "seconds": {"steps": steps, "values": seconds}}


def test_the_goal_is_one_that_all_arms_reach() -> None:
    """From 0.2 to 0.6, the best score of `slow`: 0.56. `fast` passes it on the way from 0.5 to 0.9."""
    assert SHARE == 0.9
    found = seconds_to_goal([
        a_run("fast", 0, [0.2, 0.5, 0.9], [0.0, 10.0, 30.0]),
        a_run("slow", 0, [0.2, 0.6, 0.3], [0.0, 40.0, 80.0]),
    ])
    assert found == {"fast": [pytest.approx(13.0)], "slow": [pytest.approx(36.0)]}


def test_the_lowest_start_counts_and_a_run_may_begin_at_the_goal() -> None:
    found = seconds_to_goal([a_run("a", 0, [0.0, 0.5], [0.0, 10.0]), a_run("b", 0, [0.48, 0.6], [2.0, 10.0])])
    assert found == {"a": [pytest.approx(9.0)], "b": [2.0]}


def test_only_seeds_that_all_arms_have_done_count() -> None:
    a = [a_run("a", seed, [0.0, 1.0], [0.0, 10.0 * (seed + 1)]) for seed in range(4)]
    b = [a_run("b", seed, [0.0, 1.0], [0.0, 100.0 * (seed + 1)], status)
         for seed, status in enumerate(["finished", "started", "finished"])]
    never = a_run("c", 0, [0.0, 1.0], [0.0, 1.0], "started")
    found = seconds_to_goal([*a, *b, never])
    assert found == {"a": [pytest.approx(9.0), pytest.approx(27.0)], "b": [pytest.approx(90.0), pytest.approx(270.0)]}


@pytest.mark.parametrize("scores, seconds", [
    ([0.5, 0.5, 0.5], [0.0, 1.0, 2.0]), ([0.5, 0.4, 0.3], [0.0, 1.0, 2.0]), ([0.1, 0.5, 0.9], [0.0, None, 2.0]),
    ([], []),
], ids=["level", "falls", "unknown times", "no evaluation"])
def test_what_has_no_goal_is_left_out(scores: list[float], seconds: list[float | None]) -> None:
    assert seconds_to_goal([a_run("a", 0, scores, seconds)]) == {}
