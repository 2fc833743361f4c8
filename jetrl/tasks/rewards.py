"""Scoring trajectories: reward functions in TRL's signature, found by name, called and checked.

A reward function is `f(prompts, completions, **columns) -> list[float | None]`. The columns are `answer`, `solution`
(where problems have one), `completion_ids` and every further column of the data; a function takes those that it names.
Where a prompt is a list of chat messages, its completion is one too, as in TRL. None means "not scored": with
several functions, this one is left out of the sum. A completion that none scores counts in `reward/num_errors` and is
left out of training; in an evaluation it counts as 0.

A conversation with an environment has the rewards that the environment gave. A function that `task.reward` names
replaces them; its completion is the whole conversation after the prompt, as messages.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from jetrl.config import Config
from jetrl.errors import UserError, as_user_error
from jetrl.tasks.calls import Call
from jetrl.tasks.prompts import encode_text
from jetrl.tasks.protocol import RewardFunction, Task, completion_text, shorten
from jetrl.tasks.reward_calls import Scores, WeightedReward, call_all, reward_name, select_columns
from jetrl.types import Group, Problem, Prompt, Trajectory

Completion = str | list[dict[str, str]]  # a text; for conversations, messages
Item = tuple[Problem, Completion, tuple[int, ...]]  # problem, completion, its tokens

_NUMBER = re.compile(r"(?<![0-9.])-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_MAX_REWARD = 1e30
_UNSCORED = "no reward function scored it"
_MAX_NUMBER = 1000  # characters; Python refuses to read integers of more than some thousand digits


def required_reward(task: Task, named: RewardFunction | None) -> RewardFunction:
    """The function that `task.reward` names, else the task's own. Runs without an environment need one."""
    if (reward := named if named is not None else task.reward) is not None:
        return reward
    raise UserError(
        f"task.reward: task {task.name!r} has no reward of its own. Set jetrl.tasks.rewards:exact_match, "
        "jetrl.tasks.rewards:last_integer, jetrl.tasks.gsm8k:gsm8k_reward, jetrl.tasks.math_reward:math_reward, or a "
        "function of yours, as module:function or path/to/file.py:function."
    )


@dataclass(frozen=True, slots=True)
class Scored:
    """Groups with rewards, the `reward/*` metrics, and separately what no reward function scored.

    A group all of whose trajectories were not scored is gone. An evaluation has no unscored ones.
    """

    groups: list[Group]
    stats: dict[str, float]
    unscored: list[tuple[Prompt, Trajectory]] = field(default_factory=list)


Rewards = tuple[list[float | None], dict[str, float]]
"""A number for each trajectory in the order of the groups (None: not scored), and the `reward/*` metrics."""


def score(
    groups: Sequence[Group], reward: RewardFunction | None, config: Config | None, *, conversations: bool = False,
    at_limit: str = "keep",
) -> Scored:
    """Groups with rewards: `rewards_of`, then `with_rewards`."""
    rewards = rewards_of(groups, reward, config, conversations=conversations, at_limit=at_limit)
    return with_rewards(groups, rewards, replaced=reward is not None, at_limit=at_limit)


def rewards_of(
    groups: Sequence[Group], reward: RewardFunction | None, config: Config | None, *, conversations: bool,
    at_limit: str, known: Mapping[int, Sequence[Scores]] | None = None,
) -> Rewards:
    """Rewards of the trajectories. With a config, for training: long responses pay its overlong penalty, and what no
    function scores is left out; without one, for an evaluation, it counts as 0.

    `reward` None: what the environment gave, the sum over the turns. `conversations` says that an environment is in
    use: completions are lists of messages then. `at_limit = "zero"`: trajectories that ran into a limit get 0. `known`:
    what `score_parts` gave for some of the groups, by their place in `groups`.
    """
    trajectories = [(g.prompt.problem, t) for g in groups for t in g.trajectories]
    stats: dict[str, float] = {}
    scores: list[float | None]
    if reward is None:
        scores = [math.fsum(s.reward for s in t.turns) for _, t in trajectories]
    else:
        scores, stats = _summed(reward, _all_parts(groups, reward, conversations, known or {}))
        if scores and config is None and all(s is None for s in scores):
            raise UserError(nothing_scored(reward, len(scores), trajectories[0], conversations))
    stats["reward/num_errors"] = float(sum(s is None for s in scores))
    rewards = [0.0 if s is None and config is None else s for s in scores]
    if at_limit == "zero":
        pairs = zip(rewards, trajectories, strict=True)
        rewards = [0.0 if t.truncated and r is not None else r for r, (_, t) in pairs]
    if config is not None and config.rl.overlong_buffer_len and rewards:
        rewards, stats["reward/overlong_penalty_mean"] = _with_penalty(rewards, trajectories, config)
    if numbers := [r for r in rewards if r is not None]:
        stats |= {"reward/min": min(numbers), "reward/max": max(numbers)}
    return rewards, stats


