"""One optimizer step on packed micro-batches: forward, loss, backward, finite check, clip, step.

RL, the critic and the warm start differ only in the parameters and in the loss that they hand over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from jetrl.choices import Reduction
from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.model.master import Master
from jetrl.model.shards import Part
from jetrl.parallel.world import ALONE, World
from jetrl.rl.losses import Stats
from jetrl.train.batches import MicroBatch, PackedBatch
from jetrl.train.digests import UNSEEN, Digests
from jetrl.train.optim import clipped_step, set_lr
from jetrl.train.packing import to_device
from jetrl.train.reduction import gradient_sum

LossOf = Callable[[MicroBatch], tuple[Tensor, Stats]]
"""A micro-batch's share of the loss and of its statistics; shares of all micro-batches add up."""


class NonFiniteError(RuntimeError):
    """A loss or gradient norm that is no finite number; the weights were not changed."""


class Midway(UserError):
    """A user's mistake after weights of the step under way have changed: there is no finished step to save."""


def not_by_an_update(config: Config, warm_started: bool, terms: Sequence[str]) -> str:
    """Advice where numbers are not finite before any update: no learning rate is to blame.

    `terms`: the keys that weigh further terms of the loss; those that are on are named.
    """
    if warm_started:
        weights = f"the warm start (sft.steps = {config.sft.steps})"
    else:
        weights = "model.arch (random)" if config.model.path is None else f"model.path = {config.model.path}"
    values = {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in terms}
    on = ", ".join(f"{key} = {value:g}" for key, value in values.items() if value)
    return (
        "No update was made before, so no learning rate is to blame: the weights themselves give numbers that are not "
        f"finite. They are those of {weights}." + (f" Or a term of the loss weighs too much: {on}." if on else "")
    )


def optimizer_step(
    masters: Sequence[Master], optimizer: torch.optim.Optimizer, batch: PackedBatch,
    loss_of: LossOf, *, lr: float, max_grad_norm: float, world: World = ALONE, reduction: Reduction = "fast",
    lanes: int | None = None, seen: Digests = UNSEEN,
) -> dict[str, float]:
    """Add the gradients of all micro-batches up, clip them, step. Returns the summed statistics, `loss`, `grad_norm`.

    The ranks of `world` share the batch's micro-batches as `train.reduction` says, and each holds its own at least.
    They move to the masters' device one by one. What is returned is the same on every rank, and so is a
    NonFiniteError, which comes before any weight changes. `seen` gets the digests of losses and of summed gradients.
    Collective.
    """
    device = next(master.param.device for master in masters if master.trained)
    own: dict[int, Stats] = {}
    micro_batches = dict(zip(batch.numbers, batch.micro_batches, strict=True))
    optimizer.zero_grad(set_to_none=True)  # what a failed update may have left
    tokens = [micro.tokens for micro in batch.micro_batches]
    gradients = gradient_sum(masters, batch.num_micro_batches, world, reduction, lanes, tokens)
    for turn in gradients.turns:
        with gradients.turn(turn):
            if (number := turn.micro[world.rank]) is not None:
                with seen.within("micro", number):
                    loss, part = loss_of(to_device(micro_batches[number], device))
                    seen.add("loss", loss)
                    loss.backward()
                own[number] = {**part, "loss": loss.detach().double()}
    values = {key: float(value) for key, value in _summed(own, world).items()}
    seen.add_parts("gradient", _gradients(masters), world)
    norm = gradients.norm()
    if not (math.isfinite(values["loss"]) and math.isfinite(norm)):
        raise NonFiniteError(f"loss {values['loss']}, gradient norm {norm}")
    set_lr(optimizer, lr)
    clipped_step(optimizer, norm, max_grad_norm)
    optimizer.zero_grad(set_to_none=True)  # the rollout wants their memory
    return values | {"grad_norm": norm}


def _gradients(masters: Sequence[Master]) -> dict[str, Part]:
    """The summed gradient of every master, by its number, as far as this rank has its rows."""
    found = {}
    for number, master in enumerate(masters):
        if (gradient := master.param.grad) is not None:
            start = 0 if master.split is None else master.split.start
            found[str(number)] = Part(gradient, tuple(gradient.shape), start)
    return found


def _summed(own: Mapping[int, Stats], world: World) -> Stats:
    """The statistics of all micro-batches, of which this rank has its `own` by number, added in their order."""
    keys = list(next(iter(own.values()), {}))
    columns = {key: torch.stack([part[key] for part in own.values()]).cpu() for key in keys}
    every = {
        number: {key: column[i] for key, column in columns.items()}
        for numbers, columns in world.gather((list(own), columns)) for i, number in enumerate(numbers)
    }
    stats: Stats = {}
    for number in sorted(every):
        for key, value in every[number].items():
            stats[key] = stats.get(key, torch.zeros_like(value)) + value
    return stats
