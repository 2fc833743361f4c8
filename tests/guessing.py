"""Conversations with an environment whose turns, replies and delays differ, for rollouts that carry them over."""

from __future__ import annotations

import random
import time
from typing import Any

from jetrl.rollout.requests import RolloutRequest
from jetrl.types import Problem, Prompt, SamplingParams

ASKED = RolloutRequest(SamplingParams(40, stop_token_ids=(3, 4, 6, 9, 11)), 2, 1000, max_turns=5, max_turn_tokens=9)
WAIT = 12


class Guess:
    """Some turns, whose number it draws, with replies that depend on all that was said. By the clock they take up to
    `slow`, and those about the first two problems `late`. `few`: these two have one turn, and others four."""

    made = 0

    def __init__(self, slow: float = 0.0, late: float = 0.0, few: bool = False) -> None:
        self.slow, self.late, self.few, self.clock = slow, late, few, random.Random()
        Guess.made += 1

    def reset(self, problem: dict[str, Any]) -> str:
        self.rng, self.said = random.Random(problem["seed"]), ""
        self.turns = self.rng.randint(1, 6)
        if self.few:
            self.turns = 1 if problem["seed"] < 2 else 4
        self.late *= problem["seed"] < 2
        return f"{self.rng.randint(10, 99)}+"

    def step(self, action: str) -> tuple[str | None, float | None, bool]:
        time.sleep(self.late + self.slow * self.clock.random())
        self.said += action + "|"
        self.turns -= 1
        if self.turns == 0:
            return None, 1.0, True
        if self.turns == 3 and not self.few and self.rng.random() < 0.2:
            raise RuntimeError("it does not go on")
        return f"{len(self.said) % 10}{self.rng.randint(0, 9)}=", 0.25, False


def prompts(count: int, first: int = 0) -> list[Prompt]:
    numbers = range(first, first + count)
    return [Prompt(i, Problem(f"p{i}", f"text {i}", "", extra={"seed": i, "index": i}), ()) for i in numbers]
