"""How the ranks of a run start and end: `join` and `leave` in each rank, and what becomes of a rank's error.

A run that several processes make ends with one message, whichever rank has the cause. `as_rank` runs a program as a
rank: an error is given to the other ranks (`parallel.watch`), written to the file that torch's launcher reads, and
reported once: by `parallel.spawn` where that started the ranks, else by the rank that has the cause. Ranks that only
lost contact say nothing. No torch is imported before `join`, so a signal in the first seconds is not lost.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jetrl.errors import UserError, status_of
from jetrl.parallel.progress import PROGRESS, came_by_lost_contact
from jetrl.process_exit import INTERRUPTED, end_with_parent
from jetrl.untrusted import printable

if TYPE_CHECKING:
    from jetrl.parallel.watch import Failure, Watch
    from jetrl.parallel.world import World

LIMIT = 600.0  # seconds that a collective may wait for a rank
START_LIMIT = 300.0  # seconds for all ranks to arrive
SPAWNED = "JETRL_SPAWNED"  # the folder in which ranks of `spawn` leave their process ids
LAUNCHER = "JETRL_LAUNCHER"  # the process of `spawn`
_OF_RANKS = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", SPAWNED, LAUNCHER,
}
_ELASTIC = "TORCHELASTIC_"
_HELD: dict[str, object] = {}  # the watch, and the store where this process serves it


def is_rank() -> bool:
    """Whether this process is one of several: torchrun, `spawn` (also of one) or a cluster's launcher has said so."""
    return "RANK" in os.environ and (int(os.environ.get("WORLD_SIZE", "1")) > 1 or SPAWNED in os.environ)


def outside() -> dict[str, str]:
    """This process's environment for programs that it starts: without what says that it is a rank, so that they are
    none, whatever library of ranks they use."""
    return {name: value for name, value in os.environ.items() if not (name in _OF_RANKS or name.startswith(_ELASTIC))}


def join(device: str = "auto", *, limit: float = LIMIT, start_limit: float = START_LIMIT) -> World:
    """Meet the other ranks, as the environment says (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    `ALONE` without these. With `device = "cpu"`, or where there is no GPU, by gloo; else also by NCCL, on the GPU that
    LOCAL_RANK names. Deterministic algorithms are on before, which NCCL reads as it starts. UserError naming the ranks
    that did not join within `start_limit` seconds, or if two ranks have one GPU. From then on a collective may wait
    `limit` seconds for a rank. On ranks other than 0 standard output is closed: rank 0 speaks for all.
    """
    if is_rank():  # read as torch loads: it warns of lost connections, and we tell the cause
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from jetrl.parallel.world import ALONE, World

    if not is_rank() or os.environ["WORLD_SIZE"] == "1":
        _ends_with_launcher(False)  # there is nobody to meet
        return ALONE
    import torch
    import torch.distributed as dist

    from jetrl.parallel.watch import Watch
    from jetrl.parallel.world import connect, store

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    world = World(rank, size, int(os.environ.get("LOCAL_RANK", "0")))
    if not world.first:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    gpu = device != "cpu" and torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(_gpu(world.local_rank, torch.cuda.device_count()))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and world.first:
        _HELD["server"] = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False
        )
    watch = Watch(connect(start_limit), rank, size, limit, lambda failure: _tell(failure))
    watch.beat()
    _await_all(watch, start_limit)
    watch.start()
    _HELD["watch"] = watch
    _ends_with_launcher(False)
    # The watch's limit names the ranks; the backend's own is what is left if all came and the network fails.
    backstop = _backstop(max(limit, start_limit))
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    store.cache_clear()
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store()), rank=rank, world_size=size, timeout=backstop
    )
    if gpu:
        _one_gpu_each(world)
    return world


