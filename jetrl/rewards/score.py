"""Scoring trajectories: reward functions in TRL's signature, found by name, called and checked.

A reward function is `f(prompts, completions, **columns) -> list[float | None]`. The columns are `answer`, `solution`
(where problems have one), `completion_ids` and every further column of the data; a function takes those that it names.
Where a prompt is a list of chat messages, its completion is one too, as in TRL. None means "not scored": with
several functions, this one is left out of the sum. A completion that none with a weight scores, or not the one that
`rl.signal` names, counts in `reward/num_errors` and is left out, of training as of an evaluation.

A conversation with an environment has the rewards that the environment gave. A function that `task.reward` names
replaces them; its completion is the whole conversation after the prompt, as messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from statistics import fmean, stdev
from typing import Any

from jetrl.config import Config
from jetrl.errors import UserError, as_user_error, place_of, shorten, told
from jetrl.rewards.calls import (
    WeightedReward,
    call_all,
    checked_list,
    checked_number,
    functions_of,
    names_of,
    reward_name,
    select_columns,
    split_score,
)
from jetrl.rewards.function import RewardFunction
from jetrl.rewards.results import Log, Misused, Scores, joined
from jetrl.rounding import all_equal
from jetrl.types import Group, Problem, Trajectory
from jetrl.user_code.calls import Call

Completion = str | list[dict[str, str]]  # a text; for conversations, messages
Item = tuple[Problem, Completion, tuple[int, ...]]  # problem, completion, its tokens

_UNSCORED = "no reward function scored it"
_NOT_GIVEN = "its environment gave no reward"


@dataclass(frozen=True, slots=True)
class Rewards:
    """Of trajectories in the order of their groups: the reward (the weighted sum, or what the environment gave), the
    number that `rl.signal` names, both None where a trajectory is not scored; the overlong penalties (empty: there are
    none); and what each reward function gave, by name. `sizes` and `signal_sizes`: of each such number the sum of the
    absolute values of its terms (`Group`)."""

    values: tuple[float | None, ...]
    signals: tuple[float | None, ...]
    penalties: tuple[float, ...] = ()
    parts: Mapping[str, Scores] = field(default_factory=dict)
    sizes: tuple[float, ...] = ()
    signal_sizes: tuple[float, ...] = ()

    @property
    def paid(self) -> list[float | None]:
        """The rewards with their penalties: what is learned from."""
        penalties = self.penalties or (0.0,) * len(self.values)
        return [None if v is None else v + p for v, p in zip(self.values, penalties, strict=True)]

    @property
    def paid_sizes(self) -> list[float]:
        """The same as `sizes`, with the penalties."""
        penalties = self.penalties or (0.0,) * len(self.sizes)
        return [size + abs(p) for size, p in zip(self.sizes, penalties, strict=True)]

    @staticmethod
    def scored(values: Sequence[float | None], sizes: Sequence[float]) -> list[tuple[float, float]]:
        """Those of the numbers that there are, with their sizes."""
        return [(value, size) for value, size in zip(values, sizes, strict=True) if value is not None]


@dataclass(frozen=True, slots=True)
class Scored:
    """Groups with rewards, and separately the trajectories that are not scored, in groups without rewards.

    A group all of whose trajectories were not scored is in `unscored` alone. `beside`: seconds of the calls next to the
    rollout, if there were any.
    """

    groups: list[Group]
    rewards: Rewards
    unscored: list[Group] = field(default_factory=list)
    beside: float | None = None

    @property
    def stats(self) -> dict[str, float]:
        """Its `reward/*` metrics."""
        return reward_metrics([self.rewards])

    @property
    def num_unscored(self) -> int:
        return sum(len(group.trajectories) for group in self.unscored)


def score(
    groups: Sequence[Group], reward: RewardFunction | None, config: Config | None, *, conversations: bool = False,
    at_limit: str = "keep", signal: str = "reward",
) -> Scored:
    """Groups with rewards: `rewards_of`, then `with_rewards`."""
    rewards = rewards_of(
        groups, reward, config, conversations=conversations, at_limit=at_limit, signal=signal
    )
    return with_rewards(groups, rewards, replaced=reward is not None, at_limit=at_limit)


def rewards_of(
    groups: Sequence[Group], reward: RewardFunction | None, config: Config | None, *, conversations: bool,
    at_limit: str, known: Mapping[int, Sequence[Scores]] | None = None, signal: str = "reward",
) -> Rewards:
    """Rewards of the trajectories. With a config, for training, long responses pay its overlong penalty.

    `reward` None: what the environment gave, the sum over the turns; None where it gave nothing. `conversations` says
    that an environment is in use: completions are lists of messages then. `at_limit = "zero"`: trajectories that ran
    into a limit get 0. `known`: what `score_parts` gave for some of the groups, by their place in `groups`. `signal`:
    `rl.signal`; what the function of that name did not score is not scored at all.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    parts: dict[str, Scores] = {}
    values: list[float | None]
    if reward is None:
        values = [math.fsum(t.given) if t.given else None for t in trajectories]
        sizes = [math.fsum(map(abs, t.given)) for t in trajectories]
    else:
        parts = dict(zip(names_of(reward), _all_parts(groups, reward, conversations, known or {}), strict=True))
        values = _summed(reward, list(parts.values()))
        sizes = _sizes(reward, list(parts.values()))
    deciding = list(parts[signal].values) if signal != "reward" else values
    deciding_sizes = list(map(_size, deciding)) if signal != "reward" else sizes
    if at_limit == "zero":
        cut = [t.truncated for t in trajectories]
        values, deciding = (
            [0.0 if c else v for v, c in zip(column, cut, strict=True)] for column in (values, deciding)
        )
        sizes, deciding_sizes = (
            [0.0 if c else v for v, c in zip(column, cut, strict=True)] for column in (sizes, deciding_sizes)
        )
    scored = [v is not None and d is not None for v, d in zip(values, deciding, strict=True)]
    penalties: tuple[float, ...] = ()
    if config is not None and (buffer := config.rl.overlong_buffer_len):
        longest, factor = config.rollout.max_response_length, config.rl.overlong_penalty_factor
        penalties = tuple(overlong_penalty(t.response_length, longest, buffer, factor) for t in trajectories)
    kept = tuple(v if yes else None for v, yes in zip(values, scored, strict=True))
    named = tuple(d if yes else None for d, yes in zip(deciding, scored, strict=True))
    return Rewards(kept, named, penalties, parts, tuple(sizes), tuple(deciding_sizes))


