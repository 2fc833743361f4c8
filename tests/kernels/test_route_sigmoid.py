"""DeepSeek's choice of experts (`kernels.experts.reference.route_sigmoid`): by hand, against torch, its gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tolerances import assert_bitwise_equal

from jetrl.kernels.experts import ops as moe
from jetrl.kernels.experts.reference import Choice


def choice(per_token: int = 2, groups: int = 1, kept: int = 1, normalized: bool = True, scaling: float = 1.0) -> Choice:
    return Choice(per_token, groups, kept, normalized, scaling)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_by_hand() -> None:
    """The bias decides, the weights come without it; equal keys go to the lower index, equal groups too."""
    z = torch.tensor([[0.0, 0.0, 0.0, 0.0, 2.0, -2.0]])
    chosen, weights = moe.route_sigmoid(z, torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, 1.0]), choice(3))
    s = [1 / (1 + np.exp(-x)) for x in (-2.0, 0.0, 2.0)]
    assert chosen.tolist() == [[5, 2, 4]]  # 0.119 + 1, 0.5 + 0.5, 0.881
    np.testing.assert_allclose(weights[0], np.array(s) / sum(s), rtol=1e-6)
    assert moe.route_sigmoid(z[:, :4], torch.zeros(4), choice(3))[0].tolist() == [[0, 1, 2]]
    groups = moe.route_sigmoid(z[:, :4], torch.zeros(4), choice(2, groups=2))[0]
    assert groups.tolist() == [[0, 1]]
    # the group of the best two together, not that of the best one: keys 0.5 + 0.5 against 0.881 + 0.018
    z = torch.tensor([[2.0, -4.0, 0.0, 0.0]])
    assert moe.route_sigmoid(z, torch.zeros(4), choice(2, groups=2))[0].tolist() == [[2, 3]]
    plain = moe.route_sigmoid(z, torch.zeros(4), choice(1, normalized=False, scaling=2.5))[1]
    np.testing.assert_allclose(plain, [[2.5 * s[2]]], rtol=1e-6)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3)])
def test_the_sets_of_torch(groups: tuple[int, int]) -> None:
    count, kept = groups
    z, bias = normal(3000, 64), normal(64, seed=1) * 0.1
    keys = z.sigmoid() + bias
    scores = keys.view(-1, count, 64 // count).topk(2, -1).values.sum(-1)
    mask = torch.zeros_like(scores).scatter_(1, scores.topk(kept, -1).indices, 1.0).bool()
    masked = keys.masked_fill(~mask.repeat_interleave(64 // count, 1), float("-inf"))
    want = masked.topk(6, -1).indices
    chosen, weights = moe.route_sigmoid(z, bias, choice(6, count, kept, scaling=2.446))
    assert torch.equal(chosen.sort(-1).values, want.sort(-1).values)
    s = z.double().sigmoid().gather(1, chosen)
    torch.testing.assert_close(weights.double(), 2.446 * s / s.sum(-1, keepdim=True), rtol=1e-6, atol=0)


def test_a_row_depends_on_itself_alone() -> None:
    z, bias, of = normal(50, 16), normal(16, seed=1), choice(4, 4, 2)
    whole = moe.route_sigmoid(z, bias, of)
    for i in (0, 17, 49):
        for alone, part in zip(moe.route_sigmoid(z[i : i + 1], bias, of), whole, strict=True):
            assert_bitwise_equal(alone, part[i : i + 1])


@pytest.mark.parametrize("normalized", [True, False])
def test_its_gradient(normalized: bool) -> None:
    z, bias = normal(20, 16).requires_grad_(), normal(16, seed=1)
    chosen, weights = moe.route_sigmoid(z, bias, choice(4, normalized=normalized, scaling=1.7))
    d = normal(20, 4, seed=2)
    weights.backward(d)
    wide = z.detach().double().requires_grad_()
    s = wide.sigmoid().gather(1, chosen)
    w = 1.7 * (s / s.sum(-1, keepdim=True) if normalized else s)
    (want,) = torch.autograd.grad(w, wide, d.double())
    torch.testing.assert_close(z.grad.double(), want, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match="of 6 experts"):
        moe.route_sigmoid(normal(2, 6), torch.zeros(6), choice(2, groups=4))
    with pytest.raises(ValueError, match="of 6 experts"):
        moe.route_sigmoid(normal(2, 6), torch.zeros(6), choice(3, groups=3, kept=1))


def test_combine_adds_the_shared_row_last_and_rounds_once() -> None:
    chosen = torch.tensor([[2, 0], [0, 1], [2, 1]])
    groups, weights = moe.group(chosen, 3), normal(3, 2, seed=5)
    y, shared = normal(6, 40, seed=6).bfloat16().requires_grad_(), normal(3, 40, seed=7).bfloat16().requires_grad_()
    out = moe.combine(y, weights, groups, shared)
    want = [
        weights[t, 0] * y[groups.rows[t, 0]].float() + weights[t, 1] * y[groups.rows[t, 1]].float() + shared[t].float()
        for t in range(3)
    ]
    assert_bitwise_equal(out.detach(), torch.stack(want).detach().bfloat16())
    up = normal(3, 40, seed=8).bfloat16()
    out.backward(up)
    assert_bitwise_equal(shared.grad, up)
