"""The gap between the learner's and the sampler's log-probs: how large it is, and the usual corrections for it.

With one precision flow on both sides all metrics are exactly their ideal values (0, and 1 for
`token_mult_prob_error`) and no correction is needed. The corrections exist for `precision = "fp8_rollout"`, for engines
that do not keep the bits, such as vLLM, and for comparison. Nothing here carries a gradient.

Letters: T packed tokens. With d_t = trainer_t - rollout_t, the ratio of token t is exp(d_t) = pi_trainer / pi_rollout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jetrl.choices import RolloutIS, RolloutRS
from jetrl.errors import UserError
from jetrl.rl.sequences import per_sequence

Values = Tensor | NDArray[np.floating] | Sequence[float]

# A float64 is mantissa * 2**(exponent - 53) with |mantissa| < 2**53 and exponent >= -1073 (subnormals included).
_EXACT_SHIFT = 1126
BY_POSITION = "parity/abs_diff_from_token_"  # + n: mean |d| of the tokens number n to 2n - 1 of the answers, from 1


class ExactSum:
    """A sum of float64 values without rounding, so that it depends neither on order nor on how parts were merged.

    The total is one Python integer, in units of 2**-1126; `mean` and `value` round it once, correctly.
    """

    def __init__(self) -> None:
        self._units = 0

    def add(self, values: NDArray[np.float64]) -> None:
        """Add finite values: mantissas are summed as integers, exponent by exponent."""
        mantissa, exponent = np.frexp(values)
        whole = (mantissa * 2.0**53).astype(np.int64)
        high, low = whole >> 26, whole & ((1 << 26) - 1)  # halves, so that 2**35 of them fit an int64 sum
        for power in np.unique(exponent):
            here = exponent == power
            total = (int(high[here].sum()) << 26) + int(low[here].sum())
            self._units += total << (int(power) - 53 + _EXACT_SHIFT)

    def merge(self, other: ExactSum) -> None:
        self._units += other._units

    def mean(self, count: int) -> float:
        return self._units / (count << _EXACT_SHIFT)

    @property
    def value(self) -> float:
        return self.mean(1)


@dataclass(slots=True)
class MismatchAccumulator:
    """Metrics over many micro-batches (and ranks), equal bit for bit to those of one batch of all tokens."""

    count: int = 0
    num_different: int = 0
    max_abs_diff: float = 0.0
    max_probs_diff: float = 0.0
    sum_abs_diff: ExactSum = field(default_factory=ExactSum)
    sum_k3: ExactSum = field(default_factory=ExactSum)
    sum_mult_error: ExactSum = field(default_factory=ExactSum)
    by_position: dict[int, tuple[int, ExactSum]] = field(default_factory=dict)  # bucket -> tokens, sum of |d|
    num_beyond: int = 0  # tokens whose exp(|d|) no float64 holds

    def add(
        self, trainer_logprobs: Values, rollout_logprobs: Values, loss_mask: Values | None = None,
        sequence_ids: Values | None = None,
    ) -> None:
        """Count the tokens where `loss_mask` is not 0 (all without a mask). A log-prob that is not finite raises.

        With `sequence_ids`, |d| is also counted by the token's number in its answer; a sequence's tokens come in order
        and next to each other. Those that the mask leaves out are numbered as well.
        """
        trainer, rollout = _as_numpy(trainer_logprobs), _as_numpy(rollout_logprobs)
        if trainer.shape != rollout.shape:
            raise ValueError(f"log-probs of different shapes: trainer {trainer.shape}, rollout {rollout.shape}")
        ids = None if sequence_ids is None else _as_numpy(sequence_ids)
        if ids is not None and ids.shape != trainer.shape:
            raise ValueError(f"{ids.shape} sequence ids for {trainer.shape} log-probs")
        numbers = None if ids is None or not ids.size else _numbers(ids)
        if loss_mask is not None:
            mask = _as_numpy(loss_mask)
            if mask.shape != trainer.shape:
                raise ValueError(f"mask of shape {mask.shape} for log-probs of shape {trainer.shape}")
            trainer, rollout = trainer[mask != 0], rollout[mask != 0]
            numbers = None if numbers is None else numbers[mask != 0]
        if not trainer.size:
            return
        for side, values in (("trainer", trainer), ("rollout", rollout)):
            num_bad = int((~np.isfinite(values)).sum())
            if num_bad:
                raise ValueError(f"{num_bad} of {values.size} {side} log-probs are NaN or infinite; this is a bug")
        diff = trainer - rollout
        abs_diff = np.abs(diff)
        with np.errstate(over="ignore"):  # such tokens are counted, and their means are not computed
            k3, mult_error = np.expm1(diff) - diff, np.exp(abs_diff)
        held = np.isfinite(mult_error)
        self.num_beyond += int((~held).sum())
        self.count += trainer.size
        self.num_different += int((diff != 0).sum())
        self.max_abs_diff = max(self.max_abs_diff, float(abs_diff.max()))
        self.max_probs_diff = max(self.max_probs_diff, float(np.abs(np.exp(trainer) - np.exp(rollout)).max()))
        self.sum_abs_diff.add(abs_diff)
        self.sum_k3.add(k3[held])
        self.sum_mult_error.add(mult_error[held])
        if numbers is not None:
            self._add_by_position(abs_diff, numbers)

    def _add_by_position(self, abs_diff: NDArray[np.float64], numbers: NDArray[np.int64]) -> None:
        bucket = np.frexp(numbers.astype(np.float64))[1] - 1  # floor(log2(number)), exact
        for power in range(int(bucket.max()) + 1):
            here = abs_diff[bucket == power]
            count, total = self.by_position.setdefault(1 << power, (0, ExactSum()))
            total.add(here)
            self.by_position[1 << power] = count + len(here), total

    def merge(self, other: MismatchAccumulator) -> None:
        self.count += other.count
        self.num_different += other.num_different
        self.num_beyond += other.num_beyond
        self.max_abs_diff = max(self.max_abs_diff, other.max_abs_diff)
        self.max_probs_diff = max(self.max_probs_diff, other.max_probs_diff)
        self.sum_abs_diff.merge(other.sum_abs_diff)
        self.sum_k3.merge(other.sum_k3)
        self.sum_mult_error.merge(other.sum_mult_error)
        for bucket, (more, part) in other.by_position.items():
            count, total = self.by_position.setdefault(bucket, (0, ExactSum()))
            total.merge(part)
            self.by_position[bucket] = count + more, total

    def metrics(self) -> dict[str, float]:
        """The `parity/*` metrics; definitions in `mismatch_metrics`, and `BY_POSITION`. Those that are means of an
        exponential are absent where that of one token is beyond float64 (|d| > 709): a policy that diverges."""
        if self.count == 0:
            raise ValueError("no tokens to compare: every row was masked")
        exponential = {} if self.num_beyond else {
            "parity/k3_kl": self.sum_k3.mean(self.count),
            "parity/token_mult_prob_error": self.sum_mult_error.mean(self.count),
        }
        return {
            "parity/logprob_abs_diff_mean": self.sum_abs_diff.mean(self.count),
            "parity/logprob_abs_diff_max": self.max_abs_diff,
            "parity/frac_tokens_different": self.num_different / self.count,
            **exponential,
            "parity/rollout_probs_diff_max": self.max_probs_diff,
        } | {
            f"{BY_POSITION}{bucket}": total.mean(count)
            for bucket, (count, total) in sorted(self.by_position.items()) if count
        }


@dataclass(slots=True)
class SampleSize:
    """The effective sample size of importance weights w = exp(d), which are not truncated, as a share of the tokens:

        (sum w)^2 / (n * sum w^2)

    1 where all are equal. The sums are exact, so order and ranks do not matter. Source: Kish (1965).
    """

    count: int = 0
    sum: ExactSum = field(default_factory=ExactSum)
    sum_of_squares: ExactSum = field(default_factory=ExactSum)

    def add(self, trainer_logprobs: Values, rollout_logprobs: Values) -> None:
        """Count tokens. A weight beyond exp(300) counts as that: it is all that there is."""
        diff = np.minimum(_as_numpy(trainer_logprobs) - _as_numpy(rollout_logprobs), 300.0)
        self.count += diff.size
        self.sum.add(np.exp(diff))
        self.sum_of_squares.add(np.exp(2 * diff))

    def merge(self, other: SampleSize) -> None:
        self.count += other.count
        self.sum.merge(other.sum)
        self.sum_of_squares.merge(other.sum_of_squares)

    @property
    def share(self) -> float:
        squares = self.sum_of_squares.mean(self.count)
        return self.sum.mean(self.count) ** 2 / squares if squares else 0.0


def merged(parts: Sequence[MismatchAccumulator]) -> MismatchAccumulator:
    """One accumulator of the tokens of all, in any order with the same bits."""
    total = MismatchAccumulator()
    for part in parts:
        total.merge(part)
    return total


def mismatch_metrics(
    trainer_logprobs: Values, rollout_logprobs: Values, loss_mask: Values | None = None
) -> dict[str, float]:
    """Compare the log-probs of the same tokens on both sides. Tensors, arrays or lists of equal shape; float64 inside.

    parity/logprob_abs_diff_mean, _max   of |d|
    parity/frac_tokens_different         share of tokens with d != 0
    parity/k3_kl                         mean of exp(d) - 1 - d: KL(rollout || trainer), sampled from the rollout
    parity/token_mult_prob_error         mean of exp(|d|), 1 when equal (the definition of NeMo RL)
    parity/rollout_probs_diff_max        largest difference of the *probabilities* (the definition of verl)

    k3_kl and token_mult_prob_error are absent where a token's |d| is above 709: no float64 holds their terms.

    Source of k3: J. Schulman, "Approximating KL divergence" (2020).
    """
    accumulator = MismatchAccumulator()
    accumulator.add(trainer_logprobs, rollout_logprobs, loss_mask)
    return accumulator.metrics()


@torch.no_grad()
def importance_weights(
    trainer_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    rollout_is: RolloutIS,
    threshold: float,
) -> Tensor:
    """Truncated importance-sampling weights [T] float64, detached; 0 where masked.

        token:    w_t = min(exp(d_t), threshold)
        sequence: w_t = min(exp(sum of d over the loss tokens of t's sequence), threshold)
        none:     w_t = 1

    All inputs [T]; a sequence must lie whole within the micro-batch. Source: token level, F. Yao et al., "Your
    efficient RL framework secretly brings you off-policy RL training" (2025); sequence level, J. Liu et al., "When
    speed kills stability" (2025).
    """
    active = loss_mask > 0
    if rollout_is == "none":
        return active.double()
    _check_threshold("rollout_is_threshold", threshold, 0.0)
    diff = _log_ratio(trainer_logprobs, rollout_logprobs, active)
    if rollout_is == "sequence":
        diff = per_sequence(diff, active, sequence_ids)[0]
    elif rollout_is != "token":
        raise UserError(f'rl.rollout_is is "{rollout_is}"; use none, token or sequence')
    return diff.exp().clamp(max=threshold) * active


@torch.no_grad()
def rejection_mask(
    trainer_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    rollout_rs: RolloutRS,
    threshold: float,
    lower: float | Literal["inverse"] = "inverse",
) -> Tensor:
    """Masked importance sampling: 1 where a loss token is kept, 0 where rejected or masked. [T] float64, detached.

    A token is kept when a ratio lies within [1 / threshold, threshold], both ends included:

        token:     exp(d_t)
        sequence:  exp(sum of d over the loss tokens of the sequence); the whole sequence is kept or rejected
        geometric: exp(mean of d likewise), which does not punish length
        none:      every loss token is kept

    Multiply it into `policy_loss(is_weights=...)`. Source: J. Liu et al., "When speed kills stability" (2025);
    token level as IcePop, arXiv 2510.18855.
    """
    active = loss_mask > 0
    if rollout_rs == "none":
        return active.double()
    _check_threshold("rollout_rs_threshold", threshold, 1.0)
    diff = _log_ratio(trainer_logprobs, rollout_logprobs, active)
    if rollout_rs in ("sequence", "geometric"):
        diff, counts = per_sequence(diff, active, sequence_ids)
        diff = diff / counts.clamp(min=1) if rollout_rs == "geometric" else diff
    elif rollout_rs != "token":
        raise UserError(f'rl.rollout_rs is "{rollout_rs}"; use none, token, sequence or geometric')
    high = math.log(threshold)
    low = -high if lower == "inverse" else _log_lower(lower)
    return ((diff >= low) & (diff <= high) & active).double()


@torch.no_grad()
def veto_mask(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, sequence_ids: Tensor, threshold: float | None
) -> Tensor:
    """1 for the loss tokens of sequences without a catastrophic token, one with exp(d_t) < `threshold`; else 0.

    All inputs [T]; [T] float64, detached. None: every loss token is kept. Source: the token veto of verl, in J. Liu et
    al., "When speed kills stability" (2025): one token that the learner finds all but impossible spoils its sequence.
    """
    active = loss_mask > 0
    if threshold is None:
        return active.double()
    if not 0 < threshold < 1:
        raise UserError(f"rl.rollout_veto = {threshold} must be above 0 and below 1 (common: 1e-4)")
    bad = _log_ratio(trainer_logprobs, rollout_logprobs, active) < math.log(threshold)
    return ((per_sequence(bad.double(), active, sequence_ids)[0] == 0) & active).double()


def correction_stats(
    weights: Tensor, kept: Tensor, vetoed: Tensor, rollout_is: RolloutIS, cap: float, num_loss_tokens: int
) -> dict[str, Tensor]:
    """What the corrections did, as shares that add up over micro-batches; `with_sample_size` finishes them.

    `weights` [R] of `importance_weights`, `kept` [R] after rejection and veto, `vetoed` [R]; all loss tokens.
    """
    final = weights * kept
    values = {
        "weight_mean": final, "weight_square_mean": final.square(), "frac_rejected": 1 - kept, "frac_vetoed": vetoed,
    }
    if rollout_is != "none":
        values["frac_truncated"] = (weights >= cap).double()
    return {f"correction/{key}": value.sum() / num_loss_tokens for key, value in values.items()}


def with_sample_size(stats: Mapping[str, float]) -> dict[str, float]:
    """The summed statistics with `correction/effective_sample_size` in place of the mean of squared weights.

    `(mean w)^2 / mean w^2` over all loss tokens: 1 where all weights are equal, and the share of tokens that would say
    as much with equal weights; 0 where every token was rejected. Source: Kish (1965).
    """
    found = dict(stats)
    if (squares := found.pop("correction/weight_square_mean", None)) is not None:
        mean = found["correction/weight_mean"]
        found["correction/effective_sample_size"] = mean**2 / squares if squares else 0.0
    return found


def _log_lower(lower: float) -> float:
    if not 0 <= lower < 1:
        raise UserError(f'rl.rollout_rs_lower = {lower} must be from 0 (off) to below 1, or "inverse"')
    return math.log(lower) if lower else -math.inf


def _log_ratio(trainer: Tensor, rollout: Tensor, active: Tensor) -> Tensor:
    return torch.where(active, trainer.double() - rollout.double(), 0.0)


def _check_threshold(name: str, threshold: float, above: float) -> None:
    if not (math.isfinite(threshold) and threshold > above):
        raise UserError(f"rl.{name} = {threshold} must be a finite number above {above:g} (common: 2.0)")


def _numbers(ids: NDArray[np.float64]) -> NDArray[np.int64]:
    """The number of each token within its sequence, from 1."""
    begins = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
    return np.arange(1, len(ids) + 1) - np.repeat(begins, np.diff(np.append(begins, len(ids))))


def _as_numpy(values: Values) -> NDArray[np.float64]:
    if isinstance(values, Tensor):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64)
