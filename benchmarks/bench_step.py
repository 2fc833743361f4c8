"""The training side on one GPU: actor update, log-prob pass, publishing, and a whole RL step, FP8 against BF16.

    python benchmarks/bench_step.py --rounds 2            # Qwen3-8B's shape, 32K packed tokens of 8K sequences
    python benchmarks/bench_step.py --layers 4 --whole 0   # a sweep with fewer layers

Random weights; BF16 masters and moments, gradients in `--grad-dtype`, no activation checkpointing, one 8K sequence a
micro-batch. Each measurement is a process of its own, and the precisions take turns. `update` is forward, backward,
norm, clipping, AdamW and publishing. The variant `bf16 nondet` runs attention's backward pass without its fixed order
of sums, which is what exactness costs there. Writes `benchmarks/results/step.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_rollout import MARK, SPEC, NoText, ask, build
from common import RESULTS, median, save, table

from jetrl.kernels.backends import flash
from jetrl.kernels.gradient import accumulate_in, grad_dtype
from jetrl.model.transformer import Transformer
from jetrl.rollout.engine import Engine
from jetrl.train.optim import MixedAdamW, clip_gradients_, global_grad_norm
from jetrl.train.publish import publish
from jetrl.types import ForwardBatch, Request, SamplingParams, VarlenPlan, WeightSet

BF16_CEILING = 785.0  # TFLOP/s of a large BF16 matmul on an H200


def batch_of(lengths: list[int], seed: int) -> tuple[ForwardBatch, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    tokens = torch.randint(0, SPEC.vocab_size, (sum(lengths),), generator=g, device="cuda")
    positions = torch.cat([torch.arange(n, device="cuda") for n in lengths])
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    return ForwardBatch(tokens, positions, VarlenPlan(cu, tuple(lengths)), "train"), tokens.roll(-1)


def flops(layers: int, lengths: list[int], passes: float) -> float:
    """Model FLOPs: 2 a weight and token for each pass over the linear layers and the head, causal attention apart."""
    linear = layers * SPEC.hidden_size * (
        sum(SPEC.qkv_sections) + sum(SPEC.gate_up_sections) + SPEC.num_heads * SPEC.head_dim + SPEC.intermediate_size
    ) + SPEC.vocab_size * SPEC.hidden_size
    attention = layers * sum(2.0 * n * n * SPEC.num_heads * SPEC.head_dim for n in lengths)  # half of 4 n^2 d
    return passes * 2.0 * linear * sum(lengths) + attention * (1 if passes == 1 else 3.5)


def timed(fn: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds; the first call is not counted."""
    times = []
    for i in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        if i:
            times.append((time.perf_counter() - start) * 1e3)
    return median(times)


def update(model: Transformer, optimizer: MixedAdamW, micros: list[list[int]]) -> None:
    optimizer.zero_grad(set_to_none=True)
    total = sum(map(sum, micros))
    for i, lengths in enumerate(micros):
        batch, targets = batch_of(lengths, i)
        logprobs, _ = model.token_logprobs(model(batch), targets, 1.0)
        (-logprobs.sum() / total).backward()
    norm = global_grad_norm(model.parameters())
    clip_gradients_(model.parameters(), norm, 1.0)
    optimizer.step()
    publish(model, 0, "flow")


def logprob_pass(model: Transformer, micros: list[list[int]]) -> None:
    with torch.no_grad():
        for i, lengths in enumerate(micros):
            batch, targets = batch_of(lengths, i)
            model.token_logprobs(model(batch), targets, 1.0)


