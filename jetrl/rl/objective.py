"""The objective of a micro-batch: policy loss, entropy bonus, KL to the reference and a shared critic's loss.

The config says which parts there are, and in which form; nothing here knows algorithms by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from jetrl.choices import KLEstimator, KLIn, LossAgg, Ratio, RolloutIS, RolloutRS, Surrogate
from jetrl.rl import losses, mismatch
from jetrl.rl.losses import Denominators, Stats


class ObjectiveConfig(Protocol):
    """The fields of `[rl]` that this module reads."""

    @property
    def ratio(self) -> Ratio: ...

    @property
    def surrogate(self) -> Surrogate: ...

    @property
    def loss_agg(self) -> LossAgg: ...

    @property
    def clip_ratio_low(self) -> float: ...

    @property
    def clip_ratio_high(self) -> float: ...

    @property
    def clip_ratio_c(self) -> float | None: ...

    @property
    def entropy_coef(self) -> float: ...

    @property
    def kl_coef(self) -> float: ...

    @property
    def kl_estimator(self) -> KLEstimator: ...

    @property
    def kl_in(self) -> KLIn: ...

    @property
    def rollout_is(self) -> RolloutIS: ...

    @property
    def rollout_is_threshold(self) -> float: ...

    @property
    def rollout_rs(self) -> RolloutRS: ...

    @property
    def rollout_rs_threshold(self) -> float: ...

    @property
    def rollout_rs_lower(self) -> float | Literal["inverse"]: ...

    @property
    def rollout_veto(self) -> float | None: ...

    @property
    def value_clip(self) -> float | None: ...

    @property
    def value_coef(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Inputs:
    """The loss rows of a micro-batch, all [R]. `logprobs`, `entropy` and `values` are the learner's, with gradient.

    `old_logprobs` None: the old policy is the current one. `ref_logprobs` None: no reference policy. `values` with
    `returns` only where the policy's own model is the critic as well; `old_values` None: these values themselves.
    """

    logprobs: Tensor
    entropy: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    sequence_ids: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None


def objective(inputs: Inputs, config: ObjectiveConfig, shares: Denominators) -> tuple[Tensor, Stats]:
    """The micro-batch's share of

        policy_loss - entropy_coef * entropy + kl_coef * KL (with kl_in = "loss") + value_coef * value_loss

    with its additive statistics. The micro-batches' shares add up to the loss of one large batch.
    """
    ids, mask = inputs.sequence_ids, torch.ones_like(inputs.logprobs)
    is_weights, corrected = _corrections(inputs, mask, config, shares)
    loss, stats = losses.policy_loss(
        inputs.logprobs, inputs.old_logprobs, inputs.advantages, mask, ids, clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high, clip_ratio_c=config.clip_ratio_c, loss_agg=config.loss_agg,
        denominators=shares, is_weights=is_weights, ratio=config.ratio,
        surrogate=config.surrogate,
    )
    bonus, more = losses.entropy_bonus(inputs.entropy, mask, ids, loss_agg=config.loss_agg, denominators=shares)
    stats = stats | more | corrected
    if config.entropy_coef:
        loss = loss - config.entropy_coef * bonus
    if inputs.ref_logprobs is not None:
        in_loss = config.kl_in == "loss"
        assert not (in_loss and config.kl_estimator == "k1"), "the gradient of k1 as a loss is noise"
        kl, more = losses.kl_loss(
            inputs.logprobs if in_loss else inputs.logprobs.detach(), inputs.ref_logprobs, mask, ids,
            estimator=config.kl_estimator, loss_agg=config.loss_agg, denominators=shares,
        )
        loss, stats = loss + config.kl_coef * kl if in_loss else loss, stats | more
    if inputs.values is not None:
        assert inputs.returns is not None, "a critic's values without the returns to compare them with"
        error, more = losses.value_loss(
            inputs.values, inputs.old_values, inputs.returns, mask, ids, value_clip=config.value_clip,
            loss_agg=config.loss_agg, denominators=shares,
        )
        loss, stats = loss + config.value_coef * error, stats | more
    return loss, stats


def _corrections(
    inputs: Inputs, mask: Tensor, config: ObjectiveConfig, shares: Denominators
) -> tuple[Tensor | None, Stats]:
    """Importance weights times rejection mask and veto [R], with their statistics, where the config asks for any.

    They compare learner and sampler as they were before this step's first update.
    """
    if config.rollout_is == "none" and config.rollout_rs == "none" and config.rollout_veto is None:
        return None, {}
    learned = inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    pair = learned, inputs.rollout_logprobs, mask, inputs.sequence_ids
    cap = config.rollout_is_threshold
    weights = mismatch.importance_weights(*pair, config.rollout_is, cap)
    unvetoed = mismatch.veto_mask(*pair, config.rollout_veto)
    kept = unvetoed * mismatch.rejection_mask(
        *pair, config.rollout_rs, config.rollout_rs_threshold, config.rollout_rs_lower
    )
    stats = mismatch.correction_stats(weights, kept, 1 - unvetoed, config.rollout_is, cap, shares.num_loss_tokens)
    return weights * kept, stats
