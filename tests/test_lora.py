"""Runs that train adapters over a frozen base, from the config to checkpoints."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny import HYBRID, numbers, saved, tiny_config, tiny_run, weights_hash

from jetrl.config import digest, load_config, to_toml
from jetrl.config.lora import LoraConfig
from jetrl.config.shipped import find_recipe
from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.run import setup
from jetrl.run.checkpoint import state, store
from jetrl.run.prepare import prepare

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
    held = saved(run_dir, 4)
    assert all(".lora." in key for key in held if key.startswith("model."))
    path = run_dir / "checkpoints" / "step_000002"
    tiny_run(tmp_path, changes | {"checkpoint.resume": str(path), "output_dir": str(tmp_path / "again")}, name="again")
    again = tmp_path / "runs" / "again"
    assert weights_hash(again, 4) == weights_hash(run_dir, 4)
    assert [row for row in numbers(again) if row["step"]] == rows[2:]


def test_adapters_learn(tmp_path: Path) -> None:
    """From a base that imitates worked solutions to answers of sevens; weights of the base stay what they are."""
    code = "def reward(completions, **_):\n    return [c.count('7') / 10 for c in completions]\n"
    (tmp_path / "sevens.py").write_text(code)
    changes = {
        "lora.rank": 8, "train.lr": 0.03, "train.steps": 12, "eval.eval_interval": 0, "checkpoint.save_interval": 0,
        "checkpoint.keep": None, "rollout.prompts_per_step": 8, "task.reward": f"{tmp_path}/sevens.py:reward",
        "task.params": {"digits": [2], "check_gold": False}, "sft.steps": 20, "sft.lr": 0.02,
        "sft.cache_dir": str(tmp_path / "cache"),
    }
    rows = [row for row in numbers(tiny_run(tmp_path, changes)) if row["step"]]
    rewards = [row["reward/mean"] for row in rows]
    assert rewards[0] < 0.05 and sum(rewards[-3:]) / 3 > 0.3
    assert all(row["parity/logprob_abs_diff_mean"] == 0 for row in rows)


def test_a_warm_start_is_that_of_whole_weights_and_the_reference_is_the_base(tmp_path: Path) -> None:
    """The cache of one serves the other, and a KL penalty takes no copy of the weights."""
    warm = {"sft.steps": 2, "sft.batch_size": 4, "sft.cache_dir": str(tmp_path / "cache"), "train.steps": 1,
            "eval.eval_interval": 0}
    tiny_run(tmp_path / "whole", warm | {"precision": "bf16"})
    (cached,) = (tmp_path / "cache").iterdir()
    run_dir = tiny_run(tmp_path / "ours", warm | LORA | {"checkpoint.save_interval": 1})
    assert [*(tmp_path / "cache").iterdir()] == [cached], "nothing was trained again"
    values = store.whole(cached / store.TENSORS)
    folder = run_dir / "checkpoints" / "base"
    base = hf.load_state(folder, hf.spec_from_folder(folder))
    assert all(torch.equal(base[name], value.bfloat16()) for name, value in values.items())

    session = setup.build(tiny_config(tmp_path / "built", LORA | {"rl.kl_coef": 0.1}))
    state.begin(session, tmp_path / "built" / "runs" / "tiny")
    reference, model = session.progress.reference, session.model
    assert reference is not None and not reference.holds_masters
    held = {m.published.data_ptr() for m in model.published_modules() if m.published.numel()}
    assert all(m.published.data_ptr() in held for m in reference.published_modules() if m.published.numel())
    for ours, theirs in zip(model.layers, reference.layers, strict=True):
        assert theirs.attn.qkv.quantized is ours.attn.qkv.quantized and theirs.attn.qkv.lora is None
    assert not (tmp_path / "built" / "runs" / "tiny" / "checkpoints" / "reference").exists()


def test_a_checkpoint_is_a_folder_of_adapters(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, LORA | {"lora.targets": ["q_proj", "up_proj"], "train.steps": 2})
    folder, base = run_dir / "checkpoints" / "step_000002" / "model", run_dir / "checkpoints" / "base"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["use_rslora"]) == ("LORA", 4, 32, False)
    assert config["target_modules"] == ["q_proj", "up_proj"] and config["base_model_name_or_path"] == str(base)
    assert not (folder / "config.json").exists() and (folder / "tokenizer_config.json").is_file()
    held = saved(run_dir, 2)
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        assert len(list(file.keys())) == 2 * 2 * 2
        at = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
        assert torch.equal(file.get_tensor(f"{at}A.weight"), held["model.layers.1.attn.qkv.lora.a.weight"].bfloat16())
        assert torch.equal(file.get_tensor(f"{at}B.weight"), held["model.layers.1.attn.qkv.lora.b.weight"].bfloat16())
    assert (base / "config.json").is_file() and (base / "model.safetensors").is_file()


def test_a_hybrid_has_adapters_of_its_linear_attention(tmp_path: Path) -> None:
    """Parity 0, and PEFT's folder names the layers that have them; a model without such projections is refused."""
    changes = LORA | HYBRID | {"lora.targets": ["linear_attention"], "train.steps": 2}
    run_dir = tiny_run(tmp_path, changes)
    assert all(row["parity/logprob_abs_diff_max"] == 0.0 for row in numbers(run_dir) if row["step"])
    folder = run_dir / "checkpoints" / "step_000002" / "model"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == ["in_proj_qkv", "in_proj_z", "out_proj"]
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        names = sorted(file.keys())
        moved = file.get_tensor("base_model.model.model.layers.0.linear_attn.out_proj.lora_B.weight")
    assert len(names) == 6 and all(".layers.0.linear_attn." in name for name in names) and moved.abs().max() > 0
    with pytest.raises(UserError, match="this qwen3 model has no in_proj_qkv, in_proj_z, out_proj. It has q_proj"):
        tiny_run(tmp_path / "other", LORA | {"lora.targets": ["in_proj_qkv", "in_proj_z", "out_proj"]})


