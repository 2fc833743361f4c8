"""Loss terms: hand-worked numbers, finite differences in float64, and accumulation equal to one batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetrl.rl.losses import Denominators, entropy_bonus, kl_loss, kl_penalty, policy_loss, token_weights

AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": None}


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_token_each(count: int) -> tuple[Tensor, Tensor, Denominators]:
    """`count` sequences of one loss token: mask, ids, denominators."""
    return torch.ones(count), torch.arange(count), Denominators(count, count, (1,) * count, 4)


def random_batch(seed: int, num_tokens: int = 24, num_sequences: int = 5) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> Tensor:
        return torch.randn(num_tokens, generator=g, dtype=torch.float64) * scale

    logprobs = -draw(1.0).abs()
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + draw(0.4),
        "ref_logprobs": logprobs + draw(0.5),
        "entropy": draw(1.0).abs(),
        "advantages": draw(1.0),
        "loss_mask": (torch.rand(num_tokens, generator=g) < 0.8).float(),
        "sequence_ids": torch.randint(num_sequences, (num_tokens,), generator=g),
        "is_weights": torch.rand(num_tokens, generator=g, dtype=torch.float64) * 2,
    }


def denominators_of(batch: dict[str, Tensor], num_sequences: int = 5) -> Denominators:
    active = batch["sequence_ids"][batch["loss_mask"] > 0]
    counts = torch.bincount(active, minlength=num_sequences).tolist()
    return Denominators(sum(counts), sum(c > 0 for c in counts), tuple(counts), 16)


def finite_difference(function: Callable[[Tensor], Tensor], at: Tensor, h: float = 1e-6) -> Tensor:
    slopes = []
    for t in range(at.numel()):
        step = torch.zeros_like(at)
        step[t] = h
        slopes.append((function(at + step) - function(at - step)) / (2 * h))
    return torch.stack(slopes)


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    leaf = at.clone().requires_grad_(True)
    return torch.autograd.grad(function(leaf), leaf)[0]


def test_clipped_surrogate_by_hand():
    # ratios 1.5, 1.5, 0.5, 0.5, 1.1 with advantages +2, -2, +2, -2, +1 and bounds [0.8, 1.3]:
    #   +2, 1.5: -min(3.0, 2.6) = -2.6, clipped high;   -2, 1.5: -min(-3.0, -2.6) = 3.0
    #   +2, 0.5: -min(1.0, 1.6) = -1.0;                 -2, 0.5: -min(-1.0, -1.6) = 1.6, clipped low
    #   +1, 1.1: -1.1.   Mean = (-2.6 + 3.0 - 1.0 + 1.6 - 1.1) / 5 = -0.02
    ratios, adv = f64(1.5, 1.5, 0.5, 0.5, 1.1), f64(2, -2, 2, -2, 1)
    mask, ids, den = one_token_each(5)
    logprobs = ratios.log().requires_grad_(True)
    old = torch.zeros(5, dtype=torch.float64)
    loss, stats = policy_loss(logprobs, old, adv, mask, ids, **CLIP, loss_agg="token_mean", denominators=den)
    assert loss.item() == pytest.approx(-0.02, abs=1e-12)
    # d/dlogprob of an unclipped term is -A r / 5: 3.0 / 5, -1.0 / 5, -1.1 / 5; clipped terms have none
    (grad,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(grad, f64(0, 0.6, -0.2, 0, -0.22), rtol=1e-12, atol=1e-14)
    assert stats["policy/clip_frac_high"].item() == pytest.approx(0.2)
    assert stats["policy/clip_frac_low"].item() == pytest.approx(0.2)
    assert stats["policy/clip_frac_dual"].item() == 0
    assert stats["policy/ratio_mean"].item() == pytest.approx((1.5 + 1.5 + 0.5 + 0.5 + 1.1) / 5)
    assert stats["policy/kl"].item() == pytest.approx(-(2 * math.log(1.5) + 2 * math.log(0.5) + math.log(1.1)) / 5)
    moved = (2 * math.log(1.5) + 2 * math.log(2) + math.log(1.1)) / 5
    assert stats["policy/logprob_abs_change_mean"].item() == pytest.approx(moved)


def test_dual_clip_by_hand():
    # A = -2, c = 3: ratio 5 gives min(10, 6) = 6 and no gradient; ratio 2 gives 4 with gradient 4 / 3;
    # A = +2, ratio 5: bounded by 1.3 as ever, -2.6. Mean = (6 + 4 - 2.6) / 3 = 7.4 / 3
    mask, ids, den = one_token_each(3)
    logprobs = f64(5, 2, 5).log().requires_grad_(True)
    loss, stats = policy_loss(
        logprobs, torch.zeros(3, dtype=torch.float64), f64(-2, -2, 2), mask, ids,
        clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0, loss_agg="token_mean", denominators=den,
    )
    assert loss.item() == pytest.approx(7.4 / 3, rel=1e-12)
    (grad,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(grad, f64(0, 4 / 3, 0), rtol=1e-12, atol=1e-14)
    assert stats["policy/clip_frac_dual"].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("loss_agg", "expected"),
    [
        # sequence 0 has losses 1, 2, 3 and a masked row; sequence 1 has 10; sequence 2 is masked out whole and does not
        # count; so 2 sequences; max_response_length 8
        ("token_mean", 16 / 4),
        ("seq_mean_token_mean", (6 / 3 + 10) / 2),
        ("seq_mean_token_sum", 16 / 2),
        ("seq_mean_token_sum_norm", 16 / (2 * 8)),
    ],
)
def test_aggregations_by_hand(loss_agg: str, expected: float):
    mask, ids = torch.tensor([1.0, 1, 1, 0, 1, 0]), torch.tensor([0, 0, 0, 0, 1, 2])
    den = Denominators(4, 2, (3, 1, 0), 8)
    # with ratio 1 the token losses are -advantages
    adv = f64(-1, -2, -3, -99, -10, -99)
    loss, _ = policy_loss(torch.zeros_like(adv), None, adv, mask, ids, **CLIP, loss_agg=loss_agg, denominators=den)
    assert loss.item() == pytest.approx(expected, rel=1e-14)
    assert token_weights(mask, ids, loss_agg, den)[3] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_on_policy_gradient_is_reinforce(dtype: torch.dtype, clip: float):
    """Ratio exactly 1: gradient -w_t A_t, also with a clip range of zero width, old given or None."""
    batch = random_batch(0)
    den, logprobs = denominators_of(batch), batch["logprobs"].to(dtype)
    weights = token_weights(batch["loss_mask"], batch["sequence_ids"], "token_mean", den)
    for old in (None, logprobs.clone()):
        leaf = logprobs.clone().requires_grad_(True)
        loss, stats = policy_loss(
            leaf, old, batch["advantages"].to(dtype), batch["loss_mask"], batch["sequence_ids"],
            clip_ratio_low=clip, clip_ratio_high=clip, clip_ratio_c=None, loss_agg="token_mean", denominators=den,
        )
        (grad,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(grad, (-weights * batch["advantages"]).to(dtype), rtol=1e-6, atol=0)
        assert stats["policy/clip_frac_low"] == 0 and stats["policy/clip_frac_high"] == 0
        assert stats["policy/ratio_mean"].item() == pytest.approx(1, abs=1e-15) and stats["policy/kl"] == 0


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_policy_gradient_against_finite_differences(loss_agg: str, dual: float | None, weighted: bool):
    batch = random_batch(1)
    den = denominators_of(batch)

    def loss(logprobs: Tensor) -> Tensor:
        return policy_loss(
            logprobs, batch["old_logprobs"], batch["advantages"], batch["loss_mask"], batch["sequence_ids"],
            clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=dual, loss_agg=loss_agg, denominators=den,
            is_weights=batch["is_weights"] if weighted else None,
        )[0]

    exact = gradient(loss, batch["logprobs"])
    torch.testing.assert_close(exact, finite_difference(loss, batch["logprobs"]), rtol=1e-6, atol=1e-8)
    assert exact[batch["loss_mask"] == 0].abs().max() == 0
    assert (exact[batch["loss_mask"] > 0] == 0).any(), "the case should hold clipped tokens"
    assert (exact != 0).sum() > 5


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_gradient_against_finite_differences(loss_agg: str, estimator: str):
    batch = random_batch(2)
    den = denominators_of(batch)

    def loss(logprobs: Tensor) -> Tensor:
        return kl_loss(
            logprobs, batch["ref_logprobs"], batch["loss_mask"], batch["sequence_ids"], estimator=estimator,
            loss_agg=loss_agg, denominators=den,
        )[0]

    exact = gradient(loss, batch["logprobs"])
    torch.testing.assert_close(exact, finite_difference(loss, batch["logprobs"]), rtol=1e-6, atol=1e-8)
    assert (exact != 0).sum() > 5


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
def test_entropy_gradient_against_finite_differences(loss_agg: str):
    batch = random_batch(3)
    den = denominators_of(batch)

    def bonus(entropy: Tensor) -> Tensor:
        return entropy_bonus(entropy, batch["loss_mask"], batch["sequence_ids"], loss_agg=loss_agg, denominators=den)[0]

    exact = gradient(bonus, batch["entropy"])
    torch.testing.assert_close(exact, finite_difference(bonus, batch["entropy"]), rtol=1e-6, atol=1e-9)
    weights = token_weights(batch["loss_mask"], batch["sequence_ids"], loss_agg, den)
    assert torch.equal(exact, weights)


def test_kl_estimators_by_hand():
    # log pi = ln 0.5, log ref = ln 0.25: d = ln 2; k2 = (ln 2)^2 / 2; k3 = 0.25/0.5 - 1 + ln 2 = ln 2 - 1/2
    lp, ref = f64(math.log(0.5)), f64(math.log(0.25))
    assert kl_penalty(lp, ref, "k1").item() == pytest.approx(0.693147180560, abs=1e-12)
    assert kl_penalty(lp, ref, "k2").item() == pytest.approx(0.240226506959, abs=1e-12)
    assert kl_penalty(lp, ref, "k3").item() == pytest.approx(0.193147180560, abs=1e-12)


def test_expected_gradients_of_the_estimators():
    """The docstring's claim: E[grad] is 0 for k1, that of KL(pi||ref) for k2, that of KL(ref||pi) for k3."""
    logits = f64(0.3, -1.0, 0.8, 0.1).requires_grad_(True)
    pi = torch.log_softmax(logits, 0)
    ref = torch.log_softmax(f64(-0.2, 0.5, 0.4, 0.0), 0)

    def expected(estimator: str) -> Tensor:
        value = (pi.exp().detach() * kl_penalty(pi, ref, estimator)).sum()
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    reverse = torch.autograd.grad((pi.exp() * (pi - ref)).sum(), logits, retain_graph=True)[0]
    forward = torch.autograd.grad((ref.exp() * (ref - pi)).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(expected("k1"), torch.zeros_like(logits), rtol=0, atol=1e-15)
    torch.testing.assert_close(expected("k2"), reverse, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(expected("k3"), forward, rtol=1e-12, atol=1e-15)
    values = [(pi.exp() * kl_penalty(pi, ref, k)).sum().item() for k in ("k1", "k3")]
    assert values[0] == pytest.approx(values[1], rel=1e-12), "both are unbiased"


def total_loss(batch: dict[str, Tensor], rows: Tensor, logprobs: Tensor, loss_agg: str, den: Denominators):
    part = {key: value[rows] for key, value in batch.items()}
    common = {"loss_agg": loss_agg, "denominators": den}
    policy, stats = policy_loss(
        logprobs[rows], part["old_logprobs"], part["advantages"], part["loss_mask"], part["sequence_ids"],
        clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=2.0, is_weights=part["is_weights"], **common,
    )
    kl, more = kl_loss(
        logprobs[rows], part["ref_logprobs"], part["loss_mask"], part["sequence_ids"], estimator="k3", **common
    )
    bonus, most = entropy_bonus(logprobs[rows].square(), part["loss_mask"], part["sequence_ids"], **common)
    return policy + 0.1 * kl - 0.01 * bonus, stats | more | most


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(1, 23), max_size=4))
def test_accumulation_equals_one_batch(loss_agg: str, seed: int, cuts: list[int]):
    """Sums over micro-batches of loss, gradient and statistics equal those of one batch, to 1e-12 in float64."""
    batch = random_batch(seed)
    batch["loss_mask"][0] = 1
    den = denominators_of(batch)
    whole = batch["logprobs"].clone().requires_grad_(True)
    loss, stats = total_loss(batch, torch.arange(24), whole, loss_agg, den)
    loss.backward()
    parts = batch["logprobs"].clone().requires_grad_(True)
    loss_sum, stats_sum = 0.0, dict.fromkeys(stats, 0.0)
    edges = [0, *sorted(set(cuts)), 24]
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        part_loss, part_stats = total_loss(batch, torch.arange(start, end), parts, loss_agg, den)
        part_loss.backward()
        loss_sum += part_loss.item()
        stats_sum = {key: stats_sum[key] + part_stats[key].item() for key in stats}
    assert loss_sum == pytest.approx(loss.item(), rel=1e-12, abs=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-14)
    assert stats_sum == pytest.approx({k: v.item() for k, v in stats.items()}, rel=1e-12, abs=1e-12)


