"""jetrl next to TRL's GRPOTrainer with vLLM in the same process: one model, data, reward and settings, one GPU.

    python benchmarks/gsm8k_trl.py --model DIR --train train.jsonl --eval test.jsonl --steps 30 --out gsm8k_trl.json

Sides: `fp8`, `fp8-kv` and `bf16` are jetrl; `trl` is TRL in BF16 as it comes, and `trl-uncorrected` leaves out its
correction of vLLM's log-probs, which saves it a forward pass. Both follow one recipe (gsm8k_qwen2.5_0.5b unless
--recipe says another): the same problems in the same order, answers a step, learning rate, KL 0, temperature 1,
lengths, and the same reward function; `gsm8k_trl_peer.py` says what TRL gets. TRL's micro-batch is the largest of
--batch that fits. Seconds are medians of the steps after the first --warmup, which compile. One evaluator (jetrl's,
BF16, greedy, all problems of the file) reads each trained model, and the model before. Memory: what the GPU's driver
counts, at its highest. Of TRL's step, `rest` holds the sync of weights, the rewards and the pass for old log-probs.
Results are written after each side; --add keeps the sides that a file has.
`pip install trl==1.16.0 vllm==0.24.0` brings the peer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import ROOT, ask, saved_rows, table, write_json

from jetrl.config import load_config
from jetrl.config.shipped import find_recipe
from jetrl.report.recorder import read_metrics
from jetrl.untrusted import json_value

OURS = {
    "fp8": ["precision=fp8"], "fp8-kv": ["precision=fp8", "quant.kv_cache=fp8"], "bf16": ["precision=bf16"],
}
PEERS: dict[str, list[str]] = {"trl": [], "trl-uncorrected": ["--uncorrected"]}
COLUMNS = [
    "side", "steps", "step s", "rollout s", "update s", "rest s", "answers/s", "memory GiB", "gap mean", "gap max",
    "before", "after", "minutes",
]
UPDATE = ("pack", "update")  # phases of either side


def overrides_of(args: argparse.Namespace) -> list[str]:
    """The recipe's overrides that both sides share."""
    paths = [f"model.path={args.model}", f"task.train_file={args.train}", f"task.eval_file={args.eval}"]
    return [*paths, f"train.steps={args.steps}", *args.overrides]


def trained_by_jetrl(side: str, args: argparse.Namespace, work: Path) -> tuple[list[dict[str, Any]], Path]:
    """The rows of a run, and its model's folder."""
    settings = [
        *overrides_of(args), *OURS[side], f"name={side}", f"output_dir={work}", "eval.eval_interval=0",
        f"checkpoint.save_interval={args.steps}", "checkpoint.keep=1",
    ]
    command = [sys.executable, "-m", "jetrl.cli", "train", args.recipe, *settings]
    subprocess.run(command, check=True, env=environ(), stdout=sys.stderr)
    folder = work / side
    (model,) = folder.glob("checkpoints/*/model")
    return [row for row in read_metrics(folder) if row["step"] > 0], model


def trained_by_trl(side: str, args: argparse.Namespace, work: Path) -> tuple[list[dict[str, Any]], Path]:
    """The rows of TRL's run, by jetrl's names, and its model's folder; the largest micro-batch that fits counts."""
    for batch in args.batch:
        command = [
            sys.executable, str(ROOT / "benchmarks" / "gsm8k_trl_peer.py"), "--steps", str(args.steps), "--out",
            str(work / side), "--engine", args.peer_engine, "--batch", str(batch), *PEERS[side], args.recipe,
            *overrides_of(args),
        ]
        rows = list(ask(command, env=environ(), say=lambda line: print(line, file=sys.stderr, flush=True)))
        steps = [row for row in rows if "step" in row]
        if not any("oom" in row for row in rows):
            return steps, work / side
        print(f"{side}: micro-batches of {batch} answers do not fit ({len(steps)} steps were made)", flush=True)
    raise SystemExit(f"{side}: not even micro-batches of {args.batch[-1]} answers fit; give --batch a smaller one")


def environ() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def memory() -> Iterator[list[float]]:
    """The GPU's memory in use, in GiB, every second while this runs. Empty without a GPU's driver."""
    found: list[float] = []
    done = threading.Event()
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i"]
    query.append(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])

    def watch() -> None:
        while not done.wait(1.0):
            answer = subprocess.run(query, capture_output=True, text=True)
            if answer.returncode == 0:
                found.append(float(answer.stdout) / 1024)

    thread = threading.Thread(target=watch, daemon=True)
    if shutil.which(query[0]):
        thread.start()
    try:
        yield found
    finally:
        done.set()
        if thread.ident:
            thread.join()


