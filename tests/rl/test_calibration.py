"""Calibrated bounds: by hand, against their definition, and the identity where both precisions agree."""

from __future__ import annotations

import numpy as np
import pytest

from jetrl.rl.calibration import Bounds, calibrated, smoothed

AIM = Bounds(0.8, 1.2)


def test_by_hand() -> None:
    """Of four bad tokens BF16 cuts off one (0.7). Of the good ones it leaves 1.0 + 1.1 against 0.9 + 1.0 + 1.1, so
    0.7 times the bad ones' 0.85 + 1.0 + 1.3 may stay: 2.205 of 0.5 + 1.5 + 1.6."""
    advantages = np.array([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0])
    shadow = np.array([0.7, 0.9, 1.0, 1.1, 1.0, 1.1, 1.3])
    ratios = np.array([0.4, 0.85, 1.0, 1.3, 0.5, 1.5, 1.6])
    found = calibrated(advantages, ratios, shadow, AIM)
    assert found == Bounds(0.85, 1.5)
    order = np.random.default_rng(0).permutation(7)
    assert calibrated(advantages[order], ratios[order], shadow[order], AIM) == found
    assert smoothed(AIM, found) == pytest.approx((0.825, 1.35))


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.25])
def test_as_much_is_cut_off_as_in_bf16(noise: float) -> None:
    g = np.random.default_rng(1)
    advantages = g.normal(size=20_000)
    smooth = 0.12 * g.normal(size=20_000)
    shadow, ratios = np.exp(smooth), np.exp(smooth + noise * g.normal(size=20_000))
    found = calibrated(advantages, ratios, shadow, AIM)
    assert found is not None
    bad, good = advantages < 0, advantages > 0

    def shares(r: np.ndarray, bounds: Bounds) -> tuple[float, float]:
        kept = np.abs(advantages) * r
        positive, negative = kept[good & (r <= bounds.high)].sum(), kept[bad & (r >= bounds.low)].sum()
        return float((r[bad] < bounds.low).mean()), float(positive / negative)

    assert shares(ratios, found) == pytest.approx(shares(shadow, AIM), abs=1e-3), "to a token"
    if noise:
        assert found.low < 0.8 and found.high > 1.2, "noise needs room"
        assert shares(ratios, AIM)[0] > 1.2 * shares(shadow, AIM)[0]
    else:
        assert found.low == pytest.approx(0.8, abs=0.01) and found.high == pytest.approx(1.2, abs=0.01)


def test_without_anything_to_match_there_are_no_bounds() -> None:
    one = np.ones(3)
    assert calibrated(one, one, one, AIM) is None and calibrated(-one, one, one, AIM) is None
    assert calibrated(0 * one, one, one, AIM) is None
    mixed = np.array([-1.0, 1.0, 1.0])
    assert calibrated(mixed, one, np.array([0.5, 1.0, 1.0]), AIM) is None, "BF16 cuts off all bad tokens"
    assert calibrated(mixed, one, one, AIM) == AIM, "nothing is cut off: not narrower than the aim"
    assert calibrated(mixed, np.array([0.6, 1.5, 1.0]), one, AIM) == Bounds(0.6, 1.0), "2 to 1 at most, as in BF16"