def one(variant: str, args: argparse.Namespace) -> None:
    """Measure one precision in this process."""
    precision = variant.split()[0]
    flash.DETERMINISTIC_BACKWARD = "nondet" not in variant
    model = build(precision, args.layers)
    accumulate_in(model, getattr(torch, args.grad_dtype))
    optimizer = MixedAdamW(model.parameters(), 1e-6, state_dtype=torch.bfloat16)
    micros = [[args.length]] * (args.tokens // args.length)
    lengths = [n for micro in micros for n in micro]
    row: dict[str, Any] = {
        "variant": variant, "gradients": args.grad_dtype, "layers": args.layers, "tokens": sum(lengths),
        "length": args.length,
    }  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    row["update_ms"] = timed(lambda: update(model, optimizer, micros), args.repeats)
    row["MFU"] = flops(args.layers, lengths, 3) / row["update_ms"] / 1e9 / BF16_CEILING
    row["update peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    optimizer.zero_grad(set_to_none=True)
    row["logprob_ms"] = timed(lambda: logprob_pass(model, micros), args.repeats)
    row["logprob TFLOP/s"] = flops(args.layers, lengths, 1) / row["logprob_ms"] / 1e9
    row["publish_ms"] = timed(lambda: publish(model, 0, "flow"), 5)
    row["optimizer_ms"] = _optimizer_ms(model, optimizer)
    if args.whole:
        row |= whole(model, optimizer, args)
    print(MARK + json.dumps(row), flush=True)


def _optimizer_ms(model: Transformer, optimizer: MixedAdamW) -> float:
    for p in model.parameters():
        p.grad = torch.zeros_like(p, dtype=grad_dtype(p))
    return timed(optimizer.step, 3)


def whole(model: Transformer, optimizer: MixedAdamW, args: argparse.Namespace) -> dict[str, float]:
    """Rollout of `--whole` sequences with 4K new tokens, then an update on all of their tokens."""
    g = np.random.default_rng(1)
    optimizer.zero_grad(set_to_none=True)
    engine = Engine(model, NoText(), "flow", page_size=128, max_tokens_per_step=8192)
    engine.load(WeightSet(1, "flow", ""))

    def requests(new: int) -> list[Request]:
        sampling = SamplingParams(new, ignore_eos=True)
        prompt = tuple(g.integers(1, SPEC.vocab_size, 512).tolist())
        return [Request(i, prompt, sampling) for i in range(args.whole)]

    engine.generate(requests(24))
    start = time.perf_counter()
    engine.generate(requests(args.new))
    rollout = time.perf_counter() - start
    assert engine.stats is not None
    length = 512 + args.new
    per_micro = max(1, args.length // length)
    micros = [[length] * min(per_micro, args.whole - i) for i in range(0, args.whole, per_micro)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    update(model, optimizer, micros)
    torch.cuda.synchronize()
    spent = time.perf_counter() - start
    return {
        "whole rollout_s": rollout, "whole update_s": spent, "whole_s": rollout + spent,
        "preemptions": engine.stats.preemptions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["fp8", "bf16", "bf16 nondet"])
    parser.add_argument("--layers", type=int, default=SPEC.num_layers)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--whole", type=int, default=64, help="sequences of the whole step; 0: skip it")
    parser.add_argument("--new", type=int, default=4096)
    parser.add_argument("--grad-dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="step")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.one:
        return one(args.one, args)
    sizes = [f"--{k}={getattr(args, k)}" for k in ("layers", "tokens", "length", "repeats", "new")]
    sizes.append(f"--grad-dtype={args.grad_dtype}")
    rows = []
    for i in range(args.rounds):
        for variant in args.variants:
            count = args.whole if "nondet" not in variant else 0
            found = ask([sys.executable, __file__, "--one", variant, f"--whole={count}", *sizes], MARK)
            rows += [{"round": i, **row} for row in found]
            print(table(rows[-1:], list(rows[-1])), flush=True)
    save(args.name, rows, args.out)
    by = {v: [r for r in rows if r["variant"] == v] for v in args.variants}
    for key in ("update_ms", "logprob_ms", "whole_s"):
        if all(key in r for v in ("fp8", "bf16") for r in by.get(v, [{}])):
            ratio = median([r[key] for r in by["bf16"]]) / median([r[key] for r in by["fp8"]])
            print(f"{key}: FP8 is {ratio:.2f}x as fast as BF16")


if __name__ == "__main__":
    main()
