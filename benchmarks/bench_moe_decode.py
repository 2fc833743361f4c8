"""Where a decode step goes: microseconds and launches by kernel, Qwen3-30B-A3B's shape with random weights, one GPU.

    python benchmarks/bench_moe_decode.py --batch 64 256 --variant "fp8 kv8" --out DIR

A few layers are enough, for all are alike. Two rollouts from the same prompts, one of `--more` tokens more, run under
torch's profiler; what the longer one has on top is decode steps alone. Kernels that start before the last one has ended
(programmatic dependent launch) overlap: their sum is more than the step, which is given next to it, without profiler.
Writes `moe_decode.json`. With `--trace`, also a trace of the longer rollout.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from bench_moe import SHAPE
from bench_rollout import measure, requests_of
from common import RESULTS, NoText, environment, require_gpu, save, split_variant, table
from torch.profiler import ProfilerActivity, profile

from jetrl.api import random_model
from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.types import WeightSet

SHORT = 9  # tokens of the shorter rollout


def profiled(engine: PagedEngine, batch: int, prompt: int, new: int, trace: Path | None) -> tuple[Counter[str], ...]:
    """Microseconds and launches by kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        engine.generate(requests_of(batch, prompt, new))
        torch.cuda.synchronize()
    if trace is not None:
        seen.export_chrome_trace(str(trace))
    spent, launches = Counter[str](), Counter[str]()
    for event in seen.key_averages():
        spent[event.key] += event.self_device_time_total
        launches[event.key] += event.count
    return spent, launches


def short_name(kernel: str) -> str:
    return kernel.replace("void ", "").partition("(")[0][:70]


def rows_of(engine: PagedEngine, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    engine.generate(requests_of(batch, args.prompt, SHORT + args.more))  # compiles, captures
    step = measure(engine, split_variant(args.variant)[0], batch, args.prompt, SHORT + args.more)["step_ms"]
    trace = args.out / f"moe_decode_{batch}.trace.json" if args.trace else None
    before = profiled(engine, batch, args.prompt, SHORT, None)
    after = profiled(engine, batch, args.prompt, SHORT + args.more, trace)
    spent, launches = ({k: (b[k] - a[k]) / args.more for k in b} for a, b in zip(before, after, strict=True))
    common: dict[str, Any] = {"batch": batch, "layers": args.layers, "context": args.prompt + SHORT + args.more // 2}
    rows = [
        common | {"kernel": short_name(name), "launches a step": launches[name], "us a step": us,
                  "us a layer": us / args.layers, "us a launch": us / max(launches[name], 1 / args.more)}
        for name, us in sorted(spent.items(), key=lambda item: -item[1]) if us > 0.3
    ]
    clock = {"kernel": "step, by the clock", "us a step": step * 1e3, "us a layer": step * 1e3 / args.layers}
    return [*rows, common | clock]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--variant", default="fp8 kv8", help="a precision, and kv8 for an FP8 KV cache")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1008)
    parser.add_argument("--more", type=int, default=32)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    require_gpu()
    args.out.mkdir(parents=True, exist_ok=True)
    precision, kv_cache, _ = split_variant(args.variant)
    model = random_model(SHAPE, precision, "cuda", args.layers, kv_cache, masters=False)
    rows: list[dict[str, Any]] = []
    for batch in args.batch:
        settings = EngineSettings(page_size=128, share_beginnings=False, max_tokens_per_step=8192, max_num_seqs=batch)
        engine = PagedEngine(model, NoText(), "flow", settings)
        engine.load(WeightSet(1, "flow", {}))
        found = rows_of(engine, batch, args)
        rows += [row | {"variant": args.variant, "environment": environment()} for row in found]
        save("moe_decode", rows, args.out)
        columns = ["batch", "kernel", "launches a step", "us a step", "us a layer", "us a launch"]
        print(table(found, columns), flush=True)
        del engine
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
