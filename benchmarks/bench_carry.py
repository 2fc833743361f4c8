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
- tools: conversations, half of `--groups` a step: 4 to 12 turns of 256 tokens on average (a drawn token ends one with a
  probability of 1/256), and after each a tool of 2 s, which says 64 tokens. Lengths and seconds are by `--scale`, and
  seconds also times the share of the shape's layers, as decode steps take it. `synchronous` is `roll_out`, `overcommit
  N` is `carry_turns.talk_on`. Between two steps, where a run updates, tools work on for their seconds, not counted.
- digests: RL steps of `recipes_on_random.py`'s stand-ins for gsm8k_qwen3_8b with `--layers` layers. Steps take turns:
  without digests, with them, and with every call for digests waited for, whose time is counted.

Each part writes `results/carry_<part>.json` as rows come. `--tiny`: a model for a CPU, to debug.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
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
from jetrl.rollout.carry_turns import begin_talks, talk_on
from jetrl.rollout.requests import RolloutRequest
from jetrl.rollout.rollout import roll_out
from jetrl.run import loop
from jetrl.run.carried import lags
from jetrl.run.replay import keeping
from jetrl.run.stopping import StopRequest
from jetrl.spec import ModelSpec
from jetrl.train.digests import UNSEEN, Digests, Named
from jetrl.types import (
    Completion,
    Problem,
    Prompt,
    Reply,
    Request,
    SamplingParams,
    Segment,
    Unfinished,
    WeightSet,
)

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


def model_of(args: argparse.Namespace) -> tuple[Any, str]:
    """The model that rolls out, and its formats in words."""
    if args.tiny:
        return tiny_model(), "bf16"
    return random_model("qwen3-8b", "fp8", CARD, args.layers, "fp8", masters=False), "fp8 kv8"


def ragged(args: argparse.Namespace, saved: Saved) -> Rows:
    model, precision = model_of(args)
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
            rows.append(row | {"groups": args.groups, "slots": args.slots, "precision": precision})
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
        for key in ("horizon", "engine steps", "turns", "begun again", "lag mean", "lag max"):
            if key in own[0]:
                found[-1][key] = max(r[key] for r in own) if key == "lag max" else median([r[key] for r in own])
    base = next(row["tokens/s"] for row in found if row["variant"] == "synchronous")
    for row in found:
        row["gain"] = row["tokens/s"] / base
    columns = ["variant", "steps", "tokens/s", "gain", "least", "most", "seconds", "horizon"]
    more = ["engine steps", "turns", "begun again", "lag mean", "lag max"]
    return table(found, [*columns, *(key for key in more if any(key in row for row in found))])


# ---- tools ----------------------------------------------------------------------------------------------------------

TURN, REPLY, TURNS = 256, 64, (4, 12)


class Tools:
    """The environment's side of conversations (`CarriedConversations`), each of whose replies takes `seconds`: no call
    of anything, so that nothing but the clock is in the way."""

    def __init__(self, seconds: float, vocabulary: int, prompt: int, said: int) -> None:
        self.seconds, self.vocabulary, self.sizes = seconds, vocabulary, (prompt, said)
        self.said: dict[int, int] = {}  # turns of the policy that each conversation has heard
        self.ready: dict[int, float] = {}  # when the reply to the last one is there
        self.held: set[int] = set()
        self.begun_again = 0

    def reply(self, key: int, turn: int) -> Reply:
        """What is said after so many turns of the policy; it depends on nothing else."""
        if turn >= random.Random(key).randint(*TURNS):
            return Reply(key, (), "", 1.0, done=True)
        count = self.sizes[turn > 0]
        rng = np.random.default_rng((key // GROUP if turn == 0 else key, turn))  # a group has one prompt
        return Reply(key, tuple(rng.integers(1, self.vocabulary, count).tolist()), "said")

    def start(self, key: int, problem: Problem) -> None:
        self.said[key], self.ready[key] = 0, 0.0

    def act(self, key: int, completion: Completion) -> None:
        self.said[key] += 1
        self.ready[key] = time.perf_counter() + self.seconds

    def poll(self, wait: bool) -> list[Reply]:
        while True:
            now = time.perf_counter()
            there = [key for key, at in self.ready.items() if at <= now and key not in self.held]
            due = [at for key, at in self.ready.items() if key not in self.held]
            if there or not wait or not due:
                for key in there:
                    del self.ready[key]
                return [self.reply(key, self.said[key]) for key in there]
            time.sleep(max(0.0, min(due) - now))

    def close(self, key: int) -> None:
        self.said.pop(key, None)
        self.ready.pop(key, None)
        self.held.discard(key)

    def hold(self, key: int) -> None:
        self.held.add(key)

    def go_on(self, key: int) -> None:
        self.held.discard(key)

    def bring(self, key: int, problem: Problem, segments: Sequence[Segment], due: bool, finish: Any = "stop") -> None:
        turns = sum(segment.author == "policy" for segment in segments)
        if self.said.get(key) != turns:
            seconds = self.seconds * turns if key in self.said else 0.0  # the turns before are heard again, one by one
            self.begun_again += key in self.said
            self.said[key] = turns
            self.ready[key] = time.perf_counter() + seconds
        elif due and key not in self.ready:
            self.ready[key] = 0.0  # it was there already
        if not due:
            self.ready.pop(key, None)
        self.held.add(key)

    def keep_only(self, keys: Collection[int]) -> None:
        for key in self.held - set(keys):
            self.close(key)


@dataclass
class Talks:
    """The steps of one way to hold conversations."""

    name: str
    overcommit: float
    tools: Tools
    asked: RolloutRequest
    reply_tokens: int
    groups: int
    under_way: list[UnderWay] = field(default_factory=list)
    begun: int = 0
    step: int = 0

    def next_step(self, engine: PagedEngine) -> dict[str, Any]:
        new = self.groups + round(self.overcommit * self.groups) - len(self.under_way)
        prompts = [Prompt(i, Problem(str(i), "", ""), ()) for i in range(self.begun, self.begun + new)]
        asked = replace(self.asked, first_id=self.begun * GROUP)
        self.begun += new
        self.step += 1
        engine.load(WeightSet(self.step, "flow", {}))
        forced = [i for i, g in enumerate(self.under_way) if g.oldest is not None and g.oldest <= self.step - BEHIND]
        again = self.tools.begun_again
        start = waited()
        if self.overcommit:
            groups = [*self.under_way, *begin_talks(prompts, asked)]
            result = talk_on(engine, groups, self.groups, forced, self.tools, asked, self.reply_tokens)
            complete, tokens, horizon = [one.group for one in result.complete], result.drawn, result.horizon
            self.under_way = list(result.under_way)
        else:
            complete, horizon = roll_out(engine, prompts, asked, self.tools).groups, 0
            tokens = sum(t.num_policy_tokens for g in complete for t in g.trajectories)
        seconds = waited() - start
        assert engine.stats is not None
        row = {
            "variant": self.name, "step": self.step, "seconds": seconds, "tokens": tokens, "tokens/s": tokens / seconds,
            "horizon": horizon, "turns": sum(len(t.turns) for g in complete for t in g.trajectories),
            "begun again": self.tools.begun_again - again, "preemptions": engine.stats.preemptions,
        }
        of = {"rollout/off_policy_steps_mean": "lag mean", "rollout/off_policy_steps_max": "lag max"}
        return row | {of[key]: value for key, value in lags(complete, self.step).items() if key in of}


def tools(args: argparse.Namespace, saved: Saved) -> Rows:
    model, precision = model_of(args)
    layers, vocabulary = model.spec.num_layers, model.spec.vocab_size
    seconds = args.tool if args.tool is not None else args.scale * 2.0 * layers / SPEC.num_layers
    turn, said = max(4, int(TURN * args.scale)), max(4, int(REPLY * args.scale))
    sampling = SamplingParams(
        (TURNS[1] + 1) * (4 * turn + said), stop_token_ids=tuple(range(1, vocabulary, turn)), ignore_eos=True,
    )
    asked = RolloutRequest(sampling, GROUP, 0, max_turns=TURNS[1] + 1, max_turn_tokens=4 * turn)
    settings = EngineSettings(
        page_size=16 if args.tiny else 128, max_num_seqs=args.slots, max_tokens_per_step=8192,
    )
    engine = PagedEngine(model, NoText(), "flow", settings)
    engine.load(WeightSet(0, "flow", {}))
    if not args.tiny:
        engine.generate(warm_requests(Work(args.slots, args.slots, args.prompt, 0), vocabulary))
    names = {f"overcommit {share:g}": share for share in args.overcommit}
    counts = args.reply_tokens if args.reply_tokens is not None else int(150 * args.scale)
    ways = [
        Talks(name, share, Tools(seconds, vocabulary, args.prompt, said), asked, counts, max(1, args.groups // 2))
        for name, share in ({"synchronous": 0.0} | names).items()
    ]
    rows: Rows = []
    for number in range(SKIPPED - 1 + args.rounds):
        for one in ways:
            if number < SKIPPED - 2 and not one.overcommit:
                continue
            row = one.next_step(engine) | {"counts": number >= SKIPPED - 1, "layers": layers, "tool_s": seconds}
            rows.append(row | {"slots": args.slots, "reply_tokens": counts, "precision": precision})
            saved(rows[-1])
            time.sleep(seconds)
    return rows


# ---- digests --------------------------------------------------------------------------------------------------------


class TimedDigests(Digests):
    """Digests, each call of which is waited for: their seconds without what else the device does."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.count, self.bytes = 0.0, 0, 0

    def add_all(self, named: Sequence[Named]) -> None:
        self.count += len(named)
        self.bytes += sum(one.value.nbytes for one in named)
        began = waited()
        super().add_all(named)
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
    "ragged": (ragged, shown_ragged), "tools": (tools, shown_ragged), "digests": (digests, shown_digests),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.25, help="of lengths, and of the seconds of tools")
    parser.add_argument("--overcommit", type=float, nargs="+", default=[0.25])
    parser.add_argument("--groups", type=int, default=64, help="groups of 8 answers that a step needs")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--peer", default="", help="command of another engine, as in bench_rollout.py")
    parser.add_argument("--tool", type=float, help="seconds of a tool, as they are")
    parser.add_argument("--reply-tokens", type=int, help="as which a tool counts; else 150, times --scale")
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
