"""Latent attention on one GPU, at Moonlight-16B-A3B's shape with random weights: rollout, update, attention's kernels.

    python benchmarks/bench_latent.py --peer "COMMAND"                # all parts; the command as for bench_rollout.py
    python benchmarks/bench_latent.py --parts rollout --batch 64 256 --rounds 3 --peer "COMMAND"
    python benchmarks/bench_latent.py --parts groups long
    python benchmarks/bench_latent.py --parts update ops forms shared
    python benchmarks/bench_latent.py --tiny                          # a small model on the CPU: that it runs

rollout  published weights only; `--batch` sequences of `--prompt` tokens, `--new` new ones: tokens/s of the whole, and
         a decode step as a share of its floor, which reads each weight, the experts that are hit and each cached row
         once at 4.47 TB/s. Which experts are hit is counted: drawn sequences go through the model once more. The peer
         takes turns with ours. Goals: 1.0x of vLLM's FP8 at 64, 1.15x at 256; 60 % of the floor; 20 GiB without cache.
groups   16 prompts of 4,096 tokens, 16 answers of 1,024 to each, with and without merged prefixes. (The floor reads
         the rows of each sequence, so merged steps may be below it.) Goal: 1.5x.
long     one sequence of 8K keys. Goal: 50 % of the floor.
update   `train.step.update` and publishing, as in bench_update.py, of `--tokens` in sequences of `--length`, `--micro`
         tokens a micro-batch: the state of the recipe grpo_moonlight_16b_a3b with BF16 masters, its routers frozen, and
         no reference. FLOPs are 6 for each token, active parameter and weight of the head; attention's do not count.
         FP8 and BF16 take turns in processes of their own. Goals: 45 % of 785 TFLOP/s, 1.1x BF16, 115 GiB.
ops      the absorbed forward pass as training calls it, and the backward pass (with keys and values made again), of one
         layer: packed sequences of 16 x 2048 and 4 x 8192. FLOPs of a query, key and head: 2 x 1,088 absorbed, 1,664
         expanded and backward. Goal: 350 TFLOP/s forward. "attend, triton": not by `latent_rows`; bits are compared.
forms    decode attention of one layer with each number of warps and stages, and by tiles and columns: which is the
         fastest, and equal bits.
shared   decode attention of one layer where groups of 16 share a prompt and have 512 keys each of their own: apart,
         merged, whether "auto" would merge, and whether the bits are equal.

Writes benchmarks/results/latent.json after each row: new rows replace old ones of the same part, case and round. A part
that fails is told, and the others go on.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import (
    emit,
    end_on_sigterm,
    environment,
    graphed,
    interleaved,
    median,
    require_gpu,
    table,
    timed,
)
from torch import nn
from whole_model import (
    Row,
    Workload,
    add_options,
    in_turns,
    measured,
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
from jetrl.engine.sharing import TILE as PAGE
from jetrl.engine.sharing import Merge, Sharing, chunk_size, find_sharing
from jetrl.kernels.attention import latent
from jetrl.kernels.attention.latent import LatentSizes, Up
from jetrl.kernels.attention.state import SharedPages
from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.update.gradient import Gradient
from jetrl.model.latent_attention import sizes_of
from jetrl.spec import SHAPES
from jetrl.types import PagedPlan, VarlenPlan

PARTS = ("rollout", "groups", "long", "update", "ops", "forms", "shared")
GIB = 2**30
MERGE: dict[str, tuple[Merge, ...]] = {"groups": ("off", "on")}  # by part, `rollout.merge_prefix`


# rollout, groups, long


def workloads(args: argparse.Namespace) -> list[Workload]:
    """Those of a part."""
    if args.part == "groups":
        return [(4, 20, 12, 2) if args.tiny else (256, 4096, 1024, 16)]
    if args.part == "long":
        return [(1, 20, 12, 1) if args.tiny else (1, 8192 - 256, 256, 1)]
    return [(batch, args.prompt, args.new, 1) for batch in args.batch]


def rollout(args: argparse.Namespace) -> Iterator[Row]:
    """A row for each workload."""
    model = random_model(args.shape, args.one, args.device, args.layers, masters=False)
    held = torch.cuda.memory_allocated() if args.device == "cuda" else 0
    for merge, work in itertools.product(MERGE.get(args.part, ("auto",)), workloads(args)):
        first = min(work[1], 512) if args.part == "rollout" else work[1]  # long ones have graphs of their own
        row = rollout_row(model, args.one == "fp8", work, (first, 4 if args.tiny else 40), merge, held)
        name = f"jetrl {args.one}" + (" merged" if merge == "on" else "")
        yield row | {"engine": name, "precision": args.one, "merge_prefix": merge}


# update


def updates(args: argparse.Namespace) -> Iterator[Row]:
    """Rows of one precision in this process: the first call compiles and is not counted."""
    spec = spec_of(args.shape, args.layers)
    config = update_config(spec, args.one, args.device, args.length, args.micro, checkpointing=args.checkpointing)
    model = random_model(args.shape, args.one, args.device, args.layers, masters=True)
    step = update_of(model, config, args.tokens, args.length)
    step()
    for number in range(args.repeats):
        ms, peak = timed(step)
        row = update_row(spec, args.tokens, ms, peak, args.device) | {"precision": args.one, "number": number}
        yield row | {"length": args.length, "micro": args.micro, "checkpointing": args.checkpointing}


# ops


def calls_of(s: LatentSizes, count: int, length: int, device: str) -> dict[str, Callable[[], Any]]:
    """The ops of one layer on packed sequences of random numbers."""
    g, tokens, scale = torch.Generator().manual_seed(1), count * length, 0.1

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(device, torch.bfloat16)

    q, row = drawn(tokens, s.heads, s.nope + s.rope), drawn(tokens, s.rank + s.rope)
    w, grad = drawn(s.heads * (s.nope + s.value), s.rank) * 0.04, drawn(tokens, s.heads * s.value)
    up = Up(Gradient(nn.Parameter(w.float())), w, latent.prepare(w, s))
    ends = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
    plan, backend = VarlenPlan(ends, (length,) * count), backend_of(q)
    absorbed = latent.absorb(q, up, s)
    attended, lse = backend.latent_attend(absorbed, row, plan, scale, s, True)
    out = latent.lift(attended, up, s)

    def attend() -> Any:
        return backend.latent_attend(absorbed, row, plan, scale, s, True)

    more: dict[str, Callable[[], Any]] = {}
    if device == "cuda":
        equal = all(torch.equal(a, b) for a, b in zip(by_triton(attend), (attended, lse), strict=True))
        more = {"attend, triton" + " (DIFFERENT bits)" * (not equal): partial(by_triton, attend)}
    return {
        "absorb": lambda: latent.absorb(q, up, s), "lift": lambda: latent.lift(attended, up, s),
        "attend": attend, **more,
        "backward": lambda: backend.latent_backward(grad, q, row, w, up.operand, plan, scale, s, out, lse),
    }


def forms(args: argparse.Namespace) -> Iterator[Row]:
    """Decode attention of a layer with the warps and stages that its programs of few rows may have, and by tiles and
    columns (`latent_split`), as CUDA graphs."""
    from jetrl.kernels.attention import latent_split, latent_triton

    s, g = sizes_of(spec_of(args.shape, args.layers)), torch.Generator().manual_seed(1)
    for batch, keys in ((64, 1024), (64, 4096), (256, 1536), (1, 1024), (1, 8192), (4, 8192), (16, 8192), (32, 2048)):
        _, plan = decode_of_groups(s, batch, 1, keys - 512, "cuda")
        shape = int(plan.block_table.max()) + 1, PAGE, s.rank + s.rope
        q = torch.randn(batch, s.heads, s.rank + s.rope, generator=g).to("cuda", torch.bfloat16)
        pages = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        def call(form: tuple[int, int] | str, *given: Any) -> torch.Tensor:
            with (
                mock.patch.object(latent_triton, "form_of", lambda *asked: form),
                mock.patch.object(latent_triton, "FEW_IN_GLUON", form == "gluon"),
                mock.patch.object(latent_split, "SEQUENCES", 1 << 20 if form == "split" else 0),
            ):
                return backend_of(given[0]).latent_attend_cached(*given)  # type: ignore[no-any-return]

        given = q, None, pages, replace(plan, shared=None), 0.05, s
        default: Any = latent_triton.form_of(16, batch, latent.STEPS["hopper"])
        if batch <= latent_split.SEQUENCES:
            default = "split"
        elif batch <= latent_triton._PROCESSORS and latent_triton.FEW_IN_GLUON:
            default = "gluon"
        tried: list[Any] = ["gluon", *["split"] * (batch <= 64), *itertools.product((4, 8), (2, 3))]
        calls = {
            (f"decode, {form}" if isinstance(form, str) else f"decode, {form[0]} warps, {form[1]} stages")
            + " (default)" * (form == default): partial(call, form, *given)
            for form in tried
        }
        want = call((4, 1), *given)
        equal = {name: torch.equal(one(), want) for name, one in calls.items()}
        graphs = {name: graphed(one) for name, one in calls.items()}
        for name, found in interleaved(graphs, rounds=args.repeats * 10).items():
            us = median(found)
            yield {"op": name, "case": f"{batch} x {keys}", "us": us, "spread %": 100 * (max(found) / us - 1),
                   "TB/s": batch * keys * 2 * (s.rank + s.rope) / us / 1e6,
                   "bits": "equal" if equal[name] else "DIFFERENT"}


def ops(args: argparse.Namespace) -> Iterator[Row]:
    """The absorbed forward pass of packed sequences, and the backward pass."""
    s = sizes_of(spec_of(args.shape, args.layers))
    for count, length in [(2, 40)] if args.tiny else [(16, 2048), (4, 8192)]:
        calls = calls_of(s, count, length, args.device)
        if args.device == "cuda":
            times = interleaved(calls, rounds=args.repeats * 5)
        else:
            times = {name: [timed(call)[0] * 1e3] for name, call in calls.items()}
        pairs = count * length * length / 2 * s.heads
        flops = {**{name: 2 * pairs * (2 * s.rank + s.rope) for name in times if name.startswith("attend")},
                 "backward": 2 * pairs * (3 * (s.nope + s.rope) + 2 * s.value)}
        for name, found in times.items():
            us = median(found)
            speed = {"TFLOP/s": flops[name] / us / 1e6} if name in flops else {}
            spread = 100 * (max(found) / us - 1)
            yield {"op": name, "case": f"{count} x {length}", "us": us, "spread %": spread, **speed}


# shared


def by_triton(call: Callable[[], Any]) -> Any:
    """`call`, with programs of 64 rows by Triton in place of `latent_rows`."""
    from jetrl.kernels.attention import latent_triton

    with mock.patch.object(latent_triton, "ROWS_IN_GLUON", False):
        return call()


def decode_of_groups(s: LatentSizes, batch: int, group: int, prompt: int, device: str) -> tuple[Sharing, PagedPlan]:
    """A decode step of `batch` sequences of 512 own keys; the plan with what they share, over pages where they fall."""
    first, own = prompt // PAGE, 512 // PAGE
    table = np.zeros((batch, first + own), dtype=np.int32)
    for b in range(batch):
        table[b, :first] = b // group * first + np.arange(first)
        table[b, first:] = batch // group * first + b * own + np.arange(own)
    table = np.random.default_rng(1).permutation(table.max() + 1).astype(np.int32)[table]
    found = find_sharing(table, np.full(batch, prompt + 511), PAGE, chunk_size(s.heads))
    shared = SharedPages(*(torch.from_numpy(x).to(device) for x in found.padded(batch, found.room)))
    last = torch.from_numpy(table[:, -1].astype(np.int64)).to(device)
    plan = PagedPlan(
        None, torch.arange(batch + 1, dtype=torch.int32, device=device), (1,) * batch,  # type: ignore[arg-type]
        torch.full((batch,), prompt + 512, dtype=torch.int32, device=device), (table.shape[1],) * batch,
        torch.from_numpy(table).to(device), last * PAGE + PAGE - 1, shared,
    )
    return found, plan


def decodes(args: argparse.Namespace) -> Iterator[Row]:
    """Decode attention of a layer, apart and merged."""
    s, g = sizes_of(spec_of(args.shape, args.layers)), torch.Generator().manual_seed(1)
    cases = ((256, 4096), (256, 2048), (256, 1024), (256, 512), (128, 4096), (64, 4096), (64, 8192))
    for batch, prompt in [(4, 256)] if args.tiny else cases:
        found, plan = decode_of_groups(s, batch, min(batch, 16), prompt, args.device)
        count = int(plan.block_table.max()) + 1
        q, row, pages = (
            torch.randn(shape, generator=g).to(args.device, torch.bfloat16)
            for shape in ((batch, s.heads, s.rank + s.rope), (batch, s.rank + s.rope), (count, PAGE, s.rank + s.rope))
        )
        plans = {"apart": replace(plan, shared=None), "merged": plan}
        calls: dict[str, Callable[[], Any]] = {
            name: partial(backend_of(q).latent_attend_cached, q, row, pages, p, 0.05, s) for name, p in plans.items()
        }
        if args.device == "cuda":
            calls["merged, triton"] = partial(by_triton, calls["merged"])
        first, *others = (call() for call in calls.values())
        equal = all(torch.equal(first, other) for other in others)
        if args.device == "cuda":
            times = interleaved({name: graphed(call) for name, call in calls.items()}, rounds=args.repeats * 10)
        else:
            times = {name: [timed(call)[0] * 1e3] for name, call in calls.items()}
        row_bytes = 2 * (s.rank + s.rope)
        yield {
            "case": f"{batch} x ({prompt} + 512)", **{name: median(found) for name, found in times.items()},
            "gain": median(times["apart"]) / median(times["merged"]), "bits": "equal" if equal else "DIFFERENT",
            "TB/s apart": batch * (prompt + 512) * row_bytes / median(times["apart"]) / 1e6,
            "auto merges": found.merges("auto", batch, row_bytes, latent=True),
        }


# all of it


def asked(args: argparse.Namespace) -> Iterator[tuple[str, int, list[str]]]:
    """What is measured by our processes, in order, in which round, with their own arguments; no arguments: the peer."""
    for part in args.parts:
        if part not in ("ops", "forms", "shared"):
            yield from in_turns(args, part)
        elif part != "forms" or not args.tiny:  # these are of kernels that a CPU does not have
            yield part, 0, [f"--part={part}"]


def peers(args: argparse.Namespace, part: str) -> Iterator[Row]:
    """The rows of another engine for the workloads of a part."""
    works = workloads(argparse.Namespace(**{**vars(args), "part": part}))
    return peer_rows(args.peer, args.peer_dtype, spec_of(args.shape, args.layers), part, works)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", default="moonlight-16b-a3b", choices=[n for n, s in SHAPES.items() if s.latent])
    add_options(parser, "latent")
    return parsed_by(parser, "tiny-mla")


def main() -> None:
    args = parsed()
    if args.part:
        for row in {"update": updates, "ops": ops, "forms": forms, "shared": decodes}.get(args.part, rollout)(args):
            emit(row | {"part": args.part, "environment": environment()})
        return
    if not args.tiny:
        require_gpu()
    end_on_sigterm()
    new, failed = measured(__file__, args, asked(args), partial(peers, args))
    if of_part := [row for row in new if row["part"] == "ops"]:
        print(table(of_part, ["op", "case", "us", "TFLOP/s", "spread %"]))
    if of_part := [row for row in new if row["part"] == "forms"]:
        print(table(of_part, ["op", "case", "us", "TB/s", "spread %", "bits"]))
    if of_part := [row for row in new if row["part"] == "shared"]:
        columns = ["case", "apart", "merged", "merged, triton", "gain", "TB/s apart", "auto merges", "bits"]
        print(table(of_part, columns))
    tell(new, failed)


if __name__ == "__main__":
    main()
