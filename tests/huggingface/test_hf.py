"""Hugging Face folders: configs of real models, refusals by name, exact round trips, broken files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.spec import SHAPES, ExpertSpec, ModelSpec, RopeSpec

LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The keys of published configs, as their files have them.
LLAMA_32_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
}
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "transformers_version": "4.42.3",
    "use_cache": True, "vocab_size": 49152,
}
QWEN25_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
    "transformers_version": "4.43.1", "use_sliding_window": False, "vocab_size": 151936,
}
QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
    "intermediate_size": 9728, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}
MODELS = {
    "llama": LLAMA_32_1B, "smollm2": SMOLLM2, "qwen2": QWEN25_05B, "qwen3": QWEN3_4B, "qwen3_moe": QWEN3_30B_A3B,
}

TINY = ModelSpec(
    family="qwen2", vocab_size=40, hidden_size=24, intermediate_size=36, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e4), max_position=64, tie_embeddings=True, qkv_bias=True,
    qk_norm=False,
)
FAMILIES = {
    "qwen2": TINY,
    "qwen3": replace(TINY, family="qwen3", qkv_bias=False, qk_norm=True, head_dim=10, tie_embeddings=False),
    "llama": replace(TINY, family="llama", qkv_bias=False, rope=RopeSpec(5e5, 8.0, 1.0, 4.0, 32)),
    "qwen3_moe": replace(
        TINY, family="qwen3_moe", qkv_bias=False, qk_norm=True, num_layers=3,
        experts=ExpertSpec(count=3, per_token=2, intermediate_size=20, normalized=True, step=2, dense_layers=(0,)),
    ),
}


def random_state(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, pieces in hf.tensor_table(spec).items():
        shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
        state[name] = torch.randn(shape, generator=generator).to(dtype)
    return state


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# -------------------------------------------------------------------------------------------------------------- config


def test_specs_of_published_configs() -> None:
    llama = hf.spec_from_hf(LLAMA_32_1B)
    assert llama.rope == RopeSpec(500000.0, 32.0, 1.0, 4.0, 8192)
    assert (llama.head_dim, llama.qkv_sections, llama.qkv_bias, llama.qk_norm) == (64, (2048, 512, 512), False, False)
    smol = hf.spec_from_hf(SMOLLM2)
    assert (smol.head_dim, smol.rope, smol.tie_embeddings) == (64, RopeSpec(theta=100000.0), True)
    qwen2 = hf.spec_from_hf(QWEN25_05B)
    assert (qwen2.head_dim, qwen2.qkv_bias, qwen2.qk_norm) == (64, True, False)
    qwen3 = hf.spec_from_hf(QWEN3_4B)
    assert (qwen3.head_dim, qwen3.qkv_bias, qwen3.qk_norm) == (128, False, True)
    assert qwen3.qkv_sections == (4096, 1024, 1024)
    moe = hf.spec_from_hf(QWEN3_30B_A3B)
    assert moe == SHAPES["qwen3-30b-a3b"]
    assert moe.experts == ExpertSpec(count=128, per_token=8, intermediate_size=768, normalized=True)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_written_config_as_the_original(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    spec = hf.spec_from_hf(MODELS[name])
    written = hf.hf_config(spec, MODELS[name])
    assert hf.spec_from_hf(written) == spec
    assert hf.spec_from_hf(hf.hf_config(spec)) == spec
    configs = {}
    for key, config in {"original": MODELS[name], "written": written}.items():
        (tmp_path / key).mkdir()
        (tmp_path / key / "config.json").write_text(json.dumps(config))
        configs[key] = AutoConfig.from_pretrained(tmp_path / key).to_dict()
    compared = [k for k in configs["original"] if k not in ("_name_or_path", "transformers_version", "head_dim")]
    assert {k: configs["written"][k] for k in compared} == {k: configs["original"][k] for k in compared}
    assert configs["written"]["head_dim"] == spec.head_dim
    # The layout that transformers 5 saves gives the same spec.
    AutoConfig.from_pretrained(tmp_path / "original").save_pretrained(tmp_path / "v5")
    v5 = hf.read_config(tmp_path / "v5")
    assert "rope_parameters" in v5 and "rope_theta" not in v5
    assert hf.spec_from_hf(v5) == spec


def test_base_config_keeps_its_other_keys() -> None:
    written = hf.hf_config(hf.spec_from_hf(LLAMA_32_1B), LLAMA_32_1B)
    assert written["initializer_range"] == 0.02 and written["eos_token_id"] == 128001
    with pytest.raises(ValueError, match="another model"):
        hf.hf_config(hf.spec_from_hf(SMOLLM2), LLAMA_32_1B)


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        ("llama", {"model_type": "mistral"}, "model_type = 'mistral'"),
        ("llama", {"model_type": None}, "model_type"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp = 2"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config .*'fp8'"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs high_freq_factor"),
        ("llama", {"rope_scaling": {"rope_type": "default", "factor": 8.0}}, "factor = 8.0"),
        ("llama", {"rope_scaling": LLAMA3 | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "differ"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set of rotary"),
        ("llama", {"num_key_value_heads": 5}, "num_key_value_heads = 5"),
        ("llama", {"head_dim": 63}, "head_dim = 63"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"vocab_size": "128256"}, "vocab_size = '128256'"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ("smollm2", {"rope_interleaved": True}, "rope_interleaved"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("qwen3", {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ("qwen3", {"num_experts": 8}, "num_experts = 8 is not known"),
        ("qwen3_moe", {"num_expert": 8}, "num_expert = 8 is not known .* Did you mean num_experts"),
        ("qwen3_moe", {"num_experts": 4}, "num_experts_per_tok = 8 is more than num_experts = 4"),
        ("qwen3_moe", {"num_local_experts": 64}, "num_experts = 128 and num_local_experts = 64 differ"),
        ("qwen3_moe", {"mlp_only_layers": [48]}, "mlp_only_layers = .* from 0 to 47"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ("qwen3_moe", {"decoder_sparse_step": 49}, "leave no layer with experts"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob = 1 must be true or false"),
        ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts = 1"),
        ("qwen3_moe", {"model_type": "mixtral", "num_local_experts": 8},
         "'mixtral', a mixture of experts, is not supported; jetrl runs qwen3_moe, qwen3_5_moe_text, deepseek_v2, "
         "deepseek_v3, glm4_moe_lite and, without experts, llama, qwen2"),
        ("qwen3_moe", {"num_experts": [8]}, r"num_experts = \[8\] must be a whole number"),
        ("qwen3_moe", {"model_type": None}, "model_type is missing; jetrl runs qwen3_moe"),
        ("qwen3", {"model_type": ["qwen3"]}, r"model_type = \['qwen3'\] is not supported"),
        ("qwen3_moe", {"model_type": ["x"]}, r"^model_type = \['x'\] is not supported; jetrl runs llama, "),
        ("qwen3_moe", {"num_experts": 10**9}, "num_experts = 1000000000 is more than any model has; .* up to 8192"),
        ("qwen3_moe", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 is more than any model has"),
        ("qwen3_moe", {"num_hidden_layers": 2000, "num_experts": 8000}, "num_experts = 8000 are 16000000 experts"),
        ("qwen3", {"max_position_embeddings": 10**400}, "max_position_embeddings = 1000.* is more than"),
        ("qwen3", {"head_dim": 10**6}, "head_dim = 1000000 is more than any model has; jetrl takes up to 4096"),
        ("qwen3", {"architectures": True}, "architectures = True is not supported"),
        ("qwen3", {"quantization_config": [8]}, "quant_method = 'unknown'"),
        ("qwen3", {"layer_types": 3}, "layer_types = 3 must be a list"),
        ("qwen3", {"layer_types": [8]}, "layer_types has 8, which is not supported"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps = 1000.* must be a number above 0"),
        ("qwen3_moe", {"model_type": "deepseek_v32", "num_experts": None, "n_routed_experts": 256},
         "'deepseek_v32', a mixture of experts"),
    ],
)
def test_other_models_are_refused_by_name(base: str, changes: dict[str, Any], named: str) -> None:
    hf.spec_from_hf(MODELS[base])
    with pytest.raises(UserError, match=named):
        hf.spec_from_hf(MODELS[base] | changes)


# ------------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 3000])
def test_save_then_load_gives_the_same_bits(family: str, max_shard_bytes: int, tmp_path: Path) -> None:
    spec = FAMILIES[family]
    state = random_state(spec)
    hf.save_model(tmp_path / "m", spec, state, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / "m" / hf.INDEX).is_file() == (max_shard_bytes == 3000)
    assert hf.spec_from_folder(tmp_path / "m") == spec
    loaded = hf.load_state(tmp_path / "m", spec)
    assert list(loaded) == list(state)
    for name, value in state.items():
        assert loaded[name].dtype == torch.bfloat16
        assert torch.equal(loaded[name].view(torch.int16), value.view(torch.int16)), name


def test_sharded_files_follow_the_hugging_face_layout(tmp_path: Path) -> None:
    state = random_state(TINY)
    hf.save_model(tmp_path / "m", TINY, state, max_shard_bytes=3000)
    index = json.loads((tmp_path / "m" / hf.INDEX).read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in state.values())
    for file in files:
        held = load_file(tmp_path / "m" / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == held.keys()
        assert len(held) == 1 or sum(t.numel() * 2 for t in held.values()) <= 3000


def test_all_files_have_the_mode_that_new_files_have(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("")
    hf.save_model(tmp_path / "m", TINY, random_state(TINY))
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "m").iterdir()}
    assert set(modes.values()) == {(tmp_path / "new").stat().st_mode}, modes


def test_fused_rows_are_q_k_v_and_gate_up_of_the_file(tmp_path: Path) -> None:
    state = random_state(TINY)
    hf.save_model(tmp_path / "m", TINY, state)
    file = load_file(tmp_path / "m" / hf.SINGLE)
    qkv, at = state["layers.1.attn.qkv.weight"], "model.layers.1."
    assert torch.equal(file[at + "self_attn.q_proj.weight"], qkv[:24])
    assert torch.equal(file[at + "self_attn.k_proj.weight"], qkv[24:36])
    assert torch.equal(file[at + "self_attn.v_proj.weight"], qkv[36:])
    assert torch.equal(file[at + "self_attn.v_proj.bias"], state["layers.1.attn.qkv.bias"][36:])
    assert torch.equal(file[at + "mlp.up_proj.weight"], state["layers.1.mlp.gate_up.weight"][36:])
    assert torch.equal(file[at + "post_attention_layernorm.weight"], state["layers.1.mlp.norm.weight"])


def test_fp32_is_kept_or_rounded_as_asked_and_float16_is_read_exactly(tmp_path: Path) -> None:
    state = random_state(TINY, torch.float32)
    hf.save_model(tmp_path / "f32", TINY, state, dtype=torch.float32)
    assert all(torch.equal(v, state[k]) for k, v in hf.load_state(tmp_path / "f32", TINY).items())
    assert hf.read_config(tmp_path / "f32")["torch_dtype"] == "float32"
    hf.save_model(tmp_path / "bf16", TINY, state)
    assert all(torch.equal(v, state[k].bfloat16()) for k, v in hf.load_state(tmp_path / "bf16", TINY).items())
    half = {name: t.half() for name, t in hf.to_hf(TINY, state).items()}
    save_file({k: v.clone() for k, v in half.items()}, tmp_path / "bf16" / hf.SINGLE)
    read = hf.to_hf(TINY, hf.load_state(tmp_path / "bf16", TINY))
    assert all(read[k].dtype == torch.float32 and torch.equal(read[k], v.float()) for k, v in half.items())


def test_names_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for family, spec in FAMILIES.items():
        (tmp_path / family).mkdir()
        (tmp_path / family / "config.json").write_text(json.dumps(hf.hf_config(spec)))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / family))
        model.save_pretrained(tmp_path / family)  # in files experts are apart, in memory one tensor
        theirs = {name: tuple(p.shape) for name, p in load_file(tmp_path / family / hf.SINGLE).items()}
        ours = {piece.name: piece.shape for pieces in hf.tensor_table(spec).values() for piece in pieces}
        assert ours == theirs


def test_state_that_does_not_fit_the_spec_is_refused(tmp_path: Path) -> None:
    state = random_state(TINY)
    with pytest.raises(ValueError, match="norm.weight"):
        hf.save_model(tmp_path / "m", TINY, {k: v for k, v in state.items() if k != "norm.weight"})
    with pytest.raises(ValueError, match="layers.0.mlp.down.weight has shape"):
        hf.save_model(tmp_path / "m", TINY, state | {"layers.0.mlp.down.weight": torch.zeros(36, 24)})
    assert not list(tmp_path.iterdir())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    hf.save_model(tmp_path / "m", TINY, random_state(TINY), max_shard_bytes=3000)
    return tmp_path / "m"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    hf.save_model(tmp_path / "s", TINY, random_state(TINY))
    return tmp_path / "s"


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    tensors = load_file(folder / hf.SINGLE)
    tensors.update({k: v for k, v in changes.items() if v is not None})
    save_file({k: v for k, v in tensors.items() if changes.get(k, v) is not None}, folder / hf.SINGLE)


def test_truncated_file_names_the_file(single: Path) -> None:
    data = (single / hf.SINGLE).read_bytes()
    for size in (len(data) - 100, 50, 0):
        (single / hf.SINGLE).write_bytes(data[:size])
        with pytest.raises(UserError, match=rf"model\.safetensors \({size} bytes\) is not a complete"):
            hf.load_state(single, TINY)


def test_index_naming_a_missing_shard(saved: Path) -> None:
    next(saved.glob("model-00002-*")).unlink()
    with pytest.raises(UserError, match="model-00002-of-.*does not have"):
        hf.load_state(saved, TINY)


def test_index_naming_a_tensor_that_the_shard_lacks(saved: Path) -> None:
    index = json.loads((saved / hf.INDEX).read_text())
    last = sorted(set(index["weight_map"].values()))[-1]
    index["weight_map"]["model.embed_tokens.weight"] = last
    (saved / hf.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"{last} lacks the tensor model.embed_tokens.weight"):
        hf.load_state(saved, TINY)
    (saved / hf.INDEX).write_text("{}")
    with pytest.raises(UserError, match="has no weight_map"):
        hf.load_state(saved, TINY)


def test_missing_unexpected_and_wrong_shapes(single: Path) -> None:
    rewrite(single, **{"model.norm.weight": torch.zeros(25)})
    with pytest.raises(UserError, match=r"model.norm.weight has shape \[25\].*\[24\]"):
        hf.load_state(single, TINY)
    rewrite(single, **{"model.norm.weight": None})
    with pytest.raises(UserError, match="lacks model.norm.weight"):
        hf.load_state(single, TINY)
    rewrite(single, **{"model.norm.weight": torch.zeros(24), "model.layers.2.mlp.up_proj.weight": torch.zeros(36, 24)})
    with pytest.raises(UserError, match="holds model.layers.2.mlp.up_proj.weight"):
        hf.load_state(single, TINY)


def test_old_rope_buffers_are_no_weights(single: Path) -> None:
    rewrite(single, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)})
    hf.load_state(single, TINY)


def test_fp8_weights_are_refused(single: Path) -> None:
    rewrite(single, **{"model.norm.weight": torch.zeros(24).to(torch.float8_e4m3fn)})
    with pytest.raises(UserError, match="model.norm.weight is stored as torch.float8_e4m3fn"):
        hf.load_state(single, TINY)


def test_tied_head_in_the_file_must_equal_the_embedding(single: Path) -> None:
    embed = load_file(single / hf.SINGLE)["model.embed_tokens.weight"]
    rewrite(single, **{"lm_head.weight": embed.clone()})
    assert torch.equal(hf.load_state(single, TINY)["embed.weight"], embed)
    rewrite(single, **{"lm_head.weight": embed + 1})
    with pytest.raises(UserError, match="tie_word_embeddings = true, but lm_head.weight differs"):
        hf.load_state(single, TINY)


def test_broken_folders(tmp_path: Path, single: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a folder"):
        hf.read_config(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no config.json"):
        hf.read_config(tmp_path / "empty")
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="neither model.safetensors nor.*pytorch_model.bin"):
        hf.load_state(tmp_path / "empty", TINY)
    edit_json(single / "config.json", attention_bias=True)
    with pytest.raises(UserError, match=r"s/config.json: attention_bias = True"):
        hf.spec_from_folder(single)
    (single / "config.json").write_text('{"model_type": ')
    with pytest.raises(UserError, match="config.json is not valid JSON"):
        hf.read_config(single)


# --------------------------------------------------------------------------------------------------------------- write


def test_a_failing_write_leaves_the_old_model_whole(tmp_path: Path) -> None:
    state = random_state(TINY)
    hf.save_model(tmp_path / "m", TINY, state)

    class Broken:
        eos_token_id = 1

        def save_pretrained(self, folder: str) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        hf.save_model(tmp_path / "m", TINY, {k: v * 0 for k, v in state.items()}, tokenizer=Broken())
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert torch.equal(hf.load_state(tmp_path / "m", TINY)["norm.weight"], state["norm.weight"])


def test_an_old_model_is_replaced_with_nothing_left_over(tmp_path: Path) -> None:
    state = random_state(TINY)
    hf.save_model(tmp_path / "m", TINY, state, max_shard_bytes=3000, generation_config={"temperature": 0.6})
    assert hf.read_generation_config(tmp_path / "m") == {"temperature": 0.6}
    hf.save_model(tmp_path / "m", TINY, {k: v + 1 for k, v in state.items()})
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert torch.equal(hf.load_state(tmp_path / "m", TINY)["norm.weight"], state["norm.weight"] + 1)


def test_folders_with_other_files_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.tex").write_text("...")
    with pytest.raises(UserError, match="thesis.tex"):
        hf.save_model(tmp_path / "m", TINY, random_state(TINY))
    assert (tmp_path / "m" / "thesis.tex").read_text() == "..."


# ----------------------------------------------------------------------------------------------------------- tokenizer


def small_tokenizer(words: int = 30) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<eos>": 0, "<pad>": 1} | {f"w{i}": i + 2 for i in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", chat_template=template
    )


def test_tokenizer_and_chat_template_travel_with_the_model(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    hf.save_model(tmp_path / "m", TINY, random_state(TINY), tokenizer=tokenizer)
    loaded = hf.load_tokenizer_from(tmp_path / "m")
    assert loaded("w3 w7").input_ids == tokenizer("w3 w7").input_ids == [5, 9]
    messages = [{"role": "user", "content": "w1 w2"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "w1 w2 "
    config = hf.read_config(tmp_path / "m")
    assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == (0, 1, None)
    # A name that transformers 4 knows too.
    written = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_broken_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        hf.load_tokenizer_from(tmp_path / "gpt2")
    with pytest.raises(UserError, match="has no tokenizer.json"):
        hf.load_tokenizer_from(tmp_path)
    hf.save_model(tmp_path / "m", TINY, random_state(TINY), tokenizer=small_tokenizer())
    (tmp_path / "m" / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(UserError, match="m: the tokenizer cannot be read"):
        hf.load_tokenizer_from(tmp_path / "m")


def test_vocabulary_must_cover_the_tokenizer() -> None:
    hf.check_vocab(small_tokenizer(38), TINY)  # ids 0 to 39
    with pytest.raises(UserError, match=r"largest token id is 40 \(41 tokens\).*has 40 rows"):
        hf.check_vocab(small_tokenizer(39), TINY)


def files(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_folders_of_other_kinds_are_told_with_the_way_out(tmp_path: Path) -> None:
    lora = files(tmp_path / "lora", "adapter_model.safetensors", "README.md")
    (lora / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    whole = r"holds a LoRA adapter of Qwen/Qwen3-0.6B, not a whole model. Merge it .*merge_and_unload\(\)"
    with pytest.raises(UserError, match=f"no config.json, .*{whole}"):
        hf.read_config(lora)
    save_file({"a": torch.zeros(1)}, lora / "adapter_model.safetensors")
    with pytest.raises(UserError, match=f"neither model.safetensors nor .*{whole}"):
        hf.load_state(lora, TINY)  # some tools put the base model's config.json next to an adapter
    bare = files(tmp_path / "bare", "adapter_model.bin")
    with pytest.raises(UserError, match="holds a LoRA adapter, not a whole model"):
        hf.read_config(bare)
    gguf = files(tmp_path / "gguf", "model-q4.gguf")
    for path in (gguf, gguf / "model-q4.gguf"):
        with pytest.raises(UserError, match=r"model-q4.gguf is a GGUF file.*gguf_file='model-q4.gguf'"):
            hf.read_config(path)
    old = files(tmp_path / "old", "pytorch_model.bin", "config.json", "training_args.bin")
    with pytest.raises(UserError, match=r"has pytorch_model.bin, weights in PyTorch's own format.*save_pretrained"):
        hf.load_state(old, TINY)
    one = files(tmp_path / "one", "model.safetensors")
    with pytest.raises(UserError, match=rf"It is a file: give its folder, {one}"):
        hf.read_config(one / "model.safetensors")
    above = tmp_path / "above"
    above.mkdir()
    files(above / "model", "config.json")
    with pytest.raises(UserError, match=rf"no config.json.* Did you mean {above / 'model'}\?"):
        hf.read_config(above)
    run = tmp_path / "run"
    for step in ("step_000002", "step_000010"):
        (run / "checkpoints" / step / "model").mkdir(parents=True)
    with pytest.raises(UserError, match=rf"no config.json.* It is a run. .*: {run}/checkpoints/step_000010/model\.$"):
        hf.read_config(run)
    with pytest.raises(UserError, match=r"model folder\.$"):
        hf.read_config(files(tmp_path / "empty"))
