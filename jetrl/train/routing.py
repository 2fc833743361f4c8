"""What an update does with the routers of a mixture of experts: their losses, the load of experts, and whether the
rollout's flow chooses the same experts as the learner.

The last is for `train.compare_routing`: the rollout's function is computed once more, over the whole sequences of the
update and with the weights that sampled them. These are our engine's own choices, bit for bit, in `fp8_rollout` too:
what the rollout's flow gives a token does not depend on pages, chunks or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from jetrl.config.train import TrainConfig
from jetrl.errors import UserError
from jetrl.model.block import Routes
from jetrl.model.transformer import Transformer
from jetrl.rl.losses import Denominators, Stats
from jetrl.rl.routing import RoutingCounts, router_losses
from jetrl.spec import ModelSpec
from jetrl.types import ForwardBatch

LOSSES = ("router_aux_loss_coef", "router_z_loss_coef")  # of [train]
KEYS = (*LOSSES, "freeze_router", "compare_routing")


def check_routing(config: TrainConfig, spec: ModelSpec) -> None:
    """Refuse settings of routers for a model that has none."""
    given = [key for key in KEYS if getattr(config, key)]
    if given and spec.experts is None:
        raise UserError(
            f"train.{given[0]} = {getattr(config, given[0])!s} has no effect: the {spec.family} model has no experts. "
            "Remove it, or use a model with experts."
        )
    if config.router_aux_loss_coef and spec.experts is not None and spec.experts.deepseek is not None:
        raise UserError(
            f"train.router_aux_loss_coef = {config.router_aux_loss_coef}: that loss is of softmax scores, and the "
            f"{spec.family} model balances its experts by a bias. Set it to 0."
        )


@dataclass(slots=True)
class Routing:
    """Of one update. For a dense model every method does nothing."""

    model: Transformer
    config: TrainConfig
    shares: Denominators
    counts: RoutingCounts = field(default_factory=RoutingCounts)

    def routes(self) -> Routes | None:
        """Where the next forward pass is to note its routes."""
        return None if self.model.spec.experts is None else Routes()

    def add_to(
        self, loss: Tensor, stats: Stats, routes: Routes | None, index: Tensor, sequence_ids: Tensor
    ) -> tuple[Tensor, Stats]:
        """The loss and statistics of a micro-batch with those of its routers, at the loss rows `index` [R]."""
        if routes is None:
            return loss, stats
        logits, chosen = ([of_layer[index] for of_layer in x.values()] for x in (routes.logits, routes.chosen))
        assert self.model.spec.experts is not None
        self.counts.add(chosen, self.model.spec.experts.count)
        more, own = router_losses(
            logits, chosen, sequence_ids[index], self.shares, self.config.router_aux_loss_coef,
            self.config.router_z_loss_coef,
        )
        return loss if more is None else loss + more.to(loss.dtype), stats | own

    @torch.no_grad()
    def compare(self, batch: ForwardBatch, routes: Routes | None, index: Tensor) -> None:
        """With `train.compare_routing`: the rollout's choices for the same rows, against the learner's."""
        if routes is None or not self.config.compare_routing:
            return
        rollout = Routes()
        self.model(replace(batch, side="rollout"), routes=rollout)
        rows: Sequence[list[Tensor]] = [[x[index] for x in r.chosen.values()] for r in (routes, rollout)]
        self.counts.compare(*rows)
