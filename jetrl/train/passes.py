"""What an algorithm needs before the update: passes of reference, teacher, learner and critic over a packed batch,
and from them the advantage of every policy token.

A rank makes these passes over the micro-batches that it holds. Where advantages are made of them, the ranks exchange
one number for each policy token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from jetrl.config import Config
from jetrl.kernels.logprob.truncation import Truncation
from jetrl.model.critic import Critic
from jetrl.model.transformer import Transformer
from jetrl.parallel.agreement import gather_from_ranks, together
from jetrl.rl.advantage import advantages
from jetrl.rl.distill import reverse_kl, with_teacher
from jetrl.rl.losses import kl_penalty
from jetrl.train.batches import MicroBatch, PackedBatch
from jetrl.train.packing import by_trajectory, fill, held, scattered, to_device, with_rows
from jetrl.train.step import Learner, Rows, forward_batch, forward_rows, truncation_of
from jetrl.train.teacher_server import Judged, TeacherServer
from jetrl.train.teachers import Teachers, server_judged, with_rows_of
from jetrl.train.trainer import NonFiniteError
from jetrl.types import Group


@torch.no_grad()
def logprob_pass(
    model: Transformer, batch: PackedBatch, temperature: float, truncation: Truncation | None = None
) -> list[Tensor]:
    """Log-probs [R] of the loss rows of each micro-batch held, without gradients (old policy, reference, teacher)."""
    return [rows.logprobs for rows in _rows_pass(model, batch, temperature, truncation)]


@torch.no_grad()
def kept_pass(
    model: Transformer, batch: PackedBatch, temperature: float, truncation: Truncation
) -> tuple[list[Tensor], PackedBatch]:
    """`logprob_pass`, and the batch with the sets that truncated distributions keep by this model's logits."""
    logprobs, micros = [], []
    for micro, rows in zip(batch.micro_batches, _rows_pass(model, batch, temperature, truncation), strict=True):
        assert rows.support is not None
        logprobs.append(rows.logprobs)
        micros.append(replace(micro, kept_sets=rows.support.sets.to("cpu")))
    return logprobs, replace(batch, micro_batches=tuple(micros))


def _rows_pass(
    model: Transformer, batch: PackedBatch, temperature: float, truncation: Truncation | None
) -> Iterator[Rows]:
    device = model.head_weight.device
    return (
        forward_rows(model, to_device(micro, device), temperature, truncation=truncation)
        for micro in batch.micro_batches
    )


@torch.no_grad()
def value_pass(critic: Critic, policy: Transformer, batch: PackedBatch) -> list[Tensor]:
    """Values [R] of the loss rows of each micro-batch held, without gradients."""
    body = policy if critic.body is None else critic.body

    def values(host: MicroBatch) -> Tensor:
        micro = to_device(host, policy.head_weight.device)
        hidden = body(forward_batch(micro))
        return critic.values(hidden[micro.loss_mask.nonzero()[:, 0]])

    return [values(micro) for micro in batch.micro_batches]


def estimate(
    groups: Sequence[Group], batches: Sequence[PackedBatch], learner: Learner, reference: Transformer | None,
    config: Config, unified: bool, given: bool = False, teacher: Teachers | None = None,
) -> tuple[list[Group], list[PackedBatch], dict[str, float]]:
    """Run the passes that the algorithm needs, fill in the advantages of groups and batches; returns statistics.

    The log-probs of the old policy are the rollout's where rollout and training are one flow (`unified`) and the same
    weights drew all tokens; else the learner makes its own pass, if there are several updates or the reward holds a KL
    penalty or there is a `teacher`. So it does for the sets that truncated distributions keep, for updates that begin
    with other weights than sampled, and for a reference or a teacher, which is compared with the policy on what the
    policy keeps.

    `given`: the groups have their advantages, which a function of the user's has made before; a teacher's part is in
    them.

    NonFiniteError where what the advantages are made of is not finite; UserError where a teacher's server does not
    answer. Collective.
    """
    rl, temperature, packed, world = config.rl, config.rollout.temperature, list(batches), learner.world.replicas
    if not groups:  # dynamic sampling may keep none
        return [], [], {}
    unified = unified and not any(batch.num_older_tokens for batch in packed)
    kl_in_reward = reference is not None and rl.kl_in == "reward"
    compared = reference is not None or teacher is not None
    own = not unified and (len(packed) > 1 or kl_in_reward or teacher is not None)
    truncation = truncation_of(config)
    for place, batch in enumerate(packed):
        if truncation is not None and (place or own or compared):
            old, packed[place] = kept_pass(learner.model, batch, temperature, truncation)
        elif own:
            old = logprob_pass(learner.model, batch, temperature)
        if own:
            packed[place] = with_rows(packed[place], "old_logprobs", old)
    if reference is not None:
        packed = [with_rows(b, "ref_logprobs", logprob_pass(reference, b, temperature, truncation)) for b in packed]
    if learner.critic is not None:
        packed = [with_rows(b, "values", value_pass(learner.critic, learner.model, b)) for b in packed]
    lengths = [t.num_policy_tokens for group in groups for t in group.trajectories]
    kl = by_trajectory(world.gather(_token_kl(packed, config, unified)), lengths) if kl_in_reward else None
    values = by_trajectory(world.gather(held(packed, "values")), lengths) if learner.critic is not None else None
    of_teacher, top = None, config.teacher.top_k
    if teacher is not None and (top or not given):
        names = teacher.names(groups)
        of_teacher, packed = _with_judgement(teacher, names, packed, learner, config, unified, lengths)
    _check_finite("KL to the reference policy", kl, groups)
    _check_finite("KL to the teacher", of_teacher, groups)
    _check_finite("value", values, groups)
    in_loss = [count > 0 for batch in packed for count in batch.sequence_tokens]
    with together(world):  # an estimator may be the user's
        if given:
            filled, stats, returns = list(groups), dict[str, float](), None
        else:
            filled, stats, returns = advantages(groups, rl, kl=kl, values=values, in_loss=in_loss)
        if of_teacher is not None and not given:  # with top_k its part is a term of the loss
            filled, kl_stats = with_teacher(filled, of_teacher, 0.0 if top else config.teacher.weight, names)
            stats |= kl_stats
    packed = fill(packed, "advantages", [a for group in filled for a in group.advantages])
    if returns is not None:
        packed = fill(packed, "returns", returns)
    return filled, packed, stats


