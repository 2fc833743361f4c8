"""What ranks hold, counted from the objects of a run, is what `run/fit/memory.py` predicts, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memory_by_part import TINY, measure, predicted
from ranks import run_ranks
from recipes_on_random import stand_in_config

from jetrl.config import load_config, resolve, to_toml
from jetrl.parallel.world import ALONE, World

PARTS = ("masters", "moments", "host", "published", "tables", "others")
SMALL = ["train.max_tokens_per_gpu=1024", "task.max_prompt_length=256", "train.steps=1", "eval.eval_interval=0"]
CASES: dict[str, list[str]] = {
    "on the GPU": ["train.offload_optimizer=false", "train.optimizer_dtype=float32", "rl.kl_coef=0.01"],
    "all in bf16": ["train.offload_optimizer=false", "train.master_dtype=bfloat16", "train.grad_dtype=bfloat16",
                    "quant.num_first_layers_in_bf16=1"],
    "offloaded": ["precision=fp8_rollout", "rl.adv_estimator=gae", "rl.kl_coef=0.01"],
}


def on_rank(world: World, folder: Path, cases: dict[str, list[str]]) -> dict[str, Any]:
    return {name: in_folder(folder / str(world.rank) / name, world, overrides) for name, overrides in cases.items()}


def in_folder(folder: Path, world: World, overrides: list[str]) -> dict[str, tuple[int, int]]:
    """By part what the prediction says, and what is there."""
    folder.mkdir(parents=True)
    config = stand_in_config("gsm8k_qwen3_8b", folder, TINY, 256, 16, "cpu")
    (folder / "run.toml").write_text(to_toml(config))
    config = resolve(load_config(folder / "run.toml", [*SMALL, *overrides]), cuda_available=False)
    found, told = measure(config, folder, world), predicted(config, TINY, world.size)
    return {part: (told[part], found[part]) for part in (*PARTS, "gradients")}


def test_of_one_process_to_the_byte(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for name, overrides in CASES.items():
        for part, (told, found) in in_folder(tmp_path / name, ALONE, overrides).items():
            assert told == found, f"{name}, {part}: {told} predicted, {found} held"


@pytest.mark.slow
def test_of_two_ranks(tmp_path: Path) -> None:
    """Rank 0 owns most."""
    cases = {name: CASES[name] for name in ("all in bf16",)}
    for name, parts in run_ranks(on_rank, 2, tmp_path, cases)[0].items():
        for part, (told, found) in parts.items():
            assert told == found, f"{name}, {part}: {told} predicted, {found} held"
