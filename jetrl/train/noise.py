"""What rounding alone does to the policy's log-probs, and how much of the clip is owed to it.

A change of the weights, however small, draws the rounding of the activations anew in every layer: the log-probs of a
policy that is nudged in a few values by the least amount move about as far as those of one that was updated. So the
nudged policy shows what an update's ratios would be if nothing had been learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.config import Config
from jetrl.model.published import Norm, Published
from jetrl.model.transformer import Transformer
from jetrl.rl.own import is_own
from jetrl.rl.surrogate import RATIOS, Clip, token_loss
from jetrl.train.batches import MicroBatch, PackedBatch
from jetrl.train.packing import to_device
from jetrl.train.step import Learner, forward_rows, truncation_of

MEAN, CLIPPED = "policy/noise_abs_mean", "policy/noise_clip_frac"
TOLD_ABOVE = 0.03  # of the tokens clipped by rounding alone: the run says so
_NUDGED = 16  # values of the first norm


@contextmanager
def nudged(model: Transformer) -> Iterator[bool]:
    """While it lasts, some published values of the first norm are next to what they are in their type; False where the
    first layer has no norm, and nothing changes. Afterwards all bits are as before."""
    found = (m for m in model.layers[0].modules() if isinstance(m, Published) and m.published.ndim == 1)
    norm = next(found, None)
    if norm is None:
        yield False
        return
    values = norm.published.data  # which torch does not count as a change: a BF16 master is its own published copy
    offset = isinstance(norm, Norm) and norm.offset
    if isinstance(norm, Norm) and offset:
        values = norm.factor.data  # 1 + weight, in FP32: a BF16 step of it is nudged
    bits = values.view(torch.int16 if values.element_size() == 2 else torch.int32)
    before, at = bits.clone(), torch.arange(0, len(bits), max(1, len(bits) // _NUDGED), device=bits.device)
    try:
        bits[at] ^= 1 << 16 if offset else 1
        yield True
    finally:
        bits.copy_(before)


@dataclass(frozen=True, slots=True)
class Noise:
    """Sums over the tokens of a micro-batch."""

    count: int
    moved: float  # of |log-prob of the nudged policy - log-prob|
    clipped: int | None  # None: the surrogate is the user's, and nobody can say

    def metrics(self) -> dict[str, float]:
        """`policy/noise_*`."""
        found = {MEAN: self.moved / self.count}
        return found if self.clipped is None else found | {CLIPPED: self.clipped / self.count}


def noise_metrics(
    learner: Learner, batches: Sequence[PackedBatch], config: Config, step: int
) -> dict[str, float]:
    """Noise of the policy that sampled, before the step's first update; the batches have advantages and, where the
    rollout's are not the learner's, old log-probs. One micro-batch is looked at, the first of the last update with
    tokens in the loss, by the rank that has it: on any number of ranks it is the same one.

    Empty where the step has one update, which clips nothing, where `rl.noise_interval` leaves it out, and where there
    is no such micro-batch or its log-probs are not finite. Collective.
    """
    if len(batches) < 2 or not config.rl.noise_interval or step % config.rl.noise_interval:
        return {}
    model, batch, world = learner.model, batches[-1], learner.world.replicas
    pairs = zip(batch.numbers, batch.micro_batches, strict=True)
    held = {n: m for n, m in pairs if bool(m.loss_mask.any()) and not m.given}
    first = min((n for of_rank in world.gather(list(held)) for n in of_rank), default=None)
    own = _noise(model, to_device(held[first], model.head_weight.device), config) if first in held else None
    found = next((part for part in world.gather(own) if part is not None), None)
    return {} if found is None else found.metrics()


@torch.no_grad()
def _noise(model: Transformer, micro: MicroBatch, config: Config) -> Noise | None:
    with nudged(model) as there_is:
        if not there_is:
            return None
        rows = forward_rows(model, micro, config.rollout.temperature, truncation=truncation_of(config))
    old = micro.rollout_logprobs if micro.old_logprobs is None else micro.old_logprobs
    log_ratio = rows.logprobs - old[rows.index]
    if not bool(log_ratio.isfinite().all()):  # the update will say so
        return None
    return Noise(len(log_ratio), float(log_ratio.double().abs().sum()), _clipped(log_ratio, micro, rows.index, config))


def _clipped(log_ratio: Tensor, micro: MicroBatch, index: Tensor, config: Config) -> int | None:
    """Tokens [R] that the surrogate's clip would cut off if these were an update's log-ratios."""
    rl = config.rl
    if is_own(rl.surrogate):
        return None
    active = torch.ones_like(log_ratio, dtype=torch.bool)
    ratio = RATIOS[rl.ratio](log_ratio, active, micro.sequence_ids[index])
    clip = Clip(rl.clip_ratio_low, rl.clip_ratio_high, rl.clip_ratio_c)
    found = token_loss(rl.surrogate, ratio, log_ratio, micro.advantages[index], active, clip)
    assert found.clipped_low is not None and found.clipped_high is not None and found.clipped_dual is not None
    return int((found.clipped_low | found.clipped_high | found.clipped_dual).sum())


def noise_told(metrics: Mapping[str, float], config: Config) -> str | None:
    """What a user should know of the step's noise; None where the clip owes little to it."""
    rl, share = config.rl, metrics.get(CLIPPED, 0.0)
    if share <= TOLD_ABOVE or rl.surrogate != "clip":
        return None
    whole = (
        f' With rl.ratio = "{rl.ratio}" the bounds are for whole answers, whose ratios rounding moves, too.'
        if rl.ratio != "token" else ""
    )
    ways = ["rl.updates_per_step = 1 (ratios are 1)", "wider bounds"]
    if config.precision in ("fp8", "w8a16"):
        ways += ['rl.clip = "calibrated"'] if rl.clip == "fixed" and rl.ratio == "token" else []
        ways += ['precision = "w8a16" or "bf16" (less noise)' if config.precision == "fp8" else 'precision = "bf16"']
    return (
        f"{share:.1%} of the tokens would be clipped by rl.clip_ratio_low = {rl.clip_ratio_low:g} and "
        f"rl.clip_ratio_high = {rl.clip_ratio_high:g} if nothing had been learned: rounding alone moves log-probs by "
        f"{metrics[MEAN]:.2g} on average.{whole} Ways out: {', '.join(ways)}, "
        'rl.algo = "cispo" (`jetrl docs ALGORITHMS`, "Noise").'
    )
