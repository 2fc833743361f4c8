"""Advantages against hand-worked numbers and against the definitions of verl, and their properties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetrl.errors import UserError
from jetrl.rl.advantage import advantages, grpo_advantages, rloo_advantages, token_rewards
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory

REWARDS = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=9)


def trajectory(*turns: tuple[int, float], end: str = "stop") -> Trajectory:
    """A prompt, then for each (tokens, reward) a turn of the policy, with two tokens by the environment in between."""
    segments = [Segment("environment", (1, 2), "prompt")]
    for index, (length, reward) in enumerate(turns):
        if index:
            segments.append(Segment("environment", (7, 7), "reply"))
        segments.append(Segment("policy", (3,) * length, "x", (-0.5,) * length, reward))
    return Trajectory(tuple(segments), end, "flow")


def make_group(index: int, rewards: Sequence[float], trajectories: Sequence[Trajectory] | None = None) -> Group:
    prompt = Prompt(index, Problem(str(index), "p", "a"), (1, 2))
    return Group(prompt, tuple(trajectories or (trajectory((1, 0.0)),) * len(rewards)), tuple(rewards))


def config(estimator: str = "grpo", **changes) -> SimpleNamespace:
    fields = {"norm_adv_by_std": True, "adv_epsilon": 1e-6, "gamma": 1.0, "gae_lambda": 1.0, "kl_coef": 0.0}
    return SimpleNamespace(**({"adv_estimator": estimator, "kl_in": "loss"} | fields | changes))


def test_grpo_by_hand():
    # rewards 1, 0, 0, 1: mean 1/2; squared deviations 4 * 1/4 = 1; sample variance 1 / 3; std 0.577350269.
    # advantage = +-0.5 / (0.577350269 + 1e-6) = +-0.866023904
    result = grpo_advantages([1, 0, 0, 1], True, 1e-6)
    assert result == pytest.approx((0.866023904, -0.866023904, -0.866023904, 0.866023904), abs=1e-9)


def test_ragged_groups_are_independent():
    # second group 3, 0, 0: mean 1; squared deviations 4 + 1 + 1 = 6; variance 3; with eps 0: 2 / 1.7320508 = 1.1547005
    groups, _, _ = advantages([make_group(0, [0, 1]), make_group(1, [3, 0, 0])], config(adv_epsilon=0.0))
    result = [group.advantages for group in groups]
    # first group: mean 1/2, variance (1/4 + 1/4) / 1 = 1/2, std 0.70710678; 0.5 / 0.70710678 = 0.70710678
    assert result[0] == pytest.approx((-0.70710678, 0.70710678), abs=1e-8)
    assert result[1] == pytest.approx((1.1547005, -0.57735027, -0.57735027), abs=1e-7)


def test_dr_grpo_by_hand():
    # rewards 1, 0, 0, 0: mean 1/4, no division
    assert grpo_advantages([1, 0, 0, 0], False, 1e-6) == (0.75, -0.25, -0.25, -0.25)


@pytest.mark.parametrize("norm", [True, False])
def test_equal_rewards_give_exact_zeros(norm: bool):
    # 0.1 summed three times and divided by 3 may differ from 0.1 in the last bit; the advantage must not
    assert grpo_advantages([0.1, 0.1, 0.1], norm, 1e-6) == (0.0, 0.0, 0.0)
    assert grpo_advantages([7.0], norm, 1e-6) == (0.0,)


@given(REWARDS)
def test_sum_is_zero_and_std_is_one(rewards: list[float]):
    result = grpo_advantages(rewards, True, 0.0)
    assert math.fsum(result) == pytest.approx(0.0, abs=1e-12)
    if len(set(rewards)) > 1:
        assert math.fsum(a * a for a in result) == pytest.approx(len(rewards) - 1, rel=1e-12)


@given(REWARDS, st.randoms())
def test_order_of_trajectories_does_not_matter(rewards: list[float], random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    for estimate in (lambda r: grpo_advantages(r, True, 1e-6), rloo_advantages):
        plain, shuffled = estimate(rewards), estimate([rewards[i] for i in order])
        assert shuffled == tuple(plain[i] for i in order)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_refused(bad: float):
    with pytest.raises(UserError, match="group 1: 1 of 2 rewards are not finite"):
        advantages([make_group(0, [0.0, 1.0]), make_group(1, [0.0, bad])], config())
    with pytest.raises(UserError, match="group 0: 1 of 1 rewards are not finite"):
        advantages([make_group(3, [bad])], config("reinforce_pp"))


@pytest.mark.parametrize("norm", [True, False])
@given(rewards=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9).filter(lambda r: min(r) < max(r)))
def test_grpo_keeps_the_bits_it_had(norm: bool, rewards: list[float]):
    """The float operations in the order in which they were before there were other estimators."""
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    scale = 1.0 / (std + 1e-6) if norm else 1.0
    assert grpo_advantages(rewards, norm, 1e-6) == tuple((r - mean) * scale for r in rewards)


@pytest.mark.parametrize("norm", [True, False])
@given(groups=st.lists(REWARDS, min_size=1, max_size=4))
def test_entry_point_treats_groups_one_by_one(norm: bool, groups: list[list[float]]):
    filled, stats, returns = advantages(
        [make_group(i, r) for i, r in enumerate(groups)], config(norm_adv_by_std=norm)
    )
    assert [g.advantages for g in filled] == [grpo_advantages(group, norm, 1e-6) for group in groups]
    assert [g.rewards for g in filled] == [tuple(r) for r in groups]
    assert [g.prompt.index for g in filled] == list(range(len(groups)))
    assert stats == {} and returns is None


def test_rloo_by_hand():
    # 1, 0, 0.5: the others' means are 0.25, 0.75, 0.5
    assert rloo_advantages([1.0, 0.0, 0.5]) == (0.75, -0.75, 0.0)
    assert rloo_advantages([0.1] * 3) == (0.0, 0.0, 0.0), "0.1 - (0.1 + 0.1) / 2, exactly"
    assert rloo_advantages([5.0]) == (0.0,), "nobody to compare with"


@given(REWARDS.filter(lambda r: len(r) > 1))
def test_rloo_as_verl_writes_it(rewards: list[float]):
    # n / (n - 1) * (r_i - mean)
    n, center = len(rewards), sum(rewards) / len(rewards)
    assert rloo_advantages(rewards) == pytest.approx([n / (n - 1) * (r - center) for r in rewards], abs=1e-13)
    (group,), _, _ = advantages([make_group(0, rewards)], config("rloo"))
    assert group.advantages == rloo_advantages(rewards)


def test_token_rewards_of_an_answer_and_of_a_conversation():
    assert token_rewards(trajectory((3, 0.0)), 0.7) == [0.0, 0.0, 0.7]
    # turns of 2, 1, 3 tokens with 0.5, -0.25, 0.125; whole reward 2: 2 - 0.375 = 1.625 is left for the end
    turns = trajectory((2, 0.5), (1, -0.25), (3, 0.125))
    assert token_rewards(turns, 2.0) == [0.0, 0.5, -0.25, 0.0, 0.0, 1.75]
    assert math.fsum(token_rewards(turns, 2.0)) == 2.0
    assert token_rewards(trajectory((2, None), (1, 0.5)), 0.5) == [0.0, 0.0, 0.5]  # nothing was given for a turn
    # a turn without tokens has no place for its reward: it stays within the rest
    assert token_rewards(trajectory((2, 0.5), (0, 3.0)), 1.0) == [0.0, 1.0]
    assert token_rewards(trajectory((2, 0.0)), 1.0, [-0.25, -0.5]) == [-0.25, 0.5]
    assert token_rewards(trajectory(), 1.0) == []


def test_reinforce_pp_by_hand():
    # gamma 1/2; trajectory 0: token rewards 0, 0, 4 -> returns 1, 2, 4; trajectory 1: token rewards 1 -> 1.
    # mean of 1, 2, 4, 1 is 2; squared deviations 1 + 0 + 4 + 1 = 6; sample variance 2
    groups = [make_group(0, [4.0], [trajectory((3, 0.0))]), make_group(1, [1.0], [trajectory((1, 0.0))])]
    filled, stats, returns = advantages(groups, config("reinforce_pp", gamma=0.5, adv_epsilon=0.0))
    scale = 1 / math.sqrt(2)
    assert filled[0].advantages == (pytest.approx((-scale, 0.0, 2 * scale), abs=1e-15),)
    assert filled[1].advantages == (pytest.approx((-scale,), abs=1e-15),)
    assert stats == {} and returns is None


def test_equal_returns_give_exact_zeros():
    group = make_group(0, [0.1, 0.1], [trajectory((3, 0.0)), trajectory((2, 0.0))])
    (filled,), _, _ = advantages([group], config("reinforce_pp"))
    assert filled.advantages == ((0.0,) * 3, (0.0,) * 2)


def test_gae_by_hand():
    # One conversation, turns of 2 and 1 tokens, turn rewards 1 and 0, whole reward 3: token rewards 0, 1, 2.
    # values 1, 2, 4; gamma 1/2; lambda 1/2:
    #   delta_2 = 2 - 4 = -2;  delta_1 = 1 + 4/2 - 2 = 1;  delta_0 = 0 + 2/2 - 1 = 0
    #   A_2 = -2;  A_1 = 1 - 2/4 = 0.5;  A_0 = 0 + 0.5/4 = 0.125
    group = make_group(0, [3.0], [trajectory((2, 1.0), (1, 0.0))])
    values = [np.array([1.0, 2.0, 4.0])]
    options = {"gamma": 0.5, "gae_lambda": 0.5, "norm_adv_by_std": False}
    (filled,), stats, returns = advantages([group], config("gae", **options), values=values)
    assert filled.advantages == ((0.125, 0.5, -2.0),)
    assert returns[0].tolist() == [1.125, 2.5, 2.0] and returns[0].dtype == np.float64 and stats == {}
    # whitened: mean -0.4583, and the returns stay what they are
    (white,), _, same = advantages([group], config("gae", **(options | {"norm_adv_by_std": True})), values=values)
    assert same[0].tolist() == returns[0].tolist()
    center = (0.125 + 0.5 - 2.0) / 3
    deviation = math.sqrt(((0.125 - center) ** 2 + (0.5 - center) ** 2 + (-2 - center) ** 2) / 2)
    assert white.advantages[0] == pytest.approx([(a - center) / deviation for a in (0.125, 0.5, -2.0)], rel=2e-6)


def padded(rows: list[list[float]], mask: Tensor) -> Tensor:
    """Policy tokens' numbers at the places of `mask` [B, L]; 99 elsewhere, which must not matter."""
    result = torch.full(mask.shape, 99.0, dtype=torch.float64)
    for row, place, numbers in zip(result, mask, rows, strict=True):
        row[place] = torch.tensor(numbers, dtype=torch.float64)
    return result


