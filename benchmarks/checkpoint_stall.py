"""How long a run waits for its checkpoints: beside the run and not, in turns, with random weights of a given shape.

    python benchmarks/checkpoint_stall.py                                   # Qwen3-0.6B's shape, a GPU
    python benchmarks/checkpoint_stall.py --shape qwen3-8b --steps 6 --every 3 train.optimizer_dtype=bfloat16
    python benchmarks/checkpoint_stall.py --shape tiny --device cpu --steps 4 --rounds 1 --tokens 2000 --response 16

Each round makes a run with `checkpoint.background = "on"` and one with "off", each in a process of its own; every
second round has the other order. A run is the recipe gsm8k_qwen3_0.6b over stand-ins (`stand_ins.py`), with about
`--tokens` sampled in a step, no evaluation, a checkpoint before step 1 and one after every `--every` steps; further
arguments are settings. Its folder is on the disk of `--folder` and is removed. Prints the medians of the rounds and
writes them to benchmarks/results/checkpoint_stall.json, where a new row replaces an old one of the same case:

    stall s    that the run waited for its checkpoints, its end included (the sum of `time/checkpoint`)
    share      of the seconds of all steps
    write s    that one checkpoint took, beside the run or while it waited
    step s     of a step, without what it waited
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, ask, emit, end_on_sigterm, environment, median, require_gpu, save, saved_rows, table
from recipes_on_random import stand_in_config

from jetrl.config import load_config, resolve, to_toml
from jetrl.report.recorder import read_metrics
from jetrl.run.loop import StopRequest, run
from jetrl.spec import SHAPES, ModelSpec, RopeSpec

RECIPE, SETTINGS = "gsm8k_qwen3_0.6b", ("on", "off")
COLUMNS = ["shape", "background", "stall s", "share", "write s", "step s", "checkpoints", "GB"]
TINY = ModelSpec(  # for a CPU: to see that this program runs
    family="qwen3", vocab_size=4096, hidden_size=64, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=4096, tie_embeddings=True, qkv_bias=False,
    qk_norm=True,
)


def measured(args: argparse.Namespace, background: str, folder: Path) -> dict[str, Any]:
    """One run in this process."""
    spec = TINY if args.shape == "tiny" else SHAPES[args.shape]
    config = stand_in_config(RECIPE, folder, spec, args.tokens, args.response, args.device)
    (folder / "run.toml").write_text(to_toml(config.model_copy(update={"device": args.device, "kernels": "auto"})))
    config = resolve(load_config(folder / "run.toml", [
        f"train.steps={args.steps}", f"checkpoint.save_interval={args.every}", f'checkpoint.background="{background}"',
        "eval.eval_interval=0", *args.settings,
    ]), cuda_available=torch.cuda.is_available())
    run_dir = folder / "runs" / config.name
    with StopRequest() as stop:
        assert run(config, run_dir, ["checkpoint_stall"], stop)
    newest = run_dir / "checkpoints" / f"step_{args.steps:06d}"
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()) / 1e9
    return {**summary(read_metrics(run_dir), 1 + -(-args.steps // args.every)), "GB": size}


def summary(rows: list[dict[str, Any]], checkpoints: int) -> dict[str, Any]:
    """What the rows of a run with so many checkpoints say."""
    stall = sum(row.get("time/checkpoint", 0.0) for row in rows)
    steps = sum(row["time/step"] for row in rows)
    beside = [row["perf/checkpoint_beside_s"] for row in rows if "perf/checkpoint_beside_s" in row]
    write = sum(beside) / len(beside) if beside else stall / checkpoints
    return {
        "stall s": stall, "share": stall / steps, "write s": write,
        "step s": median([row["time/step"] - row.get("time/checkpoint", 0.0) for row in rows[2:]]),
        "checkpoints": checkpoints,
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=["tiny", *SHAPES])
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="where runs are made; the system's folder for temporary files")
    parser.add_argument("--background", choices=SETTINGS, help="only one run, in this process")
    parser.add_argument("settings", nargs="*", help="key=value")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    if args.background is not None:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            emit(measured(args, args.background, Path(folder)) | {"environment": environment()})
        return
    if args.device != "cpu":
        require_gpu()
    end_on_sigterm()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SETTINGS}
    for number in range(args.rounds):
        for name in SETTINGS[:: 1 if number % 2 == 0 else -1]:
            for row in ask([sys.executable, __file__, "--background", name, *sys.argv[1:]]):
                found[name].append(row)
                print(f"round {number + 1}, {name}: {row['stall s']:.2f} s of stall", flush=True)
    case = {"shape": args.shape, "steps": args.steps, "every": args.every, "settings": args.settings}
    rows = []
    for name, runs in found.items():
        numbers = {key: median([one[key] for one in runs]) for key in runs[0] if key != "environment"}
        origin = {"rounds": len(runs), "environment": runs[-1]["environment"]}
        rows.append({**case, "background": name, **numbers, **origin})
    print(table(rows, COLUMNS))
    if args.device == "cpu":  # says nothing about a GPU
        return
    kept = [row for row in saved_rows(RESULTS / "checkpoint_stall.json") if any(row[key] != case[key] for key in case)]
    print(save("checkpoint_stall", [*kept, *rows]))


if __name__ == "__main__":
    main()