def test_another_base_is_refused_at_a_resume(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, LORA | {"train.steps": 2})
    weights = run_dir / "checkpoints" / "base" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1  # a bit of one value
    weights.write_bytes(data)
    with pytest.raises(UserError, match=r"holds adapters of another base: it has the digest [0-9a-f]{16}"):
        tiny_run(tmp_path, LORA | {"train.steps": 4, "checkpoint.resume": "auto"})


MIXTURE = {"model.arch.model_type": "qwen3_moe", "model.arch.num_experts": 4, "model.arch.num_experts_per_tok": 2,
           "model.arch.moe_intermediate_size": 72}


@pytest.mark.parametrize(("changes", "told"), [
    ({"lora.rank": 0}, "lora.rank: must be at least 1, got 0"),
    ({"lora.rank": 4, "lora.targets": ["qproj"]}, r'got "qproj"; did you mean "q_proj"\?'),
    ({"lora.rank": 4, "lora.targets": "mlp"}, r'must be a list of .*, got "mlp"; did you mean \["mlp"\]\?'),
    ({"lora.rank": 4, "lora.targets": []}, "lora.targets: names no projection"),
    ({"lora.rank": 4, "lora.targets": ["mlp", "mlp"]}, "names a target twice"),
    ({"lora.rank": 33}, "lora.rank = 33 is beyond the rank of k_proj, which is 32 at most"),
    ({"lora.alpha": 8.0}, 'lora.alpha: has no effect while lora.rank = "none"'),
    ({"lora.rank": 4, "rollout.engine": "vllm"}, "jetrl's own engine only"),
    ({"lora.rank": 4, "rl.algo": "ppo"}, "a critic of its own"),
    (MIXTURE | {"lora.rank": 4, "lora.targets": ["mlp"]},
     "this qwen3_moe model has no gate_proj, up_proj, down_proj outside of its experts"),
    ({"lora.rank": 4, "lora.expert_rank": 4}, "lora.expert_rank = 4: this qwen3 model has no experts"),
    ({"lora.rank": 4, "lora.expert_rank": 0}, "lora.expert_rank: must be at least 1"),
    ({"lora.expert_rank": 4}, 'lora.expert_rank: has no effect while lora.rank = "none"'),
    (MIXTURE | {"lora.rank": 4, "lora.expert_rank": 41}, "lora.expert_rank = 41 is beyond the rank of an expert's"),
    (MIXTURE | {"lora.rank": 4, "lora.expert_rank": 4, "lora.targets": ["attention"]}, "names none of gate_proj"),
])
def test_bad_input(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told):
        prepare(tiny_config(tmp_path, changes))


def test_a_config_without_adapters_has_the_digest_of_before_and_one_with_them_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is hashed has no section [lora]."""
    hashed, sha256 = list[bytes](), hashlib.sha256

    def heard(data: bytes) -> Any:
        hashed.append(data)
        return sha256(data)

    config = load_config(find_recipe("quickstart"))
    monkeypatch.setattr("jetrl.config.load.hashlib.sha256", heard)
    digest(config)
    monkeypatch.undo()
    assert b"lora" not in hashed[0] and b'"train"' in hashed[0]
    assert "lora" not in to_toml(config) and config.lora == LoraConfig()
    ours = load_config(find_recipe("quickstart"), ["lora.rank=16", 'lora.targets=["mlp"]'])
    (tmp_path / "again.toml").write_text(to_toml(ours))
    assert load_config(tmp_path / "again.toml") == ours and digest(ours) != digest(config)
