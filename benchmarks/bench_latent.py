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
         expanded and backward. Goal: 350 TFLOP/s forward. "attend, gluon": by `latent_rows`, whose bits are compared.
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
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench_rollout import PEER_MARK, DecodeClock, peer_command
from bench_step import BF16_CEILING
from bench_update import FLOW, groups_of
from common import (
    READ_TBPS,
    RESULTS,
    NoText,
    ask,
    emit,
    end_on_sigterm,
    environment,
    interleaved,
    median,
    require_gpu,
    save,
    saved_rows,
    split_variant,
    table,
    timed,
)
from torch import nn

from jetrl.api import random_model
from jetrl.config import Config, load_config, resolve
from jetrl.config.shipped import find_recipe
from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.engine.sharing import TILE as PAGE
from jetrl.engine.sharing import Merge, Sharing, chunk_size, find_sharing
from jetrl.engine.state_pool import page_bytes
from jetrl.kernels.attention import latent
from jetrl.kernels.attention.latent import LatentSizes, Up
from jetrl.kernels.attention.state import SharedPages
from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.update.gradient import Gradient
from jetrl.model.block import Routes
from jetrl.model.latent_attention import sizes_of
from jetrl.model.master import accumulate_in, masters_of
from jetrl.model.moe import routers_of
from jetrl.model.transformer import Transformer
from jetrl.parity.rows import varlen
from jetrl.precision.blocks.layouts import linears_of
from jetrl.precision.formats import BF16
from jetrl.run.fit.advice import on_gpu
from jetrl.spec import SHAPES, ModelSpec
from jetrl.train.optim import build_optimizer
from jetrl.train.packing import pack
from jetrl.train.passes import estimate
from jetrl.train.publish import publish
from jetrl.train.step import Learner, update
from jetrl.types import PagedPlan, Request, SamplingParams, StepReport, VarlenPlan, WeightSet

Row = dict[str, Any]
PARTS = ("rollout", "groups", "long", "update", "ops", "forms", "shared")
GIB = 2**30
MERGE: dict[str, tuple[Merge, ...]] = {"groups": ("off", "on")}  # by part, `rollout.merge_prefix`


# counting


def weights_of(spec: ModelSpec, hit: float) -> tuple[float, float]:
    """Elements of the weights that a decode step reads, `hit` experts in a layer: of linears, which FP8 makes bytes,
    and of what is BF16 in every recipe (kv_b, routers, lm_head)."""
    m, e = spec.latent, spec.experts
    assert m is not None and e is not None
    linears = 0.0
    for layer in range(spec.num_layers):
        for linear in linears_of(spec, layer).values():
            share = hit / linear.experts if linear.experts else 1.0
            linears += share * sum(linear.sections) * linear.in_size
    kv_b = spec.num_layers * spec.num_heads * (m.nope + m.value) * m.rank
    return linears, kv_b + len(spec.expert_layers) * e.count * spec.hidden_size + spec.vocab_size * spec.hidden_size


def floor_ms(spec: ModelSpec, fp8: bool, sequences: int, context: float, hit: float) -> float:
    """Milliseconds of a decode step that reads each weight and each cached row once."""
    assert spec.latent is not None
    linears, rest = weights_of(spec, hit)
    cache = sequences * context * spec.num_layers * 2 * spec.latent.row
    return (linears * (1 if fp8 else 2) + 2 * rest + cache) / READ_TBPS / 1e9


def flops_of_update(spec: ModelSpec, tokens: int) -> float:
    """By active parameters and the head: three passes of 2 for each of them and token."""
    assert spec.experts is not None
    return 6.0 * tokens * sum(weights_of(spec, spec.experts.per_token))


@torch.no_grad()
def experts_hit(model: Transformer, sequences: list[list[int]], positions: list[int], at_once: int = 8) -> float:
    """Distinct experts that a step's tokens choose, mean over layers and the steps at `positions`."""
    assert model.spec.experts is not None
    device, hit = model.cos.device, dict[int, torch.Tensor]()
    at = torch.tensor(positions, device=device)
    for first in range(0, len(sequences), at_once):
        part = [torch.tensor(s, device=device) for s in sequences[first : first + at_once]]
        routes, start = Routes(), 0
        model(varlen(part), routes=routes)
        for tokens in part:
            for layer, chosen in routes.chosen.items():
                seen = hit.setdefault(layer, torch.zeros(len(at), model.spec.experts.count, device=device))
                seen.scatter_(1, chosen[start + at], 1.0)
            start += len(tokens)
    return torch.stack([seen.sum(-1).mean() for seen in hit.values()]).mean().item()


# rollout, groups, long


