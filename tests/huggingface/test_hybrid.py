"""Qwen3.5's folders: nested configs, models with vision, what an export carries through, and refusals by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetrl.api import export_checkpoint
from jetrl.errors import UserError
from jetrl.huggingface import carried, hybrid
from jetrl.huggingface import read as hf
from jetrl.huggingface.export import export
from jetrl.kernels.quantize.ops import quantize_weight
from jetrl.spec import SHAPES, DeltaSpec, ExpertSpec, ModelSpec

# The keys of a published config (9B), as its file has them.
TEXT_9B: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
    "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 12288, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "model_type": "qwen3_5_text",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8, "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "num_attention_heads": 16, "num_hidden_layers": 32,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "use_cache": True, "vocab_size": 248320,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                        "rope_theta": 10000000, "rope_type": "default"},
}
QWEN35_9B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
    "text_config": TEXT_9B, "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057, "vision_config": {"depth": 27, "model_type": "qwen3_5"}, "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
MOE: dict[str, Any] = {"model_type": "qwen3_5_moe_text", "intermediate_size": None}
TEXT_A3B = {key: value for key, value in TEXT_9B.items() if key not in ("intermediate_size", "layer_types")} | {
    "hidden_size": 2048, "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512, "num_experts": 256,
    "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}
SPEC = replace(
    SHAPES["tiny-hybrid"], vocab_size=128, hidden_size=128, intermediate_size=128, num_heads=4, num_kv_heads=4,
    delta=DeltaSpec(key_heads=2, value_heads=4, key_dim=32, value_dim=32, conv_width=4, layers=(0, 1, 2)),
)


MIXTURE = replace(
    SPEC, family="qwen3_5_moe_text", intermediate_size=80, num_layers=2, delta=replace(SPEC.delta, layers=(0,)),
    experts=ExpertSpec(count=8, per_token=2, intermediate_size=96, normalized=True, gated_shared=80),
)


def random_state(spec: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn((sum(p.shape[0] for p in pieces), *pieces[0].flat[1:]), generator=generator)
        for name, pieces in hf.tensor_table(spec).items()
    }


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A model with vision and a head for several tokens around the text model of SPEC."""
    hf.save_model(tmp_path / "text", SPEC, random_state(SPEC))
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    (folder := tmp_path / "whole").mkdir()
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    named = {hybrid.nested_name(name): t for name, t in tensors.items()}
    more = {"model.visual.patch_embed.proj.weight": torch.randn(8, 3, 2, 4, 4, dtype=torch.bfloat16),
            "model.visual.merger.norm.bias": torch.randn(8), "mtp.fc.weight": torch.randn(6, 12, dtype=torch.float16)}
    save_file(named | more, folder / "model.safetensors", metadata={"format": "pt"})
    config = QWEN35_9B | {"text_config": text | {"mtp_num_hidden_layers": 1}, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_specs_of_published_configs() -> None:
    assert hf.spec_from_hf(QWEN35_9B) == SHAPES["qwen3.5-9b"] == hf.spec_from_hf(TEXT_9B)
    by_interval = {key: value for key, value in TEXT_9B.items() if key != "layer_types"}
    assert hf.spec_from_hf(by_interval) == SHAPES["qwen3.5-9b"]
    spec = SHAPES["qwen3.5-9b"]
    assert spec.qkv_sections == (8192, 1024, 1024) and spec.rotary_dim == 64 and spec.delta is not None
    assert spec.delta.conv_channels == 8192 and len(spec.delta.layers) == 24 and 3 not in spec.delta.layers
    written = hf.hf_config(spec, QWEN35_9B)
    assert hf.spec_from_hf(written) == spec and written["model_type"] == "qwen3_5_text"
    assert written["architectures"] == ["Qwen3_5ForCausalLM"] and "vision_config" not in written
    assert written["rope_parameters"]["partial_rotary_factor"] == written["partial_rotary_factor"] == 0.25


def test_the_spec_of_a_published_mixture() -> None:
    spec = SHAPES["qwen3.5-35b-a3b"]
    outer = QWEN35_9B | {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    assert hf.spec_from_hf(outer | {"text_config": TEXT_A3B}) == hf.spec_from_hf(TEXT_A3B) == spec
    absent = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    assert hf.spec_from_hf({key: value for key, value in TEXT_A3B.items() if key not in absent}) == spec
    assert spec.experts is not None and spec.experts.shared_size == 512 and len(spec.expert_layers) == 40
    written = hf.hf_config(spec, outer | {"text_config": TEXT_A3B})
    assert hf.spec_from_hf(written) == spec and written["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert not {"intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"} & written.keys()


def test_experts_in_one_tensor_are_read_as_those_in_many(tmp_path: Path) -> None:
    """Whole, by rows, and with the model around them; wrong sizes and doubled names are refused."""
    hf.save_model(tmp_path / "many", MIXTURE, random_state(MIXTURE))
    many = load_file(tmp_path / "many" / "model.safetensors")
    one, at = {name: t for name, t in many.items() if ".experts." not in name}, "model.layers.{}.mlp.experts."
    assert MIXTURE.experts is not None
    for layer in range(MIXTURE.num_layers):
        own, count = at.format(layer), range(MIXTURE.experts.count)
        pairs = [torch.cat([many[f"{own}{e}.{x}_proj.weight"] for x in ("gate", "up")]) for e in count]
        one[f"{own}gate_up_proj"] = torch.stack(pairs)
        one[f"{own}down_proj"] = torch.stack([many[f"{own}{e}.down_proj.weight"] for e in count])

    def folder(name: str, tensors: dict[str, Tensor]) -> Path:
        (made := tmp_path / name).mkdir()
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text((tmp_path / "many" / "config.json").read_text())
        return made

    state, again = hf.load_state(tmp_path / "many", MIXTURE), hf.load_state(folder("one", one), MIXTURE)
    assert state.keys() == again.keys() and all(torch.equal(state[name], again[name]) for name in state)
    rows = {"layers.1.mlp.gate_up.weight": (90, 330), "layers.0.mlp.down.weight": (100, 257)}
    for name, value in hf.parameters_of(tmp_path / "one", MIXTURE, rows):
        start, stop = rows.get(name, (0, len(value)))
        assert torch.equal(value, state[name][start:stop]), name
    text = json.loads((tmp_path / "many" / "config.json").read_text())
    inside = folder("inside", {hybrid.nested_name(name): t for name, t in one.items()})
    config = QWEN35_9B | {"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": True}
    (inside / "config.json").write_text(json.dumps(config))
    found = hf.load_state(inside, hf.spec_from_folder(inside))
    assert all(torch.equal(state[name], found[name]) for name in state)
    name = at.format(0) + "down_proj"
    with pytest.raises(UserError, match=rf"{name} has shape \[4, 128, 96\], but config.json asks for \[8, 128, 96\]"):
        hf.load_state(folder("short", one | {name: one[name][:4].clone()}), MIXTURE)
    with pytest.raises(UserError, match=r"lacks model.layers.0.mlp.experts.0.down_proj.weight, "):
        hf.load_state(folder("none", {n: t for n, t in one.items() if n != name}), MIXTURE)


def test_transformers_reads_what_is_written() -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(**hf.hf_config(SPEC))
    assert theirs.layer_types == ["linear_attention"] * 3 + ["full_attention"] and theirs.linear_num_value_heads == 4
    assert theirs.rope_parameters["partial_rotary_factor"] == 0.25 and theirs.rope_parameters["rope_theta"] == 1e4


@pytest.mark.parametrize(("change", "message"), [
    ({"layer_types": ["linear_attention"] * 31 + ["mamba"]}, "layer_types has mamba, which is not supported; linear_"),
    ({"layer_types": ["linear_attention"] * 3}, "must be a list with a type for each of 32 layers|3 entries"),
    ({"layer_types": ["full_attention"] * 32}, "a hybrid model has layers of both kinds"),
    ({"attn_output_gate": False}, "attn_output_gate = False asks for attention without an output gate"),
    ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16' asks for a state in another type"),
    ({"linear_num_value_heads": 24}, "linear_num_value_heads = 24 is not a multiple of linear_num_key_heads = 16"),
    ({"linear_conv_kernel_dim": 1}, "would be no convolution"),
    ({"rope_parameters": {"partial_rotary_factor": 0.013, "rope_theta": 1e7}}, "rotates 3 places"),
    ({"rope_parameters": {"partial_rotary_factor": 1.5, "rope_theta": 1e7}}, "must be an even number of 2 up to"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope type 'yarn' is not supported"),
    ({"model_type": "qwen4_exp"}, "'qwen4_exp', with sparse attention and hyper-connections, is not supported; jetrl"),
    ({"model_type": "qwen3_next"}, "'qwen3_next', a hybrid whose projections are interleaved by key head, is not supp"),
    ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size = 512 is not known to jetrl for a qwe"),
    (MOE | {"norm_topk_prob": False}, "asks for weights of experts that are not divided by their sum, which is not"),
    (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 asks for layers without experts, which is not supp"),
    (MOE | {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] asks for layers without experts, which is not"),
    (MOE | {"num_experts_per_tok": 300}, "num_experts_per_tok = 300 is more than num_experts = 256"),
    (MOE | {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0 must be a whole number"),
    ({"quantization_config": {"quant_method": "fp8"}}, "Start from the BF16 model"),
])
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        hf.spec_from_hf(TEXT_9B | change)


def test_a_nested_config_without_a_text_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"text_config = None: a qwen3_5 model has its language model's config there"):
        hf.spec_from_hf({"model_type": "qwen3_5"})


def test_a_model_with_vision_is_read_as_its_text_model(whole: Path, tmp_path: Path) -> None:
    assert hf.spec_from_folder(whole) == SPEC and carried.is_whole(whole) and not carried.is_whole(tmp_path / "text")
    state, text = hf.load_state(whole, SPEC), hf.load_state(tmp_path / "text", SPEC)
    assert state.keys() == text.keys() and all(torch.equal(state[name], text[name]) for name in state)


def test_an_export_carries_the_rest_through(whole: Path, tmp_path: Path) -> None:
    """Of a trained text model, within the folder that it began with; and of that folder itself, in FP8."""
    trained = {name: t + 1.0 for name, t in random_state(SPEC).items()}
    hf.save_model(tmp_path / "trained", SPEC, trained)
    export(tmp_path / "trained", tmp_path / "out", fp8=False, base=whole)
    old, new = (load_file(folder / "model.safetensors") for folder in (whole, tmp_path / "out"))
    assert new.keys() == old.keys() and hf.spec_from_folder(tmp_path / "out") == SPEC
    for name, tensor in new.items():
        kept = name.startswith(("model.visual.", "mtp."))
        assert tensor.dtype == old[name].dtype and torch.equal(tensor, old[name]) == kept, name
    config = hf.read_config(tmp_path / "out")
    assert config["vision_config"] == QWEN35_9B["vision_config"] and config["model_type"] == "qwen3_5"
    again = hf.load_state(tmp_path / "out", SPEC)
    assert torch.equal(again["layers.0.delta.conv.weight"], trained["layers.0.delta.conv.weight"].bfloat16())
    export(whole, tmp_path / "fp8", fp8=True)
    codes = load_file(tmp_path / "fp8" / "model.safetensors")
    at = "model.language_model.layers.0.linear_attn."
    want = quantize_weight(old[f"{at}in_proj_z.weight"], (128,), False)
    assert torch.equal(codes[f"{at}in_proj_z.weight"].view(torch.uint8), want.codes.view(torch.uint8))
    kept = hf.read_config(tmp_path / "fp8")["quantization_config"]["modules_to_not_convert"]
    assert {f"{at}in_proj_a", "mtp.fc", "model.visual.patch_embed.proj", "lm_head"} <= set(kept)
    assert codes[f"{at}A_log"].dtype == torch.float32 and f"{at}out_proj" not in kept


def test_the_command_exports_a_folder_whole(whole: Path, tmp_path: Path) -> None:
    export_checkpoint(whole, tmp_path / "out", fp8=False)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(whole / "model.safetensors").keys()
