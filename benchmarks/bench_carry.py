"""Answers that are carried over (`rollout.overcommit`) against synchronous rollouts, and what digests cost a step.

    python benchmarks/bench_carry.py ragged                        # Qwen3-8B's shape with 12 layers, a quarter as long
    python benchmarks/bench_carry.py ragged --layers 36 --scale 1 --rounds 2 --peer "COMMAND"       # the whole: long
    python benchmarks/bench_carry.py digests

- ragged: groups of 8, log-normal lengths (sigma 0.8, mean 2048, at most 16384, both times `--scale`; half of the
  variance is common to a group), `--groups` groups a step over `--slots` slots. `synchronous` waits for all of them,
  `overcommit N` goes on with `jetrl.rollout.carry.roll_on`, as the loop does, with groups of up to two updates ago
  waited for. Each variant has an endless stream of its own of the same groups, and they take turns, step by step, on
  one engine; the first steps, in which carried work builds up, do not count. Random weights, FP8 with an FP8 cache,
  no update: every step loads the next version. `tokens/s` is what is kept, by seconds; a step begins with the cache
  that it makes, as in a run. `--peer`: another engine's rollout of as many answers, as in bench_rollout.py.
- digests: RL steps of `recipes_on_random.py`'s stand-ins for gsm8k_qwen3_8b with `--layers` layers. Steps take turns:
  without digests, with them, and with every digest waited for, whose time is counted.

Each part writes `results/carry_<part>.json` as rows come. `--tiny`: a model for a CPU, to debug.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_rollout import PEER_MARK, peer_command, peer_row
from bench_workloads import RAGGED, Work, warm_requests
from common import RESULTS, SPEC, NoText, ask, median, require_gpu, save, table
from recipes_on_random import stand_in_config
from simulate_queue import lengths

from jetrl.api import random_model
from jetrl.engine.engine import PagedEngine
from jetrl.engine.settings import EngineSettings
from jetrl.rollout.carry import UnderWay, roll_on
from jetrl.run import loop
from jetrl.run.carried import lags
from jetrl.run.replay import keeping
from jetrl.run.stopping import StopRequest
from jetrl.spec import ModelSpec
from jetrl.train.digests import UNSEEN, Digests
from jetrl.types import Problem, Prompt, Request, SamplingParams, Unfinished, WeightSet

GROUP, PROMPT, BEHIND, SKIPPED = 8, 512, 2, 3
CARD = "cuda" if torch.cuda.is_available() else "cpu"
Rows = list[dict[str, Any]]
Saved = Callable[[dict[str, Any]], None]


def waited() -> float:
    """Now, when the device has done what it was given."""
    if CARD == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# ---- ragged ---------------------------------------------------------------------------------------------------------


@dataclass
class Stream:
    """The steps of one way to roll out: what is under way, and how many groups have begun."""

    name: str
    overcommit: float
    args: argparse.Namespace
    vocabulary: int
    under_way: list[UnderWay] = field(default_factory=list)
    begun: int = 0
    step: int = 0

    def groups(self, count: int) -> list[UnderWay]:
        """The next groups; the n-th one is the same in every stream."""
        sigma, mean, cap = RAGGED
        found = []
        for number in range(self.begun, self.begun + count):
            draw, rng = random.Random(number), np.random.default_rng(number)
            scale = self.args.scale
            long = lengths(GROUP, GROUP, 0.5, draw, mean=mean * scale, sigma=sigma, cap=max(16, int(cap * scale)))
            tokens = tuple(rng.integers(1, self.vocabulary, self.args.prompt).tolist())
            prompt = Prompt(number, Problem(str(number), "", ""), tokens)
            found.append(UnderWay(prompt, tuple(
                Unfinished(Request(number * GROUP + i, tokens, SamplingParams(new, ignore_eos=True)))
                for i, new in enumerate(long)
            )))
        self.begun += count
        return found

    def next_step(self, engine: PagedEngine) -> dict[str, Any]:
        """One rollout under the next version of the weights."""
        wanted = self.args.groups
        carried = round(self.overcommit * wanted)
        self.under_way += self.groups(wanted + carried - len(self.under_way))
        self.step += 1
        engine.load(WeightSet(self.step, "flow", {}))
        old = self.step - BEHIND
        forced = [i for i, g in enumerate(self.under_way) if g.oldest is not None and g.oldest <= old]
        start = waited()
        if self.overcommit:
            result = roll_on(engine, self.under_way, wanted, forced)
            complete, tokens, horizon = [one.group for one in result.complete], result.drawn, result.horizon
            self.under_way = list(result.under_way)
        else:
            done = engine.generate([a.request for g in self.under_way for a in g.answers])  # type: ignore[union-attr]
            complete, horizon = [], max(len(one.tokens) for one in done)
            tokens, self.under_way = sum(len(one.tokens) for one in done), []
        seconds = waited() - start
        assert engine.stats is not None
        row = {
            "variant": self.name, "step": self.step, "seconds": seconds, "tokens": tokens, "tokens/s": tokens / seconds,
            "horizon": horizon, "engine steps": engine.stats.steps, "preemptions": engine.stats.preemptions,
            "drawn": engine.stats.generated_tokens,
        }
        of = {"rollout/off_policy_steps_mean": "lag mean", "rollout/off_policy_steps_max": "lag max"}
        return row | {of[key]: value for key, value in lags(complete, self.step).items() if key in of}


def ragged(args: argparse.Namespace, saved: Saved) -> Rows:
    precision, kv = ("bf16", "") if args.tiny else ("fp8", "fp8")
    model = tiny_model() if args.tiny else random_model("qwen3-8b", precision, CARD, args.layers, kv, masters=False)
    settings = EngineSettings(
        page_size=16 if args.tiny else 128, max_num_seqs=args.slots, max_tokens_per_step=8192, share_beginnings=True,
    )
    engine = PagedEngine(model, NoText(), "flow", settings)
    engine.load(WeightSet(0, "flow", {}))
    vocabulary = model.spec.vocab_size
    if not args.tiny:
        start = waited()
        engine.generate(warm_requests(Work(args.slots, args.slots, args.prompt, 0), vocabulary))
        print(f"warm-up: {waited() - start:.1f} s", flush=True)
    names = {f"overcommit {share:g}": share for share in args.overcommit}
    streams = [Stream(name, share, args, vocabulary) for name, share in ({"synchronous": 0.0} | names).items()]
    rows: Rows = []
    for number in range(SKIPPED + args.rounds):
        for one in streams:
            if number < SKIPPED - 1 and not one.overcommit:  # the synchronous ones need no more than one to warm up
                continue
            row = one.next_step(engine) | {"counts": number >= SKIPPED, "scale": args.scale}
            row["layers"] = model.spec.num_layers
            rows.append(row | {"groups": args.groups, "slots": args.slots, "precision": f"{precision} kv {kv or '-'}"})
            saved(rows[-1])
    del engine, model
    if CARD == "cuda":
        torch.cuda.empty_cache()
    if args.peer:
        rows += list(peers(args, saved))
    return rows


def peers(args: argparse.Namespace, saved: Saved) -> Iterator[dict[str, Any]]:
    """Synchronous rollouts of another engine."""
    sigma, mean, cap = RAGGED
    spread = f"{sigma},{mean * args.scale:g},{max(16, int(cap * args.scale))}"
    longest, count = max(16, int(cap * args.scale)), args.groups * GROUP
    command = peer_command(
        args.peer, "fp8 kv8", [count], args.prompt, longest, args.layers, GROUP, args.slots, spread
    )
    for found in ask(command, PEER_MARK):
        row = peer_row(found, "fp8 kv8")
        row |= {"variant": "peer", "counts": True, "tokens": row.get("out_tokens"), "seconds": row.get("seconds")}
        saved(row)
        yield row


def shown_ragged(rows: Rows) -> str:
    """Medians of the steps that count, and all of their tokens by all of their seconds against the synchronous ones."""
    found: Rows = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == name and row["counts"]]
        speeds = sorted(row["tokens/s"] for row in own)
        whole = (
            sum(row["tokens"] for row in own) / sum(row["seconds"] for row in own) if name != "peer" else median(speeds)
        )
        found.append({
            "variant": name, "steps": len(own), "tokens/s": whole, "least": speeds[0], "most": speeds[-1],
            "seconds": median([row["seconds"] for row in own if row["seconds"] is not None] or [float("nan")]),
        })
        for key in ("horizon", "engine steps", "lag mean", "lag max"):
            if key in own[0]:
                found[-1][key] = max(r[key] for r in own) if key == "lag max" else median([r[key] for r in own])
    base = next(row["tokens/s"] for row in found if row["variant"] == "synchronous")
    for row in found:
        row["gain"] = row["tokens/s"] / base
    columns = ["variant", "steps", "tokens/s", "gain", "least", "most", "seconds", "horizon", "engine steps"]
    return table(found, [*columns, "lag mean", "lag max"])


# ---- digests --------------------------------------------------------------------------------------------------------


class TimedDigests(Digests):
    """Digests, each of which is waited for: their seconds without what else the device does."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.count, self.bytes = 0.0, 0, 0

    def add(self, name: str, value: torch.Tensor | None, start: int = 0) -> None:
        if value is None:
            return
        self.count += 1
        self.bytes += value.numel() * value.element_size()
        began = waited()
        super().add(name, value, start)
        self.seconds += waited() - began


