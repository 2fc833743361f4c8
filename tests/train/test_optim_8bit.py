"""8-bit moments through torchao: what is quantized, rates and decay as given, state to the bit through a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import ARCH, numbers, saved, tiny_run, weights_hash
from torch import nn

from jetrl.errors import UserError
from jetrl.model.master import Master
from jetrl.model.shards import shard
from jetrl.parallel.world import World
from jetrl.train.optim import build_optimizer, set_lr

SHAPES = {
    "embed.weight": (64, 64), "layers.0.attn.qkv.weight": (96, 128), "norm.weight": (64,), "lm_head.weight": (65, 64),
}
QUANTIZED = {"embed.weight", "layers.0.attn.qkv.weight"}  # 65 * 64 is above 4096, but no multiple of 256
# matrices of at least 4096 values that are multiples of 256, so that a tiny run has 8-bit moments at all
TINY: dict[str, Any] = {
    "train.optimizer_dtype": "8bit", "model.arch": ARCH | {"hidden_size": 64, "intermediate_size": 128},
}


def made(master: str, **changes: Any) -> tuple[list[tuple[str, nn.Parameter]], torch.optim.Optimizer]:
    pytest.importorskip("torchao")
    g = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=g).to(getattr(torch, master)) for name, shape in SHAPES.items()}
    params = [(name, nn.Parameter(value)) for name, value in values.items()]
    base = dict(
        lr=0.1, weight_decay=0.5, adam_betas=(0.9, 0.95), adam_eps=1e-8, master_dtype=master, optimizer_dtype="8bit",
        offload_optimizer=False,
    )
    return params, build_optimizer({name: Master(param) for name, param in params}, SimpleNamespace(**(base | changes)))


def step(params: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, t: int) -> None:
    g = torch.Generator().manual_seed(t)
    for _, param in params:
        param.grad_dtype = torch.float32  # as with train.grad_dtype = "float32" under BF16 masters
        param.grad = torch.randn(param.shape, generator=g)
    set_lr(optimizer, 0.01 / t)
    optimizer.step()


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_what_is_quantized_and_what_is_not(master: str) -> None:
    params, optimizer = made(master)
    step(params, optimizer, 1)
    order = [param for group in optimizer.param_groups for param in group["params"]]
    names = {id(param): name for name, param in params}
    for number, state in optimizer.state_dict()["state"].items():
        param = order[number]
        if names[id(param)] in QUANTIZED:
            assert state["exp_avg.codes"].dtype == torch.uint8 and state["exp_avg.codes"].shape == param.shape
            assert state["exp_avg_sq.scale"].shape == (param.numel() // 256,)
            assert "exp_avg" not in state
        else:
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == getattr(torch, master)


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_first_step_by_hand_with_the_rate_that_was_set(master: str) -> None:
    """In the first step m / (1 - b1) = g and sqrt(v / (1 - b2)) = |g|, before anything is quantized: u = sign(g)."""
    params, optimizer = made(master)
    before = {name: param.detach().double() for name, param in params}
    step(params, optimizer, 2)  # set_lr gives 0.005, not the 0.1 that the optimizer was built with
    for name, param in params:
        decay = 0.5 if name in ("layers.0.attn.qkv.weight", "lm_head.weight") else 0.0
        want = before[name] * (1 - 0.005 * decay) - 0.005 * param.grad.sign().double()
        if master == "float32":
            torch.testing.assert_close(param.detach().double(), want, rtol=1e-6, atol=1e-6)
        else:
            assert (param.detach() == want.to(torch.bfloat16)).double().mean() > 0.99, name  # rest: near-ties


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_resume_is_exact_through_a_file(master: str, tmp_path: Path) -> None:
    straight, optimizer = made(master)
    for t in (1, 2, 3):
        step(straight, optimizer, t)
    state = optimizer.state_dict()["state"]
    save_file({f"{i}.{k}": v for i, slots in state.items() for k, v in slots.items()}, tmp_path / "state")
    read: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in load_file(tmp_path / "state").items():
        index, key = name.split(".", 1)
        read.setdefault(int(index), {})[key] = value
    resumed, again = made(master)
    again.load_state_dict({"state": read, "param_groups": again.state_dict()["param_groups"]})
    for (_, one), (_, two) in zip(straight, resumed, strict=True):
        two.data.copy_(one.data)
    for t in (4, 5, 6):
        step(straight, optimizer, t)
        step(resumed, again, t)
    for (name, one), (_, two) in zip(straight, resumed, strict=True):
        assert torch.equal(one, two), name
    for number, slots in optimizer.state_dict()["state"].items():
        for key, value in slots.items():
            other = again.state_dict()["state"][number][key]
            assert value.dtype == other.dtype and torch.equal(value, other), (number, key)


def test_a_loaded_state_is_a_copy() -> None:
    params, optimizer = made("float32")
    step(params, optimizer, 1)
    saved = {i: {k: v.clone() for k, v in s.items()} for i, s in optimizer.state_dict()["state"].items()}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": saved, "param_groups": groups})
    kept = {i: {k: v.clone() for k, v in s.items()} for i, s in saved.items()}
    step(params, optimizer, 2)
    assert all(torch.equal(value, kept[i][k]) for i, slots in saved.items() for k, value in slots.items())


def test_it_learns_like_fp32_moments() -> None:
    """Least squares with a 64x64 matrix: the loss falls as far as with FP32 moments, within 5 %."""
    g = torch.Generator().manual_seed(0)
    x, target = torch.randn(256, 64, generator=g), torch.randn(256, 64, generator=g)
    pytest.importorskip("torchao")
    ends = {}
    for moments in ("float32", "8bit"):
        weight = nn.Parameter(torch.zeros(64, 64))
        optimizer = build_optimizer({"w": Master(weight)}, SimpleNamespace(
            lr=0.01, weight_decay=0.0, adam_betas=(0.9, 0.95), adam_eps=1e-8, master_dtype="float32",
            optimizer_dtype=moments, offload_optimizer=False,
        ))
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = (x @ weight - target).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        ends[moments] = losses[-1]
        assert losses[-1] < 0.85 * losses[0]
    assert ends["8bit"] != ends["float32"] and ends["8bit"] == pytest.approx(ends["float32"], rel=0.05)


@pytest.mark.parametrize("changes", [{}, {"train.master_dtype": "bfloat16"}], ids=str)
def test_a_resumed_run_ends_with_the_same_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    straight = tiny_run(tmp_path / "straight", TINY | changes)
    kept = saved(straight, 4)
    assert sum(name.endswith("exp_avg.codes") for name in kept) == 8  # four projections of two layers
    tiny_run(tmp_path / "stopped", TINY | changes | {"train.steps": 2})
    run_dir = tiny_run(tmp_path / "stopped", TINY | changes | {"checkpoint.resume": "auto"})
    assert numbers(run_dir) == numbers(straight) and weights_hash(run_dir, 4) == weights_hash(straight, 4)
    other = tiny_run(tmp_path / "fp32", TINY | changes | {"train.optimizer_dtype": "float32"})
    assert numbers(other)[-1] != numbers(straight)[-1]


def test_without_torchao_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.optim", "torchao.optim.subclass_8bit"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "jetrl.train.optim_8bit", raising=False)
    config = SimpleNamespace(
        lr=0.1, weight_decay=0.0, adam_betas=(0.9, 0.95), adam_eps=1e-8, master_dtype="float32", optimizer_dtype="8bit",
        offload_optimizer=False,
    )
    with pytest.raises(UserError, match=r'needs torchao .*; run: pip install "jetrl\[optim8\]"'):
        build_optimizer({"w": Master(nn.Parameter(torch.zeros(2, 2)))}, config)


def test_offload_is_refused() -> None:
    with pytest.raises(UserError, match="train.offload_optimizer does not work"):
        made("float32", offload_optimizer=True)


def test_moments_of_a_rank_s_rows_are_those_of_the_whole_matrix() -> None:
    pytest.importorskip("torchao")
    sections, width = (128, 300), 64  # 4 blocks: 128 | 128, 128, 44
    whole = nn.Parameter(torch.randn(sum(sections), width, generator=torch.Generator().manual_seed(0)))
    cuts = [shard(sections, World(rank, 2)) for rank in range(2)]
    parts = [nn.Parameter(cut.own(whole.detach()).clone()) for cut in cuts]
    settings = SimpleNamespace(
        lr=0.1, weight_decay=0.5, adam_betas=(0.9, 0.95), adam_eps=1e-8, master_dtype="float32",
        optimizer_dtype="8bit", offload_optimizer=False,
    )
    masters = [Master(whole), *(Master(part, cut) for part, cut in zip(parts, cuts, strict=True))]
    optimizers = [build_optimizer({"w": master}, settings) for master in masters]
    for t in range(2):
        whole.grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(t))
        for part, cut in zip(parts, cuts, strict=True):
            part.grad = cut.own(whole.grad).clone()
        for optimizer in optimizers:
            optimizer.step()
    want, *found = (optimizer.state_dict()["state"][0] for optimizer in optimizers)
    assert torch.equal(torch.cat([part.detach() for part in parts]), whole.detach())
    for key in ("exp_avg.codes", "exp_avg.scale", "exp_avg_sq.codes", "exp_avg_sq.scale"):
        assert torch.equal(torch.cat([state[key] for state in found]), want[key]), key


def test_a_cut_through_blocks_of_moments_is_refused() -> None:
    pytest.importorskip("torchao")
    from jetrl.train.optim_8bit import check_shards

    check_shards("w", shard((160,), World(0, 1)), 64)  # one process
    check_shards("w", shard((192,), World(0, 2)), 65)  # 192 * 65 is no multiple of 256: no 8 bits anywhere
    check_shards("w", shard((128,), World(1, 2)), 64)  # the second rank owns nothing
    with pytest.raises(UserError, match=r"on 2 ranks: w \[160, 64\] .* \(128, 32\) rows.* into 32 rows of 64"):
        check_shards("w", shard((160,), World(1, 2)), 64)  # 2048 values are too few
    with pytest.raises(UserError, match=r"into 128 rows of 65"):
        check_shards("w", shard((256,), World(0, 2)), 65)
