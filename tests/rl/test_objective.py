"""The objective: bit for bit what it was before there was more than one algorithm, and what the new parts add to it."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from jetrl.rl import losses, mismatch
from jetrl.rl.losses import Denominators
from jetrl.rl.objective import Inputs, objective

# ---- the implementation of before, frozen: one ratio, one surrogate, KL only in the loss --------------------------


def frozen_weights(mask: Tensor, ids: Tensor, loss_agg: str, den: Denominators) -> Tensor:
    mask = mask.double()
    if loss_agg == "token_mean":
        return mask / den.num_loss_tokens
    if loss_agg == "seq_mean_token_mean":
        counts = torch.tensor(den.sequence_tokens, dtype=torch.float64)
        return mask / (den.num_sequences * counts[ids].clamp(min=1))
    assert loss_agg == "seq_mean_token_sum_norm"
    return mask / (den.num_sequences * den.max_response_length)


def frozen_sum(values: Tensor, weights: Tensor) -> Tensor:
    return (values.double() * weights).sum().to(values.dtype)


def frozen_policy_loss(logprobs, old_logprobs, advantages, mask, ids, config, den, is_weights):
    low, high, dual = config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c
    active = mask > 0 if is_weights is None else is_weights > 0
    old = logprobs.detach() if old_logprobs is None else old_logprobs.detach()
    log_ratio = torch.where(active, logprobs - old, 0.0)
    adv = torch.where(active, advantages, 0.0).to(logprobs.dtype)
    ratio = log_ratio.detach().exp()
    clipped_high = (adv > 0) & (ratio > 1 + high)
    clipped_low = (adv < 0) & (ratio < 1 - low)
    clipped_dual = torch.zeros_like(clipped_low)
    bound = torch.full_like(ratio, 1 - low).masked_fill(clipped_high, 1 + high)
    if dual is not None:
        clipped_dual = (adv < 0) & (ratio > dual)
        bound = bound.masked_fill(clipped_dual, dual)
    clipped = clipped_high | clipped_low | clipped_dual
    live_ratio = torch.where(clipped, 0.0, log_ratio).exp()
    token_loss = -adv * torch.where(clipped, bound, live_ratio)
    if is_weights is not None:
        token_loss = token_loss * torch.where(active, is_weights.detach(), 0.0).to(token_loss.dtype)
    loss = frozen_sum(token_loss, frozen_weights(mask, ids, config.loss_agg, den))

    def share(values: Tensor) -> Tensor:
        return (values.detach().double() * active).sum() / den.num_loss_tokens

    return loss, {
        "policy/loss": loss.detach(),
        "policy/ratio_mean": share(ratio),
        "policy/kl": share(-log_ratio),
        "policy/logprob_abs_change_mean": share(log_ratio.abs()),
        "policy/clip_frac_low": share(clipped_low),
        "policy/clip_frac_high": share(clipped_high),
        "policy/clip_frac_dual": share(clipped_dual),
    }


def frozen_objective(inputs: Inputs, config: SimpleNamespace, den: Denominators):
    ids, mask = inputs.sequence_ids, torch.ones_like(inputs.logprobs)
    old, logprobs = inputs.old_logprobs, inputs.logprobs
    learned = logprobs.detach() if old is None else old
    weights = None
    if config.rollout_is != "none" or config.rollout_rs != "none":
        sampled = inputs.rollout_logprobs
        weights = mismatch.importance_weights(
            learned, sampled, mask, ids, config.rollout_is, config.rollout_is_threshold
        )
        weights = weights * mismatch.rejection_mask(
            learned, sampled, mask, ids, config.rollout_rs, config.rollout_rs_threshold
        )
    loss, stats = frozen_policy_loss(logprobs, old, inputs.advantages, mask, ids, config, den, weights)
    if weights is not None:
        mask = (weights > 0).float()
    token_entropy = torch.where(mask > 0, inputs.entropy, 0.0)
    bonus = frozen_sum(token_entropy, frozen_weights(mask, ids, config.loss_agg, den))
    stats = stats | {"policy/entropy": token_entropy.detach().double().sum() / den.num_loss_tokens}
    if config.entropy_coef:
        loss = loss - config.entropy_coef * bonus
    if inputs.ref_logprobs is not None:
        difference = logprobs - inputs.ref_logprobs
        difference = torch.where(mask > 0, difference, 0.0)
        kl = {"k2": 0.5 * difference.square(), "k3": torch.expm1(-difference) + difference}[config.kl_estimator]
        loss = loss + config.kl_coef * frozen_sum(kl, frozen_weights(mask, ids, config.loss_agg, den))
        stats = stats | {"policy/ref_kl": kl.detach().double().sum() / den.num_loss_tokens}
    return loss, stats


# -------------------------------------------------------------------------------------------------------------------


def settings(**changes) -> SimpleNamespace:
    values = {
        "ratio": "token", "surrogate": "clip", "loss_agg": "token_mean", "clip_ratio_low": 0.2, "clip_ratio_high": 0.28,
        "clip_ratio_c": None, "entropy_coef": 0.0, "kl_coef": 0.1, "kl_estimator": "k3", "kl_in": "loss",
        "rollout_is": "none", "rollout_is_threshold": 2.0, "rollout_rs": "none", "rollout_rs_threshold": 1.3,
        "rollout_rs_lower": "inverse", "rollout_veto": None,
        "value_clip": 0.2, "value_coef": 0.5,
    }
    assert set(changes) <= set(values)
    return SimpleNamespace(**(values | changes))


def make(seed: int = 0, dtype: torch.dtype = torch.float32, num_tokens: int = 60) -> tuple[Inputs, Denominators]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(7, (num_tokens,), generator=g).sort().values

    def draw(scale: float) -> Tensor:
        return torch.randn(num_tokens, generator=g, dtype=dtype) * scale

    logprobs, values = -draw(1.0).abs(), draw(1.0)
    inputs = Inputs(
        logprobs=logprobs, entropy=draw(1.0).abs(), advantages=torch.randn(7, generator=g).to(dtype)[ids],
        rollout_logprobs=logprobs + draw(0.2), sequence_ids=ids, old_logprobs=logprobs + draw(0.3),
        ref_logprobs=logprobs + draw(0.4), values=values, old_values=values + draw(0.3), returns=draw(1.0),
    )
    counts = torch.bincount(ids, minlength=9).tolist()  # two further sequences are in other micro-batches
    counts[7:] = [5, 0]
    return inputs, Denominators(sum(counts), sum(c > 0 for c in counts), tuple(counts), 16)


NO_CRITIC = {"values": None, "old_values": None, "returns": None}


def run(function, inputs: Inputs, config: SimpleNamespace, den: Denominators):
    """Loss, statistics and the gradients of log-probs, entropy and values."""
    names = ["logprobs", "entropy"] + (["values"] if inputs.values is not None else [])
    leaves = {name: getattr(inputs, name).clone().requires_grad_(True) for name in names}
    loss, stats = function(replace(inputs, **leaves), config, den)
    loss.backward()
    return loss.detach(), stats, {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("loss_agg", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize("dual", [None, 1.2])
@pytest.mark.parametrize(
    ("corrections", "leave_out"),
    [
        ({}, ()),
        ({"kl_estimator": "k2", "entropy_coef": 0.01}, ("old_logprobs",)),
        ({"rollout_is": "token", "entropy_coef": 0.01}, ("ref_logprobs",)),
        ({"rollout_rs": "geometric"}, ("old_logprobs", "ref_logprobs")),
        ({"rollout_is": "sequence", "rollout_rs": "token"}, ()),
    ],
)
def test_the_default_parts_keep_their_bits(loss_agg: str, dual: float | None, corrections: dict, leave_out: tuple):
    for seed in range(3):
        inputs, den = make(seed)
        inputs = replace(inputs, **NO_CRITIC, **dict.fromkeys(leave_out))
        config = settings(loss_agg=loss_agg, clip_ratio_c=dual, **corrections)
        loss, stats, grads = run(objective, inputs, config, den)
        old_loss, old_stats, old_grads = run(frozen_objective, inputs, config, den)
        assert torch.equal(loss, old_loss) and loss.dtype == old_loss.dtype == torch.float32
        corrected = {key: v for key, v in stats.items() if key.startswith("correction/") or key == losses.IN_TERMS}
        assert bool(corrected) == bool({"rollout_is", "rollout_rs"} & set(corrections))
        assert stats.pop(losses.BEYOND) == 0, "no ratio overflows here"
        assert [key for key in stats if key not in corrected] == list(old_stats)
        for key in old_stats:
            assert torch.equal(stats[key], old_stats[key]) and stats[key].dtype == old_stats[key].dtype, key
        assert torch.equal(grads["logprobs"], old_grads["logprobs"]) and grads["logprobs"].any()
        if config.entropy_coef:
            assert torch.equal(grads["entropy"], old_grads["entropy"]) and grads["entropy"].any()


def test_kl_in_the_reward_is_measured_but_not_in_the_loss():
    inputs, den = make()
    inputs = replace(inputs, **NO_CRITIC)
    config = settings(kl_in="reward", kl_estimator="k1", kl_coef=0.5)
    loss, stats, grads = run(objective, inputs, config, den)
    without, fewer, same = run(objective, replace(inputs, ref_logprobs=None), config, den)
    assert torch.equal(loss, without) and torch.equal(grads["logprobs"], same["logprobs"])
    mean = (inputs.logprobs - inputs.ref_logprobs).double().sum() / den.num_loss_tokens
    assert stats.pop("policy/ref_kl").item() == mean.item() and list(stats) == list(fewer)
    with pytest.raises(AssertionError, match="k1"):
        objective(inputs, settings(kl_estimator="k1"), den)


def test_a_shared_critic_adds_its_loss():
    inputs, den = make(dtype=torch.float64)
    loss, stats, grads = run(objective, inputs, settings(value_coef=0.25), den)
    plain, fewer, same = run(objective, replace(inputs, **NO_CRITIC), settings(), den)
    leaf = inputs.values.clone().requires_grad_(True)
    error, more = losses.value_loss(
        leaf, inputs.old_values, inputs.returns, torch.ones(60), inputs.sequence_ids, value_clip=0.2,
        loss_agg="token_mean", denominators=den,
    )
    error.backward()
    assert loss.item() == pytest.approx(plain.item() + 0.25 * error.item(), rel=1e-14)
    torch.testing.assert_close(grads["values"], 0.25 * leaf.grad, rtol=1e-14, atol=0)
    assert torch.equal(grads["logprobs"], same["logprobs"]) and list(stats) == [*fewer, *more]
    with pytest.raises(AssertionError, match="returns"):
        objective(replace(inputs, returns=None), settings(), den)


@pytest.mark.parametrize("ratio", ["token", "sequence_mean", "sequence"])
@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
def test_ratio_and_surrogate_reach_the_policy_loss(ratio: str, surrogate: str):
    if (ratio, surrogate) == ("sequence", "cispo"):
        return
    inputs, den = make(dtype=torch.float64)
    bare = replace(inputs, **NO_CRITIC, ref_logprobs=None)
    config = settings(ratio=ratio, surrogate=surrogate, loss_agg="seq_mean_token_sum")
    loss, _, _ = run(objective, bare, config, den)
    direct, _ = losses.policy_loss(
        inputs.logprobs, inputs.old_logprobs, inputs.advantages, torch.ones(60), inputs.sequence_ids,
        clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=None, loss_agg="seq_mean_token_sum", denominators=den,
        ratio=ratio, surrogate=surrogate,
    )
    assert torch.equal(loss, direct)
    if (ratio, surrogate) != ("token", "clip"):
        default, _, _ = run(objective, bare, settings(loss_agg="seq_mean_token_sum"), den)
        assert not torch.equal(loss, default)


@pytest.mark.parametrize(("ratio", "surrogate"), [("token", "clip"), ("token", "cispo"), ("sequence", "clip")])
def test_micro_batches_add_up(ratio: str, surrogate: str):
    """Everything at once: the shares of whole sequences, over two micro-batches, add up to those of one."""
    inputs, den = make(3, torch.float64)
    config = settings(
        ratio=ratio, surrogate=surrogate, loss_agg="seq_mean_token_mean", entropy_coef=0.01, rollout_is="sequence",
        rollout_rs="token", rollout_veto=0.5, clip_ratio_c=2.0,
    )
    loss, stats, grads = run(objective, inputs, config, den)
    total, sums, slopes = 0.0, dict.fromkeys(stats, 0.0), []
    for rows in (inputs.sequence_ids < 3, inputs.sequence_ids >= 3):
        held = {f.name: getattr(inputs, f.name) for f in fields(Inputs)}
        part = replace(inputs, **{name: value[rows] for name, value in held.items() if isinstance(value, Tensor)})
        part_loss, more, slope = run(objective, part, config, den)
        total += part_loss.item()
        sums = {k: sums[k] + more[k].item() for k in stats}
        slopes.append(slope)
    assert total == pytest.approx(loss.item(), rel=1e-12)
    assert sums == pytest.approx({k: v.item() for k, v in stats.items()}, rel=1e-12, abs=1e-14)
    for name, grad in grads.items():
        torch.testing.assert_close(torch.cat([s[name] for s in slopes]), grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("loss_agg", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_trls_default_correction_by_its_own_formula(loss_agg: str):
    """TRL's `sequence_mask`: each sequence weighs by its ratio, and by 0 above clip_max; no lower bound."""
    inputs, den = make(3, torch.float64)
    spread = torch.randn(len(inputs.logprobs), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    inputs = replace(inputs, rollout_logprobs=inputs.logprobs.detach() + 0.6 * spread)
    inputs = replace(inputs, old_logprobs=None, ref_logprobs=None, values=None)
    config = settings(
        kl_coef=0.0, loss_agg=loss_agg, rollout_is="sequence", rollout_is_threshold=3.0, rollout_rs="sequence",
        rollout_rs_threshold=3.0, rollout_rs_lower=0.0,
    )
    loss, _ = objective(inputs, config, den)

    ratio = torch.zeros_like(inputs.logprobs)
    for sequence in inputs.sequence_ids.unique():
        rows = inputs.sequence_ids == sequence
        ratio[rows] = (inputs.logprobs.detach() - inputs.rollout_logprobs)[rows].sum().exp()
    assert bool((ratio > 3).any()) and bool((ratio < 1 / 3).any()) and bool(((ratio > 1 / 3) & (ratio < 3)).any())
    weight = ratio.masked_fill(ratio > 3.0, 0.0)
    lengths = torch.tensor(den.sequence_tokens, dtype=torch.float64)
    counted = {
        "token_mean": torch.full_like(ratio, 1 / den.num_loss_tokens),
        "seq_mean_token_mean": 1 / (den.num_sequences * lengths[inputs.sequence_ids]),
        "seq_mean_token_sum_norm": torch.full_like(ratio, 1 / (den.num_sequences * den.max_response_length)),
    }[loss_agg]
    expected = -(counted * weight * inputs.advantages).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    two_sided, _ = objective(inputs, SimpleNamespace(**vars(config) | {
        "rollout_rs_lower": "inverse"}), den)
    assert abs(float(two_sided - loss)) > 1e-6


def test_a_veto_takes_whole_sequences_out_of_the_loss_and_is_counted():
    """Against gradients by hand: with the default ratio the gradient of a token is -A_t w_t / N."""
    inputs, den = make(dtype=torch.float64)
    inputs = replace(inputs, **NO_CRITIC, ref_logprobs=None, old_logprobs=None)
    gap = inputs.logprobs - inputs.rollout_logprobs
    worst = torch.stack([gap[inputs.sequence_ids == s].min() for s in range(7)])
    limit = float(worst.sort().values[2:4].mean())  # three of seven sequences have a token below it
    bad = (worst < limit)[inputs.sequence_ids]
    assert bad.any() and not bad.all()
    config = settings(rollout_veto=math.exp(limit), rollout_is="token", rollout_is_threshold=1.1)
    _, stats, grads = run(objective, inputs, config, den)
    weight = gap.exp().clamp(max=1.1) * ~bad
    torch.testing.assert_close(grads["logprobs"], -inputs.advantages * weight / den.num_loss_tokens)
    shares = {
        "frac_vetoed": bad, "frac_rejected": bad, "frac_truncated": gap > math.log(1.1), "weight_mean": weight,
        "weight_square_mean": weight**2,
    }
    assert {k: v.item() for k, v in stats.items() if k.startswith("correction/")} == pytest.approx(
        {f"correction/{key}": values.double().sum().item() / den.num_loss_tokens for key, values in shares.items()}
    )
