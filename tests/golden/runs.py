"""Short CPU runs of every option and recipe, as hashes: what a change that promises to keep bits is compared with.

    python tests/golden/runs.py record FILE [--only NAME ...]    run all, write their hashes
    python tests/golden/runs.py compare OLD NEW                  name every run that differs, and where

Two records are comparable on one machine with one thread count: gradients are float32 sums of the machine's own matrix
product. What comes before the first update (samples, log-probs, rewards, flow digests) is equal on every machine; that
part lies in `runs.json`, and `test_runs.py` compares it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
SAMPLE_KEYS = ("step", "group", "prompt", "answer", "completion", "tokens", "logprobs", "reward", "advantage",
               "finish_reason")

# Options that change what is computed, one run each; `tiny.py` has the rest of the settings.
TINY: dict[str, dict[str, Any]] = {
    "fp8": {},
    "bf16": {"precision": "bf16"},
    "fp8_rollout": {"precision": "fp8_rollout", "rl.rollout_is": "token", "rl.rollout_rs": "geometric"},
    "fp8_rollout updates": {"precision": "fp8_rollout", "rl.updates_per_step": 2, "rl.rollout_is": "sequence"},
    "kv fp8": {"quant.kv_cache": "fp8"},
    "pow2, first layer bf16": {
        "quant.weight_scale": "pow2", "quant.activation_scale": "pow2", "quant.num_first_layers_in_bf16": 1},
    "qwen2, untied": {"model.arch.model_type": "qwen2", "model.arch.tie_word_embeddings": False},
    "llama": {"model.arch.model_type": "llama"},
    "bf16 masters": {"train.master_dtype": "bfloat16", "train.optimizer_dtype": "bfloat16"},
    "bf16 gradients": {"train.master_dtype": "bfloat16", "train.grad_dtype": "bfloat16"},
    "dr_grpo": {"rl.loss_agg": "seq_mean_token_sum_norm", "rl.norm_adv_by_std": False},
    "sequence means": {"rl.loss_agg": "seq_mean_token_mean"},
    "updates": {"rl.updates_per_step": 2, "train.lr": 1e-2, "rl.clip_ratio_high": 0.28, "rl.clip_ratio_c": 3.0},
    "kl k3": {"rl.kl_coef": 0.1},
    "kl k2, entropy": {"rl.kl_coef": 0.1, "rl.kl_estimator": "k2", "rl.entropy_coef": 0.01},
    "drop, overlong, truncated": {
        "rl.dynamic_sampling": "drop", "rl.overlong_buffer_len": 4, "rl.mask_truncated": True},
    "truncated sampling": {"rollout.top_p": 0.9, "rollout.top_k": 9, "rollout.temperature": 0.7,
                           "rollout.logprobs": "full"},
    "truncated, as sampled": {"rollout.top_p": 0.9, "rollout.top_k": 9, "rollout.temperature": 0.7},
    "stop string": {"rollout.stop": ["1", "77"]},
    "small cache": {"rollout.page_size": 3, "rollout.kv_cache_tokens": 96, "rollout.max_num_seqs": 5},
    "small chunks": {"rollout.max_tokens_per_step": 5},
    "micro-batches": {"train.max_tokens_per_gpu": 40, "train.activation_checkpointing": True},
    "warm start": {"sft.steps": 4, "sft.batch_size": 5, "task.reward": None, "train.max_tokens_per_gpu": 64,
                   "rollout.max_response_length": 24},
    "eval sampled": {"eval.num_samples": 2, "eval.temperature": 1.0, "eval.eval_interval": 1},
}
SMALL = (
    "train.steps=2", "train.warmup_steps=0", "checkpoint.save_interval=2", "eval.eval_interval=1", "task.num_eval=4",
)
RECIPES: dict[str, tuple[str, ...]] = {
    "quickstart": ("sft.steps=6", "sft.warmup_steps=2"),
    "smollm2": ("task.num_eval=2", "rollout.max_response_length=16"),
    "h200_smollm2": ("device=cpu", "task.num_eval=2", "rollout.max_response_length=12", "rollout.prompts_per_step=2",
                     "rollout.group_size=4", "rl.dynamic_sampling=off"),
}


def record_of(run_dir: Path) -> dict[str, Any]:
    """The hashes of a finished run: metrics and samples row by row, all tensors of its last checkpoint, its flow."""
    from tiny import numbers

    from jetrl.run.checkpoint import store

    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    samples: dict[int, list[Any]] = {}
    for row in rows:
        samples.setdefault(row["step"], []).append([row[key] for key in SAMPLE_KEYS])
    last = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    tensors = store.whole(last / "state")
    # by content, not by name: moving a parameter to another module changes no bit
    weights = sorted(sha(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for t in tensors.values())
    return {
        "flow": json.loads((last / "state.json").read_text())["flow_digest"],
        "metrics": numbers(run_dir),
        "samples": {str(step): sha(json.dumps(held).encode()) for step, held in samples.items()},
        "weights": sha(json.dumps(weights).encode()),
    }


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def tiny(name: str, folder: Path) -> dict[str, Any]:
    """The record of one run of `TINY`."""
    from tiny import tiny_run

    changes = dict(TINY[name])
    if name == "warm start":
        changes["sft.cache_dir"] = str(folder / "sft")
    return record_of(tiny_run(folder, changes))


def recipe(name: str, folder: Path) -> dict[str, Any]:
    """The record of a shipped recipe, cut to two steps."""
    from jetrl.config import load_config, resolve
    from jetrl.run.loop import StopRequest, run

    overrides = [*SMALL, *RECIPES[name], f"output_dir={folder}", "num_threads=2"]
    if name == "quickstart":
        overrides.append(f"sft.cache_dir={folder / 'sft'}")
    config = resolve(load_config(ROOT / "jetrl" / "recipes" / f"{name}.toml", overrides), cuda_available=False)
    assert run(config, folder / config.name, ["golden"], StopRequest())
    return record_of(folder / config.name)


def record(file: Path, only: list[str]) -> None:
    """Run everything (or `only`), one after the other, and write the hashes."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    for name, make in [*((n, tiny) for n in TINY), *((n, recipe) for n in RECIPES)]:
        if only and name not in only:
            continue
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as quiet:
            stdout, sys.stdout = sys.stdout, quiet
            try:
                found[name] = make(name, Path(folder))
            finally:
                sys.stdout = stdout
        print(f"{name}: weights {found[name]['weights']}", flush=True)
        file.write_text(json.dumps(found, indent=1) + "\n")


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Where two records of one run differ. Metrics that only the new code writes are no difference."""
    found = [key for key in ("flow", "samples", "weights") if old[key] != new[key]]
    for before, after in zip(old["metrics"], new["metrics"], strict=True):
        found += [f"step {before['step']} {key}: {value!r} -> {after.get(key)!r}"
                  for key, value in before.items() if after.get(key) != value]
    return found


def compare(old: Path, new: Path) -> int:
    """Print every run that differs; the number of such runs."""
    before, after = json.loads(old.read_text()), json.loads(new.read_text())
    wrong = 0
    for name, held in before.items():
        if name not in after:
            continue
        found = differences(held, after[name])
        wrong += bool(found)
        print(f"{'DIFFERENT' if found else 'equal'}: {name}" + "".join(f"\n    {line}" for line in found[:6]))
    print(f"{len(before.keys() & after.keys())} runs compared, {wrong} differ")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("record")
    one.add_argument("file", type=Path)
    one.add_argument("--only", nargs="*", default=[])
    two = verbs.add_parser("compare")
    two.add_argument("old", type=Path)
    two.add_argument("new", type=Path)
    args = parser.parse_args()
    if args.verb == "record":
        record(args.file, args.only)
        return 0
    return compare(args.old, args.new)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
