"""An optimizer's state goes through whole tensors and comes back, on any number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from jetrl.model.shards import shard
from jetrl.parallel.world import ALONE, World
from jetrl.train.optim import build_optimizer
from jetrl.train.optim_state import full_optimizer_state, load_optimizer_state

SECTIONS = (128, 40, 128)  # 3 blocks: of 4 ranks the last owns nothing
KINDS = [("float32", False), ("bfloat16", False), ("bfloat16", True), ("8bit", False)]


def made(world: World, kind: tuple[str, bool]) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """A matrix [296, 256] of which this rank has its rows, and a vector, with their optimizer."""
    g, cut = torch.Generator().manual_seed(0), shard(SECTIONS, world)
    matrix = nn.Parameter(cut.own(torch.randn(sum(SECTIONS), 256, generator=g)).clone())
    matrix.shard = cut  # type: ignore[attr-defined]
    vector = nn.Parameter(torch.randn(96, generator=g))
    config = SimpleNamespace(
        lr=0.1, weight_decay=0.1, adam_betas=(0.9, 0.95), adam_eps=1e-8, master_dtype="float32",
        optimizer_dtype=kind[0], offload_optimizer=kind[1],
    )
    return [matrix, vector], build_optimizer([("layer.weight", matrix), ("norm", vector)], config)


def step(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, world: World, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    gradient = shard(SECTIONS, world).own(torch.randn(sum(SECTIONS), 256, generator=g))
    params[0].grad = gradient.clone() if gradient.numel() else None
    params[1].grad = torch.randn(96, generator=g)
    optimizer.step()


def saved_and_loaded(world: World, kinds: list[tuple[str, bool]]) -> list[list[dict[str, Tensor]]]:
    """Of each kind the whole state after two steps, and that of another optimizer which took it and made a third."""
    found: list[list[dict[str, Any]]] = []
    for kind in kinds:
        params, optimizer = made(world, kind)
        for seed in (1, 2):
            step(params, optimizer, world, seed)
        first = full_optimizer_state(optimizer, world)
        everywhere = {name: value.clone() for name, value in world.share(first).items()}  # torch's keep what they get
        _, again = made(world, kind)
        load_optimizer_state(again, everywhere)
        assert set(optimizer.state_dict()["state"]) == set(again.state_dict()["state"])
        others = [p for group in again.param_groups for p in group["params"]]
        step(others, again, world, 3)
        found.append([first, full_optimizer_state(again, world)])
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_whole_state_is_that_of_one_process(size: int) -> None:
    pytest.importorskip("torchao")
    want = saved_and_loaded(ALONE, KINDS)
    first, *others = run_ranks(saved_and_loaded, size, KINDS)
    assert all(state == {} for rank in others for kind in rank for state in kind)
    for kind, own, alone in zip(KINDS, first, want, strict=True):
        for have, expected in zip(own, alone, strict=True):
            assert list(have) == list(expected), kind
            for name, value in expected.items():
                assert have[name].dtype == value.dtype and torch.equal(have[name], value), (kind, name)
