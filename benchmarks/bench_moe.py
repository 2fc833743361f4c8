"""Mixtures of experts on one GPU, at the shape of Qwen3-30B-A3B with random weights: rollout, update, and single ops.

    python benchmarks/bench_moe.py --only rollout --batch 64 256 --precision "fp8 kv8" bf16 --peer "COMMAND"
    python benchmarks/bench_moe.py --only update --update-layers 12 --micro-tokens 16384 --out DIR
    python benchmarks/bench_moe.py --only ops                        # microseconds of each op of one layer
    python benchmarks/bench_moe.py --only sweep                      # decode: rows of a tile, and SMs of a GEMM

Rollout: published weights only, prompt 512 and 1024 new tokens; `--peer` as for `bench_rollout.py`, for the same shape.
The floor of a decode step reads the weights of the experts that are hit, which is counted: the drawn sequences go
through the model once more, whose routers choose the same experts (parity), and the distinct experts of a step are
averaged over layers and sampled positions. Update: forward, backward, norm, clipping, AdamW and publishing with BF16
masters and moments and FP32 gradients; its FLOPs count active parameters. A weight takes 12 bytes (with FP8 codes both
ways), so 12 layers, embedding and head take 90 GiB; the activations of 8,192 tokens 9, logits and residuals 6. So 12
layers fit with micro-batches of 16,384 tokens (115 GiB), 15 with 8,192 (128), 10 with 32,768 (117). Each micro-batch
reads and writes all FP32 gradients of experts (1.1 ms a layer at least), so larger ones are faster.
Ops are single calls with a cold, dirty L2 (5 us of launch included at few tokens); the sweep has ten calls in one
graph, as a decode step has them. The floor of a GEMM reads the matrices of the experts that are hit; that of wgrad
reads and writes its FP32 gradient.

Each measurement is a process with `--limit` seconds; one that fails is told, with the rows it had, and others go on. An
update reports after each repeat; its last row stays; `--one update fp8 --profile` lists its kernels. Writes `moe.json`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_rollout import PEER_MARK, measure, peer_command, peer_row, requests_of
from bench_step import BF16_CEILING, batch_of, update
from common import (
    COPY_TBPS,
    READ_TBPS,
    RESULTS,
    NoText,
    ask,
    emit,
    end_on_sigterm,
    environment,
    graphed,
    interleaved,
    median,
    profiled,
    require_gpu,
    save,
    split_variant,
    table,
)
from torch import Tensor

from jetrl.api import random_model
from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.engine.state_pool import page_bytes
from jetrl.kernels.dispatch import require_experts
from jetrl.kernels.experts import ops as moe
from jetrl.kernels.quantize.ops import quantize_act
from jetrl.kernels.update.gradient import Gradient
from jetrl.model.block import Routes
from jetrl.model.master import accumulate_in
from jetrl.model.transformer import Transformer
from jetrl.spec import SHAPES, ModelSpec
from jetrl.train.optim import MixedAdamW
from jetrl.types import WeightSet

SHAPE = "qwen3-30b-a3b"
Row = dict[str, Any]


def dense_of_layer(spec: ModelSpec) -> int:
    """Weights of a layer's attention."""
    return spec.hidden_size * (sum(spec.qkv_sections) + spec.num_heads * spec.head_dim)


def expert_size(spec: ModelSpec) -> int:
    assert spec.experts is not None
    return 3 * spec.hidden_size * spec.experts.intermediate_size


def floor_ms(spec: ModelSpec, fp8: bool, kv8: bool, batch: int, context: float, hit: float) -> float:
    """Milliseconds of a decode step that reads each weight once, `hit` experts a layer, and each key and value once."""
    assert spec.experts is not None
    router = 2 * spec.experts.count * spec.hidden_size
    layer = (dense_of_layer(spec) + hit * expert_size(spec)) * (1 if fp8 else 2) + router
    head = spec.head_dim + 2 if kv8 else spec.head_dim * 2  # a head's codes and its scale
    cache = batch * context * 2 * spec.num_kv_heads * head
    return (spec.num_layers * (layer + cache) + 2 * spec.vocab_size * spec.hidden_size) / READ_TBPS / 1e9


