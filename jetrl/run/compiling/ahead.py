"""A run's kernels compiled before it needs them, by several processes, once for each machine and kind of run.

A marker on disk names what was compiled: versions, GPU, sizes and settings. With it, or on a CPU, nothing happens. What
fails here is reported and compiled when it is needed instead, as every kernel was before: no number depends on it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from jetrl import __version__
from jetrl.config import Config
from jetrl.config.keys import marked, value_of
from jetrl.config.markers import Kernels
from jetrl.kernels import support
from jetrl.kernels.compiling.pool import Outcome, Watcher, compile_all, processors
from jetrl.parallel.agreement import on_every_rank
from jetrl.parallel.world import World
from jetrl.requirements import packages
from jetrl.spec import ModelSpec
from jetrl.untrusted import json_file

_PACKAGE = Path(__file__).parents[2]
# Rooms whose code decides what is launched.
_SOURCES = ("kernels", "model", "engine", "rollout", "train", "run", "precision", "rl")
_WORKER_BYTES = 2 << 30  # of GPU memory, with what a job of a dense model needs
_SHARE = 0.6  # of the free GPU memory, for workers
_MOST_WORKERS = 24


class Display(Watcher, AbstractContextManager["Display"], Protocol):
    """Shows the phase: entered when something is to be compiled."""

    def message(self, text: str) -> None: ...


class Displays(Protocol):
    """Makes a `Display`."""

    def __call__(self, workers: int) -> Display: ...


def compile_ahead(
    config: Config, spec: ModelSpec, world: World, displays: Displays | None, *, trains: bool = True
) -> dict[str, float]:
    """Compile what a run needs, where that pays; metrics of it. The first rank of each machine does it; a collective.

    `displays` None: nobody is there to see why a start takes half a minute, and nothing is compiled.
    """
    if displays is None or not config.train.compile_ahead or config.device != "cuda":
        return {}

    def make() -> dict[str, float]:
        return _on_machine(config, spec, world, displays, trains) if world.local_rank == 0 else {}

    return on_every_rank(world, make)


def _on_machine(
    config: Config, spec: ModelSpec, world: World, displays: Displays, trains: bool
) -> dict[str, float]:
    start = time.monotonic()
    device = torch.cuda.current_device()
    marker = marker_path(needs(config, spec, torch.cuda.get_device_name(device), trains))
    if is_done(marker):
        return {"perf/compile_s": time.monotonic() - start}
    count = num_workers(processors(), torch.cuda.mem_get_info(device)[0], spec)
    with displays(count) as display:
        outcome = compile_all(
            "jetrl.run.compiling.needed:find", (config, spec, device, trains), workers=count,
            prepare=("jetrl.kernels.compiling.recorded:prepare", (device,)), watcher=display,
        )
        for text in lines_of(outcome):
            display.message(text)
    if not outcome.failures and not outcome.left:
        mark(marker, outcome)
    return {"perf/compile_s": time.monotonic() - start}


def num_workers(cores: int, free: int, spec: ModelSpec) -> int:
    """Processes that compile: one a core, as far as GPU memory allows. Each has a context on the GPU, and may call a
    GEMM that writes the FP32 gradients of all experts of a layer."""
    experts = spec.experts
    gradients = 0 if experts is None else 4 * experts.count * 2 * experts.intermediate_size * spec.hidden_size
    return max(1, min(cores, _MOST_WORKERS, int(free * _SHARE) // (_WORKER_BYTES + gradients)))


def lines_of(outcome: Outcome) -> list[str]:
    """What the user should know of the phase, in lines."""
    lines = []
    if outcome.failures:
        name, why = outcome.failures[0]
        more = f", and {len(outcome.failures) - 1} more" if len(outcome.failures) > 1 else ""
        lines.append(f"Not compiled ahead: {name} ({why}){more}.")
    if outcome.left:
        lines.append(f"{outcome.left} kernels were left when the time for this was up.")
    if lines:
        lines.append("They are compiled when needed: the first steps are slower, and no number changes.")
    return lines


def needs(config: Config, spec: ModelSpec, gpu: str, trains: bool) -> dict[str, Any]:
    """All that decides which kernels are compiled, and where they are kept."""
    settings = {
        key: mark.decides(value_of(config, key)) for key, mark in marked(Kernels).items()
        if trains or not key.startswith("train.")
    }
    extra = support.PORTABLE_EXTRA if config.kernels == support.PORTABLE else support.EXTRA
    return {
        "settings": settings, "trains": trains, "longest": config.longest,
        "jetrl": (__version__, sources()), "gpu": gpu, "torch": torch.__version__,
        "toolkit": str(support.cuda_toolkit()),
        "packages": [f"{p.name} {p.found}" for p in packages(extra)],
        "caches": {name: str(path) for name, path in support.caches().items()},
        "spec": repr(spec),
    }


def sources() -> str:
    """A digest of the code that decides what is compiled."""
    digest = hashlib.sha256()
    for room in _SOURCES:
        for path in sorted((_PACKAGE / room).rglob("*.py")):
            digest.update(path.relative_to(_PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def marker_path(needed: dict[str, Any]) -> Path:
    """Where it stands that these kernels are on disk."""
    text = json.dumps(needed, sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return support.flash_cache().parent / "compiled" / f"{name}.json"


def is_done(marker: Path) -> bool:
    """Whether the marker is there, and every cache that it counts on still has something in it."""
    try:
        kept = json_file(marker)["caches"]
    except (FileNotFoundError, ValueError, KeyError):
        return False
    return all(_filled(Path(folder)) for folder in kept)


def mark(marker: Path, outcome: Outcome) -> None:
    """Note on disk what was compiled."""
    folders = [str(path) for name, path in support.caches().items() if name != "torch.compile" and _filled(path)]
    marker.parent.mkdir(parents=True, exist_ok=True)
    part = marker.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({
        "kernels": outcome.found, "seconds": round(outcome.seconds, 1), "caches": folders,
        "seconds of one core": {name: round(seconds, 1) for name, seconds in outcome.spent.items()},
        "seconds until": {what: round(seconds, 1) for what, seconds in outcome.reached.items()},
    }, indent=1) + "\n")
    part.replace(marker)


def _filled(folder: Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is not None
