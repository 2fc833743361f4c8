"""Stand-ins for kernels, a search and a worker's start, for tests of `kernels.compiling.pool`: a kernel is a file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jetrl.kernels.compiling.pool import Job


def compile_one(folder: str, name: str, seconds: float = 0.0, how: str = "well") -> None:
    """Leave a file `name`; or fail in one of several ways."""
    if how == "raises":
        raise ValueError(f"no kernel\n  for {name}")
    if how == "dies":
        print("the compiler's last words", flush=True)
        os._exit(7)
    if how == "hangs":  # in a program that it has started
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (Path(folder) / "pids").write_text(f"{os.getpid()} {child.pid}")
        child.wait()
    time.sleep(seconds)
    with (Path(folder) / "log").open("a") as log:
        log.write(f"{name}\n")
    (Path(folder) / name).write_text(str(os.getpid()))


def job(folder: Path, name: str, how: str = "well", stage: int = 0, seconds: float = 1.0) -> Job:
    return Job(name, f"Stand-in {name}", "compiling_jobs:compile_one", (str(folder), name, 0.05, how), seconds, stage)


def search(emit: Callable[[Job], object], jobs: list[Job], fails: bool) -> None:
    """Send the jobs, each twice."""
    for one in jobs:
        emit(one)
        emit(one)
    if fails:
        raise RuntimeError("the search broke off")


def prepare(folder: str, fails: bool) -> None:
    if fails:
        raise ImportError("no such compiler")
    (Path(folder) / f"worker-{os.getpid()}").touch()