def verl_whiten(values: Tensor, mask: Tensor, eps: float) -> Tensor:
    """As verl defines it: unbiased variance over the masked entries, 1 / sqrt(var + eps)."""
    count = mask.sum()
    center = (values * mask).sum() / count
    variance = ((values - center).square() * mask).sum() / count * (count / (count - 1))
    return (values - center) / (variance + eps).sqrt()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.95, 0.0]))
def test_conversations_against_the_padded_recursions_of_verl(seed: int, gamma: float, lam: float):
    """verl walks back over all columns [B, L] and steps over the environment's tokens by the mask."""
    rng = np.random.default_rng(seed)
    shapes = [[int(n) for n in rng.integers(1, 4, rng.integers(1, 4))] for _ in range(5)]
    turns = [[(n, float(rng.normal())) for n in shape] for shape in shapes]
    rewards = [float(r) for r in rng.normal(size=5)]
    mask = torch.zeros(5, 16, dtype=torch.bool)
    for row, shape in zip(mask, shapes, strict=True):
        start = 0
        for n in shape:
            row[start : start + n] = True
            start += n + 2  # two tokens by the environment, as in `trajectory`
    kl = [np.array(rng.normal(size=sum(s))) for s in shapes]
    values = [np.array(rng.normal(size=sum(s))) for s in shapes]
    score = torch.zeros(5, 16, dtype=torch.float64)
    for i, shape in enumerate(shapes):
        places = mask[i].nonzero()[:, 0]
        ends = np.cumsum(shape) - 1
        for end, (_, reward) in zip(ends, turns[i], strict=True):
            score[i, places[end]] += reward
        score[i, places[-1]] += rewards[i] - sum(r for _, r in turns[i])
    score = (score - 0.3 * padded([k.tolist() for k in kl], mask)) * mask
    v, m = padded([x.tolist() for x in values], mask), mask.double()
    advantage, next_value, total = torch.zeros(5), torch.zeros(5), torch.zeros(5)
    gae_columns, return_columns = [], []
    for t in reversed(range(16)):
        delta = score[:, t] + gamma * next_value - v[:, t]
        advantage = torch.where(mask[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(mask[:, t], v[:, t], next_value)
        total = torch.where(mask[:, t], score[:, t] + gamma * total, total)
        gae_columns.insert(0, advantage)
        return_columns.insert(0, total)
    gae_matrix, return_matrix = torch.stack(gae_columns, 1), torch.stack(return_columns, 1)
    groups = [
        make_group(0, rewards[:2], [trajectory(*t) for t in turns[:2]]),
        make_group(1, rewards[2:], [trajectory(*t) for t in turns[2:]]),
    ]
    common = {"gamma": gamma, "gae_lambda": lam, "kl_in": "reward", "kl_coef": 0.3, "adv_epsilon": 0.0}

    def flat(filled: list[Group]) -> list[float]:
        return [a for g in filled for row in g.advantages for a in row]

    filled, stats, returns = advantages(groups, config("gae", **common), kl, values)
    assert flat(filled) == pytest.approx(verl_whiten(gae_matrix, m, 0.0)[mask].tolist(), abs=1e-11)
    assert np.concatenate(returns) == pytest.approx((gae_matrix + v)[mask].numpy(), abs=1e-12)
    assert stats == {"reward/kl_penalty_mean": pytest.approx(-0.3 * sum(k.sum() for k in kl) / 5, abs=1e-12)}
    filled, _, nothing = advantages(groups, config("reinforce_pp", **common), kl)
    assert flat(filled) == pytest.approx(verl_whiten(return_matrix, m, 0.0)[mask].tolist(), abs=1e-11)
    assert nothing is None
    ours = advantages(groups, config("reinforce_pp", **(common | {"adv_epsilon": 1e-6})), kl)[0]
    assert flat(ours) == pytest.approx(verl_whiten(return_matrix, m, 1e-8)[mask].tolist(), rel=1e-5)


def test_kl_in_the_reward_of_groups_by_hand():
    # scores 1 - 0.5 * (1 + 1) = 0 and 1 - 0.5 * (-2) = 2: rewards alone are equal, scores are not
    group = make_group(0, [1.0, 1.0], [trajectory((2, 0.0)), trajectory((1, 0.0))])
    kl = [np.array([1.0, 1.0]), np.array([-2.0])]
    options = {"kl_in": "reward", "kl_coef": 0.5}
    (rloo,), stats, _ = advantages([group], config("rloo", **options), kl)
    assert rloo.advantages == (-2.0, 2.0) and rloo.rewards == (1.0, 1.0)
    (dr,), _, _ = advantages([group], config(norm_adv_by_std=False, **options), kl)
    assert dr.advantages == (-1.0, 1.0)
    assert stats == {"reward/kl_penalty_mean": 0.0}  # -0.5 * (2 - 2) / 2


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.permutations(range(4)))
def test_order_of_groups_changes_no_bit(seed: int, order: list[int]):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, 4)
    groups = [make_group(i, [float(rng.normal())], [trajectory((int(n), 0.0))]) for i, n in enumerate(lengths)]
    values = [rng.normal(size=n) for n in lengths]
    plain, _, _ = advantages(groups, config("gae", gamma=0.9), values=values)
    mixed, _, _ = advantages([groups[i] for i in order], config("gae", gamma=0.9), values=[values[i] for i in order])
    assert mixed == [plain[i] for i in order]


