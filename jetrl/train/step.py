"""One training step on a step's batches: forward, loss, backward, finite check, clip, optimizer, publish."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl.config import Config
from jetrl.model.transformer import Transformer
from jetrl.rl import losses, mismatch
from jetrl.train.optim import clip_gradients_, global_grad_norm, lr_at
from jetrl.types import ForwardBatch, MicroBatch, PackedBatch, VarlenPlan


class NonFiniteError(RuntimeError):
    """A loss or gradient norm that is no finite number; the run stops and the step's data is saved for replay."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a micro-batch that carry loss, with the learner's values there. All [R]."""

    index: Tensor
    logprobs: Tensor
    entropy: Tensor


def forward_rows(model: Transformer, micro: MicroBatch, temperature: float) -> Rows:
    """Training forward of one micro-batch; log-probs and entropy of the rows whose target is a completion token."""
    batch = ForwardBatch(micro.tokens, micro.positions, VarlenPlan(micro.cu_seqlens, micro.lengths), "train")
    hidden = model(batch)
    index = micro.loss_mask.nonzero()[:, 0]
    logprobs, entropy = model.token_logprobs(hidden[index], micro.targets[index], temperature)
    return Rows(index, logprobs, entropy)


@torch.no_grad()
def logprob_pass(model: Transformer, batch: PackedBatch, temperature: float) -> list[Tensor]:
    """Log-probs of every micro-batch's loss rows, without gradients (old policy, reference policy)."""
    return [forward_rows(model, micro, temperature).logprobs for micro in batch.micro_batches]


def update(
    model: Transformer, optimizer: torch.optim.Optimizer, batches: list[PackedBatch], config: Config, step: int,
    version: int, reference: Transformer | None, unified: bool,
) -> dict[str, float]:  # fmt: skip
    """All optimizer updates of a step; the model is published after each. Returns the step's metrics.

    With one update a step the old policy is the current one, so its log-probs are the ones at hand and no extra pass is
    made. With several, a unified flow takes the rollout's log-probs (the same bits); `fp8_rollout` makes the pass.
    """
    old: list[list[Tensor] | None] = [None] * len(batches)
    if len(batches) > 1 and not unified:
        old = [logprob_pass(model, batch, config.rollout.temperature) for batch in batches]
    stats: list[dict[str, float]] = []
    for i, batch in enumerate(batches):
        on_policy = i == 0  # only here are the weights those that sampled
        stats.append(_one_update(model, optimizer, batch, config, step, reference, old[i], on_policy, len(batches) == 1))
        model.publish()
    merged = {k: sum(s[k] for s in stats) / len(stats) for k in stats[0] if not k.startswith("parity/")}
    return merged | {k: v for k, v in stats[0].items() if k.startswith("parity/")}


def _one_update(
    model: Transformer, optimizer: torch.optim.Optimizer, batch: PackedBatch, config: Config, step: int,
    reference: Transformer | None, old: list[Tensor] | None, on_policy: bool, single: bool,
) -> dict[str, float]:  # fmt: skip
    gap, sums = mismatch.MismatchAccumulator(), losses.StatSums()
    total = torch.zeros((), dtype=torch.float64, device=model.head_weight.device)
    temperature = config.rollout.temperature
    optimizer.zero_grad(set_to_none=True)
    for i, micro in enumerate(batch.micro_batches):
        rows = forward_rows(model, micro, temperature)
        sampled = micro.rollout_logprobs[rows.index]
        if on_policy:
            gap.add(rows.logprobs.detach(), sampled)
        old_logprobs = rows.logprobs.detach() if single else (sampled if old is None else old[i])
        with torch.no_grad():
            ref = forward_rows(reference, micro, temperature).logprobs if reference is not None else None
        loss = objective(rows, micro, batch, old_logprobs, ref, config, sums)
        loss.backward()
        total += loss.detach().to(torch.float64)
    norm = global_grad_norm(model.parameters())
    _require_finite(total, norm)
    clip_gradients_(model.parameters(), norm, config.train.max_grad_norm)
    lr = lr_at(step, config.train)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    metrics = {"policy/loss": float(total), "policy/grad_norm": float(norm), "policy/lr": lr} | sums.metrics()
    return metrics | (gap.metrics() if on_policy else {})


def objective(
    rows: Rows, micro: MicroBatch, batch: PackedBatch, old: Tensor, ref: Tensor | None, config: Config,
    sums: losses.StatSums,
) -> Tensor:  # fmt: skip
    """The micro-batch's share of the loss: policy objective, KL to the reference, entropy bonus (denominators global)."""
    rl, index = config.rl, rows.index
    ids, mask = micro.sequence_ids[index], torch.ones_like(rows.logprobs)
    sampled = micro.rollout_logprobs[index]
    weights = mismatch.correction(
        rows.logprobs.detach(), sampled, mask, ids, rl.rollout_is, rl.rollout_is_threshold, rl.rollout_rs,
        rl.rollout_rs_threshold,
    )  # fmt: skip
    denominators = losses.denominators_of(batch, config.rollout.max_response_length)
    loss, stats = losses.policy_loss(
        rows.logprobs, old, micro.advantages[index], mask, ids, clip_ratio_low=rl.clip_ratio_low,
        clip_ratio_high=rl.clip_ratio_high, clip_ratio_c=rl.clip_ratio_c, loss_agg=rl.loss_agg,
        denominators=denominators, is_weights=weights,
    )  # fmt: skip
    sums.add(stats, rows.entropy.detach())
    if ref is not None:
        kl = losses.kl_penalty(rows.logprobs, ref, rl.kl_estimator)
        sums.add_kl(kl.detach())
        loss = loss + rl.kl_coef * losses.aggregate(kl, mask, ids, rl.loss_agg, denominators)
    if rl.entropy_coef:
        loss = loss - rl.entropy_coef * losses.aggregate(rows.entropy, mask, ids, rl.loss_agg, denominators)
    return loss


def _require_finite(loss: Tensor, norm: Any) -> None:
    if not (math.isfinite(float(loss)) and math.isfinite(float(norm))):
        raise NonFiniteError(f"loss {float(loss)}, gradient norm {float(norm)}")
