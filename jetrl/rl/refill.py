"""Dynamic sampling "refill": sample further prompts until a step has as many groups with signal as it needs.

A pure state that is given each round's groups and says how many prompts the next round should sample. What it says
depends only on the groups so far, so that a resumed run repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jetrl.rl.selection import SelectionConfig, has_signal, reward_stats
from jetrl.types import Group


@dataclass(frozen=True, slots=True)
class Refill:
    """The groups of one step so far, in the order in which their prompts were sampled.

    `wanted` is `rollout.prompts_per_step`. The first round samples that many; at most `max_refill_rounds` follow.

        refill = Refill(wanted, max_refill_rounds, config.rl)
        while count := refill.next_count:
            refill = refill.add(scored groups of the next `count` prompts of the stream, count)

    A round may give fewer groups than prompts: those whose every conversation failed in the environment are missing.

    Source: DAPO, arXiv 2503.14476 section 3.2.
    """

    wanted: int
    max_refill_rounds: int
    config: SelectionConfig
    seen: tuple[Group, ...] = ()
    rounds: int = 0
    num_sampled: int = 0  # prompts

    @property
    def kept(self) -> tuple[Group, ...]:
        """The first `wanted` groups with signal. There may be fewer, or none, when the rounds are used up."""
        return tuple(group for group in self.seen if has_signal(group, self.config))[: self.wanted]

    @property
    def next_count(self) -> int:
        """How many prompts to sample next; 0 when the step is complete, or its rounds are used up.

        `min(wanted, ceil(missing / rate))` where rate is the share of groups with signal so far; `wanted` while there
        was none.
        """
        with_signal = sum(has_signal(group, self.config) for group in self.seen)
        missing = self.wanted - with_signal
        if missing <= 0 or self.rounds > self.max_refill_rounds:
            return 0
        if not with_signal:
            return self.wanted
        return min(self.wanted, -(-missing * self.num_sampled // with_signal))  # ceil, in whole numbers

    def add(self, groups: Sequence[Group], sampled: int) -> Refill:
        """The state after a round that sampled so many prompts and gave these scored groups."""
        assert len(groups) <= sampled == self.next_count > 0, (len(groups), sampled, self.next_count)
        sampled += self.num_sampled
        return replace(self, seen=(*self.seen, *groups), rounds=self.rounds + 1, num_sampled=sampled)

    def stats(self) -> dict[str, float]:
        """`reward_stats` of all groups that came in; `reward/num_groups_dropped` counts those not learned from,
        `rollout/refill_rounds` the rounds (1: nothing was refilled), `rollout/num_prompts_sampled` their prompts."""
        return reward_stats(self.seen) | {
            "reward/num_groups_dropped": float(len(self.seen) - len(self.kept)),
            "rollout/refill_rounds": float(self.rounds),
            "rollout/num_prompts_sampled": float(self.num_sampled),
        }
