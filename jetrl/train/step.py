"""The update of one training step: the forward pass of a micro-batch, and all optimizer updates of the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.config import Config
from jetrl.kernels.attention import varlen_plan
from jetrl.model.block import Routes
from jetrl.model.critic import Critic
from jetrl.model.transformer import Transformer
from jetrl.parallel.world import ALONE, World
from jetrl.rl import losses, mismatch
from jetrl.rl.objective import Inputs, objective
from jetrl.train.optim import lr_at
from jetrl.train.packing import denominators
from jetrl.train.routing import Routing
from jetrl.train.trainer import optimizer_step
from jetrl.types import ForwardBatch, MicroBatch, PackedBatch


@dataclass(frozen=True, slots=True)
class Learner:
    """What an update changes and reads. `critic_optimizer` belongs to a separate critic.

    `policy_optimizer` None: nothing is trained, and the model may hold no masters. Model and critic are sharded over
    `world` (`model.sharding`).
    """

    model: Transformer
    policy_optimizer: torch.optim.Optimizer | None
    critic: Critic | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    world: World = ALONE

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The policy's optimizer."""
        assert self.policy_optimizer is not None, "this session was built to evaluate"
        return self.policy_optimizer


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a micro-batch that carry loss, with the learner's values there. All [R] but `hidden` [R, D]."""

    index: Tensor
    logprobs: Tensor
    entropy: Tensor
    hidden: Tensor


def forward_batch(micro: MicroBatch) -> ForwardBatch:
    """The training forward's input."""
    return ForwardBatch(
        micro.tokens, micro.positions, varlen_plan(micro.cu_seqlens, micro.lengths, micro.stems), "train"
    )


def forward_rows(
    model: Transformer, micro: MicroBatch, temperature: float, routes: Routes | None = None, keep: bool = True
) -> Rows:
    """Training forward of one micro-batch; log-probs and entropy of the rows whose target is the policy's token.

    `keep`: see `kernels.logprob.token_logprobs`.
    """
    hidden = model(forward_batch(micro), routes=routes)
    index = micro.loss_mask.nonzero()[:, 0]
    rows = hidden[index]
    logprobs, entropy = model.token_logprobs(rows, micro.targets[index], temperature, keep)
    return Rows(index, logprobs, entropy, rows)


def update(learner: Learner, batches: list[PackedBatch], config: Config, step: int) -> dict[str, float]:
    """All optimizer updates of a step, with a publish between two; after the last the caller publishes. Gives metrics.

    With one update a step the old policy is the current one, so its log-probs are the ones at hand and no extra pass is
    made. With several, the batches hold the old log-probs, or a unified flow takes the rollout's (the same bits).
    """
    stats: list[dict[str, float]] = []
    for i, batch in enumerate(batches):
        if batch.num_loss_tokens == 0:  # every trajectory dropped or masked: nothing to learn from
            continue
        if stats:
            learner.model.publish()
        # only in the first update are the weights still those that sampled
        stats.append(_one_update(learner, batch, config, step, on_policy=i == 0, single=len(batches) == 1))
        if learner.critic is not None:  # only the trainer reads the critic
            learner.critic.publish()
    if not stats:
        return {}
    merged = {k: sum(s[k] for s in stats) / len(stats) for k in stats[0] if not k.startswith("parity/")}
    return merged | {k: v for k, v in stats[0].items() if k.startswith("parity/")}


def _one_update(
    learner: Learner, batch: PackedBatch, config: Config, step: int, on_policy: bool, single: bool
) -> dict[str, float]:
    shares = denominators(batch, config.rollout.max_response_length, config.rl.masked_sequences)
    metrics: dict[str, float] = {}
    if learner.critic_optimizer is not None:
        metrics |= _critic_update(learner, batch, config, shares)
        if step <= config.rl.critic_warmup_steps:
            return losses.explained_variance(metrics)
    metrics |= _policy_update(learner, batch, config, step, shares, on_policy, single)
    return losses.explained_variance(metrics) if learner.critic is not None else metrics