def _with_penalty(
    rewards: Sequence[float | None], trajectories: Sequence[tuple[Problem, Trajectory]], config: Config
) -> tuple[list[float | None], float]:
    """The rewards with the overlong penalty, and its mean over all trajectories."""
    longest, rl = config.rollout.max_response_length, config.rl
    penalties = [
        overlong_penalty(t.response_length, longest, rl.overlong_buffer_len, rl.overlong_penalty_factor)
        for _, t in trajectories
    ]
    paid = [None if r is None else r + p for r, p in zip(rewards, penalties, strict=True)]
    return paid, sum(penalties) / len(penalties)


def with_rewards(groups: Sequence[Group], rewards: Rewards, *, replaced: bool, at_limit: str = "keep") -> Scored:
    """The groups with these rewards. Rewards of single turns are gone where something else takes their place: a
    function (`replaced`), or the 0 of a limit."""
    values, stats = rewards
    scored, unscored, end = [], [], 0
    for group in groups:
        start, end = end, end + len(group.trajectories)
        own = [
            _without_turn_rewards(t) if replaced or (at_limit == "zero" and t.truncated) else t
            for t in group.trajectories
        ]
        pairs = list(zip(own, values[start:end], strict=True))
        kept = [(t, r) for t, r in pairs if r is not None]
        unscored += [(group.prompt, replace(t, error=_UNSCORED)) for t, r in pairs if r is None]
        if kept or not pairs:
            scored.append(
                replace(group, trajectories=tuple(t for t, _ in kept), rewards=tuple(r for _, r in kept))
            )
    return Scored(scored, stats, unscored)


def nothing_scored(
    reward: RewardFunction, count: int, first: tuple[Problem, Trajectory], conversations: bool = False
) -> str:
    """The message where all `count` completions got None, with the first of them."""
    problem, completion, _ = _item(*first, conversations)
    return (
        f"Reward function {reward_name(reward)}: not one of {count} completions could be scored (all None). First "
        f"completion: {_shown(completion)} of problem {problem.id}, answer: {problem.answer!r}."
    )


def _without_turn_rewards(trajectory: Trajectory) -> Trajectory:
    if not any(segment.reward for segment in trajectory.segments):
        return trajectory
    return replace(trajectory, segments=tuple(replace(segment, reward=0.0) for segment in trajectory.segments))


def _item(problem: Problem, trajectory: Trajectory, conversations: bool) -> Item:
    """What the reward function gets of a trajectory: an answer's text and tokens, or a conversation's messages."""
    opening, *rest = trajectory.segments
    tokens = tuple(token for segment in rest for token in segment.tokens)
    if not conversations:
        assert [s.author for s in rest] == ["policy"], "only conversations have several turns"
        return problem, rest[0].text, tokens
    if not problem.prompt:  # the environment made it
        problem = replace(problem, prompt=opening.text)
    roles = {"policy": "assistant", "environment": "user"}
    said = [s.messages or ({"role": roles[s.author], "content": s.text},) for s in rest]
    return problem, [dict(message) for messages in said for message in messages], tokens


def _shown(completion: Completion) -> str:
    return repr(shorten(completion if isinstance(completion, str) else str(completion)))


def call_reward(reward: RewardFunction, items: Sequence[Item]) -> list[float | None]:
    """One call of the function on all items; its result is checked: as many, each a finite number or None."""
    return _summed(reward, _call_parts(reward, items))[0]


def score_parts(groups: Sequence[Group], reward: RewardFunction, conversations: bool) -> list[Scores]:
    """One call of each of the functions that the reward consists of, on all trajectories: their scores, checked.

    UserError naming the function, and the line or the completion, if it fails. May be called from any thread.
    """
    return _call_parts(reward, [_item(g.prompt.problem, t, conversations) for g in groups for t in g.trajectories])


def _all_parts(
    groups: Sequence[Group], reward: RewardFunction, conversations: bool, known: Mapping[int, Sequence[Scores]]
) -> list[Scores]:
    """`score_parts` of all groups, of which some are `known`."""
    rest = [i for i in range(len(groups)) if i not in known]
    fresh = [iter(part) for part in score_parts([groups[i] for i in rest], reward, conversations)] if rest else []
    parts: list[list[float | None]] = [[] for _ in _functions(reward)]
    for i, group in enumerate(groups):
        for number, part in enumerate(parts):
            part += known[i][number] if i in known else islice(fresh[number], len(group.trajectories))
    return list(parts)


def _summed(reward: RewardFunction, parts: Sequence[Scores]) -> tuple[list[float | None], dict[str, float]]:
    """The scores of the reward; of several functions also the metrics of each."""
    if not isinstance(reward, WeightedReward):
        return list(parts[0]), {}
    return reward.summed(parts), reward.stats(parts) if len(parts) > 1 else {}


def _functions(reward: RewardFunction) -> tuple[Callable[..., Any], ...]:
    return reward.functions if isinstance(reward, WeightedReward) else (reward,)


def _call_parts(reward: RewardFunction, items: Sequence[Item]) -> list[Scores]:
    """The scores of each of the functions that the reward consists of, checked."""
    functions = _functions(reward)
    columns = _columns(items)
    calls = call_all([(function, select_columns(function, columns)) for function in functions])
    return [_checked(function, call, items) for function, call in zip(functions, calls, strict=True)]