def _size(value: float | None) -> float:
    return abs(value or 0.0)


def reward_metrics(rounds: Sequence[Rewards]) -> dict[str, float]:
    """The `reward/*` metrics of one scoring, or of all rounds of a step: each over the completions of all rounds.

    Of several functions `reward/NAME/mean` and `/std` (n - 1; 0 for one value), without weights, over what each scored;
    `reward/NAME/KEY`, the mean of a number of its dicts; what `log_metric` logged; `num_errors`, the completions that
    are not scored; `min` and `max` of the others' rewards (one number where they are equal up to rounding), and the
    mean of their `overlong_penalty`, with `before_penalty_min` and `before_penalty_max`.
    """
    found: dict[str, float] = {}
    names = list(dict.fromkeys(name for one in rounds for name in one.parts))
    for name in names:
        part = joined([one.parts[name] for one in rounds if name in one.parts])
        columns = {key: [n for n in column if n is not None] for key, column in part.numbers.items()}
        if len(names) > 1 and (own := [value for value in part.values if value is not None]):
            found[f"reward/{name}/mean"] = fmean(own)
            found[f"reward/{name}/std"] = 0.0 if all_equal(own) else stdev(own)
        found |= {f"reward/{name}/{key}": fmean(column) for key, column in columns.items() if column}
        for key, (total, count) in part.logged.items():
            if f"reward/{key}" in found:
                raise UserError(f"Two reward functions log reward/{key}. Choose another name in one of them.")
            found[f"reward/{key}"] = total / count if count else 0.0
    found["reward/num_errors"] = float(sum(value is None for one in rounds for value in one.values))
    pairs = [(v, p) for one in rounds for v, p in zip(one.values, one.penalties, strict=bool(one.penalties))]
    if penalties := [p for v, p in pairs if v is not None]:
        found["reward/overlong_penalty_mean"] = fmean(penalties)
        found |= _ends("reward/before_penalty_", [pair for one in rounds for pair in one.scored(one.values, one.sizes)])
    return found | _ends("reward/", [pair for one in rounds for pair in one.scored(one.paid, one.paid_sizes)])


