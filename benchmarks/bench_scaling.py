"""Several GPUs against one, the same work for each: whole steps, ragged rollouts, publishing, exchange, memory.

    python benchmarks/bench_scaling.py --ranks 1 2                # on as many GPUs as the largest number names
    python benchmarks/bench_scaling.py --ranks 1 2 4 --parts step --rounds 3

Each number of ranks is a run of its own (`parallel.spawn`), with random weights of Qwen3-8B's shape in FP8 with an FP8
cache, BF16 masters and moments, FP32 gradients. With more GPUs than a run needs, runs go on side by side. Parts:

    step      the program's own RL steps (`loop.train_step`) on stand-in problems, `--prompts` groups of 8 answers a
              rank, in turns with `train.reduction` fast, fixed, and lanes (fixed with `--lanes`), and without an
              exchange ("alone"): there zeros take the place of what would arrive, so what is left is the time of
              everything but the communication of the update
    ragged    answers of log-normal lengths (sigma 0.8), `--answers` a rank over `--slots` slots: each rank its own
              part without the others (one GPU's time, and the static split's, which is the slowest rank's), and all
              ranks by the shared queue
    publish   publishing, all ranks ready

The first step of a run compiles kernels and is reported apart. Writes
`benchmarks/results/scaling.json`; prints a table.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from common import RESULTS, SPEC, ask, emit, environment, median, save, table
from recipes_on_random import stand_in_config
from simulate_queue import lengths

from jetrl.config import Config
from jetrl.model.master import masters_of
from jetrl.model.transformer import Transformer
from jetrl.parallel import launch
from jetrl.parallel.spawn import spawn
from jetrl.parallel.world import World
from jetrl.report.console import Display
from jetrl.report.recorder import NoRecorder
from jetrl.rollout.requests import STEP_STRIDE, RolloutRequest
from jetrl.rollout.rollout import Rollout, roll_out
from jetrl.run import loop
from jetrl.run.checkpoint import state
from jetrl.run.loop import Clock, train_step
from jetrl.run.setup import Session, build
from jetrl.run.stopping import StopRequest
from jetrl.spec import ModelSpec
from jetrl.train.publish import publish
from jetrl.types import Problem, Prompt, Request, SamplingParams

TINY = replace(SPEC, vocab_size=4096, hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=64)
KEPT = ("time/", "perf/", "parity/", "rollout/", "response_length/", "policy/grad_norm", "policy/loss")


class Kept(NoRecorder):
    """Keeps the rows of metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append(dict(metrics))

    def append_samples(self, lines: Any) -> None:
        pass


def config_of(args: argparse.Namespace, world: World, spec: ModelSpec) -> Config:
    """The settings of all parts; every rank writes the same stand-ins, to a folder of its own."""
    folder = Path(args.folder) / str(world.rank)
    config = stand_in_config("gsm8k_qwen3_8b", folder, spec, 1 << 40, args.response, "auto")
    dtype = args.masters
    train = config.train.model_copy(update={
        "master_dtype": dtype, "optimizer_dtype": "bfloat16", "offload_optimizer": args.offload, "steps": 1 << 20,
        "grad_dtype": "float32", "max_tokens_per_gpu": args.micro_tokens, "reduction": "fixed",
        "activation_checkpointing": args.checkpointing,
    })
    rollout = config.rollout.model_copy(update={
        "prompts_per_step": args.prompts * world.size, "group_size": 8, "max_num_seqs": args.slots,
    })
    return config.model_copy(update={
        "train": train, "rollout": rollout, "rl": config.rl.model_copy(update={"dynamic_sampling": "off"}),
        "eval": config.eval.model_copy(update={"eval_interval": 0}), "num_threads": 4,
    })


@torch.no_grad()
def fill(model: Transformer) -> None:
    """Random weights, drawn whole on the device one by one: the same for any number of ranks."""
    for number, master in enumerate(masters_of(model).values()):
        p, cut = master.param, master.shard
        generator = torch.Generator(p.device).manual_seed(number)
        whole = torch.empty(master.whole_shape(), dtype=p.dtype, device=p.device)
        if p.ndim > 1:
            whole.normal_(0, 0.02, generator=generator)
        else:
            whole.fill_(1.0)
        p.copy_(whole if cut is None else cut.own(whole))