def world_of_program() -> World:
    """For a program of the user's that torchrun starts: `join` at the first call, the same world after it.

    The ranks part when the program ends. One that ends by an error tells the others, which end too.
    """
    if (known := _HELD.get("world")) is not None:
        return known  # type: ignore[return-value]
    world = _HELD["world"] = join()
    if not world.alone:
        atexit.register(leave)
        before = sys.excepthook

        def shown(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            before(kind, error, trace)
            atexit.unregister(leave)
            status = _ended(error, lambda e: str(e) if isinstance(e, UserError) else None, False)
            if (watch := _watch()) is not None:
                watch.give_up(status)

        sys.excepthook = shown
    return world


def leave(status: int = 0) -> list[int]:
    """End what `join` began; every rank's `status`. All ranks call it at the end of the run; none goes before all have
    come, and the one that serves the store goes last."""
    if (watch := _watch()) is None:
        return [status]
    import torch.distributed as dist

    from jetrl.parallel.world import World, store

    sys.stdout.flush()
    sys.stderr.flush()
    found = World(watch.rank, watch.size).gather(status)
    watch.leave()
    dist.destroy_process_group()
    store.cache_clear()
    if "server" in _HELD:
        time.sleep(0.5)  # for the others to close their connections
    _HELD.clear()
    return found


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals by which a user asks to stop. To a rank of `spawn` those come as SIGINT, and SIGTERM means that the
    run has failed elsewhere."""
    return (signal.SIGINT,) if SPAWNED in os.environ else (signal.SIGINT, signal.SIGTERM, *hangup())


def hangup() -> tuple[signal.Signals, ...]:
    """SIGHUP, which a closed terminal sends; nothing where it is ignored, as under nohup, or where there is none."""
    number = getattr(signal, "SIGHUP", None)
    return () if number is None or signal.getsignal(number) == signal.SIG_IGN else (number,)


def set_limit(seconds: float) -> None:
    """From now on a collective may wait so long for a rank (`train.collective_timeout`). Alone: no effect."""
    if (watch := _watch()) is not None:
        from torch.distributed.distributed_c10d import _set_pg_timeout

        watch.limit = seconds
        _set_pg_timeout(_backstop(seconds))


def _backstop(limit: float) -> timedelta:
    """The backend's own time limit: later than the watch's, which can say whose fault it is."""
    return timedelta(seconds=1.5 * limit + 60)


def phase(name: str) -> None:
    """Note what this rank is doing, for messages about it."""
    PROGRESS.phase = name


def as_rank(
    run: Callable[[], object], message_of: Callable[[Exception], str | None], debug: bool = False
) -> NoReturn:
    """Run the program of a rank and end the process by SystemExit.

    `message_of` gives the message of a user's mistake, or None for an error of ours, which is shown with its traceback
    (so are mistakes, with `debug`). Mistakes end with status 2 (a full GPU with 3), interrupts with 130, other errors
    with 1. Another rank's failure ends this one with 1, without a word.
    """
    if SPAWNED in os.environ:
        _ends_with_launcher(True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        folder = Path(os.environ[SPAWNED])
        (folder / f"{os.environ['LOCAL_RANK']}.new").write_text(str(os.getpid()))
        (folder / f"{os.environ['LOCAL_RANK']}.new").rename(folder / f"{os.environ['LOCAL_RANK']}.pid")
    try:
        status = _ran(run)
    except BaseException as error:
        status = _ended(error, message_of, debug)
        if (watch := _watch()) is not None:
            watch.give_up(status)
        raise SystemExit(status) from None
    raise SystemExit(status)


def _ends_with_launcher(at_once: bool) -> None:
    """Until the ranks of `spawn` have met they end with it, as they would wait for its store; then the watch looks."""
    if LAUNCHER not in os.environ:
        return
    end_with_parent(signal.SIGKILL if at_once else 0)
    if at_once and os.getppid() != int(os.environ[LAUNCHER]):
        os._exit(1)  # it has ended before


def _ran(run: Callable[[], object]) -> int:
    """Run to the end; returns the exit status. Rank 0's is that of the run. Other ranks exit with 0 where rank 0 fails
    with the same status: the launcher stops all ranks as soon as one fails, and is to hear of it from rank 0."""
    from jetrl.parallel.watch import Failure

    status, rank = 0, int(os.environ["RANK"])
    try:
        run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    joined = _watch() is not None
    found = leave(status)
    if rank == 0 and status:
        text = "interrupted." if INTERRUPTED.is_set() else ""
        (_tell if text else _write)(Failure(0, "status", text, common=True, status=status))
    if rank != 0 and status:
        if joined and found[0] == status:
            return 0
        time.sleep(2.0)  # rank 0 may be about to end in the same way, and tells why
    return status


def _ended(error: BaseException, message_of: Callable[[Exception], str | None], debug: bool) -> int:
    """Tell of an error that ends this rank, unless another rank has the cause; returns the status."""
    from jetrl.parallel.watch import PERIOD, Failure

    rank = int(os.environ["RANK"])
    trace = "".join(traceback.format_exception(error))
    text = message_of(error) if isinstance(error, Exception) else None
    if isinstance(error, KeyboardInterrupt):
        failure = Failure(rank, "interrupted", "interrupted.", status=130)
    elif text is not None:
        failure = Failure(rank, "mistake", text, trace if debug else "", PROGRESS.common, status_of(error))
    else:
        failure = Failure(rank, "bug", f"{type(error).__name__}: {error}", trace)
    watch, cause = _watch(), failure
    if os.environ["WORLD_SIZE"] == "1":
        cause = failure = replace(failure, common=True)
    if watch is not None:
        try:
            if failure.kind != "interrupted" and not failure.common and not came_by_lost_contact(error):
                failure = replace(failure, common=watch.everywhere(failure.text))
            cause = watch.lost_contact(error, trace) if came_by_lost_contact(error) else watch.post(failure)
        except RuntimeError as gone:  # the store is gone, and with it the launcher or rank 0
            cause = failure if not came_by_lost_contact(error) else watch.store_lost(gone)
    if cause.rank != rank:
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    (_tell if watch is None else watch.tell_once)(cause)
    if watch is not None and "server" in _HELD:
        time.sleep(2.5 * PERIOD)  # for the others to read the cause from the store that ends with this process
    return cause.status


def _tell(failure: Failure) -> None:
    """The one message: to the launcher's file, and to the user where no `spawn` will do so."""
    _write(failure)
    if SPAWNED not in os.environ:
        trace = f"\n{failure.trace.rstrip()}" if failure.trace else ""
        print(printable(f"jetrl: {failure.message()}{trace}"), file=sys.stderr, flush=True)


def _write(failure: Failure) -> None:
    """What torch's launcher reads (`torch.distributed.elastic.multiprocessing.errors`), with our fields next to it."""
    from dataclasses import asdict

    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) is None:
        return
    extra = {"timestamp": str(int(time.time())), "failure": asdict(failure)}
    if failure.trace:
        extra["py_callstack"] = failure.trace
    Path(file).write_text(json.dumps({"message": {"message": failure.message(), "extraInfo": extra}}))


