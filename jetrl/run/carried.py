"""Answers that are carried over from one step to the next: which groups a round begins and which must end in it, what
gets too old, and what the metrics of a step say about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jetrl.rollout.carry import UnderWay, begin, roll_on
from jetrl.rollout.carry_turns import begin_talks, talk_on
from jetrl.rollout.requests import STEP_STRIDE, train_asked
from jetrl.rollout.rollout import Rollout
from jetrl.run.setup import Session
from jetrl.tasks.task import sample
from jetrl.types import Group, Prompt, StepReport, Trajectory

OLD_WEIGHTS = "old weights draw too much"
DROPPED = "long answers are dropped"
LEAST_ESS = 0.5  # of `rl/ess`: below, a step learns from fewer than half of its tokens


class Carry:
    """One step's view of what is under way. Changes nothing in the session: a repeat of the step gives the same."""

    def __init__(self, session: Session, step: int) -> None:
        self.session, self.step, self.version = session, step, session.progress.weight_version
        self.place, self.under_way = session.progress.num_prompts, list(session.progress.under_way)
        self.drawn = self.horizon = 0

    def round(self, count: int, on_step: Callable[[StepReport], None]) -> Rollout:
        """`count` complete groups: those that are under way go on, and as many begin as keep `rollout.overcommit` more
        than that under way. Collective."""
        session, config, waiting = self.session, self.session.config, self.under_way
        new = max(0, count + config.rollout.num_carried - len(waiting))
        first = (self.place - session.progress.num_prompts) * config.rollout.group_size
        assert first + new * config.rollout.group_size <= STEP_STRIDE, "more trajectories in a step than request ids"
        talks = session.conversations
        prompts = sample(session.task, session.tokenizer, self.place, new, config, talks is not None)
        asked = train_asked(config, self.step, first)
        self.place += new
        forced = [place for place, group in enumerate(waiting) if self._must_end(group)]
        if talks is None:
            groups = [*waiting, *begin(prompts, asked)]
            result = roll_on(session.engine, groups, count, forced, on_step, session.world)
        else:
            groups, wait = [*waiting, *begin_talks(prompts, asked)], config.environment.reply_tokens
            result = talk_on(session.engine, groups, count, forced, talks, asked, wait, on_step, session.world)
        self.under_way = list(result.under_way)
        self.drawn += result.drawn
        self.horizon = max(self.horizon, result.horizon)
        return _rollout(result.complete, talks is not None)

    def _must_end(self, group: UnderWay) -> bool:
        rl, oldest = self.session.config.rl, group.oldest
        return rl.on_stale == "wait" and oldest is not None and oldest <= self.version - rl.max_off_policy_steps

    def left(self) -> tuple[UnderWay, ...]:
        """What goes on in the next step: not what would be too old there."""
        least = self.version + 1 - self.session.config.rl.max_off_policy_steps
        return tuple(group for group in self.under_way if group.oldest is None or group.oldest >= least)

    def stats(self, learnt: Sequence[Group], seconds: float) -> dict[str, float]:
        """The metrics of this step. Tokens that were drawn and not kept count nowhere."""
        left, size = self.left(), self.session.world.size
        found = {
            "perf/tokens_per_s_per_gpu": self.drawn / max(seconds, 1e-9) / size,
            "rollout/horizon": float(self.horizon),
            "rollout/carried": float(len(left)),
            "rollout/dropped_stale": float(len(self.under_way) - len(left)),
        }
        return found | lags(learnt, self.version)


def _rollout(complete: Sequence[UnderWay], in_turns: bool) -> Rollout:
    """Complete groups as `roll_out` returns them: conversations whose environment failed are apart."""
    groups, failed, places = list[Group](), list[tuple[Prompt, Trajectory]](), list[int]()
    for place, one in enumerate(complete):
        failed += [(one.prompt, t) for t in one.ended if t.failed]
        if good := tuple(t for t in one.ended if not t.failed):
            groups.append(Group(one.prompt, good))
            places.append(place)
    return Rollout(groups, failed, in_turns, places=tuple(places))


def lags(learnt: Sequence[Group], version: int) -> dict[str, float]:
    """How far the weights that drew the tokens of these groups are behind those of `version`, which learn from them;
    nothing where there are no groups."""
    turns = [turn for group in learnt for answer in group.trajectories for turn in answer.turns]
    if not turns:
        return {}
    lag = version - np.concatenate([turn.versions for turn in turns])
    return {
        "rollout/off_policy_steps_mean": float(lag.mean()),
        "rollout/off_policy_steps_max": float(lag.max()),
        "rollout/frac_stale_tokens": float((lag > 0).mean()),
        "rollout/version_spans": sum(len(turn.spans) for turn in turns) / len(turns),
    }


def ess_told(metrics: dict[str, float]) -> str:
    """What to do where importance weights leave too little; "" where they do not."""
    share = metrics.get("rl/ess")
    if share is None or share >= LEAST_ESS:
        return ""
    return (
        f"rl/ess = {share:.2f}: the importance weights of tokens that older weights drew leave this step as much as "
        f"{share:.0%} of its tokens would say. Lower rl.max_off_policy_steps or rollout.overcommit, or the learning "
        "rate: a sample size that falls comes before a collapse."
    )


def dropped_told(metrics: dict[str, float]) -> str:
    """What to do where most of what is under way gets too old to be learned from; "" where it does not."""
    dropped = int(metrics.get("rollout/dropped_stale", 0.0))
    under_way = dropped + int(metrics.get("rollout/carried", 0.0))
    if 2 * dropped <= under_way:
        return ""
    return (
        f"rollout/dropped_stale = {dropped}, of {under_way} groups under way: their tokens would get older than "
        "rl.max_off_policy_steps, so answers as long as theirs are never learned from. Set rl.on_stale = \"wait\", "
        "raise rl.max_off_policy_steps, or lower rollout.overcommit."
    )
