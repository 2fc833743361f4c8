"""Advantages: relative to the group (GRPO, Dr.GRPO, RLOO) or of single tokens (REINFORCE++, GAE, a teacher).

Everything is Python floats, and every sum over trajectories or tokens is correctly rounded (`math.fsum`), so an
advantage depends neither on the order of trajectories nor on the machine.

Letters: G groups (prompts), S trajectories of a group (may differ from group to group), P policy tokens of one
trajectory, in order over all its turns.

A trajectory outside the loss (`rl.mask_truncated`) has no KL and no value: no pass has computed them. What was not
computed is None here, never 0, and no statistic is made of it:

- A baseline over the rewards of a group (grpo, rloo) has the rewards of all its trajectories: these are known.
- With the KL in the reward, it has the penalised scores of those in the loss. The others have no such score.
- Deviations and means over tokens (reinforce_pp, gae) are over the tokens in the loss.

The advantage of a trajectory outside the loss is None, whatever its group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from jetrl.errors import UserError
from jetrl.rl import own
from jetrl.rl.gae import gae, rewards_to_go, whiten
from jetrl.rl.selection import check_scored
from jetrl.rounding import all_equal, mean, std
from jetrl.types import Advantage, Group, Trajectory

Column = NDArray[np.float64]  # [P]
T = TypeVar("T")


class AdvantageConfig(Protocol):
    """The fields of `[rl]` that this module reads."""

    @property
    def adv_estimator(self) -> str: ...

    @property
    def norm_adv_by_std(self) -> bool: ...

    @property
    def adv_epsilon(self) -> float: ...

    @property
    def gamma(self) -> float: ...

    @property
    def gae_lambda(self) -> float: ...

    @property
    def kl_coef(self) -> float: ...

    @property
    def kl_in(self) -> str: ...


def advantages(
    groups: Sequence[Group],
    config: AdvantageConfig,
    kl: Sequence[Column | None] | None = None,
    values: Sequence[Column | None] | None = None,
    in_loss: Sequence[bool] | None = None,
) -> tuple[list[Group], dict[str, float], list[Column | None] | None]:
    """Scored groups with advantages, statistics, and the critic's targets (gae only).

    `kl` and `values` have one array [P] for each trajectory, in the order of the groups: the KL estimate of each policy
    token (not multiplied by `kl_coef`; needed with `kl_in = "reward"` and a `kl_coef`), and the critic's value of the
    state in which the token was drawn (needed by gae); None for a trajectory that is not `in_loss` (None: all are). The
    returns have that layout.

    grpo and rloo give one number per trajectory, reinforce_pp, gae and teacher a tuple of P, a function of the user's
    either; None outside the loss.

    Statistics: with a KL in the reward `reward/kl_penalty_mean`, the mean over trajectories in the loss of
    -kl_coef * sum_t kl_t; absent where there is none. Those of the rewards themselves are in `selection.reward_stats`.

    Raises UserError for a reward that is NaN or infinite, and for an advantage beyond float32; ValueError for groups
    without rewards or trajectories.
    """
    if not groups:
        raise ValueError("advantages() got no groups")
    for index, group in enumerate(groups):
        check_scored(group)
        _check_rewards(group.rewards, index)
    penalized = config.kl_in == "reward" and config.kl_coef > 0
    assert penalized == (kl is not None), f"kl_in {config.kl_in}, kl_coef {config.kl_coef}, kl given: {kl is not None}"
    assert (config.adv_estimator == "gae") == (values is not None), "gae needs the critic's values, others ignore them"
    items = list(_items(groups, kl, values, in_loss, config.kl_coef))
    if config.adv_estimator == "gae" or config.gamma != 1:
        _require_one_row(items)
    by_group, by_token = BY_GROUP.get(config.adv_estimator), BY_TOKEN.get(config.adv_estimator)
    returns = None
    if by_group is not None:
        result = _grouped(groups, items, by_group, config)
    elif by_token is not None:
        result, returns = _tokenwise(items, by_token, config)
    elif own.is_own(config.adv_estimator):
        result = _users(groups, items, config)
    else:
        raise UserError(f'rl.adv_estimator is "{config.adv_estimator}"; use {", ".join([*BY_GROUP, *BY_TOKEN])}')
    paid = [math.fsum(item.penalties) for item in items if item.penalties is not None] if penalized else []
    stats = {"reward/kl_penalty_mean": mean(paid)} if paid else {}
    numbers = iter(result)
    filled = [replace(g, advantages=tuple(next(numbers) for _ in g.trajectories)) for g in groups]
    check_float32("an advantage", result)
    check_float32("a critic's target", returns or ())
    return filled, stats, returns


def grpo_advantages(
    rewards: Sequence[float], norm_by_std: bool, eps: float, size: float = 0.0
) -> tuple[float, ...]:
    """Advantage of each trajectory of one group relative to the group, for every one of its tokens.

    GRPO (`norm_by_std`): A_i = (r_i - mean(r)) / (std(r) + eps)
    Dr.GRPO (without):    A_i = r_i - mean(r)

    `std` is the sample deviation (S - 1), as in verl and TRL; the papers leave it open. A group whose rewards are all
    equal gets exact zeros, even if the rounded mean would differ from the rewards; a group of one is such a group.
    `size` is that of `rounding.all_equal`.
    Source: GRPO, arXiv 2402.03300 section 4.1; Dr.GRPO, arXiv 2503.20783 section 3.
    """
    if all_equal(rewards, size):
        return (0.0,) * len(rewards)
    center = mean(rewards)
    scale = 1.0 / (std(rewards) + eps) if norm_by_std else 1.0
    return tuple((reward - center) * scale for reward in rewards)


def rloo_advantages(rewards: Sequence[float], size: float = 0.0) -> tuple[float, ...]:
    """REINFORCE leave-one-out: `A_i = r_i - mean of r_j over j != i`, for one group.

    Equal rewards give exact zeros. So does a group of one, which has no others to compare with; TRL refuses it, verl
    gives it its whole reward. `size` is that of `rounding.all_equal`. Source: arXiv 2402.14740 section 3.
    """
    if all_equal(rewards, size):
        return (0.0,) * len(rewards)
    return tuple(r - mean([*rewards[:i], *rewards[i + 1 :]]) for i, r in enumerate(rewards))


def token_rewards(trajectory: Trajectory, reward: float, penalties: Sequence[float] = ()) -> list[float]:
    """Rewards [P] of the policy tokens, which add up to `reward` plus the penalties (up to rounding).

    A turn's own reward (`Segment.reward`), if one was given, goes onto its last token. What is left of
    `reward`, the reward of the whole trajectory, goes onto the last token of all. `penalties` [P] are added token by
    token.
    """
    turns = [turn for turn in trajectory.turns if len(turn.tokens)]
    result: list[float] = []
    for turn in turns:
        result += [0.0] * (len(turn.tokens) - 1) + [turn.reward or 0.0]
    if result:
        result[-1] += reward - math.fsum(turn.reward for turn in turns if turn.reward is not None)
    if penalties:
        result = [value + penalty for value, penalty in zip(result, penalties, strict=True)]
    return result


@dataclass(frozen=True, slots=True)
class _Item:
    """One trajectory with what its advantages are made from. `penalties` [P]: empty where the reward holds no KL.

    `penalties` and `values` are None where they were not computed: outside the loss. `size`: the sum of the absolute
    values of the terms of its reward.
    """

    trajectory: Trajectory
    reward: float
    in_loss: bool
    penalties: list[float] | None
    values: list[float] | None
    size: float

    @property
    def whole_size(self) -> float:
        """The same of its score and of its values."""
        return self.size + math.fsum(map(abs, self.penalties or ())) + max(map(abs, self.values or ()), default=0.0)

    @property
    def score(self) -> float | None:
        """The sum of its token rewards, rounded once: exactly its reward where there are no penalties."""
        return None if self.penalties is None else math.fsum([self.reward, *self.penalties])

    @property
    def rewards(self) -> list[float]:
        """The rewards [P] of its tokens, penalties included."""
        assert self.penalties is not None, "a penalty that was not computed"
        return token_rewards(self.trajectory, self.reward, self.penalties)


def _require_one_row(items: Sequence[_Item]) -> None:
    """UserError for a changed history where it matters which token came how long after another."""
    if any(segment.branch for item in items for segment in item.trajectory.segments):
        raise UserError(
            "A conversation changed its history, so its turns are no single sequence, and neither a critic (gae) nor "
            "rl.gamma below 1 says what that means. Use another rl.adv_estimator with rl.gamma = 1, or set "
            "environment.params.forks = false, which refuses such calls."
        )


ByGroup = Callable[[list[float], AdvantageConfig, float], tuple[float, ...]]
ByToken = Callable[[list[_Item], AdvantageConfig], tuple[list[list[float]], list[list[float]] | None]]


def _reinforce_pp(items: list[_Item], config: AdvantageConfig) -> tuple[list[list[float]], None]:
    """`A_t = (G_t - mean) / (std + eps)`, over the step's tokens in the loss. Source: arXiv 2501.03262 section 3."""
    rows = [rewards_to_go(item.rewards, config.gamma) for item in items]
    return whiten(rows, config.adv_epsilon, _largest(items)), None


