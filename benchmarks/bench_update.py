"""The update as a run makes it: `train.step.update` on a step's packed batch, then publishing. Variants take turns.

    python benchmarks/bench_update.py                       # FP8, BF16 masters and moments: old and new take turns
    python benchmarks/bench_update.py --state fp32-8bit      # FP32 masters, 8-bit moments: a state that trains
    python benchmarks/bench_update.py --state fp32-offload   # FP32 masters, BF16 moments in host memory
    python benchmarks/bench_update.py --precision bf16 --variants head old
    python benchmarks/bench_update.py --layers 4 --variants lean --profile    # its kernels, by time

One process, one model of Qwen3-8B's shape with random weights, `--tokens` in sequences of `--length` (512 of them the
prompt), one sequence a micro-batch. The measured call has everything of a run's update: rows with loss and their
columns, GRPO's objective, the metrics of parity, micro-batches from host memory, norm, clipping, optimizer, publishing.
Gradients are FP32 in every state. `logprob_ms` is the pass of a reference policy over the same batch.

Variants: `old` quantizes by rows for wgrad and makes the lm_head's logits again; `head` keeps the softmax's residuals;
`new` also has wgrad by tiles and makes SwiGLU's output again (`quant.wgrad = "tile"`); `new saved8` keeps SwiGLU's
input in FP8 too (`quant.saved_gate_up`). These keep the norms' output as codes and q, k and v for the backward pass,
2 GB of logits in the forward pass, transposed weights, and widen a matrix's first gradient. `fast` makes the norms'
codes again, has 0.5 GB of logits, and lets first gradients wait in BF16; `lean` is that with `train.lean_backward`, the
default. `... nonexact` has the faster choices that parity forbids (`nonexact.py`). Kernels that changed for all, and
o's input, which is kept once in all, are not told apart. A variant that does not fit has a row that says so. Writes
`benchmarks/results/update.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from bench_step import flops
from common import RESULTS, SPEC, emit, environment, median, profiled, require_gpu, save, table, timed

from jetrl.config import Config, load_config
from jetrl.config.shipped import find_recipe
from jetrl.kernels.logprob.ops import KEPT_BYTES
from jetrl.model import attention, mlp
from jetrl.model.linear import FlowLinear
from jetrl.model.master import accumulate_in, masters_of
from jetrl.model.transformer import Transformer
from jetrl.parity.model_under_test import random_model
from jetrl.precision.recipe import build_recipe
from jetrl.run.fit.advice import on_gpu
from jetrl.train import reduction
from jetrl.train.batches import PackedBatch
from jetrl.train.optim import build_optimizer
from jetrl.train.packing import pack
from jetrl.train.passes import estimate, logprob_pass
from jetrl.train.publish import publish
from jetrl.train.step import Learner, update
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory

PROMPT, FLOW, REFERENCE = 512, "benchmark", "reference pass"
STATES = {
    "bf16": ("bfloat16", "bfloat16", False), "fp32-8bit": ("float32", "8bit", False),
    "fp32-offload": ("float32", "bfloat16", True),
}
# quant.wgrad, quant.saved_gate_up, whether the softmax's residuals are kept, which way through the backward pass
VARIANTS = {
    "old": ("row", "bf16", False, "before"), "head": ("row", "bf16", True, "before"),
    "new": ("tile", "bf16", True, "before"), "new saved8": ("tile", "fp8", True, "before"),
    "fast": ("tile", "bf16", True, "fast"), "lean": ("tile", "bf16", True, "lean"),
    "new nonexact": ("tile", "bf16", True, "before"), "lean nonexact": ("tile", "bf16", True, "lean"),
    "lean saved8": ("tile", "fp8", True, "lean"),
}
NORM_BEFORE, FIRST_WAITS = attention.norm_before, reduction.first_waits


def config_of(args: argparse.Namespace) -> Config:
    """GRPO as the shipped recipe for 8B has it, in the state that is asked for."""
    masters, moments, offload = STATES[args.state]
    overrides = [
        f"precision={args.precision}", f"train.master_dtype={masters}", f"train.optimizer_dtype={moments}",
        f"train.offload_optimizer={str(offload).lower()}", f"train.max_tokens_per_gpu={args.length}",
        f"rollout.max_response_length={args.length - PROMPT}", f"task.max_prompt_length={PROMPT}",
    ]
    overrides += ["quant.kv_cache=bf16"] if args.precision == "fp8" else []
    return on_gpu(load_config(find_recipe("gsm8k_qwen3_8b"), overrides))


def groups_of(tokens: int, length: int, vocab_size: int = SPEC.vocab_size, prompt_length: int = PROMPT) -> list[Group]:
    """One group of answers of equal length with random tokens; the log-probs are those of uniform draws."""
    g = np.random.default_rng(0)
    count = tokens // length
    prompt = tuple(g.integers(1, vocab_size, prompt_length).tolist())
    trajectories = []
    for _ in range(count):
        answer = tuple(g.integers(1, vocab_size, length - prompt_length).tolist())
        logprobs = (float(-np.log(vocab_size)),) * len(answer)
        segments = (Segment("environment", prompt, ""), Segment("policy", answer, "", logprobs, spans=((0, 0),)))
        trajectories.append(Trajectory(segments, "stop", FLOW))
    rewards = tuple(float(i % 2) for i in range(count))
    return [Group(Prompt(0, Problem("0", "", ""), prompt), tuple(trajectories), rewards)]


def packed_batch(args: argparse.Namespace, learner: Learner, config: Config) -> PackedBatch:
    groups = groups_of(args.tokens, args.length)
    batches = pack(groups, max_tokens_per_gpu=args.length, flow_digest=FLOW, weight_version=0)
    _, (batch,), _ = estimate(groups, batches, learner, None, config, True)
    return batch


def switch(model: Transformer, precision: str, variant: str, bound: int) -> None:
    """Let `model` compute its gradients as `variant` does."""
    from nonexact import use

    from jetrl.kernels.logprob import chunks

    wgrad, saved, keep, way = VARIANTS[variant]
    use("nonexact" if variant.endswith("nonexact") else "")
    before, sums = way == "before", cast(Any, reduction)
    chunks.KEPT_BYTES = bound if keep else 0
    chunks._FORWARD_ELEMENTS = 1 << (29 if before else 27)
    attention.norm_before = mlp.norm_before = (lambda *_: None) if before else NORM_BEFORE
    sums.first_waits = (lambda matrices: nullcontext()) if before else FIRST_WAITS
    for module in model.modules():
        if isinstance(module, attention.Attention):
            module.makes_heads_again = way == "lean"
        elif isinstance(module, FlowLinear):
            module.keeps_transposed = way != "lean"
            if way == "lean":
                module._operands.pop("fp8_t", None)
    torch.cuda.empty_cache()
    if precision == "fp8":
        recipe = build_recipe("fp8", 1, wgrad=wgrad, saved_gate_up=saved).linear(0, "o", "train")
        for module in model.modules():
            if isinstance(module, FlowLinear):
                module.recipes["train"] = recipe


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of each variant and of the reference pass in each round; the first, which compiles, has none."""
    config = config_of(args)
    masters = getattr(torch, STATES[args.state][0])
    model = random_model("qwen3-8b", args.precision, "cuda", args.layers, master_dtype=masters, kernels=args.kernels)
    accumulate_in(model, torch.float32)
    learner = Learner(model, build_optimizer(masters_of(model), config.train))
    batch = packed_batch(args, learner, config)
    lengths = [n for micro in batch.micro_batches for n in micro.lengths]
    bound = KEPT_BYTES
    failed: set[str] = set()

    def step() -> None:
        update(learner, [batch], config, 1)
        publish(model, 0, FLOW)

    if args.profile:
        switch(model, args.precision, args.variants[-1], bound)
        step()
        profiled(step)
        return
    for number in range(args.rounds + 1):  # the first compiles
        for variant in args.variants:
            if variant in failed:
                continue
            row: dict[str, Any] = {"variant": variant, "work": variant, "round": number, "state": args.state,
                                   "tokens": sum(lengths)}
            switch(model, args.precision, variant, bound)
            try:
                row["update_ms"], row["peak GiB"] = timed(step)
                row["TFLOP/s"] = flops(args.layers, lengths, 3) / row["update_ms"] / 1e9
            except torch.OutOfMemoryError as error:
                failed.add(variant)
                row["error"] = str(error).split("\n")[0][:200]
            print(f"round {number}, {variant}: {row.get('update_ms', 0.0):.0f} ms{row.get('error', '')}", flush=True)
            if number or "error" in row:
                yield row
        if not failed:
            switch(model, args.precision, args.variants[0], bound)
            row = {"variant": REFERENCE, "work": REFERENCE, "round": number, "state": args.state}
            row["logprob_ms"], row["peak GiB"] = timed(lambda: logprob_pass(model, batch, 1.0))
            if number:
                yield row | {"tokens": sum(lengths)}


