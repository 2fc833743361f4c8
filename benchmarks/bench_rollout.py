"""Rollout from end to end: the engine with a model of Qwen3-8B's shape and random weights, one sampled token a step.

`python benchmarks/bench_rollout.py --precision fp8 bf16 --batch 64 256 --prompt 512 --new 1024`. The first, short round
compiles kernels and is not counted. Writes `benchmarks/results/rollout.json` (`--out` for another folder).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, median, quantiles, save, table

from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import Recipe
from jetrl.rollout.engine import Engine, StepReport
from jetrl.spec import SHAPES
from jetrl.types import Request, SamplingParams, WeightSet

SPEC = SHAPES["qwen3-8b"]


class NoText:
    """A tokenizer for random tokens."""

    eos_token_id = None

    def decode(self, token_ids: list[int]) -> str:
        return ""


def build(precision: Any) -> Transformer:
    with torch.device("cuda"):
        model = Transformer(SPEC, Recipe(precision, SPEC.num_layers), master_dtype=torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.02) if p.ndim > 1 else p.fill_(1.0)
    return model.to("cuda").publish()


def measure(engine: Engine, batch: int, prompt: int, new: int, seed: int) -> dict[str, Any]:
    """One `generate` of `batch` requests that never stop early; a decode step draws a token for each of them."""
    g = np.random.default_rng(seed)
    sampling = SamplingParams(new, ignore_eos=True)
    requests = [Request(i, tuple(g.integers(1, SPEC.vocab_size, prompt).tolist()), sampling) for i in range(batch)]
    decode: list[float] = []
    drawn = 0
    torch.cuda.synchronize()
    start = last = time.perf_counter()

    def on_step(report: StepReport) -> None:
        nonlocal last, drawn
        now = time.perf_counter()
        if report.generated_tokens - drawn == batch:
            decode.append((now - last) * 1e3)
        last, drawn = now, report.generated_tokens

    engine.generate(requests, on_step=on_step)
    seconds = time.perf_counter() - start
    return {
        "batch": batch, "prompt": prompt, "new": new, "tokens/s": batch * new / seconds,
        "decode tokens/s": batch * len(decode) / sum(decode) * 1e3, "step_ms": median(decode),
        "seconds": seconds, **quantiles(decode),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", nargs="+", default=["fp8", "bf16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    for precision in args.precision:
        model = build(precision)
        for batch in args.batch:
            engine = Engine(model, NoText(), "flow", page_size=args.page_size, max_tokens_per_step=8192)
            engine.load(WeightSet(1, "flow", ""))
            measure(engine, batch, args.prompt, 32, 0)
            rows.append({"precision": precision, **measure(engine, batch, args.prompt, args.new, 1)})
            print(table(rows[-1:], list(rows[-1])), flush=True)
            del engine
        del model
        torch.cuda.empty_cache()
    save("rollout", rows, args.out)


if __name__ == "__main__":
    main()
