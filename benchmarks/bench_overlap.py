"""Would a reference pass gain from running beside a rollout's tail, on a stream of its own, instead of after it?

    python benchmarks/bench_overlap.py [--rows 1 4 16] [--keys 10000] [--tokens 8192]     # writes results/overlap.json

Decode steps of a few sequences leave most of the GPU's arithmetic idle, and a scoring pass is bound by arithmetic. But
each of a step's 250 dependent kernels waits until a multiprocessor is free, and the pass's persistent GEMMs hold theirs
to their end. So this measures Qwen3-8B's shape, FP8 with an FP8 cache: decode steps alone, passes alone, and both at
once with several shares of the multiprocessors for the pass's GEMMs, decode steps at normal and at high priority.

Gain is the time of the same work one after the other, over the time of both at once: 1 is none. Three rounds that take
turns after one that compiles; medians. The bits of both sides are compared with those alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_tail import decode_batch
from common import RESULTS, median, require_gpu, save, table
from torch import Tensor

from jetrl.kernels.attention.ops import varlen_plan
from jetrl.kernels.logprob.ops import draw
from jetrl.parity.model_under_test import random_model
from jetrl.types import ForwardBatch

CUDA = "cuda"
PASSES = 4  # of a measurement
SHARES = (132, 100)  # multiprocessors that the pass's GEMMs may use; all: 132


def decode_step(model: Any, rows: int, keys: int) -> Callable[[], Tensor]:
    """One decode step with its draws; gives the logits."""
    batch = decode_batch(model, rows, keys)
    chosen = torch.ones(rows, device=CUDA), torch.full((rows,), 7, device=CUDA), torch.full((rows,), keys, device=CUDA)

    @torch.no_grad()
    def step() -> Tensor:
        logits: Tensor = model.logits(model(batch))
        draw(logits, *chosen)
        return logits

    return step


def scoring_pass(model: Any, tokens: int, length: int = 2048) -> Callable[[], Tensor]:
    """Log-probs of packed sequences, as a reference pass makes them."""
    lengths = (length,) * (tokens // length)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=CUDA) * length
    ids = torch.randint(model.spec.vocab_size, (len(lengths) * length,), device=CUDA)
    positions = torch.arange(length, device=CUDA).repeat(len(lengths))
    batch = ForwardBatch(ids, positions, varlen_plan(starts, lengths), "train")

    @torch.no_grad()
    def score() -> Tensor:
        return model.token_logprobs(model(batch), ids.roll(-1), 1.0)[0]

    return score


class Graph:
    """A captured step, replayed on the stream that it was captured on: its kernels have that stream's priority."""

    def __init__(self, step: Callable[[], Tensor], high: bool) -> None:
        self.stream = torch.cuda.Stream(priority=-1 if high else 0)
        self.stream.wait_stream(torch.cuda.current_stream())
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            step()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.logits = step()

    def burst(self, steps: int = 4) -> None:
        """Some steps, waited for."""
        with torch.cuda.stream(self.stream):
            for _ in range(steps):
                self.graph.replay()
        self.stream.synchronize()


def seconds(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def together(graph: Graph, score: Callable[[], Tensor], aside: torch.cuda.Stream) -> tuple[float, int, Tensor]:
    """Seconds of `PASSES` passes with decode steps beside them, the steps done within, and the last pass's result."""
    done, steps, found = [], 0, torch.empty(0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(PASSES):  # a pass is issued when the one before has ended, as a driver between two bursts would
        with torch.cuda.stream(aside):
            found = score()
            done.append(torch.cuda.Event())
            done[-1].record(aside)
        while not done[-1].query():
            graph.burst(4)
            steps += 4
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent, steps, found


def measure(model: Any, rows: int, keys: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    import deep_gemm

    step, score, aside = decode_step(model, rows, keys), scoring_pass(model, tokens), torch.cuda.Stream()
    graphs = {high: Graph(step, high) for high in (False, True)}
    want_logits, want = step().clone(), score().clone()
    alone: dict[str, list[float]] = {"step": [], "pass": []}
    cases = [(share, high) for share in SHARES for high in (False, True)]
    seen: dict[tuple[int, bool], list[tuple[float, int]]] = {case: [] for case in cases}
    wrong = dict.fromkeys(cases, False)
    for turn in range(rounds + 1):
        times = {"step": seconds(lambda: graphs[False].burst(40)) / 40}
        times["pass"] = seconds(lambda: [score() for _ in range(PASSES)] and None) / PASSES
        for name, value in times.items():
            alone[name] += [value] * (turn > 0)
        for case in cases:
            share, high = case
            deep_gemm.set_num_sms(share)
            spent, steps, found = together(graphs[high], score, aside)
            deep_gemm.set_num_sms(132)
            seen[case] += [(spent, steps)] * (turn > 0)
            same = torch.equal(found, want) and torch.equal(graphs[high].logits, want_logits)
            wrong[case] = wrong[case] or not same
    one_step, one_pass = median(alone["step"]), median(alone["pass"])
    out = []
    for share, high in cases:
        gains = [(PASSES * one_pass + steps * one_step) / spent for spent, steps in seen[share, high]]
        spent, steps = sorted(seen[share, high])[rounds // 2]
        out.append({
            "rows": rows, "keys": keys, "step_ms": one_step * 1e3, "pass_ms": one_pass * 1e3, "pass_sms": share,
            "priority": "high" if high else "normal", "both_ms": spent * 1e3, "steps": steps, "gain": median(gains),
            "gain_min": min(gains), "gain_max": max(gains),
            "bits": "WRONG" if wrong[share, high] else "equal",
        })
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=8192, help="of a pass")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    require_gpu()
    torch.manual_seed(0)
    model = random_model("qwen3-8b", "fp8", CUDA, kv_cache="fp8", masters=False)
    found: list[dict[str, Any]] = []
    for rows in args.rows:
        found += measure(model, rows, args.keys, args.tokens, args.rounds)
        torch.cuda.empty_cache()
        save("overlap", found, args.out)
    shown = ["rows", "step_ms", "pass_ms", "pass_sms", "priority", "both_ms", "steps", "gain", "gain_min", "gain_max"]
    print(table(found, [*shown, "bits"]))
    if any(row["bits"] != "equal" for row in found):
        raise SystemExit("bits differ: both sides share memory that they must not share")


if __name__ == "__main__":
    main()
