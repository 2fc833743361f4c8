"""`GroupScores`: groups scored next to the rollout, each as soon as it has ended (`task.reward_calls = "group"`).

One thread makes one call at a time, in the order in which groups end. What a function is given and what it returns is
the same as after the rollout, but for one group; several ranks score the groups that they have sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from jetrl.rewards.calls import reward_name
from jetrl.rewards.function import RewardFunction
from jetrl.rewards.results import Scores
from jetrl.rewards.score import score_parts
from jetrl.types import Group
from jetrl.user_code.calls import Background, Call
from jetrl.user_code.guard import check_unchanged, process_settings, put_back

_LOOK = 0.5  # seconds between two looks at a stop signal while scores are waited for


class GroupScores:
    """The scores of a rollout's groups, by their place among its prompts."""

    def __init__(self, reward: RewardFunction, conversations: bool) -> None:
        self.reward, self.conversations = reward, conversations
        self._settings = process_settings()
        self._background = Background(max_concurrent=1)
        self._calls: dict[int, Call] = {}

    def add(self, place: int, group: Group) -> None:
        """Score this group soon. Raises what an earlier call has raised: no rollout goes on for a broken reward."""
        self._check()
        call = Call(partial(score_parts, [group], self.reward, self.conversations), math.inf)
        self._calls[place] = call
        self._background.submit(call)

    def take(self) -> dict[int, list[Scores]]:
        """The scores of each function for every group added, by place; waits for them. Raises what a call raised."""
        while any(call.ended is None for call in self._calls.values()):
            self._check()
            self._background.wait(_LOOK)
            self._background.collect()
        self._check()
        return {place: call.value for place, call in self._calls.items()}

    def busy(self) -> float:
        """Seconds that the calls which have ended took."""
        return math.fsum(
            c.ended - c.started for c in self._calls.values() if c.ended is not None and c.started is not None
        )

    def stop(self) -> None:
        """Start no further call, and wait for none."""
        self._background.stop()
        put_back(self._settings)

    def _check(self) -> None:
        """In the main thread, while the settings that all threads share are ours."""
        check_unchanged(self._settings, f"Reward function {reward_name(self.reward)}")
        for call in self._calls.values():
            if call.error is not None:
                raise call.error


@contextmanager
def scores_beside(reward: RewardFunction | None, calls: str, conversations: bool) -> Iterator[GroupScores | None]:
    """What scores the groups of a rollout that runs inside; None where that comes after it (`task.reward_calls`)."""
    if reward is None or calls != "group":
        yield None
        return
    scores = GroupScores(reward, conversations)
    try:
        yield scores
    finally:
        scores.stop()
