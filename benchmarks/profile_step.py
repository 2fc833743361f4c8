"""The kernels of one decode step, or of one update, by the time that they take; a random model of a published shape.

    python benchmarks/profile_step.py --shape moonlight-16b-a3b --what decode --batch 64 256 --context 1024
    python benchmarks/profile_step.py --shape qwen3.5-9b --what update --precision bf16 --layers 16
    python benchmarks/profile_step.py --tiny --shape tiny-hybrid --what decode     # operators of a CPU

decode  `--batch` sequences with prompts of `--context` tokens; bursts of steps from CUDA graphs, as in a rollout, are
        timed, then profiled. All figures are of one step. Without CUDA graphs on a CPU.
update  `train.step.update` and publishing of `--tokens` in sequences of `--length`, `--micro` tokens a micro-batch,
        with the state of `bench_latent.py`'s and `bench_hybrid.py`'s updates: the second is timed, the third profiled.

"wall" is measured without the profiler; "kernels" is the sum of their times, and "idle" the time between the first and
the last kernel of the profiled calls in which none ran. Overlapping kernels count twice in the sum and once as busy.
Writes benchmarks/results/profile.json: new rows replace old ones of the same case.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from common import RESULTS, environment, median, require_gpu, save, saved_rows, table, timed
from torch.profiler import ProfilerActivity, profile
from whole_model import (
    Row,
    add_update_options,
    engine_of,
    must_offload,
    requests_of,
    spec_of,
    update_config,
    update_of,
    with_row,
)

from jetrl.api import random_model
from jetrl.engine.engine import PagedEngine
from jetrl.model.transformer import Transformer
from jetrl.spec import SHAPES

_CASE = ("shape", "what", "layers", "precision", "kv_cache", "kernels", "batch", "context", "tokens", "length", "micro",
         "checkpointing", "offload")


@dataclass(frozen=True, slots=True)
class Profiled:
    """What ran in `steps` steps. Times are microseconds of one step, as the device tells them; `span` is from the first
    kernel's begin to the last one's end, and `busy` the part of it in which something ran."""

    kernels: list[Row]
    total: float
    busy: float
    span: float


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of what (start, end) pairs cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def by_name(events: list[tuple[str, float, float]], steps: int) -> Profiled:
    """Events (name, start and end in microseconds) of `steps` steps as a table of one step, the longest first."""
    if not events:
        return Profiled([], 0.0, 0.0, 0.0)
    found: dict[str, list[float]] = {}
    for name, start, end in events:
        found.setdefault(name, []).append(end - start)
    total = sum(sum(us) for us in found.values())
    rows = [
        {"name": name, "us": sum(us) / steps, "calls": len(us) / steps, "us a call": sum(us) / len(us),
         "share": sum(us) / total if total else 0.0}
        for name, us in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]
    spans = [(start, end) for _, start, end in events]
    span = max(end for _, end in spans) - min(start for start, _ in spans)
    return Profiled(rows, total / steps, covered(spans) / steps, span / steps)


def profiled_calls(call: Callable[[], int], device: str) -> Profiled:
    """The device's events in a call, which says how many steps it was; on a CPU, operators without those inside."""
    if device == "cpu":
        with profile(activities=[ProfilerActivity.CPU]) as profiling:
            steps = call()
        events = [
            (event.name, float(event.time_range.start), event.time_range.start + event.self_cpu_time_total)
            for event in profiling.events()
        ]
        return by_name(events, steps)
    with profile(activities=[ProfilerActivity.CUDA]) as profiling:
        steps = call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return by_name(
        [
            (e.name, e.time_range.start, e.time_range.end) for e in profiling.events()
            if e.device_type == cuda and not getattr(e, "is_user_annotation", False)  # these span kernels
        ],
        steps,
    )


def decoded(engine: PagedEngine, batch: int, looks: int) -> tuple[int, float]:
    """Decode steps in so many looks at the engine, and milliseconds of each."""
    before, start = engine.drawn(), time.perf_counter()
    for _ in range(looks):
        report = engine.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    spent, after = (time.perf_counter() - start) * 1e3, engine.drawn()
    assert report.running == batch and report.waiting == 0, "sequences ended, or wait: they have no steps in common"
    steps = [after[id] - drawn for id, drawn in before.items()]
    assert len(set(steps)) == 1 and steps[0] > 0, f"sequences made different numbers of steps: {sorted(set(steps))}"
    return steps[0], spent / steps[0]


def decodes(args: argparse.Namespace) -> Iterator[tuple[Profiled, Row]]:
    """One decode step with each number of sequences."""
    model = random_model(
        args.shape, args.precision, args.device, args.layers, args.kv_cache, masters=False, kernels=args.kernels
    )
    for batch in args.batch:
        yield decode(model, args, batch)


