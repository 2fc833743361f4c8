"""The two choices inside the policy loss: which ratio of policies (`RATIOS`), and what is made of it (`SURROGATES`).

Another one is one function and one entry. Letters: T packed tokens of a micro-batch. With
d_t = logprobs_t - old_logprobs_t, and n_s loss tokens in sequence s.

Rows that are not active must come with `log_ratio` and `advantages` 0, or their overflow would reach the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.choices import Ratio
from jetrl.rl.own_terms import token_losses
from jetrl.rl.sequences import per_sequence


@dataclass(frozen=True, slots=True)
class Clip:
    """`clip_ratio_low`, `clip_ratio_high` and `clip_ratio_c`: bounds 1 - low and 1 + high, and the dual clip."""

    low: float
    high: float
    dual: float | None

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 or self.high < 0:
            raise ValueError(
                f"clip_ratio_low = {self.low} must be within [0, 1] and clip_ratio_high = {self.high} not negative"
            )
        if self.dual is not None and self.dual <= 1:
            raise ValueError(
                f"clip_ratio_c = {self.dual} must be above 1 (common: 3 to 10), or left out to have no dual clip"
            )


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token [T], with gradient, and which tokens were clipped [T] bool; None where nobody can say."""

    loss: Tensor
    clipped_low: Tensor | None
    clipped_high: Tensor | None
    clipped_dual: Tensor | None


def token_loss(
    surrogate: str, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, active: Tensor, clip: Clip
) -> TokenLoss:
    """By the entry of `SURROGATES`, or by a function of the user's, which gets the active tokens alone."""
    if (known := SURROGATES.get(surrogate)) is not None:
        return known(log_ratio, logprobs, advantages, active, clip)
    loss = torch.zeros_like(logprobs)
    if bool(active.any()):
        part = token_losses(surrogate, log_ratio[active], logprobs[active], advantages[active], clip)
        loss = loss.masked_scatter(active, part)
    else:
        loss = loss + 0.0 * torch.where(active, logprobs, 0.0)  # so that the micro-batch has a backward pass
    return TokenLoss(loss, None, None, None)


def _token(log_ratio: Tensor, active: Tensor, sequence_ids: Tensor) -> Tensor:
    """`log r_t = d_t`."""
    return log_ratio


def _sequence_mean(log_ratio: Tensor, active: Tensor, sequence_ids: Tensor) -> Tensor:
    """`log r_t = sg(mean of d over t's sequence) + d_t - sg(d_t)`, where sg stops the gradient.

    The value is GSPO's length-normalized ratio; each token brings its own share of the gradient, so that the mean over
    the sequence's tokens has the gradient of GSPO's sequence ratio. Source: GSPO-token, arXiv 2507.18071 section 4.3.
    """
    sums, counts = per_sequence(log_ratio.detach().double(), active, sequence_ids)
    value = torch.where(active, sums / counts.clamp(min=1), 0.0).to(log_ratio.dtype)
    return value + (log_ratio - log_ratio.detach())


def _sequence(log_ratio: Tensor, active: Tensor, sequence_ids: Tensor) -> Tensor:
    """`log r_t = sg(sum of d over t's sequence) + n_s (d_t - sg(d_t))`.

    The value is the ratio of the probabilities of the whole sequence. All its n_s tokens hold it with the same weight,
    so each must bring n_s times its own share of the gradient: their sum is then that of n_s whole ratios. This holds
    for every `loss_agg`, as the weights within a sequence are equal. Source: RLOO, arXiv 2402.14740, as TRL has it.
    """
    sums, counts = per_sequence(log_ratio.detach().double(), active, sequence_ids)
    value = torch.where(active, sums, 0.0).to(log_ratio.dtype)
    return value + counts.to(log_ratio.dtype) * (log_ratio - log_ratio.detach())


RATIOS: dict[Ratio, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": _token,
    "sequence_mean": _sequence_mean,
    "sequence": _sequence,
}
"""log_ratio [T] (d_t, with gradient), active [T] bool, sequence_ids [T] -> log r_t [T], with gradient."""


def _clip(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, active: Tensor, clip: Clip) -> TokenLoss:
    """PPO's clipped surrogate with dual clip; the formula is in `losses.policy_loss`."""
    ratio = log_ratio.detach().exp()
    clipped_high = (advantages > 0) & (ratio > 1 + clip.high)
    clipped_low = (advantages < 0) & (ratio < 1 - clip.low)
    clipped_dual = torch.zeros_like(clipped_low)
    bound = torch.full_like(ratio, 1 - clip.low).masked_fill(clipped_high, 1 + clip.high)
    if clip.dual is not None:
        clipped_dual = (advantages < 0) & (ratio > clip.dual)
        bound = bound.masked_fill(clipped_dual, clip.dual)
    # A clipped token is a constant. Its log-ratio is cut out before exp, so that an overflow cannot reach the backward.
    # So is that of a token without advantage whose ratio overflows: 0 * inf would be NaN.
    constant = clipped_high | clipped_low | clipped_dual | ((advantages == 0) & ratio.isinf())
    live_ratio = torch.where(constant, 0.0, log_ratio).exp()
    loss = -advantages * torch.where(constant, bound, live_ratio)
    return TokenLoss(loss, clipped_low, clipped_high, clipped_dual)


def _cispo(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, active: Tensor, clip: Clip) -> TokenLoss:
    """REINFORCE with a clipped importance weight; the formula is in `losses.policy_loss`."""
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(min=1 - clip.low, max=1 + clip.high)
    loss = -weight * advantages * torch.where(active, logprobs, 0.0)
    low, high = active & (ratio < 1 - clip.low), active & (ratio > 1 + clip.high)
    return TokenLoss(loss, low, high, torch.zeros_like(low))


SURROGATES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Clip], TokenLoss]] = {
    "clip": _clip,
    "cispo": _cispo,
}
"""log_ratio (of `RATIOS`), logprobs, advantages, active (all [T]), bounds -> the tokens' losses."""
