"""The built-in environment `calculator`: the policy may write a call such as `<348+275>`, and gets `=623.` back.

Its turn then has to end at the `>`: set `rollout.stop = [">"]`. A turn without a call is the final answer, scored with
the task's reward. In tokens of `builtin:arithmetic` a whole conversation reads

    348+275=<348+275>=623.#623

The warm start of task `addition` with `use_tool` shows such conversations (`tasks/addition.py`).
"""

from __future__ import annotations

import operator
import re
from typing import Any

from jetrl.environments.retry import score_answer
from jetrl.rewards.function import RewardFunction

MISTAKE = "=?."  # the reply to a malformed call
_CALL = re.compile(r"<([0-9]{1,18})([-+*])([0-9]{1,18})>")
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Calculator:
    """Adds, subtracts and multiplies two numbers of at most 18 digits; the last turn is scored as the task scores."""

    def __init__(self, reward: RewardFunction) -> None:
        self.reward = reward

    def reset(self, problem: dict[str, Any]) -> Any:
        """The task's prompt."""
        self.problem = problem
        return problem["prompt"]

    def step(self, action: str) -> tuple[str, float | None, bool]:
        """The result of a call, for which no reward is given, or the reward of a final answer."""
        if action.endswith(">"):
            return calculate(action), None, False
        return "", score_answer(self.reward, self.problem, action), True


def calculate(turn: str) -> str:
    """The calculator's reply to a turn that ends in a call: `=623.`, or `=?.` for one that is not well formed."""
    call = _CALL.fullmatch(turn[turn.rfind("<") :]) if "<" in turn else None
    if call is None:
        return MISTAKE
    left, sign, right = call.groups()
    return f"={_OPERATIONS[sign](int(left), int(right))}."