KINDS: dict[str, Callable[[], Digests]] = {"off": lambda: UNSEEN, "on": Digests, "timed": TimedDigests}


def digests(args: argparse.Namespace, saved: Saved) -> Rows:
    spec = tiny_spec() if args.tiny else replace(SPEC, num_layers=args.layers)
    tokens, response = (64, 8) if args.tiny else (args.tokens, args.response)
    rows: Rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config = stand_in_config("gsm8k_qwen3_8b", folder, spec, tokens, response, device=CARD)
        train = config.train.model_copy(update={"steps": len(KINDS) * (args.rounds + 1)})
        more = {"train": train, "eval": config.eval.model_copy(update={"eval_interval": 0})}
        if args.tiny:
            more["quant"] = config.quant.model_copy(update={"kv_cache": "bf16"})
        config = config.model_copy(update=more)
        with StopRequest() as stop, loop.guarded(), loop.opened(config, folder / "run", [__file__], stop) as running:
            running.begin()
            for number in range(args.rounds + 1):
                for kind, make in KINDS.items():
                    rows.append(digest_step(running, kind, make()) | {"counts": number > 0, "layers": spec.num_layers})
                    saved(rows[-1])
    return rows


def digest_step(running: loop.Run, kind: str, seen: Digests) -> dict[str, Any]:
    """One step of the run; its record is written where there are digests."""
    usual, keeping.digests_for = keeping.digests_for, lambda config: seen
    start = waited()
    try:
        done = running.step()
        spent = waited() - start
    finally:
        keeping.digests_for = usual
    times = {key: value for key, value in done.metrics.items() if key.startswith("time/")}
    row = {"variant": kind, "step_s": spent, **times, "tokens": sum(
        one.length for group in done.learnt for one in group.trajectories
    )}
    if isinstance(seen, TimedDigests):
        row |= {"digests_s": seen.seconds, "digests": seen.count, "GB": seen.bytes / 1e9}
    return row


