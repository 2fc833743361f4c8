"""The task of environments that make their own problems: an endless stream of seeds.

An environment draws everything from the seed that `reset` gets. Seeds of training and held-out seeds come from
different ranges, so that no held-out problem is ever trained on (unless the environment makes the same problem from two
seeds).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jetrl.hashing import stable_hash
from jetrl.rewards.function import RewardFunction
from jetrl.tasks.protocol import check_params
from jetrl.types import Problem


class EnvironmentTask:
    """Problems without prompt and answer; `extra` holds `seed` and `index`. It has no params and no reward."""

    name = "environment"
    reward: RewardFunction | None = None
    gold_template: str | None = None
    check_gold = False

    def __init__(self, params: Mapping[str, Any], seed: int, environment: str) -> None:
        check_params(self.name, params, ())
        self.seed, self.environment = seed, environment

    def problem(self, index: int) -> Problem:
        """Number `index` of the training stream."""
        return self._make(f"{self.environment}/{self.seed}/{index}", index, problem_seed(self.seed, index))

    def eval_problems(self, n: int) -> list[Problem]:
        """The first `n` held-out problems; they do not depend on the run's seed."""
        return [self._make(f"{self.environment}/eval/{i}", i, problem_seed(None, i)) for i in range(n)]

    def describe(self) -> str:
        """What is trained on and held out."""
        return f"problems that {self.environment} makes from seeds; a separate stream of seeds is held out"

    def _make(self, identity: str, index: int, seed: int) -> Problem:
        return Problem(id=identity, prompt="", answer="", extra={"seed": seed, "index": index})


def problem_seed(seed: int | None, index: int) -> int:
    """What an environment draws from in problem `index` of the run with `seed` (below 2^30), or of the held-out stream
    (`seed` None; from 2^30 to below 2^31)."""
    if seed is None:
        return 2**30 + stable_hash("environment eval", index) % 2**30
    return stable_hash("environment", seed, index) % 2**30