def _gae(items: list[_Item], config: AdvantageConfig) -> tuple[list[list[float]], list[list[float]]]:
    """GAE of each trajectory; with `norm_adv_by_std` whitened over the step's tokens in the loss, the returns not."""
    rows, returns = [], []
    for item in items:
        assert item.values is not None, "a value that was not computed"
        row, targets = gae(item.rewards, item.values, config.gamma, config.gae_lambda)
        rows.append(row)
        returns.append(targets)
    return whiten(rows, config.adv_epsilon, _largest(items)) if config.norm_adv_by_std else rows, returns


def _teacher(items: list[_Item], config: AdvantageConfig) -> tuple[list[list[float]], None]:
    """Nothing of rewards: the teacher's part (`rl.distill`) comes on top. A KL to the reference counts by token."""
    return [item.penalties or [0.0] * item.trajectory.num_policy_tokens for item in items], None


def _largest(items: Sequence[_Item]) -> float:
    return max((item.whole_size for item in items), default=0.0)


# One entry per estimator of `rl.adv_estimator`: from the scores of one group and the size of their terms, or from the
# step's trajectories in the loss. Neither sees what was not computed.
BY_GROUP: dict[str, ByGroup] = {
    "grpo": lambda scores, config, size: grpo_advantages(scores, config.norm_adv_by_std, config.adv_epsilon, size),
    "rloo": lambda scores, config, size: rloo_advantages(scores, size),
}
BY_TOKEN: dict[str, ByToken] = {"reinforce_pp": _reinforce_pp, "gae": _gae, "teacher": _teacher}


