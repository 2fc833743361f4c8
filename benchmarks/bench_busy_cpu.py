"""What a busy CPU costs a run, and what OMP_WAIT_POLICY=passive changes: `python benchmarks/bench_busy_cpu.py`.

Steps of the quickstart, of one run and of `--beside` runs at a time, each with as many threads as there are cores: once
as OpenMP's threads wait by default, and once with the variable. Interleaved, three rounds. Timed are the phases of the
steps (metrics.jsonl), not the start of the programs. The warm start is read from its cache, which a first run fills.
Writes benchmarks/results/busy_cpu.json after each round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, emit, save

from jetrl.report.environment import cpu_name
from jetrl.report.recorder import read_metrics

PHASES = ("time/rollout", "time/reward", "time/pack", "time/update", "time/publish")


def seconds_of(folder: Path) -> float:
    """Of the steps of the run below a folder."""
    rows = read_metrics(folder / "runs" / "busy")
    return sum(row.get(phase, 0.0) for row in rows if row["step"] > 0 for phase in PHASES)


def measured(count: int, passive: bool, steps: int, cores: int) -> list[float]:
    """Seconds of each of `count` runs at a time."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
    env |= {"PYTHONPATH": str(ROOT)} | ({"OMP_WAIT_POLICY": "passive"} if passive else {})
    words = ["train", "quickstart", "name=busy", f"train.steps={steps}", "eval.eval_interval=0", f"num_threads={cores}",
             "train.warmup_steps=0"]
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / str(i) for i in range(count)]
        for folder in folders:
            folder.mkdir()
        runs = [
            subprocess.Popen([sys.executable, "-m", "jetrl", *words], cwd=folder, env=env, stdout=subprocess.DEVNULL)
            for folder in folders
        ]
        if wrong := [run.returncode for run in runs if run.wait()]:
            raise SystemExit(f"a run ended with status {wrong[0]}")
        return [seconds_of(folder) for folder in folders]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=int, default=3, help="runs at a time, where the CPU is busy")
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    variants = [(count, passive) for count in (1, given.beside) for passive in (False, True)]
    times: dict[tuple[int, bool], list[float]] = {variant: [] for variant in variants}
    measured(1, False, 1, cores)  # fills the cache of the warm start
    for number in range(given.rounds):
        for variant in variants:
            times[variant] += measured(*variant, given.steps, cores)
            emit({"round": number, "runs_at_a_time": variant[0], "passive": variant[1], "seconds": times[variant][-1]})
        save("busy_cpu", [
            {
                "runs_at_a_time": count, "wait_policy": "passive" if passive else "default", "steps": given.steps,
                "cores": cores, "cpu": cpu_name(), "seconds_median": statistics.median(found),
                "seconds_min": min(found), "seconds_max": max(found), "measurements": len(found),
            }
            for (count, passive), found in times.items() if found
        ])


if __name__ == "__main__":
    main()
