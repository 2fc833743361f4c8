"""The critic's loss against hand-worked numbers and the padded formula; explained variance from additive statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetrl.rl.losses import Denominators, explained_variance, value_loss

ONE = {"loss_agg": "token_mean"}


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_clipped_error_by_hand():
    # clip 0.5 around old = 0, targets 1, 1, -1, 2:
    #   v = 2:   clipped to 0.5: max(1, 0.25) = 1, gradient 2 - 1 = 1
    #   v = 0.9: clipped to 0.5: max(0.01, 0.25) = 0.25, constant
    #   v = 0.2: within: (1.2)^2 = 1.44, gradient 1.2
    #   v = 1.5: clipped to 0.5: max(0.25, 2.25) = 2.25, constant
    # loss 0.5 * (1 + 0.25 + 1.44 + 2.25) / 4 = 0.6175
    values = f64(2.0, 0.9, 0.2, 1.5).requires_grad_(True)
    loss, stats = value_loss(
        values, torch.zeros(4).double(), f64(1, 1, -1, 2), torch.ones(4), torch.arange(4), value_clip=0.5,
        denominators=Denominators(4, 4, (1,) * 4, 8), **ONE,
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.6175, rel=1e-14)
    assert values.grad.tolist() == pytest.approx([0.25, 0.0, 0.3, 0.0], rel=1e-14)
    assert stats["critic/loss"].item() == loss.item() and stats["critic/clip_frac"].item() == 0.5
    assert stats["critic/value_mean"].item() == pytest.approx(1.15) and stats["critic/return_mean"].item() == 0.75


@pytest.mark.parametrize("loss_agg", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
@pytest.mark.parametrize("clip", [None, 0.2])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 3))
def test_against_the_padded_formula_and_additive(loss_agg: str, clip: float | None, seed: int, cut: int):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (4,), generator=g)
    mask = torch.arange(5) < lengths[:, None]
    draw = [torch.randn(4, 5, generator=g, dtype=torch.float64) for _ in range(3)]
    v, old, target = draw[0], draw[0] + 0.3 * draw[1], draw[2]
    leaf = v.clone().requires_grad_(True)
    errors = (leaf - target) ** 2
    if clip is not None:
        inside = torch.minimum(torch.maximum(leaf, old - clip), old + clip)
        errors = torch.maximum(errors, (inside - target) ** 2)
    sums = (0.5 * errors * mask).sum(1)
    expected = {
        "token_mean": sums.sum() / lengths.sum(), "seq_mean_token_mean": (sums / lengths).mean(),
        "seq_mean_token_sum": sums.mean(),
    }[loss_agg]
    (slope,) = torch.autograd.grad(expected, leaf)
    ids = torch.arange(4)[:, None].expand(4, 5)
    den = Denominators(int(lengths.sum()), 4, tuple(lengths.tolist()), 8)
    ours, total, stats = v.clone().requires_grad_(True), 0.0, {}
    for rows in (ids < cut, ids >= cut):
        junk = [torch.where(mask, x, math.nan)[rows] for x in (ours, old, target)]
        part, more = value_loss(
            *junk, mask[rows].float(), ids[rows], value_clip=clip, loss_agg=loss_agg, denominators=den
        )
        part.backward()
        total += part.item()
        stats = {k: stats.get(k, 0.0) + x.item() for k, x in more.items()}
    assert total == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(ours.grad, slope, rtol=1e-12, atol=1e-14)
    live, aims = v[mask].numpy(), target[mask].numpy()
    final = explained_variance(stats)
    assert stats["critic/value_mean"] == pytest.approx(live.mean(), abs=1e-12)
    if len(aims) > 1:
        assert final["critic/explained_variance"] == pytest.approx(1 - np.var(aims - live) / np.var(aims), rel=1e-8)
    assert "critic/error_square_mean" not in final and final["critic/loss"] == stats["critic/loss"]


def test_explained_variance_of_perfect_mean_and_constant():
    base = {"critic/value_mean": 2.0, "critic/return_mean": 2.0, "critic/return_square_mean": 5.0}
    perfect = explained_variance(base | {"critic/error_square_mean": 0.0})
    assert perfect["critic/explained_variance"] == 1.0
    assert explained_variance(base | {"critic/error_square_mean": 1.0})["critic/explained_variance"] == 0.0
    constant = explained_variance(base | {"critic/return_square_mean": 4.0, "critic/error_square_mean": 1.0})
    assert "critic/explained_variance" not in constant and set(constant) == {"critic/value_mean", "critic/return_mean"}
    assert explained_variance({"policy/loss": 1.0}) == {"policy/loss": 1.0}


def test_without_old_values_nothing_is_clipped():
    values = torch.tensor([3.0, -1.0], requires_grad=True)
    common = {"denominators": Denominators(2, 2, (1, 1), 8), **ONE}
    plain, stats = value_loss(
        values, None, torch.zeros(2), torch.ones(2), torch.arange(2), value_clip=0.1, **common
    )
    same, _ = value_loss(
        values, values.detach(), torch.zeros(2), torch.ones(2), torch.arange(2), value_clip=0.1, **common
    )
    assert plain.item() == same.item() == 2.5 and stats["critic/clip_frac"] == 0  # 0.5 * (9 + 1) / 2
