"""Mismatch metrics and corrections against hand-worked numbers; merging is exact."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jetrl.errors import UserError
from jetrl.rl.mismatch import (
    BY_POSITION,
    ExactSum,
    MismatchAccumulator,
    correction_stats,
    importance_weights,
    merged,
    mismatch_metrics,
    rejection_mask,
    veto_mask,
    with_sample_size,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TRAINER = [math.log(0.5), math.log(0.25), math.log(0.8), math.log(0.1)]
ROLLOUT = [math.log(0.25), math.log(0.25), math.log(0.4), math.log(0.1)]
# d = ln 2, 0, ln 2, 0
EXPECTED = {
    "parity/logprob_abs_diff_mean": math.log(2) / 2,
    "parity/logprob_abs_diff_max": math.log(2),
    "parity/frac_tokens_different": 0.5,
    "parity/k3_kl": (2 * (2 - 1 - math.log(2))) / 4,  # exp(d) - 1 - d at d = ln 2 is 1 - ln 2, twice, over 4 tokens
    "parity/token_mult_prob_error": (2 + 1 + 2 + 1) / 4,
    "parity/rollout_probs_diff_max": 0.4,  # |0.8 - 0.4|
}


def test_metrics_by_hand():
    assert mismatch_metrics(TRAINER, ROLLOUT) == pytest.approx(EXPECTED, rel=1e-14)


def test_mult_prob_error_is_symmetric_and_k3_is_not():
    swapped = mismatch_metrics(ROLLOUT, TRAINER)
    assert swapped["parity/token_mult_prob_error"] == pytest.approx(1.5)
    assert swapped["parity/k3_kl"] == pytest.approx(2 * (0.5 - 1 + math.log(2)) / 4)  # d = -ln 2


@pytest.mark.parametrize("make", [list, np.array, lambda v: torch.tensor(v, dtype=torch.float64)])
def test_kinds_of_input_agree(make):
    padded_trainer, padded_rollout = make([*TRAINER, math.nan]), make([*ROLLOUT, 0.0])
    masked = mismatch_metrics(padded_trainer, padded_rollout, make([1.0, 1.0, 1.0, 1.0, 0.0]))
    assert masked == mismatch_metrics(TRAINER, ROLLOUT)


def test_equal_log_probs_are_exactly_ideal():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    metrics = mismatch_metrics(values.requires_grad_(True), values.tolist())
    assert metrics.pop("parity/token_mult_prob_error") == 1.0
    assert set(metrics.values()) == {0.0}


def test_one_last_bit_is_seen():
    value = np.float32(-0.3)
    metrics = mismatch_metrics([value, value], [value, np.nextafter(value, np.float32(0))])
    assert metrics["parity/frac_tokens_different"] == 0.5 and metrics["parity/logprob_abs_diff_max"] == 2.0**-25


@settings(max_examples=60, deadline=None)
@given(st.lists(FINITE, max_size=40), st.integers(0, 40))
@example([5e-324, -5e-324, 5e-324, 1e308, -1e308], 2)
@example([1e16, 1.0, -1e16], 1)
def test_exact_sum_is_exact_and_merges(values: list[float], cut: int):
    left, right = ExactSum(), ExactSum()
    left.add(np.array(values[:cut], dtype=np.float64))
    right.add(np.array(values[cut:], dtype=np.float64))
    left.merge(right)
    true = sum(map(Fraction, values), Fraction(0))
    if abs(true) < Fraction(1.7e308):
        assert left.value == float(true)
        assert left.mean(3) == float(true / 3)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 61), max_size=4), st.randoms())
def test_any_partition_gives_the_same_bits(seed: int, cuts: list[int], random):
    g = torch.Generator().manual_seed(seed)
    trainer = -torch.rand(61, generator=g) * 5
    rollout = trainer + torch.randn(61, generator=g) * 0.1
    mask = (torch.rand(61, generator=g) < 0.7).float()
    mask[0] = 1
    edges = [0, *sorted(cuts), 61]
    parts = []
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        parts.append(MismatchAccumulator())
        parts[-1].add(trainer[start:end], rollout[start:end], mask[start:end])
    random.shuffle(parts)
    merged = MismatchAccumulator()
    for part in parts:
        merged.merge(part)
    assert merged.metrics() == mismatch_metrics(trainer, rollout, mask)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="1 of 2 rollout log-probs are NaN"):
        mismatch_metrics([-1.0, -1.0], [-1.0, math.nan])
    with pytest.raises(ValueError, match="different shapes"):
        mismatch_metrics([-1.0, -1.0], [-1.0])
    with pytest.raises(ValueError, match="mask of shape"):
        mismatch_metrics([-1.0, -1.0], [-1.0, -1.0], [1.0])
    with pytest.raises(ValueError, match="every row was masked"):
        mismatch_metrics([-1.0], [-1.0], [0.0])


# Two sequences, rows interleaved on purpose, one masked row with an enormous difference:
#   sequence 7: ratios 2, 1/4, 1    -> product 1/2, geometric mean (1/2)^(1/3) = 0.7937
#   sequence 3: ratios 3, 2, (mask) -> product 6, geometric mean sqrt(6) = 2.4495
RATIOS = torch.tensor([2.0, 3.0, 0.25, 2.0, 1.0, 1e9], dtype=torch.float64)
IDS = torch.tensor([7, 3, 7, 3, 7, 3])
MASK = torch.tensor([1.0, 1, 1, 1, 1, 0])
BASE = torch.full((6,), -2.0, dtype=torch.float64)
LEARNER = BASE + RATIOS.log()


def close(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_truncated_weights_by_hand():
    close(importance_weights(LEARNER, BASE, MASK, IDS, "token", 2.5), [2, 2.5, 0.25, 2, 1, 0])
    close(importance_weights(LEARNER, BASE, MASK, IDS, "sequence", 2.5), [0.5, 2.5, 0.5, 2.5, 0.5, 0])
    close(importance_weights(LEARNER, BASE, MASK, IDS, "sequence", 10.0), [0.5, 6, 0.5, 6, 0.5, 0])
    close(importance_weights(LEARNER, BASE, MASK, IDS, "none", 2.5), [1, 1, 1, 1, 1, 0])


@pytest.mark.parametrize(
    ("mode", "threshold", "expected"),
    [
        ("none", 2.0, [1, 1, 1, 1, 1, 0]),
        ("token", 2.5, [1, 0, 0, 1, 1, 0]),  # kept within [0.4, 2.5]: 2, 2, 1
        ("token", 4.5, [1, 1, 1, 1, 1, 0]),
        ("sequence", 2.5, [1, 0, 1, 0, 1, 0]),  # 1/2 in, 6 out
        ("sequence", 1.9, [0, 0, 0, 0, 0, 0]),  # 1/2 is below 1 / 1.9 = 0.526
        ("geometric", 2.5, [1, 1, 1, 1, 1, 0]),  # 0.794 and 2.449 within
        ("geometric", 2.4, [1, 0, 1, 0, 1, 0]),
        ("geometric", 1.2, [0, 0, 0, 0, 0, 0]),  # 0.794 is below 1 / 1.2 = 0.833
    ],
)
def test_rejection_by_hand(mode: str, threshold: float, expected: list[float]):
    close(rejection_mask(LEARNER, BASE, MASK, IDS, mode, threshold), expected)


@pytest.mark.parametrize(
    ("mode", "threshold", "lower", "expected"),
    [
        # ratios of tokens 2, 3, 1/4, 2, 1; of sequences 1/2 and 6; their geometric means 0.794 and 2.449
        ("token", 10.0, 0, [1, 1, 1, 1, 1, 0]),
        ("token", 10.0, 0.3, [1, 1, 0, 1, 1, 0]),
        ("token", 2.5, 0, [1, 0, 1, 1, 1, 0]),  # above only
        ("sequence", 1.9, 0, [1, 0, 1, 0, 1, 0]),  # 1/2 stays without a lower bound
        ("sequence", 1.9, 0.49, [1, 0, 1, 0, 1, 0]),
        ("sequence", 10.0, 0.51, [0, 1, 0, 1, 0, 0]),
        ("geometric", 1.2, 0, [1, 0, 1, 0, 1, 0]),  # 0.794 stays
        ("sequence", 1.9, "inverse", [0, 0, 0, 0, 0, 0]),
    ],
)
def test_a_lower_bound_of_its_own_by_hand(mode: str, threshold: float, lower: float | str, expected: list[float]):
    close(rejection_mask(LEARNER, BASE, MASK, IDS, mode, threshold, lower), expected)


@pytest.mark.parametrize("lower", [-0.1, 1.0, 2.0, math.nan, math.inf])
def test_bad_lower_bound(lower: float):
    with pytest.raises(UserError, match="rollout_rs_lower"):
        rejection_mask(LEARNER, BASE, MASK, IDS, "token", 2.0, lower)


@pytest.mark.parametrize("mode", ["token", "sequence", "geometric"])
def test_equal_log_probs_need_no_correction(mode: str):
    assert torch.equal(rejection_mask(BASE, BASE, MASK, IDS, mode, 1.0001), MASK.double())
    if mode != "geometric":
        assert torch.equal(importance_weights(BASE, BASE, MASK, IDS, mode, 2.0), MASK.double())


def test_no_gradient_passes():
    leaf = LEARNER.clone().requires_grad_(True)
    assert not importance_weights(leaf, BASE, MASK, IDS, "sequence", 2.0).requires_grad
    assert not rejection_mask(leaf, BASE, MASK, IDS, "geometric", 2.0).requires_grad


def test_a_sequence_does_not_see_its_neighbours():
    g = torch.Generator().manual_seed(1)
    ids = torch.arange(6).repeat_interleave(37)
    diff = torch.randn(222, generator=g) * 0.1
    zero, ones = torch.zeros(222), torch.ones(222)
    together = importance_weights(diff, zero, ones, ids, "sequence", 1e6)
    for i in range(6):
        rows = ids == i
        alone = importance_weights(diff[rows], zero[rows], ones[rows], ids[rows], "sequence", 1e6)
        assert torch.equal(together[rows], alone)


def test_a_micro_batch_without_loss_rows():
    """Every trajectory of a micro-batch may be masked out; `segment_reduce` alone refuses zero sequences."""
    none, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert importance_weights(none, none, none, ids, "sequence", 2.0).tolist() == []
    assert rejection_mask(none, none, none, ids, "geometric", 2.0).tolist() == []


def test_overflow_is_truncated_not_nan():
    learner, rollout = torch.zeros(2), torch.tensor([-800.0, -1.0])
    weights = importance_weights(learner, rollout, torch.ones(2), torch.tensor([0, 1]), "token", 2.0)
    assert weights.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan, math.inf])
def test_bad_is_threshold(threshold: float):
    with pytest.raises(UserError, match="rollout_is_threshold"):
        importance_weights(LEARNER, BASE, MASK, IDS, "token", threshold)


def test_bad_rs_threshold_and_names():
    with pytest.raises(UserError, match="rollout_rs_threshold = 1.0"):
        rejection_mask(LEARNER, BASE, MASK, IDS, "token", 1.0)
    with pytest.raises(UserError, match='rollout_is is "geometric"'):
        importance_weights(LEARNER, BASE, MASK, IDS, "geometric", 2.0)
    with pytest.raises(UserError, match='rollout_rs is "word"'):
        rejection_mask(LEARNER, BASE, MASK, IDS, "word", 2.0)


def test_one_catastrophic_token_vetoes_its_sequence_by_hand():
    """Ratios: sequence 4 has 1 and 1e-3, sequence 7 has 0.5 and 2 (and a masked 1e-9), sequence 9 just at the limit."""
    ratios = torch.tensor([1.0, 1e-3, 0.5, 2.0, 1e-9, 0.01], dtype=torch.float64)
    ids, mask = torch.tensor([4, 4, 7, 7, 7, 9]), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    pair = ratios.log(), torch.zeros(6, dtype=torch.float64), mask, ids
    assert veto_mask(*pair, 0.0099).tolist() == [0, 0, 1, 1, 0, 1]
    assert veto_mask(*pair, 1e-4).tolist() == veto_mask(*pair, None).tolist() == mask.tolist()
    assert veto_mask(*pair, 0.6).tolist() == [0] * 6
    with pytest.raises(UserError, match="rollout_veto = 1.0"):
        veto_mask(*pair, 1.0)


def test_the_effective_sample_size_by_hand():
    """Weights 2 (capped), 1, 0 (rejected), 1 of 4 tokens: mean 1, mean square 6/4, so (1^2) / 1.5."""
    weights, kept = torch.tensor([2.0, 1.0, 1.5, 1.0]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    shares = correction_stats(weights, kept, torch.zeros(4), "token", 2.0, 4)
    stats = with_sample_size({key: value.item() for key, value in shares.items()} | {"policy/kl": 3.0})
    assert stats == pytest.approx({
        "policy/kl": 3.0, "correction/weight_mean": 1.0, "correction/frac_rejected": 0.25, "correction/frac_vetoed": 0,
        "correction/frac_truncated": 0.25, "correction/effective_sample_size": 2 / 3,
    })
    nothing = correction_stats(weights, torch.zeros(4), torch.zeros(4), "none", 2.0, 4)
    assert with_sample_size({k: v.item() for k, v in nothing.items()})["correction/effective_sample_size"] == 0.0
    assert "correction/frac_truncated" not in nothing and with_sample_size({"policy/kl": 1.0}) == {"policy/kl": 1.0}


def test_the_gap_by_position_in_the_answer_by_hand():
    """Two answers, of 5 and 2 tokens: tokens 1, 2-3, 4-7 of each; in any split of the micro-batches at an answer."""
    rollout = np.zeros(7)
    trainer = np.array([0.5, 0.25, 0.125, 1.0, 2.0, 0.25, 0.0])
    ids = np.array([8, 8, 8, 8, 8, 3, 3])
    whole = MismatchAccumulator()
    whole.add(trainer, rollout, sequence_ids=ids)
    expected = {1: (0.5 + 0.25) / 2, 2: (0.25 + 0.125 + 0.0) / 3, 4: (1.0 + 2.0) / 2}
    found = {k: v for k, v in whole.metrics().items() if k.startswith(BY_POSITION)}
    assert found == {f"{BY_POSITION}{first}": value for first, value in expected.items()}
    parts = MismatchAccumulator(), MismatchAccumulator()
    for part, rows in zip(parts, (slice(5, 7), slice(0, 5)), strict=True):
        part.add(torch.tensor(trainer[rows]), torch.tensor(rollout[rows]), sequence_ids=torch.tensor(ids[rows]))
    assert merged(parts).metrics() == whole.metrics()
    one = MismatchAccumulator()
    one.add(trainer, rollout)
    assert not one.by_position
    with pytest.raises(ValueError, match="sequence ids"):
        one.add(trainer, rollout, sequence_ids=ids[:3])


def test_buckets_are_exact_at_powers_of_two():
    count = 4097
    acc = MismatchAccumulator()
    acc.add(np.arange(1, count + 1) * 2.0**-13, np.zeros(count), sequence_ids=np.zeros(count))
    sizes = {first: tokens for first, (tokens, _) in acc.by_position.items()}
    assert sizes == {1 << k: min(1 << k, count + 1 - (1 << k)) for k in range(13)}
    assert acc.metrics()[f"{BY_POSITION}4096"] == (4096 + 4097) / 2 * 2.0**-13


def test_a_gap_beyond_exp_has_no_means_of_exponentials():
    """|d| = 4871.4, as a diverged policy has it on tokens that the corrections reject: the other metrics are there."""
    far, near = MismatchAccumulator(), MismatchAccumulator()
    far.add([-4872.4, -1.0], [-1.0, -1.0])
    near.add(TRAINER, ROLLOUT)
    found = merged([far, near]).metrics()
    assert not {"parity/k3_kl", "parity/token_mult_prob_error"} & set(found)
    assert found["parity/logprob_abs_diff_max"] == pytest.approx(4871.4)
    assert found["parity/logprob_abs_diff_mean"] == pytest.approx((4871.4 + 2 * math.log(2)) / 6)
    assert found["parity/frac_tokens_different"] == 0.5
    at_the_edge = mismatch_metrics([-709.0, -1.0], [0.0, -1.0])
    assert all(math.isfinite(value) for value in at_the_edge.values()) and "parity/k3_kl" in at_the_edge
