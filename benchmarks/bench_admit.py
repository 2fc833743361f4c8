"""Steps that admit prompts, and captures of CUDA graphs, in rollouts with more sequences than slots.

    python benchmarks/bench_admit.py                     # Qwen3-8B shape, FP8 + FP8 KV; about two minutes
    python benchmarks/bench_admit.py --layers 8 --rounds 2

Each variant runs the same requests `--rounds` times over. `kept`: cache and graphs stay between two rollouts; `freed`:
they do not. `mixed`: short steps with prompts have graphs, too; `plain`: they do not, as before. A row is a rollout:

    seconds      of the whole rollout, and tokens/s
    captures     CUDA graphs captured, and the seconds of it (the step that runs first is not in them)
    steps        those that computed prompts in at most 1024 rows; their milliseconds, median and 90 %
    host ms      until the host had launched such a step's forward pass, median: what the device waits for

All rollouts must give the same tokens and log-probs. The first variant compiles: its first row has that in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, SPEC, NoText, bits, require_gpu, save, table

from jetrl.api import random_model
from jetrl.engine.engine import PagedEngine
from jetrl.engine.graphs.mixed import _MOST_ROWS
from jetrl.engine.settings import EngineSettings
from jetrl.types import Request, SamplingParams, WeightSet

VARIANTS = {"freed plain": (0, False), "kept plain": (1 << 40, False), "freed mixed": (0, True),
            "kept mixed": (1 << 40, True)}


def requests_of(count: int, prompt: int, mean: int) -> list[Request]:
    """Random prompts of `prompt` tokens; log-normal lengths (sigma 0.8), at most eight times the mean."""
    g = np.random.default_rng(1)
    lengths = np.clip(g.lognormal(np.log(mean) - 0.32, 0.8, count), 8, 8 * mean).astype(int).tolist()
    return [
        Request(i, tuple(g.integers(1, SPEC.vocab_size, prompt).tolist()), SamplingParams(n, ignore_eos=True))
        for i, n in enumerate(lengths)
    ]


class Watch:
    """Times of the short steps with prompts of one engine."""

    def __init__(self, engine: PagedEngine) -> None:
        self.steps: list[float] = []
        self.host: list[float] = []
        runner = engine.runner
        run, hidden = runner.run, runner._hidden

        def timed_run(plan: Any, table: Any, steps: int = 1) -> Any:
            torch.cuda.synchronize()
            start = time.perf_counter()
            found = run(plan, table, steps)
            if not plan.is_decode and len(plan.tokens) <= _MOST_ROWS:
                self.steps.append((time.perf_counter() - start) * 1e3)
            return found

        def timed_hidden(plan: Any) -> Any:
            start = time.perf_counter()
            found = hidden(plan)
            if len(plan.tokens) <= _MOST_ROWS:
                self.host.append((time.perf_counter() - start) * 1e3)
            return found

        runner.run, runner._hidden = timed_run, timed_hidden  # type: ignore[method-assign]

    def take(self) -> dict[str, Any]:
        steps, host = self.steps or [float("nan")], self.host or [float("nan")]
        found = {
            "steps": len(self.steps), "ms": statistics.median(steps), "ms 90 %": float(np.quantile(steps, 0.9)),
            "host ms": statistics.median(host),
        }
        self.steps.clear()
        self.host.clear()
        return found


def measure(model: Any, name: str, requests: list[Request], rounds: int, slots: int) -> tuple[list[Any], list[Any]]:
    """Rows of one variant, and what each rollout gave."""
    keep, mixed = VARIANTS[name]
    settings = EngineSettings(
        page_size=128, share_beginnings=False, max_tokens_per_step=8192, max_num_seqs=slots, keep_bytes=keep
    )
    engine = PagedEngine(model, NoText(), "flow", settings)
    engine.runner.mixed_graphs = mixed
    engine.load(WeightSet(1, "flow", {}))
    watch, rows, found = Watch(engine), [], []
    for i in range(rounds):
        start = time.perf_counter()
        completions = engine.generate(requests)
        seconds = time.perf_counter() - start
        metrics = engine.take_metrics()
        found.append([bits(c) for c in completions])
        rows.append({
            "variant": name, "round": i, "seconds": seconds,
            "tokens/s": sum(len(c.tokens) for c in completions) / seconds,
            "captures": int(metrics["perf/graph_captures"]), "capture s": metrics["perf/graph_capture_s"],
            **watch.take(), "kept GiB": metrics["perf/kv_cache_kept_gib"],
            "reserved GiB": torch.cuda.memory_reserved() / 2**30,
        })
    return rows, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=SPEC.num_layers)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--mean", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    require_gpu()
    model = random_model("qwen3-8b", "fp8", "cuda", args.layers, "fp8")
    requests = requests_of(args.count, args.prompt, args.mean)
    rows: list[dict[str, Any]] = []
    expected, failed = None, []
    for name in args.variants:
        try:
            made, found = measure(model, name, requests, args.rounds, args.slots)
        except Exception:
            failed.append(name)
            traceback.print_exc()
            continue
        rows += made
        expected = found[0] if expected is None else expected
        for row, one in zip(made, found, strict=True):
            row["bits"] = "equal" if one == expected else "DIFFERENT"
        print(table(made, list(made[0])), flush=True)
        torch.cuda.empty_cache()
    if rows:
        print(table(rows, list(rows[0])))
        save("admit", rows, args.out)
    if failed or any(row["bits"] != "equal" for row in rows):
        raise SystemExit(f"failed: {failed}; different bits: {[r['variant'] for r in rows if r['bits'] != 'equal']}")


if __name__ == "__main__":
    main()
