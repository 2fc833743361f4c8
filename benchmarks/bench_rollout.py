"""Rollout end to end: the engine with a model of Qwen3-8B's shape and random weights, recording every token's log-prob.

    python benchmarks/bench_rollout.py --precision fp8 bf16 --batch 64 256 --prompt 512 --new 1024 --peer "COMMAND"
    python benchmarks/bench_rollout.py --batch 64 --prompt 8192 --new 512 --name rollout_long    # long context

Each measurement is a separate process. They take turns for `--rounds`: ours in each precision, then `--peer`'s.
`--peer` is a command that measures another engine with the same sizes and prints `VBENCH {json}` lines with `engine`
(name and version), `batch` and `out_tok_s`, and if it can `decode_tok_s`, `seconds` and `peak_gib`. Filled in are
`{dtype}`, `{kv}` (the cache: auto or fp8), `{batch}` (comma-separated), `{prompt}`, `{new}` and `{layers}`; for
`table.py` also `{group}` (samples that share a prompt), `{slots}` (sequences at a time, 0: the batch) and `{ragged}`
(sigma,mean,cap of the lengths of `bench_workloads.ragged_lengths`, or nothing; it must then report their sum as
`out_tokens`). It must make room for prompt + new tokens itself. The first, short generation at each batch size compiles
kernels and is not counted. Writes `results/rollout.json`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    COPY_TBPS,
    RESULTS,
    SPEC,
    NoText,
    ask,
    emit,
    environment,
    median,
    quantiles,
    require_gpu,
    save,
    split_variant,
    table,
)

from jetrl.api import random_model
from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.types import Request, SamplingParams, StepReport, WeightSet

PEER_MARK = "VBENCH "


def floor_ms(
    precision: str, batch: int, context: float, layers: int = SPEC.num_layers, kv_cache: str = "bf16",
    tbps: float = COPY_TBPS,
) -> float:
    """Milliseconds of a decode step that only reads each weight and each cached key and value, once, at `tbps`."""
    linear = sum(
        SPEC.hidden_size * sum(sections) for sections in (SPEC.qkv_sections, SPEC.gate_up_sections)
    ) + SPEC.hidden_size * (SPEC.num_heads * SPEC.head_dim + SPEC.intermediate_size)
    weights = layers * linear * (1 if precision == "fp8" else 2) + 2 * SPEC.vocab_size * SPEC.hidden_size
    head = SPEC.head_dim + 2 if kv_cache == "fp8" else SPEC.head_dim * 2  # a head's codes and its scale
    cache = batch * context * layers * 2 * SPEC.num_kv_heads * head
    return (weights + cache) / tbps / 1e9


class DecodeClock:
    """Times the looks at the engine in which every sequence drew a token and none computed its prompt."""

    def __init__(self, batch: int, prompt: int) -> None:
        self.batch, self.prompt = batch, prompt
        self.drawn, self.decoding = 0, False
        self.steps: list[float] = []  # milliseconds a step, of each look
        self.milliseconds = self.tokens = self.keys = 0.0
        self._last = time.perf_counter()

    def on_step(self, report: StepReport) -> None:
        """A look now, as `engine.generate` calls it; the first one's time, which ends at no step, is not used."""
        before, self._last = self._last, time.perf_counter()
        self.look(report.generated_tokens, (self._last - before) * 1e3)

    def look(self, generated: int, milliseconds: float) -> None:
        """`generated` tokens in total have been drawn, `milliseconds` after the last look."""
        new, before = generated - self.drawn, self.drawn
        self.drawn = generated
        all_drew = new > 0 and new % self.batch == 0
        if all_drew and self.decoding:  # not at the first such look: prompts may have been part of that step
            steps = new // self.batch
            self.steps.append(milliseconds / steps)
            self.milliseconds += milliseconds
            self.tokens += new
            self.keys += new * (self.prompt + before / self.batch + (steps - 1) / 2)
        self.decoding = all_drew

    @property
    def step_ms(self) -> float:
        return self.milliseconds * self.batch / self.tokens

    @property
    def context(self) -> float:
        """Keys per sequence in these steps, on average."""
        return self.keys / self.tokens


def requests_of(batch: int, prompt: int, new: int) -> list[Request]:
    """Random prompts whose sequences never stop early."""
    g, sampling = np.random.default_rng(1), SamplingParams(new, ignore_eos=True)
    return [Request(i, tuple(g.integers(1, SPEC.vocab_size, prompt).tolist()), sampling) for i in range(batch)]


def measure(engine: PagedEngine, precision: str, batch: int, prompt: int, new: int) -> dict[str, Any]:
    """One `generate`, timed as a whole and in the steps that decode only."""
    requests = requests_of(batch, prompt, new)
    clock = DecodeClock(batch, prompt)
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.generate(requests, on_step=clock.on_step)
    seconds = time.perf_counter() - start
    layers = engine.model.spec.num_layers
    kv_cache = "fp8" if engine.model.recipe.kv_cache.is_quantized else "bf16"
    assert engine.stats is not None
    if not clock.steps:
        raise SystemExit(f"{new} new tokens are too few: no step had all {batch} sequences decode")
    return {
        "precision": precision, "kv_cache": kv_cache, "layers": layers, "batch": batch, "prompt": prompt, "new": new,
        "tokens/s": batch * new / seconds, "decode tokens/s": batch / clock.step_ms * 1e3, "step_ms": clock.step_ms,
        "seconds": seconds, **quantiles(clock.steps), "context": clock.context,
        "share of floor": floor_ms(precision, batch, clock.context, layers, kv_cache) / clock.step_ms,
        "preemptions": engine.stats.preemptions, "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
    }


