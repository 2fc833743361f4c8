"""The terms of the policy objective, as pure functions on packed tokens.

Letters: T packed tokens of one micro-batch, S sequences of the whole update. Every term is a sum over tokens weighted
by `token_weights`, whose denominators cover *all* micro-batches (and ranks) of the update. So the sum of the
micro-batches' losses, and of their gradients, is the loss of one large batch, however the sequences were packed.

The statistics follow the same rule: each is this micro-batch's share, and **adding** them over micro-batches gives the
mean over all loss tokens. They are detached 0-dim tensors, left on the device.

Rows with `loss_mask == 0` have no influence, whatever they hold: their inputs are replaced before any `exp`, because
an overflow there would turn into NaN in the backward (0 * inf) even though the value is masked afterwards. So have loss
tokens that a correction leaves out (weight 0): they count in the denominators of the loss, and in no term.

A function that is given `terms` notes there, by the term's name, what each token adds to the loss ([T] float64).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.choices import KLEstimator, Ratio
from jetrl.rl import own, own_terms
from jetrl.rl.surrogate import RATIOS, SURROGATES, Clip, token_loss

Stats = dict[str, Tensor]
Terms = dict[str, Tensor]

K3_BOUND = 20.0  # nats
IN_TERMS = "policy/frac_in_terms"  # the share of loss tokens that no correction leaves out; absent without corrections
RATIO_MEAN = "policy/ratio_mean"
_ROUNDING = 1e-12  # of shares that are sums over micro-batches; one token's is far above
BEYOND = "policy/frac_ratio_beyond"  # the share of loss tokens whose ratio overflows, and whose loss does not
OVER_TERMS = (
    RATIO_MEAN, "policy/kl", "policy/logprob_abs_change_mean", "policy/clip_frac_low", "policy/clip_frac_high",
    "policy/clip_frac_dual", "policy/ref_kl", "policy/entropy", "policy/teacher_kl_top_k",
)  # the statistics that `over_terms` makes means over those tokens


@dataclass(frozen=True, slots=True)
class Denominators:
    """What the sums are divided by; counted once over the whole update, before any micro-batch is run.

    `sequence_tokens[i]` is the number of loss tokens of sequence i (of all S sequences, zeros allowed), and
    `num_sequences` counts the sequences with at least one. `max_response_length` is `rollout.max_response_length`.

    Where masked sequences are to stay in the means (`rl.masked_sequences = "count"`), `num_sequences` counts them too,
    and `masked_tokens` are their policy tokens. Statistics remain means over the loss tokens.
    """

    num_loss_tokens: int
    num_sequences: int
    sequence_tokens: tuple[int, ...]
    max_response_length: int
    masked_tokens: int = 0

    def __post_init__(self) -> None:
        if self.num_loss_tokens < 1 or self.num_sequences < 1 or self.max_response_length < 1:
            raise ValueError(
                f"nothing to average over: {self.num_loss_tokens} loss tokens, {self.num_sequences} sequences, "
                f"max_response_length {self.max_response_length}; skip an update without loss tokens"
            )


def token_weights(loss_mask: Tensor, sequence_ids: Tensor, loss_agg: str, denominators: Denominators) -> Tensor:
    """Weight [T] of each token in a loss, float64: `loss = sum_t weight_t * value_t`. Zero where masked.

    token_mean              w_t = 1 / (N + M)           N = loss tokens of the update   (DAPO, arXiv 2503.14476)
    seq_mean_token_mean     w_t = 1 / (S * n_s(t))      n_s = loss tokens of sequence s (GRPO, arXiv 2402.03300)
    seq_mean_token_sum      w_t = 1 / S                                             (REINFORCE on whole answers)
    seq_mean_token_sum_norm w_t = 1 / (S * L)           L = max_response_length         (Dr.GRPO, arXiv 2503.20783)

    S counts the sequences with loss tokens and M is 0, so a trajectory masked out for truncation leaves the average
    altogether. With `masked_sequences = "count"`, S counts all sequences and M the tokens of those masked out (TRL).

    A function of the user's (`module:function`, `path/to/file.py:function`) gets sequence ids and denominators.
    """
    mask = loss_mask.double()
    if loss_agg == "token_mean":
        return mask / (denominators.num_loss_tokens + denominators.masked_tokens)
    if loss_agg == "seq_mean_token_mean":
        counts = torch.tensor(denominators.sequence_tokens, dtype=torch.float64, device=loss_mask.device)
        # A masked row may belong to a sequence without loss tokens; the mask makes its weight 0, never 0 / 0.
        return mask / (denominators.num_sequences * counts[sequence_ids].clamp(min=1))
    if loss_agg == "seq_mean_token_sum":
        return mask / denominators.num_sequences
    if loss_agg == "seq_mean_token_sum_norm":
        return mask / (denominators.num_sequences * denominators.max_response_length)
    if own.is_own(loss_agg):
        return mask * own_terms.token_weights(loss_agg, sequence_ids, denominators) if len(mask) else mask
    names = "token_mean, seq_mean_token_mean, seq_mean_token_sum or seq_mean_token_sum_norm"
    raise ValueError(f'loss_agg is "{loss_agg}"; use {names}')


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
    loss_agg: str,
    denominators: Denominators,
    is_weights: Tensor | None = None,
    ratio: Ratio = "token",
    surrogate: str = "clip",
    terms: Terms | None = None,
) -> tuple[Tensor, Stats]:
    """`loss = sum_t w_t * is_weights_t * l_t`, with the weights w_t of `token_weights` and the token losses

        clip:  l_t = -min(r_t A_t, clip(r_t, 1 - clip_ratio_low, 1 + clip_ratio_high) A_t)
               l_t = min(l_t, -clip_ratio_c A_t)   where A_t < 0 and clip_ratio_c is given
        cispo: l_t = -sg(clip(r_t, 1 - clip_ratio_low, 1 + clip_ratio_high)) A_t logprobs_t     sg: no gradient

    and, with d_t = logprobs_t - old_logprobs_t, the ratios (gradients: see `surrogate.RATIOS`)

        token:         r_t = exp(d_t)
        sequence_mean: r_t = exp(mean of d over the sequence of t)
        sequence:      r_t = exp(sum of d over the sequence of t)

    The last two need one advantage for the whole sequence, and whole sequences in a micro-batch.

    Args (all [T], floating, one device): `logprobs` carries the gradient; `old_logprobs` are those of the policy that
    took the samples, or None for `logprobs.detach()`: then r_t is exactly 1 and the gradient is that of
    -A_t * logprobs_t (REINFORCE), which is the case of one update a step with exact parity. `advantages`;
    `loss_mask` 0 or 1; `sequence_ids` int64, numbers within the update. `is_weights` (detached) multiplies each token:
    TIS weights and rejection masks of `rl.mismatch`. A token of weight 0 (in the dtype of `logprobs`) counts in the
    denominators and nowhere else: its numbers are replaced before any `exp`, and the ratio of a sequence is that of its
    other tokens.

    Returns the loss (0-dim, dtype of `logprobs`) and the additive statistics `policy/loss`, `policy/ratio_mean`,
    `policy/kl` (mean of old - new log-probs of tokens, Schulman's k1), `policy/logprob_abs_change_mean` (mean of their
    |new - old|: with quantized weights an update also moves codes), `policy/clip_frac_high` (A > 0 and the bound cuts
    the gradient), `policy/clip_frac_low` (A < 0 likewise), `policy/clip_frac_dual`; under cispo the first two
    count the weights that were clipped from above and from below, whatever A is; a surrogate of the user's has none of
    the three. Those but the loss are sums over the
    tokens of weight above 0, divided by the number of all loss tokens: `over_terms` makes means of them. A ratio that
    overflows where the loss does not (no advantage, the dual clip) is not in `policy/ratio_mean`; `BEYOND` counts it.

    Sources: PPO, arXiv 1707.06347 eq. 7; GRPO, arXiv 2402.03300 eq. 3; clip-higher, DAPO, arXiv 2503.14476 section 3.1;
    dual clip, arXiv 1912.09729; CISPO, arXiv 2506.13585 section 3.1; GSPO, arXiv 2507.18071; RLOO, arXiv 2402.14740.
    """
    clip = Clip(clip_ratio_low, clip_ratio_high, clip_ratio_c)
    known = surrogate in SURROGATES or own.is_own(surrogate)
    if ratio not in RATIOS or not known or (ratio, surrogate) == ("sequence", "cispo"):
        raise ValueError(f'ratio "{ratio}" with surrogate "{surrogate}": unknown, or no definition of the two together')
    active, scale = loss_mask > 0, None
    if is_weights is not None:
        scale = torch.where(active, is_weights.detach(), 0.0).to(logprobs.dtype)
        active = scale > 0
    old = logprobs.detach() if old_logprobs is None else old_logprobs.detach()
    token_log_ratio = torch.where(active, logprobs - old, 0.0)
    adv = torch.where(active, advantages, 0.0).to(logprobs.dtype)
    log_ratio = RATIOS[ratio](token_log_ratio, active, sequence_ids)
    tokens = token_loss(surrogate, log_ratio, logprobs, adv, active, clip)
    weighted = tokens.loss if scale is None else tokens.loss * scale
    loss = _weighted_sum(weighted, token_weights(loss_mask, sequence_ids, loss_agg, denominators), "policy", terms)

    ratios = log_ratio.detach().exp()
    beyond = active & ratios.isinf() & tokens.loss.detach().isfinite()  # no advantage, or the dual clip

    def share(values: Tensor) -> Tensor:
        return (values.detach().double() * active).sum() / denominators.num_loss_tokens

    clipped = {"low": tokens.clipped_low, "high": tokens.clipped_high, "dual": tokens.clipped_dual}
    return loss, {
        "policy/loss": loss.detach(),
        RATIO_MEAN: share(ratios.masked_fill(beyond, 0.0)),
        BEYOND: share(beyond),
        "policy/kl": share(-token_log_ratio),
        "policy/logprob_abs_change_mean": share(token_log_ratio.detach().abs()),
    } | {f"policy/clip_frac_{name}": share(cut) for name, cut in clipped.items() if cut is not None}


def over_terms(stats: Mapping[str, float]) -> dict[str, float]:
    """The summed statistics with those of `OVER_TERMS` as means over the tokens that no correction left out, and
    without `IN_TERMS`, the share of these; `policy/ratio_mean` also without those that `BEYOND` counts. Where every
    token was left out, there is nothing to take a mean of: absent.
    """
    share = stats.get(IN_TERMS, 1.0)
    shares = {key: share for key in OVER_TERMS} | {RATIO_MEAN: share - stats.get(BEYOND, 0.0)}
    found = {
        key: value for key, value in stats.items()
        if key not in (IN_TERMS, BEYOND) and (key not in shares or shares[key] > _ROUNDING)
    }
    return {key: value / shares[key] if key in shares else value for key, value in found.items()}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy || reference) from samples of the policy, per token [T]. With d = logprobs - ref_logprobs:

        k1 = d                    unbiased, large variance, may be negative
        k2 = d^2 / 2              biased, never negative
        k3 = exp(-d) - 1 + d      unbiased, never negative; for -d > 20 its tangent at -d = 20

    These are statements about the *values*. As a loss, differentiated through `logprobs` with the samples fixed:
    k1 has gradient grad log pi, whose expectation is 0: noise, no pull towards the reference. k2 has
    d * grad log pi, whose expectation is the gradient of KL(policy || reference). k3 has (1 - exp(-d)) * grad log pi,
    whose expectation is the gradient of KL(reference || policy), equal to the former to first order in d.

    Beyond -d = `K3_BOUND` exp(-d) would hand the step to one token, and at 88.7 overflow float32. verl clamps -d to 20
    there (and the value to 10), without a gradient, so that just the tokens that have moved most are pulled back no
    more. Here the value goes on as the tangent, with the gradient of the bound: (1 - exp(20)) * grad log pi. Up to the
    bound no bit differs from the formula.

    Rows that are masked must be made harmless first; `kl_loss` does it. Source: J. Schulman, "Approximating KL
    divergence" (2020); k3 in GRPO, arXiv 2402.03300 eq. 4.
    """
    difference = logprobs - ref_logprobs.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        far = difference < -K3_BOUND  # cut out before exp, whose overflow would reach the backward
        near = torch.where(far, 0.0, difference)
        # expm1 keeps the digits of exp(-d) - 1 near d = 0, where k3 is about d^2 / 2.
        k3, slope = torch.expm1(-near) + near, math.expm1(K3_BOUND)
        return torch.where(far, slope - K3_BOUND - slope * (difference + K3_BOUND), k3)
    raise ValueError(f'kl_estimator is "{estimator}"; use k1, k2 or k3')


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    estimator: KLEstimator,
    loss_agg: str,
    denominators: Denominators,
    terms: Terms | None = None,
) -> tuple[Tensor, Stats]:
    """`sum_t w_t kl_penalty_t`, to be multiplied by `kl_coef` and added to the policy loss. Inputs as `policy_loss`.

    The statistic `policy/ref_kl` is the mean of the estimate over loss tokens, additive over micro-batches.
    """
    active = loss_mask > 0
    token_kl = kl_penalty(torch.where(active, logprobs, 0.0), torch.where(active, ref_logprobs, 0.0), estimator)
    weights = token_weights(loss_mask, sequence_ids, loss_agg, denominators)
    loss = _weighted_sum(token_kl, weights, "KL", terms)
    return loss, {"policy/ref_kl": token_kl.detach().double().sum() / denominators.num_loss_tokens}


