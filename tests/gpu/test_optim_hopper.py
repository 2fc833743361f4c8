"""Optimizers on a GPU: moments on the host give the same bits in bounded memory; 8-bit runs repeat and resume."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ARCH, numbers, saved, tiny_run, weights_hash
from torch import nn

from jetrl.train import offload
from jetrl.train.optim import MixedAdamW, clip_gradients_, clipped_step, set_lr

pytestmark = pytest.mark.gpu
GPU: dict[str, Any] = {"device": "cuda", "model.arch": ARCH | {"hidden_size": 64, "head_dim": 32}}
ON: dict[str, Any] = {"train.offload_optimizer": True}
SHAPES = [(1,), (3001, 1024), (4096,), (1024, 6144), (37, 113), (2048, 2048), (7,)]


def optimizer_of(master: torch.dtype, moments: torch.dtype, on_host: bool) -> tuple[list[nn.Parameter], MixedAdamW]:
    g = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=g).to("cuda", master)) for shape in SHAPES]
    groups = [{"params": params[:3], "weight_decay": 0.5}, {"params": params[3:], "weight_decay": 0.0}]
    return params, MixedAdamW(groups, 1e-3, state_dtype=moments, offload=on_host)


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [10_000, 1 << 20, 1 << 25])
def test_offload_changes_no_bit(
    master: torch.dtype, moments: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients are made on the current stream just before the step, and the weights read just after it."""
    monkeypatch.setattr(offload, "PIECE", piece)
    made = [optimizer_of(master, moments, on_host) for on_host in (False, True)]
    for t in range(1, 6):
        g = torch.Generator("cuda").manual_seed(t)
        grads = [torch.randn(shape, generator=g, device="cuda").to(master) for shape in SHAPES]
        for params, optimizer in made:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad * 0.5
            set_lr(optimizer, 1e-3 / t)
            optimizer.step()
            optimizer.zero_grad()
        for i, (one, two) in enumerate(zip(*(params for params, _ in made), strict=True)):
            assert torch.equal(one, two), (t, i)
    for one, two in zip(*(params for params, _ in made), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            host = made[1][1].state[two][key]
            assert host.device.type == "cpu" and host.is_pinned() and host.dtype == moments
            assert torch.equal(made[0][1].state[one][key].cpu(), host)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_a_clipped_step_has_the_bits_of_clipping_first(
    master: torch.dtype, moments: torch.dtype, grads: torch.dtype, on_host: bool
) -> None:
    """torch multiplies on the one side, the kernel as it reads on the other."""
    made = [optimizer_of(master, moments, on_host) for _ in range(2)]
    for t, norm in enumerate((0.5, 1.3530657, 3.1, 77.7)):
        g = torch.Generator("cuda").manual_seed(t)
        values = [torch.randn(shape, generator=g, device="cuda").to(grads) for shape in SHAPES]
        for i, (params, optimizer) in enumerate(made):
            for param, value in zip(params, values, strict=True):
                param.grad_dtype = grads
                param.grad = value.clone()
            if i:
                clipped_step(optimizer, norm, 1.0)
                assert all(torch.equal(p.grad, value) for p, value in zip(params, values, strict=True))
            else:
                clip_gradients_(params, norm, 1.0)
                optimizer.step()
        for one, two in zip(*(params for params, _ in made), strict=True):
            assert torch.equal(one, two), t
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(made[0][1].state[one][key], made[1][1].state[two][key]), (t, key)


def test_a_step_takes_six_pieces_of_device_memory_and_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "PIECE", 1 << 20)
    params, optimizer = optimizer_of(torch.bfloat16, torch.float32, True)
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        more = torch.cuda.max_memory_allocated() - before
        assert more <= 6 * (4 << 20) + (1 << 20), more  # and what the allocator rounds up
        assert torch.cuda.memory_allocated() == before


def test_host_memory_is_unlocked_with_the_optimizer() -> None:
    """Otherwise the same addresses could not be locked again, and the memory would stay taken."""
    for _ in range(3):
        params, optimizer = optimizer_of(torch.float32, torch.float32, True)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        moment = optimizer.state[params[1]]["exp_avg"]
        optimizer.load_state_dict(optimizer.state_dict())
        assert not moment.is_pinned() and optimizer.state[params[1]]["exp_avg"].is_pinned()
        kept = optimizer.state[params[1]]["exp_avg"]
        del params, optimizer, param
        gc.collect()
        assert not kept.is_pinned()


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_run_with_offload_equals_one_without_and_resumes(moments: str, tmp_path: Path) -> None:
    changes = GPU | {"train.master_dtype": "bfloat16", "train.optimizer_dtype": moments}
    plain, host = (tiny_run(tmp_path / name, changes | more) for name, more in (("plain", {}), ("host", ON)))
    assert numbers(plain) == numbers(host) and weights_hash(plain, 4) == weights_hash(host, 4)
    tiny_run(tmp_path / "stopped", changes | ON | {"train.steps": 2})
    resumed = tiny_run(tmp_path / "stopped", changes | ON | {"checkpoint.resume": "auto"})
    assert numbers(resumed) == numbers(plain) and weights_hash(resumed, 4) == weights_hash(plain, 4)


@pytest.mark.parametrize("changes", [
    ON, {"train.optimizer_dtype": "8bit"}, {"train.optimizer_dtype": "8bit", "train.master_dtype": "bfloat16"},
], ids=str)
def test_the_run_repeats_and_resumes_to_the_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    eight = changes.get("train.optimizer_dtype") == "8bit"
    if eight:
        pytest.importorskip("torchao")
    first, second = (tiny_run(tmp_path / name, GPU | changes) for name in ("a", "b"))
    rows = numbers(first)
    assert [row["parity/logprob_abs_diff_max"] for row in rows[1:]] == [0.0] * 4
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])
    assert rows == numbers(second) and weights_hash(first, 4) == weights_hash(second, 4)
    kept = saved(first, 4)
    assert any(name.endswith("exp_avg.codes") for name in kept) is eight
    tiny_run(tmp_path / "stopped", GPU | changes | {"train.steps": 2})
    resumed = tiny_run(tmp_path / "stopped", GPU | changes | {"checkpoint.resume": "auto"})
    assert numbers(resumed) == rows and weights_hash(resumed, 4) == weights_hash(first, 4)


def test_8_bit_moments_learn_like_fp32_on_the_gpu() -> None:
    """Least squares with a 256x64 matrix, through the compiled step; the rate changes every step."""
    pytest.importorskip("torchao")
    from jetrl.train.optim_8bit import EightBitAdamW

    g = torch.Generator("cuda").manual_seed(0)
    x, target = torch.randn(512, 64, generator=g, device="cuda"), torch.randn(512, 256, generator=g, device="cuda")
    ends = {}
    for kind in (MixedAdamW, EightBitAdamW):
        weight = nn.Parameter(torch.zeros(64, 256, device="cuda"))
        optimizer = kind([weight], 0.01)
        losses = []
        for t in range(60):
            optimizer.zero_grad()
            loss = (x @ weight - target).square().mean()
            loss.backward()
            losses.append(loss.item())
            set_lr(optimizer, 0.01 * (1 - t / 100))
            optimizer.step()
        ends[kind] = losses[-1]
        assert losses[-1] < 0.95 * losses[0]
    assert ends[EightBitAdamW] == pytest.approx(ends[MixedAdamW], rel=0.05)
