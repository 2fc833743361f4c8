"""The data of one step: sample prompts, roll out, score, select; and again while dynamic sampling refills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.parallel.together import by_all, by_first, common
from jetrl.rl.moments import mean
from jetrl.rl.refill import Refill
from jetrl.rl.selection import select
from jetrl.rollout.requests import eval_asked, train_asked
from jetrl.rollout.rollout import Rollout, merged_parts, roll_out, rollout_stats
from jetrl.tasks.environment import TOOLS
from jetrl.tasks.group_scores import GroupScores, scores_beside
from jetrl.tasks.reward_calls import Scores
from jetrl.tasks.rewards import Scored, nothing_scored, rewards_of, with_rewards
from jetrl.tasks.task import eval_prompts, sample
from jetrl.tasks.tools import tool_stats
from jetrl.train.setup import Session
from jetrl.types import Group, Prompt, StepReport, Trajectory


class Clock(Protocol):
    """Times the phases of a step (`loop.Clock`)."""

    def __call__(self, phase: str, total: int | None = None) -> AbstractContextManager[None]: ...

    def progress(self) -> Callable[[StepReport], None]: ...

    def message(self, text: str) -> None: ...

    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Gathered:
    """A step's trajectories: all scored groups, those to learn from, and those left out because their environment
    failed or no reward function scored them.

    `next_prompt` is the place in the task's stream at which the next step starts to sample.
    """

    groups: tuple[Group, ...]
    learnt: tuple[Group, ...]
    failed: tuple[tuple[Prompt, Trajectory], ...]
    stats: dict[str, float]
    next_prompt: int


def gather(session: Session, clock: Clock, step: int) -> Gathered:
    """Sample, roll out, score and select for step `step`. Changes nothing in the session: a repeat gives the same.

    Raises UserError if there is nothing to learn from: every conversation failed, nothing was scored, or refilling
    found no signal at all.
    """
    config = session.config
    rollouts: list[Rollout] = []
    scores: list[Scored] = []
    place, in_turns = session.num_prompts, session.conversations is not None

    def one_round(count: int) -> list[Group]:
        nonlocal place
        prompts = sample(session.task, session.tokenizer, place, count, config, in_turns)
        asked = train_asked(config, step, (place - session.num_prompts) * config.rollout.group_size)
        with _beside(session) as early:
            with clock("rollout", count * config.rollout.group_size):
                rollouts.append(roll_out(
                    session.engine, prompts, asked, session.conversations, clock.progress(), session.queues,
                    early.add if early else None,
                ))
            place += count
            with clock("reward"):
                scores.append(scored(session, rollouts[-1], config, early))
        return scores[-1].groups

    if config.rl.dynamic_sampling == "refill":
        groups, learnt, stats = _refilled(one_round, config, clock)
    else:
        groups = tuple(one_round(config.rollout.prompts_per_step))
        learnt, stats = select(groups, config.rl) if groups else ((), {})
    failed = tuple(f for rollout in rollouts for f in rollout.failed)
    unscored = tuple(u for one in scores for u in one.unscored)
    if not groups:
        raise common(UserError(_all_failed(step, failed) if not unscored else _none_scored(session, step, unscored)))
    groups_of_all = [group for rollout in rollouts for group in rollout.groups]
    whole = Rollout(groups_of_all, list(failed), in_turns, merged_parts(rollouts))
    stats = merged([one.stats for one in scores]) | stats | rollout_stats(whole, clock.seconds["rollout"])
    if config.environment.name == TOOLS:
        stats |= tool_stats(groups_of_all)
    if session.reward is not None:
        stats["reward/frac_unscored"] = len(unscored) / sum(len(group.trajectories) for group in whole.groups)
    return Gathered(groups, learnt, failed + unscored, stats, place)


def _beside(session: Session) -> AbstractContextManager[GroupScores | None]:
    return scores_beside(session.reward, session.config.task.reward_calls, session.conversations is not None)


def scored(session: Session, rollout: Rollout, config: Config | None, early: GroupScores | None = None) -> Scored:
    """`tasks.rewards.score` of a rollout; with a config, long responses pay its penalty.

    Rank 0 scores for all what has not been scored `early`, next to the rollout: a reward function need not give the
    same twice, nor bear to be called by all at once. Only the numbers are shared.
    """
    at_limit = session.config.environment.at_limit
    in_turns = session.conversations is not None
    known = _known(session, rollout, early) if early is not None else {}
    rewards = by_first(session.world, lambda: rewards_of(
        rollout.groups, session.reward, config, conversations=in_turns, at_limit=at_limit, known=known
    ))
    result = with_rewards(rollout.groups, rewards, replaced=session.reward is not None, at_limit=at_limit)
    if early is not None:
        result.stats["perf/reward_beside_s"] = early.busy()
    return result


def _known(session: Session, rollout: Rollout, early: GroupScores) -> dict[int, list[Scores]]:
    """What all ranks have scored early, by the group's place in the rollout."""
    by_prompt = {place: parts for own in by_all(session.world, early.take) for place, parts in own.items()}
    return {i: by_prompt[place] for i, place in enumerate(rollout.places) if place in by_prompt}