def peak(world: World, reset: bool = True) -> list[float]:
    """GiB of allocated memory at each rank's peak since the last call."""
    if not torch.cuda.is_available():
        return world.gather(0.0)
    found = world.gather(torch.cuda.max_memory_allocated() / 2**30)
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return found


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def no_exchange() -> Iterator[None]:
    """Gradients do not travel: zeros that lie there already take the place of what would arrive."""
    kept, zeros = World.send_rows, [torch.empty(0)]

    def stay(
        self: World, whole: torch.Tensor, rows: Sequence[int], senders: int
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        shape = (senders, rows[self.rank], *whole.shape[1:])
        if zeros[0].numel() < math.prod(shape):
            zeros[0] = whole.new_zeros(math.prod(shape))
        return zeros[0][: math.prod(shape)].view(shape), lambda: None

    World.send_rows = stay  # type: ignore[method-assign]
    try:
        yield
    finally:
        World.send_rows = kept  # type: ignore[method-assign]


@contextmanager
def profiled(path: Path | None) -> Iterator[None]:
    """The next updates' kernels, added up by name, are written to `path`."""
    if path is None:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    kept = loop.update

    def update(*given: Any) -> dict[str, float]:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            stats = kept(*given)
        path.write_text(found.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=90))
        return stats

    loop.update = update  # type: ignore[assignment]
    try:
        yield
    finally:
        loop.update = kept


