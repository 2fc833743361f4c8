"""The KL over the teacher's most probable tokens: by hand, against the whole vocabulary, and its gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from jetrl.rl.losses import Denominators, Terms, teacher_loss
from jetrl.rl.top_k import top_k_kl

ROWS, V = 7, 11


def distributions(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of policy and teacher, float64."""
    draw = torch.Generator().manual_seed(seed)
    return tuple(2 * torch.randn(ROWS, V, generator=draw, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def by_top(policy: Tensor, teacher: Tensor, k: int) -> tuple[Tensor, Tensor]:
    ids = teacher.topk(k, dim=1).indices
    return torch.log_softmax(policy, 1).gather(1, ids), torch.log_softmax(teacher, 1).gather(1, ids)


def whole(policy: Tensor, teacher: Tensor) -> Tensor:
    p, q = torch.log_softmax(policy, 1), torch.log_softmax(teacher, 1)
    return (p.exp() * (p - q)).sum(1)


def test_by_hand() -> None:
    """Policy (1/2, 1/4, 1/4), teacher (1/4, 1/2, 1/4): over the teacher's first token and the rest."""
    found = top_k_kl(torch.tensor([[math.log(0.25)]]), torch.tensor([[math.log(0.5)]]))
    assert found.tolist() == pytest.approx([0.25 * math.log(0.5) + 0.75 * math.log(1.5)])


def test_with_all_tokens_it_is_the_whole_kl_and_with_fewer_it_is_less() -> None:
    policy, teacher = distributions()
    full = whole(policy, teacher)
    assert torch.allclose(top_k_kl(*by_top(policy, teacher, V)), full, atol=1e-6)
    before = torch.zeros(ROWS, dtype=torch.float64)
    for k in range(1, V - 1):
        found = top_k_kl(*by_top(policy, teacher, k))
        assert (found >= before - 1e-12).all() and (found <= full + 1e-12).all()  # finer parts tell more apart
        before = found
    assert (top_k_kl(*by_top(policy, policy, 4)) == 0).all()


@pytest.mark.parametrize("k", [1, 4, V])
def test_the_gradient_is_that_of_the_plain_formula(k: int) -> None:
    """For logits z: pi_j (d_j - sum_i pi_i d_i), with d the log ratio of each token's part."""
    policy, teacher = distributions(1)
    policy.requires_grad_()
    top_k_kl(*by_top(policy, teacher, k)).sum().backward()
    p, q = policy.detach().softmax(1), teacher.softmax(1)
    ids = teacher.topk(k, dim=1).indices
    inside = torch.zeros(ROWS, V, dtype=torch.bool).scatter(1, ids, True)
    rest_p, rest_q = (torch.where(inside, 0.0, one).sum(1, keepdim=True) for one in (p, q))
    d = torch.where(inside, (p / q).log(), (rest_p / rest_q).log() if k < V else 0.0)
    assert policy.grad is not None
    assert torch.allclose(policy.grad, p * (d - (p * d).sum(1, keepdim=True)), atol=1e-9)


def test_a_rest_that_is_none_is_finite_and_without_gradient() -> None:
    sure = torch.tensor([[math.log(0.5), math.log(0.5) + 1e-7]], requires_grad=True)
    found = top_k_kl(sure, torch.log(torch.tensor([[0.6, 0.4]])))
    found.sum().backward()
    assert found.isfinite().all() and sure.grad is not None and sure.grad.isfinite().all()


def test_the_teachers_loss_is_aggregated_like_the_policys() -> None:
    shares, terms = Denominators(5, 2, (3, 2), 8), Terms()
    kl, ids = torch.tensor([1.0, 2.0, 9.0, 4.0]), torch.tensor([0, 0, 0, 1])
    loss, stats = teacher_loss(
        kl, torch.tensor([1.0, 1.0, 0.0, 1.0]), ids, loss_agg="seq_mean_token_mean", denominators=shares, terms=terms
    )
    assert float(loss) == pytest.approx((1 + 2) / 6 + 4 / 4)
    assert terms["teacher"].tolist() == pytest.approx([1 / 6, 2 / 6, 0, 1.0])
    assert float(stats["policy/teacher_kl_top_k"]) == pytest.approx(7 / 5)
