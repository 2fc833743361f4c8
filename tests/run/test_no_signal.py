"""What a step without a signal is told as, and one whose update learns nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jetrl.rl.refill import Refill
from jetrl.run.no_signal import hints, no_signal_in, without_gradient, without_signal
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory

RL = {
    "dynamic_sampling": "off", "mask_truncated": False, "kl_coef": 0.0, "kl_in": "loss", "signal": "reward",
    "overlong_buffer_len": 0, "adv_estimator": "grpo", "surrogate": "clip", "loss_agg": "token_mean",
}


def settings(temperature: float = 1.0, **rl: Any) -> Any:
    return SimpleNamespace(
        rl=SimpleNamespace(**RL | rl), rollout=SimpleNamespace(temperature=temperature),
        teacher=SimpleNamespace(top_k=0), supervised=False,
    )


def group(rewards: tuple[float, ...], advantages: tuple[float | tuple[float, ...], ...], same: bool = False) -> Group:
    opening = Segment("environment", (5,), "p")
    trajectories = tuple(
        Trajectory((opening, Segment("policy", (7 if same else 7 + i,), "x", (-1.0,))), "stop", "")
        for i in range(len(rewards))
    )
    return Group(Prompt(0, Problem("p", "p", "a"), (5,)), trajectories, rewards, advantages)


@pytest.mark.parametrize(
    ("groups", "temperature", "said", "unsaid"),
    [
        ([group((0.0, 0.0), (0.0, 0.0))], 1.0, ["all 2 rewards are 0.", "warm start"], ["temperature"]),
        ([group((1.0, 1.0), (0.0, 0.0))] * 3, 1.0, ["all 6 rewards are 1", "harder"], ["warm start"]),
        ([group((1.0, 1.0), (0.0, 0.0)), group((0.0, 0.0), (0.0, 0.0))], 1.0, ["each of 2 groups"], ["temperature"]),
        ([group((1.0, 1.0), ((0.0, 0.0), (0.0,)), True)], 1e-6, ["all the same", "rollout.temperature, which is 1e-06"],
         ["warm start"]),
    ],
)
def test_what_a_step_without_a_signal_is_told(
    groups: list[Group], temperature: float, said: list[str], unsaid: list[str]
) -> None:
    for learnt in (groups, []):  # dynamic sampling drops such groups
        text = without_signal(groups, learnt, settings(temperature=temperature))
        assert all(part in text for part in said) and not any(part in text for part in unsaid), text
        assert "samples.jsonl" in text


def test_any_advantage_is_a_signal() -> None:
    quiet = group((1.0, 1.0), (0.0, 0.0))
    assert without_signal([quiet, quiet], [quiet, group((0.0, 1.0), (0.0, 1e-9))], settings()) == ""
    assert without_signal([quiet], [group((0.0, 0.0), ((0.0, 0.0), (0.0, 0.5)))], settings()) == ""


def cut(group: Group, *places: int) -> Group:
    """With these answers cut off at a limit, and without an advantage."""
    one = tuple(replace(t, end="length") if i in places else t for i, t in enumerate(group.trajectories))
    advantages = tuple(None if i in places else a for i, a in enumerate(group.advantages))
    return replace(group, trajectories=one, advantages=advantages)


PENALTY = {"dynamic_sampling": "drop", "overlong_buffer_len": 4}
MASKED = {"mask_truncated": True}
IN_REWARD = {**MASKED, "kl_coef": 0.1, "kl_in": "reward"}
APART = group((0.0, 1.0), (0.0, 0.0))
ONLY_LENGTH = replace(group((0.0, -1.0), (0.0, 0.0)), signals=(0.0, 0.0))
CASES = {
    "only the penalty differs": ([ONLY_LENGTH], [], PENALTY, ["before the penalty", "leaves all of them out"]),
    "the named scores are equal": (
        [replace(APART, signals=(1.0, 1.0))], [], {"dynamic_sampling": "drop", "signal": "right"},
        ["scores by rl.signal = 'right' are the same"],
    ),
    "one answer in the loss": (
        [cut(APART, 0)], [cut(APART, 0)], IN_REWARD, ["rl.mask_truncated", "rl.kl_in", "max_response_length"],
    ),
    "the same, dropped": ([cut(APART, 0)], [], IN_REWARD | PENALTY, ["rl.mask_truncated", "rl.kl_in"]),
    "all cut off, dropped": ([cut(APART, 0, 1)], [], MASKED | PENALTY, ["all 2 answers ran into a limit"]),
    "an estimator of one's own": (
        [APART], [APART], {"adv_estimator": "mine.py:zeros"}, ["mine.py:zeros", "the advantage 0"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rewards_that_differ_are_not_told_as_the_same(case: str) -> None:
    groups, learnt, rl, said = CASES[case]
    text = without_signal(groups, learnt, settings(**rl))
    assert all(part in text for part in said) and "all rewards are the same" not in text, text


@pytest.mark.parametrize(
    ("groups", "rl", "said"),
    [
        ([group((1.0, 1.0), ())], {}, "whose rewards differ"),
        ([ONLY_LENGTH], PENALTY, "whose rewards before the penalty for long answers differ"),
        ([cut(replace(APART, advantages=(None, None)), 0, 1)], MASKED, "rl.mask_truncated"),
    ],
    ids=["equal", "penalty", "masked"],
)
def test_what_a_refill_without_a_signal_is_told(groups: list[Group], rl: dict[str, Any], said: str) -> None:
    config = settings(**rl | {"dynamic_sampling": "refill"})
    text = no_signal_in(Refill(1, 0, config.rl).add(groups, 1), config)
    assert said in text and "none of 1 prompts in 1 rounds" in text, text


NORM = {"policy/grad_norm": 0.0, "policy/kl": 0.0}
QUIET = {
    "all rejected": ({"correction/frac_rejected": 1.0, "policy/grad_norm": 0.3}, {}, "corrections"),
    "all clipped": (NORM | {"policy/clip_frac_low": 0.5, "policy/clip_frac_high": 0.5}, {}, "every token was clipped"),
    "weights of 0": (NORM, {"loss_agg": "mine.py:zeros"}, 'rl.loss_agg = "mine.py:zeros"'),
    "a surrogate of 0": (NORM, {"surrogate": "mine.py:flat"}, 'rl.surrogate = "mine.py:flat"'),
    "all probability": (NORM | {"policy/clip_frac_low": 0.5}, {}, "rollout.temperature"),
}


@pytest.mark.parametrize("case", QUIET)
def test_what_an_update_without_effect_is_told(case: str) -> None:
    metrics, rl, said = QUIET[case]
    assert said in without_gradient(metrics, settings(**rl))


def test_an_update_that_learns_is_told_nothing() -> None:
    assert without_gradient({}, settings()) == "", "the critic's warm-up"
    assert without_gradient({"policy/grad_norm": 1e-9, "policy/kl": 0.0}, settings(loss_agg="mine.py:f")) == ""
    some = {"correction/frac_rejected": 0.9, "policy/kl": 0.1, "policy/grad_norm": 1.0}
    assert without_gradient(some, settings()) == ""


def test_a_step_tells_of_old_weights_and_of_answers_that_got_too_old() -> None:
    config = settings()
    learns = [group((1.0, 0.0), (1.0, -1.0))]
    metrics = {"rl/ess": 0.3, "rollout/dropped_stale": 3.0, "rollout/carried": 1.0, "policy/grad_norm": 1.0}
    told = dict(hints(metrics, config, learns, learns))
    assert set(told) == {"old weights draw too much", "long answers are dropped"}
    assert "rl/ess = 0.30" in told["old weights draw too much"]
    assert "3, of 4 groups" in told["long answers are dropped"]
