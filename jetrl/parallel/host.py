"""The host's memory, as far as this process may use it."""

from __future__ import annotations

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
