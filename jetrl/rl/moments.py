"""Mean and deviation of Python floats with correctly rounded sums: the same bits in any order, on any machine."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def all_equal(values: Sequence[float]) -> bool:
    """Whether they are the same number, up to rounding: 0.1 + 0.2 equals 0.3. Relative to the largest, 1e-9."""
    high, low = max(values), min(values)
    return high == low or high - low <= 1e-9 * max(abs(high), abs(low))


def std(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1); 0 for a single value, and exactly 0 for equal ones."""
    if len(values) < 2 or all_equal(values):
        return 0.0
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1))
