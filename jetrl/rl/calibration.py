"""Bounds of the clip that cut off as much in low precision as the recipe's bounds do in BF16.

Ratios of a policy in low precision are wider than those of the same weights in BF16, as rounding moves log-probs from
one update to the next. A clip at 1 +- 0.2 then cuts off tokens that BF16 would learn from, of bad answers first. With
the ratios r of some tokens in the run's precision and q of the same ones in BF16:

    lower: of the tokens with A < 0 as large a share has r < low as has q < 1 - clip_ratio_low
    upper: p = (sum of A r over A > 0, r <= high) / (sum of |A| r over A < 0, r >= low) is as near to
           p of q, with 1 - clip_ratio_low and 1 + clip_ratio_high, as it gets without exceeding it

Source: calibrated clipping, arXiv 2609.22870. What counts as a contribution (what is not cut off, by ratio times
advantage) and how bounds are smoothed is our reading.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SMOOTHING = 0.5  # of the bounds found last, against those in use


class Bounds(NamedTuple):
    """Of the policy ratio: where tokens with negative advantages are cut off, and those with positive ones."""

    low: float
    high: float


def smoothed(used: Bounds, found: Bounds) -> Bounds:
    """The next bounds in use."""
    return Bounds(*(a + SMOOTHING * (b - a) for a, b in zip(used, found, strict=True)))


def calibrated(advantages: np.ndarray, ratios: np.ndarray, shadow: np.ndarray, aim: Bounds) -> Bounds | None:
    """The bounds for `ratios` [T] that match `aim` for the ratios `shadow` [T] of the same tokens in BF16, float64.

    The same for tokens in any order. Where nothing is to be cut off, a bound is not narrower than the aim's. None where
    there are no tokens with positive, or none with negative advantages that BF16 leaves in: nothing to match.
    """
    order = np.lexsort((advantages, shadow, ratios))
    advantages, ratios, shadow = advantages[order], ratios[order], shadow[order]
    bad, good = advantages < 0, advantages > 0
    if not good.any() or not (shadow[bad] >= aim.low).any():
        return None
    cut = np.count_nonzero(shadow[bad] < aim.low)
    low = min(1.0 if cut else aim.low, float(ratios[bad][cut]))
    weight = np.abs(advantages)
    left = float((weight * shadow)[bad & (shadow >= aim.low)].sum())
    share = float((weight * shadow)[good & (shadow <= aim.high)].sum()) / left
    most = share * float((weight * ratios)[bad & (ratios >= low)].sum())
    upto = (weight * ratios)[good].cumsum()
    fits = int(np.searchsorted(upto, most * (1 + 1e-9), side="right"))  # all of them fit, up to rounding
    high = max(1.0, float(ratios[good][fits - 1])) if fits else 1.0
    return Bounds(low, high if fits < len(upto) else max(high, aim.high))
