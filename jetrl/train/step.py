"""One training step on a step's batches: forward, loss, backward, finite check, clip, optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.config import Config
from jetrl.model.transformer import Transformer
from jetrl.rl import losses, mismatch
from jetrl.train.optim import clip_gradients_, global_grad_norm, lr_at, set_lr
from jetrl.train.packing import denominators, to_device
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
    device = model.head_weight.device
    return [forward_rows(model, to_device(m, device), temperature).logprobs for m in batch.micro_batches]


def update(
    model: Transformer, optimizer: torch.optim.Optimizer, batches: list[PackedBatch], config: Config, step: int,
    reference: Transformer | None, unified: bool,
) -> dict[str, float]:  # fmt: skip
    """All optimizer updates of a step; published between them, the last is left to the caller. Returns metrics.

    With one update a step the old policy is the current one, so its log-probs are the ones at hand and no extra pass is
    made. With several, a unified flow takes the rollout's log-probs (the same bits); `fp8_rollout` makes the pass.
    """
    old: list[list[Tensor] | None] = [None] * len(batches)
    if len(batches) > 1 and not unified:
        old = [logprob_pass(model, batch, config.rollout.temperature) for batch in batches]
    stats: list[dict[str, float]] = []
    for i, batch in enumerate(batches):
        if batch.num_loss_tokens == 0:  # every completion dropped or masked: nothing to learn from
            continue
        if stats:
            model.publish()
        on_policy = i == 0  # only here are the weights those that sampled
        single = len(batches) == 1
        stats.append(_one_update(model, optimizer, batch, config, step, reference, old[i], on_policy, single))
    if not stats:
        return {}
    merged = {k: sum(s[k] for s in stats) / len(stats) for k in stats[0] if not k.startswith("parity/")}
    return merged | {k: v for k, v in stats[0].items() if k.startswith("parity/")}


def _one_update(
    model: Transformer, optimizer: torch.optim.Optimizer, batch: PackedBatch, config: Config, step: int,
    reference: Transformer | None, old: list[Tensor] | None, on_policy: bool, single: bool,
) -> dict[str, float]:  # fmt: skip
    gap, temperature = mismatch.MismatchAccumulator(), config.rollout.temperature
    stats: dict[str, Tensor] = {}
    shares = denominators(batch, config.rollout.max_response_length)
    optimizer.zero_grad(set_to_none=True)  # what a failed update may have left
    for i, host in enumerate(batch.micro_batches):
        micro = to_device(host, model.head_weight.device)
        rows = forward_rows(model, micro, temperature)
        sampled = micro.rollout_logprobs[rows.index]
        if on_policy:
            gap.add(rows.logprobs, sampled)
        old_logprobs = None if single else (sampled if old is None else old[i])
        with torch.no_grad():
            ref = forward_rows(reference, micro, temperature).logprobs if reference is not None else None
        loss, part = objective(rows, micro, old_logprobs, ref, config, shares)
        loss.backward()
        part["policy/loss"] = loss.detach().double()
        stats = {k: stats.get(k, torch.zeros_like(v)) + v for k, v in part.items()}
    norm = global_grad_norm(model.parameters())
    values = {k: float(v) for k, v in stats.items()}
    _require_finite(values["policy/loss"], float(norm))
    clip_gradients_(model.parameters(), norm, config.train.max_grad_norm)
    lr = lr_at(step - 1, config.train)
    set_lr(optimizer, lr)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # the rollout wants their memory
    metrics = values | {"policy/grad_norm": float(norm), "policy/lr": lr}
    return metrics | (gap.metrics() if on_policy else {})


def objective(
    rows: Rows, micro: MicroBatch, old: Tensor | None, ref: Tensor | None, config: Config,
    shares: losses.Denominators,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The micro-batch's share of `policy loss + kl_coef * KL - entropy_coef * entropy`, with its additive statistics.

    `old` None: the old policy is the current one. The micro-batches' shares add up to the loss of one large batch.
    """
    rl, index = config.rl, rows.index
    ids, mask = micro.sequence_ids[index], torch.ones_like(rows.logprobs)
    # the corrections compare the learner with the sampler as both were before this step's first update
    sampled, learned = micro.rollout_logprobs[index], rows.logprobs.detach() if old is None else old
    weights = None
    if rl.rollout_is is not None or rl.rollout_rs != "none":
        weights = mismatch.importance_weights(learned, sampled, mask, ids, rl.rollout_is, rl.rollout_is_threshold)
        weights = weights * mismatch.rejection_mask(
            learned, sampled, mask, ids, rl.rollout_rs, rl.rollout_rs_threshold
        )
    loss, stats = losses.policy_loss(
        rows.logprobs, old, micro.advantages[index], mask, ids, clip_ratio_low=rl.clip_ratio_low,
        clip_ratio_high=rl.clip_ratio_high, clip_ratio_c=rl.clip_ratio_c, loss_agg=rl.loss_agg,
        denominators=shares, is_weights=weights,
    )  # fmt: skip
    bonus, more = losses.entropy_bonus(rows.entropy, mask, ids, loss_agg=rl.loss_agg, denominators=shares)
    stats = stats | more
    if rl.entropy_coef:
        loss = loss - rl.entropy_coef * bonus
    if ref is not None:
        kl, more = losses.kl_loss(
            rows.logprobs, ref, mask, ids, estimator=rl.kl_estimator, loss_agg=rl.loss_agg, denominators=shares
        )
        loss, stats = loss + rl.kl_coef * kl, stats | more
    return loss, stats


def _require_finite(loss: float, norm: float) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise NonFiniteError(f"loss {loss}, gradient norm {norm}")
