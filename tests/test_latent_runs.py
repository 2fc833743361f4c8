"""Whole runs of a model with latent attention and DeepSeek's experts: parity, ranks, adapters, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from latent_arch import LATENT
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_ranks_loop import FIXED, assert_same_run, rank_run
from tiny import numbers, tiny_config, tiny_run, weights_hash

from jetrl.api import load_model
from jetrl.config.shipped import find_recipe
from jetrl.errors import UserError
from jetrl.kernels.quantize.ops import quantize_weight
from jetrl.model.weights import published
from jetrl.parity.certificate import Workload, certify
from jetrl.run.prepare import prepare


def test_one_rank_and_two_are_the_same_run(tmp_path: Path) -> None:
    """FP8, shared prompts, a warm start, a reference policy, frozen routers: parity 0, and the bits of one process."""
    changes = FIXED | LATENT | {
        "train.steps": 2, "rl.kl_coef": 0.01, "train.share_prompts": True,
        "task.reward": f"{tmp_path}/one/reward.py:reward", "train.freeze_router": True,
        "sft": {"steps": 2, "batch_size": 12, "lr": 1e-3, "cache_dir": str(tmp_path / "cache")},
    }
    alone = tiny_run(tmp_path / "one", changes)
    rows = numbers(alone)
    assert all(row["parity/logprob_abs_diff_max"] == 0.0 for row in rows[1:])
    assert run_ranks(rank_run, 2, tmp_path / "two", changes) == [True, True]
    assert_same_run(tmp_path / "two" / "runs" / "tiny", alone)


def test_the_bias_of_a_checkpoint_is_fp32_and_never_moves(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, LATENT | {"train.steps": 2, "checkpoint.save_interval": 1})
    name, found = "model.layers.1.mlp.gate.e_score_correction_bias", []
    for step in (1, 2):
        with safe_open(run / "checkpoints" / f"step_{step:06d}" / "model" / "model.safetensors", "pt") as file:
            found.append(file.get_tensor(name))
    assert found[0].dtype == torch.float32 and torch.equal(*found)
    config = json.loads((run / "checkpoints" / "step_000002" / "model" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3" and config["topk_method"] == "noaux_tc"
    assert certify(load_model(run, device="cpu").model, Workload(3, 12, 4, 5, 4), "saved", lambda text: None).ok


@pytest.mark.parametrize("critic", [False, True], ids=["grpo", "critic"])
def test_a_resumed_run_has_its_bias(critic: bool, tmp_path: Path) -> None:
    """The bias of `model.path`, which no update has: in the policy, the reference and a critic of its own."""
    first = tiny_run(tmp_path / "a", LATENT | {"train.steps": 1, "checkpoint.save_interval": 1})
    folder, name = first / "checkpoints" / "step_000001" / "model", "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors = load_file(folder / "model.safetensors")
    bias = torch.tensor([0.3, -0.2, 0.6, 0.1, 0.4, -0.5]) + 2**-20
    save_file(tensors | {name: bias}, folder / "model.safetensors")
    changes = {"model.arch": None, "model.path": str(folder), "checkpoint.save_interval": 1, "rl.kl_coef": 0.01}
    changes |= {"rl.algo": "ppo", "rl.critic_lr": 3e-3} if critic else {}
    straight = tiny_run(tmp_path / "b", changes | {"train.steps": 2})
    run = tiny_run(tmp_path / "c", changes | {"train.steps": 1})
    tiny_run(tmp_path / "c", changes | {"train.steps": 2, "checkpoint.resume": "auto"})
    assert numbers(run)[-1] == numbers(straight)[-1] and weights_hash(run, 2) == weights_hash(straight, 2)
    assert torch.equal(load_file(run / "checkpoints" / "step_000002" / "model" / "model.safetensors")[name], bias)


def test_adapters_beside_its_linears(tmp_path: Path) -> None:
    """Of q where it has no latent, of o, of dense and shared experts' MLPs."""
    no_q = {key: value for key, value in LATENT.items() if not key.endswith("q_lora_rank")}
    run = tiny_run(tmp_path, no_q | {"train.steps": 1, "lora.rank": 4, "checkpoint.save_interval": 1})
    assert numbers(run)[-1]["parity/logprob_abs_diff_max"] == 0
    saved = next((run / "checkpoints").glob("step_*/model/adapter_model.safetensors"))
    with safe_open(saved, "pt") as file:
        names = " ".join(file.keys())
    for part in ("layers.0.self_attn.q_proj", "self_attn.o_proj", "0.mlp.down_proj", "1.mlp.shared_experts.gate_proj"):
        assert part in names, part