def teacher_loss(
    kl: Tensor, loss_mask: Tensor, sequence_ids: Tensor, *, loss_agg: str, denominators: Denominators,
    terms: Terms | None = None,
) -> tuple[Tensor, Stats]:
    """`sum_t w_t kl_t` with kl_t [T] the KL to the teacher at token t (`top_k.top_k_kl`), aggregated like the policy
    loss. The statistic `policy/teacher_kl_top_k` is the mean over loss tokens, additive over micro-batches."""
    token_kl = torch.where(loss_mask > 0, kl, 0.0)
    weights = token_weights(loss_mask, sequence_ids, loss_agg, denominators)
    loss = _weighted_sum(token_kl, weights, "teacher", terms)
    return loss, {"policy/teacher_kl_top_k": token_kl.detach().double().sum() / denominators.num_loss_tokens}


def entropy_bonus(
    entropy: Tensor, loss_mask: Tensor, sequence_ids: Tensor, *, loss_agg: str, denominators: Denominators,
    terms: Terms | None = None,
) -> tuple[Tensor, Stats]:
    """`sum_t w_t H_t` with H_t [T] the entropy of the next-token distribution, aggregated like the policy loss.

    A bonus: the total loss is `policy_loss + kl_coef * kl_loss - entropy_coef * entropy_bonus`. The statistic
    `policy/entropy` is the mean over loss tokens, additive over micro-batches. Source: PPO, arXiv 1707.06347 eq. 9.
    """
    token_entropy = torch.where(loss_mask > 0, entropy, 0.0)
    weights = token_weights(loss_mask, sequence_ids, loss_agg, denominators)
    bonus = _weighted_sum(token_entropy, weights, "entropy", terms)
    return bonus, {"policy/entropy": token_entropy.detach().double().sum() / denominators.num_loss_tokens}


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    value_clip: float | None,
    loss_agg: str,
    denominators: Denominators,
    terms: Terms | None = None,
) -> tuple[Tensor, Stats]:
    """The critic's clipped squared error, with the weights w_t of `token_weights`:

        loss = sum_t w_t * 0.5 * max((v_t - R_t)^2, (clip(v_t, v_old_t - value_clip, v_old_t + value_clip) - R_t)^2)

    `values` [T] carries the gradient; `old_values` [T] are the critic's before the step's first update (None: these
    values themselves, so nothing is clipped); `returns` [T] of `gae`. `value_clip` None: the plain squared error.

    Additive statistics: `critic/loss`, `critic/value_mean`, `critic/clip_frac` (share of tokens where the clipped
    error is the larger one: they have no gradient), and for `explained_variance` `critic/return_mean`,
    `critic/return_square_mean` and `critic/error_square_mean`. Source: PPO2 of OpenAI's baselines, as verl and TRL
    have it.
    """
    active = loss_mask > 0
    value, target = torch.where(active, values, 0.0), torch.where(active, returns, 0.0).to(values.dtype)
    square, clipped = (value - target).square(), torch.zeros_like(active)
    if value_clip is not None and old_values is not None:
        old = torch.where(active, old_values.detach(), 0.0).to(values.dtype)
        bounded = torch.clamp(value.detach(), old - value_clip, old + value_clip)
        bounded_square = (bounded - target).square()
        clipped = bounded_square > square.detach()  # only where the clip moved the value: there it is a constant
        square = torch.where(clipped, bounded_square, square)
    weights = token_weights(loss_mask, sequence_ids, loss_agg, denominators)
    loss = _weighted_sum(0.5 * square, weights, "value", terms)
    exact_value, exact_target = value.detach().double(), target.double()
    shares = {
        "critic/value_mean": exact_value,
        "critic/clip_frac": clipped.double(),
        "critic/return_mean": exact_target,
        "critic/return_square_mean": exact_target.square(),
        "critic/error_square_mean": (exact_target - exact_value).square(),
    }
    return loss, {"critic/loss": loss.detach()} | {
        name: column.sum() / denominators.num_loss_tokens for name, column in shares.items()
    }


def explained_variance(stats: Mapping[str, float]) -> dict[str, float]:
    """The summed statistics with `critic/explained_variance` in place of the two means of squares.

    `1 - Var(R - v) / Var(R)` over all loss tokens: 1 for a perfect critic, 0 for one that is the mean. It is left out
    where all returns are equal. Without a critic's statistics nothing changes.
    """
    if "critic/error_square_mean" not in stats:
        return dict(stats)
    rest = {k: v for k, v in stats.items() if k not in ("critic/return_square_mean", "critic/error_square_mean")}
    bias = stats["critic/return_mean"] - stats["critic/value_mean"]
    spread = stats["critic/return_square_mean"] - stats["critic/return_mean"] ** 2
    if spread > 1e-12 * stats["critic/return_square_mean"]:  # below this it is rounding
        rest["critic/explained_variance"] = 1 - (stats["critic/error_square_mean"] - bias**2) / spread
    return rest


def _weighted_sum(values: Tensor, weights: Tensor, term: str, terms: Terms | None) -> Tensor:
    """Summed in float64 and rounded once to the dtype of `values`; differentiable in `values`."""
    shares = values.double() * weights
    if terms is not None:
        terms[term] = shares.detach()
    return shares.sum().to(values.dtype)