def accuracy(model: Path | str, args: argparse.Namespace) -> float | None:
    """Share of right answers on all problems of the file, greedy, in BF16, by jetrl. None with --no-eval."""
    if args.no_eval:
        return None
    shared = [text for text in overrides_of(args) if not text.startswith(("model.path=", "train.steps="))]
    command = [
        sys.executable, "-m", "jetrl.cli", "eval", str(model), "--recipe", args.recipe, "--json", *shared,
        "precision=bf16",
    ]
    said = subprocess.run(command, check=True, env=environ(), stdout=subprocess.PIPE, text=True).stdout
    metrics = json_value(said)["metrics"]
    return next(float(value) for key, value in metrics.items() if key.endswith("/avg@1"))


def summary(side: str, rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """A side's row: medians after the warm-up, the gap over all steps. None: not reported."""
    config = load_config(find_recipe(args.recipe), overrides_of(args), lambda _: None)
    steady = rows[args.warmup :]
    step = statistics.median(seconds(row) for row in steady)
    rollout = statistics.median(row["time/rollout"] for row in steady)
    update = statistics.median(sum(row.get(f"time/{key}", 0.0) for key in UPDATE) for row in steady)
    means = [row["parity/logprob_abs_diff_mean"] for row in rows if "parity/logprob_abs_diff_mean" in row]
    largest = [row["parity/logprob_abs_diff_max"] for row in rows if "parity/logprob_abs_diff_max" in row]
    answers = config.rollout.prompts_per_step * config.rollout.group_size
    return {
        "side": side, "steps": len(rows), "step s": step, "rollout s": rollout, "update s": update,
        "rest s": step - rollout - update, "answers/s": answers / step,
        "gap mean": statistics.fmean(means) if means else None, "gap max": max(largest) if largest else None,
        "answer tokens": statistics.fmean(row["response_length/mean"] for row in steady),
        "steps an hour": 3600 / step,
    }


def seconds(row: dict[str, Any]) -> float:
    """A step's seconds without evaluation and checkpoint."""
    return float(row["time/step"]) - sum(row.get(f"time/{key}", 0.0) for key in ("eval", "checkpoint"))


def measured(side: str, args: argparse.Namespace, before: float | None) -> dict[str, Any]:
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        with memory() as used:
            train = trained_by_jetrl if side in OURS else trained_by_trl
            rows, model = train(side, args, Path(folder))
        minutes = (time.perf_counter() - begun) / 60
        row = summary(side, rows, args)
        row |= {"memory GiB": max(used) if used else None, "minutes": minutes, "before": before}
        return row | {"after": accuracy(model, args), "rows": rows}


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--train", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--eval", type=Path, required=True, help="GSM8K's test.jsonl")
    parser.add_argument("--recipe", default="gsm8k_qwen2.5_0.5b")
    parser.add_argument("--sides", default="fp8,trl", help=f"of {', '.join([*OURS, *PEERS])}")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5, help="first steps that no median counts")
    parser.add_argument("--batch", default="32,16,8", help="micro-batches of TRL to try, the largest first")
    parser.add_argument("--peer-engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--no-eval", action="store_true", help="leave accuracy out")
    parser.add_argument("--add", action="store_true", help="keep the sides that --out has")
    parser.add_argument("--work", type=Path, help="folder for the trained models, which are deleted again")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="further overrides of the recipe, for both sides")
    args = parser.parse_intermixed_args(argv)
    args.sides = args.sides.split(",")
    if unknown := [side for side in args.sides if side not in OURS and side not in PEERS]:
        parser.error(f"--sides: {unknown[0]!r} is none of {', '.join([*OURS, *PEERS])}")
    args.batch = [int(text) for text in args.batch.split(",")]
    if args.steps <= args.warmup:
        parser.error(f"--steps {args.steps} leaves none after --warmup {args.warmup}")
    for name in ("model", "train", "eval"):
        if not getattr(args, name).exists():
            parser.error(f"--{name} {getattr(args, name)}: there is no such file or folder")
        setattr(args, name, getattr(args, name).resolve())
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parsed(argv)
    if any(side in PEERS for side in args.sides):
        from gsm8k_trl_peer import require

        require("trl", "datasets", *(["vllm"] if args.peer_engine == "vllm" else []))
    rows = saved_rows(args.out) if args.add else []
    rows = [row for row in rows if row["side"] not in args.sides]
    known = {row["before"] for row in rows if row["before"] is not None}
    before = known.pop() if known else accuracy(args.model, args)
    for side in args.sides:
        rows.append(measured(side, args, before))
        write_json(args.out, {"environment": environment_row(), "settings": overrides_of(args), "rows": rows})
        print(table([{k: "-" if v is None else v for k, v in row.items()} for row in rows], COLUMNS), flush=True)


def environment_row() -> dict[str, Any]:
    """Asked in a process of its own, which gives the GPU back."""
    code = "import json; from common import environment; print(json.dumps(environment()))"
    command, where = [sys.executable, "-c", code], ROOT / "benchmarks"
    said = subprocess.run(command, check=True, cwd=where, env=environ(), stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json_value(said.stdout)
    return found


if __name__ == "__main__":
    main()
