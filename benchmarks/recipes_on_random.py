"""Two steps of each recipe for a real model, with random weights of that model's shape and stand-in data; no network.

`python benchmarks/recipes_on_random.py [--recipes NAME ...] [--tokens 300000] [--response N]`, on a Hopper GPU. All
settings are the recipe's but these: the weights, tokenizer and data are stand-ins (`stand_ins.py`), a step has so many
prompts that about `--tokens` are sampled, a second reward makes groups differ (a random model is never right),
evaluations are short, and nothing is saved. Each recipe runs in a process of its own. Prints parity, peak memory and
seconds by phase, and writes benchmarks/results/recipes_on_random.json. Status 1 where a log-prob differs.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, ask, emit, environment, require_gpu, save, table
from stand_ins import gsm8k_rows, verl_rows, write_jsonl, write_tokenizer

from jetrl.config import Config, parse_config, resolve
from jetrl.config.shipped import find_recipe
from jetrl.config.toml import read_toml
from jetrl.loop import StopRequest, run
from jetrl.model.hf_config import hf_config
from jetrl.report.recorder import read_metrics
from jetrl.spec import SHAPES, ModelSpec

RECIPES = ("gsm8k_qwen3_0.6b", "gsm8k_qwen3_1.7b", "gsm8k_qwen3_8b", "dapo_qwen3_8b")
STEPS = 2
VARIED = "def varied(completion_ids): return [float(sum(ids) % 2) for ids in completion_ids]\n"
_NAMED = ("dataset", "dataset_config", "dataset_revision", "train_split", "eval_dataset", "eval_dataset_config",
          "eval_dataset_revision", "eval_split")


def shape_of(recipe: str) -> str:
    """The published shape that a recipe's `model.path` names."""
    path = read_toml(find_recipe(recipe))["model"]["path"]
    return str(path).rpartition("/")[2].lower()


def stand_in_config(
    recipe: str, folder: Path, spec: ModelSpec, tokens: int, response: int | None = None, device: str = "auto"
) -> Config:
    """The recipe over stand-ins, which are written to `folder`."""
    data = read_toml(find_recipe(recipe))
    task, rollout = data["task"], data["rollout"]
    write_tokenizer(folder / "tokenizer")
    arch = {key: value for key, value in hf_config(spec).items() if value is not None}
    data["model"] = {"arch": arch, "tokenizer": str(folder / "tokenizer")}
    verl = "prompt_template" not in task
    train = verl_rows(200, 3, "math_dapo") if verl else gsm8k_rows(600)
    held_out = verl_rows(30, 2, "aime", seed=5) if verl else gsm8k_rows(64, seed=7)
    (folder / "varied.py").write_text(VARIED)
    for key in _NAMED:
        task.pop(key, None)
    task |= {
        "train_file": str(write_jsonl(folder / "train.jsonl", train)), "num_eval": 16,
        "eval_file": str(write_jsonl(folder / "eval.jsonl", held_out)),
        "reward": [task["reward"], f"{folder}/varied.py:varied"],
    }
    rollout["max_response_length"] = longest = min(response or sys.maxsize, rollout["max_response_length"])
    each = rollout["group_size"] * longest
    rollout["prompts_per_step"] = max(2, min(rollout["prompts_per_step"], tokens // each))
    rl = data["rl"]
    rl |= {"overlong_buffer_len": min(rl["overlong_buffer_len"], longest)} if "overlong_buffer_len" in rl else {}
    data["train"] |= {"steps": STEPS, "warmup_steps": 0}
    data["eval"] = {"eval_interval": STEPS, "max_response_length": min(64, longest)}
    data["checkpoint"] = {"save_interval": 0}
    data |= {"device": device, "output_dir": str(folder / "runs")}
    return resolve(parse_config(data, recipe), cuda_available=torch.cuda.is_available())


def two_steps(config: Config, folder: Path) -> dict[str, Any]:
    """Run the config; what it came to."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    assert run(config, folder / "runs" / config.name, ["recipes_on_random"], StopRequest())
    row: dict[str, Any] = {"recipe": config.name, "seconds": time.perf_counter() - start}
    if torch.cuda.is_available():
        row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        row["peak reserved GiB"] = torch.cuda.max_memory_reserved() / 2**30
    row["host GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    steps = read_metrics(folder / "runs" / config.name)[1:]
    row["parity"] = max(step["parity/logprob_abs_diff_max"] for step in steps)
    row |= {"prompts": config.rollout.prompts_per_step, "group": config.rollout.group_size,
            "response": config.rollout.max_response_length, "max_tokens_per_gpu": config.train.max_tokens_per_gpu}
    row["steps"] = [
        {key: value for key, value in step.items()
         if key.startswith(("time/", "perf/", "reward/", "parity/", "response_length/", "policy/grad_norm"))}
        for step in steps
    ]
    last = row["steps"][-1]  # the first compiles
    return row | {"rollout s": last["time/rollout"], "update s": last["time/update"],
                  "tok/s": last["perf/tokens_per_s_per_gpu"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--tokens", type=int, default=300_000, help="to be sampled in a step, about")
    parser.add_argument("--response", type=int, help="longest response (default: the recipe's)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="recipes_on_random")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.one:
        with tempfile.TemporaryDirectory() as folder:
            spec = SHAPES[shape_of(args.one)]
            config = stand_in_config(args.one, Path(folder), spec, args.tokens, args.response)
            emit(two_steps(config, Path(folder)) | {"environment": environment()})
        return
    require_gpu()
    options = [f"--tokens={args.tokens}", *([f"--response={args.response}"] if args.response else [])]
    rows: list[dict[str, Any]] = []
    for recipe in args.recipes:
        rows += ask([sys.executable, __file__, "--one", recipe, *options])
        save(args.name, rows, args.out)  # one by one: a recipe that fails loses none before it
        shown = ("recipe", "parity", "peak GiB", "host GiB", "rollout s", "update s", "tok/s", "seconds")
        print(table([{key: row.get(key, "") for key in shown} for row in rows], list(shown)), flush=True)
    if any(row["parity"] != 0.0 for row in rows):
        raise SystemExit("a log-prob of the learner differs from the sampler's")


if __name__ == "__main__":
    main()
