"""Runs of several ranks that fail in every way, each rank a forked process; `test_failing_ranks.py` looks at them.

`python tests/failing_ranks.py FOLDER` prints for each case how its ranks ended and after how many seconds. Each rank
is `jetrl train FOLDER/CASE/tiny.toml` as a cluster's launcher would start it: RANK and the like, and no torchrun. What
it says on standard error is in FOLDER/CASE/RANK.txt.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ranks import load_heavy
from stopped_runs import after, arrange, die
from tiny import tiny_config

import jetrl
from jetrl import cli
from jetrl.config import to_toml
from jetrl.engine.engine import PagedEngine
from jetrl.parallel import watch
from jetrl.run import gather, loop
from jetrl.train import reduction

FIXED: dict[str, Any] = {
    "train.reduction": "fixed", "train.max_tokens_per_gpu": 64, "train.steps": 2, "eval.eval_interval": 2,
    "checkpoint.save_interval": 1, "checkpoint.keep": 9,
}
UNEVEN = FIXED | {  # nothing divides: 15 answers of 3 prompts, in 2 slots a rank, on 4 ranks; 5 held-out problems
    "rollout.prompts_per_step": 3, "rollout.group_size": 5, "rollout.max_num_seqs": 2, "task.num_eval": 5,
    "rl.updates_per_step": 2,
}
AT_ONCE = 3
FILES = {
    "bad.py": "def reward(completions, **_):\n    return [0.0] * (len(completions) - 1)\n",
    "absent.py": "import os\nif os.environ.get('RANK') == '1':\n    raise OSError('no such game server')\n"
                 "from one_turn import OneTurn\n",
    "one_turn.py": """\
import os


class OneTurn:
    def reset(self, problem):
        if os.environ.get("RANK") == "1":
            raise OSError("no such game server")
        return "1+1="

    def step(self, action):
        return "", sum(c.isdigit() for c in action) / 10, True
""",
}
TALKING = FIXED | {
    "task.name": "environment", "task.params": {}, "task.reward": None,
    "environment.name": "{folder}/one_turn.py:OneTurn",
}


@dataclass(frozen=True)
class Case:
    """`fails`: what rank R arranges; ranks not in it run undisturbed. `words`: more of rank R's command line."""

    changes: Mapping[str, Any] = field(default_factory=lambda: FIXED)
    fails: Mapping[int, Callable[[], None]] = field(default_factory=dict)
    words: Mapping[int, str] = field(default_factory=dict)
    size: int = 2
    limit: float = 30.0  # of a collective
    resumed: int = 0  # afterwards by so many ranks, undisturbed


def in_update(act: Callable[[], None]) -> None:
    """In the backward pass of step 2, while gradients are on their way."""
    update = loop.update

    def disturbed(learner: Any, batches: Any, config: Any, step: int, *told: Any) -> Any:
        if step == 2:
            reduction.Exchanged.done = after(reduction.Exchanged.done, 3, act)  # type: ignore[method-assign]
        return update(learner, batches, config, step, *told)

    loop.update = disturbed  # type: ignore[assignment]


def in_rollout(act: Callable[[], None]) -> None:
    """Among the answers of step 2."""
    gathered = loop.gather

    def disturbed(session: Any, clock: Any, step: int) -> Any:
        if step == 2:
            PagedEngine.step = after(PagedEngine.step, 3, act)  # type: ignore[method-assign]
        return gathered(session, clock, step)

    loop.gather = disturbed


def for_ever() -> None:
    while True:
        time.sleep(1)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def our_bug(*_: Any, **__: Any) -> None:
    raise KeyError("a part of the reward")


def another_version() -> None:
    jetrl.__version__ = "0.0.1"


