"""Two ranks that write checkpoints, until one is killed (-9) in the second; `run/test_store.py` looks what is left.

`python tests/killed_ranks.py FOLDER` forks the ranks of each case, one case after the other. When one rank is
dead the other is killed too, as the launcher does. Prints {"name": exit statuses}.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jetrl.huggingface import write as hf_write
from jetrl.model.shards import Part, shard
from jetrl.parallel.world import World
from jetrl.run.checkpoint import checkpoint, store
from jetrl.run.checkpoint.beside import HostCopy

# name: (the rank that dies, after which call of what; each has been called for the first checkpoint, too)
CASES: dict[str, tuple[int, str, int]] = {
    "its tensors are half written": (1, "half", 2),
    "its tensors are written, others' perhaps not": (1, "store.write", 2),
    "its model file is written": (1, "hf_write._write_file", 2),
    "not all of its files are hashed": (1, "store.sha256_of_file", 3),
    "state.json is written": (0, "checkpoint.sync", 7),
    "renamed, latest not": (0, "checkpoint.sync", 11),
}
BESIDE = {f"beside the run, {name}": case for name, case in CASES.items()}
ALL = CASES | BESIDE
SECTIONS = (128, 40, 128)
NAMES = ("model.safetensors", "model-2.safetensors")


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`function`, which kills this process at the end of call number `count`."""
    calls = []

    def wrapped(*args: Any) -> Any:
        result = function(*args)
        calls.append(1)
        if len(calls) == count:
            die()
        return result

    return wrapped


def half(folder: Path, parts: Any, world: World, check: Callable[[], None]) -> list[Path]:
    written = write(folder, parts, world, check)
    if "step_000002" in str(folder):
        for file in folder.glob("shard-00002*"):
            os.truncate(file, file.stat().st_size // 2)
        die()
    return written


write = store.write
PLACES = {"store": store, "checkpoint": checkpoint, "hf_write": hf_write}


def parts_of(world: World, step: int) -> dict[str, Part]:
    cut = shard(SECTIONS, world)
    whole = torch.arange(sum(SECTIONS) * 3.0).view(-1, 3) + step
    return {"w": Part(cut.own(whole), tuple(whole.shape), cut.start), "b": Part(torch.ones(3) * step, (3,), 0)}


def save(world: World, folder: Path, step: int, beside: bool = False) -> Path:
    def write_model(target: Path, state: Path, parts: Any, check: Callable[[], None]) -> list[Path]:
        (target / "config.json").write_text("{}")
        hf_write._write_file(target / NAMES[world.rank], {"x": torch.ones(2)})
        return [target / NAMES[world.rank]]

    meta = checkpoint.Meta(step, step, "flow", {}, {})
    parts = parts_of(world, step)
    copy = HostCopy().after(parts) if beside else None
    return checkpoint.begin(folder, meta, parts, write_model, 9, world, copy).finish()


def rank(world: World, folder: Path, beside: bool, victim: int, place: str, count: int) -> None:
    if world.rank == victim and place == "half":
        store.write = half
    elif world.rank == victim:
        module, name = place.split(".")
        setattr(PLACES[module], name, after(getattr(PLACES[module], name), count))
    dist.init_process_group("gloo", rank=world.rank, world_size=2)
    for step in (1, 2):
        save(world, folder, step, beside)


def main() -> None:
    """Torch has not run before, so forking is safe."""
    root, ends = Path(sys.argv[1]), {}
    torch.set_num_threads(1)
    for name, case in ALL.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        pids = []
        for number in range(2):
            if (pid := os.fork()) == 0:
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (the process ends soon)
                rank(World(number, 2, number), root / name, name in BESIDE, *case)
                os._exit(0)
            pids.append(pid)
        first, status = os.wait()
        (other,) = [pid for pid in pids if pid != first]
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        ends[name] = [pids.index(first), os.waitstatus_to_exitcode(status)]
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