def flops(spec: ModelSpec, lengths: list[int]) -> float:
    """Model FLOPs of an update by active parameters: three passes over linear layers, head and causal attention."""
    assert spec.experts is not None
    layer = dense_of_layer(spec) + spec.experts.per_token * expert_size(spec) + spec.experts.count * spec.hidden_size
    linear = spec.num_layers * layer + spec.vocab_size * spec.hidden_size
    attention = spec.num_layers * sum(2.0 * n * n * spec.num_heads * spec.head_dim for n in lengths)
    return 3 * (2.0 * linear * sum(lengths) + attention)


@torch.no_grad()
def experts_hit(model: Transformer, sequences: list[list[int]], positions: list[int], at_once: int = 8) -> float:
    """Distinct experts that a step's tokens choose, mean over layers and the steps at `positions`."""
    count = model.spec.experts.count  # type: ignore[union-attr]
    hit = torch.zeros(model.spec.num_layers, len(positions), count, dtype=torch.bool, device="cuda")
    for first in range(0, len(sequences), at_once):
        part = sequences[first : first + at_once]
        batch, _ = batch_of([len(s) for s in part], 0)
        batch = replace(batch, tokens=torch.tensor([t for s in part for t in s], device="cuda"))
        routes, start = Routes(), 0
        model(batch, routes=routes)
        for sequence in part:
            for layer, chosen in routes.chosen.items():
                hit[layer].scatter_(1, chosen[start + torch.tensor(positions, device="cuda")], True)
            start += len(sequence)
    return hit.sum(-1).double().mean().item()


def rollout(variant: str, args: argparse.Namespace) -> None:
    """One row per batch size; the model holds published weights only."""
    precision, kv_cache, _ = split_variant(variant)
    model = random_model(SHAPE, precision, "cuda", args.layers, kv_cache, masters=False)
    held = torch.cuda.memory_allocated() / 2**30
    for batch in args.batch:
        settings = EngineSettings(
            page_size=128, share_beginnings=False, max_tokens_per_step=8192, max_num_seqs=max(args.batch),
        )
        engine = PagedEngine(model, NoText(), "flow", settings)
        engine.load(WeightSet(1, "flow", {}))
        engine.generate(requests_of(batch, args.prompt, 40))  # compiles kernels
        torch.cuda.reset_peak_memory_stats()
        row = measure(engine, precision, batch, args.prompt, args.new)
        assert engine.stats is not None
        page = page_bytes(model.spec, 128, torch.bfloat16, model.recipe.kv_cache)
        peak, cache = torch.cuda.max_memory_allocated(), engine.stats.num_pages * page
        requests = requests_of(batch, args.prompt, 64)  # the experts of a step do not change with its place
        done = {c.request_id: c.tokens.tolist() for c in engine.generate(requests)}
        drawn = [list(r.tokens) + done[r.id] for r in requests]
        del engine
        torch.cuda.empty_cache()
        hit = experts_hit(model, drawn, list(range(args.prompt, args.prompt + 63, 6)))
        row |= {
            "experts hit": hit, "weights GiB": held, "peak GiB": peak / 2**30,
            "peak without cache GiB": (peak - cache) / 2**30,
            "share of floor": floor_ms(
                model.spec, precision != "bf16", bool(kv_cache), batch, row["context"], hit
            ) / row["step_ms"],
        }
        emit({"what": "rollout", "engine": f"jetrl {variant}", **row, "environment": environment()})