def _watch() -> Watch | None:
    return _HELD.get("watch")  # type: ignore[return-value]


def _await_all(watch: Watch, seconds: float) -> None:
    """Wait until every rank has given a sign of life."""
    end, pause = time.monotonic() + seconds, 0.01
    while late := watch.missing():
        if time.monotonic() > end:
            raise UserError(
                f"{len(late)} of {watch.size} ranks did not join within {seconds:.0f} s: {_some(late)}. Look at "
                "the output of their machines, and check that each can reach the first one."
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _gpu(local_rank: int, count: int) -> int:
    """The GPU of a rank. Some clusters show each process its own only."""
    if count > 1 and local_rank >= count:
        raise UserError(
            f"rank {os.environ['RANK']} is number {local_rank} on its machine, which has {count} GPUs. Start one "
            "process per GPU."
        )
    return local_rank if count > 1 else 0


def _one_gpu_each(world: World) -> None:
    import torch

    mine = (socket.gethostname(), str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
    all_of = world.gather(mine)
    if len(set(all_of)) < len(all_of):
        twice = next(gpu for gpu in all_of if all_of.count(gpu) > 1)
        ranks = [r for r, gpu in enumerate(all_of) if gpu == twice]
        PROGRESS.common = True
        raise UserError(f"ranks {_some(ranks)} share one GPU of {twice[0]}. Start one process per GPU.")
