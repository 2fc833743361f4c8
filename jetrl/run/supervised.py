"""What a step and an evaluation of `method = "sft"` do in place of sampling and rewards: given answers, one update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from jetrl.errors import UserError
from jetrl.parallel.agreement import common, together
from jetrl.run.setup import Session
from jetrl.tasks.task import Task
from jetrl.train.batches import PackedBatch
from jetrl.train.bins import bin_pack
from jetrl.train.likelihood import fit, mean_loss
from jetrl.train.packing import packed
from jetrl.train.reduction import own_numbers
from jetrl.types import Group, Problem, Prompt, Trajectory


class Encodes(Protocol):
    """Makes the trajectory of a problem's given answer (`given.GivenAnswers`)."""

    def trajectory(self, problem: Problem) -> Trajectory: ...


def answers(task: Task, given: Encodes, first: int, count: int) -> list[Group]:
    """`count` given answers of the training stream, from number `first` on, each as a group of one. They have neither
    rewards nor log-probs."""
    groups = []
    for place in range(first, first + count):
        problem = task.problem(place)
        groups.append(Group(Prompt(place, problem, ()), (given.trajectory(problem),)))
    return groups


def next_answers(session: Session) -> list[Group]:
    """The given answers of the next step."""
    assert session.given_answers is not None, "prepared for method = sft"
    return answers(session.task, session.given_answers, session.progress.num_prompts, session.config.train.batch_size)


def pack_given(session: Session, groups: Sequence[Group]) -> list[PackedBatch]:
    """One update: all answers in micro-batches of at most `train.max_tokens_per_gpu` tokens, this rank's made."""
    trajectories = [one for group in groups for one in group.trajectories]
    return [_packed(session, trajectories)]


def _packed(session: Session, trajectories: Sequence[Trajectory]) -> PackedBatch:
    train = session.config.train
    return packed(
        trajectories, [True] * len(trajectories), bin_pack([t.length for t in trajectories], train.max_tokens_per_gpu),
        session.flow_digest, session.progress.weight_version,
        own=own_numbers(session.world.replicas, train.reduction, train.reduction_lanes),
    )


def learn_given(session: Session, batches: Sequence[PackedBatch], step: int) -> dict[str, float]:
    """The update of step `step`; its metrics. Collective."""
    (batch,) = batches
    start = time.perf_counter()
    stats = fit(session.learner, batch, session.config, step)
    seconds = time.perf_counter() - start
    lengths = [micro.lengths for micro in batch.micro_batches]
    tokens = sum(session.world.gather(sum(map(sum, lengths))))
    return stats | {
        "sft/num_tokens": float(tokens), "sft/num_learned_tokens": float(batch.num_loss_tokens),
        "perf/tokens_per_s_per_gpu": tokens / seconds / session.world.size,
    }


def held_out_loss(session: Session) -> dict[str, float]:
    """`eval/TASK/loss` over the held-out answers. Collective."""
    assert session.given_answers is not None, "prepared for method = sft"
    with together(session.world):
        problems = session.task.eval_problems(session.config.task.num_eval)
        trajectories = [session.given_answers.trajectory(problem) for problem in problems]
    if not trajectories:
        raise common(UserError(
            "There is nothing to evaluate on: with eval.eval_interval = 0 no rows are held out. Give answers that were "
            "not trained on, as task.eval_file or task.eval_split."
        ))
    batch = _packed(session, trajectories)
    return {f"eval/{session.task.name}/loss": mean_loss(session.model, batch, session.world.replicas)}
