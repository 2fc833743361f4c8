"""When numbers that were summed from terms are the same number."""

from __future__ import annotations

from collections.abc import Sequence

ROUNDING = 1e-12  # of a number, relative to the terms it was summed from


def all_equal(values: Sequence[float], size: float = 0.0) -> bool:
    """Whether they are the same number, up to rounding: 0.1 + 0.2 equals 0.3. `ROUNDING` is relative to the largest of
    them, or to `size`, the largest sum of their terms' absolute values: 0.1 + 0.2 - 0.3 equals 0."""
    high, low = max(values), min(values)
    return high == low or high - low <= ROUNDING * max(abs(high), abs(low), size)
