"""All that is asked of N GPUs of one host: equal bits, large models, steps and rollouts against one GPU.

    python benchmarks/scaling_run.py                            # on all GPUs of this machine, about 23 minutes
    python benchmarks/scaling_run.py --budget 560               # start nothing that would not end in 560 s; call again
    python benchmarks/scaling_run.py --only steps --again
    python benchmarks/scaling_run.py --tiny --gpus 4 --out DIR  # in miniature, without a GPU, over gloo

Each part is a command of its own, whose output passes through. In this order:

    bits     `make test-gpu4`: runs of 2, 4 (8) ranks have the bits of one; a run goes on with more ranks, and back
    moe      Qwen3-30B-A3B's shape, all 48 layers: two steps, memory and seconds by part (`memory_by_part.py`)
    dense    Qwen3-32B's shape, the same
    steps    whole steps and publishing on 1, 2, 4 (8) GPUs, communication, memory (`bench_scaling.py`)
    ragged   rollouts of unequal lengths, by the shared queue and by a static split

`scaling_run_N.json` in `--out` says how each part ended, on which commit and GPU. A part that has passed there on this
commit is not run again; one that failed is. The figures are in `memory.json`, `scaling_N.json` and
`scaling_N_ragged.json`. Printed last: the speed of whole steps against one GPU, next to the goals. Status 1 if a part
failed or is left.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, ROOT, commit_name, end_on_sigterm, environment, median, require_gpu, save, saved_rows, table

HERE = Path(__file__).parent
GOALS = {2: 1.9, 4: 3.75, 8: 7.4}  # times one GPU, whole step
TINY_STEP = [
    "--prompts", "1", "--response", "8", "--rounds", "1", "--micro-tokens", "1024", "--variants", "fast", "lanes"
]
TINY_RAGGED = ["--rounds", "1", "--answers", "16", "--slots", "8", "--mean", "8", "--cap", "32", "--prompt", "8"]


@dataclass(frozen=True, slots=True)
class Part:
    """A command, and about how many seconds it takes on H200s, compilation included (reckoned from runs on two)."""

    name: str
    seconds: float
    command: Sequence[str]
    variables: dict[str, str] = field(default_factory=dict)


def parts_of(gpus: int, tiny: bool, out: Path) -> list[Part]:
    ranks = [str(n) for n in (1, 2, 4, 8) if n <= gpus]
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu4", "tests/gpu"]
    scaling = [sys.executable, str(HERE / "bench_scaling.py"), "--out", str(out), "--ranks", *ranks]
    steps, ragged = f"scaling_{gpus}", f"scaling_{gpus}_ragged"
    if tiny:
        small = ["--tokens", "256", "--response", "16", "device=cpu", "num_threads=1", "train.max_tokens_per_gpu=1024"]
        return [
            Part("bits", 120, tests, {"JETRL_TEST_RANKS": "cpu"}),
            Part("moe", 40, _memory("tiny-moe", "gsm8k_qwen3_30b_a3b", gpus, out, small)),
            Part("dense", 40, _memory("tiny", "gsm8k_qwen3_8b", gpus, out, small)),
            Part("steps", 120, [*scaling, "--tiny", "--name", steps, "--parts", "publish", "step", *TINY_STEP]),
            Part("ragged", 60, [*scaling, "--tiny", "--name", ragged, "--parts", "ragged", *TINY_RAGGED]),
        ]
    # FP32 masters and gradients where a GPU holds its part of them, moments in host memory
    precise = ["train.master_dtype=float32", "train.grad_dtype=float32"] if gpus >= 4 else []
    large = ["train.activation_checkpointing=true", "train.reduction=fixed", *(
        precise or ["train.master_dtype=bfloat16", "train.grad_dtype=bfloat16"]
    )]
    short = ["--tokens", "100000", "--response", "384"]
    return [
        Part("bits", 180, tests),
        Part("moe", 200, _memory("qwen3-30b-a3b", "gsm8k_qwen3_30b_a3b", gpus, out, [*short, *precise])),
        Part("dense", 180, _memory("qwen3-32b", "gsm8k_qwen3_8b", gpus, out, [*short, *large])),
        Part("steps", 480, [*scaling, "--name", steps, "--parts", "publish", "step"]),
        Part("ragged", 330, [*scaling, "--name", ragged, "--parts", "ragged", "--mean", "256", "--cap", "2048",
                             "--prompt", "256"]),
    ]


def _memory(shape: str, recipe: str, gpus: int, out: Path, more: Sequence[str]) -> list[str]:
    script = str(HERE / "memory_by_part.py")
    fixed = ["--shape", shape, "--recipe", recipe, "--nproc", str(gpus), "--out", str(out)]
    return [sys.executable, script, *fixed, *more]


def passed(rows: Sequence[dict[str, Any]], part: Part, commit: str) -> bool:
    """Whether this command has passed on this commit; in a checkout with changes, or outside of one, none has."""
    known = "+" not in commit and commit != "unknown"
    wanted = {"part": part.name, "status": 0, "commit": commit, "command": [*part.command[1:]]}
    return known and any(all(row[key] == value for key, value in wanted.items()) for row in rows)


def run(parts: Sequence[Part], path: Path, budget: float, again: bool, commit: str) -> list[str]:
    """Run what has not passed, as far as the budget lasts; the names of parts that failed or are left."""
    start, rows, wrong = time.monotonic(), saved_rows(path), []
    for part in parts:
        if not again and passed(rows, part, commit):
            print(f"== {part.name}: has passed on this commit", flush=True)
            continue
        left = budget - (time.monotonic() - start)
        if part.seconds > left:
            print(f"== {part.name}: left, it takes some {part.seconds:.0f} s and {left:.0f} s are left", flush=True)
            wrong.append(part.name)
            continue
        print(f"== {part.name}: {' '.join(part.command)}", flush=True)
        began = time.monotonic()
        status = subprocess.run(part.command, cwd=ROOT, env=os.environ | part.variables).returncode
        seconds = time.monotonic() - began
        row = {
            "part": part.name, "status": status, "seconds": seconds, "commit": commit, "command": [*part.command[1:]],
            "environment": environment(),
        }
        rows = [*(r for r in rows if r["part"] != part.name), row]
        save(path.stem, rows, path.parent)
        ended = "passed" if status == 0 else f"FAILED, status {status},"
        print(f"== {part.name}: {ended} in {seconds:.0f} s", flush=True)
        wrong += [part.name] if status else []
    return wrong


def against_goals(path: Path) -> list[dict[str, Any]]:
    """Tokens a second of whole steps, medians over rounds, against one GPU's."""
    found: dict[int, list[float]] = {}
    for row in saved_rows(path):
        if (row["part"], row["variant"]) == ("step", "fast") and row["round"] != "first":
            found.setdefault(row["ranks"], []).append(row["tokens_per_s"])
    one = median(found[1]) if 1 in found else float("nan")
    return [
        {"GPUs": ranks, "tokens/s": median(rates), "times one": median(rates) / one, "goal": GOALS.get(ranks, "")}
        for ranks, rates in sorted(found.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="default: all of this machine; 2, 4 or 8")
    parser.add_argument("--only", nargs="+", choices=["bits", "moe", "dense", "steps", "ragged"])
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--again", action="store_true", help="run parts that have passed on this commit")
    parser.add_argument("--tiny", action="store_true", help="in miniature on a CPU: says nothing about speed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    gpus = args.gpus or torch.cuda.device_count()
    if not args.tiny:
        require_gpu()
    if gpus not in (2, 4, 8) or (not args.tiny and gpus > torch.cuda.device_count()):
        raise SystemExit(f"--gpus {gpus}: 2, 4 or 8 are possible, and this machine has {torch.cuda.device_count()}")
    if args.tiny and args.out == RESULTS:
        raise SystemExit("--tiny: give --out, as its figures are no results")
    end_on_sigterm()
    out = args.out.absolute()
    parts = [p for p in parts_of(gpus, args.tiny, out) if args.only is None or p.name in args.only]
    parts = [p for p in parts if gpus >= 4 or p.name != "bits"]
    if not parts:
        raise SystemExit("bits needs four GPUs; on two, `make test-gpu2` compares runs")
    wrong = run(parts, out / f"scaling_run_{gpus}.json", args.budget, args.again, commit_name())
    measured = "steps" in {p.name for p in parts} and "steps" not in wrong
    if measured and (rows := against_goals(out / f"scaling_{gpus}.json")):
        print(table(rows, list(rows[0])), flush=True)
    raise SystemExit(f"failed or left: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
