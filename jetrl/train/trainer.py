"""One optimizer step on packed micro-batches: forward, loss, backward, finite check, clip, step.

RL, the critic and the warm start differ only in the parameters and in the loss that they hand over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from jetrl.rl.losses import Stats
from jetrl.train.optim import clip_gradients_, global_grad_norm, set_lr
from jetrl.train.packing import to_device
from jetrl.types import MicroBatch

LossOf = Callable[[MicroBatch], tuple[Tensor, Stats]]
"""A micro-batch's share of the loss and of its statistics; shares of all micro-batches add up."""


class NonFiniteError(RuntimeError):
    """A loss or gradient norm that is no finite number; the weights were not changed."""


def optimizer_step(
    parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, micro_batches: Sequence[MicroBatch],
    loss_of: LossOf, *, lr: float, max_grad_norm: float,
) -> dict[str, float]:
    """Add the gradients of all micro-batches up, clip them, step. Returns the summed statistics, `loss`, `grad_norm`.

    Micro-batches move to the parameters' device one by one. Raises NonFiniteError before any weight changes.
    """
    device = parameters[0].device
    stats: dict[str, Tensor] = {}
    optimizer.zero_grad(set_to_none=True)  # what a failed update may have left
    for host in micro_batches:
        loss, part = loss_of(to_device(host, device))
        loss.backward()
        part = {**part, "loss": loss.detach().double()}
        stats = {key: stats.get(key, torch.zeros_like(value)) + value for key, value in part.items()}
    norm = float(global_grad_norm(parameters))
    values = {key: float(value) for key, value in stats.items()}
    if not (math.isfinite(values["loss"]) and math.isfinite(norm)):
        raise NonFiniteError(f"loss {values['loss']}, gradient norm {norm}")
    clip_gradients_(parameters, norm, max_grad_norm)
    set_lr(optimizer, lr)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # the rollout wants their memory
    return values | {"grad_norm": norm}
