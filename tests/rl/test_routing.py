"""Losses and counts of routers: worked by hand, independent of packing, and refused nowhere without reason."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from jetrl.rl.losses import Denominators
from jetrl.rl.routing import RoutingCounts, balance_loss, merged, router_losses, z_loss

E, K = 4, 2


def shares_of(ids: Tensor, count: int) -> Denominators:
    tokens = tuple(int((ids == i).sum()) for i in range(count))
    return Denominators(len(ids), sum(n > 0 for n in tokens), tokens, 64)


def random_routes(rows: int, layers: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(rows, E, generator=generator) * 2 for _ in range(layers)]
    return logits, [z.topk(K).indices for z in logits]


def test_balance_by_hand() -> None:
    """Even choices with even probabilities give 1; everything to two sure experts gives E / k."""
    ids = torch.tensor([0, 0])
    shares = shares_of(ids, 1)
    even = balance_loss([torch.zeros(2, E)], [torch.tensor([[0, 1], [2, 3]])], ids, shares)
    assert float(even) == 1.0
    sure = torch.tensor([[50.0, 50.0, 0.0, 0.0]] * 2)
    assert float(balance_loss([sure], [torch.tensor([[0, 1], [1, 0]])], ids, shares)) == pytest.approx(E / K)
    # two sequences: one token each, E * (1/2 p_0 + 1/2 p_1)
    ids, z = torch.tensor([0, 2]), torch.log(torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.2, 0.2, 0.2, 0.4]]))
    got = balance_loss([z], [torch.tensor([[0, 1], [3, 0]])], ids, shares_of(ids, 3))
    assert float(got) == pytest.approx((4 * 0.4 + 4 * 0.3) / 2)


def test_z_by_hand() -> None:
    logits = [torch.zeros(2, E), torch.full((2, E), 1.0)]
    want = (2 * math.log(4) ** 2 + 2 * (1 + math.log(4)) ** 2) / 4
    assert float(z_loss(logits, shares_of(torch.tensor([0, 0]), 1))) == pytest.approx(want)


@pytest.mark.parametrize(("balance", "z"), [(0.3, 0.0), (0.0, 0.1), (0.3, 0.1)])
def test_shares_of_micro_batches_add_up(balance: float, z: float) -> None:
    """Value and gradient of one batch are those of its sequences in any micro-batches."""
    ids = torch.tensor([0] * 5 + [1] * 3 + [3] * 7)
    shares, (logits, chosen) = shares_of(ids, 4), random_routes(15)
    leaves = [x.clone().requires_grad_() for x in logits]
    whole, stats = router_losses(leaves, chosen, ids, shares, balance, z)
    assert whole is not None and stats.keys() == {"moe/router_entropy"} | (
        ({"moe/aux_loss"} if balance else set()) | ({"moe/z_loss"} if z else set())
    )
    whole.backward()
    apart = [x.clone().requires_grad_() for x in logits]
    total, sums = 0.0, dict.fromkeys(stats, 0.0)
    for part in ([1], [3, 0]):
        rows = torch.cat([(ids == i).nonzero()[:, 0] for i in part])
        loss, own = router_losses([x[rows] for x in apart], [c[rows] for c in chosen], ids[rows], shares, balance, z)
        assert loss is not None
        loss.backward()
        total += float(loss)
        sums = {key: sums[key] + float(own[key]) for key in sums}
    assert total == pytest.approx(float(whole), rel=1e-12)
    assert sums == {key: pytest.approx(float(value), rel=1e-12) for key, value in stats.items()}
    for a, b in zip(leaves, apart, strict=True):
        assert a.grad is not None and float(a.grad.abs().max()) > 0 and torch.allclose(a.grad, b.grad, rtol=1e-6)


def test_the_gradient_evens_the_load_out() -> None:
    ids, z = torch.zeros(8, dtype=torch.int64), torch.tensor([[2.0, 1.0, 0.0, 0.0]] * 8).requires_grad_()
    balance_loss([z], [torch.tensor([[0, 1]] * 8)], ids, shares_of(ids, 1)).backward()
    assert z.grad is not None and (z.grad[:, 0] > 0).all() and (z.grad[:, 2:] < 0).all()


def test_without_weights_there_is_only_the_entropy() -> None:
    ids = torch.tensor([0, 0, 1])
    loss, stats = router_losses([torch.zeros(3, E)] * 2, [torch.zeros(3, K, dtype=torch.int64)] * 2, ids,
                                shares_of(ids, 2), 0.0, 0.0)
    assert loss is None and float(stats["moe/router_entropy"]) == pytest.approx(math.log(4))


def test_counts_are_those_of_all_parts() -> None:
    counts, other = RoutingCounts(), RoutingCounts()
    counts.add([torch.tensor([[0, 1], [0, 2]]), torch.tensor([[0, 1], [2, 3]])], E)
    assert counts.counts is not None and counts.counts.tolist() == [[2, 1, 1, 0], [1, 1, 1, 1]]
    assert counts.metrics() == {"moe/load_max_over_mean": 2.0}
    other.add([torch.tensor([[3, 1]]), torch.tensor([[3, 1]])], E)
    other.compare([torch.tensor([[3, 1], [0, 1]]), torch.tensor([[3, 1], [0, 1]])],
                  [torch.tensor([[1, 3], [0, 2]]), torch.tensor([[3, 1], [1, 0]])])
    both = merged([counts, RoutingCounts(), other])  # a rank without a micro-batch has counted nothing
    assert both.metrics() == {"moe/load_max_over_mean": 4 / 3, "parity/frac_routing_different": 0.25}
