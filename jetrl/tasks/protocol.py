"""What every task offers, and the small functions that all of them share.

A task's training stream is a pure function of (seed, index), so that a resumed run needs no state of it. Its held-out
problems never appear in that stream.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from jetrl.errors import UserError
from jetrl.rewards.function import RewardFunction
from jetrl.types import Problem


class Task(Protocol):
    """A source of problems with known answers."""

    name: str
    gold_template: str | None  # how a perfect completion is made of `{answer}`; None: the solution, else the answer
    check_gold: bool  # whether gold answers must earn a reward before step 1

    @property
    def reward(self) -> RewardFunction | None:
        """The task's own reward; None: the config's `task.reward` must name one."""
        ...

    def problem(self, index: int) -> Problem:
        """Number `index` (from 0, without end) of the training stream."""
        ...

    def eval_problems(self, n: int) -> list[Problem]:
        """The first `n` held-out problems (all of them, if a file has fewer): the same for every seed of a run."""
        ...

    def describe(self) -> str:
        """One line on what is trained on and how the held-out problems were chosen."""
        ...


def check_params(task: str, params: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise for a key of `task.params` that the task does not have, with the nearest one that it has."""
    for key in params:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}."
            raise UserError(
                f"task.params.{key}: task {task!r} has no such parameter; {hint} (task.params={{}} drops those of a "
                "recipe for another task.)"
            )


def gold_params(params: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The two parameters of every task that say what text must earn a reward, and whether that is checked."""
    template, check = params.get("gold_template"), params.get("check_gold", True)
    if template is not None and not (isinstance(template, str) and "{answer}" in template):
        raise UserError(f"task.params.gold_template: must be a string that contains {{answer}}, got {template!r}.")
    if not isinstance(check, bool):
        raise UserError(f"task.params.check_gold: must be true or false, got {check!r}.")
    return template, check
