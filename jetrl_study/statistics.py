"""Paired statistics: differences of two arms on equal seeds and equal held-out problems, with bootstrap intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_SEEDS = 3  # with fewer there is no verdict
RESAMPLES, LEVEL = 10_000, 0.95


@dataclass(frozen=True, slots=True)
class Difference:
    """An arm minus another one. `low` and `high` bound the `LEVEL` interval; None with a single seed."""

    mean: float
    low: float | None
    high: float | None
    by_seed: tuple[float, ...]
    num_problems: int

    @property
    def verdict(self) -> str:
        """In words; none from fewer than `MIN_SEEDS` seeds."""
        if self.low is None or self.high is None or len(self.by_seed) < MIN_SEEDS:
            return "too few seeds"
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "no difference seen"


def paired_difference(arm: NDArray[np.float64], other: NDArray[np.float64], seed: int = 0) -> Difference:
    """Mean of `arm - other`, both [S, P]: scores of S seeds on the same P problems, each from 0 to 1.

    The interval is the percentile interval of the mean when seeds and problems are both drawn anew with replacement
    (crossed: one draw of problems for all drawn seeds). Each resample is the same function of `seed`.
    Source: A. Owen, "The pigeonhole bootstrap" (2007), who shows that it does not understate the variance of crossed
    data. With few seeds the interval is rough: three seeds can be drawn in 10 ways only.
    """
    if arm.shape != other.shape or arm.ndim != 2 or not arm.size:
        raise ValueError(f"paired scores of shapes {arm.shape} and {other.shape}; both must be [seeds, problems]")
    diff = arm - other
    seeds, problems = diff.shape
    by_seed = tuple(float(value) for value in diff.mean(1))
    if seeds == 1:
        return Difference(float(diff.mean()), None, None, by_seed, problems)
    draw = np.random.default_rng(seed)
    weights_s = draw.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES) / seeds  # [B, S]
    weights_p = draw.multinomial(problems, np.full(problems, 1 / problems), RESAMPLES) / problems  # [B, P]
    means = ((weights_s @ diff) * weights_p).sum(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(float(diff.mean()), float(low), float(high), by_seed, problems)
