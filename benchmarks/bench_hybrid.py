"""Hybrids with Gated DeltaNet on one GPU, at Qwen3.5-9B's shape with random weights: rollout and update.

    python benchmarks/bench_hybrid.py --peer "COMMAND"               # both parts; the command as for bench_rollout.py
    python benchmarks/bench_hybrid.py --parts rollout --batch 64 256 --rounds 3 --kernels triton
    python benchmarks/bench_hybrid.py --parts update --precision fp8 --layers 16
    python benchmarks/bench_hybrid.py --tiny                         # a small model on the CPU: that it runs

rollout  published weights only; `--batch` sequences of `--prompt` tokens, `--new` new ones: tokens/s of the whole, and
         a decode step as a share of its floor, which reads each weight and each row that attention's layers keep once,
         and moves 46.7 KB for each sequence, layer of Gated DeltaNet and value head, at 4.47 TB/s. The peer takes turns
         with ours. Goals: 1.15x of vLLM's FP8 at 64, 1.35x at 256.
update   `train.step.update` and publishing of `--tokens` in sequences of `--length`, `--micro` tokens a micro-batch:
         the update of the recipe gsm8k_qwen3.5_9b with BF16 masters, gradients and moments, and BF16 keys and values.
         FLOPs are 6 for each token and weight of a linear or of the head; attention's and the delta rule's do not
         count. FP8 and BF16 take turns in processes of their own. One more update is profiled: "share of delta" is the
         time of the kernels in `jetrl.kernels.delta` (Triton's, by name), as a share of all kernels' time; the layers'
         linears are not among them. None: none of them ran. Goal: 8 %. Rows say whether the moments had to lie in host
         memory.

Writes benchmarks/results/hybrid.json after each row: new rows replace old ones of the same part, case and round. A part
that fails is told, and the others go on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from common import emit, end_on_sigterm, environment, require_gpu, timed
from profile_step import Profiled, profiled_calls
from whole_model import (
    Row,
    Workload,
    add_options,
    delta_kernels,
    in_turns,
    measured,
    must_offload,
    parsed_by,
    peer_rows,
    rollout_row,
    spec_of,
    tell,
    update_config,
    update_of,
    update_row,
)

from jetrl.api import random_model
from jetrl.spec import SHAPES


def workloads(args: argparse.Namespace) -> list[Workload]:
    return [(batch, args.prompt, args.new, 1) for batch in args.batch]


def name_of(what: str, kernels: str, kv_cache: str = "") -> str:
    """The engine of a row; kernels and cache are named where they are not the usual ones."""
    more = ("" if kernels == "auto" else kernels, "kv8" if kv_cache == "fp8" else "")
    return " ".join(word for word in (what, *more) if word)


def rollout(args: argparse.Namespace) -> Iterator[Row]:
    """A row for each batch."""
    kv = args.kv_cache if args.one == "fp8" else ""  # BF16 has no other cache
    model = random_model(args.shape, args.one, args.device, args.layers, kv, masters=False, kernels=args.kernels)
    held = torch.cuda.memory_allocated() if args.device == "cuda" else 0
    for work in workloads(args):
        row = rollout_row(model, args.one == "fp8", work, (min(args.prompt, 512), 4 if args.tiny else 40), held=held)
        row |= {"engine": name_of(f"jetrl {args.one}", args.kernels, kv), "precision": args.one}
        yield row | {"kv_cache": kv or "bf16"}


def updates(args: argparse.Namespace) -> Iterator[Row]:
    """Rows of one precision in this process: the first update compiles and is not counted, the last is profiled."""
    spec, again = spec_of(args.shape, args.layers), args.checkpointing
    sizes = spec, args.one, args.device, args.length, args.micro, args.kernels
    offload = must_offload(*sizes, again)
    config = update_config(*sizes, offload, again)
    model = random_model(args.shape, args.one, args.device, args.layers, masters=True, kernels=args.kernels)
    step = update_of(model, config, args.tokens, args.length)
    step()
    times = [timed(step) for _ in range(args.repeats)]

    def once() -> int:
        step()
        return 1

    of_delta = of_kernels(profiled_calls(once, args.device), delta_kernels()) if args.device == "cuda" else {}
    for number, (ms, peak) in enumerate(times):
        row = update_row(spec, args.tokens, ms, peak, args.device) | of_delta
        row |= {"engine": name_of(args.one, args.kernels), "precision": args.one, "number": number}
        yield row | {"length": args.length, "micro": args.micro, "checkpointing": again, "offload": offload}


def of_kernels(found: Profiled, names: set[str]) -> Row:
    """The share that kernels of these names have, and their milliseconds; a share of None if none of them ran."""
    of = {kernel["name"]: kernel["us"] / 1e3 for kernel in found.kernels if kernel["name"] in names}
    row: Row = {"kernels_ms": found.total / 1e3, "delta_ms": of}
    return row | {"share of delta": 1e3 * sum(of.values()) / found.total if of else None}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["rollout", "update"], default=["rollout", "update"])
    parser.add_argument("--shape", default="qwen3.5-9b", choices=[name for name, s in SHAPES.items() if s.delta])
    parser.add_argument("--kv-cache", choices=["bf16", "fp8"], default="bf16", help="rollout: of keys and values")
    parser.add_argument("--kernels", default="auto", help="of ours: hopper or triton")
    add_options(parser, "hybrid")
    return parsed_by(parser, "tiny-hybrid")


def main() -> None:
    args = parsed()
    if args.part:
        for row in (updates if args.part == "update" else rollout)(args):
            emit(row | {"part": args.part, "kernels": args.kernels, "environment": environment()})
        return
    if not args.tiny:
        require_gpu()
    end_on_sigterm()
    spec = spec_of(args.shape, args.layers)
    asked = [one for part in args.parts for one in in_turns(args, part)]
    new, failed = measured(
        __file__, args, asked, lambda part: peer_rows(args.peer, args.peer_dtype, spec, part, workloads(args))
    )
    tell(new, failed)


if __name__ == "__main__":
    main()