def _ends(prefix: str, pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The smallest and the largest of numbers, which have the sizes of their terms with them; of none nothing."""
    if not pairs:
        return {}
    numbers, sizes = zip(*pairs, strict=True)
    least, most = min(numbers), max(numbers)
    return {f"{prefix}min": least, f"{prefix}max": least if all_equal(numbers, max(sizes)) else most}


def with_rewards(groups: Sequence[Group], rewards: Rewards, *, replaced: bool, at_limit: str = "keep") -> Scored:
    """The groups with these rewards. Rewards of single turns are gone where something else takes their place: a
    function (`replaced`), or the 0 of a limit."""
    paid, sizes, columns = rewards.paid, rewards.paid_sizes, _extra_columns(rewards.parts)
    parts = {name: part.values for name, part in rewards.parts.items()} if len(rewards.parts) > 1 else {}
    scored: list[Group] = []
    unscored: list[Group] = []
    end = 0
    for group in groups:
        start, end = end, end + len(group.trajectories)
        own = [
            _without_turn_rewards(t) if replaced or (at_limit == "zero" and t.truncated) else t
            for t in group.trajectories
        ]

        def among(places: Sequence[int], column: Sequence[Any], start: int = start) -> tuple[Any, ...]:
            return tuple(column[start + i] for i in places)

        kept = [i for i in range(len(own)) if rewards.values[start + i] is not None]
        left = [i for i in range(len(own)) if rewards.values[start + i] is None]
        for places, into in ((kept, scored), (left, unscored)):
            if not places and (into is unscored or own):
                continue
            into.append(replace(
                group, trajectories=tuple(own[i] for i in places),
                rewards=among(places, paid) if into is scored else (),
                signals=among(places, rewards.signals) if into is scored else (),
                scores={name: among(places, values) for name, values in parts.items()},
                extra={name: among(places, values) for name, values in columns.items()},
                sizes=among(places, sizes) if into is scored else (),
                signal_sizes=among(places, rewards.signal_sizes) if into is scored else (),
            ))
    said = _UNSCORED if replaced else _NOT_GIVEN
    unscored = [replace(g, trajectories=tuple(replace(t, error=said) for t in g.trajectories)) for g in unscored]
    return Scored(scored, rewards, unscored)


def _extra_columns(parts: Mapping[str, Scores]) -> dict[str, tuple[Any, ...]]:
    """What the functions logged for each completion; a name that two of them use has the second one's before it."""
    columns: dict[str, tuple[Any, ...]] = {}
    for name, part in parts.items():
        for key, values in part.extra.items():
            columns[key if key not in columns else f"{name}/{key}"] = values
    return columns


def nothing_scored(
    reward: RewardFunction | None, count: int, first: tuple[Problem, Trajectory], conversations: bool = False,
    environment: str = "The environment",
) -> str:
    """The message where all `count` completions got None, with the first of them; `reward` None: the environment of
    this name gave nothing."""
    if reward is None:
        return _nothing_given(environment, count, *first)
    problem, completion, _ = _item(*first, conversations)
    return (
        f"Reward function {reward_name(reward)}: not one of {count} completions could be scored (all None). First "
        f"completion: {_shown(completion)} of problem {problem.id}, answer: {problem.answer!r}."
    )


def _nothing_given(environment: str, count: int, problem: Problem, trajectory: Trajectory) -> str:
    limit = (
        ' It ran into a limit before a reward was given: raise the limit, or set environment.at_limit = "zero" to '
        "count such conversations as 0."
    )
    return (
        f"{environment} gave no reward (None) in any of {count} conversations, so nothing can be scored. The first, of "
        f"problem {problem.id}, ended by {trajectory.end!r}: {_shown(_item(problem, trajectory, True)[1])}."
        + (limit if trajectory.truncated else " Return a number as the second value of step.")
    )


def _without_turn_rewards(trajectory: Trajectory) -> Trajectory:
    if not trajectory.given:
        return trajectory
    return replace(trajectory, segments=tuple(replace(segment, reward=None) for segment in trajectory.segments))


def _item(problem: Problem, trajectory: Trajectory, conversations: bool) -> Item:
    """What the reward function gets of a trajectory: an answer's text and tokens, or a conversation's messages."""
    opening, *rest = trajectory.segments
    problem = with_prefilled(problem, opening.opened)
    tokens = tuple(chain.from_iterable(segment.tokens.tolist() for segment in rest))
    if not conversations:
        assert [s.author for s in rest] == ["policy"], "only conversations have several turns"
        return problem, rest[0].text, tokens
    if not problem.prompt:  # the environment made it
        problem = replace(problem, prompt=opening.text)
    roles = {"policy": "assistant", "environment": "user"}
    said = [s.messages or ({"role": roles[s.author], "content": s.text},) for s in rest]
    return problem, [dict(message) for messages in said for message in messages], tokens


def with_prefilled(problem: Problem, opened: str | None) -> Problem:
    """The problem with the column `prefilled`: what the template has written of the policy's turn. The data's own
    column of that name stays."""
    return replace(problem, extra={"prefilled": opened, **problem.extra})


def _shown(completion: Completion) -> str:
    return repr(shorten(completion if isinstance(completion, str) else str(completion)))


def call_reward(reward: RewardFunction, items: Sequence[Item]) -> list[float | None]:
    """One call of the function on all items; its result is checked: as many, each a finite number or None."""
    return _summed(reward, call_parts(reward, items))


def score_parts(groups: Sequence[Group], reward: RewardFunction, conversations: bool) -> list[Scores]:
    """One call of each of the functions that the reward consists of, on all trajectories: their scores, checked.

    UserError naming the function, and the line or the completion, if it fails. May be called from any thread.
    """
    return call_parts(reward, [_item(g.prompt.problem, t, conversations) for g in groups for t in g.trajectories])


def _all_parts(
    groups: Sequence[Group], reward: RewardFunction, conversations: bool, known: Mapping[int, Sequence[Scores]]
) -> list[Scores]:
    """`score_parts` of all groups, of which some are `known`."""
    rest = [i for i in range(len(groups)) if i not in known]
    fresh = score_parts([groups[i] for i in rest], reward, conversations) if rest else []
    ends = dict(zip(rest, accumulate(len(groups[i].trajectories) for i in rest), strict=True))
    found = []
    for number in range(len(functions_of(reward))):
        pieces = [
            known[i][number] if i in known else fresh[number].part(ends[i] - len(group.trajectories), ends[i])
            for i, group in enumerate(groups)
        ]
        logged = [Scores((), logged=fresh[number].logged)] if rest else []
        found.append(joined([*pieces, *logged]))
    return found


def _summed(reward: RewardFunction, parts: Sequence[Scores]) -> list[float | None]:
    """The scores of the reward."""
    values = [part.values for part in parts]
    return reward.summed(values) if isinstance(reward, WeightedReward) else list(values[0])


def _sizes(reward: RewardFunction, parts: Sequence[Scores]) -> list[float]:
    """Of each score the sum of its terms' absolute values."""
    values = [part.values for part in parts]
    return reward.sizes(values) if isinstance(reward, WeightedReward) else list(map(_size, values[0]))


def call_parts(reward: RewardFunction, items: Sequence[Item]) -> list[Scores]:
    """The scores of each of the functions that the reward consists of, checked."""
    functions, columns = functions_of(reward), _columns(items)
    logs = [Log(name, len(items)) for name in names_of(reward)]
    calls = call_all([(f, select_columns(f, columns, log)) for f, log in zip(functions, logs, strict=True)])
    return [_checked(*one, items) for one in zip(functions, calls, logs, strict=True)]


def _checked(function: RewardFunction, call: Call, log: Log, items: Sequence[Item]) -> Scores:
    name, error = reward_name(function), call.error
    if isinstance(error, Misused):
        raise UserError(f"{str(error).removesuffix('.')}{place_of(error)}.") from error
    if isinstance(error, UserError):
        raise error
    if error is not None:  # a user's function may raise anything
        raise as_user_error(error)(
            f"Reward function {name} raised {told(error, function)}. "
            "Fix it; --debug shows the whole traceback."
        ) from error
    wheres = [f" for completion {_shown(item[1])} of problem {item[0].id}" for item in items]
    pairs = [
        split_score(value, name, where)
        for value, where in zip(checked_list(function, call, len(items)), wheres, strict=True)
    ]
    values = [checked_number(value, name, where) for (value, _), where in zip(pairs, wheres, strict=True)]
    return log.scores(values, [rest for _, rest in pairs])


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