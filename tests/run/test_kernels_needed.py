"""The run in miniature whose kernels are compiled ahead: it goes through everything that a run does, here on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_ops import owners
from tiny import tiny_config

from jetrl.engine.graphs.cache import padded_batch
from jetrl.engine.runner import ModelRunner
from jetrl.model.transformer import Transformer
from jetrl.run.compiling import needed
from jetrl.run.prepare import load_spec
from jetrl.spec import SHAPES


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The tokens that each sequence computes, for every forward pass of an engine."""
    seen: list[tuple[int, ...]] = []
    run = ModelRunner.run

    def watched(self: ModelRunner, plan: Any, *args: Any) -> Any:
        seen.append(tuple(plan.counts.tolist()))
        return run(self, plan, *args)

    monkeypatch.setattr(ModelRunner, "run", watched)
    return seen


def test_every_size_of_a_decode_step_comes_three_times(tmp_path: Path, plans: list[tuple[int, ...]]) -> None:
    config = tiny_config(tmp_path, {"rollout.max_num_seqs": 40})
    needed.run(config, load_spec(config)[1], False)
    sizes = [padded_batch(len(counts)) for counts in plans if set(counts) == {1}]
    for size in {padded_batch(n) for n in range(1, 41)}:
        assert sizes.count(size) >= 3, f"a decode graph for {size} rows would be captured by the run itself"
    assert any(1 in counts and max(counts) > 1 for counts in plans), "no step with prompts next to decoding"


def test_prompts_and_micro_batches_of_all_kinds(
    tmp_path: Path, plans: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, {"rollout.max_tokens_per_step": 50, "train.max_tokens_per_gpu": 40})
    trained: list[int] = []
    forward = needed.Transformer.forward

    def watched(self: Transformer, batch: Any, *args: Any, **options: Any) -> Any:
        if batch.side == "train":
            trained.append(len(batch.tokens))
        return forward(self, batch, *args, **options)

    monkeypatch.setattr(Transformer, "forward", watched)
    needed.run(config, load_spec(config)[1], True)
    assert {sum(counts) for counts in plans} >= {5, 16, 50}
    assert set(trained) == {5, 16, 40}
    assert needed.row_counts(8192) == [5, 16, 1040, 1088, 4101, 8192]
    assert needed.batch_counts(70, True) == [5, 16, 32, 64, 70]


def test_adapters_see_the_sizes_from_which_they_compute_otherwise(
    tmp_path: Path, plans: list[tuple[int, ...]]
) -> None:
    """Prompts of numbers of rows that no decode step of this run has."""
    pytest.importorskip("triton")
    from jetrl.kernels.adapters.triton import FEW

    found = []
    for rank in ({}, {"lora.rank": 4}):
        config = tiny_config(tmp_path, {"rollout.max_tokens_per_step": 300, "rollout.max_num_seqs": 12, **rank})
        needed.run(config, load_spec(config)[1], False)
        found.append({sum(counts) for counts in plans})
        plans.clear()
    without, with_adapters = found
    assert with_adapters - without == {48, 200}, (sorted(without), sorted(with_adapters))
    assert 16 < 48 <= 64 < 200 <= FEW < 300


def noted(name: str, called: set[str], op: Any) -> Any:
    def watched(*args: Any, **options: Any) -> Any:
        called.add(name)
        return op(*args, **options)

    return watched


@pytest.mark.parametrize(
    "changes", [
        {"rl.kl_coef": 0.1, "sft.steps": 2, "train.share_prompts": True}, {"rl.algo": "ppo"},
        {"rollout.top_p": 0.9, "precision": "bf16"}, {"rl.updates_per_step": 2, "rl.clip": "calibrated"},
        {"quant.kv_cache": "fp8", "quant.num_first_layers_in_bf16": 1},
        {"lora.rank": 4, "rl.kl_coef": 0.1, "sft.steps": 2, "rl.updates_per_step": 2, "rl.clip": "calibrated"},
    ],
)
def test_settings_reach_the_miniature(tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()
    for name in ("logprob_backward", "adamw_step_", "fp8_gemm", "bf16_gemm", "round_heads", "quantize_weight"):
        for owner in owners(name):
            monkeypatch.setattr(owner, name, noted(name, called, getattr(owner, name)))
    config = tiny_config(tmp_path, changes)
    needed.run(config, load_spec(config)[1], True)
    fp8 = config.precision == "fp8"
    assert "logprob_backward" in called and ("fp8_gemm" in called) is ("quantize_weight" in called) is fp8
    assert ("round_heads" in called) is (config.quant.kv_cache == "fp8")


def test_one_layer_of_each_kind(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, {"quant.num_first_layers_in_bf16": 1, "quant.num_last_layers_in_bf16": 1})
    assert needed.reduced(config, SHAPES["qwen3-8b"])[1].num_layers == 3
    assert needed.reduced(tiny_config(tmp_path), SHAPES["qwen3-8b"])[1].num_layers == 1
    small = needed.reduced(tiny_config(tmp_path), SHAPES["tiny-moe"])[1]
    assert small.expert_layers and small.num_layers <= 2
    for of, layers in ((config, 5), (tiny_config(tmp_path), 4)):
        small = needed.reduced(of, SHAPES["qwen3.5-9b"])[1]
        assert small.delta is not None
        assert small.num_layers == layers and small.delta.layers == (0, 1, 2, 4)[: layers - 1]
    small, q = needed.reduced(config, SHAPES["qwen3-8b"])[1], needed.reduced(config, SHAPES["qwen3-8b"])[0].quant
    assert (q.num_first_layers_in_bf16, q.num_last_layers_in_bf16) == (1, 1) and small.vocab_size == 151936


def test_sizes_of_the_parts() -> None:
    assert needed.parts(10, 4) == [4, 4, 2] and needed.parts(8, 4) == [4, 4]
    assert needed.halves(10, 100) == [5, 5] and sum(needed.halves(4101, 26)) == 4101
    assert max(needed.halves(4101, 26)) <= 26 and torch.tensor(needed.halves(5, 5)).tolist() == [2, 3]


def test_long_sequences_that_decode_in_parallel_over_keys_come_with_every_width_of_the_page_table() -> None:
    assert needed.many_keys(8, 128, 4000, 256) == [(1, 4000), (2, 4000), (4, 4000)]
    assert needed.many_keys(8, 128, 10000, 2) == [(1, 4093), (2, 4093), (1, 8189), (2, 8189), (1, 10000), (2, 10000)]
    assert needed.many_keys(8, 128, 1000, 2) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "kv_cache", "master"), [
        ("ragged", "fp8", "float32"), ("ragged", "bf16", "bfloat16"), ("plain", "fp8", "float32"),
        ("sft", "bf16", "bfloat16"), ("drafts", "fp8", "float32"),
        ("experts", "bf16", "bfloat16"),
    ],
)
def test_the_launches_of_a_run_are_among_those_found(tmp_path: Path, which: str, kv_cache: str, master: str) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).with_name("recorded_run.py")), str(tmp_path), which, kv_cache, master]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert " 0 missed" in done.stdout, done.stdout