def requests_of(
    spec: ModelSpec, sequences: int, prompt: int, new: int, group: int = 1, seed: int = 1
) -> list[Request]:
    """Random prompts, each for `group` sequences, which never stop early."""
    g, sampling = np.random.default_rng(seed), SamplingParams(new, ignore_eos=True)
    prompts = [tuple(g.integers(1, spec.vocab_size, prompt).tolist()) for _ in range(sequences // group)]
    return [Request(i, prompts[i // group], sampling) for i in range(sequences)]


def workloads(args: argparse.Namespace) -> list[tuple[int, int, int, int]]:
    """Sequences, prompt, new tokens and sequences of a prompt, of a part."""
    if args.part == "groups":
        return [(4, 20, 12, 2) if args.tiny else (256, 4096, 1024, 16)]
    if args.part == "long":
        return [(1, 20, 12, 1) if args.tiny else (1, 8192 - 256, 256, 1)]
    return [(batch, args.prompt, args.new, 1) for batch in args.batch]


def rollout(args: argparse.Namespace) -> Iterator[Row]:
    """A row for each workload: one `generate`, as a whole and in the steps that decode only."""
    model = random_model(args.shape, args.one, args.device, args.layers, masters=False)
    held = torch.cuda.memory_allocated() if args.device == "cuda" else 0
    for merge, (sequences, prompt, new, group) in itertools.product(MERGE.get(args.part, ("auto",)), workloads(args)):
        settings = EngineSettings(
            page_size=128 if args.device == "cuda" else 16, share_beginnings=group > 1, max_num_seqs=sequences,
            max_tokens_per_step=8192, merge_prefix=merge,
            kv_cache_tokens=None if args.device == "cuda" else 16 * sequences * (prompt + new),
        )
        engine = PagedEngine(model, NoText(), FLOW, settings)
        engine.load(WeightSet(1, FLOW, {}))
        first = min(prompt, 512) if args.part == "rollout" else prompt  # long ones have graphs of their own
        engine.generate(requests_of(model.spec, sequences, first, 4 if args.tiny else 40, group, seed=2))  # compiles
        work, clock = requests_of(model.spec, sequences, prompt, new, group), DecodeClock(sequences, prompt)
        done, ms, peak = generated(engine, work, clock)
        if not clock.steps:
            raise SystemExit(f"{new} new tokens are too few: no step had all {sequences} sequences decode")
        assert engine.stats is not None
        cache = engine.stats.num_pages * page_bytes(model.spec, settings.page_size, torch.bfloat16, BF16) / GIB
        del engine
        some = [list(r.tokens) + done[r.id] for r in work[::group]]
        hit = experts_hit(model, some, list(range(prompt, prompt + new - 1, max(1, new // 8))))
        row = {"sequences": sequences, "prompt": prompt, "new": new, "group": group, "experts hit": hit,
               "tokens/s": sequences * new / ms * 1e3, "step_ms": clock.step_ms, "context": clock.context}
        row["share of floor"] = floor_ms(model.spec, args.one == "fp8", sequences, clock.context, hit) / clock.step_ms
        if args.device == "cuda":
            row |= {"weights GiB": held / GIB, "peak GiB": peak, "peak without cache GiB": peak - cache}
            torch.cuda.empty_cache()
        name = f"jetrl {args.one}" + (" merged" if merge == "on" else "")
        yield row | {"engine": name, "precision": args.one, "merge_prefix": merge}


def generated(
    engine: PagedEngine, work: list[Request], clock: DecodeClock
) -> tuple[dict[int, list[int]], float, float]:
    """The drawn tokens by request, milliseconds of the whole, and the peak of memory in GiB."""
    done, last = dict[int, list[int]](), time.perf_counter()

    def look(report: StepReport) -> None:
        nonlocal last
        now = time.perf_counter()
        clock.look(report.generated_tokens, (now - last) * 1e3)
        last = now

    def generate() -> None:
        done.update({c.request_id: c.tokens.tolist() for c in engine.generate(work, on_step=look)})

    ms, peak = timed(generate)
    return done, ms, peak


def peers(args: argparse.Namespace, part: str) -> Iterator[Row]:
    """The rows of another engine for the same workloads."""
    for sequences, prompt, new, group in workloads(argparse.Namespace(**{**vars(args), "part": part})):
        spec = spec_of(args)
        command = peer_command(args.peer, args.peer_dtype, [sequences], prompt, new, spec.num_layers, group)
        for row in ask(command, PEER_MARK, limit=1200):
            more = {"step_ms": sequences / row["decode_tok_s"] * 1e3} if "decode_tok_s" in row else {}
            if more:
                hit = spec.experts.count if spec.experts is not None else 0
                fp8 = split_variant(args.peer_dtype)[0] == "fp8"
                more["share of floor"] = floor_ms(spec, fp8, sequences, prompt + new / 2, hit) / more["step_ms"]
            yield {
                "part": part, "engine": f"peer {args.peer_dtype}", "precision": args.peer_dtype, "prompt": prompt,
                "peer": row.get("engine", "unknown"), "sequences": sequences, "new": new, "group": group,
                "tokens/s": row["out_tok_s"], **more,
            }


# update


def config_of(args: argparse.Namespace) -> Config:
    prompt = min(512, args.length // 2)
    overrides = [
        f"precision={args.one}", "train.master_dtype=bfloat16", "train.grad_dtype=bfloat16", "rl.kl_coef=0",
        "train.reduction=fast",
        f"train.max_tokens_per_gpu={args.micro}", f"rollout.max_response_length={args.length - prompt}",
        f"task.max_prompt_length={prompt}",
    ]
    config = load_config(find_recipe("grpo_moonlight_16b_a3b"), overrides)
    if args.device == "cuda":
        return on_gpu(config)
    return resolve(config.model_copy(update={"device": "cpu", "kernels": "auto"}), cuda_available=False)


def updates(args: argparse.Namespace) -> Iterator[Row]:
    """Rows of one precision in this process: the first call compiles and is not counted."""
    config = config_of(args)
    model = random_model(args.shape, args.one, args.device, args.layers, masters=True)
    model.freeze(routers_of(model))
    model.activation_checkpointing = args.checkpointing
    accumulate_in(model, torch.bfloat16)
    learner = Learner(model, build_optimizer(masters_of(model), config.train))
    groups = groups_of(args.tokens, args.length, model.spec.vocab_size, min(512, args.length // 2))
    batches = pack(groups, max_tokens_per_gpu=args.micro, flow_digest=FLOW, weight_version=0)
    _, (batch,), _ = estimate(groups, batches, learner, None, config, True)

    def step() -> None:
        update(learner, [batch], config, 1)
        publish(model, 0, FLOW)

    step()
    for number in range(args.repeats):
        ms, peak = timed(step)
        speed = flops_of_update(model.spec, args.tokens) / ms / 1e9
        row = {"precision": args.one, "number": number, "tokens": args.tokens, "update_ms": ms, "TFLOP/s": speed}
        yield row | {"micro": args.micro, "share of 785": speed / BF16_CEILING, "checkpointing": args.checkpointing} | (
            {"peak GiB": peak} if args.device == "cuda" else {})


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

    def attend_by(gluon: bool) -> Callable[[], Any]:
        from jetrl.kernels.attention import latent_triton

        def call() -> Any:
            with mock.patch.object(latent_triton, "ROWS_IN_GLUON", gluon):
                return backend.latent_attend(absorbed, row, plan, scale, s, True)

        assert all(torch.equal(a, b) for a, b in zip(call(), (attended, lse), strict=True)), "other bits"
        return call

    return {
        "absorb": lambda: latent.absorb(q, up, s), "lift": lambda: latent.lift(attended, up, s),
        "attend": attend_by(False) if device == "cuda" else partial(
            backend.latent_attend, absorbed, row, plan, scale, s, True
        ),
        **({"attend, gluon": attend_by(True)} if device == "cuda" else {}),
        "backward": lambda: backend.latent_backward(grad, q, row, w, up.operand, plan, scale, s, out, lse),
    }


def forms(args: argparse.Namespace) -> Iterator[Row]:
    """Decode attention of a layer with the warps and stages that its programs of few rows may have, and by tiles and
    columns (`latent_split`)."""
    from jetrl.kernels.attention import latent_split, latent_triton

    s, g = sizes_of(spec_of(args)), torch.Generator().manual_seed(1)
    for batch, keys in ((64, 1024), (64, 4096), (256, 1536), (1, 1024), (1, 8192), (4, 8192), (16, 8192), (32, 2048)):
        _, plan = decode_of_groups(s, batch, 1, keys - 512, "cuda")
        shape = int(plan.block_table.max()) + 1, PAGE, s.rank + s.rope
        q = torch.randn(batch, s.heads, s.rank + s.rope, generator=g).to("cuda", torch.bfloat16)
        pages = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        def call(form: tuple[int, int] | None, *given: Any) -> torch.Tensor:
            with (
                mock.patch.object(latent_triton, "form_of", lambda *asked: form),
                mock.patch.object(latent_split, "SEQUENCES", 0 if form else 1 << 20),
            ):
                return backend_of(given[0]).latent_attend_cached(*given)  # type: ignore[no-any-return]

        given = q, None, pages, replace(plan, shared=None), 0.05, s
        programs = batch * -(-keys // latent_triton.CHUNK)
        default = latent_triton.form_of(16, programs, latent.STEPS["hopper"])
        default_form = None if batch <= latent_split.SEQUENCES else default
        tried = [None, *itertools.product((4, 8), (1, 2, 3))] if batch <= 64 else itertools.product((4, 8), (1, 2, 3))
        calls = {
            (f"decode, {form[0]} warps, {form[1]} stages" if form else "decode, split")
            + " (default)" * (form == default_form): partial(call, form, *given)
            for form in tried
        }
        want = call((4, 1), *given)
        equal = {name: torch.equal(one(), want) for name, one in calls.items()}
        for name, found in interleaved(calls, rounds=args.repeats * 5).items():
            us = median(found)
            yield {"op": name, "case": f"{batch} x {keys}", "us": us, "spread %": 100 * (max(found) / us - 1),
                   "TB/s": batch * keys * 2 * (s.rank + s.rope) / us / 1e6,
                   "bits": "equal" if equal[name] else "DIFFERENT"}


def ops(args: argparse.Namespace) -> Iterator[Row]:
    """The absorbed forward pass of packed sequences, and the backward pass."""
    s = sizes_of(spec_of(args))
    for count, length in [(2, 40)] if args.tiny else [(16, 2048), (4, 8192)]:
        calls = calls_of(s, count, length, args.device)
        if args.device == "cuda":
            times = interleaved(calls, rounds=args.repeats * 5)
        else:
            times = {name: [timed(call)[0] * 1e3] for name, call in calls.items()}
        pairs = count * length * length / 2 * s.heads
        flops = {**dict.fromkeys(("attend", "attend, gluon"), 2 * pairs * (2 * s.rank + s.rope)),
                 "backward": 2 * pairs * (3 * (s.nope + s.rope) + 2 * s.value)}
        for name, found in times.items():
            us = median(found)
            speed = {"TFLOP/s": flops[name] / us / 1e6} if name in flops else {}
            spread = 100 * (max(found) / us - 1)
            yield {"op": name, "case": f"{count} x {length}", "us": us, "spread %": spread, **speed}


# shared


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
    s, g = sizes_of(spec_of(args)), torch.Generator().manual_seed(1)
    cases = ((256, 4096), (256, 2048), (256, 1024), (256, 512), (128, 4096), (64, 4096), (64, 8192))
    for batch, prompt in [(4, 256)] if args.tiny else cases:
        found, plan = decode_of_groups(s, batch, min(batch, 16), prompt, args.device)
        count = int(plan.block_table.max()) + 1
        q, row, pages = (
            torch.randn(shape, generator=g).to(args.device, torch.bfloat16)
            for shape in ((batch, s.heads, s.rank + s.rope), (batch, s.rank + s.rope), (count, PAGE, s.rank + s.rope))
        )
        plans = {"apart": replace(plan, shared=None), "merged": plan}
        calls = {
            name: partial(backend_of(q).latent_attend_cached, q, row, pages, p, 0.05, s) for name, p in plans.items()
        }
        equal = torch.equal(*(call() for call in calls.values()))
        if args.device == "cuda":
            times = interleaved(calls, rounds=args.repeats * 10)
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


def spec_of(args: argparse.Namespace) -> ModelSpec:
    return replace(SHAPES[args.shape], num_layers=args.layers or SHAPES[args.shape].num_layers)


def asked(args: argparse.Namespace) -> Iterator[tuple[str, int, list[str]]]:
    """What is measured by our processes, in order, in which round, with their own arguments; no arguments: the peer."""
    for part in args.parts:
        if part == "forms" and args.tiny:  # of kernels that a CPU does not have
            continue
        if part in ("ops", "forms", "shared"):
            yield part, 0, [f"--part={part}"]
            continue
        for number in range(args.rounds):
            kinds = args.precision[:: 1 if number % 2 == 0 else -1]
            yield from ((part, number, [f"--part={part}", f"--one={kind}"]) for kind in kinds)
            if part != "update" and args.peer:
                yield part, number, []


_CASE = ("part", "shape", "layers", "precision", "engine", "sequences", "prompt", "new", "group", "tokens", "micro",
         "checkpointing", "op", "case", "round", "number")


def with_row(rows: list[Row], new: Row) -> list[Row]:
    """The rows with `new` in the place of an old one of the same case."""
    return [*(row for row in rows if any(row.get(key) != new.get(key) for key in _CASE)), new]


def summary(rows: list[Row]) -> list[Row]:
    """Medians of the rounds, their spread, and ours as a multiple of the peer's, or FP8's of BF16's in an update."""
    found: list[Row] = []
    for part, value in (("rollout", "tokens/s"), ("groups", "tokens/s"), ("long", "tokens/s"), ("update", "TFLOP/s")):
        cases: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
        for row in (row for row in rows if row["part"] == part):
            case = row.get("sequences"), row.get("prompt"), row.get("tokens"), row.get("checkpointing")
            cases.setdefault(case, {}).setdefault(row.get("engine", row["precision"]), []).append(row)
        for case, engines in cases.items():
            bases = [of for name, of in engines.items() if name.startswith("peer") or name == "bf16"]
            base = [row[value] for of in bases for row in of]
            for name, of in engines.items():
                values = [row[value] for row in of]
                line: Row = {"part": part, "of": name, "case": " ".join(str(x) for x in case if x is not None)}
                line |= {value: median(values), "spread %": 100 * (max(values) / min(values) - 1)}
                for key in ("step_ms", "share of floor", "share of 785", "peak GiB", "peak without cache GiB"):
                    if told := [row[key] for row in of if key in row]:
                        line[key] = median(told)
                if base:
                    line["ratio"] = line[value] / median(base)
                found.append(line)
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", default="moonlight-16b-a3b", choices=[n for n, s in SHAPES.items() if s.latent])
    parser.add_argument("--precision", nargs="+", choices=["fp8", "bf16"], default=["fp8", "bf16"])
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 256], help="rollout: sequences")
    parser.add_argument("--prompt", type=int, default=512, help="rollout: tokens of a prompt")
    parser.add_argument("--new", type=int, default=1024, help="rollout: new tokens of a sequence")
    parser.add_argument("--tokens", type=int, default=32768, help="update: of an update")
    parser.add_argument("--length", type=int, default=2048, help="update: of a sequence")
    parser.add_argument("--micro", type=int, default=8192, help="update: tokens of a micro-batch")
    parser.add_argument("--checkpointing", action="store_true", help="update: activations are made again")
    parser.add_argument("--repeats", type=int, default=2, help="update: in each process; ops: five times as many")
    parser.add_argument("--peer", default="", help="command of another engine, as for bench_rollout.py")
    parser.add_argument("--peer-dtype", default="fp8")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU; nothing is kept")
    parser.add_argument("--name", default="latent")
    parser.add_argument("--out", type=Path, default=RESULTS)
    for name in ("--part", "--one"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = "cpu" if args.tiny else "cuda"
    if args.tiny:
        args.shape, args.batch, args.prompt, args.new, args.rounds = "tiny-mla", [2, 3], 20, 12, 1
        args.tokens, args.length, args.micro, args.repeats = 256, 64, 128, 1
    return args


def main() -> None:
    args = parsed()
    if args.part:
        for row in {"update": updates, "ops": ops, "forms": forms, "shared": decodes}.get(args.part, rollout)(args):
            emit(row | {"part": args.part, "environment": environment()})
        return
    if not args.tiny:
        require_gpu()
    end_on_sigterm()
    rows, new, failed = saved_rows(args.out / f"{args.name}.json"), list[Row](), list[str]()
    for part, number, words in asked(args):
        what, start = f"{part}, {words[-1] if words else 'peer'}, round {number}", time.perf_counter()
        try:
            ours = [sys.executable, __file__, *words, *sys.argv[1:]]
            for row in ask(ours, limit=900) if words else peers(args, part):
                row |= {"shape": args.shape, "layers": spec_of(args).num_layers, "round": number}
                new.append(row)
                rows = with_row(rows, row)
                if not args.tiny:
                    save(args.name, rows, args.out)
        except (RuntimeError, SystemExit) as error:  # the others are measured all the same
            failed.append(what)
            print(f"{what}: FAILED\n{error}", flush=True)
        print(f"{what}: {time.perf_counter() - start:.0f} s", flush=True)
    if of_part := [row for row in new if row["part"] == "ops"]:
        print(table(of_part, ["op", "case", "us", "TFLOP/s", "spread %"]))
    if of_part := [row for row in new if row["part"] == "forms"]:
        print(table(of_part, ["op", "case", "us", "TB/s", "spread %", "bits"]))
    if of_part := [row for row in new if row["part"] == "shared"]:
        print(table(of_part, ["case", "apart", "merged", "gain", "TB/s apart", "auto merges", "bits"]))
    if lines := summary(new):
        print(table(lines, list(dict.fromkeys(key for line in lines for key in line))))
    if failed:
        raise SystemExit(f"failed: {failed}")


if __name__ == "__main__":
    main()
