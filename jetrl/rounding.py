"""Sums of Python floats: when two are the same number; mean and deviation with correctly rounded sums, which have the
same bits in any order, on any machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

ROUNDING = 1e-12  # of a number, relative to the terms it was summed from


def all_equal(values: Sequence[float], size: float = 0.0) -> bool:
    """Whether they are the same number, up to rounding: 0.1 + 0.2 equals 0.3. `ROUNDING` is relative to the largest of
    them, or to `size`, the largest sum of their terms' absolute values: 0.1 + 0.2 - 0.3 equals 0."""
    high, low = max(values), min(values)
    return high == low or high - low <= ROUNDING * max(abs(high), abs(low), size)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float], size: float = 0.0) -> float:
    """Sample standard deviation (n - 1); 0 for a single value, and exactly 0 for equal ones (`all_equal`)."""
    if len(values) < 2 or all_equal(values, size):
        return 0.0
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1))
