"""The data of one step: sample prompts, roll out, score, select; and again while dynamic sampling refills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from jetrl.config import Config
from jetrl.environments.environment import TOOLS
from jetrl.environments.tools import tool_stats
from jetrl.errors import UserError
from jetrl.parallel.agreement import common, gather_from_ranks, on_rank0, together
from jetrl.rewards.group_scores import GroupScores, scores_beside
from jetrl.rewards.results import Scores, tell_state
from jetrl.rewards.score import Scored, nothing_scored, reward_metrics, rewards_of, with_rewards
from jetrl.rl.refill import Refill
from jetrl.rl.selection import select
from jetrl.rollout.carry import UnderWay
from jetrl.rollout.requests import eval_asked, train_asked
from jetrl.rollout.rollout import Rollout, merged_parts, roll_out, rollout_stats
from jetrl.rounding import mean
from jetrl.run.carried import Carry
from jetrl.run.evaluation import Evaluation
from jetrl.run.mixed import divided, given_groups, given_stats
from jetrl.run.no_signal import no_signal_in
from jetrl.run.setup import Session
from jetrl.run.supervised import held_out_loss, next_answers
from jetrl.tasks.task import eval_prompts, sample
from jetrl.types import Group, Prompt, StepReport, Trajectory

_ROUNDING = 1e-3  # of eval.pass_reward


class Clock(Protocol):
    """Times the phases of a step (`loop.Clock`)."""

    def __call__(self, phase: str, total: int | None = None) -> AbstractContextManager[None]: ...

    def progress(self) -> Callable[[StepReport], None]: ...

    def message(self, text: str) -> None: ...

    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Gathered:
    """A step's trajectories: all scored groups, those to learn from, and those left out: because their environment
    failed, and (in groups without rewards) because they are not scored.

    `first_prompt` is the place in the task's stream at which the step began to sample, `next_prompt` that of the next.
    `under_way` is what goes on in it. `given`: answers that nobody sampled, beside those to learn from.
    """

    groups: tuple[Group, ...]
    learnt: tuple[Group, ...]
    failed: tuple[tuple[Prompt, Trajectory], ...]
    unscored: tuple[Group, ...]
    stats: dict[str, float]
    next_prompt: int
    first_prompt: int = 0
    under_way: tuple[UnderWay, ...] = ()
    given: tuple[Group, ...] = ()


def gather(session: Session, clock: Clock, step: int) -> Gathered:
    """Sample, roll out, score and select for step `step`. Changes nothing in the session: a repeat gives the same.

    Raises UserError if there is nothing to learn from: every conversation failed, nothing was scored, or refilling
    found no signal at all.
    """
    config = session.config
    if config.supervised:
        return _given(session, clock)
    rollouts, scores, given = list[Rollout](), list[Scored](), list[Group]()
    place, in_turns = session.progress.num_prompts, session.conversations is not None
    tell_state(session.progress.step, config.train.steps)
    carry = Carry(session, step) if config.rollout.overcommit else None

    def one_round(count: int) -> list[Group]:
        nonlocal place
        if carry is not None:
            return carried_round(count, carry)
        prompts = sample(session.task, session.tokenizer, place, count, config, in_turns)
        prompts, others = divided(prompts, config)
        given.extend(given_groups(session, others))
        asked = train_asked(config, step, (place - session.progress.num_prompts) * config.rollout.group_size)
        with _beside(session) as early:
            with clock("rollout", len(prompts) * config.rollout.group_size):
                rollouts.append(roll_out(
                    session.engine, prompts, asked, session.conversations, clock.progress(), session.queues,
                    early.add if early else None,
                ))
            place += count
            with clock("reward"):
                scores.append(scored(session, rollouts[-1], config, early))
        return scores[-1].groups

    def carried_round(count: int, carry: Carry) -> list[Group]:
        with clock("rollout", count * config.rollout.group_size):
            rollouts.append(carry.round(count, clock.progress()))
        with clock("reward"):
            scores.append(scored(session, rollouts[-1], config))
        return scores[-1].groups

    if config.rl.dynamic_sampling == "refill":
        groups, learnt, stats = _refilled(one_round, config, clock)
    else:
        groups = tuple(one_round(config.rollout.prompts_per_step))
        learnt, stats = select(groups, config.rl) if groups else ((), {})
    failed = tuple(f for rollout in rollouts for f in rollout.failed)
    unscored = tuple(u for one in scores for u in one.unscored)
    if not groups:
        why = _none_scored(session, f"Step {step}", unscored) if unscored else _all_failed(step, failed)
        raise common(UserError(why))
    groups_of_all = [group for rollout in rollouts for group in rollout.groups]
    whole = Rollout(groups_of_all, list(failed), in_turns, merged_parts(rollouts))
    stats = scoring_stats(scores) | stats | rollout_stats(whole, clock.seconds["rollout"]) | given_stats(given)
    if config.environment.name == TOOLS:
        stats |= tool_stats(groups_of_all)
    first = session.progress.num_prompts
    if carry is not None:
        stats |= carry.stats(learnt, clock.seconds["rollout"])
        return Gathered(groups, learnt, failed, unscored, stats, carry.place, first, carry.left())
    return Gathered(groups, learnt, failed, unscored, stats, place, first, given=tuple(given))


def _given(session: Session, clock: Clock) -> Gathered:
    """The given answers of the next step: nothing was sampled or scored."""
    with clock("encode"), together(session.world):
        groups = next_answers(session)
    first = session.progress.num_prompts
    return Gathered((), tuple(groups), (), (), {}, first + len(groups), first)


def _beside(session: Session) -> AbstractContextManager[GroupScores | None]:
    return scores_beside(session.reward, session.config.task.reward_calls, session.conversations is not None)


def scored(session: Session, rollout: Rollout, config: Config | None, early: GroupScores | None = None) -> Scored:
    """`rewards.score.score` of a rollout; with a config, long responses pay its penalty.

    Rank 0 scores for all what has not been scored `early`, next to the rollout: a reward function need not give the
    same twice, nor bear to be called by all at once. Only the numbers are shared.
    """
    at_limit, signal = session.config.environment.at_limit, session.config.rl.signal
    in_turns = session.conversations is not None
    known = _known(session, rollout, early) if early is not None else {}
    rewards = on_rank0(session.world, lambda: rewards_of(
        rollout.groups, session.reward, config, conversations=in_turns, at_limit=at_limit, known=known, signal=signal
    ))
    result = with_rewards(rollout.groups, rewards, replaced=session.reward is not None, at_limit=at_limit)
    return result if early is None else replace(result, beside=early.busy())


def _known(session: Session, rollout: Rollout, early: GroupScores) -> dict[int, list[Scores]]:
    """What all ranks have scored early, by the group's place in the rollout."""
    by_prompt = {place: parts for own in gather_from_ranks(session.world, early.take) for place, parts in own.items()}
    return {i: by_prompt[place] for i, place in enumerate(rollout.places) if place in by_prompt}


