"""Supervised learning: the mean negative log-prob of given tokens, as the loss of an update and as a measurement.

The warm start and `method = "sft"` have the same loss; log-probs are of the whole distribution at temperature 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jetrl.config import Config
from jetrl.model.transformer import Transformer
from jetrl.parallel.world import ALONE, World
from jetrl.rl.losses import Stats
from jetrl.rl.routing import merged
from jetrl.train.batches import MicroBatch, PackedBatch
from jetrl.train.optim import lr_at
from jetrl.train.packing import denominators, to_device
from jetrl.train.routing import Routing
from jetrl.train.step import Learner, forward_rows
from jetrl.train.trainer import LossOf, optimizer_step


def likelihood(model: Transformer, routing: Routing, stats: bool = False) -> LossOf:
    """A micro-batch's share of `-sum(log-probs of the loss rows) / (loss tokens of the update)`, with the routers'
    losses; shares add up to the loss of one large batch, however sequences are packed. With `stats`, `sft/loss` (the
    same without the routers' part) and `policy/entropy`, in nats per token.
    """

    def loss_of(micro: MicroBatch) -> tuple[Tensor, Stats]:
        rows = forward_rows(model, micro, 1.0, routes := routing.routes())
        count = routing.shares.num_loss_tokens
        loss, found = -rows.logprobs.sum() / count, Stats()
        if stats:
            found = {
                "sft/loss": -rows.logprobs.detach().double().sum() / count,
                "policy/entropy": rows.entropy.detach().double().sum() / count,
            }
        return routing.add_to(loss, found, routes, rows.index, micro.sequence_ids)

    return loss_of


def fit(learner: Learner, batch: PackedBatch, config: Config, step: int) -> dict[str, float]:
    """One update of `method = "sft"`, number `step` from 1; gives its metrics. NonFiniteError comes before any weight
    changes. Collective."""
    train = config.train
    routing = Routing(learner.model, train, denominators(batch, 1))
    lr = lr_at(step - 1, train)
    stats = optimizer_step(
        list(learner.policy_masters().values()), learner.optimizer, batch, likelihood(learner.model, routing, True),
        lr=lr, max_grad_norm=train.max_grad_norm, world=learner.world.replicas, reduction=train.reduction,
        lanes=train.reduction_lanes,
    )
    stats["policy/loss"], stats["policy/grad_norm"], stats["policy/lr"] = stats.pop("loss"), stats.pop("grad_norm"), lr
    counts = [one for of_rank in learner.world.replicas.gather([routing.counts]) for one in of_rank]
    return stats | merged(counts).metrics()


@torch.no_grad()
def mean_loss(model: Transformer, batch: PackedBatch, world: World = ALONE) -> float:
    """The mean negative log-prob of the batch's loss tokens, in nats, over the micro-batches that all ranks hold. The
    sum does not depend on which rank holds which. Collective."""
    device, own = model.head_weight.device, dict[int, float]()
    for number, micro in zip(batch.numbers, batch.micro_batches, strict=True):
        own[number] = float(forward_rows(model, to_device(micro, device), 1.0).logprobs.double().sum())
    every = {number: value for part in world.gather(own) for number, value in part.items()}
    return -math.fsum(every.values()) / batch.num_loss_tokens
