"""`run_gpu_ranks(function, size)`: as `ranks.run_ranks`, with a GPU for each rank, over NCCL."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from jetrl.parallel import launch


def run_gpu_ranks(function: Callable[..., Any], size: int, *args: Any, seconds: float = 600.0) -> list[Any]:
    """`function(world, *args)` in each of `size` processes, which meet as the ranks of a run do; their results."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_one, (size, port, seconds, folder, function, args), nprocs=size)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]


def _one(rank: int, size: int, port: int, seconds: float, folder: str, function: Any, args: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.save(function(launch.join(limit=seconds), *args), f"{folder}/{rank}.pt")
    launch.leave()
