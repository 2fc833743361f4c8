"""Runs that are stopped in every way, each in a forked process; `test_resume.py` resumes them.

`python tests/stopped_runs.py FOLDER` prints how each ended: {"name": exit status, or minus the signal}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from latent_arch import LATENT
from ranks import load_heavy
from tiny import HYBRID, tiny_config

from jetrl.report.recorder import Recorder
from jetrl.run import loop
from jetrl.run.checkpoint import checkpoint, store

write = store.write

# name: (what is changed in the config, how it stops); after a count of `store.write` (the reference policy, then each
# checkpoint's state) or of `sync`, which runs six times a checkpoint: state.json, three folders, latest, checkpoints
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "before the first checkpoint": ({}, "write 1"),
    "state written, meta not": ({"rl.kl_coef": 0.01}, "write 3"),
    "meta written, not renamed": ({}, "sync 7"),
    "renamed, latest not": ({}, "sync 11"),
    "state half written": ({"rl.updates_per_step": 2}, "half file"),
    "row written, no checkpoint": ({"rl.updates_per_step": 2, "rl.kl_coef": 0.01}, "row 3"),
    "SIGTERM": ({"precision": "bf16", "train.master_dtype": "bfloat16"}, "SIGTERM 3"),
    "SIGTERM, experts": (
        {"model.arch.model_type": "qwen3_moe", "model.arch.num_experts": 5, "model.arch.num_experts_per_tok": 2,
         "model.arch.moe_intermediate_size": 72, "train.router_aux_loss_coef": 0.05}, "SIGTERM 3"),
    "SIGTERM, hybrid": (HYBRID | {"precision": "bf16"}, "SIGTERM 3"),
    "killed, latents": (LATENT, "sync 11"),
    "Ctrl-C": ({"precision": "fp8_rollout", "rl.updates_per_step": 2}, "SIGINT 1"),
}


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(function: Callable[..., Any], count: int, act: Callable[[], None]) -> Callable[..., Any]:
    """`function`, with `act` behind its call number `count`."""
    calls = 0

    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal calls
        result = function(*args, **options)
        calls += 1
        if calls == count:
            act()
        return result

    return wrapped


def half_file(folder: Path, *rest: Any) -> list[Path]:
    """Write half of the second checkpoint's bytes, then die."""
    written = write(folder, *rest)
    if folder.parent.name.endswith("000002"):
        for file in folder.iterdir():
            os.truncate(file, file.stat().st_size // 2)
        die()
    return written


def arrange(how: str) -> None:
    """Make this process stop as `how` says."""
    kind, _, number = how.rpartition(" ")
    if how == "half file":
        store.write = half_file
    elif kind == "write":
        store.write = after(store.write, int(number), die)
    elif kind == "sync":
        checkpoint.sync = after(checkpoint.sync, int(number), die)
    elif kind == "row":
        Recorder.write = after(Recorder.write, int(number) + 1, die)  # the first row is that of step 0
    else:  # a signal in the middle of a step
        loop.pack = after(loop.pack, int(number), lambda: os.kill(os.getpid(), getattr(signal, kind)))


def child(folder: Path, changes: dict[str, Any], how: str) -> int:
    """0: came to the end; 3: stopped in order, after a checkpoint."""
    arrange(how)
    config = tiny_config(folder, changes)
    with loop.StopRequest() as stop:
        return 0 if loop.run(config, folder / "runs" / "tiny", ["test"], stop) else 3


def main() -> None:
    """Fork a process a case, one after the other. Torch has not run before, so forking is safe."""
    load_heavy()
    root, ends = Path(sys.argv[1]), {}
    for name, (changes, how) in CASES.items():
        pid = os.fork()
        if pid == 0:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the process ends soon)
            os._exit(child(root / name, changes, how))
        ends[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
