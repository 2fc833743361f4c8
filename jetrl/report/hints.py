"""What a run reports once and then counts: steps without a signal, and a parity that should be 0 and is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from jetrl.types import Group


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
    if len(set(rewards)) == 1:
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
