"""Hints: told once in full, then counted; and what a step without a signal is told as."""

from __future__ import annotations

import pytest

from jetrl.report.hints import ConstantRewards, Hints, never_moved, without_signal
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory


def group(rewards: tuple[float, ...], advantages: tuple[float | tuple[float, ...], ...], same: bool = False) -> Group:
    opening = Segment("environment", (5,), "p")
    trajectories = tuple(
        Trajectory((opening, Segment("policy", (7 if same else 7 + i,), "x", (-1.0,))), "stop", 0, "")
        for i in range(len(rewards))
    )
    return Group(Prompt(0, Problem("p", "p", "a"), (5,)), trajectories, rewards, advantages)


def test_told_once_in_full_and_then_at_powers_of_ten() -> None:
    told: list[str] = []
    hints = Hints(told.append)
    for step in range(1, 121):
        hints.hint(step, "no news", "look elsewhere")
    hints.hint(121, "other news", "here")
    assert told == [
        "step 1: no news: look elsewhere", "step 10: no news, for the 10th time in this run",
        "step 100: no news, for the 100th time in this run", "step 121: other news: here",
    ]


@pytest.mark.parametrize(
    ("groups", "temperature", "said", "unsaid"),
    [
        ([group((0.0, 0.0), (0.0, 0.0))], 1.0, ["all 2 rewards are 0.", "warm start"], ["temperature"]),
        ([group((1.0, 1.0), (0.0, 0.0))] * 3, 1.0, ["all 6 rewards are 1", "harder"], ["warm start"]),
        ([group((1.0, 1.0), (0.0, 0.0)), group((0.0, 0.0), (0.0, 0.0))], 1.0, ["each of 2 groups"], ["temperature"]),
        ([group((1.0, 1.0), ((0.0, 0.0), (0.0,)), True)], 1e-6, ["all the same", "rollout.temperature, which is 1e-06"],
         ["warm start"]),
    ],
)
def test_what_a_step_without_a_signal_is_told(
    groups: list[Group], temperature: float, said: list[str], unsaid: list[str]
) -> None:
    for learnt in (groups, []):  # dynamic sampling drops such groups
        text = without_signal(groups, learnt, temperature)
        assert all(part in text for part in said) and not any(part in text for part in unsaid), text
        assert "samples.jsonl" in text


def test_any_advantage_is_a_signal() -> None:
    quiet = group((1.0, 1.0), (0.0, 0.0))
    assert without_signal([quiet, quiet], [quiet, group((0.0, 1.0), (0.0, 1e-9))], 1.0) == ""
    assert without_signal([quiet], [group((0.0, 0.0), ((0.0, 0.0), (0.0, 0.5)))], 1.0) == ""


def row(**scores: tuple[float, float]) -> dict[str, float]:
    found = {"reward/min": 0.0, "reward/max": 1.0}
    for name, (mean, std) in scores.items():
        found |= {f"reward/{name}/mean": mean, f"reward/{name}/std": std}
    return found


def test_a_function_whose_score_never_moves_is_named_once() -> None:
    told: list[tuple[int, str]] = []
    looks = ConstantRewards()
    for step in range(1, 41):
        metrics = row(right=(0.5, 0.5), anchored=(0.0, 0.0), late=(float(step > 20), 0.0), now=(float(step % 7), 0.0))
        looks.look(step, metrics, lambda what, detail, step=step: told.append((step, what)))
    looks.look(41, {"step": 41}, lambda *_: told.append((41, "")))
    assert told == [(10, "constant reward anchored"), (10, "constant reward late"), (30, "constant reward late")]


def test_the_summary_says_which_rewards_never_moved() -> None:
    steps = [row(right=(0.5, 0.5), anchored=(0.25, 0.0), one=(float(i), 0.0)) for i in range(3)]
    assert never_moved([{"eval/x/avg@1": 0.0}, *steps]) == ["anchored: 0.25 in all 3 steps"]
    alone = [{"reward/min": 0.0, "reward/max": 0.0}] * 2
    assert never_moved(alone) == ["reward: 0 in all 2 steps"] and never_moved(alone[:1]) == never_moved([]) == []