def _refilled(
    one_round: Callable[[int], list[Group]], config: Config, clock: Clock
) -> tuple[tuple[Group, ...], tuple[Group, ...], dict[str, float]]:
    refill = Refill(config.rollout.prompts_per_step, config.rl.max_refill_rounds, config.rl)
    while count := refill.next_count:
        refill = refill.add(one_round(count), count)
    if not refill.seen:  # every conversation failed
        return (), (), {}
    if not refill.kept:
        raise common(UserError(no_signal_in(refill, config)))
    if len(refill.kept) < refill.wanted:
        clock.message(
            f"refill: {len(refill.kept)} of {refill.wanted} groups carry a signal after {refill.rounds} rounds "
            f"({refill.num_sampled} prompts); the step learns from these"
        )
    return refill.seen, refill.kept, refill.stats()


def scoring_stats(scores: Sequence[Scored]) -> dict[str, float]:
    """The scoring metrics of a step's rounds: what one scoring of all their completions would have given."""
    stats = reward_metrics([one.rewards for one in scores])
    if count := sum(len(one.rewards.values) for one in scores):
        stats["reward/frac_unscored"] = sum(one.num_unscored for one in scores) / count
    if beside := [one.beside for one in scores if one.beside is not None]:
        stats["perf/reward_beside_s"] = sum(beside)
    return stats


