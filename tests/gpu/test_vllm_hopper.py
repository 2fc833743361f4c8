"""rollout.engine = "vllm" with the real vLLM on a Hopper GPU: weights in both formats, sleep, the FP8 cache, exports.

    python -m pytest -q -m gpu tests/gpu/test_vllm_hopper.py        # in an environment with jetrl[hopper] and vLLM 0.24
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM (docs/ENGINES.md)"),
]
GAP = "parity/logprob_abs_diff_max"
ARCH: dict[str, object] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 256,
}
BASE: dict[str, object] = {"device": "cuda", "train.steps": 3, "vllm.check_weights": True, "vllm.enforce_eager": True}
FP8 = {"precision": "fp8"}
OTHER_PROCESS = """
import torch
print("ready", len(torch.empty(1, device="cuda")), flush=True)
while True:
    held = [torch.empty(1 << 26, dtype=torch.uint8, device="cuda") for _ in range(100)]
    del held
    torch.cuda.empty_cache()
"""
POW2 = {"quant.weight_scale": "pow2", "quant.activation_scale": "pow2"}


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"precision": "bf16"}, 0.1),
        ({"precision": "bf16", "vllm.enforce_eager": False}, 0.1),
        (FP8, 0.3),
        (FP8 | POW2, 0.3),
        (FP8 | {"vllm.enforce_eager": False, "vllm.kv_cache": "fp8"}, 0.5),
        (FP8 | {"vllm.sleep": False, "quant.num_first_layers_in_bf16": 1}, 0.3),
        ({"precision": "fp8_rollout", "rl.rollout_is": "token", "vllm.kv_cache": "fp8", "rl.rollout_veto": 1e-4}, 0.5),
    ],
    ids=str,
)
def test_each_step_samples_with_what_was_published(tmp_path: Path, changes: dict[str, Any], most: float) -> None:
    """vllm.check_weights compares checksums at every sending; the learner's log-probs say the same of the forward."""
    rows, _ = vllm_cases.run(tmp_path, BASE | changes, ARCH)
    assert all(0 < row[GAP] < most for row in rows[1:]), [row.get(GAP) for row in rows]
    assert all(row["perf/vllm_check_s"] > 0 for row in rows)
    assert ("perf/vllm_sleep_s" in rows[1]) == changes.get("vllm.sleep", True)
    if changes.get("vllm.kv_cache") == "fp8":
        # those of the start come with the first evaluation
        scales = [value for row in rows for key, value in row.items() if key.endswith("vllm/k_scale_max")]
        assert all("vllm/k_scale_max" in row for row in rows[1:])
        assert len(set(scales)) > 1 and min(scales) > 0, "measured again at every step"


@pytest.mark.parametrize("sleep", [True, False])
def test_scales_stay_what_was_published(tmp_path: Path, sleep: bool) -> None:
    """Checksums are compared as weights are sent; wrong scales later, in a rollout, would put log-probs 1.5 apart."""
    changes = BASE | FP8 | {"vllm.sleep": sleep} | vllm_cases.sharp(tmp_path, ARCH)
    rows, _ = vllm_cases.run(tmp_path, changes, ARCH)
    means = [row["parity/logprob_abs_diff_mean"] for row in rows[1:]]
    assert len(means) == 3 and all(0 < mean < 0.5 for mean in means), means


def test_sleep_while_another_process_takes_memory(tmp_path: Path) -> None:
    """Neither changes a metric of 20 steps: all are those of a vLLM that stays awake, alone, to the bit."""
    changes = BASE | {"precision": "bf16", "train.steps": 20}
    alone, _ = vllm_cases.run(tmp_path / "alone", changes | {"vllm.sleep": False}, ARCH)
    other = subprocess.Popen([sys.executable, "-c", OTHER_PROCESS], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline().startswith("ready")
        rows, _ = vllm_cases.run(tmp_path / "sleeping", changes, ARCH)
        assert other.poll() is None
    finally:
        other.kill()
    assert len(rows) == 21 and [untimed(row) for row in rows] == [untimed(row) for row in alone]
    gaps = [row[GAP] for row in rows[1:]]
    assert all(0 < gap < 0.1 for gap in gaps), gaps


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without what a clock or the GPU's memory measured."""
    return {k: v for k, v in row.items() if not k.removeprefix("in_eval/").startswith(("time/", "perf/"))}


def test_conversations_and_a_resumed_run(tmp_path: Path) -> None:
    changes = BASE | {"precision": "bf16", "checkpoint.save_interval": 1} | vllm_cases.talking(tmp_path)
    rows, _ = vllm_cases.run(tmp_path, changes, ARCH)
    assert all(0 < row[GAP] < 0.1 and row["environment/turns_mean"] == 3.0 for row in rows[1:])
    rows, _ = vllm_cases.run(tmp_path, changes | {"train.steps": 3, "checkpoint.resume": "auto"}, ARCH)
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and 0 < rows[3][GAP] < 0.1


@pytest.mark.parametrize(("fp8", "tied"), [(False, False), (False, True), (True, False)])
def test_an_exported_folder_says_the_same_in_vllm_and_transformers(tmp_path: Path, fp8: bool, tied: bool) -> None:
    """Greedy tokens; where they part, the logits are as close as rounding (of activations too, in FP8)."""
    share, lost, error = vllm_cases.greedy_in_both(vllm_cases.exported(tmp_path, fp8, tied), "cuda")
    assert share > (0.8 if fp8 else 0.9) and lost < 2 * error, (share, lost, error)
