"""Mean and deviation of Python floats with correctly rounded sums: the same bits in any order, on any machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jetrl.rounding import all_equal


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float], size: float = 0.0) -> float:
    """Sample standard deviation (n - 1); 0 for a single value, and exactly 0 for equal ones (`all_equal`)."""
    if len(values) < 2 or all_equal(values, size):
        return 0.0
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1))