CASES: dict[str, Case] = {
    "one process": Case(size=1),
    "uneven, one process": Case(UNEVEN, size=1),
    "uneven, four ranks": Case(UNEVEN, size=4),
    "killed in the rollout": Case(fails={1: lambda: in_rollout(die)}, resumed=2),
    "killed in the update": Case(fails={1: lambda: in_update(die)}, resumed=1),
    "first rank killed in the update": Case(fails={0: lambda: in_update(die)}, resumed=1),
    "first rank killed in the checkpoint": Case(fails={0: lambda: arrange("sync 5")}, resumed=2),
    "stopped in the rollout": Case(fails={1: lambda: in_rollout(stop)}),
    "first rank stopped in the update": Case(fails={0: lambda: in_update(stop)}),
    "hangs in the rollout": Case(fails={1: lambda: in_rollout(for_ever)}, limit=3.0),
    "hangs in the update": Case(fails={1: lambda: in_update(for_ever)}, limit=3.0),
    "out of memory": Case(fails={1: lambda: in_update(out_of_memory)}, resumed=1),
    "another config": Case(words={1: "train.lr=1e-4"}),
    "another version": Case(fails={1: another_version}),
    "a reward that is wrong": Case(FIXED | {"task.reward": "{folder}/bad.py:reward"}),
    "a bug in scoring": Case(fails={0: lambda: setattr(gather, "rewards_of", our_bug)}),
    "an environment that is absent": Case(TALKING | {"environment.name": "{folder}/absent.py:OneTurn"}),
    # an untrained policy does not come to an end, and at a limit the environment has given nothing
    "an environment that fails": Case(TALKING | {"train.steps": 1, "environment.at_limit": "zero"}),
}


def rank_of(case: Case, rank: int, words: list[str], log: Path) -> int:
    """Become a rank and run the command; returns its status. In a forked process."""
    with log.open("a") as file:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    if act := case.fails.get(rank):
        act()
    sys.argv = ["jetrl", "train", *words]
    try:
        cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


class Running:
    """The ranks of a case, as processes."""

    def __init__(self, name: str, case: Case, folder: Path, *more: str) -> None:
        self.name, self.case, self.folder = name, case, folder
        self.pids: list[int] = []
        self.ends: dict[int, int] = {}  # a status, or minus a signal, by rank
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        self.start = time.monotonic()
        for rank in range(case.size):
            words = [str(folder / "tiny.toml"), *more, *case.words.get(rank, "").split()]
            if (pid := os.fork()) == 0:
                if case.size > 1:
                    os.environ |= where | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.size)}
                os._exit(rank_of(case, rank, words, folder / f"{rank}.txt"))
            self.pids.append(pid)

    def ended(self) -> dict[str, Any] | None:
        """How all ranks ended and after how many seconds, or None. Those that are stopped are killed at last; after a
        minute all are."""
        seconds, states = time.monotonic() - self.start, []
        for rank, pid in enumerate(self.pids):
            if rank not in self.ends:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.ends[rank] = os.waitstatus_to_exitcode(status)
                else:
                    states.append(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0])
        if seconds < 60 and any(state != "T" for state in states):
            return None
        for rank, pid in enumerate(self.pids):
            if rank not in self.ends:
                os.kill(pid, signal.SIGKILL)
                self.ends[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return {"ends": [self.ends[rank] for rank in range(len(self.pids))], "seconds": seconds}


def main() -> None:
    """Some cases at a time, most of which wait. Torch has not computed before, so forking is safe."""
    load_heavy()
    watch.PERIOD, watch.SILENCE, watch.GRACE, watch.PATIENCE = 0.2, 8.0, 1.0, 3.0
    root, found, running = Path(sys.argv[1]), {}, []
    waiting = [(name, CASES[name]) for name in sys.argv[2:] or CASES]
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name, case = waiting.pop(0)
            running.append(Running(name, case, prepared(root / name, case)))
        time.sleep(0.05)
        for one in list(running):
            if (end := one.ended()) is None:
                continue
            running.remove(one)
            if one.name in found:
                found[one.name]["resumed"] = end
                continue
            found[one.name] = end
            if one.case.resumed:
                running.append(Running(one.name, Case(size=one.case.resumed), one.folder, "--resume"))
    print(json.dumps(found))


def prepared(folder: Path, case: Case) -> Path:
    """The folder of a case, with its recipe and the user's files."""
    changes: dict[str, Any] = {"train.collective_timeout": case.limit}
    changes |= {k: v.format(folder=folder) if isinstance(v, str) else v for k, v in case.changes.items()}
    config = tiny_config(folder, changes)
    for file, text in FILES.items():
        (folder / file).write_text(text)
    (folder / "tiny.toml").write_text(to_toml(config))
    return folder


if __name__ == "__main__":
    main()
