"""Given answers beside the policy's own, of a distillation with `teacher.given_fraction`: which rows, and their place
in the updates.

They are in micro-batches of their own, behind the others of an update, and count in its denominators. Their terms
are the KL to the teacher and, where they are on, those of entropy and routers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.hashing import stable_hash
from jetrl.parallel.agreement import gather_from_ranks, together
from jetrl.run.given import GivenAnswers
from jetrl.tasks.files import FileTask
from jetrl.tasks.task import Task
from jetrl.train.batches import PackedBatch
from jetrl.train.bins import bin_pack
from jetrl.train.packing import packed, with_behind
from jetrl.train.passes import judged_by, with_top
from jetrl.train.reduction import own_numbers
from jetrl.types import Group, Prompt

if TYPE_CHECKING:
    from jetrl.run.setup import Session


def divided(prompts: Sequence[Prompt], config: Config) -> tuple[list[Prompt], list[Prompt]]:
    """A step's prompts: those that the policy answers, and `num_given` whose answers are given. A hash of seed and
    place in the task's stream decides; both keep their order."""
    by_hash = sorted(prompts, key=lambda prompt: stable_hash("given", config.seed, prompt.index))
    chosen = {prompt.index for prompt in by_hash[: config.num_given]}
    return [p for p in prompts if p.index not in chosen], [p for p in prompts if p.index in chosen]


def given_groups(session: Session, prompts: Sequence[Prompt]) -> tuple[Group, ...]:
    """The given answers of these prompts, a group of one each. Collective."""
    with together(session.world):
        answers = session.given_answers
        assert answers is not None or not prompts, "prepared for teacher.given_fraction"
        return tuple(Group(p, (answers.trajectory(p.problem),)) for p in prompts) if answers is not None else ()


def given_stats(groups: Sequence[Group]) -> dict[str, float]:
    """`data/num_given` and `data/num_given_tokens`: answers, and the tokens of them that are learned."""
    if not groups:
        return {}
    tokens = sum(one.num_policy_tokens for group in groups for one in group.trajectories)
    return {"data/num_given": float(len(groups)), "data/num_given_tokens": float(tokens)}


def with_given(session: Session, groups: Sequence[Group], batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """The updates with their shares of the given answers, which the teacher has judged: neighbours, as the policy's
    groups. UserError where a server does not answer. Collective."""
    if not groups:
        return list(batches)
    config, world, teacher = session.config, session.world.replicas, session.teacher
    assert teacher is not None, "checked with the config"
    own = own_numbers(world, config.train.reduction, config.train.reduction_lanes)
    found = []
    for number, batch in enumerate(batches):
        first, last = (len(groups) * edge // len(batches) for edge in (number, number + 1))
        trajectories = [one for group in groups[first:last] for one in group.trajectories]
        bins = bin_pack([one.length for one in trajectories], config.train.max_tokens_per_gpu)
        before = batch.num_micro_batches

        def behind(count: int, before: int = before) -> list[int]:
            return [n - before for n in own(before + count) if n >= before]

        made = packed(
            trajectories, [True] * len(trajectories), bins, session.flow_digest, batch.weight_version, own=behind
        )
        found.append(replace(made, prompts=tuple(group.prompt.index for group in groups[first:last])))
    names, vocab = teacher.names(groups), session.model.spec.vocab_size
    parts = gather_from_ranks(world, lambda: [judged_by(teacher, names, found, config, vocab)])
    judged = with_top(found, parts[world.rank][0], config.teacher.top_k)
    return [with_behind(batch, made) for batch, made in zip(batches, judged, strict=True)]


def check_mixed(config: Config, task: Task, prompts: Sequence[Prompt], answers: GivenAnswers) -> None:
    """UserError if a row has no answer that could be given, or one that cannot be encoded or is too long."""
    rows = task.training_problems() if isinstance(task, FileTask) else ()
    for problem in chain(rows, (prompt.problem for prompt in prompts)):
        if problem.solution is None:
            raise UserError(
                f"teacher.given_fraction = {config.teacher.given_fraction:g}: problem {problem.id} has no answer that "
                "could be given. Rows need a column solution (a text, or chat messages), or a task worked solutions; "
                "or set teacher.given_fraction = 0."
            )
        answers.trajectory(problem)
