"""Programs that tests of the launcher run as ranks: `python rank_cases.py CASE`."""

from __future__ import annotations

import os
import signal
import sys
import time

from jetrl.errors import UserError
from jetrl.parallel import launch
from jetrl.parallel.agreement import same_everywhere, together
from jetrl.parallel.progress import PROGRESS


def fine() -> None:
    world = launch.join("cpu")
    add = world.counter("c")
    add(world.rank + 1)
    world.barrier()
    got = world.gather((world.rank, world.local_rank, os.environ["OMP_NUM_THREADS"], add(0)))
    print(f"all {got}", flush=True)


def mistake() -> None:
    world = launch.join("cpu")
    if world.rank == 1:
        raise UserError("reward.py: no such function.")
    world.barrier()


def mistake_of_all() -> None:
    """Each finds it by itself, at another moment."""
    world = launch.join("cpu")
    time.sleep(0.2 * world.rank)
    raise UserError("reward.py: no such function.")


def mistake_together() -> None:
    world = launch.join("cpu")
    with together(world):
        if world.rank == 1:
            raise UserError("reward.py: no such function.")
    world.barrier()


def bug() -> None:
    world = launch.join("cpu")
    if world.rank == 1:
        raise KeyError("our mistake")
    world.barrier()


def at_work() -> None:
    """Says when all are there, then works for a minute without a collective."""
    world = launch.join("cpu")
    world.barrier()
    print("ready", flush=True)
    time.sleep(60)


def computing() -> None:
    """Rank 0 has no collective to lose contact in, only its watch."""
    world = launch.join("cpu")
    if world.rank == 1:
        raise UserError("it gives up.")
    time.sleep(60)


def killed() -> None:
    world = launch.join("cpu")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def late() -> None:
    world = launch.join("cpu")
    launch.set_limit(2)
    launch.phase("rollout")
    world.barrier()
    if world.rank == 1:
        time.sleep(60)
    world.barrier()


def stopped() -> None:
    """A process that no longer runs, and does not hear SIGTERM."""
    from jetrl.parallel import watch

    watch.SILENCE = 6.0
    world = launch.join("cpu")
    launch.phase("update")
    if world.rank == 1:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGSTOP)
    world.barrier()


def absent() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(60)
    launch.join("cpu", start_limit=2)


def differ() -> None:
    world = launch.join("cpu")
    same_everywhere(world, version="1", config="a" if world.first else "b")


def stops() -> None:
    """As a run does: asked once it ends after the step, asked twice at once."""
    asked = []

    def ask(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    for number in launch.stop_signals():
        signal.signal(number, ask)
    world = launch.join("cpu")
    if world.first:
        print("ready", flush=True)
    while not any(world.gather(bool(asked))):
        time.sleep(0.1)
    if world.first:
        print("stopped after the step", flush=True)
        if "--slow" in sys.argv:
            time.sleep(60)
    raise SystemExit(130)


def quits() -> None:
    """A rank that another library ends."""
    world = launch.join("cpu")
    if world.rank == 1:
        print("cannot go on", file=sys.stderr, flush=True)
        os._exit(7)
    world.barrier()


def full() -> None:
    """A GPU without memory left, in the middle of a step."""
    from torch import OutOfMemoryError

    from jetrl.config import load_config
    from jetrl.config.shipped import find_recipe
    from jetrl.run.fit.advice import on_gpu, told_when_out_of_memory

    world = launch.join("cpu")
    config = on_gpu(load_config(find_recipe("quickstart")))
    launch.phase("update")
    with told_when_out_of_memory(config, world):
        if world.rank == 1:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        world.barrier()


def alone() -> None:
    world = launch.join("cpu")
    launch.set_limit(5)
    print(world.size, flush=True)
    raise UserError("no such file.")


def usage() -> None:
    raise SystemExit(2)


if __name__ == "__main__":
    case = globals()[sys.argv[1]]
    told = lambda error: str(error) if isinstance(error, UserError) else None  # noqa: E731
    if launch.is_rank():
        launch.as_rank(case, told, "--debug" in sys.argv)
    case()
    assert PROGRESS.calls == 0, "one process needs no collective"
