"""An optimizer's state is saved in the parts of any number of ranks, and read by any other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from jetrl.model.master import Master
from jetrl.model.shards import shard
from jetrl.parallel.world import ALONE, World
from jetrl.run.checkpoint import store
from jetrl.run.checkpoint.optim_state import load_optimizer_state, optimizer_parts
from jetrl.train.optim import build_optimizer

SECTIONS = (128, 40, 128)  # 3 blocks: of 4 ranks the last owns nothing
KINDS = [("float32", False), ("bfloat16", False), ("bfloat16", True), ("8bit", False)]


def made(world: World, kind: tuple[str, bool]) -> tuple[list[Master], torch.optim.Optimizer]:
    """A matrix [296, 256] of which this rank has its rows, and a vector, with their optimizer."""
    g, cut = torch.Generator().manual_seed(0), shard(SECTIONS, world)
    matrix = Master(nn.Parameter(cut.own(torch.randn(sum(SECTIONS), 256, generator=g)).clone()), cut)
    vector = Master(nn.Parameter(torch.randn(96, generator=g)))
    config = SimpleNamespace(
        lr=0.1, weight_decay=0.1, adam_betas=(0.9, 0.95), adam_eps=1e-8, master_dtype="float32",
        optimizer_dtype=kind[0], offload_optimizer=kind[1],
    )
    return [matrix, vector], build_optimizer({"layer.weight": matrix, "norm": vector}, config)


def step(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, world: World, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    gradient = shard(SECTIONS, world).own(torch.randn(sum(SECTIONS), 256, generator=g))
    params[0].grad = gradient.clone() if gradient.numel() else None
    params[1].grad = torch.randn(96, generator=g)
    optimizer.step()


def saved_and_loaded(world: World, kinds: list[tuple[str, bool]], source: Path, out: Path) -> None:
    """Of each kind the state after two steps; and that of another optimizer which took what is in `source`, and made a
    third. Both in `out`, by number."""
    out.mkdir(exist_ok=True)
    for i, kind in enumerate(kinds):
        masters, optimizer = made(world, kind)
        for seed in (1, 2):
            step([m.param for m in masters], optimizer, world, seed)
        store.write(out / f"{i} two", optimizer_parts(optimizer, masters), world)
        world.barrier()
        others, again = made(world, kind)
        parts, take = load_optimizer_state(again, others, store.stored(source / f"{i} two"))
        store.read(source / f"{i} two", parts)
        take()
        assert set(optimizer.state_dict()["state"]) == set(again.state_dict()["state"])
        if kind == ("bfloat16", True):  # the places are the optimizer's own: no second copy of the moments
            assert {v.data_ptr() for v in again.state[others[1].param].values() if isinstance(v, Tensor)} == {
                part.value.data_ptr() for name, part in parts.items() if name.startswith("1.exp")
            }
        step([m.param for m in others], again, world, 3)
        store.write(out / f"{i} three", optimizer_parts(again, others), world)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_whole_state_is_that_of_one_process(size: int, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    saved_and_loaded(ALONE, KINDS, tmp_path / "alone", tmp_path / "alone")
    run_ranks(saved_and_loaded, size, KINDS, tmp_path / "alone", tmp_path / "ranks")
    saved_and_loaded(ALONE, KINDS, tmp_path / "ranks", tmp_path / "back")
    for folder in sorted(p.name for p in (tmp_path / "alone").iterdir()):
        want = store.whole(tmp_path / "alone" / folder)
        assert len(want) >= 6
        for other in ("ranks", "back"):
            have = store.whole(tmp_path / other / folder)
            assert have.keys() == want.keys(), folder
            for name, value in want.items():
                assert have[name].dtype == value.dtype and torch.equal(have[name], value), (folder, other, name)
