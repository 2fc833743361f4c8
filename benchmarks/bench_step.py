"""The training side on one GPU: actor update, log-prob pass, publishing, and a whole RL step, FP8 against BF16.

    python benchmarks/bench_step.py --rounds 2                   # Qwen3-8B's shape, 32K packed tokens of 8K sequences
    python benchmarks/bench_step.py --only whole --variants fp8 bf16 "fp8 nonexact"
    python benchmarks/bench_step.py --only update --layers 4      # a sweep with fewer layers

Random weights; BF16 masters and moments, gradients in `--grad-dtype`, no activation checkpointing. Each measurement is
a separate process, and the variants take turns. `update` is forward, backward, norm, clipping, AdamW and publishing,
one 8K sequence per micro-batch. `whole` is a rollout of `--sequences` with 4K new tokens, then one update on all of
them. Variants: a precision, then `kv8` for an FP8 KV cache, then `nonexact` or `nondet` (see `nonexact.py`) to measure
what exactness costs. Every part records the peak of allocated memory. Writes `benchmarks/results/step.json`.

Memory of `whole` at 8B, in GB: masters 16.4 (the published BF16 weights are the same memory), moments 32.8, FP8 codes
in both orientations 14: 63 in all, 49 in BF16. The rollout adds the cache, 64 x 4,608 tokens x 147 KB = 43.5, and gives
it back; the update adds gradients (32.8 in FP32) and the activations of one micro-batch, about 4.5 per thousand tokens
in FP8. With micro-batches of one sequence (4,608 tokens) it peaks near 117 of the 150 that the GPU has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, SPEC, NoText, ask, emit, environment, median, require_gpu, save, table, timed

from jetrl.api import random_model
from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.kernels.update.gradient import grad_dtype
from jetrl.model.master import accumulate_in
from jetrl.model.transformer import Transformer
from jetrl.train.optim import MixedAdamW, clipped_step, global_grad_norm
from jetrl.train.publish import publish
from jetrl.types import ForwardBatch, Request, SamplingParams, VarlenPlan, WeightSet

BF16_CEILING = 785.0  # TFLOP/s of a large BF16 matmul on an H200
PROMPT, GROUP = 512, 8  # tokens of a prompt of a whole step, and how many sequences share it


def batch_of(lengths: list[int], seed: int) -> tuple[ForwardBatch, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    tokens = torch.randint(0, SPEC.vocab_size, (sum(lengths),), generator=g, device="cuda")
    positions = torch.cat([torch.arange(n, device="cuda") for n in lengths])
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    return ForwardBatch(tokens, positions, VarlenPlan(cu, tuple(lengths)), "train"), tokens.roll(-1)


def flops(layers: int, lengths: list[int], passes: float) -> float:
    """Model FLOPs: 2 per weight and token for each pass over linear layers and head, plus causal attention.

    Three passes are an update: backward counts twice forward, recomputation does not count.
    """
    linear = layers * SPEC.hidden_size * (
        sum(SPEC.qkv_sections) + sum(SPEC.gate_up_sections) + SPEC.num_heads * SPEC.head_dim + SPEC.intermediate_size
    ) + SPEC.vocab_size * SPEC.hidden_size
    attention = layers * sum(2.0 * n * n * SPEC.num_heads * SPEC.head_dim for n in lengths)  # half of 4 n^2 d
    return passes * (2.0 * linear * sum(lengths) + attention)


def repeated(fn: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median milliseconds, the first call not counted, and the peak of allocated memory in GiB."""
    times, peaks = zip(*(timed(fn) for _ in range(repeats + 1)), strict=True)
    return median(list(times[1:])), max(peaks)


def update(model: Transformer, optimizer: MixedAdamW, micros: list[list[int]]) -> None:
    optimizer.zero_grad(set_to_none=True)
    total = sum(map(sum, micros))
    for i, lengths in enumerate(micros):
        batch, targets = batch_of(lengths, i)
        logprobs, _ = model.token_logprobs(model(batch), targets, 1.0)
        (-logprobs.sum() / total).backward()
    norm = global_grad_norm(model.parameters())
    clipped_step(optimizer, norm, 1.0)
    publish(model, 0, "flow")


def logprob_pass(model: Transformer, micros: list[list[int]]) -> None:
    with torch.no_grad():
        for i, lengths in enumerate(micros):
            batch, targets = batch_of(lengths, i)
            model.token_logprobs(model(batch), targets, 1.0)


def one(variant: str, args: argparse.Namespace) -> None:
    """Measure one variant in this process."""
    from nonexact import apply, chosen

    precision, kv_cache = apply(variant)
    model = random_model("qwen3-8b", precision, "cuda", args.layers, kv_cache)
    accumulate_in(model, getattr(torch, args.grad_dtype))
    optimizer = MixedAdamW(model.parameters(), 1e-6, state_dtype=torch.bfloat16)
    row: dict[str, Any] = {"variant": variant, "layers": args.layers}
    if args.only in ("update", "all"):
        row |= training(model, optimizer, args)
    if args.only in ("whole", "all"):
        row |= whole(model, optimizer, args)
    emit(row | {"gemms": chosen(), "environment": environment()})


