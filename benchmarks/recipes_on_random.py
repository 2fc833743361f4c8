"""Two steps of each recipe for a real model, with random weights of that model's shape and stand-in data; no network.

    python benchmarks/recipes_on_random.py [--recipes NAME ...] [--tokens 300000] [--response N]      # a Hopper GPU
    python benchmarks/recipes_on_random.py --recipes gsm8k_qwen3_30b_a3b --nproc 2 --tokens 100000 --response 384

All settings are the recipe's but these: the weights, tokenizer and data are stand-ins (`stand_ins.py`), a step has so
many prompts that about `--tokens` are sampled, a second reward makes groups differ (a random model is never right),
evaluations are short, and nothing is saved. Weights are drawn on the GPU where there are `--nproc` ranks: a CPU would
draw those of 30B for minutes. `--layers` takes fewer layers than the shape has. Each recipe runs in processes of its
own. Prints parity, peak memory next to the prediction for these settings, and seconds by phase, and writes
benchmarks/results/recipes_on_random.json: a new row replaces an old one of the same recipe, ranks and layers. Status 1
where a log-prob differs or a run fails; the other recipes run all the same.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, ask, emit, end_on_sigterm, environment, require_gpu, save, saved_rows, table
from stand_ins import gsm8k_rows, verl_rows, write_jsonl, write_tokenizer

from jetrl.config import Config, load_config, parse_config, resolve, to_toml
from jetrl.config.shipped import find_recipe
from jetrl.config.toml import read_toml
from jetrl.huggingface.config import hf_config
from jetrl.parallel import launch
from jetrl.parallel.agreement import on_rank0
from jetrl.parallel.spawn import spawn
from jetrl.parallel.world import ALONE, World
from jetrl.report.recorder import read_metrics
from jetrl.run import setup
from jetrl.run.fit.memory import predict
from jetrl.run.loop import StopRequest, run
from jetrl.spec import SHAPES, ModelSpec

RECIPES = ("gsm8k_qwen3_0.6b", "gsm8k_qwen3_1.7b", "gsm8k_qwen3_8b", "dapo_qwen3_8b")
STEPS = 2
VARIED = "def varied(completion_ids): return [float(sum(ids) % 2) for ids in completion_ids]\n"
_NAMED = ("dataset", "dataset_config", "dataset_revision", "train_split", "eval_dataset", "eval_dataset_config",
          "eval_dataset_revision", "eval_split")


def shape_of(recipe: str) -> str:
    """The published shape that a recipe's `model.path` names."""
    path = read_toml(find_recipe(recipe))["model"]["path"]
    return str(path).rpartition("/")[2].lower().removesuffix("-instruct")


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


