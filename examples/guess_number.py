"""Your own environment: the policy guesses a number, and reads `>` (higher) or `<` (lower).

The signs are those of `builtin:arithmetic`; with a chat model, write "higher" and "lower".
"""

import random


class GuessNumber:
    def __init__(self, low=1, high=9):
        self.low, self.high = low, high

    def reset(self, problem):
        self.secret = random.Random(problem["seed"]).randint(self.low, self.high)
        return f"{self.low}:{self.high}?"

    def step(self, action):
        if not (action.isascii() and action.isdigit()):
            return "?", -0.1, False  # no number
        guess = int(action)
        if guess == self.secret:
            return "", 1.0, True
        return (">" if guess < self.secret else "<"), 0.0, False
