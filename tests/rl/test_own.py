"""Functions of the user's in the objective: `jetrl/rl/own.py` checks what they return, call by call."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jetrl.config import RLConfig, switched_off
from jetrl.config.keys import keys
from jetrl.config.markers import Needs
from jetrl.errors import UserError
from jetrl.presets import OWN
from jetrl.rl import own, own_terms
from jetrl.rl.advantage import advantages
from jetrl.rl.losses import Denominators, policy_loss, token_weights
from jetrl.rl.surrogate import Clip
from tests.rl.test_advantage import config, make_group, trajectory

NAME = "mine.py:f"
CLIP = Clip(0.2, 0.3, None)


@pytest.fixture(autouse=True)
def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "_functions", {})


def losses(function: Any, log_ratio: list[float], adv: list[float]) -> torch.Tensor:
    own.put("rl.surrogate", NAME, function)
    ratio = torch.tensor(log_ratio, requires_grad=True)
    return own_terms.token_losses(NAME, ratio, ratio - 1.0, torch.tensor(adv), CLIP)


BAD_SURROGATES = {
    "a number": (lambda r, lp, a, c: 0.5, r"returned 0.5 \(type float\); it must return a tensor of floats"),
    "a sum": (lambda r, lp, a, c: (r * a).sum(), r"returned a tensor of shape \(\) and type float32"),
    "whole numbers": (lambda r, lp, a, c: a.long(), "type int64"),
    "detached": (lambda r, lp, a, c: -a * r.detach().exp(), "returned a tensor without a gradient"),
    "nan": (lambda r, lp, a, c: -a * r.exp() * (a - a) / (a - a),
            "returned nan for log_ratio 0, log-prob -1 and advantage 1"),
    "raises": (lambda r, lp, a, c: r.nothing(), r"raised AttributeError: .*test_own.py, line \d+\)"),
    "parameters": (lambda r: r, r"raised TypeError: .*takes 1 positional argument but 4 were given"),
}


@pytest.mark.parametrize("case", BAD_SURROGATES)
def test_a_surrogate_that_is_none_is_one_message(case: str) -> None:
    function, told = BAD_SURROGATES[case]
    with pytest.raises(UserError, match=rf"^rl.surrogate: mine.py:f.*{told}"):
        losses(function, [0.0, 0.1], [1.0, -1.0])
    if case not in ("raises", "parameters"):
        with pytest.raises(UserError, match=r"mine.py:f \(.*test_own.py, line \d+\) "):
            losses(function, [0.0, 0.1], [1.0, -1.0])


def test_an_overflow_is_left_to_the_message_that_names_the_token() -> None:
    found = losses(lambda r, lp, a, c: -a * r.exp(), [200.0, 0.0], [-1.0, 1.0])
    assert math.isinf(found[0].item()) and found[1].item() == -1.0


def test_a_surrogate_sees_the_live_tokens_alone_and_counts_no_clipping() -> None:
    """Masked and left-out rows never reach it: its loss and gradients by hand."""
    seen: list[list[float]] = []

    def linear(log_ratio: torch.Tensor, logprobs: torch.Tensor, adv: torch.Tensor, clip: Clip) -> torch.Tensor:
        seen.append(log_ratio.detach().tolist())
        return -adv * log_ratio.exp()

    own.put("rl.surrogate", NAME, linear)
    logprobs = torch.tensor([-1.0, -1.0, math.inf], requires_grad=True)
    loss, stats = policy_loss(
        logprobs, torch.tensor([-1.5, -201.0, 0.0]), torch.tensor([2.0, -1.0, math.nan]), torch.tensor([1.0, 1, 0]),
        torch.tensor([0, 1, 1]), clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=None, loss_agg="token_mean",
        denominators=Denominators(2, 2, (1, 1), 4), is_weights=torch.tensor([0.5, 0.0, 1.0]), surrogate=NAME,
    )
    loss.backward()
    assert seen == [[0.5]]
    assert loss.item() == pytest.approx(-0.5 * 2 * math.exp(0.5) / 2, rel=1e-6)
    assert logprobs.grad.tolist() == pytest.approx([-0.5 * 2 * math.exp(0.5) / 2, 0.0, 0.0], rel=1e-6)
    assert not any(key.startswith("policy/clip_frac") for key in stats), "not computed, so absent"


def test_a_micro_batch_without_live_tokens_has_a_backward_pass() -> None:
    own.put("rl.surrogate", NAME, lambda r, lp, a, c: -a * r)
    logprobs = torch.tensor([-1.0], requires_grad=True)
    for mask, count in ((torch.zeros(1), 1), (torch.zeros(0), 0)):
        loss, _ = policy_loss(
            logprobs[:count], None, torch.ones(count), mask, torch.zeros(count, dtype=torch.int64), clip_ratio_low=0.2,
            clip_ratio_high=0.3, clip_ratio_c=None, loss_agg="token_mean", denominators=Denominators(1, 1, (1,), 4),
            surrogate=NAME,
        )
        loss.backward()
        assert loss.item() == 0


BAD_WEIGHTS = {
    "a list": (lambda ids, d: [1.0] * len(ids), "returned a list of 3; it must return a tensor of the shape"),
    "below 0": (lambda ids, d: -torch.ones(len(ids)), "returned a weight of -1"),
    "nan": (lambda ids, d: torch.ones(len(ids)) * math.nan, "returned a weight of nan"),
    "too few": (lambda ids, d: torch.ones(1), r"returned a tensor of shape \(1,\)"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_weights_that_are_none_are_one_message(case: str) -> None:
    function, told = BAD_WEIGHTS[case]
    own.put("rl.loss_agg", NAME, function)
    with pytest.raises(UserError, match=rf"^rl.loss_agg: mine.py:f \(.*line \d+\) {told}"):
        token_weights(torch.ones(3), torch.tensor([0, 0, 1]), NAME, Denominators(3, 2, (2, 1), 8))


def test_weights_are_masked() -> None:
    own.put("rl.loss_agg", NAME, lambda ids, d: torch.full((len(ids),), 1.0 / d.num_sequences))
    found = token_weights(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]), NAME, Denominators(2, 2, (1, 1), 8))
    assert found.tolist() == [0.5, 0.0, 0.5] and found.dtype == torch.float64


def test_advantages_by_hand() -> None:
    """Numbers, tuples, tensors and arrays; those outside the loss are None, and without a score they are not shown."""
    shown: list[list[float]] = []

    def minus_best(groups: Any, rl: Any) -> Any:
        shown.extend([one.score for one in group] for group in groups)
        best = [max((one.score for one in group), default=0.0) for group in groups]
        return [[torch.tensor(one.score - b) if one.length == 1 else [one.score - b + r for r in one.rewards]
                 for one in group] for group, b in zip(groups, best, strict=True)]

    own.put("rl.adv_estimator", NAME, minus_best)
    long = trajectory((2, 0.0))
    group = make_group(0, [1.0, 3.0, 0.5], [trajectory((1, 0.0)), long, trajectory((1, 0.0))])
    settings = SimpleNamespace(**vars(config(NAME)), ratio="token")
    (filled,), stats, returns = advantages([group], settings, in_loss=[True, True, False])
    assert filled.advantages == (-2.0, (0.0, 3.0), None) and stats == {} and returns is None
    assert shown == [[1.0, 3.0, 0.5]], "a known reward is in the baseline"
    shown.clear()
    import numpy as np

    settings = SimpleNamespace(**vars(config(NAME, kl_in="reward", kl_coef=1.0)), ratio="token")
    kl = [np.array([0.5]), np.array([0.5, 0.5]), None]
    (filled,), _, _ = advantages([group], settings, kl=kl, in_loss=[True, True, False])
    assert shown == [[0.5, 2.0]], "without its KL a trajectory has no score"
    assert filled.advantages == (-1.5, (-0.5, 2.5), None)


BAD_ADVANTAGES = {
    "nothing": (lambda g, c: None, "returned None"),
    "one list": (lambda g, c: [1.0, 2.0], "returned a list of 2 for 1 groups"),
    "too few": (lambda g, c: [[1.0]], "returned a list of 1 for the 2 trajectories of group 0"),
    "nan": (lambda g, c: [[1.0, math.nan]], r"returned nan \(type float\) as an advantage"),
    "none inside": (lambda g, c: [[1.0, None]], "returned None .* as an advantage"),
    "text": (lambda g, c: [[1.0, "2"]], "returned '2' .* as an advantage"),
    "tokens": (lambda g, c: [[1.0, [1.0, 2.0]]], "returned 2 advantages for a trajectory of 1 policy tokens"),
}


@pytest.mark.parametrize("case", BAD_ADVANTAGES)
def test_advantages_that_are_none_are_one_message(case: str) -> None:
    function, told = BAD_ADVANTAGES[case]
    own.put("rl.adv_estimator", NAME, function)
    settings = SimpleNamespace(**vars(config(NAME)), ratio="token")
    with pytest.raises(UserError, match=rf"^rl.adv_estimator: mine.py:f \(.*line \d+\) {told}"):
        advantages([make_group(0, [1.0, 0.0])], settings)


def test_one_ratio_for_the_sequence_needs_one_advantage() -> None:
    own.put("rl.adv_estimator", NAME, lambda g, c: [[[1.0], [1.0]]])
    settings = SimpleNamespace(**vars(config(NAME)), ratio="sequence")
    with pytest.raises(UserError, match='rl.ratio = "sequence" needs one number for the whole trajectory'):
        advantages([make_group(0, [1.0, 0.0])], settings)


def test_the_rules_of_the_config_know_functions_of_the_users() -> None:
    assert OWN == "a.py:f" and OWN == "package.module:f" and OWN != "grpo"
    ignored = switched_off("rl.adv_estimator", "a.py:f")
    critic = {"rl.critic", "rl.critic_lr", "rl.critic_warmup_steps"}
    values = {"rl.gae_lambda", "rl.value_clip", "rl.value_coef"}
    assert ignored == critic | values, "it has no critic; the rest it may read"
    needs = [need for key in keys().values() for need in key.all(Needs) if need.other == "rl.adv_estimator"]
    assert needs and all("a.py:f" in need.allowed for need in needs)
    RLConfig(adv_estimator="a.py:f", surrogate="m:g", loss_agg="b.py:h", gamma=0.9, adv_epsilon=1e-4,
             ratio="sequence", updates_per_step=2, clip_ratio_c=3.0)
    for wrong in ("tanh", "a.py:", ":f", "a.py:1f"):
        with pytest.raises(ValueError, match="surrogate"):
            RLConfig(surrogate=wrong)
    with pytest.raises(ValueError, match="rl.critic: has no effect while rl.adv_estimator"):
        RLConfig(adv_estimator="a.py:f", critic="shared")
    with pytest.raises(ValueError, match='"grpo" or "rloo" or a function of yours'):
        RLConfig(ratio="sequence", adv_estimator="gae")
