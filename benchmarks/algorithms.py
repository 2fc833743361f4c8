"""Every algorithm on the quickstart: held-out accuracy, steps, time and parity over several seeds.

    python benchmarks/algorithms.py [--algos grpo,ppo] [--seeds 0,1,2] [--steps 20] [--jobs 2] [--threads 1] [--write]

Runs the quickstart once for each algorithm and seed, `--jobs` at a time, and writes
benchmarks/results/algorithms.json as it goes; runs already in that file are skipped (`--again` repeats them).
`--write` puts the table into docs/ALGORITHMS.md. The runs of a seed share one warm start. `--steps` shortens the runs;
the table says after how many steps an accuracy was measured. Settings that differ from the recipe's and the preset's
are in `SETTINGS`, and in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jetrl.presets import PRESETS
from jetrl.report.environment import cpu_name, git_commit
from jetrl.report.recorder import read_metrics

ROOT = Path(__file__).parents[1]
RECIPE, RESULT = ROOT / "jetrl/recipes/quickstart.toml", ROOT / "benchmarks/results/algorithms.json"
PAGE = ROOT / "docs/ALGORITHMS.md"
BEGIN, END = "<!-- table: written by benchmarks/algorithms.py -->", "<!-- end of table -->"
GOAL = 0.9
# Beyond the preset: what the quickstart's small model and few steps need.
SETTINGS: dict[str, tuple[str, ...]] = {
    "ppo": ("rl.critic_lr=3e-4",),
}


def train(algo: str, seed: int, folder: Path, threads: int, steps: int | None) -> dict[str, Any]:
    """One run through the command line; its figures."""
    name = f"{algo}-{seed}"
    command = [
        sys.executable, "-m", "jetrl.cli", "train", str(RECIPE), f"rl.algo={algo}", f"seed={seed}", f"name={name}",
        f"output_dir={folder}", f"sft.cache_dir={folder / 'sft'}", f"num_threads={threads}", *SETTINGS.get(algo, ()),
        *([f"train.steps={steps}"] if steps else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(threads))
    if done.returncode:
        print(f"{name} failed with status {done.returncode}:\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
        return {"algo": algo, "seed": seed, "error": done.stderr[-500:]}
    return {"algo": algo, "seed": seed, "threads": threads, "cpu": cpu_name()} | figures(read_metrics(folder / name))


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the table shows of a run's metrics."""
    accuracy = [(row["step"], v) for row in rows for k, v in row.items() if k.startswith("eval/") and "/avg@" in k]
    parity = [row["parity/logprob_abs_diff_max"] for row in rows if "parity/logprob_abs_diff_max" in row]
    reached = [step for step, value in accuracy if value >= GOAL]
    return {
        "before": accuracy[0][1], "curve": accuracy,
        "first_step_at_goal": min(reached, default=None), "steps": rows[-1]["step"],
        "steps_with_update": len(parity), "parity_max": max(parity),
        "seconds": sum(row["time/step"] for row in rows[1:]),
    }


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


def warm_starts(seeds: Sequence[int], folder: Path, threads: int, jobs: int) -> None:
    """Makes the warm start of each seed, once for all algorithms."""

    def one(seed: int) -> None:
        command = [
            sys.executable, "-m", "jetrl.cli", "sft", str(RECIPE), f"seed={seed}", f"sft.cache_dir={folder / 'sft'}",
            f"num_threads={threads}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(threads))
        if done.returncode:
            raise SystemExit(f"the warm start of seed {seed} failed:\n{done.stderr[-2000:]}")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, seeds))


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: one row per algorithm, with each seed's accuracy at its last step."""
    lines = [
        "| algorithm | held-out accuracy before | after: each seed (steps) | first evaluation at 0.9 | "
        "seconds per step | largest parity gap | besides the preset |",
        "|---|--:|---|---|--:|--:|---|",
    ]
    for algo in PRESETS:
        mine = sorted((r for r in runs if r["algo"] == algo and "error" not in r), key=lambda r: r["seed"])
        if not mine:
            continue
        before = statistics.median(r["before"] for r in mine)
        after = ", ".join(f"{r['seed']}: {r['curve'][-1][1]:.3f} ({r['steps']})" for r in mine)
        first = ", ".join(str(r["first_step_at_goal"] or "-") for r in mine)
        seconds = statistics.median(r["seconds"] / r["steps"] for r in mine)
        settings = ", ".join(f"`{s}`" for s in SETTINGS.get(algo, ())) or "-"
        lines.append(
            f"| {algo} | {before:.3f} | {after} | {first} | {seconds:.1f} | "
            f"{max(r['parity_max'] for r in mine)} | {settings} |"
        )
    return "\n".join(lines)


def write_page(record: dict[str, Any]) -> None:
    """Put the table between the marks of docs/ALGORITHMS.md."""
    text = PAGE.read_text()
    head, rest = text.split(BEGIN, 1)
    threads = sorted({r["threads"] for r in record["runs"] if "threads" in r})
    cores = "/".join(map(str, threads))
    where = f"{record['cpu']}, {cores} thread(s) a run, {record['commit'][:7]}, {record['date']}"
    note = f"{where}. {record.get('note', '')}"
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(record['runs'])}\n\n{note}\n\n{END}{rest.split(END, 1)[1]}")


def main() -> int:
    """Exit status: the number of runs that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algos", default=",".join(algo for algo in PRESETS if algo != "distill"))  # has no teacher
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, help="instead of the recipe's 40")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="repeat runs that are in the result file")
    parser.add_argument("--write", action="store_true", help="put the table into docs/ALGORITHMS.md")
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    kept = json.loads(args.result.read_text())["runs"] if args.result.is_file() and not args.again else []
    record: dict[str, Any] = {
        "commit": git_commit(ROOT / "jetrl")[0] or "unknown", "cpu": cpu_name(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "settings": SETTINGS, "runs": kept,
    }
    made = {(r["algo"], r["seed"]) for r in kept if "error" not in r}
    seeds = [int(seed) for seed in args.seeds.split(",")]
    todo = [(a, s) for s in seeds for a in args.algos.split(",") if (a, s) not in made]
    args.result.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        folder, start = Path(temporary), time.perf_counter()
        if todo:
            warm_starts(seeds, folder, args.threads, args.jobs)
            print(f"warm starts: {time.perf_counter() - start:.0f} s", flush=True)
        running = [pool.submit(train, *job, folder, args.threads, args.steps) for job in todo]
        for run in (done.result() for done in as_completed(running)):
            others = [r for r in record["runs"] if (r["algo"], r["seed"]) != (run["algo"], run["seed"])]
            record["runs"] = sorted([*others, run], key=lambda r: (list(PRESETS).index(r["algo"]), r["seed"]))
            args.result.write_text(json.dumps(record, indent=1) + "\n")
            shown = run.get("error") or f"{run['before']:.3f} -> {run['curve'][-1][1]:.3f}, parity {run['parity_max']}"
            print(f"{run['algo']} seed {run['seed']}: {shown}", flush=True)
    print("\n" + table(record["runs"]))
    if args.write:
        write_page(record)
    return sum("error" in run for run in record["runs"])


if __name__ == "__main__":
    sys.exit(main())