def test_a_failed_trajectory_is_no_input():
    group = make_group(0, [1.0, 0.0], [trajectory((2, 0.0)), trajectory((3, 0.0), end="error")])
    with pytest.raises(AssertionError, match="keeps failed conversations apart"):
        advantages([group], config())


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae"])
def test_what_float32_cannot_hold_is_one_message(estimator: str) -> None:
    """Rewards are at most 1e30; a penalty or its weight may be beyond."""
    values = [np.zeros(1)] * 2 if estimator == "gae" else None
    told = "a critic's target" if estimator == "gae" else "an advantage"
    with pytest.raises(UserError, match=rf"^{told} is \S+; .* float32, .* rl.overlong_penalty_factor"):
        advantages([make_group(0, (0.0, -1e40))], config(estimator, norm_adv_by_std=estimator == "gae"), values=values)


def test_what_is_no_input_is_refused():
    group = make_group(4, (0.0, 1.0))
    unscored = Group(group.prompt, group.trajectories)
    with pytest.raises(ValueError, match="prompt 4: 2 trajectories but 0 rewards"):
        advantages([unscored], config())
    with pytest.raises(ValueError, match="no groups"):
        advantages([], config())
    with pytest.raises(UserError, match='rl.adv_estimator is "remax"; use grpo, rloo, reinforce_pp, gae'):
        advantages([group], config("remax"))
    with pytest.raises(ValueError, match="1 entries of values for 2 trajectories"):
        advantages([group], config("gae"), values=[np.zeros(1)])
    with pytest.raises(ValueError, match=r"values of shape \(2,\) for 1 policy tokens"):
        advantages([group], config("gae"), values=[np.zeros(2), np.zeros(1)])
    with pytest.raises(ValueError, match="not all finite"):
        advantages([group], config("rloo", kl_in="reward", kl_coef=0.1), [np.array([math.nan]), np.zeros(1)])
    for values, kept in (([None, np.zeros(1)], [True, True]), ([np.zeros(1), np.zeros(1)], [False, True])):
        with pytest.raises(ValueError, match="values of a trajectory: in the loss .*; this is a bug"):
            advantages([group], config("gae"), values=values, in_loss=kept)
    with pytest.raises(AssertionError, match="kl given: False"):
        advantages([group], config("rloo", kl_in="reward", kl_coef=0.1))
    with pytest.raises(AssertionError, match="gae needs"):
        advantages([group], config("gae"))