def updates(variant: str, args: argparse.Namespace) -> None:
    """A row after each repeat, with the median of all until then: a process that is stopped has told something."""
    start = time.perf_counter()

    def tell(text: str) -> None:
        held = torch.cuda.memory_allocated() / 2**30
        print(f"update {variant}: {time.perf_counter() - start:.0f} s, {held:.1f} GiB held, {text}", flush=True)

    accumulate_in(model := random_model(SHAPE, variant, "cuda", args.update_layers), torch.float32)
    optimizer = MixedAdamW(model.parameters(), 1e-6, state_dtype=torch.bfloat16)
    tell(f"{args.update_layers} layers, {sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters made")
    micros = [[args.length] * (args.micro_tokens // args.length)] * (args.tokens // args.micro_tokens)
    lengths = [n for micro in micros for n in micro]
    spent: list[float] = []
    update(model, optimizer, micros[:1])  # compiles
    torch.cuda.synchronize()
    tell("one micro-batch has run")
    if args.profile:
        return profiled(lambda: update(model, optimizer, micros))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(args.repeats):
        began = time.perf_counter()
        update(model, optimizer, micros)
        torch.cuda.synchronize()
        spent.append((time.perf_counter() - began) * 1e3)
        milliseconds, peak = median(spent), torch.cuda.max_memory_allocated() / 2**30
        emit({
            "what": "update", "variant": variant, "layers": args.update_layers, "tokens": sum(lengths),
            "length": args.length, "micro-batch": args.micro_tokens, "repeats": len(spent), "update_ms": milliseconds,
            "peak GiB": peak, "MFU": flops(model.spec, lengths) / milliseconds / 1e9 / BF16_CEILING,
            "environment": environment(),
        })
        tell(f"{milliseconds:.0f} ms, the median of {len(spent)}")


def ops_of(tokens: int, block: int | None = None) -> tuple[dict[str, Any], float]:
    """Calls of one layer's ops without gradients, FP8 and BF16, on `tokens` tokens; and the experts that are hit."""
    spec = SHAPES[SHAPE]
    assert spec.experts is not None
    ops, experts = require_experts("hopper"), spec.experts
    d, f, e, k = spec.hidden_size, experts.intermediate_size, experts.count, experts.per_token

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    router, up, down, x = normal(e, d) * 0.02, normal(e * 2 * f, d) * 0.02, normal(e * d, f) * 0.02, normal(tokens, d)
    up8 = ops.prepare_experts_fp8(ops.quantize_weight(up, False, (f, f) * e), e)
    down8 = ops.prepare_experts_fp8(ops.quantize_weight(down, False, (d,) * e), e)
    up16, down16 = ops.prepare_experts_bf16(up, e), ops.prepare_experts_bf16(down, e)
    bf16, operand = torch.bfloat16, ops.prepare_bf16(router)
    logits = moe.router_logits(x, Gradient(router), router, operand)
    chosen, weights = moe.route(logits, k, True)
    groups = ops.group(chosen, e, block)
    q, rows = moe.dispatch_quantize(x, groups, False), moe.dispatch(x, groups)
    hidden = moe.grouped_fp8_gemm(q, up8, groups, bf16)
    act, act16 = moe.swiglu_quantize(hidden, groups, False), moe.swiglu(hidden, groups)
    y = moe.grouped_fp8_gemm(act, down8, groups, bf16)
    return {
        "router": lambda: moe.router_logits(x, Gradient(router), router, operand),
        "route": lambda: moe.route(logits, k, True),
        "group": lambda: ops.group(chosen, e, block),
        "dispatch_quantize": lambda: moe.dispatch_quantize(x, groups, False),
        "group_quantize": lambda: moe.group_quantize(chosen, x, e, False),
        "gate_up fp8": lambda: moe.grouped_fp8_gemm(q, up8, groups, bf16),
        "swiglu_quantize": lambda: moe.swiglu_quantize(hidden, groups, False),
        "down fp8": lambda: moe.grouped_fp8_gemm(act, down8, groups, bf16),
        "combine": lambda: moe.combine(y, weights, groups),
        "dispatch": lambda: moe.dispatch(x, groups),
        "gate_up bf16": lambda: moe.grouped_bf16_gemm(rows, up16, groups, bf16),
        "swiglu": lambda: moe.swiglu(hidden, groups),
        "down bf16": lambda: moe.grouped_bf16_gemm(act16, down16, groups, bf16),
    }, groups.counts.count_nonzero().item()


def floor_us(op: str, hit: float) -> float | str:
    """What a GEMM's weights alone take."""
    spec = SHAPES[SHAPE]
    assert spec.experts is not None
    (name, _, dtype), one = op.partition(" "), expert_size(spec) / 3  # one: gate, up or down
    if name == "wgrad":
        return spec.experts.count * 2 * one * 8 / COPY_TBPS / 1e6
    parts = {"gate_up": 2, "down": 1}.get(name)
    return "" if parts is None else hit * parts * one * (2 if dtype == "bf16" else 1) / READ_TBPS / 1e6


def gradient_ops(tokens: int) -> dict[str, Any]:
    """The ops of a layer's backward pass."""
    spec = SHAPES[SHAPE]
    assert spec.experts is not None
    ops, experts = require_experts("hopper"), spec.experts
    d, f, e, k = spec.hidden_size, experts.intermediate_size, experts.count, experts.per_token
    x = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16)
    up = torch.randn(e * 2 * f, d, device="cuda", dtype=torch.bfloat16) * 0.02
    up_t = ops.prepare_experts_fp8_t(ops.quantize_weight(up, False, (f, f) * e), e)
    logits, d_weights = torch.randn(tokens, e, device="cuda"), torch.randn(tokens, k, device="cuda")
    chosen, weights = ops.route(logits, k, True)
    groups = ops.group(chosen, e, 128)
    rows, dy = ops.dispatch(x, groups), torch.randn(len(groups.tokens), 2 * f, device="cuda", dtype=torch.bfloat16)
    dy_q, grad, act = quantize_act(dy, False, (f, f)), torch.zeros(e * 2 * f, d, device="cuda"), dy[:, :f].contiguous()
    dy_t, x_t = ops.quantize_rows_t(dy, groups, False), ops.quantize_rows_t(rows, groups, False)
    return {
        "combine_backward": lambda: ops.combine_backward(x, rows, weights, groups),
        "quantize dy": lambda: quantize_act(dy, False, (f, f)),
        "dgrad fp8": lambda: ops.grouped_fp8_gemm(dy_q, up_t, groups, torch.bfloat16),
        "dgrad bf16": lambda: ops.grouped_bf16_dgrad(dy, up, groups),
        "quantize_rows_t dy": lambda: ops.quantize_rows_t(dy, groups, False),
        "quantize_rows_t x": lambda: ops.quantize_rows_t(rows, groups, False),
        "wgrad fp8": lambda: ops.grouped_wgrad_into(dy_t, x_t, groups, grad),
        "wgrad bf16": lambda: ops.grouped_bf16_wgrad_into(dy, rows, groups, grad),
        "swiglu_backward": lambda: ops.swiglu_rows_backward(act, dy, groups),
        "swiglu_backward_quantize": lambda: ops.swiglu_rows_backward_quantize(act, dy, groups, False, False),
        "combine_backward_quantize": lambda: ops.combine_backward_quantize(x, rows, weights, groups, False, False),
        "dispatch_quantize_t": lambda: ops.dispatch_quantize_t(x, groups, False),
        "dispatch_backward": lambda: ops.dispatch_backward(rows, groups),
        "route_backward": lambda: ops.route_backward(d_weights, logits, chosen, weights, True),
        "router_backward": lambda: ops.router_backward(logits, x, up[:e]),
    }


def ops_table(args: argparse.Namespace) -> None:
    for tokens in (1, 64, 256, 8192):
        with torch.no_grad():
            cases, hit = ops_of(tokens)
            cases = {name: graphed(fn) for name, fn in cases.items()} if tokens < 8192 else cases | gradient_ops(tokens)
            for name, spent in interleaved(cases, rounds=10).items():
                row = {"op": name, "tokens": tokens, "us": median(spent), "floor": floor_us(name, hit)}
                emit({"what": "op", **row, "environment": environment()})


def per_call(fn: Callable[[], Any], calls: int = 10, rounds: int = 15) -> float:
    """Microseconds of a call among others of its kind in one graph. An expert's matrices leave the L2 between calls."""
    replay = graphed(lambda: [fn() for _ in range(calls)])
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return median(times)


@torch.no_grad()
def sweep(args: argparse.Namespace) -> None:
    """Rows of a tile, then the number of SMs: each pair is a kernel of DeepGEMM, compiled at its first call."""
    from jetrl.kernels.gemm.deepgemm import deep_gemm

    small = ("router", "route", "group", "dispatch_quantize", "group_quantize", "swiglu_quantize", "combine")
    gemms, all_sms = ("gate_up fp8", "down fp8"), deep_gemm.get_num_sms()
    plan = [(sms, block) for sms, blocks in ((all_sms, (16, 32, 64, 128)), (128, (16, 32))) for block in blocks]
    for sms, block in plan:
        deep_gemm.set_num_sms(sms)
        for tokens in (16, 64, 256):
            cases, hit = ops_of(tokens, block)
            for name in (*gemms, *(small if sms == all_sms else ())):
                emit({
                    "what": "sweep", "op": name, "tokens": tokens, "tile": block, "SMs": sms, "hit": hit,
                    "us": per_call(cases[name]), "floor": floor_us(name, hit), "environment": environment(),
                })
    deep_gemm.set_num_sms(all_sms)


def peers(args: argparse.Namespace, dtype: str) -> Iterator[Row]:
    command = peer_command(args.peer, dtype, args.batch, args.prompt, args.new, args.layers)
    for row in ask(command, PEER_MARK, args.limit):
        row = peer_row(row, dtype)
        row.pop("share of floor", None)  # of the dense shape
        yield row | {"what": "rollout"}


COLUMNS = {
    "ops": ["op", "tokens", "us", "floor"], "sweep": ["op", "tokens", "tile", "SMs", "hit", "us", "floor"],
    "update": ["variant", "layers", "tokens", "micro-batch", "repeats", "update_ms", "MFU", "peak GiB"],
    "rollout": ["engine", "batch", "tokens/s", "decode tokens/s", "step_ms", "experts hit", "share of floor",
                "weights GiB", "peak without cache GiB", "peak GiB"],
}


def gathered(
    title: str, source: Iterator[Row], failed: list[str], args: argparse.Namespace, before: list[Row], round_: int
) -> list[Row]:
    """The rows of one part, of an update the last, saved behind those `before` as they come; also if it fails."""
    found: list[Row] = []
    start = time.perf_counter()
    try:
        for row in source:
            found = [*(found if row["what"] != "update" else []), row | {"round": round_}]
            save(args.name, before + found, args.out)
    except RuntimeError as error:
        failed.append(title)
        print(f"{title}: FAILED\n{error}", flush=True)
    print(f"{title}: {len(found)} rows, {time.perf_counter() - start:.0f} s", flush=True)
    return found


def main() -> None:
    layers = SHAPES[SHAPE].num_layers
    parts = ["ops", "sweep", "rollout", "update"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--precision", nargs="+", default=["fp8 kv8", "fp8", "bf16"], help="of the rollout")
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=layers, help="of the rollout")
    parser.add_argument("--update-precision", nargs="+", default=["fp8", "bf16"])
    parser.add_argument("--update-layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32768, help="of an update")
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=2048, help="of a sequence of an update")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", type=float, default=240, help="seconds of a process, compilation included")
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peer", help="a command that measures another engine")
    parser.add_argument("--peer-dtype", nargs="+", default=["fp8 kv8", "bf16"])
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "VARIANT"), help=argparse.SUPPRESS)
    parser.add_argument("--name", default="moe")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.one:
        what, variant = args.one
        alone = {"ops": ops_table, "sweep": sweep}
        return alone[what](args) if what in alone else {"rollout": rollout, "update": updates}[what](variant, args)
    require_gpu()
    end_on_sigterm()
    keys = ("prompt", "new", "layers", "update_layers", "tokens", "micro_tokens", "length", "repeats")
    options = ["--batch", *map(str, args.batch), *(f"--{k.replace('_', '-')}={getattr(args, k)}" for k in keys)]
    todo = {"ops": ["all"], "sweep": ["all"], "rollout": args.precision, "update": args.update_precision}
    told: dict[str, list[Row]] = {what: [] for what in args.only}
    failed: list[str] = []
    for round_ in range(args.rounds):
        for what in args.only:
            me = [sys.executable, __file__, *options, "--one", what]
            sources = [(f"{what} {v}", ask([*me, v], limit=args.limit, say=print)) for v in todo[what]]
            if what == "rollout" and args.peer:
                sources += [(f"{what} peer {dtype}", peers(args, dtype)) for dtype in args.peer_dtype]
            for title, source in sources:
                before = [row for rows in told.values() for row in rows]
                told[what] += gathered(title, source, failed, args, before, round_)
    for what, rows in told.items():
        print(table(rows, COLUMNS[what]) if rows else f"{what}: no rows", flush=True)
    raise SystemExit("FAILED: " + ", ".join(failed) if failed else 0)


if __name__ == "__main__":
    main()
