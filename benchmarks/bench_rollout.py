"""Rollout from end to end: the engine with a model of Qwen3-8B's shape and random weights, log-prob of each token kept.

    python benchmarks/bench_rollout.py --precision fp8 bf16 --batch 64 256 --prompt 512 --new 1024 --peer "COMMAND"

Each measurement is a process of its own, and they take turns: ours in each precision, then the peer's, for `--rounds`.
`--peer` is a command that measures another engine on the same sizes and prints `VBENCH {json}` lines with `batch` and
`out_tok_s`; `{dtype}`, `{batch}`, `{prompt}` and `{new}` in it are filled in. The first, short
generation of each process compiles kernels and is not counted. Writes `benchmarks/results/rollout.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import COPY_TBPS, RESULTS, median, quantiles, save, table

from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import Recipe
from jetrl.rollout.engine import Engine, StepReport
from jetrl.spec import SHAPES
from jetrl.types import Request, SamplingParams, WeightSet

SPEC = SHAPES["qwen3-8b"]
MARK = "BENCH "


class NoText:
    """A tokenizer for random tokens."""

    eos_token_id = None

    def decode(self, token_ids: list[int]) -> str:
        return ""


def build(precision: Any, layers: int = SPEC.num_layers) -> Transformer:
    spec = dataclasses.replace(SPEC, num_layers=layers)
    with torch.device("cuda"):
        model = Transformer(spec, Recipe(precision, layers), master_dtype=torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.02) if p.ndim > 1 else p.fill_(1.0)
    return model.to("cuda").publish()


def floor_ms(precision: str, batch: int, context: float) -> float:
    """Milliseconds of a decode step that only reads each weight and each cached key and value once."""
    linear = sum(
        SPEC.hidden_size * sum(sections) for sections in (SPEC.qkv_sections, SPEC.gate_up_sections)
    ) + SPEC.hidden_size * (SPEC.num_heads * SPEC.head_dim + SPEC.intermediate_size)
    weights = SPEC.num_layers * linear * (1 if precision == "fp8" else 2) + 2 * SPEC.vocab_size * SPEC.hidden_size
    cache = batch * context * SPEC.num_layers * 2 * SPEC.num_kv_heads * SPEC.head_dim * 2
    return (weights + cache) / COPY_TBPS / 1e9


def measure(engine: Engine, precision: str, batch: int, prompt: int, new: int) -> dict[str, Any]:
    """One `generate` of `batch` requests that never stop early."""
    g = np.random.default_rng(1)
    sampling = SamplingParams(new, ignore_eos=True)
    requests = [Request(i, tuple(g.integers(1, SPEC.vocab_size, prompt).tolist()), sampling) for i in range(batch)]
    decode: list[tuple[float, int]] = []  # milliseconds and tokens of each look at the engine
    drawn = 0
    torch.cuda.synchronize()
    start = last = time.perf_counter()

    def on_step(report: StepReport) -> None:
        nonlocal last, drawn
        now = time.perf_counter()
        if (report.generated_tokens - drawn) % batch == 0:  # all sequences draw: no prompt is computed any more
            decode.append(((now - last) * 1e3, report.generated_tokens - drawn))
        last, drawn = now, report.generated_tokens

    engine.generate(requests, on_step=on_step)
    seconds = time.perf_counter() - start
    steps = [ms * batch / tokens for ms, tokens in decode]
    total_ms, total_tokens = (sum(column) for column in zip(*decode, strict=True))
    step = total_ms * batch / total_tokens
    return {
        "precision": precision, "batch": batch, "prompt": prompt, "new": new, "tokens/s": batch * new / seconds,
        "decode tokens/s": total_tokens / total_ms * 1e3, "step_ms": step, "seconds": seconds, **quantiles(steps),
        "share of floor": floor_ms(precision, batch, prompt + new / 2) / step,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip


def one(precision: str, args: argparse.Namespace) -> None:
    """Measure one precision in this process; a line of JSON a batch size."""
    model = build(precision)
    for batch in args.batch:
        engine = Engine(model, NoText(), "flow", page_size=128, max_tokens_per_step=8192, max_num_seqs=max(args.batch))
        engine.load(WeightSet(1, "flow", ""))
        measure(engine, precision, batch, args.prompt, 40)
        torch.cuda.reset_peak_memory_stats()
        print(MARK + json.dumps(measure(engine, precision, batch, args.prompt, args.new)), flush=True)
        del engine
        torch.cuda.empty_cache()


def ask(command: list[str] | str, mark: str) -> list[dict[str, Any]]:
    """The JSON lines that a process prints after `mark`."""
    done = subprocess.run(command, capture_output=True, text=True, shell=isinstance(command, str))
    rows = [json.loads(line[len(mark) :]) for line in done.stdout.splitlines() if line.startswith(mark)]
    if not rows:
        raise SystemExit(f"{command}: status {done.returncode}, no result\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["fp8", "bf16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer", default="", help="command of another engine")
    parser.add_argument("--peer-dtype", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="rollout")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.one:
        return one(args.one, args)
    sizes = ["--batch", *map(str, args.batch), "--prompt", str(args.prompt), "--new", str(args.new)]
    rows: list[dict[str, Any]] = []
    for i in range(args.rounds):
        for precision in args.precision:
            found = ask([sys.executable, __file__, "--one", precision, *sizes], MARK)
            rows += [row | {"engine": f"jetrl {precision}", "round": i} for row in found]
            columns = ["engine", "batch", "tokens/s", "decode tokens/s", "step_ms", "share of floor", "peak GiB"]
            print(table(rows[-len(found) :], columns), flush=True)
        for dtype in args.peer_dtype if args.peer else ():
            fill = {"dtype": dtype, "batch": ",".join(map(str, args.batch)), "prompt": args.prompt, "new": args.new}
            found = ask(args.peer.format(**fill), "VBENCH ")
            rows += [row | {"engine": f"peer {dtype}", "round": i, "tokens/s": row["out_tok_s"]} for row in found]
            print(json.dumps(found), flush=True)
    speed: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        speed.setdefault((row["engine"], row["batch"]), []).append(row["tokens/s"])
    summary = [{"engine": e, "batch": b, "tokens/s": statistics.median(v)} for (e, b), v in speed.items()]
    for row in summary:
        base = speed.get(("peer bf16", row["batch"]))
        row["of peer bf16"] = row["tokens/s"] / median(base) if base else float("nan")
    print(table(summary, list(summary[0])))
    save(args.name, rows + summary, args.out)


if __name__ == "__main__":
    main()
