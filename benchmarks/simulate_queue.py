"""Simulate the shared queue of a rollout for many ranks, next to a static split: `python benchmarks/simulate_queue.py`.

Lengths are log-normal (sigma 0.8, mean 2048, at most 16384), those of one prompt alike; each rank brings the same work.
The queue is the program's own (`jetrl.rollout.queue`). A rank's step takes the time that was measured for the number
of sequences that run (one H200, Qwen3-8B shape in FP8, ragged lengths); a prompt that is new to a rank costs its
prefill. No engine and no GPU is needed.

Efficiency is the time of one rank with its own work (a mean over many draws) by the time of all. The bound is that of
the longest answer alone, which no order of work goes below.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jetrl.rollout.queue import SharedQueue, chunks, shares

Take = Callable[[int, int, int], Sequence[int]]  # (live, resting, waiting) -> numbers of trajectories

# sequences that run -> milliseconds a step, as measured; between the points by a straight line
STEP_MS = ((1, 8.4), (3, 7.6), (10, 7.1), (24, 9.9), (48, 9.6), (96, 11.7), (192, 13.6), (256, 14.9))
PROMPT_MS = 14.6  # prefill of a prompt of 512 tokens: what a step with new prompts took longer, for each of them
STORE_MS = 0.3  # one addition in the run's store


def step_ms(running: int) -> float:
    """Milliseconds of one decode step."""
    (a, low), *rest = STEP_MS
    for b, high in rest:
        if running <= b:
            return low + (high - low) * max(running - a, 0) / (b - a)
        a, low = b, high
    return low * running / a


def lengths(
    number: int, group: int, alike: float, rng: random.Random, mean: float = 2048.0, sigma: float = 0.8,
    cap: int = 16384,
) -> list[int]:
    """Log-normal answer lengths in tokens, with this mean before the cap.

    `alike` is the share of the variance of their logarithms that the answers to one prompt have in common.
    """
    mu, found = math.log(mean) - sigma**2 / 2, []
    for i in range(number):
        if i % group == 0:
            common = rng.gauss(0.0, sigma * math.sqrt(alike))
        length = math.exp(mu + common + rng.gauss(0.0, sigma * math.sqrt(1 - alike)))
        found.append(max(1, min(cap, round(length))))
    return found


@dataclass(frozen=True)
class Outcome:
    """Seconds until the last rank has ended, and of each rank the seconds that it waited for that."""

    seconds: float
    idle: tuple[float, ...]


class Rank:
    """An engine that decodes all of its sequences at once, one token a step."""

    def __init__(self, take: Take, tokens: Sequence[int], group: int, slots: int) -> None:
        self.take, self.tokens, self.group, self.slots = take, tokens, group, slots
        self.now = self.drawn = 0.0  # milliseconds; tokens drawn by a sequence that has run from the start
        self.running: list[float] = []  # heap: `drawn` at which each ends
        self.waiting: list[int] = []
        self.prompts: set[int] = set()

    def begin(self) -> bool:
        """Take work and start it; whether anything runs."""
        new = self.take(len(self.running) + len(self.waiting), 0, len(self.waiting))
        self.now += STORE_MS if new else 0.0
        self.waiting += new
        while self.waiting and len(self.running) < self.slots:
            number = self.waiting.pop(0)
            if number // self.group not in self.prompts:
                self.prompts.add(number // self.group)
                self.now += PROMPT_MS
            heapq.heappush(self.running, self.drawn + self.tokens[number])
        return bool(self.running)

    def advance(self) -> None:
        """Decode until the next sequence ends."""
        end = heapq.heappop(self.running)
        self.now += (end - self.drawn) * step_ms(len(self.running) + 1)
        self.drawn = end


def simulate(takes: Sequence[Take], tokens: Sequence[int], group: int, slots: int) -> Outcome:
    """All ranks until nothing is left, each taking work by its own `take(live, resting, waiting)`."""
    ranks = [Rank(take, tokens, group, slots) for take in takes]
    order = [(0.0, i) for i in range(len(ranks))]
    while order:  # the rank that is behind goes on, so that the queue is asked in the order of time
        _, i = heapq.heappop(order)
        if ranks[i].begin():
            ranks[i].advance()
            heapq.heappush(order, (ranks[i].now, i))
    last = max(rank.now for rank in ranks)
    return Outcome(last / 1000, tuple((last - rank.now) / 1000 for rank in ranks))


def shared(tokens: Sequence[int], size: int, group: int, slots: int) -> Outcome:
    """By the shared queue."""
    own, rest = shares([1.0] * len(tokens), group, slots, size)
    taken = [0]

    def next_chunk(n: int) -> int:
        taken[0] += n
        return taken[0]

    queues = [SharedQueue(part, rest, slots, next_chunk, next_chunk) for part in own]
    return simulate([q.take for q in queues], tokens, group, slots)


def static(tokens: Sequence[int], size: int, group: int, slots: int) -> Outcome:
    """Each rank has an equal part from the start."""
    number = len(tokens)
    parts: list[Iterable[int]] = [range(number * r // size, number * (r + 1) // size) for r in range(size)]

    def take_of(part: Iterable[int]) -> Take:
        left = [list(part)]
        return lambda live, resting, waiting: left.pop() if left else []

    return simulate([take_of(part) for part in parts], tokens, group, slots)


def table(
    sizes: Sequence[int], each: int, group: int, slots: int, alike: float, seeds: int
) -> list[dict[str, float]]:
    """A row for each number of ranks, a mean over at least `seeds` draws (more for few ranks)."""
    draws = [lengths(each, group, alike, random.Random(1000 + i)) for i in range(50)]
    alone = sum(static(d, 1, group, slots).seconds for d in draws) / len(draws)
    rows = []
    for size in sizes:
        row, draw = {"ranks": float(size), "one_rank_s": alone}, max(seeds, 32 // size)
        for name, way in (("static", static), ("shared", shared)):
            found = []
            for seed in range(draw):
                tokens = lengths(each * size, group, alike, random.Random(seed))
                found.append((way(tokens, size, group, slots), max(tokens)))
            seconds = sum(o.seconds for o, _ in found) / draw
            row |= {
                f"{name}_s": seconds, f"{name}_efficiency": alone / seconds,
                f"{name}_idle_share": sum(sum(o.idle) / size / o.seconds for o, _ in found) / draw,
            }
        row["longest_alone_s"] = sum(longest for _, longest in found) / draw * step_ms(1) / 1000
        row["chunks"] = float(len(chunks(slots * size, each * size, group, size)))
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4,8,16,64,512", help="numbers of ranks, by commas")
    parser.add_argument("--each", type=int, default=512, help="trajectories for each rank")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--alike", type=float, default=0.5, help="how alike the lengths of one prompt's answers are")
    parser.add_argument("--seeds", type=int, default=2, help="draws of lengths, at least")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    sizes = [int(n) for n in given.ranks.split(",")]
    rows = table(sizes, given.each, given.group, given.slots, given.alike, given.seeds)
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    print("ranks  static s  eff.  idle   shared s  eff.  idle   longest alone s")
    for r in rows:
        print(
            f"{r['ranks']:5.0f} {r['static_s']:9.1f} {r['static_efficiency']:5.2f} {r['static_idle_share']:5.2f}"
            f" {r['shared_s']:10.1f} {r['shared_efficiency']:5.2f} {r['shared_idle_share']:5.2f}"
            f" {r['longest_alone_s']:12.1f}"
        )


if __name__ == "__main__":
    main()