def shown(rows: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians and spread of each variant."""
    lines = []
    for variant in [*args.variants, REFERENCE]:
        of = [row for row in rows if row["variant"] == variant]
        line: dict[str, Any] = {"variant": variant, "state": args.state, "precision": args.precision}
        for key in ("update_ms", "TFLOP/s", "logprob_ms", "peak GiB"):
            if values := [row[key] for row in of if key in row]:
                line[key] = median(values)
                line["spread %"] = 100 * (max(values) / min(values) - 1) if key != "peak GiB" else line["spread %"]
        lines.append(line | {"error": next((row["error"] for row in of if "error" in row), "")})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["fp8", "bf16"], default="fp8")
    parser.add_argument("--state", choices=list(STATES), default="bf16")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["new", "fast", "lean"])
    parser.add_argument("--layers", type=int, default=SPEC.num_layers)
    parser.add_argument("--tokens", type=int, default=32768, help="of an update")
    parser.add_argument("--length", type=int, default=8192, help="of a sequence, which is a micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="only list the kernels of the last variant's update")
    parser.add_argument("--kernels", default="auto", help="hopper or triton")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="update")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    require_gpu()
    rows = []
    for row in measure(args):
        rows.append(row | {"precision": args.precision, "layers": args.layers, "kernels": args.kernels})
        if args.one:
            emit(rows[-1] | {"environment": environment()})
    if args.one or args.profile:
        return
    save(args.name, rows, args.out)
    print(environment())
    columns = ["precision", "state", "variant", "update_ms", "TFLOP/s", "logprob_ms", "spread %", "peak GiB", "error"]
    print(table(shown(rows, args), columns))


if __name__ == "__main__":
    main()
