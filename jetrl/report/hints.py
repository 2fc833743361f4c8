"""What a run reports once and then counts: steps without a signal, a reward that never moves, and a parity that should
be 0 and is not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jetrl.types import Group

CONSTANT_FOR = 10  # steps in which no completion's score differs, before a reward function is named
_STD = re.compile(r"reward/(.+)/std")


class Hints:
    """Reports something in full the first time, then in a line at its 10th, 100th, ... time."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._counts = tell, Counter[str]()

    def hint(self, step: int, what: str, detail: str) -> None:
        """`what` happened in this step; `detail` says why and what to do."""
        self._counts[what] += 1
        count = self._counts[what]
        if count == 1:
            self._tell(f"step {step}: {what}: {detail}")
        elif str(count).strip("0") == "1":
            self._tell(f"step {step}: {what}, for the {count}th time in this run")


class ConstantRewards:
    """Looks for reward functions that give all completions one score, step after step: of several functions one such
    is hidden in the sum. Each is told once."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float | None, int]] = {}  # by function: its only score, in how many steps

    def look(self, step: int, metrics: Mapping[str, Any], tell: Callable[[str, str], None]) -> None:
        """The row of a step."""
        for name, score in _constants(metrics).items():
            before, count = self._seen.get(name, (score, 0))
            if score is None or (before is not None and not _same((before, score))):
                self._seen[name] = (score, 0 if score is None else 1)
                continue
            self._seen[name] = (score, count + 1)
            if count + 1 == CONSTANT_FOR and name != "reward":  # of all rewards together `without_signal` tells
                tell(
                    f"constant reward {name}",
                    f"it gave {score:g} to every completion of {CONSTANT_FOR} steps, so nothing is learned from it. "
                    "Look at what it is given: samples.jsonl, or `jetrl report` (a chat template may have written the "
                    "beginning of the reply, such as <think>, which is not in the completion).",
                )


def never_moved(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The rewards that were one number for every completion of every step, as `right: 0 in all 30 steps`."""
    found: dict[str, list[float | None]] = {}
    for row in rows:
        for name, score in _constants(row).items():
            found.setdefault(name, []).append(score)
    told = []
    for name, scores in found.items():
        values = [score for score in scores if score is not None]
        if len(values) == len(scores) > 1 and _same(values):
            told.append(f"{name}: {values[0]:g} in all {len(values)} steps")
    return told


def _constants(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """By reward function the score that it gave to all completions of the step, None where they differ; as `reward` the
    reward itself."""
    found: dict[str, float | None] = {}
    if (least := metrics.get("reward/min")) is not None and (most := metrics.get("reward/max")) is not None:
        found["reward"] = least if _same((least, most)) else None
    for key, value in metrics.items():
        if (match := _STD.fullmatch(key)) and f"reward/{match[1]}/mean" in metrics:
            found[match[1]] = metrics[f"reward/{match[1]}/mean"] if value == 0.0 else None
    return found


def _same(values: Sequence[float]) -> bool:
    """Whether all are one number, up to rounding."""
    high, low = max(values), min(values)
    return high == low or high - low <= 1e-9 * max(abs(high), abs(low))


def without_signal(groups: Sequence[Group], learnt: Sequence[Group], temperature: float) -> str:
    """Why a step has no advantage but 0 and what to do about it; empty if there is something to learn from.

    `groups` have rewards; `learnt`, the groups learned from, have advantages (None: outside the loss).
    """
    every = [a for group in learnt for a in group.advantages]
    values = [a for a in every if a is not None]
    if any(any(a) if isinstance(a, tuple) else a for a in values):
        return ""
    if every and not values:
        return (
            f"all {len(every)} answers ran into a limit, and rl.mask_truncated leaves such answers out of the loss. "
            "Raise rollout.max_response_length, or environment.max_turns."
        )
    rewards = [reward for group in groups for reward in group.rewards]
    same = all(len({t.turns[0].tokens for t in g.trajectories if t.turns}) < 2 for g in groups)
    if _same(rewards):
        found = f"all {len(rewards)} rewards are {rewards[0]:g}"
        cure = "If that is not what the reward should say, fix it; else make the task easier" + (
            " or begin with a warm start (sft.steps)" if rewards[0] <= 0 else " or harder"
        )
    else:
        found = f"in each of {len(groups)} groups all rewards are the same"
        cure = "Raise rollout.group_size, or make the task easier or harder"
    if same and all(len(g.trajectories) > 1 for g in groups):
        found += ", because the completions of a prompt are all the same"
        cure = f"Raise rollout.temperature, which is {temperature:g}"
    return f"{found}. Look at what the model writes: samples.jsonl, or `jetrl report`. {cure}."
