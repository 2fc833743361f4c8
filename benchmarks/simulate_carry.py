"""Simulate steps with and without answers that are carried over: `python benchmarks/simulate_carry.py --json FILE`.

No engine and no GPU is needed: where a step is cut is a matter of lengths, and the program's own rule decides it
(`jetrl.rollout.carry.chosen`). Lengths are those of `simulate_queue.py` (log-normal, sigma 0.8, mean 2048, at most
16384, half of the variance shared by a prompt's answers). A decode step takes the time that was measured there for the
number of sequences that run; an answer that begins or goes on is prefilled (`--prefill` tokens a second), and the
update takes its tokens by `--train` a second. Both kinds of step have the same answers, in one process.

A figure of this program is a model's, not a measurement: it says so in its JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from simulate_queue import lengths, step_ms

from jetrl.rollout.carry import chosen

PROMPT = 512  # tokens


@dataclass
class Answers:
    """A group under way: what is left of each answer, what each has, and the version of each one's first token."""

    left: list[int]
    have: list[int]
    began: list[int | None]

    @property
    def oldest(self) -> int | None:
        return min((version for version in self.began if version is not None), default=None)


@dataclass
class Totals:
    """Sums over the steps that count."""

    seconds: float = 0.0
    rollout: float = 0.0
    tokens: int = 0
    steps: int = 0
    wasted: int = 0  # tokens that were drawn beyond the horizon
    running: float = 0.0  # sequences, weighted by decode steps
    decoded: int = 0
    lags: list[int] = field(default_factory=list)  # of each answer's first token, updates

    def row(self) -> dict[str, float]:
        return {
            "tokens_per_s": self.tokens / self.seconds, "seconds_per_step": self.seconds / self.steps,
            "rollout_share": self.rollout / self.seconds, "running_mean": self.running / max(self.decoded, 1),
            "wasted_share": self.wasted / max(self.tokens, 1), "lag_mean": float(np.mean(self.lags)),
            "lag_max": float(max(self.lags)),
        }


def rolled(
    groups: Sequence[Answers], wanted: int, forced: Sequence[int], slots: int, prefill: float, totals: Totals
) -> tuple[int, list[int], float]:
    """One rollout: its horizon, the groups that are complete, and its seconds; as `carry.roll_on`, step by step."""
    owner = np.array([place for place, group in enumerate(groups) for _ in group.left])
    left = np.array([tokens for group in groups for tokens in group.left])
    have = np.array([tokens for group in groups for tokens in group.have])
    new, apart = np.zeros_like(left), left == 0
    open_in = np.bincount(owner[left > 0], minlength=len(groups))
    remaining = {place: 0 for place in range(len(groups)) if not open_in[place]}
    cut = chosen(remaining, len(groups), wanted, forced)
    running = np.zeros(0, dtype=np.int64)
    waiting, seconds = list(np.flatnonzero(left > 0)), 0.0
    while cut is None or len(running) or waiting:
        if room := slots - len(running):
            begins, waiting = waiting[:room], waiting[room:]
            seconds += sum(int(have[i]) + PROMPT / 8 for i in begins) / prefill  # a prompt is computed once for 8
            running = np.concatenate((running, np.array(begins, dtype=np.int64)))
        # until the next one ends, or reaches the horizon
        most = left[running] - new[running]
        if cut is not None:
            most = np.minimum(most, cut[0] - new[running])
        count = max(int(most.min()), 1)
        seconds += count * step_ms(len(running)) / 1e3
        totals.running += count * len(running)
        totals.decoded += count
        new[running] += count
        for i in running[new[running] == left[running]]:
            open_in[owner[i]] -= 1
            if not open_in[owner[i]]:
                remaining[int(owner[i])] = int(new[owner == owner[i]].max())
                cut = chosen(remaining, len(groups), wanted, forced)
        apart[running] = new[running] == left[running]
        if cut is not None:
            apart[running] |= new[running] >= cut[0]
            waiting = [i for i in waiting if cut[0] > 0]
        running = running[~apart[running]]
    assert cut is not None
    horizon, places = cut
    totals.wasted += int(np.maximum(new - np.minimum(left, horizon), 0).sum())
    return horizon, places, seconds


def run(
    overcommit: float, *, steps: int, skipped: int, prompts: int, group: int, slots: int, behind: int, prefill: float,
    train: float, seed: int, mean: float = 2048.0, cap: int = 16384,
) -> dict[str, float]:
    """The means over `steps` steps after the first `skipped`, on one GPU."""
    rng, totals, under_way = random.Random(seed), Totals(), list[Answers]()
    extra = round(overcommit * prompts)
    for version in range(skipped + steps):
        while len(under_way) < prompts + extra:
            own = lengths(group, group, 0.5, rng, mean=mean, cap=cap)
            under_way.append(Answers(own, [0] * group, [None] * group))
        if version == skipped:
            totals = Totals()
        forced = [i for i, g in enumerate(under_way) if g.oldest is not None and g.oldest <= version - behind]
        horizon, places, seconds = rolled(under_way, prompts, forced, slots, prefill, totals)
        for one in under_way:
            for i, left in enumerate(one.left):
                drawn = min(left, horizon)
                one.began[i] = version if one.began[i] is None and drawn else one.began[i]
                one.left[i], one.have[i] = left - drawn, one.have[i] + drawn
        done = [under_way[place] for place in places]
        tokens = sum(map(sum, (one.have for one in done)))
        totals.lags += [version - began for one in done for began in one.began if began is not None]
        totals.seconds += seconds + (tokens + len(done) * group * PROMPT) / train
        totals.rollout += seconds
        totals.tokens += tokens
        totals.steps += 1
        under_way = [one for place, one in enumerate(under_way) if place not in set(places)]
    return totals.row()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prefill", type=float, default=35_000.0, help="tokens a second")
    parser.add_argument("--train", type=float, default=13_500.0, help="tokens a second")
    given = parser.parse_args()
    rows = []
    for slots in (256, 768):
        base = None
        for overcommit in (0.0, 0.25, 0.5, 1.0):
            settings = dict(
                steps=given.steps, skipped=8, prompts=64, group=8, slots=slots, behind=2, prefill=given.prefill,
                train=given.train, seed=0,
            )
            row = run(overcommit, **settings)  # type: ignore[arg-type]
            base = row["tokens_per_s"] if base is None else base
            rows.append({"overcommit": overcommit, "slots": slots, "speedup": row["tokens_per_s"] / base} | row)
            print(
                f"{slots} slots, overcommit {overcommit:4.2f}: {rows[-1]['speedup']:.2f}x, {row['running_mean']:.0f} "
                f"running, wasted {row['wasted_share']:.1%}, lag {row['lag_mean']:.2f} (at most {row['lag_max']:.0f})"
            )
    about = {
        "kind": "simulation on a CPU, not a measurement", "machine": f"{platform.machine()} CPU",
        "answers": "64 prompts of 8, log-normal 0.8, mean 2048, cap 16384", "max_off_policy_steps": 2,
    }
    if given.json is not None:
        settings = {"steps": given.steps, "prefill": given.prefill, "train": given.train}
        given.json.write_text(json.dumps({"about": about, "settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