def _with_judgement(
    teacher: Teachers, names: Sequence[str], batches: list[PackedBatch], learner: Learner, config: Config,
    unified: bool, lengths: Sequence[int],
) -> tuple[list[np.ndarray | None], list[PackedBatch]]:
    """Policy's log-prob minus the teacher's, one array [P] float64 for each trajectory; and the batches with the
    columns of the teacher's most probable tokens, if the loss has them. Collective."""
    top, found = config.teacher.top_k, dict[int, Judged]()

    def judge() -> dict[int, np.ndarray]:
        found.update(judged_by(teacher, names, batches, config, learner.model.spec.vocab_size))
        policy = held(batches, "rollout_logprobs" if unified else "old_logprobs")
        return reverse_kl(policy, {place: one.logprobs for place, one in found.items()})

    kl = by_trajectory(gather_from_ranks(learner.world.replicas, judge), lengths)
    return kl, with_top(batches, found, top) if top else batches


def _check_finite(what: str, columns: Sequence[np.ndarray | None] | None, groups: Sequence[Group]) -> None:
    """Of the policy's tokens of each trajectory, in order; None outside the loss. The same on every rank."""
    places = [(group.prompt.index, number) for group in groups for number in range(len(group.trajectories))]
    for (prompt, number), column in zip(places, columns or (), strict=columns is not None):
        if column is not None and not np.isfinite(column).all():
            token = int(np.flatnonzero(~np.isfinite(column))[0])
            raise NonFiniteError(
                f"the {what} at token {token} of completion {number} of prompt {prompt} is {column[token]}"
            )


def with_top(batches: Sequence[PackedBatch], judged: Mapping[int, Judged], top: int) -> list[PackedBatch]:
    """The batches with the columns of the teacher's `top` most probable tokens."""
    tokens = {place: one.top_tokens for place, one in judged.items()}
    logprobs = {place: one.top_logprobs for place, one in judged.items()}
    found = scattered(batches, "teacher_tokens", tokens, np.empty((0, top), np.int64))
    return scattered(found, "teacher_logprobs", logprobs, np.empty((0, top), np.float32))


def judged_by(
    teachers: Teachers, names: Sequence[str], batches: Sequence[PackedBatch], config: Config, vocab: int
) -> dict[int, Judged]:
    """What the teachers say of the policy's tokens of each trajectory that is `held`, [P] each. `names`: the teacher of
    each trajectory; `vocab`: of the policy. A teacher's passes are over the micro-batches with its rows alone."""
    truncation, temperature, top = truncation_of(config), config.rollout.temperature, config.teacher.top_k
    found: dict[int, Judged] = {}
    for name, model in teachers.models.items():
        if isinstance(model, TeacherServer):
            found |= server_judged(model, name, names, batches, top, vocab)
            continue
        # the columns are only the way from rows to trajectories: these batches are gone after it
        own = with_rows_of(name, names, batches)
        seen = [top_pass(model, b, temperature, top, vocab, truncation) for b in own]
        columns = ("ref_logprobs", "teacher_tokens", "teacher_logprobs")
        for number, column in enumerate(columns):
            own = [with_rows(b, column, [each[number] for each in rows]) for b, rows in zip(own, seen, strict=True)]
        logprobs, tokens, values = (held(own, column) for column in columns)
        found |= {
            place: Judged(logprobs[place], tokens[place], values[place]) for place in logprobs if names[place] == name
        }
    return found


@torch.no_grad()
def top_pass(
    model: Transformer, batch: PackedBatch, temperature: float, top: int, vocab: int,
    truncation: Truncation | None = None,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """`logprob_pass`, and the `top` most probable of the first `vocab` tokens at each loss row with their log-probs:
    [R], [R, K], [R, K]."""
    found = []
    for micro, rows in zip(batch.micro_batches, _rows_pass(model, batch, temperature, truncation), strict=True):
        tokens = rows.index.new_empty(len(rows.index), 0)
        values = rows.logprobs.new_empty(tokens.shape)
        if top:
            targets = micro.targets.to(rows.index.device)[rows.index]
            tokens = model.top_tokens(rows.hidden, top, vocab)
            values = model.several_logprobs(rows.hidden, targets, rows.logprobs, tokens, temperature)
        found.append((rows.logprobs.cpu(), tokens.cpu(), values.cpu()))
    return found


def _token_kl(batches: Sequence[PackedBatch], config: Config, unified: bool) -> dict[int, np.ndarray]:
    """Estimates of the KL to the reference policy, one array [P] float64 for each trajectory that is `held`."""
    policy = held(batches, "rollout_logprobs" if unified else "old_logprobs")
    reference, estimator = held(batches, "ref_logprobs"), config.rl.kl_estimator
    return {
        place: kl_penalty(torch.from_numpy(p).double(), torch.from_numpy(reference[place]).double(), estimator).numpy()
        for place, p in policy.items()
    }

