"""The built-in environment `retry`: the task's own problems, with feedback and another attempt after a wrong answer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from jetrl.errors import UserError
from jetrl.rewards.function import RewardFunction
from jetrl.rewards.score import call_reward
from jetrl.types import Problem

RIGHT = 0.999  # a score above this is a right answer
FEEDBACK = "This answer is wrong. Try again."

_scoring = threading.Lock()  # reward functions are written for one call at a time


class Retry:
    """Scores each answer with the task's reward. A right one ends the conversation, and so does the last attempt."""

    def __init__(self, reward: RewardFunction, attempts: int = 2, feedback: str = FEEDBACK) -> None:
        if type(attempts) is not int or attempts < 1:
            raise UserError(f"environment.params.attempts: must be an integer of at least 1, got {attempts!r}.")
        if not isinstance(feedback, str) or not feedback:
            raise UserError(f"environment.params.feedback: must be a string, got {feedback!r}.")
        self.reward, self.left, self.feedback = reward, attempts, feedback

    def reset(self, problem: dict[str, Any]) -> Any:
        """The task's prompt."""
        self.problem = problem
        return problem["prompt"]

    def step(self, action: str) -> tuple[str, float | None, bool]:
        """Feedback, and no reward, after a wrong answer that is not the last; else the answer's reward. An answer that
        cannot be scored is neither right nor wrong: it ends the conversation, which is then not scored."""
        self.left -= 1
        reward = score_answer(self.reward, self.problem, action)
        if reward is None or reward > RIGHT or not self.left:
            return "", reward, True
        return self.feedback, None, False


def score_answer(reward: RewardFunction, problem: Mapping[str, Any], text: str) -> float | None:
    """The task's reward for one answer to the problem that `reset` got; None where it cannot be scored."""
    prompt = problem["prompt"] if isinstance(problem["prompt"], str) else tuple(problem["prompt"])
    extra = {k: v for k, v in problem.items() if k not in ("id", "prompt", "answer")}
    item = Problem(id=problem["id"], prompt=prompt, answer=problem["answer"], extra=extra)
    with _scoring:
        (value,) = call_reward(reward, [(item, text, ())])
    return value