def _items(
    groups: Sequence[Group], kl: Sequence[Column | None] | None, values: Sequence[Column | None] | None,
    in_loss: Sequence[bool] | None, kl_coef: float,
) -> Iterator[_Item]:
    count = sum(len(group.trajectories) for group in groups)
    kept = [True] * count if in_loss is None else list(in_loss)
    for name, columns in (("kl", kl), ("values", values), ("in_loss", kept)):
        if columns is not None and len(columns) != count:
            raise ValueError(f"{len(columns)} entries of {name} for {count} trajectories")
    rows = (row for g in groups for row in zip(g.trajectories, g.rewards, g.reward_sizes, strict=True))
    for index, (trajectory, reward, terms) in enumerate(rows):
        size = trajectory.num_policy_tokens
        penalties: list[float] | None = []
        if kl is not None:
            tokens = _column("kl", kl[index], size, kept[index])
            penalties = None if tokens is None else [-kl_coef * value for value in tokens]
        row = None if values is None else _column("values", values[index], size, kept[index])
        yield _Item(trajectory, float(reward), kept[index], penalties, row, terms)


def _column(name: str, values: Column | None, size: int, in_loss: bool) -> list[float] | None:
    if (values is not None) != in_loss:
        raise ValueError(f"{name} of a trajectory: in the loss {in_loss}, computed {values is not None}; this is a bug")
    if values is None:
        return None
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (size,) or not np.isfinite(array).all():
        raise ValueError(f"{name} of shape {array.shape} for {size} policy tokens, or not all finite; this is a bug")
    return array.tolist()