def _none_scored(session: Session, where: str, unscored: Sequence[Group]) -> str:
    group, in_turns = unscored[0], session.conversations is not None
    first, name = (group.prompt.problem, group.trajectories[0]), f"Environment {session.config.environment.name}"
    count = sum(len(one.trajectories) for one in unscored)
    signal = session.config.rl.signal
    also = f" rl.signal = {signal!r} counts only what this function scores." if signal != "reward" else ""
    return f"{where}: " + nothing_scored(session.reward, count, first, in_turns, name) + also


def _all_failed(step: int, failed: Sequence[tuple[Prompt, Trajectory]]) -> str:
    first = failed[0][1]
    return (
        f"Step {step}: all {len(failed)} conversations failed in the environment, the first by {first.end}: "
        f"{first.error}. Fix the environment (or raise environment.timeout)."
    )


def evaluate(session: Session, clock: Clock) -> dict[str, float]:
    """avg@k and pass@k on the held-out problems, in the rollout's precision flow, of what `rl.signal` names; of several
    reward functions also avg@k of each. Neither failed conversations nor what is not scored counts, and metrics say how
    many those are: a problem counts in pass@k if one of its completions is scored.

    With method = "sft" it is the loss on held-out answers. Raises UserError where nothing is scored.
    """
    if session.config.supervised:
        with clock("eval"):
            return held_out_loss(session)
    config, k = session.config, session.config.eval.num_samples
    prompts = eval_prompts(session.task, session.tokenizer, config, session.conversations is not None)
    if not prompts:
        raise common(UserError(
            "There is nothing to evaluate on: with eval.eval_interval = 0 no rows are held out. Give problems that "
            "were not trained on, as task.eval_file or task.eval_split."
        ))
    tell_state(session.progress.step, config.train.steps)
    with clock("eval", len(prompts) * k):
        with _beside(session) as early:
            rollout = roll_out(
                session.engine, prompts, eval_asked(config), session.conversations, clock.progress(), session.queues,
                early.add if early else None,
            )
            if not rollout.groups:
                raise common(UserError("Evaluation: " + _all_failed(session.progress.step, rollout.failed)))
            result = scored(session, rollout, None, early)
    if not result.groups:
        raise common(UserError(_none_scored(session, "Evaluation", result.unscored)))
    session.pending.held_out = Evaluation(session.task.name, tuple(prompts), rollout, result)
    return _eval_metrics(session, rollout, result)


def _eval_metrics(session: Session, rollout: Rollout, result: Scored) -> dict[str, float]:
    """The first of them is the score of the evaluation, which the console and the report show."""
    config, k, of = session.config, session.config.eval.num_samples, f"eval/{session.task.name}"
    found = [g.signals for g in result.groups if g.signals]
    least = config.eval.pass_reward - _ROUNDING
    metrics = {
        f"{of}/avg@{k}": sum(map(sum, found)) / sum(map(len, found)),
        f"{of}/pass@{k}": sum(max(one) >= least for one in found) / len(found),
    }
    parts = result.rewards.parts if len(result.rewards.parts) > 1 else {}
    for name, part in parts.items():
        if own := [value for value in part.values if value is not None]:
            metrics[f"{of}/{name}/avg@{k}"] = mean(own)
    counts = {"num_failed": len(rollout.failed), "num_unscored": result.num_unscored}
    if any(counts.values()):
        metrics |= {f"{of}/{key}": float(number) for key, number in counts.items() if number}
        metrics[f"{of}/num_completions"] = float(len(result.rewards.values) + len(rollout.failed))
    return metrics