@pytest.mark.parametrize(("changes", "message"), [
    ({"quant.kv_cache": "fp8"}, "there is no FP8 cache of them"),
    ({"train.router_aux_loss_coef": 0.01}, "train.router_aux_loss_coef = 0.01: that loss is of softmax scores"),
])  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        prepare(tiny_config(tmp_path, LATENT | changes))
    assert message in str(caught.value)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as what is asked before a run goes, there is a GPU."""
    monkeypatch.setattr("jetrl.run.prepare.require", lambda kernels: None)
    monkeypatch.setattr("jetrl.run.prepare.require_latent", lambda kernels: None)
    monkeypatch.setattr("jetrl.run.prepare.require_experts", lambda kernels: None)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("changes", "message"), [
    ({"rollout.page_size": 32}, "rollout.page_size = 32: latent attention on a GPU reads pages of whole tiles of 64"),
    ({"model.arch.kv_lora_rank": 24}, "and with these kernels up to 64 heads; .* kv_lora_rank = 24, 4 heads"),
    ({"model.arch.qk_rope_head_dim": 8}, "this model has qk_rope_head_dim = 8, 4 heads. Set device"),
    ({"model.arch.num_attention_heads": 128, "model.arch.num_key_value_heads": 128}, "this model has 128 heads. Set"),
])  # fmt: skip
def test_what_the_kernels_of_a_gpu_lack_is_refused_at_the_start(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    fits = LATENT | {"model.arch.kv_lora_rank": 32, "model.arch.qk_rope_head_dim": 16, "rollout.page_size": 128}
    prepare(tiny_config(tmp_path, fits).model_copy(update={"device": "cuda", "kernels": "hopper"}))
    config = tiny_config(tmp_path, fits | changes).model_copy(update={"device": "cuda", "kernels": "hopper"})
    with pytest.raises(UserError, match=message):
        prepare(config)
    if "rollout.page_size" in changes:  # the CPU's have no tiles, and other engines no pages of ours
        prepare(tiny_config(tmp_path, fits | changes))


def test_a_run_from_an_fp8_folder(tmp_path: Path) -> None:
    """Begun, evaluated and certified: the folder's codes are those of the policy that is published first."""
    run = tiny_run(tmp_path, LATENT | {"train.steps": 1, "checkpoint.save_interval": 1})
    base = run / "checkpoints" / "step_000001" / "model"
    tensors = load_file(base / "model.safetensors")
    for name in [n for n in tensors if "_proj" in n and "kv_b" not in n]:
        q = quantize_weight(tensors[name])
        tensors |= {name: q.codes, f"{name}_scale_inv": q.scale}
    folder = tmp_path / "fp8"
    shutil.copytree(base, folder)
    save_file(tensors, folder / "model.safetensors")
    said = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    for name, tensor in published(load_model(folder, device="cpu").model).items():
        kept = tensor.values if tensor.scales is None else tensor.values.view(torch.uint8)
        assert torch.equal(kept, tensors[name].view(kept.dtype) if tensor.scales is not None else tensors[name]), name
        assert tensor.scales is None or torch.equal(tensor.scales, tensors[f"{name}_scale_inv"])
    changes = {"model.arch": None, "model.path": str(folder), "train.steps": 1, "eval.eval_interval": 0}
    for more in ({}, {"lora.rank": 4}):
        again = tiny_run(tmp_path / f"again{len(more)}", changes | more)
        assert [row["parity/logprob_abs_diff_max"] for row in numbers(again)[-1:]] == [0.0]


def test_its_recipe_is_shipped() -> None:
    assert 'model_type = "deepseek_v3"' in Path(find_recipe("quickstart_mla")).read_text()
