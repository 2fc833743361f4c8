"""Runs that train adapters over a frozen base, from the config to checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import numbers, saved, tiny_config, tiny_run, weights_hash

LORA: dict[str, Any] = {"lora.rank": 4, "train.lr": 3e-2}
RUNS: dict[str, dict[str, Any]] = {
    "fp8": {"rl.updates_per_step": 2, "train.max_tokens_per_gpu": 60},
    "w8a16": {"precision": "w8a16", "rl.updates_per_step": 2, "rl.clip": "calibrated"},
    "bf16 fixed": {"precision": "bf16", "train.reduction": "fixed"},
    "kl warm": {"rl.kl_coef": 0.1, "sft.steps": 2, "sft.batch_size": 4, "train.activation_checkpointing": True},
    "shared critic": {"rl.algo": "ppo", "rl.critic": "shared"},
    "bf16 masters": {"train.master_dtype": "bfloat16", "lora.targets": ["q_proj", "v_proj", "down_proj"]},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_adapters_alone_and_resumes_to_the_bit(name: str, tmp_path: Path) -> None:
    changes = LORA | RUNS[name]
    changes |= {"sft.cache_dir": str(tmp_path / "cache")} if "sft.steps" in changes else {}
    run_dir = tiny_run(tmp_path, changes)
    rows = [row for row in numbers(run_dir) if row["step"]]
    assert len(rows) == 4 and all(row["parity/logprob_abs_diff_mean"] == 0 for row in rows)
    assert all(row["policy/grad_norm"] > 0 for row in rows)
    state = saved(run_dir, 4)
    assert all(".lora." in key for key in state if key.startswith("model."))
    path = run_dir / "checkpoints" / "step_000002"
    tiny_run(tmp_path, changes | {"checkpoint.resume": str(path), "output_dir": str(tmp_path / "again")}, name="again")
    again = tmp_path / "runs" / "again"
    assert weights_hash(again, 4) == weights_hash(run_dir, 4)
    assert [row for row in numbers(again) if row["step"]] == rows[2:]
