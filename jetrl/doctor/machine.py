"""Python, processor, threads, memory and disk of this machine, as far as this process may use them."""

from __future__ import annotations

import math
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.specifiers import SpecifierSet

from jetrl.doctor.finding import Finding, Level, size
from jetrl.parallel import host
from jetrl.report.environment import cpu_name
from jetrl.requirements import python_needed

SECTION, DISK = "This machine", "Disk"
LEAST_MEMORY, LEAST_DISK = 2**30, 2**30  # bytes: the quickstart takes 0.9 GiB of memory; real models take more of both
_MOST_FILES = 20_000  # counted in a folder, so that a large one does not keep the doctor waiting
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND")


def python() -> Finding:
    found, needed = platform.python_version(), python_needed()
    fits = SpecifierSet(needed).contains(found, prereleases=True)
    level: Level = "ok" if fits else "bad"
    return Finding(SECTION, "Python", f"{found} (needs {needed})", level, None if fits else f"install Python {needed}")


def cores() -> int:
    """The cores that this process may keep busy: its affinity, and a container's quota rounded up."""
    allowed = len(os.sched_getaffinity(0))
    quota = host.cgroup("cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        allowed = min(allowed, math.ceil(int(quota[0]) / int(quota[1])))
    return max(1, allowed)


def threads(torch_threads: int) -> Finding:
    """torch's threads, which `num_threads = none` takes, next to the cores and the variables that set them."""
    usable = cores()
    named = ", ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)
    text = f"{torch_threads} for {usable} core{'s' * (usable > 1)}" + (f"; {named}" if named else "")
    if torch_threads > usable:
        return Finding(SECTION, "threads", text, "note", f"set num_threads = {usable}: more than the cores is slow")
    if torch_threads < usable and "OMP_NUM_THREADS" in os.environ:
        return Finding(SECTION, "threads", text, "note", "unset OMP_NUM_THREADS, or set num_threads, to use all cores")
    if busy := host.load():
        cure = "end other programs; if you cannot, try OMP_WAIT_POLICY=passive: waiting threads then sleep at once"
        return Finding(SECTION, "threads", f"{text}; load {busy[0]:.1f} on {busy[1]}", "note", cure)
    return Finding(SECTION, "threads", text)


def cpu() -> Finding:
    return Finding(SECTION, "CPU", cpu_name())


def memory() -> Finding:
    """Memory that is free for this process; a container's limit counts."""
    free, total = host.memory()
    enough = free >= LEAST_MEMORY
    cure = None if enough else f"free memory: the quickstart needs about {size(LEAST_MEMORY)}"
    return Finding(SECTION, "memory", f"{size(free)} free of {size(total)}", "ok" if enough else "bad", cure)


def output_folder(folder: Path) -> Finding:
    """Where runs are written: free space, and whether files can be written there."""
    at = _existing(folder.expanduser().absolute())
    free = shutil.disk_usage(at).free
    text, cure = f"{folder}: {size(free)} free", None
    if not os.access(at, os.W_OK):
        text, cure = f"{folder}: {at} cannot be written to", "go to another folder, or set output_dir"
    elif free < LEAST_DISK:
        cure = "free some disk space, or set output_dir to another disk"
    return Finding(DISK, "runs", text, "bad" if cure else "ok", cure)


def kept(folders: Mapping[str, Path]) -> Iterator[Finding]:
    """Folders whose files make the next run start faster: how much each holds. Missing ones are left out."""
    for what, folder in folders.items():
        folder = folder.expanduser()
        if folder.is_dir():
            free = shutil.disk_usage(folder).free
            short = None if free >= LEAST_DISK else f"free some disk space; {folder} can be removed"
            text = f"{_short(folder)}: {_folder_size(folder)}, {size(free)} free"
            yield Finding(DISK, what, text, "note" if short else "ok", short)


def _short(folder: Path) -> str:
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def _existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _folder_size(folder: Path) -> str:
    total, count = 0, 0
    for where, _, names in os.walk(folder, onerror=None):
        for name in names:
            path = Path(where) / name
            total += path.lstat().st_size if os.path.lexists(path) else 0
            count += 1
            if count == _MOST_FILES:
                return f"more than {size(total)}"
    return size(total)
