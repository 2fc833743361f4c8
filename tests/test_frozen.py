"""Runs in which some parameters train and the others are frozen: published, in FP8 or BF16, and nothing else.

On several ranks: tests/train/test_reduction.py, the case FROZEN.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from freezing import base, bits, build_frozen, lower
from tiny import numbers, saved, tiny_config, tiny_run, weights_hash
from tolerances import assert_bitwise_equal

from jetrl.api import load_model
from jetrl.model.linear import FlowLinear
from jetrl.model.master import masters_of
from jetrl.model.weights import checksum, published
from jetrl.run import setup

UNTIED = {"model.arch.tie_word_embeddings": False, "model.arch.model_type": "qwen2"}  # with a bias of qkv
EXPERTS = {
    "model.arch.model_type": "qwen3_moe", "model.arch.num_experts": 4, "model.arch.num_experts_per_tok": 2,
    "model.arch.moe_intermediate_size": 72,
}


RUNS: dict[str, tuple[Callable[[str], bool], dict[str, Any]]] = {
    "base": (base, {"rl.updates_per_step": 2, "train.max_tokens_per_gpu": 60}),
    "base, KL, warm start": (
        base, {"rl.kl_coef": 0.1, "sft.steps": 2, "sft.batch_size": 4, "train.activation_checkpointing": True}),
    "base, critic, pow2": (base, {"rl.algo": "ppo", "rl.critic_lr": 3e-3, "quant.weight_scale": "pow2"}),
    "base, shared critic, w8a16": (base, {"rl.algo": "ppo", "rl.critic": "shared", "precision": "w8a16"}),
    "experts, 8-bit": (base, EXPERTS | {"train.optimizer_dtype": "bfloat16", "train.reduction": "fixed"}),
    "lower, untied": (lower, UNTIED | {"train.master_dtype": "bfloat16"}),
    "lower, bf16": (lower, {"precision": "bf16", "train.reduction": "fixed"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_the_others_and_resumes_to_the_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    which, changes = RUNS[name]
    changes = changes | ({"sft.cache_dir": str(tmp_path / "cache")} if "sft.steps" in changes else {})
    models = build_frozen(monkeypatch, which)
    first = setup.build(tiny_config(tmp_path / "first", changes)).model
    begin = bits(first, which), bits(first, lambda name: not which(name))
    run_dir = tiny_run(tmp_path, changes)
    model = models[1]
    rows = [row for row in numbers(run_dir) if row["step"]]
    assert len(rows) == 4 and all(row["parity/logprob_abs_diff_mean"] == 0 for row in rows)
    assert all(row["policy/grad_norm"] > 0 for row in rows)

    end = bits(model, which), bits(model, lambda name: not which(name))
    assert begin[0] and all(torch.equal(end[0][key], value) for key, value in begin[0].items())
    assert any(not torch.equal(end[1][key], value) for key, value in begin[1].items()), "nothing was trained"
    frozen = [key for key in masters_of(model) if which(key)]
    for key in frozen:
        p = model.get_parameter(key)
        assert p.grad is None and not p.requires_grad
        linear = model.get_submodule(key.rpartition(".")[0])
        assert p.is_meta if isinstance(linear, FlowLinear) else p.data_ptr() == linear.published.data_ptr()

    state = saved(run_dir, 4)
    assert {f"model.{key}" for key in masters_of(model) if not which(key)} == {
        key for key in state if key.startswith("model.")
    }
    steps = [key for key in state if key.startswith("optimizer.") and key.endswith(".step")]
    trained = [key for key in masters_of(model) if not which(key)]
    assert len(steps) == len(trained) + (1 if "shared" in name else 0), "moments of what is frozen"

    path = run_dir / "checkpoints" / "step_000002"
    tiny_run(tmp_path, changes | {"checkpoint.resume": str(path), "output_dir": str(tmp_path / "again")}, name="again")
    again = tmp_path / "runs" / "again"
    assert weights_hash(again, 4) == weights_hash(run_dir, 4)
    assert [row for row in numbers(again) if row["step"]] == rows[2:]
    assert bits(models[-1], lambda _: True).keys() == bits(model, lambda _: True).keys()
    for key, value in bits(model, lambda _: True).items():
        assert_bitwise_equal(bits(models[-1], lambda _: True)[key], value, key)


def test_the_folder_of_a_checkpoint_is_the_whole_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads it in the same precision has the bits that were trained and frozen."""
    models = build_frozen(monkeypatch, base)
    run_dir = tiny_run(tmp_path, {"train.steps": 2})
    monkeypatch.undo()
    assert checksum(published(load_model(run_dir).model)) == checksum(published(models[-1]))
