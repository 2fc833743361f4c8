"""A run that takes a second: the quickstart's task and model family in miniature."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl.config import Config, parse_config, resolve
from jetrl.kernels.support import capability
from jetrl.report.recorder import read_metrics
from jetrl.run.checkpoint import store
from jetrl.run.loop import StopRequest, run

ARCH: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 40, "intermediate_size": 136, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}
# Changes that make its model a hybrid: a layer of Gated DeltaNet, and one of gated attention.
HYBRID: dict[str, Any] = {"model.arch": ARCH | {
    "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
}}
# Any digit in the reply is worth something, so that groups differ and gradients flow without a warm start.
REWARD = """\
def reward(completions, answer, **_):
    return [len(set(c) & set(a)) / len(set(a)) for c, a in zip(completions, answer)]
"""


def tiny_data(folder: Path) -> dict[str, Any]:
    """The nested mapping of a tiny config; `folder` takes its reward function, cache and runs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    return {
        "name": "tiny", "precision": "fp8", "device": "cpu", "num_threads": 1, "output_dir": str(folder / "runs"),
        "model": {"arch": dict(ARCH), "tokenizer": "builtin:arithmetic"},
        "task": {
            "name": "addition", "params": {"digits": [2]}, "reward": f"{folder}/reward.py:reward", "num_eval": 4,
            "max_prompt_length": 16,
        },
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_response_length": 10},
        "rl": {},
        "train": {"steps": 4, "lr": 3e-3} | ({"compile_ahead": False} if torch.cuda.is_available() else {}),
        "eval": {"eval_interval": 2},
        "checkpoint": {"save_interval": 2, "keep": 3},
    }


def tiny_config(folder: Path, changes: dict[str, Any] | None = None) -> Config:
    """A resolved tiny config with dotted changes; None takes a key out."""
    data = tiny_data(folder)
    for key, value in (changes or {}).items():
        *path, last = key.split(".")
        at = data
        for part in path:
            at = at.setdefault(part, {})
        if value is None:
            del at[last]
        else:
            at[last] = value
    return resolve(parse_config(data), cuda_available=torch.cuda.is_available(), capability=capability())


def tiny_run(folder: Path, changes: dict[str, Any] | None = None, name: str = "tiny") -> Path:
    """Run to the last step; returns the run folder. The thread count that a run sets is put back."""
    before = torch.get_num_threads()
    config = tiny_config(folder, changes)
    run_dir = folder / "runs" / name
    try:
        assert run(config, run_dir, ["test"], StopRequest())
    finally:
        torch.set_num_threads(before)
    return run_dir


def long_prompts(folder: Path) -> dict[str, Any]:
    """Changes for a tiny run whose prompts have 140 to 300 tokens, more than a page of 128; `folder` takes them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": str(7 ** (166 + 9 * i)) + "=", "answer": str(100 + i)} for i in range(20)]
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "task.name": "file", "task.params": None, "task.train_file": str(folder / "long.jsonl"),
        "task.max_prompt_length": 320,
    }


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of every step without what a clock measured."""
    return [
        {k: v for k, v in row.items() if not k.removeprefix("in_eval/").startswith(("time/", "perf/"))}
        for row in read_metrics(run_dir)
    ]


def saved(run_dir: Path, step: int) -> dict[str, Tensor]:
    """A checkpoint's masters and optimizer state, whole, whoever wrote them."""
    return store.whole(run_dir / "checkpoints" / f"step_{step:06d}" / "state")


def files_of(folder: Path) -> dict[str, Any]:
    """The bytes of all files; of the header of safetensors, which has no order, its content."""
    found: dict[str, Any] = {}
    for path in (p for p in sorted(folder.rglob("*")) if p.is_file()):
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            end = 8 + int.from_bytes(data[:8], "little")
            data = json.loads(data[8:end]), data[end:]
        elif path.name in ("state.json", "files.json"):
            record = json.loads(data)
            data = {k: v for k, v in record.items() if k != "digest"} | {"files": sorted(record["files"])}
        found[str(path.relative_to(folder))] = data
    return found


def weights_hash(run_dir: Path, step: int) -> str:
    """SHA-256 of a checkpoint's masters and optimizer state: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, value in sorted(saved(run_dir, step).items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def whole_and_resumed(folder: Path, changes: dict[str, Any]) -> Path:
    """The folder of a run of 4 steps, of which another that ended at 2 and was resumed has all numbers and values."""
    whole = tiny_run(folder / "whole", changes)
    tiny_run(folder / "parts", changes | {"train.steps": 2})
    parts = tiny_run(folder / "parts", changes | {"checkpoint.resume": "auto"})
    assert numbers(parts) == numbers(whole)
    of_whole, of_parts = saved(whole, 4), saved(parts, 4)
    assert all(torch.equal(value, of_parts[name]) for name, value in of_whole.items())
    return whole