def one(variant: str, args: argparse.Namespace) -> None:
    """Measure one variant (a precision, or one of `nonexact`) in this process; one row per batch size."""
    from nonexact import apply

    precision, kv_cache = apply(variant)
    model = random_model("qwen3-8b", precision, "cuda", args.layers, kv_cache, kernels=args.kernels)
    for batch in args.batch:
        settings = EngineSettings(
            page_size=128, share_beginnings=False, max_tokens_per_step=8192, max_num_seqs=max(args.batch),
        )
        engine = PagedEngine(model, NoText(), "flow", settings)
        engine.load(WeightSet(1, "flow", {}))
        # prompts so short that all sequences soon decode together, in steps as full as the measured ones
        engine.generate(requests_of(batch, min(args.prompt, 512), 40))
        torch.cuda.reset_peak_memory_stats()
        row = measure(engine, precision, batch, args.prompt, args.new)
        emit({"engine": f"jetrl {variant}", "kernels": args.kernels, **row, "environment": environment()})
        del engine
        torch.cuda.empty_cache()


def peer_row(row: dict[str, Any], variant: str) -> dict[str, Any]:
    """Another engine's row under our names, its version kept. Its share of the floor is that of its mean context."""
    dtype, kv_cache, _ = split_variant(variant)
    named = {"engine": f"peer {variant}", "peer": row.get("engine", "unknown"), "tokens/s": row["out_tok_s"]}
    if "peak_gib" in row:
        named["peak GiB"] = row["peak_gib"]
    if "decode_tok_s" in row:
        step = row["batch"] / row["decode_tok_s"] * 1e3
        floor = floor_ms(dtype, row["batch"], row["prompt"] + row["out"] / 2, row["layers"], kv_cache)
        named |= {"decode tokens/s": row["decode_tok_s"], "step_ms": step, "share of floor": floor / step}
    return row | named


def peer_command(
    template: str, variant: str, batch: list[int], prompt: int, new: int, layers: int, group: int = 1, slots: int = 0,
    ragged: str = "",
) -> str:
    """The command with its places filled in; SystemExit if it has no place for something that is not as usual."""
    dtype, kv_cache, _ = split_variant(variant)
    asked = {"kv": bool(kv_cache), "group": group > 1, "slots": slots > 0, "ragged": bool(ragged)}
    for name, unusual in asked.items():
        if unusual and f"{{{name}}}" not in template:
            what = f"the cache of {variant!r}" if name == "kv" else f"a workload with other than the usual {name}"
            raise SystemExit(f"--peer has no {{{name}}} to ask for {what}")
    sizes = {"batch": ",".join(map(str, batch)), "prompt": prompt, "new": new, "layers": layers}
    more = {"group": group, "slots": slots, "ragged": ragged}
    return template.format(dtype=dtype, kv=kv_cache or "auto", **sizes, **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["fp8", "bf16"], help="or a variant, as 'fp8 kv8' (cache)")
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=SPEC.num_layers)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer", default="", help="command of another engine")
    parser.add_argument("--peer-dtype", nargs="+", default=["bf16", "fp8"], help="or 'fp8 kv8' (FP8 cache)")
    parser.add_argument("--kernels", default="auto", help="of ours: hopper or triton")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="rollout")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.one:
        return one(args.one, args)
    require_gpu()
    given = ("prompt", "new", "layers", "kernels")
    sizes = ["--batch", *map(str, args.batch), *(f"--{k}={getattr(args, k)}" for k in given)]
    rows: list[dict[str, Any]] = []
    columns = ["engine", "batch", "tokens/s", "decode tokens/s", "step_ms", "share of floor", "peak GiB"]
    for i in range(args.rounds):
        for precision in args.precision:
            found = list(ask([sys.executable, __file__, "--one", precision, *sizes]))
            rows += [row | {"round": i} for row in found]
            print(table(found, columns), flush=True)
        for dtype in args.peer_dtype if args.peer else ():
            command = peer_command(args.peer, dtype, args.batch, args.prompt, args.new, args.layers)
            found = [peer_row(row, dtype) for row in ask(command, PEER_MARK)]
            rows += [row | {"round": i} for row in found]
            print(table(found, columns), flush=True)
    speed: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        speed.setdefault((row["engine"], row["batch"]), []).append(row["tokens/s"])
    summary: list[dict[str, Any]] = [
        {"engine": e, "batch": b, "tokens/s": statistics.median(v)} for (e, b), v in speed.items()
    ]
    for row in summary:
        base = speed.get(("peer bf16", row["batch"]))
        row["of peer bf16"] = row["tokens/s"] / median(base) if base else float("nan")
    print(table(summary, list(summary[0])))
    save(args.name, rows + summary, args.out)


if __name__ == "__main__":
    main()
