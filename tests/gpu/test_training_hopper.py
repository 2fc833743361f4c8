"""Whole runs on a GPU: parity zero in every step, the same run twice is the same bits, and so is a resumed one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tiny import ARCH, long_prompts, numbers, tiny_config, tiny_run, weights_hash

from jetrl.engine.runner import ModelRunner
from jetrl.model import attention, mlp
from jetrl.report.recorder import read_samples
from jetrl.run.loop import StopRequest, run
from jetrl.train import reduction

pytestmark = pytest.mark.gpu
PARITY = "parity/logprob_abs_diff_max"
GPU: dict[str, Any] = {"device": "cuda", "model.arch": ARCH | {"hidden_size": 72, "head_dim": 32}}


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp8"}, {"precision": "bf16"}, {"quant.wgrad": "row"},
        {"train.activation_checkpointing": True, "train.max_tokens_per_gpu": 60},
        {"quant.activation_scale": "pow2", "rl.entropy_coef": 0.01},
        {"quant.saved_gate_up": "fp8"},
        {"train.master_dtype": "bfloat16", "train.optimizer_dtype": "bfloat16", "rl.kl_coef": 0.1},
        {"model.arch": ARCH | {"hidden_size": 128, "head_dim": 128}},  # heads that the decode kernel serves
        {"quant.kv_cache": "fp8"},
        {"quant.kv_cache": "fp8", "model.arch": ARCH | {"hidden_size": 128, "head_dim": 128}},
        {"quant.kv_cache": "fp8", "train.activation_checkpointing": True, "rollout.page_size": 16},
        {"rl.updates_per_step": 2, "train.max_tokens_per_gpu": 60}, {"train.share_prompts": True, "rl.kl_coef": 0.1},
        {"train.share_prompts": True, "train.max_tokens_per_gpu": 60, "quant.kv_cache": "fp8"},
        {"rollout.top_p": 0.9, "rollout.temperature": 0.7},
        {"rollout.top_p": 0.8, "rollout.top_k": 20, "rl.updates_per_step": 2, "rl.kl_coef": 0.1},
        {"rollout.min_p": 0.05, "rl.entropy_coef": 0.01, "train.max_tokens_per_gpu": 60},
        {"rollout.top_p": 0.8, "rollout.logprobs": "full"},
        {"rl.updates_per_step": 2, "rl.clip": "calibrated", "rl.calibration_interval": 2},
    ],
    ids=str,
)
def test_parity_is_zero_and_the_run_repeats(tmp_path: Path, changes: dict[str, Any]) -> None:
    first, second = (tiny_run(tmp_path / name, GPU | changes) for name in ("a", "b"))
    rows = numbers(first)
    assert [row[PARITY] for row in rows[1:]] == [0.0] * 4
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])
    assert rows == numbers(second) and weights_hash(first, 4) == weights_hash(second, 4)


@pytest.mark.parametrize("changes", [{}, {"train.master_dtype": "bfloat16"}], ids=str)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, changes: dict[str, Any]) -> None:
    straight = tiny_run(tmp_path / "straight", GPU | changes)
    stop = StopRequest()
    config = tiny_config(tmp_path / "stopped", GPU | changes)
    run_dir = tmp_path / "stopped" / "runs" / "tiny"
    stop.asked = True  # after the warm start and step 0; the next call goes on from there
    assert not run(config, run_dir, ["test"], stop)
    tiny_run(tmp_path / "stopped", GPU | changes | {"checkpoint.resume": "auto", "train.steps": 2})
    assert tiny_run(tmp_path / "stopped", GPU | changes | {"checkpoint.resume": "auto"}) == run_dir
    assert numbers(run_dir) == numbers(straight) and weights_hash(run_dir, 4) == weights_hash(straight, 4)
    assert list(read_samples(run_dir)) == list(read_samples(straight))


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
def test_what_must_not_matter_does_not_matter(tmp_path: Path, kv_cache: str) -> None:
    """Page size, chunks, cache size and activation checkpointing change no sample; checkpointing no weight either."""
    flow = GPU | {"quant.kv_cache": kv_cache}
    plain = tiny_run(tmp_path / "plain", flow)
    other = tiny_run(tmp_path / "other", flow | {
        "train.activation_checkpointing": True, "rollout.page_size": 16, "rollout.max_tokens_per_step": 24,
        "rollout.max_num_seqs": 5,
    })
    assert list(read_samples(plain)) == list(read_samples(other))
    assert numbers(plain) == numbers(other)


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
def test_merged_prefixes_change_no_bit_of_a_run(
    tmp_path: Path, kv_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of more than a page, groups of 4: metrics, samples and weights with the switch on, off and auto."""
    calls, decode = [], ModelRunner._decode

    def counted(self: ModelRunner, *args: Any) -> Any:
        before, result = self.merged_calls, decode(self, *args)
        calls.append(self.merged_calls - before)
        return result

    monkeypatch.setattr(ModelRunner, "_decode", counted)
    arch = ARCH | {"hidden_size": 128, "head_dim": 64, "max_position_embeddings": 512}
    long = GPU | long_prompts(tmp_path) | {"model.arch": arch, "quant.kv_cache": kv_cache}
    runs, merged = {}, {}
    for mode in ("off", "on", "auto"):
        calls.clear()
        runs[mode] = tiny_run(tmp_path / mode, long | {"rollout.merge_prefix": mode})
        merged[mode] = sum(calls)
    assert merged["on"] > 0 and merged["off"] == 0
    for mode in ("on", "auto"):
        assert list(read_samples(runs[mode])) == list(read_samples(runs["off"]))
        assert numbers(runs[mode]) == numbers(runs["off"])
        assert weights_hash(runs[mode], 4) == weights_hash(runs["off"], 4)
    assert [row[PARITY] for row in numbers(runs["on"])[1:]] == [0.0] * 4


