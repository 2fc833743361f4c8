"""Paired differences and rules of failure against cases that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jetrl_study.rules import GRADIENT_HISTORY, accuracy_failure, entropy_failure, failures, gradient_failure
from jetrl_study.statistics import paired_difference


def test_equal_arms_have_no_difference() -> None:
    scores = (np.random.default_rng(1).random((4, 50)) < 0.5).astype(float)
    found = paired_difference(scores, scores)
    assert (found.mean, found.low, found.high) == (0, 0, 0) and found.verdict == "no difference seen"
    assert found.by_seed == (0.0,) * 4 and found.num_problems == 50


def test_a_constant_difference_has_no_spread() -> None:
    zeros = np.zeros((3, 20))
    found = paired_difference(zeros + 0.25, zeros)
    assert (found.mean, found.verdict) == (0.25, "better")
    assert math.isclose(found.low, 0.25) and math.isclose(found.high, 0.25)
    assert paired_difference(zeros, zeros + 0.25).verdict == "worse"


def test_no_verdict_from_few_seeds() -> None:
    zeros = np.zeros((1, 20))
    one = paired_difference(zeros + 1, zeros)
    assert one.low is None and one.high is None and one.verdict == "too few seeds"
    two = paired_difference(np.ones((2, 20)), np.zeros((2, 20)))
    assert two.low == 1.0 and two.verdict == "too few seeds"


def test_the_interval_is_that_of_the_normal_approximation_where_it_holds() -> None:
    """Differences that depend on the seed only: the bootstrap's variance is that of a mean of S values."""
    seeds = np.random.default_rng(3).normal(0, 0.1, 200)
    diff = np.repeat(seeds[:, None], 30, axis=1)
    found = paired_difference(diff, np.zeros_like(diff))
    half = 1.96 * seeds.std() / math.sqrt(len(seeds))
    assert found.high - found.low == pytest.approx(2 * half, rel=0.03)
    assert found.mean == pytest.approx(seeds.mean())


def test_problems_count_as_a_source_of_chance_too() -> None:
    """The same problems differ in all seeds: more seeds do not make the interval smaller, more problems do."""
    problem = (np.random.default_rng(5).random(100) < 0.5) - 0.5
    widths = [
        (f := paired_difference(np.tile(problem[:n], (s, 1)), np.zeros((s, n)))).high - f.low
        for s, n in ((3, 25), (30, 25), (3, 100))
    ]
    assert widths[1] == pytest.approx(widths[0], rel=0.05) and widths[2] < 0.6 * widths[0]


def test_pairing_removes_what_both_arms_share() -> None:
    easy = np.random.default_rng(7).random((5, 80))  # how hard problems are, the same for both arms
    found = paired_difference(easy + 0.02, easy)
    assert found.verdict == "better" and found.high - found.low < 1e-12


def test_the_same_numbers_every_time() -> None:
    a, b = np.random.default_rng(9).random((2, 3, 40))
    assert paired_difference(a, b) == paired_difference(a, b)
    with pytest.raises(ValueError, match="shapes"):
        paired_difference(a, b[:2])


STEPS = list(range(1, 31))


def test_accuracy_that_falls_and_comes_back() -> None:
    assert accuracy_failure(([0, 5, 10], [0.2, 0.8, 0.4])) is None  # half is not below half
    found = accuracy_failure(([0, 5, 10, 15], [0.2, 0.8, 0.39, 0.5]))
    assert (found.step, found.recovered) == (10, True) and "80.0% at step 5" in found.text
    assert not accuracy_failure(([0, 5, 10], [0.2, 0.8, 0.1])).recovered
    assert accuracy_failure(([0, 5], [0.05, 0.0])) is None  # it never was above the floor


def test_entropy_that_collapses_without_a_gain() -> None:
    entropy = STEPS, [1.0] * 10 + [0.001] * 20
    better, worse = ([0, 10, 20], [0.2, 0.5, 0.9]), ([0, 10, 20], [0.2, 0.3, 0.1])
    assert entropy_failure(entropy, better) is None
    assert entropy_failure(entropy, worse).step == 20  # known to be no better from the evaluation at step 20 on
    assert entropy_failure((STEPS, [1.0] * 30), worse) is None


def test_gradients_that_explode_for_three_steps() -> None:
    calm = [1.0] * GRADIENT_HISTORY
    assert gradient_failure((STEPS[:13], [*calm, 11.0, 12.0, 13.0])).step == 13
    assert gradient_failure((STEPS[:14], [*calm, 11.0, 12.0, 1.0, 13.0])) is None
    assert gradient_failure((STEPS[:4], [1.0, 99.0, 99.0, 99.0])) is None  # too early to know what is usual


def test_all_rules_in_order_of_their_steps() -> None:
    found = failures(([0, 9], [0.9, 0.1]), (STEPS, [1.0] * 30), (STEPS, [1.0] * 30), non_finite_step=4)
    assert [(one.rule, one.step) for one in found] == [("non-finite", 4), ("accuracy", 9)]
