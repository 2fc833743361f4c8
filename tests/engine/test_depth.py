"""The choice of depth: never accepted, always accepted, measured times against the model."""

from __future__ import annotations

import numpy as np
import pytest

from jetrl.engine.speculation.depth import DEPTHS, Acceptance, DepthRule, cost_of_rows


def feed(rule: DepthRule, accepted: int, count: int = 512, source: int = 0, drafted: int = 7) -> None:
    rule.compared(*(np.full(count, x) for x in (source, drafted, accepted)))


def test_nothing_known_nothing_drafted() -> None:
    rule = DepthRule(3, 7)
    assert rule.choose(1, 100) == 0 and rule.acceptance.tokens(7) == 1.0


def test_expected_tokens_are_the_measured_ones() -> None:
    """A third of the sequences without a draft; one source holds 2 of 3, the other all 7."""
    found = Acceptance(2, 7)
    for _ in range(4):
        found.add(np.repeat([-1, 0, 1], 100), np.repeat([0, 3, 7], 100), np.repeat([0, 2, 7], 100))
    assert found.tokens(1) == pytest.approx(1 + 2 / 3, abs=0.02)
    assert found.tokens(3) == pytest.approx(1 + (2 + 3) / 3, abs=0.04)
    assert found.tokens(7) == pytest.approx(1 + (2 + 7) / 3, abs=0.1)
    for _ in range(50):  # the averages forget
        found.add(np.full(300, 1), np.full(300, 7), np.zeros(300, dtype=int))
    assert found.tokens(7) == pytest.approx(1.0, abs=0.02)


def test_what_was_not_tried_follows_the_place_before() -> None:
    found = Acceptance(1, 7)
    found.add(np.zeros(1000, dtype=int), np.ones(1000, dtype=int), np.repeat([0, 1], 500))
    assert found.tokens(7) == pytest.approx(1 + sum(0.5**i for i in range(1, 8)), abs=0.05)


def test_drafts_that_never_hold_are_never_computed_and_hardly_looked_for() -> None:
    rule, compared = DepthRule(3, 7), 0
    for _ in range(1000):
        assert rule.choose(4, 10_000) == 0
        if rule.compares():
            compared += 1
            feed(rule, 0, 4)
        rule.ran(4, 0, 8, 0.1)
    assert 20 < compared < 50, "more than every thirtieth burst"
    for _ in range(3 * 33):  # and yet it notices when they begin to hold
        if rule.compares():
            feed(rule, 7, 64)
    assert rule.choose(4, 10_000) == 7 and rule.acceptance.pause == 0


def test_what_greedy_answers_teach_is_not_said_of_drawn_ones() -> None:
    """An evaluation whose drafts all hold changes nothing for the rollouts around it, and is not lost for the next."""
    rule = DepthRule(3, 7)
    feed(rule, 0)
    rule.begin(greedy=True)
    assert rule.choose(4, 10_000) == 0, "nothing is known"
    feed(rule, 7)
    assert rule.choose(4, 10_000) == 7 and rule.compares() and rule.compares()
    rule.begin(greedy=False)
    assert rule.choose(4, 10_000) == 0 and not rule.compares(), "it still waits"
    rule.begin(greedy=True)
    assert rule.choose(4, 10_000) == 7


def test_larger_batches_draft_less() -> None:
    rule = DepthRule(3, 7)
    rule.compared(np.zeros(900, dtype=int), np.full(900, 7), np.repeat([0, 2, 4], 300))
    chosen = [rule.choose(batch, 1 << 20) for batch in (1, 16, 64, 1024)]
    assert chosen == sorted(chosen, reverse=True) and chosen[0] >= 3 and chosen[-1] == 0
    assert rule.choose(1, 7) <= 3 and rule.choose(2, 3) == 0, "a step has room for so many rows"
    assert DepthRule(3, 2, always=True).choose(5, 100) == 1
    assert [cost_of_rows(b, 0) for b in (1, 300)] == [1.0, 1.0]
    assert all(cost_of_rows(64, a) < cost_of_rows(64, b) for a, b in zip(DEPTHS, DEPTHS[1:], strict=False))


def test_measured_times_overrule_the_model_until_they_are_old() -> None:
    rule = DepthRule(3, 7)
    feed(rule, 7)
    assert rule.choose(8, 1000) == 7
    for _ in range(2):
        rule.ran(8, 0, 8, 0.08)
        rule.ran(8, 7, 8, 0.80)
    assert rule.cost(8, 7) == pytest.approx(10.0) and rule.choose(8, 1000) == 3
    assert rule.choose(100, 1000) == 7, "of another size of batch nothing is known"
    for _ in range(300):
        rule.ran(64, 0, 8, 0.1)
    assert rule.choose(8, 1000) == 7


def test_the_first_burst_of_a_kind_and_a_slow_one_do_not_count_much() -> None:
    rule = DepthRule(3, 7)
    rule.ran(8, 3, 8, 60.0)  # it captured a graph
    assert not rule.seconds
    for seconds in (0.8, 0.8, 30.0):
        rule.ran(8, 3, 8, seconds)
    assert rule.seconds[8, 3] == pytest.approx(0.1 * 1.25)
