"""Tokens that a correction leaves out, and numbers beyond `exp`: what is masked is masked before it, not after.

new -1, old -201, A -1: the ratio is e^200, and inf * 0 would be NaN."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.rl.losses import BEYOND, IN_TERMS, K3_BOUND, OVER_TERMS, Denominators, kl_penalty, over_terms, policy_loss
from jetrl.rl.objective import Inputs, objective
from jetrl.rl.surrogate import RATIOS, SURROGATES

PAIRS = [(r, s) for r in RATIOS for s in SURROGATES if (r, s) != ("sequence", "cispo")]
# What leaves out the token (or its sequence) whose learner's log-prob is -201 and the sampler's -1
CORRECTIONS: dict[str, dict[str, Any]] = {
    "rejected token": {"rollout_rs": "token"},
    "rejected sequence": {"rollout_rs": "sequence"},
    "rejected geometric": {"rollout_rs": "geometric"},
    "veto": {"rollout_veto": 1e-4},
    "weight underflows": {"rollout_is": "token"},
    "sequence weight underflows": {"rollout_is": "sequence"},
}


def settings(**changes: Any) -> SimpleNamespace:
    values = {
        "ratio": "token", "surrogate": "clip", "loss_agg": "token_mean", "clip_ratio_low": 0.2, "clip_ratio_high": 0.3,
        "clip_ratio_c": None, "entropy_coef": 0.0, "kl_coef": 0.0, "kl_estimator": "k3", "kl_in": "loss",
        "rollout_is": "none", "rollout_is_threshold": 2.0, "rollout_rs": "none", "rollout_rs_threshold": 2.0,
        "rollout_rs_lower": "inverse", "rollout_veto": None, "value_clip": None, "value_coef": 0.5,
    }
    return SimpleNamespace(**(values | changes))


def rows(bad: bool = True) -> Inputs:
    """Sequence 0: two sound tokens. Sequence 1: the bad one, alone, so that every correction leaves out the same."""
    inputs = Inputs(
        logprobs=torch.tensor([-1.0, -2.0, -1.0]), entropy=torch.tensor([0.5, 0.6, 0.7]),
        advantages=torch.tensor([1.0, 1.0, -1.0]), rollout_logprobs=torch.tensor([-1.1, -2.1, -1.0]),
        sequence_ids=torch.tensor([0, 0, 1]), old_logprobs=torch.tensor([-1.1, -2.1, -201.0]),
        ref_logprobs=torch.tensor([-1.3, -1.8, 150.0]),
    )
    if bad:
        return inputs
    held = {f.name: getattr(inputs, f.name) for f in fields(Inputs)}
    return replace(inputs, **{name: value[:2] for name, value in held.items() if isinstance(value, Tensor)})


SHARES = Denominators(3, 2, (2, 1), 8)  # of all three tokens, whatever is left out


def run(inputs: Inputs, config: SimpleNamespace) -> tuple[float, list[float], list[float], dict[str, float]]:
    logprobs, entropy = (x.clone().requires_grad_(True) for x in (inputs.logprobs, inputs.entropy))
    loss, stats = objective(replace(inputs, logprobs=logprobs, entropy=entropy), config, SHARES)
    loss.backward()
    slope = [0.0] * len(entropy) if entropy.grad is None else entropy.grad.tolist()
    return loss.item(), logprobs.grad.tolist(), slope, {k: float(v) for k, v in stats.items()}


@pytest.mark.parametrize("extra", [{}, {"kl_coef": 0.3, "entropy_coef": 0.2}], ids=["policy alone", "all terms"])
@pytest.mark.parametrize(("ratio", "surrogate"), PAIRS)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_what_is_left_out_reaches_no_term(correction: str, ratio: str, surrogate: str, extra: dict[str, Any]) -> None:
    """Loss, gradients and statistics are those of a batch without the token, over the same denominators."""
    config = settings(ratio=ratio, surrogate=surrogate, **CORRECTIONS[correction], **extra)
    kl = torch.tensor([0.2, 0.4, 300.0])
    loss, grad, slope, stats = run(replace(rows(), teacher_kl=kl, teacher_weight=0.5), config)
    alone, alone_grad, alone_slope, alone_stats = run(
        replace(rows(bad=False), teacher_kl=kl[:2], teacher_weight=0.5), config
    )
    assert math.isfinite(loss) and loss == alone
    assert grad == [*alone_grad, 0.0] and slope == [*alone_slope, 0.0]
    assert any(alone_grad)
    for key in (*OVER_TERMS, IN_TERMS):
        assert stats[key] == alone_stats[key] and math.isfinite(stats[key]), key
    means = over_terms(stats)
    assert IN_TERMS not in means
    assert means["policy/entropy"] == pytest.approx(0.55), "the mean of the two tokens in the loss, and not of three"
    if ratio == "token":
        assert means["policy/ratio_mean"] == pytest.approx(math.exp(0.1), rel=1e-6)


def test_a_rejected_token_does_not_lend_its_ratio_to_its_sequence() -> None:
    """rl.ratio = sequence, one of two tokens rejected: the product is over the other."""
    inputs = replace(rows(), sequence_ids=torch.zeros(3, dtype=torch.int64), ref_logprobs=None)
    loss, grad, _, _ = run(inputs, settings(ratio="sequence", rollout_rs="token", clip_ratio_high=9.0))
    ratio = math.exp(0.2)  # of the two tokens left, 0.1 each; A = 1; a token has the whole ratio's gradient
    assert loss == pytest.approx(-2 * ratio / 3, rel=1e-6) and grad[2] == 0.0
    assert grad[:2] == pytest.approx([-2 * ratio / 3] * 2, rel=1e-6)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_where_everything_is_left_out_there_is_nothing_to_average(correction: str) -> None:
    whole = rows()
    held = {f.name: getattr(whole, f.name) for f in fields(Inputs)}
    inputs = replace(whole, **{name: value[2:] for name, value in held.items() if isinstance(value, Tensor)})
    loss, grad, _, stats = run(inputs, settings(**CORRECTIONS[correction], kl_coef=0.3, entropy_coef=0.1))
    assert loss == 0.0 and grad == [0.0]
    means = over_terms(stats)
    assert not set(means) & set(OVER_TERMS), "absent, not 0"
    assert means["policy/loss"] == 0.0


def test_the_value_loss_keeps_what_is_left_out_of_the_policys() -> None:
    """A state's worth knows no ratio: a shared critic and a separate one learn from the same tokens."""
    values, returns = torch.tensor([0.0, 0.0, 3.0]), torch.tensor([1.0, 0.0, 1.0])
    inputs = replace(rows(), values=values.requires_grad_(True), returns=returns)
    loss, stats = objective(inputs, settings(rollout_rs="token"), SHARES)
    loss.backward()
    assert values.grad.tolist() == pytest.approx([0.5 * -1 / 3, 0.0, 0.5 * 2 / 3])
    assert stats["critic/value_mean"].item() == pytest.approx(1.0)