def two_steps(config: Config, folder: Path, world: World = ALONE) -> dict[str, Any]:
    """Run the config on every rank; what it came to, with the largest memory of a rank."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start, gpu = time.perf_counter(), torch.cuda.is_available()
    with StopRequest(world) as stop:
        assert run(config, folder / "runs" / config.name, ["recipes_on_random"], stop)
    row: dict[str, Any] = {"recipe": config.name, "ranks": world.size, "seconds": time.perf_counter() - start}
    mine = (
        torch.cuda.max_memory_allocated() if gpu else 0, torch.cuda.max_memory_reserved() if gpu else 0,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    peak, reserved, host = (max(bytes_) / 2**30 for bytes_ in zip(*world.gather(mine), strict=True))
    row |= ({"peak GiB": peak, "peak reserved GiB": reserved} if gpu else {}) | {"host GiB": host}
    steps = read_metrics(folder / "runs" / config.name)[1:]
    row["parity"] = max(step["parity/logprob_abs_diff_max"] for step in steps)
    row |= {"prompts": config.rollout.prompts_per_step, "group": config.rollout.group_size,
            "response": config.rollout.max_response_length, "max_tokens_per_gpu": config.train.max_tokens_per_gpu}
    row["steps"] = [
        {key: value for key, value in step.items()
         if key.startswith(("time/", "perf/", "reward/", "parity/", "response_length/", "policy/grad_norm", "moe/"))}
        for step in steps
    ]
    last = row["steps"][-1]  # the first compiles
    return row | {"rollout s": last["time/rollout"], "update s": last["time/update"],
                  "tok/s": last["perf/tokens_per_s_per_gpu"]}


def on_rank(args: argparse.Namespace) -> None:
    """The program of each rank, and of a single process."""
    world = launch.join()
    made = tempfile.TemporaryDirectory() if world.first else None
    folder = Path(world.share(made.name if made is not None else None))
    spec = SHAPES[shape_of(args.one)]
    spec = replace(spec, num_layers=args.layers or spec.num_layers)

    def written() -> None:
        config = stand_in_config(args.one, folder, spec, args.tokens, args.response)
        (folder / "run.toml").write_text(to_toml(config.model_copy(update={"device": "auto", "kernels": "auto"})))

    on_rank0(world, written)
    config = resolve(load_config(folder / "run.toml", []), cuda_available=torch.cuda.is_available())
    if not world.alone:
        from memory_by_part import random_on_device  # which reads `stand_in_config` from here

        setup.build_model = random_on_device
    row = two_steps(config, folder, world)
    if world.first:
        if torch.cuda.is_available():
            capacity = torch.cuda.get_device_properties(0).total_memory
            told = predict(config, spec, world.size, capacity)
            row |= {"predicted GiB": told.peak / 2**30, "predicted host GiB": told.host / 2**30}
        emit({**row, "layers": spec.num_layers, "environment": environment()})
    if made is not None:
        made.cleanup()


def same_case(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Rows of before `--nproc` are of one rank, with all layers."""
    def case(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["recipe"], row.get("ranks", 1), row.get("layers", SHAPES[shape_of(row["recipe"])].num_layers)

    return case(a) == case(b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--tokens", type=int, default=300_000, help="to be sampled in a step, about")
    parser.add_argument("--response", type=int, help="longest response (default: the recipe's)")
    parser.add_argument("--nproc", type=int, default=1, help="ranks, one a GPU")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--limit", type=float, help="seconds for one recipe")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="recipes_on_random")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if launch.is_rank():
        launch.as_rank(lambda: on_rank(args), lambda error: None)
    if args.one:
        if args.nproc > 1:
            raise SystemExit(spawn(args.nproc, sys.argv[1:], program=[__file__]))
        return on_rank(args)
    require_gpu()
    end_on_sigterm()
    options = [f"--tokens={args.tokens}", f"--nproc={args.nproc}"]
    options += [f"--{key}={value}" for key in ("response", "layers") if (value := getattr(args, key))]
    rows, new, failed = saved_rows(args.out / f"{args.name}.json"), [], []
    for recipe in args.recipes:
        try:
            command = [sys.executable, __file__, "--one", recipe, *options]
            for row in ask(command, limit=args.limit, say=lambda line: print(f"  {line.rstrip()}", flush=True)):
                new.append(row)
                rows = [*(r for r in rows if not same_case(r, row)), row]
                save(args.name, rows, args.out)  # one by one: a recipe that fails loses none before it
        except RuntimeError as error:
            failed.append(recipe)
            print(f"{recipe}: FAILED\n{error}", flush=True)
    shown = ("recipe", "ranks", "layers", "parity", "peak GiB", "predicted GiB", "peak reserved GiB", "host GiB",
             "predicted host GiB", "rollout s", "update s", "tok/s", "seconds")
    if new:
        print(table([{key: row.get(key, "") for key in shown} for row in new], list(shown)), flush=True)
    if failed or any(row["parity"] != 0.0 for row in new):
        raise SystemExit(f"failed: {failed}" if failed else "a log-prob of the learner differs from the sampler's")


if __name__ == "__main__":
    main()
