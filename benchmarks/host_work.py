"""Host seconds of one rank for the answers of all ranks, between rollout and update: by part, on this CPU.

    python benchmarks/host_work.py --ranks 1 8 64             # 64 answers of 4,096 tokens for each rank
    python benchmarks/host_work.py --ranks 8 --every          # each rank packs everything

    send      a rank's own trajectories become bytes
    receive   those of all other ranks become trajectories again
    reward    the numbers are put into groups; with --every, the scored trajectories travel once more, from rank 0
    plan      bins of all trajectories, and what the update divides by
    rows      the arrays of a rank's own micro-batches, and their advantages

One process stands for a rank of N. What the network takes is not in it: a rank receives `MB` from the others.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import table

from jetrl.parallel.world import World
from jetrl.rewards.score import Rewards, with_rewards
from jetrl.train.batches import PackedBatch
from jetrl.train.packing import Own, denominators, fill, pack
from jetrl.train.reduction import own_numbers
from jetrl.types import Group, Problem, Prompt, Segment, Trajectory, log_probs, token_ids

GROUP = 8


def answers_of(rank: int, count: int, tokens: int, prompt: int) -> dict[int, Trajectory]:
    """`count` answers in groups with one prompt; lengths from half of `tokens` to half as much again."""
    draw, found = np.random.default_rng(rank), {}
    for first in range(rank * count, (rank + 1) * count, GROUP):
        opening = token_ids(draw.integers(0, 150_000, prompt))
        for number in range(first, first + GROUP):
            length = int(draw.integers(tokens // 2, 3 * tokens // 2))
            ids, logprobs = draw.integers(0, 150_000, length), draw.standard_normal(length).astype(np.float32)
            answer = Segment("policy", token_ids(ids), "word" * length, log_probs(logprobs), spans=((0, 0),))
            found[number] = Trajectory((Segment("environment", opening, "q" * prompt), answer), "stop", "flow")
    return found


def measured(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds by part for one rank of so many."""
    seconds: dict[str, float] = {}
    at = time.perf_counter()

    def lap(part: str) -> None:
        nonlocal at
        seconds[part] = time.perf_counter() - at
        at = time.perf_counter()

    written = partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)
    own = answers_of(0, args.answers, args.tokens, args.prompt)
    others = [written(answers_of(r, args.answers, args.tokens, args.prompt)) for r in range(1, ranks)]
    at = time.perf_counter()
    size = len(written(own))
    lap("send")
    every = [t for part in (own, *(pickle.loads(data) for data in others)) for t in part.values()]
    lap("receive")
    prompts = [Prompt(i, Problem(str(i), "q", "a"), ()) for i in range(0, len(every), GROUP)]
    groups = [Group(prompt, tuple(every[prompt.index : prompt.index + GROUP])) for prompt in prompts]
    rewards = tuple(float(i % 2) for i in range(len(every)))
    kept = with_rewards(groups, Rewards(rewards, rewards, sizes=rewards, signal_sizes=rewards), replaced=True).groups
    if args.every and ranks > 1:
        kept = pickle.loads(pickle.dumps(kept))
    lap("reward")

    def packed(own: Own) -> PackedBatch:
        (batch,) = pack(
            kept, max_tokens_per_gpu=args.micro_tokens, flow_digest="flow", weight_version=0, share_prompts=True,
            own=own,
        )
        return batch

    plan = packed(lambda count: [])
    denominators(plan, 2 * args.tokens)
    lap("plan")
    packed(lambda count: [])
    lap("again")
    batch = packed(range if args.every else own_numbers(World(0, ranks, 0), "fast"))
    fill([batch], "advantages", [1.0] * len(every))
    lap("rows")
    seconds["rows"] = max(0.0, seconds["rows"] - seconds.pop("again"))  # packing has planned once more
    return {"ranks": ranks, "micro-batches": plan.num_micro_batches} | seconds | {
        "host": sum(seconds.values()), "MB": size * (ranks - 1) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--answers", type=int, default=64, help="for each rank, a multiple of 8")
    parser.add_argument("--tokens", type=int, default=4096, help="of an answer, in the mean")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--every", action="store_true", help="every rank packs everything, as jetrl once did")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    args = parser.parse_args()
    rows = [measured(ranks, args) for ranks in args.ranks]
    print(table(rows, list(rows[0])))
    if args.json:
        args.json.write_text(json.dumps({"every": args.every, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
