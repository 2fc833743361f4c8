"""Group-relative advantages: GRPO and Dr.GRPO, and DAPO's dropping of groups that teach nothing.

Everything is Python floats with correctly rounded sums (`math.fsum`), so an advantage does not depend on the order of
the completions, on other groups, or on the machine.

Letters: G groups (prompts), S completions of a group (may differ from group to group).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from jetrl.errors import UserError
from jetrl.types import Group


class AdvantageConfig(Protocol):
    """The fields of `[rl]` that this module reads."""

    @property
    def norm_adv_by_std(self) -> bool: ...

    @property
    def dynamic_sampling(self) -> str: ...


def group_advantages(
    rewards: Sequence[Sequence[float]], norm_adv_by_std: bool = True, eps: float = 1e-6
) -> list[tuple[float, ...]]:
    """Advantage of each completion relative to its group, for every one of its tokens.

    GRPO (`norm_adv_by_std=True`):   A_i = (r_i - mean(r)) / (std(r) + eps)
    Dr.GRPO (`norm_adv_by_std=False`): A_i = r_i - mean(r)

    `rewards` is [G, S] or ragged; the result has the same shape. `std` is the sample deviation (S - 1), as in verl and
    TRL; the papers leave it open. A group whose rewards are all equal gets exact zeros, also where the rounded mean
    would differ from the rewards; a group of one is such a group.

    Raises UserError for a reward that is NaN or infinite, and for an empty group.
    Source: GRPO, arXiv 2402.03300 section 4.1; Dr.GRPO, arXiv 2503.20783 section 3.
    """
    return [_advantages_of_one(_checked(group, index), norm_adv_by_std, eps) for index, group in enumerate(rewards)]


def has_zero_std(rewards: Sequence[float]) -> bool:
    """Whether all rewards of a group are equal, so that every advantage is zero."""
    return max(rewards) == min(rewards)


def drop_zero_std(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups whose rewards differ, in order. Source: dynamic sampling of DAPO, arXiv 2503.14476 section 3.2."""
    return tuple(group for group in groups if not has_zero_std(group.rewards))


def advantages(
    groups: Sequence[Group], rl_config: AdvantageConfig
) -> tuple[tuple[Group, ...], tuple[Group, ...], dict[str, float]]:
    """Fill in `advantages` and count: returns all groups, those to learn from (all, but for "drop"), and statistics.

    The statistics are over all groups that came in, dropped or not: `reward/mean`, `reward/std` (sample deviation over
    all completions), `reward/frac_zero_std` (share of groups without any signal), `reward/num_groups_dropped`.
    With `dynamic_sampling = "drop"` there may be none to learn from; the caller then skips the update.
    """
    if not groups:
        raise ValueError("advantages() got no groups")
    if rl_config.dynamic_sampling not in ("off", "drop"):
        raise UserError(f'rl.dynamic_sampling is "{rl_config.dynamic_sampling}"; use "off" or "drop"')
    for group in groups:
        if len(group.rewards) != len(group.completions):
            raise ValueError(
                f"group of prompt {group.prompt.index}: {len(group.completions)} completions but "
                f"{len(group.rewards)} rewards; score the group first"
            )
    values = group_advantages([group.rewards for group in groups], rl_config.norm_adv_by_std)
    filled = tuple(replace(group, advantages=value) for group, value in zip(groups, values, strict=True))
    kept = drop_zero_std(filled) if rl_config.dynamic_sampling == "drop" else filled
    rewards = [reward for group in groups for reward in group.rewards]
    num_zero_std = sum(has_zero_std(group.rewards) for group in groups)
    return filled, kept, {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        "reward/frac_zero_std": num_zero_std / len(groups),
        "reward/num_groups_dropped": float(len(groups) - len(kept)),
    }


def _advantages_of_one(rewards: Sequence[float], norm_by_std: bool, eps: float) -> tuple[float, ...]:
    if has_zero_std(rewards):
        return (0.0,) * len(rewards)
    mean = _mean(rewards)
    scale = 1.0 / (_std(rewards) + eps) if norm_by_std else 1.0
    return tuple((reward - mean) * scale for reward in rewards)


def _checked(rewards: Sequence[float], index: int) -> list[float]:
    values = [float(reward) for reward in rewards]
    if not values:
        raise UserError(f"group {index} has no completions; rl needs at least one reward in each group")
    bad = [value for value in values if not math.isfinite(value)]
    if bad:
        raise UserError(
            f"group {index}: {len(bad)} of {len(values)} rewards are not finite (first: {bad[0]}); "
            "mend the reward function so that it returns a finite number for every completion"
        )
    return values


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for a single value."""
    if len(values) < 2 or has_zero_std(values):
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
