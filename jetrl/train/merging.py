"""The updates of a step in one row: each statistic is weighted by what it counts.

An update's share of a statistic is a mean over its tokens, or over its sequences; the step's is the mean over those of
all updates, and not a mean of means. An update that was skipped has no tokens and no part in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jetrl.rl.losses import Denominators, explained_variance, over_terms
from jetrl.rl.mismatch import with_sample_size
from jetrl.train.token_terms import SHARE

_AGGREGATED = ("policy/loss", "critic/loss")  # averaged as `rl.loss_agg` says
_BY_SEQUENCE = ("moe/aux_loss",)
_BY_UPDATE = ("policy/grad_norm", "policy/lr", "critic/grad_norm")
_LARGEST = (SHARE,)


@dataclass(frozen=True, slots=True)
class Part:
    """One update: its summed statistics, still with the parts of ratios, and what they were divided by."""

    stats: Mapping[str, float]
    shares: Denominators


def merged(parts: Sequence[Part], loss_agg: str) -> dict[str, float]:
    """The statistics of all updates of a step; ratios of means (`explained_variance`, `with_sample_size`, `over_terms`)
    are made of the step's means. A key that some updates lack is a mean over those that have it."""
    keys = dict.fromkeys(key for part in parts for key in part.stats)
    found: dict[str, float] = {}
    for key in keys:
        having = [part for part in parts if key in part.stats]
        values = [part.stats[key] for part in having]
        if len(values) == 1:
            found[key] = values[0]
        elif key in _LARGEST:
            found[key] = max(values)
        else:
            weights = [_weight(key, part.shares, loss_agg) for part in having]
            found[key] = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    return over_terms(with_sample_size(explained_variance(found)))


def _weight(key: str, shares: Denominators, loss_agg: str) -> int:
    if key in _BY_UPDATE:
        return 1
    if key in _BY_SEQUENCE or (key in _AGGREGATED and loss_agg.startswith("seq_mean")):
        return shares.num_sequences
    return shares.num_loss_tokens + (shares.masked_tokens if key in _AGGREGATED else 0)
