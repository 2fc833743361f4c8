"""How long the arms of a study train until they reach equal scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jetrl_study.state import is_done

SHARE = 0.9
Run = Mapping[str, Any]


def seconds_to_goal(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Arm -> seconds of training until its runs reach the goal of their seed, over the seeds that all arms have done.

    A seed's goal lies `SHARE` of the way from the lowest score before training to the lowest of the arms' best scores,
    so that every arm reaches it. Between two evaluations a score counts as linear in time. A seed without a gain has no
    goal. Seconds are those of training (`collect`): without warm start, evaluations and checkpoints.
    """
    done = {(run["arm"], run["seed"]): run for run in runs if is_done(run) and run["held_out"]["steps"]}
    arms = list(dict.fromkeys(arm for arm, _ in done))
    found: dict[str, list[Any]] = {}
    for seed in sorted({seed for _, seed in done}):
        if not all((arm, seed) in done for arm in arms):
            continue
        same = [done[arm, seed] for arm in arms]
        start = min(run["held_out"]["mean"][0] for run in same)
        reached = min(max(run["held_out"]["mean"]) for run in same)
        times = [_seconds_to(run, start + SHARE * (reached - start)) for run in same]
        if reached > start and None not in times:
            for arm, seconds in zip(arms, times, strict=True):
                found.setdefault(arm, []).append(seconds)
    return found


def seconds_at(run: Run) -> dict[int, float | None]:
    """Seconds of training up to each step of a run; None where a step's time was not finite."""
    return dict(zip(run["seconds"]["steps"], run["seconds"]["values"], strict=True))


def _seconds_to(run: Run, goal: float) -> float | None:
    """When a run, whose best score is at least `goal`, first reaches it. None where its times are not known."""
    clock, scores = seconds_at(run), run["held_out"]["mean"]
    times: list[Any] = [clock.get(step) for step in run["held_out"]["steps"]]
    if None in times:
        return None
    place = next(i for i, score in enumerate(scores) if score >= goal)
    if place == 0:
        return float(times[0])
    part = (goal - scores[place - 1]) / (scores[place] - scores[place - 1])
    return float(times[place - 1] + part * (times[place] - times[place - 1]))