def _policy_update(
    learner: Learner, batch: PackedBatch, config: Config, step: int, shares: losses.Denominators, on_policy: bool,
    single: bool,
) -> dict[str, float]:
    gap, model, temperature = mismatch.MismatchAccumulator(), learner.model, config.rollout.temperature
    routing = Routing(model, config.train, shares)
    shared = learner.critic if learner.critic_optimizer is None else None
    parameters = [*model.parameters(), *(shared.parameters() if shared is not None else ())]

    def loss_of(micro: MicroBatch) -> tuple[Tensor, losses.Stats]:
        keep = not config.rl.entropy_coef  # whether the log-probs alone have a gradient
        rows = forward_rows(model, micro, temperature, routes := routing.routes(), keep)
        if on_policy:
            gap.add(
                rows.logprobs, micro.rollout_logprobs[rows.index], sequence_ids=micro.sequence_ids[rows.index]
            )
            routing.compare(forward_batch(micro), routes, rows.index)
        values = shared.values(rows.hidden) if shared is not None else None
        loss, part = objective(inputs_of(micro, rows, values, single), config.rl, shares)
        return routing.add_to(loss, part, routes, rows.index, micro.sequence_ids)

    lr = lr_at(step - 1, config.train)
    stats = optimizer_step(
        parameters, learner.optimizer, batch, loss_of, lr=lr, max_grad_norm=config.train.max_grad_norm,
        world=learner.world, reduction=config.train.reduction,
        lanes=config.train.reduction_lanes,
    )
    stats = mismatch.with_sample_size(stats)
    stats["policy/loss"], stats["policy/grad_norm"], stats["policy/lr"] = stats.pop("loss"), stats.pop("grad_norm"), lr
    stats |= routing.metrics(learner.world)
    return stats | (mismatch.merged(learner.world.gather(gap)).metrics() if on_policy else {})


def inputs_of(micro: MicroBatch, rows: Rows, values: Tensor | None, single: bool) -> Inputs:
    """The objective's view of a micro-batch: its columns at the rows that carry loss.

    `single`: there is one update, so the old policy is the current one.
    """

    def column(whole: Tensor | None) -> Tensor | None:
        return None if whole is None else whole[rows.index]

    sampled = micro.rollout_logprobs[rows.index]
    kept = column(micro.old_logprobs)
    old = None if single else (sampled if kept is None else kept)
    return Inputs(
        logprobs=rows.logprobs, entropy=rows.entropy, advantages=micro.advantages[rows.index],
        rollout_logprobs=sampled, sequence_ids=micro.sequence_ids[rows.index], old_logprobs=old,
        ref_logprobs=column(micro.ref_logprobs), values=values, old_values=column(micro.values),
        returns=column(micro.returns),
    )


def _critic_update(
    learner: Learner, batch: PackedBatch, config: Config, shares: losses.Denominators
) -> dict[str, float]:
    critic, optimizer, rl = learner.critic, learner.critic_optimizer, config.rl
    assert critic is not None and optimizer is not None

    def loss_of(micro: MicroBatch) -> tuple[Tensor, losses.Stats]:
        index = micro.loss_mask.nonzero()[:, 0]
        assert micro.values is not None and micro.returns is not None, "advantages come before the update"
        values = critic(forward_batch(micro))[index]
        return losses.value_loss(
            values, micro.values[index], micro.returns[index], torch.ones_like(values), micro.sequence_ids[index],
            value_clip=rl.value_clip, loss_agg=rl.loss_agg, denominators=shares,
        )

    stats = optimizer_step(
        list(critic.parameters()), optimizer, batch, loss_of, lr=rl.critic_lr,
        max_grad_norm=config.train.max_grad_norm, world=learner.world, reduction=config.train.reduction,
        lanes=config.train.reduction_lanes,
    )
    stats["critic/loss"], stats["critic/grad_norm"] = stats.pop("loss"), stats.pop("grad_norm")
    return stats
