"""The objective of a micro-batch: policy loss, entropy bonus, KL to the reference and a shared critic's loss.

The config says which parts there are, and in which form; nothing here knows algorithms by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from jetrl.choices import KLEstimator, KLIn, Ratio, RolloutIS, RolloutRS
from jetrl.rl import losses, mismatch
from jetrl.rl.losses import Denominators, Stats, Terms


class ObjectiveConfig(Protocol):
    """The fields of `[rl]` that this module reads."""

    @property
    def ratio(self) -> Ratio: ...

    @property
    def surrogate(self) -> str: ...

    @property
    def loss_agg(self) -> str: ...

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

    `teacher_kl` (`top_k.top_k_kl`, with gradient) counts `teacher_weight` times; None: no such term.
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
    teacher_kl: Tensor | None = None
    teacher_weight: float = 0.0


def objective(
    inputs: Inputs, config: ObjectiveConfig, shares: Denominators, terms: Terms | None = None
) -> tuple[Tensor, Stats]:
    """The micro-batch's share of

        policy_loss - entropy_coef * entropy + kl_coef * KL (with kl_in = "loss") + teacher_weight * teacher_kl
            + value_coef * value_loss

    with its additive statistics. The micro-batches' shares add up to the loss of one large batch. `terms` is filled
    with what each token adds to each part ([R] float64).

    A token that the corrections leave out (weight 0) is in none of the first four, whose denominators keep it. The
    value loss has all tokens: it knows no ratio of policies, and what a state is worth does not depend on them.
    """
    ids, mask = inputs.sequence_ids, torch.ones_like(inputs.logprobs)
    is_weights, live, corrected = _corrections(inputs, mask, config, shares)
    loss, stats = losses.policy_loss(
        inputs.logprobs, inputs.old_logprobs, inputs.advantages, mask, ids, clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high, clip_ratio_c=config.clip_ratio_c, loss_agg=config.loss_agg,
        denominators=shares, is_weights=is_weights, ratio=config.ratio,
        surrogate=config.surrogate, terms=terms,
    )
    bonus, more = losses.entropy_bonus(
        inputs.entropy, live, ids, loss_agg=config.loss_agg, denominators=shares, terms=terms
    )
    stats = stats | more | corrected
    if config.entropy_coef:
        loss = loss - config.entropy_coef * bonus
    if inputs.ref_logprobs is not None:
        in_loss = config.kl_in == "loss"
        assert not (in_loss and config.kl_estimator == "k1"), "the gradient of k1 as a loss is noise"
        kl, more = losses.kl_loss(
            inputs.logprobs if in_loss else inputs.logprobs.detach(), inputs.ref_logprobs, live, ids,
            estimator=config.kl_estimator, loss_agg=config.loss_agg, denominators=shares, terms=terms,
        )
        loss, stats = loss + config.kl_coef * kl if in_loss else loss, stats | more
    if inputs.teacher_kl is not None:
        kl, more = losses.teacher_loss(
            inputs.teacher_kl, live, ids, loss_agg=config.loss_agg, denominators=shares, terms=terms
        )
        loss, stats = loss + inputs.teacher_weight * kl, stats | more
    if inputs.values is not None:
        assert inputs.returns is not None, "a critic's values without the returns to compare them with"
        error, more = losses.value_loss(
            inputs.values, inputs.old_values, inputs.returns, mask, ids, value_clip=config.value_clip,
            loss_agg=config.loss_agg, denominators=shares, terms=terms,
        )
        loss, stats = loss + config.value_coef * error, stats | more
    if terms is not None:
        in_kl = config.kl_coef if config.kl_in == "loss" else 0.0
        weights = {"policy": 1.0, "entropy": -config.entropy_coef, "KL": in_kl, "value": config.value_coef,
                   "teacher": inputs.teacher_weight}
        found = {name: weights[name] * shares for name, shares in terms.items() if weights[name]}
        terms.clear()
        terms |= found
    return loss, stats


def _corrections(
    inputs: Inputs, mask: Tensor, config: ObjectiveConfig, shares: Denominators
) -> tuple[Tensor | None, Tensor, Stats]:
    """Importance weights times rejection mask and veto [R], where the config asks for any; which rows they leave in
    [R]; and their statistics.

    They compare learner and sampler as they were before this step's first update. A weight that underflows in the dtype
    of the loss leaves its token out, as a rejection does.
    """
    if config.rollout_is == "none" and config.rollout_rs == "none" and config.rollout_veto is None:
        return None, mask, {}
    learned = inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    pair = learned, inputs.rollout_logprobs, mask, inputs.sequence_ids
    cap = config.rollout_is_threshold
    weights = mismatch.importance_weights(*pair, config.rollout_is, cap)
    unvetoed = mismatch.veto_mask(*pair, config.rollout_veto)
    kept = unvetoed * mismatch.rejection_mask(
        *pair, config.rollout_rs, config.rollout_rs_threshold, config.rollout_rs_lower
    )
    stats = mismatch.correction_stats(weights, kept, 1 - unvetoed, config.rollout_is, cap, shares.num_loss_tokens)
    final = weights * kept
    live = (final.to(mask.dtype) > 0).to(mask.dtype)
    return final, live, stats | {losses.IN_TERMS: live.double().sum() / shares.num_loss_tokens}
