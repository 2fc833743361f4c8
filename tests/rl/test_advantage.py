"""Advantages against hand-worked numbers, and their properties."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl.errors import UserError
from jetrl.rl.advantage import advantages, drop_zero_std, group_advantages
from jetrl.types import Completion, Group, Problem, Prompt

REWARDS = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=9)


def make_group(index: int, rewards: tuple[float, ...]) -> Group:
    prompt = Prompt(index, Problem(str(index), "p", "a"), (1, 2))
    completion = Completion(0, (3,), (-0.5,), "x", "stop", 0, "flow")
    return Group(prompt, (completion,) * len(rewards), rewards)


def config(norm: bool = True, dynamic: str = "off") -> SimpleNamespace:
    return SimpleNamespace(norm_adv_by_std=norm, dynamic_sampling=dynamic)


def test_grpo_by_hand():
    # rewards 1, 0, 0, 1: mean 1/2; squared deviations 4 * 1/4 = 1; sample variance 1 / 3; std 0.577350269.
    # advantage = +-0.5 / (0.577350269 + 1e-6) = +-0.866023904
    (result,) = group_advantages([[1, 0, 0, 1]], True)
    assert result == pytest.approx((0.866023904, -0.866023904, -0.866023904, 0.866023904), abs=1e-9)


def test_ragged_groups_are_independent():
    # second group 3, 0, 0: mean 1; squared deviations 4 + 1 + 1 = 6; variance 3; with eps 0: 2 / 1.7320508 = 1.1547005
    result = group_advantages([[0, 1], [3, 0, 0]], True, eps=0.0)
    # first group: mean 1/2, variance (1/4 + 1/4) / 1 = 1/2, std 0.70710678; 0.5 / 0.70710678 = 0.70710678
    assert result[0] == pytest.approx((-0.70710678, 0.70710678), abs=1e-8)
    assert result[1] == pytest.approx((1.1547005, -0.57735027, -0.57735027), abs=1e-7)


def test_dr_grpo_by_hand():
    # rewards 1, 0, 0, 0: mean 1/4, no division
    assert group_advantages([[1, 0, 0, 0]], False) == [(0.75, -0.25, -0.25, -0.25)]


@pytest.mark.parametrize("norm", [True, False])
def test_equal_rewards_give_exact_zeros(norm: bool):
    # 0.1 summed three times and divided by 3 may differ from 0.1 in the last bit; the advantage must not
    assert group_advantages([[0.1, 0.1, 0.1], [7.0]], norm) == [(0.0, 0.0, 0.0), (0.0,)]


@given(REWARDS)
def test_sum_is_zero_and_std_is_one(rewards: list[float]):
    (result,) = group_advantages([rewards], True, eps=0.0)
    assert math.fsum(result) == pytest.approx(0.0, abs=1e-12)
    if len(set(rewards)) > 1:
        assert math.fsum(a * a for a in result) == pytest.approx(len(rewards) - 1, rel=1e-12)


@given(REWARDS, st.randoms())
def test_order_of_completions_does_not_matter(rewards: list[float], random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    (plain,) = group_advantages([rewards])
    (shuffled,) = group_advantages([[rewards[i] for i in order]])
    assert shuffled == tuple(plain[i] for i in order)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_refused(bad: float):
    with pytest.raises(UserError, match="group 1: 1 of 2 rewards are not finite"):
        group_advantages([[0.0, 1.0], [0.0, bad]])


def test_statistics_and_dropping():
    rewards = [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (2.0, 0.0)]
    groups = [make_group(index, values) for index, values in enumerate(rewards)]
    everything, kept, stats = advantages(groups, config(norm=False, dynamic="drop"))
    assert [group.prompt.index for group in kept] == [1, 3]
    assert [group.prompt.index for group in everything] == [0, 1, 2, 3]
    assert everything[0].advantages == (0.0, 0.0)  # dropped from the update, not from the record
    assert kept[0].advantages == (-0.5, 0.5) and kept[1].advantages == (1.0, -1.0)
    assert kept == drop_zero_std(kept)
    # all rewards: 1 1 0 1 0 0 2 0, mean 5/8; sum of squares 1+1+1+4 = 7; variance (7 - 25/8) / 7 = 31/56
    assert stats["reward/mean"] == 0.625
    assert stats["reward/std"] == pytest.approx(math.sqrt(31 / 56), rel=1e-14)
    assert stats["reward/frac_zero_std"] == 0.5
    assert stats["reward/num_groups_dropped"] == 2


def test_without_dropping_all_groups_stay_in_order():
    groups = [make_group(5, (1.0, 1.0)), make_group(3, (0.0, 1.0))]
    everything, kept, stats = advantages(groups, config())
    assert kept == everything
    assert [group.prompt.index for group in kept] == [5, 3]
    assert kept[0].advantages == (0.0, 0.0)
    assert kept[0].completions == groups[0].completions and kept[0].rewards == groups[0].rewards
    assert stats["reward/num_groups_dropped"] == 0 and stats["reward/frac_zero_std"] == 0.5


def test_everything_may_be_dropped():
    everything, kept, stats = advantages([make_group(0, (0.0, 0.0))], config(dynamic="drop"))
    assert kept == () and len(everything) == 1 and stats["reward/frac_zero_std"] == 1.0


def test_unscored_group_and_unknown_option_are_refused():
    group = make_group(4, (0.0, 1.0))
    unscored = Group(group.prompt, group.completions)
    with pytest.raises(ValueError, match="prompt 4: 2 completions but 0 rewards"):
        advantages([unscored], config())
    with pytest.raises(UserError, match="refill"):
        advantages([group], config(dynamic="refill"))
