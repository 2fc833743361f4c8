"""Runs with frozen parameters on a GPU: as tests/test_frozen.py on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from freezing import base, bits, build_frozen
from tiny import ARCH, numbers, tiny_run, weights_hash

from jetrl.model.master import masters_of

pytestmark = pytest.mark.gpu
GPU: dict[str, Any] = {"device": "cuda", "model.arch": ARCH | {"hidden_size": 128, "head_dim": 128}}


@pytest.mark.parametrize(
    "changes",
    [{}, {"quant.wgrad": "row"}, {"precision": "w8a16"}, {"train.activation_checkpointing": True},
     {"quant.kv_cache": "fp8", "train.reduction": "fixed"}, {"train.lean_backward": False}],
    ids=str,
)
def test_a_run_trains_the_others_and_resumes_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    models = build_frozen(monkeypatch, base)
    changes = GPU | {"rl.updates_per_step": 2, "train.max_tokens_per_gpu": 60} | changes
    run_dir = tiny_run(tmp_path, changes)
    rows = [row for row in numbers(run_dir) if row["step"]]
    assert len(rows) == 4 and all(row["parity/logprob_abs_diff_max"] == 0 for row in rows)
    assert all(row["policy/grad_norm"] > 0 for row in rows)
    frozen = [name for name in masters_of(models[0]) if base(name)]
    assert frozen and all(models[0].get_parameter(name).is_meta for name in frozen)
    path = run_dir / "checkpoints" / "step_000002"
    tiny_run(tmp_path, changes | {"checkpoint.resume": str(path)}, name="again")
    again = tmp_path / "runs" / "again"
    assert weights_hash(again, 4) == weights_hash(run_dir, 4)
    assert [row for row in numbers(again) if row["step"]] == rows[2:]
    ends = [bits(model, lambda _: True) for model in models]
    assert ends[0].keys() == ends[1].keys()
    assert not [key for key, value in ends[0].items() if not torch.equal(ends[1][key], value)]
