"""An evaluation problem by problem: its row of heldout.jsonl, and the completions that are kept for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jetrl.rewards.score import Scored
from jetrl.rollout.rollout import Rollout
from jetrl.types import Group, Prompt, Trajectory


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out prompts of a task, their trajectories and scores."""

    task: str
    prompts: tuple[Prompt, ...]
    rollout: Rollout
    scored: Scored

    def row(self) -> dict[str, Any]:
        """Its row of heldout.jsonl: of each problem the numbers that `rl.signal` names, None where a completion is not
        scored. Failed conversations are left out."""
        signals, problems, rewards = iter(self.scored.rewards.signals), [], []
        for group in self.rollout.groups:
            problems.append(group.prompt.index)
            rewards.append([next(signals) for _ in group.trajectories])
        return {"task": self.task, "problems": problems, "rewards": rewards}

    def kept(self, count: int) -> tuple[list[Group], list[Group], list[tuple[Prompt, Trajectory]]]:
        """About `count` completions, evenly over the problems and always of the same ones: those that are scored, those
        that are not, and failed conversations."""
        chosen, each = _evenly(len(self.prompts), count)
        left = {self.prompts[i].index: each for i in chosen}

        def some(groups: Sequence[Group]) -> list[Group]:
            found = []
            for group in groups:
                if number := min(left.get(group.prompt.index, 0), len(group.trajectories)):
                    left[group.prompt.index] -= number
                    found.append(group.first(number))
            return found

        scored, unscored, failed = some(self.scored.groups), some(self.scored.unscored), []
        for prompt, trajectory in self.rollout.failed:
            if left.get(prompt.index, 0):
                left[prompt.index] -= 1
                failed.append((prompt, trajectory))
        return scored, unscored, failed


def _evenly(problems: int, count: int) -> tuple[list[int], int]:
    """Which of the problems, and how many completions of each: at most `count` together."""
    some = min(problems, count)
    return ([i * problems // some for i in range(some)], count // some) if some else ([], 0)
