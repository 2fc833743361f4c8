"""How long the arms of a study train until they reach equal scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jetrl.study.state import is_done

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
    found: dict[str, list[Any]] = {arm: [] for arm in arms}
    for seed in sorted({seed for _, seed in done}):
        same = [done[arm, seed] for arm in arms if (arm, seed) in done]
        if len(same) < len(arms):
            continue
        start = min(run["held_out"]["mean"][0] for run in same)
        reached = min(max(run["held_out"]["mean"]) for run in same)
        times = [_seconds_to(run, start + SHARE * (reached - start)) for run in same]
        if reached > start and None not in times:
            for arm, seconds in zip(arms, times, strict=True):
                found[arm].append(seconds)
    return {arm: times for arm, times in found.items() if times}


def _seconds_to(run: Run, goal: float) -> float | None:
    """When a run first reaches `goal`; None if it does not, or where its times are not known."""
    clock = dict(zip(run["seconds"]["steps"], run["seconds"]["values"], strict=True))
    scores: list[float] = run["held_out"]["mean"]
    times: list[Any] = [clock.get(step) for step in run["held_out"]["steps"]]
    if None in times:
        return None
    before, behind = times[0], scores[0]
    for after, score in zip(times, scores, strict=True):
        if score >= goal:
            part = (goal - behind) / (score - behind) if behind < goal else 0.0
            return float(before + part * (after - before))
        before, behind = after, score
    return None