def _grouped(
    groups: Sequence[Group], items: list[_Item], estimator: ByGroup, config: AdvantageConfig
) -> list[Advantage | None]:
    """The baseline is made of the scores that there are; an advantage goes to those in the loss."""
    result: list[Advantage | None] = []
    rest = iter(items)
    for group in groups:
        members = [next(rest) for _ in group.trajectories]
        scores = [item.score for item in members if item.score is not None]
        largest = _largest([item for item in members if item.score is not None])
        numbers = iter(estimator(scores, config, largest) if scores else ())
        found = [None if item.score is None else next(numbers) for item in members]
        result += [a if item.in_loss else None for a, item in zip(found, members, strict=True)]
    return result


def _users(groups: Sequence[Group], items: list[_Item], config: AdvantageConfig) -> list[Advantage | None]:
    """By a function of the user's, which gets what has a score; an advantage goes to those in the loss."""
    rest, members = iter(items), []
    for group in groups:
        members.append([item for item in (next(rest) for _ in group.trajectories) if item.score is not None])
    shown = [
        [own.Scored(i.trajectory, i.score, tuple(i.rewards), i.in_loss) for i in each if i.score is not None]
        for each in members
    ]
    found = own.advantages(config.adv_estimator, shown, config)
    by_item = {id(item): a for each, of in zip(members, found, strict=True) for item, a in zip(each, of, strict=True)}
    return [by_item[id(item)] if item.in_loss else None for item in items]


def _tokenwise(
    items: list[_Item], estimator: ByToken, config: AdvantageConfig
) -> tuple[list[Advantage | None], list[Column | None] | None]:
    rows, returns = estimator([item for item in items if item.in_loss], config)
    found: list[Advantage | None] = [*_spread(map(tuple, rows), items)]
    if returns is None:
        return found, None
    return found, _spread((np.array(row, dtype=np.float64) for row in returns), items)


def _spread(values: Iterable[T], items: Sequence[_Item]) -> list[T | None]:
    """One entry for each trajectory: those in the loss have the values in order, the others None."""
    rest = iter(values)
    return [next(rest) if item.in_loss else None for item in items]


def check_float32(
    what: str, values: Iterable[Advantage | Column | None],
    cure: str = "Lower what multiplies the reward: task.reward_weights, rl.kl_coef, rl.overlong_penalty_factor.",
) -> None:
    """UserError for a number that a micro-batch cannot hold."""
    largest = max((float(np.abs(one).max(initial=0.0)) for one in values if one is not None), default=0.0)
    if not largest <= own.MAX_ADVANTAGE:
        raise UserError(
            f"{what} is {largest:g}; the loss holds it in float32, which has no number beyond {own.MAX_ADVANTAGE:g}. "
            f"{cure}"
        )


def _check_rewards(rewards: Sequence[float], index: int) -> None:
    if not rewards:
        raise UserError(f"group {index} has no trajectories; rl needs at least one reward in each group")
    bad = [value for value in rewards if not math.isfinite(value)]
    if bad:
        raise UserError(
            f"group {index}: {len(bad)} of {len(rewards)} rewards are not finite (first: {bad[0]}); "
            "fix the reward function so that it returns a finite number for every trajectory"
        )
