"""`run_ranks(function, size)`: call a module-level function in `size` gloo processes on this machine."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from jetrl.parallel.world import World


def run_ranks(function: Callable[..., Any], size: int, *args: Any, seconds: float = 60.0) -> list[Any]:
    """`function(world, *args)` in each of `size` processes; their results in rank order. An error in one is raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_one, (size, port, seconds, folder, function, args), nprocs=size)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]


def _one(rank: int, size: int, port: int, seconds: float, folder: str, function: Any, args: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    try:
        torch.save(function(World(rank, size, rank), *args), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()
