"""The simulation of the shared queue: times by hand, all work done, and the queue's even hand."""

from __future__ import annotations

import random

import pytest
import simulate_queue as sim


def test_step_times_go_through_the_measured_points() -> None:
    assert [sim.step_ms(n) for n, _ in sim.STEP_MS] == [ms for _, ms in sim.STEP_MS]
    assert sim.step_ms(144) == pytest.approx((11.7 + 13.6) / 2) and sim.step_ms(512) == pytest.approx(2 * 14.9)


def test_one_rank_by_hand() -> None:
    # two slots, one group: 10 and 30 tokens together, then 20 next to the 30's last 20; one prefill, one store call
    outcome = sim.static([10, 30, 20], 1, 3, 2)
    assert outcome.seconds == pytest.approx((sim.STORE_MS + sim.PROMPT_MS + 30 * sim.step_ms(2)) / 1000)
    # two ranks, a sequence each: the short one waits
    apart = sim.static([10, 30], 2, 1, 2)
    assert apart.seconds == pytest.approx((sim.STORE_MS + sim.PROMPT_MS + 30 * 8.4) / 1000)
    assert apart.idle == (pytest.approx(20 * 8.4 / 1000), 0.0)


def test_lengths_have_their_mean_and_answers_to_one_prompt_are_alike() -> None:
    drawn = sim.lengths(64_000, 16, 0.5, random.Random(0))
    assert sum(drawn) / len(drawn) == pytest.approx(2048, rel=0.05) and max(drawn) <= 16384
    groups = [drawn[i : i + 16] for i in range(0, len(drawn), 16)]
    within = sum(abs(a - b) for g in groups for a, b in zip(g, g[1:], strict=False)) / 15
    across = sum(abs(a - b) for g, h in zip(groups, groups[1:], strict=False) for a, b in zip(g, h, strict=True)) / 16
    assert within < 0.85 * across


def test_where_parts_are_uneven_the_queue_is_faster() -> None:
    tokens = [100] * 512 + [1000] * 512  # a static split gives one of two ranks all long ones
    split, shared = sim.static(tokens, 2, 16, 32), sim.shared(tokens, 2, 16, 32)
    assert shared.seconds < 0.7 * split.seconds and max(shared.idle) < 0.1 * max(split.idle)
    (row,) = sim.table([2], 64, 16, 16, 0.5, 1)
    assert row["shared_s"] >= row["longest_alone_s"] and 0 < row["shared_efficiency"] <= 1.2
