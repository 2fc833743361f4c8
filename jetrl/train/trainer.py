"""One optimizer step on packed micro-batches: forward, loss, backward, finite check, clip, step.

RL, the critic and the warm start differ only in the parameters and in the loss that they hand over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from jetrl.choices import Reduction
from jetrl.parallel.world import ALONE, World
from jetrl.rl.losses import Stats
from jetrl.train.optim import clip_gradients_, set_lr
from jetrl.train.packing import to_device
from jetrl.train.reduction import gradient_sum
from jetrl.types import MicroBatch

LossOf = Callable[[MicroBatch], tuple[Tensor, Stats]]
"""A micro-batch's share of the loss and of its statistics; shares of all micro-batches add up."""


class NonFiniteError(RuntimeError):
    """A loss or gradient norm that is no finite number; the weights were not changed."""


def optimizer_step(
    parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, micro_batches: Sequence[MicroBatch],
    loss_of: LossOf, *, lr: float, max_grad_norm: float, world: World = ALONE, reduction: Reduction = "fast",
) -> dict[str, float]:
    """Add the gradients of all micro-batches up, clip them, step. Returns the summed statistics, `loss`, `grad_norm`.

    `micro_batches` are those of all ranks; rank r takes every n-th from the r-th on. They move to the parameters'
    device one by one. What is returned is the same on every rank, and so is a NonFiniteError, which comes before any
    weight changes. Collective.
    """
    device = parameters[0].device
    own: list[Stats] = []
    optimizer.zero_grad(set_to_none=True)  # what a failed update may have left
    gradients = gradient_sum(parameters, len(micro_batches), world, reduction)
    for first in range(0, len(micro_batches), world.size):
        with gradients.round(first):
            if first + world.rank < len(micro_batches):
                loss, part = loss_of(to_device(micro_batches[first + world.rank], device))
                loss.backward()
                own.append({**part, "loss": loss.detach().double()})
    values = {key: float(value) for key, value in _summed(own, len(micro_batches), world).items()}
    norm = gradients.norm()
    if not (math.isfinite(values["loss"]) and math.isfinite(norm)):
        raise NonFiniteError(f"loss {values['loss']}, gradient norm {norm}")
    clip_gradients_(parameters, norm, max_grad_norm)
    set_lr(optimizer, lr)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # the rollout wants their memory
    return values | {"grad_norm": norm}


def _summed(own: Sequence[Stats], count: int, world: World) -> Stats:
    """The statistics of all `count` micro-batches, added in their order on every rank."""
    if world.alone:
        every = [{key: [part[key] for part in own] for key in own[0]}]
    else:
        columns = {key: torch.stack([part[key] for part in own]).cpu() for key in own[0]} if own else {}
        every = world.gather(columns)
    stats: Stats = {}
    for i in range(count):
        for key, column in every[i % world.size].items():
            value = column[i // world.size]
            stats[key] = stats.get(key, torch.zeros_like(value)) + value
    return stats
