"""Exact speculation: what drafts cost, what they save at a given acceptance, and how many of them a real model accepts.

    python benchmarks/bench_draft.py                                   # steps and engine, Qwen3-8B's shape, FP8
    python benchmarks/bench_draft.py --quick                           # the same in about a minute
    python benchmarks/bench_draft.py --parts acceptance --train "h200_smollm2 model.path=FOLDER train.steps=20"

- steps: milliseconds of a decode step with k drafts, at batch sizes and contexts, over random keys; and tokens a second
  at forced acceptance, against steps without drafts.
- engine: whole rollouts. Drafts that hold with a forced probability (answers of a run before, spoilt), then what
  `speculate = "auto"` costs where no draft ever holds, against the same rollout without. Tokens must be equal.
- acceptance: trains with drafts at every step, and tells how many held, by source, in the first and the last steps.
  A draft holds or not by the bits of the rollout, so a CPU may measure this.

The tables come last. Writes `results/draft.json`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, SPEC, NoText, bits, require_gpu, save, table
from torch import Tensor

from jetrl.api import random_model
from jetrl.engine.engine import PagedEngine
from jetrl.engine.graphs.cache import GraphCache
from jetrl.engine.graphs.capture import Capture
from jetrl.engine.graphs.decode import DecodeGraphs, DecodeInputs
from jetrl.engine.graphs.drafts import DraftGraphs
from jetrl.engine.plan import Plan
from jetrl.engine.sampler import SamplingTable
from jetrl.engine.settings import EngineSettings
from jetrl.engine.speculation.depth import DEPTHS, DepthRule
from jetrl.engine.speculation.drafts import DraftIndex
from jetrl.engine.speculation.sources import SOURCES
from jetrl.engine.speculation.speculator import Speculator, build_speculator
from jetrl.engine.state_pool import StatePool
from jetrl.report.recorder import read_metrics
from jetrl.types import Completion, Request, SamplingParams, WeightSet

LEVELS = (0.0, 0.4, 0.6, 0.8)  # forced acceptance
FORCED = ((0.6, 3), (0.8, 7))  # in whole rollouts, and the drafts of a step
QUICK = {"batch": [1, 16, 64], "engine_batch": [16], "repeats": 2, "rounds": 1, "forced": FORCED[:1]}
PAGE, BURST = 128, 8


class Forced(DraftIndex):
    """Drafts that hold with a given probability: known answers, spoilt. A text's first token tells whose it is."""

    def answering(
        self, requests: Sequence[Request], completions: Sequence[Completion], holds: float, vocab: int
    ) -> Forced:
        """`requests[i]` begins with token i + 1."""
        whole = [(*r.tokens, *c.tokens.tolist()) for r, c in zip(requests, completions, strict=True)]
        assert all(tokens[0] == i + 1 for i, tokens in enumerate(whole))
        self.answers = torch.zeros(len(whole) + 1, self.texts.shape[1], dtype=torch.int64, device=self.device)
        for i, tokens in enumerate(whole):
            self.answers[i + 1, : len(tokens)] = torch.tensor(tokens)
        self.holds, self.vocab = holds, vocab
        return self

    def draft(self, rows: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        who = self.texts[rows, 0].to(torch.int64).clamp(0, len(self.answers) - 1)[:, None]
        at = (self.lengths[rows][:, None] + torch.arange(depth, device=rows.device)).clamp_max(self.texts.shape[1] - 1)
        noise = ((at * 2654435761 + who * 97_003_711) % 1_000_003 * 7919) % 1000
        right = self.answers[who, at]
        drafts = torch.where(noise < 1000 * self.holds, right, (right + 1) % self.vocab)
        return drafts, torch.where(rows < self.rows, depth, 0), rows


class Useless(DraftIndex):
    """As many drafts as asked for, of which none holds (but by chance)."""

    def draft(self, rows: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        super().draft(rows, depth)  # what looking for them costs
        return torch.ones(len(rows), depth, dtype=torch.int64, device=rows.device), torch.full_like(rows, depth), rows


def forced(
    asked: Sequence[Request], want: Sequence[Completion], holds: float, *sizes: Any,
    vocabulary: int = SPEC.vocab_size,
) -> Forced:
    return Forced(*sizes).answering(asked, want, holds, vocabulary)


def expected(holds: float, depth: int) -> float:
    """Tokens of a step whose drafts hold independently."""
    return 1.0 + sum(holds**j for j in range(1, depth + 1))


# ---- steps ----------------------------------------------------------------------------------------------------------


def steps(model: Any, batches: Sequence[int], contexts: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """A decode step with k drafts over random keys, in graphs; the depths of a batch and context take turns."""
    for context in contexts:
        for batch in batches:
            times = step_times(model, batch, context, repeats)
            rows = []
            for k, step in times.items():
                row = {"part": "steps", "batch": batch, "context": context, "drafts": k, "step_ms": step,
                       "of plain": step / times[0]}
                row |= {f"tokens/s at {a}": batch * expected(a, k) / step * 1e3 for a in LEVELS}
                rows.append(row | {f"gain at {a}": expected(a, k) * times[0] / step for a in LEVELS})
            print(table(rows, STEP_COLUMNS), flush=True)
            yield from rows


def step_times(model: Any, batch: int, context: int, repeats: int) -> dict[int, float]:
    """Milliseconds of a step, by its number of drafts; the first round captures and is not counted."""
    torch.cuda.empty_cache()  # of the sizes before
    width = -(-(context + 512) // PAGE)
    cache = StatePool(model.spec, batch * width, PAGE, model.dtype, torch.device("cuda"), model.recipe.kv_cache)
    fill(cache)
    index = Useless(batch, context + 512, torch.device("cuda"))
    graphs = GraphCache(Capture(torch.device("cuda")), model)
    plain = DecodeGraphs(model, cache, graphs, BURST)
    drafted = DraftGraphs(model, cache, index, graphs, BURST)
    times: dict[int, list[float]] = {k: [] for k in DEPTHS}
    for turn in range(repeats + 1):
        for k in DEPTHS:
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(plain, drafted, batch, context, width, k)
            if turn:
                times[k].append((time.perf_counter() - start) / BURST * 1e3)
    return {k: statistics.median(each) for k, each in times.items()}


STEP_COLUMNS = ["batch", "context", "drafts", "step_ms", "of plain", *(f"gain at {a}" for a in LEVELS)]


def fill(cache: StatePool) -> None:
    """Random keys and values."""
    for x in (cache.keys, cache.values):
        if x.element_size() == 1:
            x.view(torch.uint8).random_(0x20, 0x40)
        else:
            x.normal_()
    if cache.scales is not None:
        cache.scales.fill_(0.125)


def run(plain: DecodeGraphs, drafted: DraftGraphs, batch: int, context: int, width: int, depth: int) -> None:
    """One burst."""
    sequences = np.arange(batch)
    pages = np.random.default_rng(0).permutation(batch * width).reshape(batch, width).astype(np.int32)
    positions = np.full(batch, context - 1)
    params = SamplingTable.build([SamplingParams(1)] * batch, list(range(batch)))
    if not depth:
        slots = pages[:, (context - 1) // PAGE].astype(np.int64) * PAGE + (context - 1) % PAGE
        step = DecodeInputs(
            tokens=sequences + 5, positions=positions, slots=slots, keys=params.key, sample_positions=positions + 1,
            temperature=params.temperature, block_table=pages,
        )
        plain.run(step, BURST)
        return
    plan = Plan(
        starts=positions, counts=np.ones(batch, dtype=np.int64), tokens=sequences + 5, positions=positions,
        block_table=pages, copies=np.zeros((0, 2), dtype=np.int64), sample_rows=sequences, sample_requests=sequences,
        sample_positions=positions + 1, sample_slots=sequences, depth=depth, reach=positions + BURST * (depth + 1),
    )
    drafted.run(plan, params, sequences, BURST)


# ---- engine ---------------------------------------------------------------------------------------------------------


def engine(
    model: Any, batches: Sequence[int], prompt: int, new: int, rounds: int, levels: Sequence[tuple[float, int]]
) -> Iterator[dict[str, Any]]:
    """Whole rollouts, the variants of a batch in turns; the first round compiles and is not counted."""
    for batch in batches:
        g, sampling = np.random.default_rng(1), SamplingParams(new, ignore_eos=True)
        asked = [
            Request(i, (i + 1, *g.integers(1, SPEC.vocab_size, prompt - 1).tolist()), sampling)
            for i in range(batch)
        ]
        want = rollout(make(model, None, batch), asked)[0]
        # its own index would know the answers from the round before
        useless = build_speculator("auto", 7, 256)
        assert useless is not None
        useless.new_index = Useless  # type: ignore[method-assign, assignment]
        variants: dict[str, Speculator | None] = {"off": None, "auto, never accepted": useless}
        for holds, depth in levels:
            speculator = variants[f"{depth} drafts, {holds}"] = Speculator(
                DepthRule(len(SOURCES), depth, always=True), 256
            )
            speculator.new_index = partial(forced, asked, want, holds)  # type: ignore[method-assign]
        engines = {name: make(model, speculator, batch) for name, speculator in variants.items()}
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        per_step: dict[str, float] = {}
        for turn in range(rounds + 1):
            for name, of in engines.items():
                got, spent = rollout(of, asked)
                same = all(bits(a) == bits(b) for a, b in zip(got, want, strict=True))
                if not same:
                    raise AssertionError(f"batch {batch}, {name}: other bits than without drafts")
                per_step[name] = of.take_metrics().get("rollout/tokens_per_decode_step", 1.0)
                if turn:
                    seconds[name].append(spent)
        base, found = statistics.median(seconds["off"]), []
        for name, rollouts in seconds.items():
            each = statistics.median(rollouts)
            found.append({
                "part": "engine", "batch": batch, "prompt": prompt, "new": new, "variant": name, "seconds": each,
                "rounds": rollouts, "tokens/s": batch * new / each, "gain": base / each, "tokens/step": per_step[name],
            })
        print(table(found, ENGINE_COLUMNS), flush=True)
        yield from found


ENGINE_COLUMNS = ["batch", "variant", "seconds", "tokens/s", "tokens/step", "gain"]


def make(model: Any, speculator: Speculator | None, batch: int) -> PagedEngine:
    settings = EngineSettings(page_size=PAGE, share_beginnings=False, max_tokens_per_step=8192, max_num_seqs=batch)
    of = PagedEngine(model, NoText(), "flow", settings, speculator=speculator)
    of.load(WeightSet(1, "flow", {}))
    return of


def rollout(of: PagedEngine, asked: Sequence[Request]) -> tuple[list[Completion], float]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    return of.generate(asked), time.perf_counter() - start


# ---- acceptance -----------------------------------------------------------------------------------------------------


def acceptance(train: str) -> list[dict[str, Any]]:
    """Trains by the command line and reads the metrics of drafts."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jetrl.cli", "train", *train.split(), "rollout.speculate=on", "name=drafts",
                   f"output_dir={folder}"]
        subprocess.run(command, check=True)
        rows = [row for row in read_metrics(Path(folder) / "drafts") if row["step"] > 0]
    found = []
    for name, part in (("first 3 steps", rows[:3]), ("last 3 steps", rows[-3:])):
        keys = sorted({k for row in part for k in row if k.startswith("rollout/")})
        values = {k.removeprefix("rollout/"): statistics.mean(row[k] for row in part if k in row) for k in keys}
        found.append({"part": "acceptance", "when": name, **values})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["steps", "engine"], choices=["steps", "engine", "acceptance"])
    parser.add_argument("--precision", default="fp8")
    parser.add_argument("--kv", default="fp8", help="format of the KV cache")
    parser.add_argument("--layers", type=int, default=SPEC.num_layers)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--context", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--engine-batch", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--repeats", type=int, default=4, help="bursts of each kind of step")
    parser.add_argument("--rounds", type=int, default=2, help="rollouts of each variant")
    parser.add_argument("--quick", action="store_true", help=f"other defaults: {QUICK}")
    parser.add_argument("--train", default="h200_smollm2 train.steps=20", help="recipe and overrides, for acceptance")
    parser.add_argument("--name", default="draft")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.set_defaults(forced=FORCED)
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args()
    begin = time.perf_counter()
    if {"steps", "engine"} & set(args.parts):
        require_gpu()
    rows: list[dict[str, Any]] = []
    failed = []
    model = None
    if {"steps", "engine"} & set(args.parts):
        model = random_model("qwen3-8b", args.precision, "cuda", args.layers, args.kv)
    calls = {
        "steps": lambda: steps(model, args.batch, args.context, args.repeats),
        "engine": lambda: engine(model, args.engine_batch, args.prompt, args.new, args.rounds, args.forced),
        "acceptance": lambda: acceptance(args.train),
    }
    for part in args.parts:
        print(f"{part} begins after {time.perf_counter() - begin:.0f} s", flush=True)
        try:
            for row in calls[part]():  # those before a failure stay
                rows.append(row)
        except Exception:  # the other parts go on; the failure is told last
            failed.append(f"{part} failed:\n{traceback.format_exc()}")
        torch.cuda.empty_cache()
    print(f"done after {time.perf_counter() - begin:.0f} s", flush=True)
    for part, columns in (("steps", STEP_COLUMNS), ("engine", ENGINE_COLUMNS), ("acceptance", None)):
        mine = [row for row in rows if row["part"] == part]
        if mine:
            print(f"\n{part}\n" + table(mine, columns or list(mine[0])[1:]))
    if rows:
        save(args.name, rows, args.out)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