def training(model: Transformer, optimizer: MixedAdamW, args: argparse.Namespace) -> dict[str, Any]:
    """The update, the log-prob pass, publishing and the optimizer, each by itself."""
    micros = [[args.length]] * (args.tokens // args.length)
    lengths = [n for micro in micros for n in micro]
    row: dict[str, Any] = {"tokens": sum(lengths), "length": args.length, "gradients": args.grad_dtype}
    row["update_ms"], row["update peak GiB"] = repeated(lambda: update(model, optimizer, micros), args.repeats)
    row["MFU"] = flops(args.layers, lengths, 3) / row["update_ms"] / 1e9 / BF16_CEILING
    optimizer.zero_grad(set_to_none=True)
    row["logprob_ms"], row["logprob peak GiB"] = repeated(lambda: logprob_pass(model, micros), args.repeats)
    row["logprob TFLOP/s"] = flops(args.layers, lengths, 1) / row["logprob_ms"] / 1e9
    row["publish_ms"], row["publish peak GiB"] = repeated(lambda: publish(model, 0, "flow"), 5)
    for p in model.parameters():
        p.grad = torch.zeros_like(p, dtype=grad_dtype(p))
    row["optimizer_ms"], row["optimizer peak GiB"] = repeated(optimizer.step, 3)
    optimizer.zero_grad(set_to_none=True)
    return row


def whole(model: Transformer, optimizer: MixedAdamW, args: argparse.Namespace) -> dict[str, Any]:
    """One RL step after a warm-up: rollout, then an update on all of its tokens, micro-batches of whole sequences."""
    g = np.random.default_rng(1)
    prompts = [tuple(g.integers(1, SPEC.vocab_size, PROMPT).tolist()) for _ in range(-(-args.sequences // GROUP))]
    length = PROMPT + args.new
    per_micro = max(1, args.micro_tokens // length)
    micros = [[length] * min(per_micro, args.sequences - i) for i in range(0, args.sequences, per_micro)]
    settings = EngineSettings(page_size=128, share_beginnings=False, max_tokens_per_step=8192)
    engine = PagedEngine(model, NoText(), "flow", settings)

    def rollout(new: int) -> None:
        sampling = SamplingParams(new, ignore_eos=True)
        engine.load(WeightSet(1, "flow", {}))
        engine.generate([Request(i, prompts[i // GROUP], sampling) for i in range(args.sequences)])

    update(model, optimizer, micros[:1])  # creates the moments, as in every step except the first, and compiles
    optimizer.zero_grad(set_to_none=True)
    rollout(24)
    rollout_ms, rollout_peak = timed(lambda: rollout(args.new))
    assert engine.stats is not None
    update_ms, update_peak = timed(lambda: update(model, optimizer, micros))
    rollout_s, update_s = rollout_ms / 1e3, update_ms / 1e3
    return {
        "sequences": args.sequences, "new": args.new, "micro_batches": len(micros), "whole rollout_s": rollout_s,
        "whole update_s": update_s, "whole_s": rollout_s + update_s, "whole rollout peak GiB": rollout_peak,
        "whole update peak GiB": update_peak, "whole peak GiB": max(rollout_peak, update_peak),
        "preemptions": engine.stats.preemptions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["fp8", "bf16", "fp8 nonexact", "bf16 nonexact"])
    parser.add_argument("--only", choices=["update", "whole", "all"], default="update")
    parser.add_argument("--layers", type=int, default=SPEC.num_layers)
    parser.add_argument("--tokens", type=int, default=32768, help="of an update")
    parser.add_argument("--length", type=int, default=8192, help="of a sequence of it, which is a micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=64, help="of a whole step")
    parser.add_argument("--new", type=int, default=4096, help="tokens of each")
    parser.add_argument("--micro-tokens", type=int, default=4608, help="most tokens of a micro-batch of a whole step")
    parser.add_argument("--grad-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="step")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.one:
        return one(args.one, args)
    require_gpu()
    keys = ("only", "layers", "tokens", "length", "repeats", "sequences", "new", "micro_tokens", "grad_dtype")
    options = [f"--{key.replace('_', '-')}={getattr(args, key)}" for key in keys]
    rows: list[dict[str, Any]] = []
    for i in range(args.rounds):
        for variant in args.variants:
            rows += [{"round": i, **row} for row in ask([sys.executable, __file__, "--one", variant, *options])]
            print("\n".join(f"{k:<24}{v:.4g}" if isinstance(v, float) else f"{k:<24}{v}" for k, v in rows[-1].items()))
            print(flush=True)
    save(args.name, rows, args.out)
    shown = ("update_ms", "logprob_ms", "publish_ms", "whole_s", "update peak GiB", "whole peak GiB")
    medians = [
        {"variant": v} | {k: median([r[k] for r in rows if r["variant"] == v]) for k in shown if k in rows[0]}
        for v in args.variants
    ]
    print(table(medians, list(medians[0])))


if __name__ == "__main__":
    main()