def test_masked_rows_have_no_influence_whatever_they_hold():
    """Log-probs of -200 against zeros overflow exp in float32; NaN may stand in rows that were never computed."""
    mask, ids, den = torch.tensor([1.0, 0, 0]), torch.tensor([0, 0, 0]), Denominators(1, 1, (1,), 4)
    logprobs = torch.tensor([-1.0, -200.0, math.nan], requires_grad=True)
    other = torch.tensor([-1.5, 0.0, 0.0])
    adv, junk = torch.tensor([1.0, math.nan, -1.0]), torch.tensor([0.7, math.inf, math.nan])
    policy, stats = policy_loss(
        logprobs, other, adv, mask, ids, **CLIP, loss_agg="seq_mean_token_mean", denominators=den, is_weights=junk
    )
    kl, more = kl_loss(logprobs, other, mask, ids, estimator="k3", loss_agg="token_mean", denominators=den)
    bonus, most = entropy_bonus(logprobs, mask, ids, loss_agg="token_mean", denominators=den)
    (policy + kl + bonus).backward()
    # exp(0.5) = 1.6487 is clipped to 1.3: -1.3 * 0.7; k3 = exp(-0.5) - 1 + 0.5; gradient 1 - exp(-0.5), and 1 of bonus
    assert policy.item() == pytest.approx(-0.91, rel=1e-6)
    assert kl.item() == pytest.approx(math.exp(-0.5) - 0.5, rel=1e-6)
    assert logprobs.grad.tolist() == pytest.approx([2 - math.exp(-0.5), 0.0, 0.0], rel=1e-6)
    assert all(value.isfinite() for value in (stats | more | most).values())


