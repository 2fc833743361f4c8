"""The critic: values against float64, the same bits in any packing, its gradient; it learns, and resumes to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import numbers, tiny_config, tiny_run, weights_hash
from tolerances import assert_bitwise_equal

from jetrl.errors import UserError
from jetrl.model.critic import Critic
from jetrl.model.master import accumulate_in
from jetrl.run.setup import Session, build
from jetrl.types import ForwardBatch, VarlenPlan

PPO = {"rl.algo": "ppo", "rl.critic_lr": 3e-3}
SHARED = {"rl.algo": "ppo", "rl.critic": "shared"}


def session_of(folder: Path, changes: dict[str, Any]) -> Session:
    threads = torch.get_num_threads()
    session = build(tiny_config(folder, changes))
    torch.set_num_threads(threads)
    return session


def batch_of(lengths: tuple[int, ...], tokens: torch.Tensor) -> ForwardBatch:
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return ForwardBatch(tokens, positions, VarlenPlan(cu, lengths), "train")


def with_weights(critic: Critic) -> Critic:
    with torch.no_grad():
        critic.head.weight.copy_(torch.randn(critic.head.weight.shape, generator=torch.Generator().manual_seed(3)))
    return critic.publish()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_values_by_float64_and_the_same_bits_in_any_packing(tmp_path: Path, precision: str) -> None:
    critic = session_of(tmp_path, PPO | {"precision": precision}).learner.critic
    assert critic is not None and critic.body is not None
    with_weights(critic)
    tokens = torch.arange(30) * 7 % 32
    with torch.no_grad():
        packed = critic(batch_of((9, 14, 7), tokens))
        alone = torch.cat([critic(batch_of((len(t),), t)) for t in tokens.split((9, 14, 7))])
        hidden = critic.body(batch_of((9, 14, 7), tokens))
    assert packed.dtype == torch.float32 and packed.shape == (30,)
    assert_bitwise_equal(packed, alone, "values")
    exact = hidden.double() @ critic.head.published[0].double()
    assert float((packed.double() - exact).abs().max()) <= 1e-6 * float(exact.abs().max())


def test_a_critic_starts_as_the_policy_with_values_of_zero(tmp_path: Path) -> None:
    session = session_of(tmp_path, PPO | {"model.arch.tie_word_embeddings": False})
    critic, policy = session.learner.critic, session.model
    assert critic is not None and critic.body is not None
    assert not any("lm_head" in name for name, _ in critic.named_parameters())
    for name, value in critic.body.state_dict().items():
        assert_bitwise_equal(value, policy.state_dict()[name], name)
    assert not critic(batch_of((5,), torch.arange(5))).any()


@pytest.mark.parametrize("in_place", [False, True])
def test_the_gradient_is_that_of_the_formula(tmp_path: Path, in_place: bool) -> None:
    """V = h w: dV/dw = sum of dv h, dV/dh = dv w, in BF16's published w."""
    session = session_of(tmp_path, SHARED)
    critic = with_weights(Critic(session.model, shared=True))
    if in_place:
        accumulate_in(critic, torch.float32)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(11, 40, generator=generator).bfloat16().requires_grad_()
    dv = torch.randn(11, generator=generator)
    for times in (1, 2):  # gradients of micro-batches add up
        (critic.values(hidden) * dv).sum().backward()
        expected = times * dv.double() @ hidden.detach().double()
        assert critic.head.weight.grad is not None and hidden.grad is not None
        assert float((critic.head.weight.grad[0].double() - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    wanted = (dv[:, None] * critic.head.published.float()).bfloat16()
    assert_bitwise_equal(hidden.grad, wanted + wanted, "gradient of the hidden states, added twice")


@pytest.mark.parametrize("changes", [PPO, SHARED], ids=["separate", "shared"])
def test_the_critic_learns_and_parity_stays_zero(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Values start at 0 and move towards the mean reward, so the critic's error falls."""
    more = {"train.steps": 12, "eval.eval_interval": 0, "checkpoint.save_interval": 12}
    rows = numbers(tiny_run(tmp_path, changes | more))[1:]
    assert [row["parity/logprob_abs_diff_max"] for row in rows] == [0.0] * 12
    assert rows[0]["critic/value_mean"] == 0.0 and rows[0]["critic/explained_variance"] == 0.0
    assert all(0.1 < row["critic/value_mean"] < 0.6 for row in rows[3:])  # the rewards' range
    assert sum(row["critic/loss"] for row in rows[1:]) / 11 < 0.7 * rows[0]["critic/loss"]


def test_warm_up_of_the_critic_leaves_the_policy_alone(tmp_path: Path) -> None:
    more = {"rl.critic_warmup_steps": 2, "train.steps": 3, "eval.eval_interval": 1}
    rows = numbers(tiny_run(tmp_path, PPO | more))
    assert ["policy/loss" in row for row in rows] == [False, False, False, True]
    assert all("critic/loss" in row for row in rows[1:])
    assert rows[0]["eval/addition/avg@1"] == rows[2]["eval/addition/avg@1"]


@pytest.mark.parametrize(
    "changes", [PPO | {"rl.kl_coef": 0.05, "rl.updates_per_step": 2}, SHARED], ids=["separate, KL, updates", "shared"]
)
def test_a_stopped_run_resumes_to_the_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    straight = tiny_run(tmp_path / "a", changes)
    tiny_run(tmp_path / "b", changes | {"train.steps": 2})
    resumed = tiny_run(tmp_path / "b", changes | {"checkpoint.resume": "auto"})
    assert numbers(resumed) == numbers(straight) and weights_hash(resumed, 4) == weights_hash(straight, 4)


def test_a_critic_that_has_moved_is_refused(tmp_path: Path) -> None:
    critic = session_of(tmp_path, PPO).learner.critic
    assert critic is not None and critic.body is not None
    batch = batch_of((9,), torch.arange(9))
    with torch.no_grad():
        critic.head.weight.add_(1.0)
    with pytest.raises(UserError, match=r"critic's head has changed .* critic.publish\(\)"):
        critic(batch)
    critic.publish()(batch)
    with torch.no_grad():
        next(critic.body.parameters()).add_(1.0)
    with pytest.raises(UserError, match="model.publish"):
        critic(batch)
