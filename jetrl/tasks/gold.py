"""The reward that a run needs, and the check that gold answers earn it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jetrl.chat.messages import solution_turns
from jetrl.chat.prompts import encode_text
from jetrl.errors import UserError, shorten
from jetrl.rewards.calls import WeightedReward, reward_name
from jetrl.rewards.function import RewardFunction, completion_text
from jetrl.rewards.score import Completion, Item, call_parts, with_prefilled
from jetrl.tasks.protocol import Task
from jetrl.types import Problem


def required_reward(task: Task, named: RewardFunction | None) -> RewardFunction:
    """The function that `task.reward` names, else the task's own. Runs without an environment need one."""
    if (reward := named if named is not None else task.reward) is not None:
        return reward
    raise UserError(
        f"task.reward: task {task.name!r} has no reward of its own. Set jetrl.rewards.text:exact_match, "
        "jetrl.rewards.text:last_integer, jetrl.rewards.gsm8k:gsm8k_reward, jetrl.rewards.mathematics:math_reward, "
        "or a function of yours, as module:function or path/to/file.py:function."
    )


def check_gold(
    task: Task, reward: RewardFunction | None, tokenizer: Any, num: int = 8, *, conversations: bool = False
) -> int:
    """Score the gold answers of the first `num` problems, encoded and decoded as the engine's text is. With
    `conversations`, each is the only turn of one.

    One that earns at most 0, and no more than an empty answer, would never be learned, so it stops the run. Returns how
    many were scored: those with a gold text; none if only the environment gives rewards (`reward` None).
    """
    if reward is None:
        return 0
    items: list[Item] = []
    for problem in (task.problem(i) for i in range(num if task.check_gold else 0)):
        if text := gold_text(task, problem, reward):
            tokens = encode_text(text, tokenizer, f"Problem {problem.id}", "gold answer")
            turn = _as_turn(tokenizer.decode(tokens), conversations)
            items.append((with_prefilled(problem, ""), turn, tuple(tokens)))
    if not items:
        return 0
    values = _best(reward, items)
    empty: list[float | None] = []
    for i, ((problem, gold, _), value) in enumerate(zip(items, values, strict=True)):
        if value is None or value <= 0:
            empty = empty or _best(reward, [(one, _as_turn("", conversations), ()) for one, _, _ in items])
            if value is not None and (nothing := empty[i]) is not None and nothing < value:
                continue  # rewards may be 0 for a right answer and less for a wrong one
            raise UserError(
                f"The gold answer of problem {problem.id} earns no reward, so no completion can be expected to.\n"
                f"  prompt: {shorten(str(problem.prompt), 400)!r}\n"
                f"  gold text: {shorten(completion_text(gold), 400)!r}\n"
                f"  answer: {problem.answer!r}\n  score: {value} by {reward_name(reward)}\n"
                "Fix the reward function or the answers; set task.params.gold_template (such as '#### {answer}') if "
                "the function needs the answer in its own form; task.params.check_gold = false skips this check."
            )
    return len(items)


def _as_turn(text: str, conversations: bool) -> Completion:
    return [{"role": "assistant", "content": text}] if conversations else text


def _best(reward: RewardFunction, items: Sequence[Item]) -> list[float | None]:
    """The score of each item; of several functions the one that speaks best for it."""
    scores = [part.values for part in call_parts(reward, items)]
    return list(reward.best(scores) if isinstance(reward, WeightedReward) else scores[0])


def gold_text(task: Task, problem: Problem, reward: RewardFunction) -> str:
    """A completion that deserves the full reward: the task's template, else the solution, else the function's form."""
    if task.gold_template is None and problem.solution is not None:
        return str(solution_turns(problem)[-1][0]["content"])
    template = task.gold_template or str(getattr(reward, "gold_template", "{answer}"))
    answer = getattr(reward, "gold_answer", str)(problem.answer)  # for a column that holds more
    return template.replace("{answer}", answer) if answer else ""