def test_overflowing_ratio_of_a_clipped_token_gives_no_nan():
    mask, ids, den = one_token_each(2)
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss, _ = policy_loss(
        logprobs, torch.tensor([-200.0, -200.0]), torch.tensor([1.0, -1.0]), mask, ids, clip_ratio_low=0.2,
        clip_ratio_high=0.3, clip_ratio_c=3.0, loss_agg="token_mean", denominators=den,
    )
    loss.backward()
    assert loss.item() == pytest.approx((-1.3 + 3.0) / 2) and logprobs.grad.tolist() == [0.0, 0.0]


def test_weights_are_detached():
    mask, ids, den = one_token_each(1)
    leaf = f64(0.1).requires_grad_(True)
    loss, _ = policy_loss(
        leaf, f64(0.1), f64(2.0), mask, ids, **CLIP, loss_agg="token_mean", denominators=den, is_weights=leaf * 5
    )
    loss.backward()
    assert leaf.grad.item() == pytest.approx(-2.0 * 0.5)  # -A * r * weight, weight = 0.1 * 5, nothing through it


@pytest.mark.parametrize("values", [(0, 1, (0,), 4), (1, 0, (1,), 4), (1, 1, (1,), 0)])
def test_empty_denominators_are_refused(values):
    with pytest.raises(ValueError, match="nothing to average over"):
        Denominators(*values)


@pytest.mark.parametrize(
    ("low", "high", "dual"), [(-0.1, 0.2, None), (1.1, 0.2, None), (0.2, -0.2, None), (0.2, 0.2, 1.0)]
)
def test_bad_clip_ranges_are_refused(low: float, high: float, dual: float | None):
    mask, ids, den = one_token_each(1)
    with pytest.raises(ValueError, match="clip_ratio"):
        policy_loss(
            f64(0.0), None, f64(1.0), mask, ids, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual,
            loss_agg="token_mean", denominators=den,
        )


def test_unknown_names_are_refused():
    mask, ids, den = one_token_each(1)
    with pytest.raises(ValueError, match='loss_agg is "mean"'):
        token_weights(mask, ids, "mean", den)
    with pytest.raises(ValueError, match='kl_estimator is "k4"'):
        kl_penalty(f64(0.0), f64(0.0), "k4")
