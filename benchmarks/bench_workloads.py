"""Rollouts as RL has them, in one process: groups that share a prompt, ragged lengths, one sequence alone; with drafts
and merged prefixes on and off.

    python benchmarks/bench_workloads.py                                  # FP8 with an FP8 cache, the chosen works
    python benchmarks/bench_workloads.py --works ragged "alone 10000"
    python benchmarks/bench_workloads.py --works "groups of 8, prompt 2048" --variant bf16 --layers 12

Qwen3-8B's shape, random weights without masters, `ignore_eos`. Switches of a work take turns, `plain` first:

    plain   no drafts, no merged prefixes
    merged  `rollout.merge_prefix`
    drafts  `rollout.speculate = "auto"` with up to 7 drafts, each of which holds with a probability of 0.6 where those
            before it did (answers of the plain run, spoilt); how many is the product's own choice
    never   the same with drafts that never hold: what speculation costs where it cannot help

Kernels are first compiled ahead for all works together, as a run does (`--no-ahead`: not). A warm-up with a few tokens
(ragged: with all batch sizes, and few sequences of many keys) compiles what is left and is reported as `warm_s`.
`compiled` counts the kernels that reached the disk within a measured rollout and `kernels` names them: a figure with
such a kernel in it holds its compilation, so the benchmark then ends with status 1.
`different` counts answers whose tokens or log-probs have other bits than the plain ones: it must be 0. A rollout
includes making its KV cache and capturing its graphs, as in a run. Writes `benchmarks/results/workloads.json`.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_draft import Useless, forced
from bench_first_run import kernels_on_disk
from bench_rollout import DecodeClock, floor_ms
from common import (
    READ_TBPS,
    RESULTS,
    SPEC,
    NoText,
    bits,
    emit,
    environment,
    require_gpu,
    save,
    split_variant,
    table,
    timed,
)

from jetrl.api import random_model
from jetrl.config import Config, parse_config, resolve
from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.engine.speculation.speculator import build_speculator
from jetrl.parallel.world import ALONE
from jetrl.run.compiling.ahead import compile_ahead
from jetrl.run.compiling.display import Compiling
from jetrl.types import Completion, Request, SamplingParams, WeightSet

PLAIN, MERGED, DRAFTS, NEVER = "plain", "merged", "drafts", "never"
RAGGED = (0.8, 2048.0, 16384)  # sigma, mean and cap of log-normal lengths
HOLDS, DEEPEST, WARM = 0.6, 7, 24  # forced acceptance, drafts of a step, tokens of a warm-up
PAGE, MOST_TOKENS = 128, 8192


@dataclass(frozen=True)
class Work:
    """`requests` answers over `slots`; `group` of them share a prompt; `new` tokens each, 0: the ragged table."""

    requests: int
    slots: int
    prompt: int
    new: int
    group: int = 1
    switches: tuple[str, ...] = (PLAIN,)
    rounds: int = 1


def _groups(size: int, prompt: int) -> Work:
    return Work(256, 256, prompt, 1024, size, (PLAIN, MERGED))


WORKS = {
    "unique 64": Work(64, 64, 512, 1024, switches=(PLAIN, NEVER), rounds=3),
    "unique 256": Work(256, 256, 512, 1024, rounds=3),
    "ragged": Work(512, 256, 512, 0, switches=(PLAIN, DRAFTS)),
    "alone 10000": Work(1, 1, 9872, 256, switches=(PLAIN, NEVER), rounds=3),
    "alone 32768": Work(1, 1, 32640, 256, rounds=3),
} | {
    f"groups of {size}, prompt {prompt}": _groups(size, prompt)
    for size in (16, 8) for prompt in (512, 2048, 4096, 8192)
}


def ragged_lengths(count: int, sigma: float = RAGGED[0], mean: float = RAGGED[1], cap: int = RAGGED[2]) -> list[int]:
    """New tokens of each answer: one table for all engines."""
    draw = np.random.default_rng(7).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return [int(x) for x in draw.clip(16, cap)]


def lengths_of(work: Work) -> list[int]:
    return [work.new] * work.requests if work.new else ragged_lengths(work.requests)


def requests_of(work: Work, vocabulary: int = SPEC.vocab_size) -> list[Request]:
    """Random prompts. Those that no other shares begin with their number + 1, by which forced drafts know them."""
    rng, found = np.random.default_rng(1), []
    prompt: tuple[int, ...] = ()
    for i, new in enumerate(lengths_of(work)):
        if i % work.group == 0:
            prompt = (i + 1, *rng.integers(1, vocabulary, work.prompt - 1).tolist())
        found.append(Request(i, prompt, SamplingParams(new, ignore_eos=True)))
    return found


def warm_requests(work: Work, vocabulary: int = SPEC.vocab_size) -> list[Request]:
    """The same prompts with few tokens; for ragged lengths all batch sizes, and at the end four with many keys."""
    if work.new:
        return requests_of(replace(work, new=min(WARM, work.new)), vocabulary)
    rng, count = np.random.default_rng(2), work.slots
    sizes = [(work.prompt, 8 + 2 * k) for k in range(count - 4)]
    sizes += [(keys, 8 + 2 * count + 24 * k) for k, keys in enumerate((1500, 3000, 6000, 10000))]
    return [
        Request(i, (i + 1, *rng.integers(1, vocabulary, keys - 1).tolist()), SamplingParams(new, ignore_eos=True))
        for i, (keys, new) in enumerate(sizes)
    ]


def make_engine(model: Any, work: Work, switch: str, page_size: int = PAGE) -> PagedEngine:
    speculator = build_speculator("auto" if switch in (DRAFTS, NEVER) else "off", DEEPEST, work.slots)
    if switch == NEVER:
        assert speculator is not None
        speculator.new_index = Useless  # type: ignore[method-assign, assignment]
    settings = EngineSettings(
        page_size=page_size, max_tokens_per_step=MOST_TOKENS, max_num_seqs=work.slots, share_beginnings=False,
        merge_prefix="on" if switch == MERGED else "off"
    )
    engine = PagedEngine(model, NoText(), "flow", settings, speculator=speculator)
    engine.load(WeightSet(1, "flow", {}))
    return engine


def teach(engine: PagedEngine, asked: Sequence[Request], answers: Sequence[Completion], vocabulary: int) -> None:
    """Drafts of this engine hold with a probability of `HOLDS` from now on; what its rule has measured stays."""
    assert engine.speculator is not None
    index = partial(forced, asked, answers, HOLDS, vocabulary=vocabulary)
    engine.speculator.new_index = index  # type: ignore[method-assign]
    engine.speculator.index = engine.speculator.texts = None


def rollout(
    engine: PagedEngine, asked: Sequence[Request], clock: DecodeClock
) -> tuple[list[Completion], float, float]:
    """Completions, seconds, and the peak of memory in GiB."""
    done: list[Completion] = []
    milliseconds, peak = timed(lambda: done.extend(engine.generate(asked, on_step=clock.on_step)))
    return done, milliseconds / 1e3, peak


def measure(model: Any, work: Work, variant: str, page_size: int = PAGE) -> Iterator[dict[str, Any]]:
    """A row for each switch and round."""
    assert work.switches[0] == PLAIN and not (work.group > 1 and DRAFTS in work.switches)
    vocabulary = model.spec.vocab_size
    asked, warm = requests_of(work, vocabulary), warm_requests(work, vocabulary)
    engines = {switch: make_engine(model, work, switch, page_size) for switch in work.switches}
    answers: list[Completion] = []
    warm_s = {}
    for switch, engine in engines.items():
        if switch == DRAFTS:
            teach(engine, warm, answers, vocabulary)
        done, warm_s[switch], _ = rollout(engine, warm, DecodeClock(work.slots, work.prompt))
        answers = answers or done
        engine.take_metrics()
    want: list[Completion] = []
    for number in range(work.rounds):
        for switch, engine in engines.items():
            if switch == DRAFTS:
                teach(engine, asked, want, vocabulary)
            clock, kernels = DecodeClock(work.slots, work.prompt), kernels_on_disk()
            done, seconds, peak = rollout(engine, asked, clock)
            new = sorted(kernels_on_disk() - kernels)
            want = want or done
            row = {
                "work": switch, "round": number, "engine": f"jetrl {variant}", "tokens": sum(lengths_of(work)),
                "seconds": seconds, "tokens/s": sum(lengths_of(work)) / seconds, "peak GiB": peak,
                "compared": len(done), "compiled": len(new), "kernels": new, "warm_s": warm_s[switch],
                "different": sum(bits(a) != bits(b) for a, b in zip(done, want, strict=True)),
            }
            assert engine.stats is not None
            row |= {"preemptions": engine.stats.preemptions, "steps": engine.stats.steps}
            row |= {name.removeprefix("rollout/"): value for name, value in engine.take_metrics().items()}
            yield row | (decode_figures(model, work, variant, clock) if switch in (PLAIN, NEVER) else {})


def decode_figures(model: Any, work: Work, variant: str, clock: DecodeClock) -> dict[str, float]:
    """Of the steps in which every sequence drew one token; their floor reads each weight and key once."""
    if not clock.steps or work.group > 1 or not work.new:
        return {}
    precision, kv_cache, _ = split_variant(variant)
    floor = floor_ms(
        precision, work.slots, clock.context, model.spec.num_layers, kv_cache or "bf16", tbps=READ_TBPS
    )
    return {"step_ms": clock.step_ms, "context": clock.context, "floor_ms": floor,
            "share of floor": floor / clock.step_ms}


def config_of(works: Sequence[Work], variant: str) -> Config:
    """A run whose rollouts need the kernels of all these works."""
    precision, kv_cache, _ = split_variant(variant)
    switches = {switch for work in works for switch in work.switches}
    prompt = max(work.prompt for work in works)
    data: dict[str, Any] = {
        "name": "workloads", "precision": precision, "device": "cuda",
        "model": {"arch": {"model_type": "qwen3"}, "tokenizer": "builtin:arithmetic"},
        "task": {"name": "addition", "max_prompt_length": prompt},
        "rollout": {
            "max_num_seqs": max(work.slots for work in works), "group_size": max(2, *(work.group for work in works)),
            "max_response_length": max(work.prompt + max(lengths_of(work)) for work in works) - prompt + WARM,
            "max_tokens_per_step": MOST_TOKENS, "page_size": PAGE,
            "merge_prefix": "on" if MERGED in switches else "off",
            "speculate": "auto" if switches & {DRAFTS, NEVER} else "off",
        },
    }
    data["train"] = {"max_tokens_per_gpu": prompt + data["rollout"]["max_response_length"]}
    if data["rollout"]["speculate"] != "off":
        data["rollout"]["max_draft_tokens"] = DEEPEST
    if kv_cache:
        data["quant"] = {"kv_cache": kv_cache}
    return resolve(parse_config(data), cuda_available=True)


def ahead(works: Sequence[str], variant: str, layers: int) -> float:
    """Compile what rollouts of these works launch, as a run does before its first step; seconds."""
    start = time.perf_counter()
    spec = replace(SPEC, num_layers=layers)
    compile_ahead(config_of([WORKS[name] for name in works], variant), spec, ALONE, Compiling, trains=False)
    return time.perf_counter() - start


def measured_works(model: Any, works: Sequence[str], variant: str) -> Iterator[dict[str, Any]]:
    """Rows of each work, then one that says that it is done, and how many answers had other bits than the plain ones;
    or why not. The others go on."""
    place = environment()
    for name in works:
        start = time.perf_counter()
        end: dict[str, Any] = {"piece": name, "work": "bits", "done": True, "different": 0, "compared": 0}
        try:
            for row in measure(model, WORKS[name], variant):
                if row["work"] != PLAIN:
                    end |= {key: end[key] + row[key] for key in ("different", "compared")}
                yield {"piece": name} | row | {"environment": place}
        except Exception as error:
            traceback.print_exc()
            end = {"piece": name, "error": f"{type(error).__name__}: {str(error)[:500]}"}
        torch.cuda.empty_cache()
        yield end | {"seconds": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    few = ["unique 64", "unique 256", "groups of 16, prompt 4096", "ragged", "alone 10000", "alone 32768"]
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=few, metavar="WORK", help=", ".join(WORKS))
    parser.add_argument("--variant", default="fp8 kv8", help="bf16, fp8 or 'fp8 kv8' (FP8 cache)")
    parser.add_argument("--layers", type=int, default=SPEC.num_layers)
    parser.add_argument("--no-ahead", action="store_true", help="compile kernels when they are needed")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="workloads")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    require_gpu()
    variant = args.one or args.variant
    precision, kv_cache, rest = split_variant(variant)
    if rest:
        parser.error(f"no variant {variant!r}")
    if not args.no_ahead:
        print(f"compiled ahead in {ahead(args.works, variant, args.layers):.1f} s", flush=True)
    model = random_model("qwen3-8b", precision, "cuda", args.layers, kv_cache, masters=False)
    rows: list[dict[str, Any]] = []
    for row in measured_works(model, args.works, variant):
        rows.append(row)
        emit(row) if args.one else print(row, flush=True)
    if not args.one:
        columns = ["piece", "work", "round", "seconds", "tokens/s", "share of floor", "compiled", "different"]
        print(table([row for row in rows if "work" in row], columns))
        save(args.name, rows, args.out)
    if failed := [row["piece"] for row in rows if "error" in row]:
        sys.exit(f"failed: {', '.join(failed)}")
    if late := [row for row in rows if row.get("compiled")]:
        sys.exit("compiled within a figure: " + "; ".join(
            f"{row['piece']}, {row['work']}, round {row['round']}: {', '.join(row['kernels'])}" for row in late
        ))


if __name__ == "__main__":
    main()
