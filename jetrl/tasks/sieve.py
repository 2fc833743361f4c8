"""Which rows of the data become problems: prompts that are too long or repeated may be left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jetrl.chat.prompts import prompt_key
from jetrl.errors import UserError
from jetrl.types import Problem

OF_PROMPTS, OF_CONVERSATIONS = ("prompts", "task.max_prompt_length"), ("conversations", "train.max_length")


@dataclass(slots=True)
class Sieve:
    """Takes problems one by one and counts what it leaves out.

    `fits(problem)` says whether a prompt is short enough, or raises; None: not checked. `distinct`: of rows with the
    same prompt, only the first is taken.
    """

    fits: Callable[[Problem], bool] | None = None
    distinct: bool = False
    limit: tuple[str, str] = OF_PROMPTS  # what may be too long, and the key that says so
    overlong: int = 0
    repeated: int = 0
    contradicting: int = 0  # repeated ones that have another answer
    _answers: dict[str, str] = field(default_factory=dict)

    def take(self, problems: Iterable[Problem], source: str) -> list[Problem]:
        """The problems that are left, in order. UserError where there were some and all are too long."""
        kept = [problem for problem in problems if self._passes(problem)]
        if not kept and self.overlong:
            what, key = self.limit
            raise UserError(
                f"{source}: all {self.overlong} {what} are longer than {key}, so "
                f'task.overlong_prompts = "drop" leaves none. Raise {key}.'
            )
        return kept

    def _passes(self, problem: Problem) -> bool:
        if self.distinct:
            key = prompt_key(problem)
            if (before := self._answers.get(key)) is not None:
                self.repeated += 1
                self.contradicting += before != problem.answer
                return False
            self._answers[key] = problem.answer
        if self.fits is not None and not self.fits(problem):
            self.overlong += 1
            return False
        return True

    def describe(self, source: str) -> str:
        """What was left out, as parts of a sentence; empty where nothing was."""
        parts = []
        if self.overlong:
            what, key = self.limit
            parts.append(f"{_rows(self.overlong)} of {source} left out: longer {what} than {key}")
        if self.repeated:
            others = f" ({self.contradicting} of them with another answer)" if self.contradicting else ""
            parts.append(f"{_rows(self.repeated)} of {source} left out: repeated prompts{others}")
        return "; ".join(parts)


def _rows(count: int) -> str:
    return f"{count} row" + "s" * (count != 1)
