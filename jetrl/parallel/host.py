"""The host's memory, as far as this process and the other ranks of its machine may use it."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def memory() -> tuple[int, int]:
    """(free, total) bytes; a container's limit counts."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    limit, used = cgroup("memory.max"), cgroup("memory.current")
    if limit.isdigit() and used.isdigit() and int(limit) < total:
        total, free = int(limit), min(free, int(limit) - int(used))
    return free, total


def free_memory() -> int:
    """Bytes that are free."""
    return memory()[0]


def local_ranks() -> int:
    """How many ranks this machine has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cgroup(name: str) -> str:
    """A limit of this process's container (cgroup version 2); empty where there is none."""
    file = CGROUP / name
    return file.read_text().strip() if file.is_file() else ""