def steps(session: Session, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """RL steps, the first of which compiles; then rounds of all variants."""
    world = session.world
    # one GPU has no room for the gradients of two lanes, and nothing to exchange
    variants = [v for v in args.variants if not (world.alone and (v.endswith("alone") or v == "lanes"))]
    order = [("first", variants[0])] + [(str(i), v) for i in range(args.rounds) for v in variants]
    recorder, stop, config = Kept(), StopRequest(world), session.config
    with Display(1 << 20, "scaling") as display:
        clock = Clock(display, stop)
        for number, variant in order:
            kind, _, alone = variant.partition(" ")
            lanes = args.lanes if kind == "lanes" else None
            train = config.train.model_copy(
                update={"reduction": "fast" if kind == "fast" else "fixed", "reduction_lanes": lanes}
            )
            session = replace(session, config=config.model_copy(update={"train": train}))
            world.barrier()
            sync()
            peak(world)
            start = time.perf_counter()
            if alone:
                with no_exchange():
                    train_step(session, recorder, clock, Path(args.folder), stop)
            else:
                chosen = args.profile and world.first and number == "0" and variant
                with profiled(args.out / f"profile_{world.size}_{variant}.txt" if chosen else None):
                    train_step(session, recorder, clock, Path(args.folder), stop)
            sync()
            world.barrier()
            seconds, row = time.perf_counter() - start, recorder.rows[-1]
            tokens = row["response_length/mean"] * session.config.rollout.prompts_per_step * 8
            yield {
                "part": "step", "round": number, "variant": variant, "seconds": seconds,
                "update_s": row["time/update"], "rollout_s": row["time/rollout"], "publish_s": row["time/publish"],
                "tokens": tokens, "tokens_per_s": tokens / seconds, "peak GiB": max(peaks := peak(world)),
                "peaks GiB": peaks, "parity": row["parity/logprob_abs_diff_max"],
                "metrics": {k: v for k, v in row.items() if k.startswith(KEPT)},
            }


class Ragged:
    """An engine whose requests end at lengths that a table gives."""

    def __init__(self, engine: Any, table: Sequence[int]) -> None:
        self._engine, self._table = engine, table

    def add(self, requests: Sequence[Request]) -> None:
        self._engine.add([
            replace(r, sampling=replace(r.sampling, max_tokens=self._table[r.id % STEP_STRIDE])) for r in requests
        ])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def ragged(session: Session, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Answers of unequal length: each rank alone, and all by the shared queue, in turns."""
    world, number = session.world, args.answers
    of_all = lengths(number * world.size, 8, 0.0, random.Random(3), args.mean, 0.8, args.cap)
    draw = random.Random(5)
    spec = session.model.spec
    prompts = [
        Prompt(i, Problem(str(i), "?", ""), tuple(draw.randrange(1, spec.vocab_size) for _ in range(args.prompt)))
        for i in range(len(of_all) // 8)
    ]
    sampling = SamplingParams(args.cap, ignore_eos=True)
    asked = RolloutRequest(sampling, 8, 0)
    engine = Ragged(session.engine, of_all)
    own = range(number * world.rank // 8, number * (world.rank + 1) // 8)

    def split() -> Rollout:
        mine = replace(asked, first_id=own.start * 8)
        return roll_out(engine, [prompts[i] for i in own], mine)

    def shared() -> Rollout:
        return roll_out(engine, prompts, asked, queues=session.queues)

    for i in range(-1, args.rounds):
        for name, part in (("split", split), ("shared", shared)):
            if world.alone and name == "shared":
                continue
            session.engine.load(publish(session.model, session.progress.weight_version, session.flow_digest))
            world.barrier()
            sync()
            start = time.perf_counter()
            result = part()
            seconds = time.perf_counter() - start
            every = world.gather(seconds)
            yield {
                "part": "ragged", "round": "first" if i < 0 else str(i), "variant": name, "seconds": max(every),
                "by_rank": every, "tokens": sum(of_all), "tokens_per_s": sum(of_all) / max(every),
                "longest": max(of_all), "tokens by rank": [sum(of_all[r * number : (r + 1) * number])
                                                         for r in range(world.size)],
                "parts": [(p.trajectories, p.tokens, p.busy, p.idle) for p in result.parts],
            }


def publishing(session: Session, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds from all ranks ready to all ranks done."""
    world, found = session.world, []
    for _ in range(3 + args.rounds * 3):
        world.barrier()
        sync()
        start = time.perf_counter()
        publish(session.model, session.progress.weight_version, session.flow_digest)
        sync()
        found.append(max(world.gather(time.perf_counter() - start)))
    yield {"part": "publish", "round": "0", "variant": "publish", "seconds": median(found[3:]), "all": found}


PARTS: dict[str, Callable[[Session, argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "publish": publishing, "ragged": ragged, "step": steps,
}


def measure(args: argparse.Namespace) -> None:
    """One rank of a run."""
    world = launch.join()
    spec = TINY if args.tiny else SPEC
    spec = replace(spec, num_layers=args.layers or (2 if args.tiny else spec.num_layers))
    start = time.perf_counter()
    session = build(config_of(args, world, spec), weights=False, world=world)
    fill(session.model)
    state.begin(session, Path(args.folder))
    session.engine.load(publish(session.model, 0, session.flow_digest))
    sync()
    built = time.perf_counter() - start
    common = {"ranks": world.size, "layers": spec.num_layers, "environment": environment(), "build_s": built}
    for part in args.parts:
        for row in PARTS[part](session, args):
            if world.first:
                emit(common | row)
    session.close()
    launch.leave()


def rows_of(wave: Sequence[tuple[int, list[int]]], folder: str) -> Iterator[dict[str, Any]]:
    """The rows of runs that go on side by side, as they come. RuntimeError if one fails."""
    found: SimpleQueue[Any] = SimpleQueue()

    def run(number: int, size: int, gpus: list[int]) -> None:
        on = ["env", f"CUDA_VISIBLE_DEVICES={','.join(map(str, gpus))}"] if gpus else []
        (own := Path(folder) / str(number)).mkdir()
        command = [*on, sys.executable, __file__, *sys.argv[1:], "--launch", str(size), "--folder", str(own)]
        try:
            for row in ask(command):
                found.put(row)
            found.put(None)
        except RuntimeError as error:
            found.put(error)

    for number, (size, gpus) in enumerate(wave):
        Thread(target=run, args=(number, size, gpus), daemon=True).start()
    left, failed = len(wave), list[RuntimeError]()
    while left:
        match found.get():
            case dict() as row:
                yield row
            case RuntimeError() as error:
                left, failed = left - 1, [*failed, error]
            case _:
                left -= 1
    if failed:
        raise failed[0]


def waves(sizes: Sequence[int], gpus: int) -> list[list[tuple[int, list[int]]]]:
    """Runs that go on side by side: the sizes in their order, each wave on GPUs of its own."""
    found: list[list[tuple[int, list[int]]]] = []
    free: list[int] = []
    for size in sizes:
        if len(free) < size:
            free = list(range(gpus))
            found.append([])
        found[-1].append((size, free[:size] if gpus else []))
        free = free[size:]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8, help="of a step, for each rank")
    parser.add_argument("--response", type=int, default=1024, help="tokens of an answer of a step")
    parser.add_argument("--micro-tokens", type=int, default=6144)
    parser.add_argument("--masters", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument(
        "--variants", nargs="+", default=["fast", "lanes", "fixed", "fast alone", "lanes alone"], help="of steps"
    )
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--answers", type=int, default=512, help="of a ragged rollout, for each rank")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--mean", type=float, default=512.0)
    parser.add_argument("--cap", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tiny", action="store_true", help="a model and sizes for trying the script on a CPU")
    parser.add_argument("--profile", action="store_true", help="write the kernels of an update next to the figures")
    parser.add_argument("--launch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="scaling")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if "RANK" in os.environ:
        return measure(args)
    if args.launch:
        raise SystemExit(spawn(args.launch, sys.argv[1:], program=(__file__,)))
    rows: list[dict[str, Any]] = []
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for wave in waves(args.ranks, gpus):
        with tempfile.TemporaryDirectory() as folder:
            for row in rows_of(wave, folder):
                rows.append(row)
                save(args.name, rows, args.out)
                print(f"{row['ranks']} ranks  {row['part']:<8}{row['variant']:<12}{row['round']:<6}"
                      f"{row['seconds']:9.3f} s  {row.get('tokens_per_s', math.nan):8.0f} tokens/s  "
                      f"{row.get('peak GiB', math.nan):6.1f} GiB", flush=True)
    print(table(summary(rows), ["what", "ranks", "median", "least", "most", "against"]))


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table of goals, from medians over rounds; least and most of them beside."""
    def of(ranks: int, part: str, variant: str, key: str) -> list[float]:
        chosen = (r for r in rows if (r["ranks"], r["part"], r["variant"]) == (ranks, part, variant))
        return sorted(r[key] for r in chosen if r["round"] != "first")

    def line(what: str, ranks: int, values: Sequence[float], against: float | None = None) -> dict[str, Any]:
        return {"what": what, "ranks": ranks, "median": median(list(values)), "least": values[0], "most": values[-1],
                "against": "" if against is None else against}

    found: list[dict[str, Any]] = []
    one = of(1, "step", "fast", "tokens_per_s")
    for ranks in sorted({r["ranks"] for r in rows}):
        for variant in ("fast", "lanes", "fixed"):
            if values := of(ranks, "step", variant, "tokens_per_s"):
                base = median(one) if one else None
                found.append(line(f"step {variant}, tokens/s", ranks, values, base and median(values) / base))
                update = of(ranks, "step", variant, "update_s")
                found.append(line(f"step {variant}, update s", ranks, update))
                if bare := of(ranks, "step", f"{variant} alone", "update_s"):
                    share = 1 - median(bare) / median(update)
                    found.append(line(f"step {variant}, update without exchange s", ranks, bare, share))
                peaks = of(ranks, "step", variant, "peak GiB")
                alone = max(of(1, "step", variant, "peak GiB"), default=0.0)
                found.append(line(f"step {variant}, peak GiB", ranks, peaks, alone and max(peaks) / alone))
        if split := [r for r in rows if (r["ranks"], r["variant"]) == (ranks, "split") and r["round"] != "first"]:
            rates = [sum(n / s for n, s in zip(r["tokens by rank"], r["by_rank"], strict=True)) / ranks for r in split]
            base = median(rates)
            found.append(line("ragged, one GPU's part, tokens/s", 1, sorted(rates)))
            for variant in ("split", "shared"):
                if values := of(ranks, "ragged", variant, "tokens_per_s"):
                    found.append(line(f"ragged {variant}, tokens/s", ranks, values, median(values) / base))
        if values := of(ranks, "publish", "publish", "seconds"):
            found.append(line("publish, ms", ranks, [1000 * v for v in values]))
    return found


if __name__ == "__main__":
    main()
