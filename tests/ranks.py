"""`run_ranks(function, size)`: call a module-level function in `size` gloo processes on this machine."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from jetrl.model.master import Master, frozen_values, masters_of
from jetrl.model.sharding import whole_value
from jetrl.parallel.world import World

# What a run loads in its first step. Ranks are forked from a process that has done so: it takes longer than most tests.
HEAVY = ("torch._dynamo", "transformers.tokenization_utils_base", "jetrl.run.loop")


def load_heavy() -> None:
    """In a process that others will be forked from. It computes nothing, so there are no threads that a fork loses."""
    for name in HEAVY:
        importlib.import_module(name)


def run_ranks(function: Callable[..., Any], size: int, *args: Any, seconds: float = 60.0) -> list[Any]:
    """`function(world, *args)` in each of `size` processes; their results in rank order. An error in one is raised."""
    multiprocessing.set_forkserver_preload([*HEAVY])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.save((function, args), f"{folder}/given.pt")  # tensors sent as arguments would each take a descriptor
        mp.start_processes(_one, (size, port, seconds, folder, dict(os.environ)), size, start_method="forkserver")
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights with the rows of all ranks, in host memory, on every rank; of frozen ones their value. Collective."""
    frozen = frozen_values(model)

    def value(name: str, master: Master) -> Tensor:
        return frozen[name]() if name in frozen else whole_value(master, master.param.dtype)

    return {name: value(name, master).to("cpu", copy=True) for name, master in masters_of(model).items()}


def _one(rank: int, size: int, port: int, seconds: float, folder: str, environ: dict[str, str]) -> None:
    os.environ.clear()  # that of the process which forks is as old as the first call
    os.environ |= environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    function, args = torch.load(f"{folder}/given.pt", weights_only=False)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    try:
        torch.save(function(World(rank, size, rank), *args), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()
