"""Distillation on a GPU: as tests/run/test_teacher.py on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import ARCH, numbers, tiny_run, weights_hash

pytestmark = pytest.mark.gpu
GPU: dict[str, Any] = {"device": "cuda", "model.arch": ARCH | {"hidden_size": 128, "head_dim": 128}}


@pytest.mark.parametrize("precision", ["bf16", "fp8", "w8a16"])
@pytest.mark.parametrize("more", [{}, {"teacher.top_k": 4, "teacher.given_fraction": 0.25}], ids=["drawn", "top_k"])
def test_a_distillation_keeps_parity_and_resumes_to_the_bit(
    tmp_path: Path, precision: str, more: dict[str, Any]
) -> None:
    """A teacher with more layers and a wider MLP, in a flow of its own, next to a policy in FP8; by the drawn token,
    and by several tokens with given answers among the policy's own."""
    wider = GPU["model.arch"] | {"intermediate_size": 256, "num_hidden_layers": 3}
    teacher = tiny_run(tmp_path / "teacher", {
        "device": "cuda", "model.arch": wider, "train.steps": 1, "checkpoint.save_interval": 1, "eval.eval_interval": 0,
    })
    changes = GPU | {
        "rl.algo": "distill", "teacher.path": str(teacher), "teacher.precision": precision, "rl.updates_per_step": 2,
        "rollout.max_response_length": 32,
    } | more
    run_dir = tiny_run(tmp_path, changes)
    rows = [row for row in numbers(run_dir) if row["step"]]
    assert all(row["parity/logprob_abs_diff_max"] == 0 and row["policy/teacher_kl"] != 0 for row in rows)
    path = run_dir / "checkpoints" / "step_000002"
    tiny_run(tmp_path, changes | {"checkpoint.resume": str(path)}, name="again")
    assert weights_hash(tmp_path / "runs" / "again", 4) == weights_hash(run_dir, 4)