def _refilled(
    one_round: Callable[[int], list[Group]], config: Config, clock: Clock
) -> tuple[tuple[Group, ...], tuple[Group, ...], dict[str, float]]:
    refill = Refill(config.rollout.prompts_per_step, config.rl.max_refill_rounds)
    while count := refill.next_count:
        refill = refill.add(one_round(count), count)
    if not refill.seen:  # every conversation failed
        return (), (), {}
    if not refill.kept:
        raise common(UserError(
            f'rl.dynamic_sampling = "refill": none of {refill.num_sampled} prompts in {refill.rounds} rounds gave a '
            "group whose rewards differ, so there is nothing to learn from. Make the task easier or harder, raise "
            "rollout.group_size or rollout.temperature, or rl.max_refill_rounds."
        ))
    if len(refill.kept) < refill.wanted:
        clock.message(
            f"refill: {len(refill.kept)} of {refill.wanted} groups carry a signal after {refill.rounds} rounds "
            f"({refill.num_sampled} prompts); the step learns from these"
        )
    return refill.seen, refill.kept, refill.stats()


def merged(scores: Sequence[dict[str, float]]) -> dict[str, float]:
    """The scoring statistics of a step's rounds as one: minima, maxima, sums of counts, and means of the others."""
    reducers: dict[str, Callable[[Sequence[float]], float]]
    reducers = {"reward/min": min, "reward/max": max, "reward/num_errors": sum, "perf/reward_beside_s": sum}
    if len(scores) == 1:
        return scores[0]
    keys = dict.fromkeys(key for s in scores for key in s)
    return {key: reducers.get(key, mean)([s[key] for s in scores if key in s]) for key in keys}


def _none_scored(session: Session, step: int, unscored: Sequence[tuple[Prompt, Trajectory]]) -> str:
    (prompt, trajectory), in_turns = unscored[0], session.conversations is not None
    assert session.reward is not None, "an environment's rewards always count as scored"
    first = prompt.problem, trajectory
    return f"Step {step}: " + nothing_scored(session.reward, len(unscored), first, in_turns)


def _all_failed(step: int, failed: Sequence[tuple[Prompt, Trajectory]]) -> str:
    first = failed[0][1]
    return (
        f"Step {step}: all {len(failed)} conversations failed in the environment, the first by {first.end}: "
        f"{first.error}. Fix the environment (or raise environment.timeout)."
    )


def evaluate(session: Session, clock: Clock) -> dict[str, float]:
    """avg@k and pass@k on the held-out problems, in the rollout's precision flow. Failed conversations do not count;
    what no reward function scores counts as 0, and a metric says how many those are."""
    config, k, name = session.config, session.config.eval.num_samples, session.task.name
    prompts = eval_prompts(session.task, session.tokenizer, config, session.conversations is not None)
    if not prompts:
        raise common(UserError(
            "There is nothing to evaluate on: with eval.eval_interval = 0 no rows are held out. Give problems that "
            "were not trained on, as task.eval_file or task.eval_split."
        ))
    with clock("eval", len(prompts) * k):
        with _beside(session) as early:
            rollout = roll_out(
                session.engine, prompts, eval_asked(config), session.conversations, clock.progress(), session.queues,
                early.add if early else None,
            )
            if not rollout.groups:
                raise common(UserError("Evaluation: " + _all_failed(session.step, rollout.failed)))
            result = scored(session, rollout, None, early)
    rewards = [g.rewards for g in result.groups]
    count = sum(map(len, rewards))
    session.held_out = {
        "task": name, "problems": [g.prompt.index for g in result.groups], "rewards": [list(r) for r in rewards],
    }
    metrics = {
        f"eval/{name}/avg@{k}": sum(map(sum, rewards)) / count,
        f"eval/{name}/pass@{k}": sum(max(r) > 0.999 for r in rewards) / len(rewards),
    }
    counts = {"num_failed": float(len(rollout.failed)), "num_unscored": result.stats["reward/num_errors"]}
    return metrics | {f"eval/{name}/{key}": number for key, number in counts.items() if number}
