"""The host's memory, as far as this process may use it, and whether its cores are busy."""

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
        total, free = int(limit), min(free, int(limit) - int(used) + _reclaimable())
    return free, total


def load() -> tuple[float, int] | None:
    """(load, cores) of the machine, all containers together, where programs have wanted more cores than it has for a
    minute, and nobody has chosen how waiting threads behave. None otherwise.

    Measured (benchmarks/bench_busy_cpu.py): three runs at a time, of two threads on two cores, take nine times as long
    as one; with OMP_WAIT_POLICY=passive, five to sixteen times.
    """
    found, cores = os.getloadavg()[0], os.cpu_count() or 1
    return (found, cores) if found > cores and "OMP_WAIT_POLICY" not in os.environ else None


def cgroup(name: str) -> str:
    """A limit of this process's container (cgroup version 2); empty where there is none."""
    file = CGROUP / name
    return file.read_text().strip() if file.is_file() else ""


def _reclaimable() -> int:
    """Bytes that the container's limit counts as used, and that go when they are needed: pages of files."""
    for line in cgroup("memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0
