"""Dynamic sampling: which groups are kept, what is counted, and how many prompts a refill asks for."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl.rl.advantage import advantages, grpo_advantages, rloo_advantages, whiten
from jetrl.rl.refill import Refill
from jetrl.rl.selection import has_signal, recorded, reward_stats, select
from jetrl.rounding import all_equal, std
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory

OFF = SimpleNamespace(dynamic_sampling="off", mask_truncated=False, kl_coef=0.0, kl_in="loss")
DROP = SimpleNamespace(**{**vars(OFF), "dynamic_sampling": "drop"})
MASKED = SimpleNamespace(**{**vars(DROP), "mask_truncated": True})
PENALIZED = SimpleNamespace(**{**vars(MASKED), "kl_coef": 0.1, "kl_in": "reward"})


def make_group(index: int, rewards: tuple[float, ...], ends: tuple[str, ...] | None = None) -> Group:
    segments = (Segment("environment", (1,), "p"), Segment("policy", (3,), "x", (-0.5,)))
    ends = ends or ("stop",) * len(rewards)
    trajectories = tuple(Trajectory(segments, end, "flow", "boom") for end in ends)
    return Group(Prompt(index, Problem(str(index), "p", "a"), (1,)), trajectories, rewards)


def test_statistics_and_dropping():
    rewards = [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (2.0, 0.0)]
    groups = [make_group(index, values) for index, values in enumerate(rewards)]
    kept, stats = select(groups, DROP)
    assert [group.prompt.index for group in kept] == [1, 3]
    # all rewards: 1 1 0 1 0 0 2 0, mean 5/8; sum of squares 1+1+1+4 = 7; variance (7 - 25/8) / 7 = 31/56
    assert list(stats) == ["reward/mean", "reward/std", "reward/frac_zero_std", "reward/num_groups_dropped"]
    assert stats["reward/mean"] == 0.625
    assert stats["reward/std"] == pytest.approx(math.sqrt(31 / 56), rel=1e-14)
    assert stats["reward/frac_zero_std"] == 0.5
    assert stats["reward/num_groups_dropped"] == 2


def test_without_dropping_all_groups_stay_in_order():
    groups = [make_group(5, (1.0, 1.0)), make_group(3, (0.0, 1.0))]
    kept, stats = select(groups, OFF)
    assert kept == tuple(groups)
    assert stats["reward/num_groups_dropped"] == 0 and stats["reward/frac_zero_std"] == 0.5


def test_everything_may_be_dropped():
    kept, stats = select([make_group(0, (0.0, 0.0))], DROP)
    assert kept == () and stats["reward/frac_zero_std"] == 1.0 and stats["reward/num_groups_dropped"] == 1


def test_statistics_by_hand():
    group = make_group(0, (1.0, 1.0, 1.0), ("stop", "length", "turns"))
    assert not has_signal(group, DROP)
    other = make_group(1, (1.0, 0.0))
    # 1 1 1 1 0: mean 4/5, variance (4 * 1/25 + 16/25) / 4 = 1/5
    stats = reward_stats([group, other])
    assert stats["reward/mean"] == 0.8 and stats["reward/std"] == pytest.approx(math.sqrt(0.2), rel=1e-14)
    assert stats["reward/frac_zero_std"] == 0.5


@pytest.mark.parametrize("end", ["error", "timeout"])
def test_failed_trajectories_are_in_no_group(end: str):
    """`roll_out` keeps them apart (`test_errors_of_environments_stay_with_their_conversation`)."""
    mixed = make_group(0, (0.0, 1.0, 1.0), ("stop", end, "stop"))
    for call in (lambda: has_signal(mixed, DROP), lambda: reward_stats([mixed]), lambda: select([mixed], OFF)):
        with pytest.raises(AssertionError, match="keeps failed conversations apart"):
            call()


def test_the_record_holds_all_that_came_in():
    groups = [make_group(i, (0.0, 1.0)) for i in (4, 5, 6)]
    learnt = [Group(groups[1].prompt, groups[1].trajectories, groups[1].rewards, (-1.0, 1.0))]
    rows = recorded(groups, learnt)
    assert [g.advantages for g in rows] == [(None, None), (-1.0, 1.0), (None, None)], "0 would be an advantage"
    assert [g.prompt.index for g in rows] == [4, 5, 6]


def test_what_is_no_input_is_refused():
    group = make_group(4, (0.0, 1.0))
    with pytest.raises(ValueError, match="prompt 4: 2 trajectories but 0 rewards"):
        has_signal(Group(group.prompt, group.trajectories), DROP)
    with pytest.raises(ValueError, match="no groups"):
        select([], OFF)
    with pytest.raises(AssertionError, match="refill"):
        select([group], SimpleNamespace(**{**vars(OFF), "dynamic_sampling": "refill"}))


def test_std_of_a_single_value_is_zero():
    assert std([3.0]) == 0.0 and std([0.1] * 3) == 0.0 and std([1.0, 3.0]) == math.sqrt(2)


def round_of(start: int, signals: str) -> list[Group]:
    """Groups numbered from `start`: "x" with signal, "." without."""
    return [make_group(start + i, (0.0, 1.0) if s == "x" else (1.0, 1.0)) for i, s in enumerate(signals)]


def test_refill_by_hand():
    refill = Refill(wanted=8, max_refill_rounds=3, config=DROP)
    assert refill.next_count == 8, "the first round samples what a step wants"
    refill = refill.add(round_of(0, "x..x...."), 8)
    # 2 of 8 have signal, 6 are missing: 6 / (1/4) = 24, at most 8
    assert refill.next_count == 8 and [g.prompt.index for g in refill.kept] == [0, 3]
    refill = refill.add(round_of(8, "xxxx.x.."), 8)
    # 7 of 16, 1 missing: ceil(16 / 7) = 3
    assert refill.next_count == 3
    refill = refill.add(round_of(16, ".xx"), 3)
    assert refill.next_count == 0
    assert [g.prompt.index for g in refill.kept] == [0, 3, 8, 9, 10, 11, 13, 17], "18 is one too many"
    stats = refill.stats()
    assert stats["reward/num_groups_dropped"] == 11 and stats["rollout/refill_rounds"] == 3
    assert stats["rollout/num_prompts_sampled"] == 19
    assert stats["reward/frac_zero_std"] == 10 / 19  # of all that came in: 9 have signal
    assert {k: stats[k] for k in reward_stats(refill.seen)} == reward_stats(refill.seen)


def test_refill_stops_after_its_rounds():
    refill = Refill(4, 2, DROP)
    for start in (0, 4, 8):
        assert refill.next_count == 4, "without any signal there is no rate yet"
        refill = refill.add(round_of(start, "...."), 4)
    assert refill.next_count == 0 and refill.kept == () and refill.stats()["rollout/refill_rounds"] == 3
    once = Refill(4, 0, DROP).add(round_of(0, "x..."), 4)
    assert once.next_count == 0 and len(once.kept) == 1


def test_prompts_whose_conversations_all_failed_count_as_sampled():
    refill = Refill(4, 3, DROP).add(round_of(0, "x."), 4)  # two of the four prompts gave no group
    assert refill.num_sampled == 4 and refill.next_count == 4, "1 of 4 prompts has signal: 3 / (1/4) = 12, at most 4"


def test_a_round_must_be_the_one_asked_for():
    with pytest.raises(AssertionError):
        Refill(4, 2, DROP).add(round_of(0, "xx"), 2)  # four were asked for, not two
    with pytest.raises(AssertionError):
        Refill(2, 2, DROP).add(round_of(0, "xx"), 2).add([], 0)


@given(st.integers(1, 6), st.integers(0, 4), st.lists(st.booleans(), min_size=40, max_size=40))
def test_refill_ends_repeats_and_never_asks_too_much(wanted: int, rounds: int, stream: list[bool]):
    def play() -> Refill:
        refill = Refill(wanted, rounds, DROP)
        while count := refill.next_count:
            assert 1 <= count <= wanted
            start = len(refill.seen)
            signals = "".join("x" if s else "." for s in stream[start : start + count])
            refill = refill.add(round_of(start, signals), count)
        return refill

    refill = play()
    assert refill == play(), "a resumed run repeats it"
    assert refill.rounds <= rounds + 1 and len(refill.kept) <= wanted
    assert all(has_signal(group, DROP) for group in refill.kept)
    assert list(refill.kept) == sorted(refill.kept, key=lambda g: g.prompt.index)
    assert len(refill.kept) == wanted or refill.rounds == rounds + 1


def test_near_equal_numbers_are_equal():
    for values in ((0.1 + 0.2, 0.3), (1e9 + 1e-4, 1e9), (-0.7, -(0.1 * 7)), (0.0, -0.0)):
        assert all_equal(values) and std(values) == 0.0
        assert not has_signal(make_group(0, values), DROP)
        assert grpo_advantages(values, True, 0.0) == rloo_advantages(values) == (0.0, 0.0)
        assert whiten([values], 0.0) == [[0.0, 0.0]]
    for values in ((0.3, 0.3 + 1e-8), (1e9, 1e9 + 0.5), (0.0, 1e-300), (1.0, -1.0), (math.nan, 1.0)):
        assert not all_equal(values)


CANCELLING = [(0.1 + 0.2 - 0.3, 0.0, 0.6), (1e6 + 0.1 - 1e6, 0.1, 2e6), (1e9 + 0.1 - 1e9, 0.1, 2e9)]


@pytest.mark.parametrize(("one", "other", "size"), CANCELLING, ids=["all", "in part", "nearly all"])
def test_sums_that_cancel_are_as_equal_as_their_terms(one: float, other: float, size: float) -> None:
    values, sizes = (one, other), (size, 0.1)
    assert values[0] != values[1]
    summed = replace(make_group(0, values), sizes=sizes)
    assert not has_signal(summed, DROP) and reward_stats([summed])["reward/std"] == 0.0
    assert reward_stats([summed])["reward/frac_zero_std"] == 1.0
    assert has_signal(make_group(0, values), DROP), "without their terms nobody knows"
    assert not has_signal(replace(make_group(0, (0.0, 1.0)), signals=values, signal_sizes=sizes), DROP)
    assert grpo_advantages(values, True, 0.0, sizes[0]) == rloo_advantages(values, sizes[0]) == (0.0, 0.0)
    assert whiten([values], 0.0, sizes[0]) == [[0.0, 0.0]]


TOKEN = {"norm_adv_by_std": True, "adv_epsilon": 0.0, "gamma": 1.0, "gae_lambda": 1.0}


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_pp", "gae"])
def test_no_estimator_learns_from_rounding(estimator: str) -> None:
    """Equal scores of three functions with weights 1, 1, -1, and a critic that is right."""
    config = SimpleNamespace(**{**vars(OFF), **TOKEN, "adv_estimator": estimator})
    summed = replace(make_group(0, (0.1 + 0.2 - 0.3, 0.0, 0.0)), sizes=(0.6, 0.0, 0.0))
    values = [np.zeros(1)] * 3 if estimator == "gae" else None
    (filled,), _, _ = advantages([summed], config, values=values)
    assert filled.advantages == (((0.0,),) * 3 if estimator in ("gae", "reinforce_pp") else (0.0,) * 3)


def test_a_group_outside_the_loss_has_no_signal() -> None:
    """Rewards differ, but `rl.mask_truncated` leaves all answers out of the loss, or the one that differs has no score
    to compare with: with the KL in the reward only answers in the loss have one."""
    whole = make_group(0, (0.0, 1.0), ("length", "turns"))
    part = make_group(1, (0.0, 1.0, 0.0), ("stop", "length", "length"))
    alike = make_group(2, (0.0, 1.0, 0.0), ("stop", "length", "stop"))
    apart = make_group(3, (0.0, 1.0, 0.0), ("stop", "stop", "length"))
    groups = [whole, part, alike, apart]
    assert [has_signal(group, DROP) for group in groups] == [True] * 4
    assert [has_signal(group, MASKED) for group in groups] == [False, True, True, True]
    assert [has_signal(group, PENALIZED) for group in groups] == [False, False, False, True]
    kept, stats = select(groups, PENALIZED)
    assert kept == (apart,) and stats["reward/num_groups_dropped"] == 3 and stats["reward/frac_zero_std"] == 0.0
    refill = Refill(4, 3, PENALIZED).add(groups, 4)
    assert refill.kept == (apart,) and refill.next_count == 4, "3 are missing, and 1 of 4 has a signal"


def test_the_overlong_penalty_makes_no_signal():
    """dapo: lengths 5, 5, 5, 19 of 20, all wrong. Learned from, the penalty would reinforce three wrong answers."""
    paid = (0.0, 0.0, 0.0, -0.75)
    wrong = replace(make_group(0, paid), signals=(0.0,) * 4)
    mixed = replace(make_group(1, (0.0, 1.0, 0.0, 0.25)), signals=(0.0, 1.0, 0.0, 1.0))
    kept, stats = select([wrong, mixed], DROP)
    assert kept == (mixed,) and stats["reward/frac_zero_std"] == 0.5
    refill = Refill(1, 3, DROP).add([wrong], 1)
    assert refill.kept == () and refill.next_count == 1 and refill.add([mixed], 1).kept == (mixed,)
    assert refill.add([mixed], 1).stats()["reward/mean"] == math.fsum([*paid, 1.25]) / 8  # what is learned from