def decode(model: Transformer, args: argparse.Namespace, batch: int) -> tuple[Profiled, Row]:
    """Looks at an engine of `batch` sequences, once all decode: some to warm up, some timed, some profiled."""
    looks = args.looks
    new = 8 * 5 * looks + batch * args.context // 8192 + 64  # no sequence ends: bursts have up to 8 steps
    engine = engine_of(model, batch, args.context + new)
    engine.add(requests_of(model.spec, batch, args.context, new))
    while True:  # prompts are computed in parts
        report, drawn = engine.step(), engine.drawn()
        if report.waiting == 0 and len(drawn) == batch and min(drawn.values()) > 0:
            break
    decoded(engine, batch, looks)  # compiles and captures
    times, keys = list[float](), list[float]()
    for _ in range(3):
        keys.append(args.context + next(iter(engine.drawn().values())))
        times.append(decoded(engine, batch, looks)[1])
    found = profiled_calls(lambda: decoded(engine, batch, looks)[0], args.device)
    engine.suspend()
    row = {"batch": batch, "context": args.context, "keys": keys[1], "kv_cache": args.kv_cache or "bf16"}
    return found, row | {"wall us": median(times) * 1e3, "spread %": 100 * (max(times) / min(times) - 1)}


def updates(args: argparse.Namespace) -> Iterator[tuple[Profiled, Row]]:
    """One update. The first update compiles, the second is timed, the third profiled."""
    spec, again = spec_of(args.shape, args.layers), args.checkpointing
    sizes = spec, args.precision, args.device, args.length, args.micro, args.kernels
    offload = args.offload == "on" or args.offload == "auto" and must_offload(*sizes, again)
    config = update_config(*sizes, offload, again)
    model = random_model(args.shape, args.precision, args.device, args.layers, masters=True, kernels=args.kernels)
    step = update_of(model, config, args.tokens, args.length)
    step()
    ms, peak = timed(step)

    def once() -> int:
        step()
        return 1

    found = profiled_calls(once, args.device)
    row = {"tokens": args.tokens, "length": args.length, "micro": args.micro, "checkpointing": again}
    row |= {"offload": offload, "wall us": ms * 1e3}
    yield found, row | ({"peak GiB": peak} if args.device == "cuda" else {})


def shown(found: Profiled, row: Row, top: int) -> str:
    """The figures of the step in a line, and the table of its kernels."""
    case = " ".join(f"{key}={row[key]}" for key in _CASE if key in row)
    line = (
        f"{case}: wall {row['wall us']:.0f} us, kernels {found.total:.0f} us in "
        f"{sum(k['calls'] for k in found.kernels):.0f} calls, busy {found.busy:.0f} us, wall less busy "
        f"{row['wall us'] - found.busy:.0f} us, idle {row['idle us']:.0f} us while profiled"
    )
    lines = [{**k, "name": k["name"][:110]} for k in found.kernels[:top]]
    return f"{line}\n{table(lines, ['us', 'calls', 'us a call', 'share', 'name'])}"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="moonlight-16b-a3b", choices=list(SHAPES))
    parser.add_argument("--what", choices=["decode", "update"], default="decode")
    parser.add_argument("--precision", choices=["fp8", "bf16"], default="fp8")
    parser.add_argument("--kv-cache", choices=["bf16", "fp8"], default="", help="decode: of keys and values")
    parser.add_argument("--kernels", default="auto", help="hopper or triton")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 256], help="decode: sequences")
    parser.add_argument("--context", type=int, default=1024, help="decode: tokens of a prompt")
    parser.add_argument("--looks", type=int, default=3, help="decode: bursts that are profiled, and timed three times")
    add_update_options(parser)
    parser.add_argument("--offload", choices=["auto", "on", "off"], default="auto",
                        help="update: moments in host memory; auto: where the GPU's is not enough, by prediction")
    parser.add_argument("--top", type=int, default=30, help="lines of the table; the file has all kernels")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU; nothing is kept")
    parser.add_argument("--name", default="profile")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    args.device = "cpu" if args.tiny else "cuda"
    if args.tiny:
        args.batch, args.context, args.looks = [3], 20, 2
        args.tokens, args.length, args.micro = 256, 64, 128
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parsed(arguments)
    if not args.tiny:
        require_gpu()
    for found, row in decodes(args) if args.what == "decode" else updates(args):
        row |= {"shape": args.shape, "what": args.what, "precision": args.precision, "kernels": args.kernels}
        row |= {"layers": spec_of(args.shape, args.layers).num_layers, "idle us": found.span - found.busy}
        if not found.kernels:
            raise SystemExit("the profiler saw no kernel: it needs a machine that lets CUPTI trace")
        row |= {"kernels us": found.total, "busy us": found.busy, "by kernel": found.kernels}
        print(shown(found, row, args.top), flush=True)
        if args.tiny:
            continue
        row["environment"] = environment()
        print(save(args.name, with_row(saved_rows(args.out / f"{args.name}.json"), row, _CASE), args.out))


if __name__ == "__main__":
    main()