@pytest.mark.parametrize(("ratio", "surrogate"), PAIRS)
def test_weights_of_zero_given_to_the_policy_loss_alone(ratio: str, surrogate: str) -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss, stats = policy_loss(
        logprobs, torch.tensor([-1.0, -201.0]), torch.tensor([1.0, -1.0]), torch.ones(2), torch.tensor([0, 1]),
        clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=None, loss_agg="token_mean",
        denominators=Denominators(2, 2, (1, 1), 4), is_weights=torch.tensor([1.0, 1e-80], dtype=torch.float64),
        ratio=ratio, surrogate=surrogate,
    )
    loss.backward()
    assert math.isfinite(loss.item()) and logprobs.grad[1] == 0 and all(math.isfinite(v) for v in stats.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_keeps_its_bits_up_to_the_bound_and_goes_on_as_its_tangent(dtype: torch.dtype) -> None:
    def k3(new: Tensor) -> tuple[Tensor, Tensor]:
        leaf = new.clone().requires_grad_(True)
        value = kl_penalty(leaf, torch.zeros_like(leaf), "k3")
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    near = torch.cat([torch.linspace(-K3_BOUND, 30, 999, dtype=dtype), torch.tensor([0.0, 1e-8, -20.0], dtype=dtype)])
    leaf = near.clone().requires_grad_(True)
    plain = torch.expm1(-leaf) + leaf
    value, slope = k3(near)
    assert torch.equal(value, plain) and torch.equal(slope, torch.autograd.grad(plain.sum(), leaf)[0])
    far = torch.tensor([-20.5, -87.0, -88.0, -89.0, -700.0], dtype=dtype)
    value, slope = k3(far)
    steep = math.expm1(20.0)
    assert value.tolist() == pytest.approx([steep - 20 + steep * (-x - 20) for x in far.tolist()], rel=1e-6)
    assert slope.tolist() == pytest.approx([-steep] * 5, rel=1e-6), "pulled back, as strongly as at the bound"


@pytest.mark.parametrize(("nats", "share"), [(-87.0, 67.0), (-88.0, 68.0)])
def test_a_token_far_below_the_reference_neither_overflows_nor_vanishes(nats: float, share: float) -> None:
    inputs = replace(
        rows(bad=False), logprobs=torch.tensor([-1.0, nats - 1]), old_logprobs=None,
        ref_logprobs=torch.tensor([-1.0, -1.0]),
    )
    terms: dict[str, Tensor] = {}
    loss, _ = objective(inputs, settings(kl_coef=0.1), SHARES, terms)
    assert loss.item() == pytest.approx(0.1 * math.exp(20) * (1 + share) / 3, rel=1e-4)
    assert list(terms) == ["policy", "KL"] and terms["KL"][0] == 0 and terms["KL"][1].item() == pytest.approx(
        loss.item(), rel=1e-6
    )


@pytest.mark.parametrize(("advantage", "dual"), [(0.0, None), (-1.0, 3.0)], ids=["no advantage", "dual clip"])
def test_the_mean_ratio_leaves_out_what_the_loss_bounds(advantage: float, dual: float | None) -> None:
    """A ratio of exp(200) has no part in a loss that is finite, and none in the mean; the others' mean by hand."""
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    loss, stats = policy_loss(
        logprobs, torch.tensor([-201.0, -1.5, -1.0]), torch.tensor([advantage, 1.0, 1.0]), torch.ones(3),
        torch.tensor([0, 1, 1]), clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=dual, loss_agg="token_mean",
        denominators=Denominators(3, 2, (1, 2), 4),
    )
    assert loss.isfinite()
    found = over_terms({key: float(value) for key, value in stats.items()})
    assert found["policy/ratio_mean"] == pytest.approx((math.exp(0.5) + 1) / 2) and BEYOND not in found


def test_a_mean_ratio_of_nothing_is_absent() -> None:
    found = over_terms({"policy/ratio_mean": 0.0, "policy/kl": -200.0, BEYOND: 1 / 3 + 1 / 3 + 1 / 3})
    assert found == {"policy/kl": -200.0}
