"""The simulation of answers that are carried over: times by hand, and that nothing is lost or learned from twice."""

from __future__ import annotations

import simulate_carry as sim
from pytest import approx
from simulate_queue import step_ms

SETTINGS = dict(prompts=4, group=2, slots=64, behind=2, prefill=1e12, train=1e12, seed=0, mean=100.0, cap=800)


def test_one_rollout_by_hand() -> None:
    """Two groups of two, one is wanted: all run until the shorter group has ended, after 30 tokens."""
    groups = [sim.Answers([50, 10], [0, 0], [None] * 2), sim.Answers([20, 30], [5, 0], [0, None])]
    horizon, places, seconds = sim.rolled(groups, 1, (), 8, 1e12, totals := sim.Totals())
    assert (horizon, places, totals.wasted) == (30, [1], 0)
    assert seconds == approx((10 * step_ms(4) + 10 * step_ms(3) + 10 * step_ms(2)) / 1e3)
    assert totals.running / totals.decoded == approx((40 + 30 + 20) / 30)
    assert sim.rolled(groups, 1, (0,), 8, 1e12, sim.Totals())[:2] == (50, [0]), "the one that must end"
    # with one slot, one after the other; the first has drawn 50 before anybody knows that 30 are enough
    horizon, places, seconds = sim.rolled(groups, 1, (), 1, 1e12, totals := sim.Totals())
    assert (horizon, places, totals.wasted) == (30, [1], 20)
    assert seconds == approx((50 + 10 + 20 + 30) * step_ms(1) / 1e3)


def test_synchronous_steps_have_no_lag_and_carrying_over_keeps_more_running() -> None:
    plain = sim.run(0.0, steps=12, skipped=2, **SETTINGS)  # type: ignore[arg-type]
    more = sim.run(0.5, steps=12, skipped=2, **SETTINGS)  # type: ignore[arg-type]
    assert plain["lag_max"] == 0 and plain["wasted_share"] == 0
    assert 0 < more["lag_mean"] and more["lag_max"] <= 2 and more["running_mean"] > 1.3 * plain["running_mean"]
    assert more["tokens_per_s"] > plain["tokens_per_s"]
