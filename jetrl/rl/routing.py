"""Losses and metrics of routers in mixture-of-experts layers, as pure functions on the loss rows of a micro-batch.

Letters: L layers with experts, E experts, k experts of a token, R loss rows. As in `losses.py`, every term is a share:
the denominators cover the whole update, so that shares of micro-batches, and their gradients, add up to those of one
large batch, however the sequences were packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jetrl.rl.losses import Denominators, Stats


def balance_loss(
    logits: Sequence[Tensor], chosen: Sequence[Tensor], sequence_ids: Tensor, shares: Denominators
) -> Tensor:
    """The micro-batch's share of the mean over layers and sequences of

        E * sum over e of f_e P_e     f_e  the share of the sequence's k * n choices that are expert e, without gradient
                                      P_e  the mean over the sequence's n loss tokens of the softmax's p_e

    which is 1 where choices or probabilities are even, and E / k where all tokens choose the same experts for sure.

    Within sequences, not within micro-batches: sequences are not cut, so the value does not depend on packing.
    `logits` [R, E] FP32 with gradient and `chosen` [R, k] of each layer, `sequence_ids` [R] within the update.
    Returns float64. Source: DeepSeek-V3, arXiv 2412.19437 eq. 17 to 20, with the softmax of Switch, arXiv 2101.03961.
    """
    counts = torch.tensor(shares.sequence_tokens, dtype=torch.float64, device=sequence_ids.device).clamp(min=1)
    total = counts.new_zeros(())
    for z, experts in zip(logits, chosen, strict=True):
        empty = counts.new_zeros(len(counts), z.shape[-1])
        hits = torch.zeros_like(z, dtype=torch.float64).scatter_(-1, experts, 1.0)  # a token's experts are different
        frequency = empty.index_add(0, sequence_ids, hits) / (experts.shape[-1] * counts[:, None])
        mean = empty.index_add(0, sequence_ids, z.double().softmax(-1)) / counts[:, None]
        total = total + z.shape[-1] * (frequency * mean).sum()
    return total / (len(logits) * shares.num_sequences)


def z_loss(logits: Sequence[Tensor], shares: Denominators) -> Tensor:
    """The share of the mean over layers and loss tokens of `logsumexp(z)**2`, float64 (ST-MoE, arXiv 2202.08906)."""
    squares = [torch.logsumexp(z.double(), -1).square().sum() for z in logits]
    return torch.stack(squares).sum() / (len(logits) * shares.num_loss_tokens)


def router_losses(
    logits: Sequence[Tensor], chosen: Sequence[Tensor], sequence_ids: Tensor, shares: Denominators, balance: float,
    z: float,
) -> tuple[Tensor | None, Stats]:
    """`balance * balance_loss + z * z_loss` (None if both weights are 0), and the additive statistics.

    `moe/router_entropy`: the mean over layers and loss tokens of the softmax's entropy in nats; `moe/aux_loss` and
    `moe/z_loss` for the weights that are not 0.
    """
    loss: Tensor | None = None
    entropy = torch.stack([_entropy(x.detach().double()) for x in logits]).sum()
    stats: Stats = {"moe/router_entropy": entropy / (len(logits) * shares.num_loss_tokens)}
    if balance:
        term = balance_loss(logits, chosen, sequence_ids, shares)
        loss, stats["moe/aux_loss"] = balance * term, term.detach()
    if z:
        term = z_loss(logits, shares)
        loss = z * term if loss is None else loss + z * term
        stats["moe/z_loss"] = term.detach()
    return loss, stats


def _entropy(logits: Tensor) -> Tensor:
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum()


@dataclass(slots=True)
class RoutingCounts:
    """Choices of experts over many micro-batches (and ranks): whole numbers, so order and packing change nothing."""

    counts: np.ndarray | None = None  # [L, E] int64, of loss rows
    compared: int = 0  # pairs of a loss row and a layer
    different: int = 0  # of these, with another set of experts in the rollout's flow

    def add(self, chosen: Sequence[Tensor], num_experts: int) -> None:
        """Count the choices [R, k] of each layer."""
        one = torch.ones((), dtype=torch.int64, device=chosen[0].device)
        empty = one.new_zeros(num_experts)
        new = torch.stack([empty.index_add(0, x.flatten(), one.expand(x.numel())) for x in chosen]).cpu().numpy()
        self.counts = new if self.counts is None else self.counts + new

    def compare(self, learner: Sequence[Tensor], rollout: Sequence[Tensor]) -> None:
        """Compare the sets of choices [R, k] of each layer; their order within a token does not count."""
        unequal = [(a.sort(-1).values != b.sort(-1).values).any(-1) for a, b in zip(learner, rollout, strict=True)]
        self.compared += sum(len(x) for x in unequal)
        self.different += int(torch.stack(unequal).sum())

    def merge(self, other: RoutingCounts) -> None:
        if other.counts is not None:
            self.counts = other.counts if self.counts is None else self.counts + other.counts
        self.compared += other.compared
        self.different += other.different

    def metrics(self) -> dict[str, float]:
        """`moe/load_max_over_mean`: the busiest expert's choices over the mean expert's, in the layer where that is
        largest, if choices were counted. `parity/frac_routing_different` if they were compared."""
        compared = {"parity/frac_routing_different": self.different / self.compared} if self.compared else {}
        if self.counts is None:
            return compared
        return {"moe/load_max_over_mean": float((self.counts.max(1) / self.counts.mean(1)).max())} | compared


def merged(parts: Sequence[RoutingCounts]) -> RoutingCounts:
    """The counts of all."""
    total = RoutingCounts()
    for part in parts:
        total.merge(part)
    return total
