"""Which groups are learned from: groups without signal, dynamic sampling.

Trajectories whose environment failed are in no group: `roll_out` keeps them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from jetrl.rl.moments import all_equal, mean, std
from jetrl.types import Group


class SelectionConfig(Protocol):
    """The field of `[rl]` that this module reads."""

    @property
    def dynamic_sampling(self) -> str: ...


def has_signal(group: Group) -> bool:
    """Whether the numbers that decide (`rl.signal`) differ within a group. By default these are its rewards before the
    overlong penalty: what only length tells apart says nothing about right and wrong.

    Where all rewards are equal, grpo and rloo give zero advantages: there is nothing to learn.
    reinforce_pp and gae compare with other groups or with a critic; for them this is a choice of data.
    Source: dynamic sampling of DAPO, arXiv 2503.14476 section 3.2.
    """
    check_scored(group)
    return not all_equal(group.deciding)


def reward_stats(groups: Sequence[Group]) -> dict[str, float]:
    """`reward/mean`, `reward/std` (sample deviation over all trajectories) and `reward/frac_zero_std` (share of groups
    without signal), over all groups that came in, learned from or not.
    """
    for group in groups:
        check_scored(group)
    rewards = [reward for group in groups for reward in group.rewards]
    return {
        "reward/mean": mean(rewards),
        "reward/std": std(rewards),
        "reward/frac_zero_std": sum(not has_signal(group) for group in groups) / len(groups),
    }


def select(groups: Sequence[Group], config: SelectionConfig) -> tuple[tuple[Group, ...], dict[str, float]]:
    """The groups to learn from, in order, with `reward_stats` of all that came in and `reward/num_groups_dropped`.

    off: all of them. drop: those with signal; there may be none, and the caller then skips the update. refill is a loop
    of several rollouts: see `rl.refill`.
    """
    if not groups:
        raise ValueError("select() got no groups")
    assert config.dynamic_sampling in ("off", "drop"), f"{config.dynamic_sampling}: see rl.refill"
    kept = tuple(g for g in groups if has_signal(g)) if config.dynamic_sampling == "drop" else tuple(groups)
    return kept, reward_stats(groups) | {"reward/num_groups_dropped": float(len(groups) - len(kept))}


def recorded(groups: Iterable[Group], learnt: Iterable[Group]) -> tuple[Group, ...]:
    """All groups that came in, for the record: those learned from with their advantages, the others with None."""
    filled = {group.prompt.index: group for group in learnt}
    return tuple(
        filled.get(group.prompt.index, replace(group, advantages=(None,) * len(group.trajectories))) for group in groups
    )


def check_scored(group: Group) -> None:
    """Each trajectory has a reward, and none is a conversation whose environment failed."""
    assert not any(t.failed for t in group.trajectories), "roll_out keeps failed conversations apart"
    if len(group.rewards) != len(group.trajectories):
        raise ValueError(
            f"group of prompt {group.prompt.index}: {len(group.trajectories)} trajectories but "
            f"{len(group.rewards)} rewards; score the group first"
        )
    assert len(group.signals) in (0, len(group.rewards)), "a signal for each trajectory, or none"