def test_fp8_rollout_is_visibly_not_on_policy(tmp_path: Path) -> None:
    rows = numbers(tiny_run(tmp_path, GPU | {"precision": "fp8_rollout"}))
    assert all(1e-5 < row[PARITY] < 1.0 for row in rows[1:])


def test_the_second_gemm_backend_trains(tmp_path: Path) -> None:
    """`scaled_mm` computes the same products in an order of its own: parity is measured, not promised."""
    from jetrl.kernels.dispatch import select

    try:
        rows = numbers(tiny_run(tmp_path / "second", GPU | {"kernels": "hopper_scaled_mm"}))
    finally:
        select("hopper")
    first = numbers(tiny_run(tmp_path / "first", GPU))
    assert all(row[PARITY] < 1e-2 for row in rows[1:])
    assert rows[1]["policy/grad_norm"] == pytest.approx(first[1]["policy/grad_norm"], rel=0.05)


@pytest.mark.parametrize("changes", [{}, {"quant.wgrad": "row"}, {"quant.kv_cache": "fp8"}], ids=str)
def test_what_is_made_again_has_the_bits_of_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Gradients waiting in BF16, norms inside the linears, small chunks of logits, heads and transposes made again."""
    common = GPU | changes | {"train.max_tokens_per_gpu": 60}
    lean = tiny_run(tmp_path / "lean", common)
    fast = tiny_run(tmp_path / "fast", common | {"train.lean_backward": False})
    monkeypatch.setattr(attention, "norm_before", lambda *_: None)
    monkeypatch.setattr(mlp, "norm_before", lambda *_: None)
    monkeypatch.setattr(reduction, "first_waits", lambda matrices: nullcontext())
    monkeypatch.setattr("jetrl.kernels.logprob.chunks._FORWARD_ELEMENTS", 1 << 29)
    before = tiny_run(tmp_path / "before", common | {"train.lean_backward": False})
    assert numbers(lean) == numbers(fast) == numbers(before)
    assert weights_hash(lean, 4) == weights_hash(fast, 4) == weights_hash(before, 4)