def shown_digests(rows: Rows) -> str:
    own = {kind: [row for row in rows if row["variant"] == kind and row["counts"]] for kind in KINDS}
    shown = []
    for kind, steps in own.items():
        spent = sorted(row["step_s"] - row["time/rollout"] for row in steps)  # answers differ from step to step
        shown.append({
            "variant": kind, "steps": len(steps), "step_s": median([row["step_s"] for row in steps]),
            "update_s": median([row["time/update"] for row in steps]), "without rollout_s": median(spent),
            "least": spent[0], "most": spent[-1],
        })
    timed = own["timed"]
    share = median([row["digests_s"] for row in timed]) / shown[0]["step_s"]
    text = (
        f"digests alone, waited for: {median([row['digests_s'] for row in timed]) * 1e3:.1f} ms for "
        f"{timed[0]['digests']} tensors of {timed[0]['GB']:.1f} GB, {share:.2%} of a step without them"
    )
    return table(shown, list(shown[0])) + "\n" + text


# ---- all ------------------------------------------------------------------------------------------------------------


def tiny_spec() -> ModelSpec:
    from jetrl.spec import SHAPES

    return replace(
        SHAPES["qwen3-0.6b"], vocab_size=2304, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=16,
    )


def tiny_model() -> Any:
    """A model that a CPU runs in no time."""
    from jetrl.kernels.dispatch import select
    from jetrl.model.transformer import Transformer
    from jetrl.precision.recipe import Recipe

    select("reference")
    return Transformer(tiny_spec(), Recipe("bf16", 1)).init_random(0).publish()


PARTS: dict[str, tuple[Callable[[argparse.Namespace, Saved], Rows], Callable[[Rows], str]]] = {
    "ragged": (ragged, shown_ragged), "digests": (digests, shown_digests),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.25, help="of the lengths of `ragged`")
    parser.add_argument("--overcommit", type=float, nargs="+", default=[0.25])
    parser.add_argument("--groups", type=int, default=64, help="groups of 8 answers that a step needs")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--peer", default="", help="command of another engine, as in bench_rollout.py")
    parser.add_argument("--tokens", type=int, default=65_536, help="of a step of `digests`")
    parser.add_argument("--response", type=int, default=512, help="the most of an answer of `digests`")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not args.tiny:
        require_gpu()
    torch.manual_seed(0)
    for name in args.parts:
        run, shown = PARTS[name]
        kept: Rows = []

        def saved(row: dict[str, Any], kept: Rows = kept, name: str = name) -> None:
            kept.append(row)
            save(f"carry_{name}", kept, args.out)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)

        print(shown(run(args, saved)), flush=True)


if __name__ == "__main__":
    main()