def _checked(function: RewardFunction, call: Call, items: Sequence[Item]) -> Scores:
    name, result, error = reward_name(function), call.value, call.error
    if isinstance(error, UserError):
        raise error
    if error is not None:  # a user's function may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise as_user_error(error)(
            f"Reward function {name} raised {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno}). "
            "Fix it; --debug shows the whole traceback."
        ) from error
    if isinstance(result, (str, Mapping)) or not hasattr(result, "__len__"):
        raise UserError(f"Reward function {name} must return a list of numbers, got {type(result).__name__}.")
    if len(result) != len(items):
        raise UserError(f"Reward function {name} returned {len(result)} scores for {len(items)} completions.")
    return [_number(value, name, item) for value, item in zip(result, items, strict=True)]


def _number(value: Any, name: str, item: Item) -> float | None:
    if value is None:
        return None
    try:
        plain = value.item() if hasattr(value, "item") else value  # a scalar of numpy or torch
    except (ValueError, RuntimeError):
        plain = value  # an array; refused below
    where = f"for completion {_shown(item[1])} of problem {item[0].id}"
    if not isinstance(plain, (int, float)):
        raise UserError(f"Reward function {name} returned {value!r} ({type(value).__name__}), not a number, {where}.")
    if not -_MAX_REWARD <= plain <= _MAX_REWARD:  # NaN as well
        shown = shorten(repr(plain)) if isinstance(plain, float) else "an integer beyond 1e30"
        raise UserError(f"Reward function {name} returned {shown} {where}. Return None where nothing can be scored.")
    return float(plain)


def _columns(items: Sequence[Item]) -> dict[str, list[Any]]:
    """The arguments by name, one entry a completion."""
    problems = [problem for problem, *_ in items]
    columns: dict[str, list[Any]] = {
        "prompts": [p.prompt if isinstance(p.prompt, str) else [dict(m) for m in p.prompt] for p in problems],
        "completions": [
            [{"role": "assistant", "content": c}] if isinstance(c, str) and not isinstance(p.prompt, str) else c
            for p, c, _ in items
        ],
        "completion_ids": [list(tokens) for *_, tokens in items],
        "answer": [p.answer for p in problems],
    }
    if any(p.solution is not None for p in problems):
        columns["solution"] = [p.solution for p in problems]
    for key in dict.fromkeys(key for p in problems for key in p.extra):
        assert key not in columns, f"extra column {key!r} hides a column of ours"
        columns[key] = [p.extra.get(key) for p in problems]
    return columns


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
            items.append((problem, _as_turn(tokenizer.decode(tokens), conversations), tuple(tokens)))
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
    scores = _call_parts(reward, items)
    return list(reward.best(scores) if isinstance(reward, WeightedReward) else scores[0])


def gold_text(task: Task, problem: Problem, reward: RewardFunction) -> str:
    """A completion that deserves the full reward: the task's template, else the solution, else the function's form."""
    if task.gold_template is None and problem.solution is not None:
        solution = problem.solution
        return solution if isinstance(solution, str) else [text for author, text in solution if author == "policy"][-1]
    template = task.gold_template or str(getattr(reward, "gold_template", "{answer}"))
    answer = getattr(reward, "gold_answer", str)(problem.answer)  # for a column that holds more
    return template.replace("{answer}", answer) if answer else ""


def overlong_penalty(length: int, max_response_length: int, buffer_len: int, factor: float) -> float:
    """DAPO's soft punishment: 0 up to `max_response_length - buffer_len` tokens, then falling to -factor at the end.

    `min(0, -(length - (max_response_length - buffer_len)) / buffer_len * factor)`; equation 13 of arXiv 2503.14476.
    """
    if not 0 < buffer_len <= max_response_length:
        raise UserError(
            f"rl.overlong_buffer_len: must be from 1 to rollout.max_response_length = {max_response_length}, got "
            f"{buffer_len}."
        )
    excess = length - (max_response_length - buffer_len)
    return -factor * excess / buffer_len if excess > 0 else 0.0


def exact_match(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the whole completion is the answer, white space at the ends aside; else 0."""
    return [float(completion_text(c).strip() == a.strip()) for c, a in zip(completions, answer, strict=True)]


def last_integer(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the last number of the completion is the answer, an integer; `1,234` and `1234.0` are 1234."""
    return [float(_last_number(completion_text(c)) == _gold(a)) for c, a in zip(completions, answer, strict=True)]


def _gold(answer: str) -> int:
    try:
        return int(answer.replace(",", ""))
    except ValueError:
        raise UserError(
            f"jetrl.tasks.rewards:last_integer: the answer {answer!r} is not an integer. Use another reward function."
        ) from None


def _last_number(text: str) -> int | None:
    found = _NUMBER.findall(text)
    if not found:
        return None
    whole, _, fraction = found[-1].replace(",", "").partition(".")
    return int(whole) if not fraction.strip("0") and len(whole) <= _MAX_NUMBER else None
