"""Which groups are learned from: groups without signal, dynamic sampling.

Trajectories whose environment failed are in no group: `roll_out` keeps them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from jetrl.rounding import all_equal, mean, std
from jetrl.types import Group


class SelectionConfig(Protocol):
    """The fields of `[rl]` that this module reads."""

    @property
    def dynamic_sampling(self) -> str: ...

    @property
    def mask_truncated(self) -> bool: ...

    @property
    def kl_coef(self) -> float: ...

    @property
    def kl_in(self) -> str: ...


def differs(group: Group, places: Sequence[int] | None = None) -> bool:
    """Whether the numbers that decide (`rl.signal`) differ within a group, up to the rounding of their sums; only those
    of the trajectories at `places`, if given. By default these are its rewards before the overlong penalty: what only
    length tells apart says nothing about right and wrong."""
    check_scored(group)
    chosen = range(len(group.rewards)) if places is None else places
    numbers, sizes = ([column[i] for i in chosen] for column in (group.deciding, group.deciding_sizes))
    return bool(numbers) and not all_equal(numbers, max(sizes))


def in_loss(group: Group, config: SelectionConfig) -> list[int]:
    """The trajectories of a group that the loss has, by their places: `rl.mask_truncated` leaves out the others."""
    return [i for i, one in enumerate(group.trajectories) if not (config.mask_truncated and one.truncated)]


def has_signal(group: Group, config: SelectionConfig) -> bool:
    """Whether there is something to learn from a group: a trajectory that the loss has, and numbers that differ among
    those that it is compared with. These are all of the group; with the KL in the reward, those in the loss, as the
    others have no such reward.

    Where all rewards are equal, grpo and rloo give zero advantages: there is nothing to learn.
    reinforce_pp and gae compare with other groups or with a critic; for them this is a choice of data.
    Source: dynamic sampling of DAPO, arXiv 2503.14476 section 3.2.
    """
    kept = in_loss(group, config)
    penalized = config.kl_in == "reward" and config.kl_coef > 0
    return bool(kept) and differs(group, kept if penalized else None)


def reward_stats(groups: Sequence[Group]) -> dict[str, float]:
    """`reward/mean`, `reward/std` (sample deviation over all trajectories) and `reward/frac_zero_std` (share of groups
    in which the numbers that decide are all equal), over all groups that came in, learned from or not.
    """
    for group in groups:
        check_scored(group)
    rewards = [reward for group in groups for reward in group.rewards]
    return {
        "reward/mean": mean(rewards),
        "reward/std": std(rewards, max(size for group in groups for size in group.reward_sizes)),
        "reward/frac_zero_std": sum(not differs(group) for group in groups) / len(groups),
    }


def select(groups: Sequence[Group], config: SelectionConfig) -> tuple[tuple[Group, ...], dict[str, float]]:
    """The groups to learn from, in order, with `reward_stats` of all that came in and `reward/num_groups_dropped`.

    off: all of them. drop: those with signal; there may be none, and the caller then skips the update. refill is a loop
    of several rollouts: see `rl.refill`.
    """
    if not groups:
        raise ValueError("select() got no groups")
    assert config.dynamic_sampling in ("off", "drop"), f"{config.dynamic_sampling}: see rl.refill"
    kept = tuple(g for g in groups if config.dynamic_sampling == "off" or has_signal(g, config))
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
