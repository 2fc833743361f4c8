"""`config.json` of DeepSeek's architecture (`huggingface.deepseek`): published files, round trips, what is refused."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_run

from jetrl.api import export_checkpoint
from jetrl.errors import Notice, UserError
from jetrl.huggingface import carried, deepseek
from jetrl.huggingface import read as hf
from jetrl.huggingface.export import export
from jetrl.huggingface.read import hf_config, spec_from_hf
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.ops import quantize_weight, weight_values
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import build_recipe
from jetrl.spec import SHAPES

# As these keys stand in the models' own files.
MOONLIGHT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "ep_size": 1,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11264,
    "kv_lora_rank": 512, "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0,
    "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid",
    "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128,
    "vocab_size": 163840,
}
V2_LITE = {key: value for key, value in MOONLIGHT.items() if key not in ("num_nextn_predict_layers", "auto_map")} | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "intermediate_size": 10944,
    "max_position_embeddings": 163840, "norm_topk_prob": False, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_method": "greedy", "vocab_size": 102400,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}


def test_published_configs() -> None:
    assert spec_from_hf(MOONLIGHT) == SHAPES["moonlight-16b-a3b"]
    assert spec_from_hf(V2_LITE) == SHAPES["deepseek-v2-lite"]
    assert SHAPES["moonlight-16b-a3b"].latent.scale(SHAPES["moonlight-16b-a3b"].rope) == 192**-0.5
    v2 = SHAPES["deepseek-v2-lite"]  # 0.1 * 0.707 * ln 40 + 1 = 1.2608
    assert v2.latent.scale(v2.rope) == pytest.approx(192**-0.5 * 1.26080**2, rel=1e-5)
    assert v2.rope.yarn.of_tables == 1.0


@pytest.mark.parametrize("name", [name for name, spec in SHAPES.items() if spec.latent is not None])
def test_a_config_and_back(name: str) -> None:
    config = hf_config(SHAPES[name])
    assert spec_from_hf(config) == SHAPES[name]
    assert config.keys() >= deepseek.written(SHAPES[name]).keys()


@pytest.mark.parametrize(("change", "message"), [
    ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported for a deepseek_v3 model; 'sigmoid' is"),
    ({"topk_method": "group_limited_greedy"}, "topk_method = 'group_limited_greedy' is not supported"),
    ({"n_group": 7}, "n_group = 7 does not divide the 64 experts"),
    ({"n_group": 64}, "n_group = 64 leaves one expert in a group"),
    ({"n_group": 8, "topk_group": 9}, "topk_group = 9 is more than n_group = 8"),
    ({"n_group": 16, "topk_group": 1}, "num_experts_per_tok = 6 is more than the 4 experts"),
    ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported; 1 is"),
    ({"first_k_dense_replace": 28}, "first_k_dense_replace = 28 must be a number of layers from 0 to 27"),
    ({"first_k_dense_replace": 27}, "has experts in some layer; this config.json leaves none"),
    ({"n_routed_experts": None}, "this config.json leaves none"),
    ({"num_local_experts": 32}, "n_routed_experts = 64 and num_local_experts = 32 differ"),
    ({"rope_interleave": False}, "rope_interleave = False is not supported"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63 is odd"),
    ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
    ({"num_key_value_heads": 4}, "latent attention makes keys and values for every head"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear' is not supported; 'default' and 'yarn'"),
    ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings is missing"),
    ({"index_topk": 2048}, "index_topk = 2048 is not known to jetrl for a deepseek_v3 model"),
    ({"n_routed_experts": 8192, "num_hidden_layers": 64}, "are 524288 experts"),
])  # fmt: skip
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        spec_from_hf(MOONLIGHT | change)
    assert message in str(caught.value)


def test_softmax_scores_are_not_divided_by_their_sum() -> None:
    with pytest.raises(UserError, match="norm_topk_prob = true with softmax scores is not supported"):
        spec_from_hf(V2_LITE | {"norm_topk_prob": True})
    kinds = hf_config(SHAPES["glm-4.7-flash"]) | {"mlp_layer_types": ["dense", "other"]}
    with pytest.raises(UserError, match="must be 'dense' or 'sparse' for each of the 47 layers"):
        spec_from_hf(kinds)


MLA = SHAPES["tiny-mla"]
MTP = {
    "enorm.weight": torch.full((192,), 0.5), "eh_proj.weight": torch.randn(192, 384),
    "mlp.gate.e_score_correction_bias": torch.tensor([6.817]), "shared_head.norm.weight": torch.randn(192).bfloat16(),
}


def with_mtp(folder: Path, fp8: bool = False) -> dict[str, torch.Tensor]:
    """The tiny model with a layer for drafts behind its four; what is stored of that layer."""
    hf.save_model(folder, MLA, dict(Transformer(MLA, build_recipe("bf16", 4)).random_values(0)))
    more = {f"model.layers.4.{name}": value for name, value in MTP.items()}
    if fp8:
        q = quantize_weight(MTP["eh_proj.weight"])
        more |= {"model.layers.4.eh_proj.weight": q.codes, "model.layers.4.eh_proj.weight_scale_inv": q.scale}
    save_file(load_file(folder / hf.SINGLE) | more, folder / hf.SINGLE)
    config = hf.read_config(folder) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return more


def test_layers_for_drafts_are_no_part_of_the_policy_and_told(tmp_path: Path) -> None:
    with_mtp(tmp_path / "m")
    assert hf.spec_from_folder(tmp_path / "m") == MLA
    with pytest.warns(Notice, match="4 tensors are of layers that draft further tokens .* carries them through as"):
        assert not any("layers.4" in name for name in hf.load_state(tmp_path / "m", MLA))
    tensors = load_file(tmp_path / "m" / hf.SINGLE)
    save_file(tensors | {"model.layers.3.other": torch.zeros(2)}, tmp_path / "m" / hf.SINGLE)
    with pytest.warns(Notice), pytest.raises(UserError, match=r"holds .*model\.layers\.3\.other"):
        hf.load_state(tmp_path / "m", MLA)


@pytest.mark.filterwarnings("ignore:.*draft further tokens")
def test_an_export_carries_them_through(tmp_path: Path) -> None:
    """From the folder itself, and from the base of a trained model; to their last bits, in their own types."""
    more, trained = with_mtp(tmp_path / "base"), dict(Transformer(MLA, build_recipe("bf16", 4)).random_values(1))
    hf.save_model(tmp_path / "trained", MLA, trained)
    for source, base in (("base", None), ("trained", tmp_path / "base")):
        out = export(tmp_path / source, tmp_path / f"of_{source}", fp8=False, base=base)
        found = load_file(out / hf.SINGLE)
        for name, value in more.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        assert hf.read_config(out)["num_nextn_predict_layers"] == 1 and carried.names_of(out) == sorted(more)
        assert hf.load_state(out, MLA).keys() == trained.keys()
    assert torch.equal(found["model.norm.weight"], trained["norm.weight"].bfloat16())
    alone = export(tmp_path / "trained", tmp_path / "alone", fp8=False)
    assert hf.read_config(alone)["num_nextn_predict_layers"] == 0 and not carried.is_whole(alone)
    assert carried.may_hold_more(tmp_path / "base") and not carried.may_hold_more(alone)


def test_what_is_carried_is_named_beside_fp8(tmp_path: Path) -> None:
    more, said = with_mtp(tmp_path / "base"), {"modules_to_not_convert": ["lm_head"]}
    given = {"quantization_config": said, "num_nextn_predict_layers": 0}
    config, tensors = carried.completed((None, tmp_path / "base"), given, {})
    assert tensors.keys() == more.keys() and config["num_nextn_predict_layers"] == 1
    kept = config["quantization_config"]["modules_to_not_convert"]
    assert kept == config["quantization_config"]["ignored_layers"] == ["lm_head", "model.layers.4.eh_proj"]
    assert carried.completed((None,), given, {}) == (given, {})


@pytest.mark.filterwarnings("ignore:.*draft further tokens")
def test_fp8_layers_for_drafts_are_bf16_beside_bf16(tmp_path: Path) -> None:
    more = with_mtp(tmp_path / "base", fp8=True)
    found = load_file(export(tmp_path / "base", tmp_path / "out", fp8=False) / hf.SINGLE)
    name = "model.layers.4.eh_proj.weight"
    q = QTensor(more[name], more[f"{name}_scale_inv"], "128x128", (192,), (384,))
    assert torch.equal(found[name], weight_values(q, dtype=torch.float32).bfloat16())
    assert f"{name}_scale_inv" not in found
    _, beside = carried.completed((tmp_path / "base",), {"quantization_config": {"modules_to_not_convert": []}}, {})
    assert beside[name][0].dtype == torch.float8_e4m3fn and f"{name}_scale_inv" in beside


@pytest.mark.filterwarnings("ignore:.*draft further tokens")
def test_a_run_is_exported_with_those_of_its_base(tmp_path: Path) -> None:
    more, said = with_mtp(tmp_path / "base"), list[str]()
    run = tiny_run(tmp_path, {
        "model.arch": None, "model.path": str(tmp_path / "base"), "precision": "bf16", "train.steps": 1,
        "eval.eval_interval": 0, "checkpoint.save_interval": 1,
    })
    out = export_checkpoint(run, tmp_path / "out", fp8=False, say=said.append)
    assert carried.names_of(out) == sorted(more) and not carried.names_of(run / "checkpoints/step_000001/model")
    assert any(text.startswith("Carried through as they were: 4 tensors that jetrl does not train") for text in said)
    shutil.rmtree(tmp_path / "base")
    export_checkpoint(run, tmp_path / "alone", fp8=False, say=said.append)
    assert not carried.names_of(tmp_path / "alone") and said[-1].startswith("The trained model alone, without the part")


def test_a_tokenizer_that_is_code_is_refused_with_the_way_to_convert_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Moonlight's is stored; converted as the message says, it has the ids of the original."""
    tiktoken = pytest.importorskip("tiktoken")
    from transformers.integrations.tiktoken import convert_tiktoken_to_fast

    said = {
        "auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}, "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer", "chat_template": "{{ messages[0].content }}",
    }
    for folder in ("m", "converted"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "m" / "tiktoken.model").write_text("")
    with pytest.raises(UserError, match="its tokenizer is the class tokenization_moonshot.TikTokenTokenizer.* runs no"):
        hf.load_tokenizer_from(tmp_path / "m")
    ranks = {bytes([i]): i for i in range(256)} | {b"12": 256, b"123": 257, b" a": 258, b" ab": 259}
    encoding = tiktoken.Encoding(
        "small", pat_str=r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+", mergeable_ranks=ranks,
        special_tokens={"[BOS]": 260, "[EOS]": 261},
    )

    def dump(ranks: dict[bytes, int], path: str) -> None:  # tiktoken's own wants the package blobfile
        lines = (base64.b64encode(token) + b" " + str(rank).encode() + b"\n" for token, rank in ranks.items())
        Path(path).write_bytes(b"".join(lines))

    monkeypatch.setattr("tiktoken.load.dump_tiktoken_bpe", dump)
    convert_tiktoken_to_fast(encoding, str(tmp_path / "converted"))
    ours = hf.load_tokenizer_from(tmp_path / "converted")
    for text in ("1234 ab", "abc 12 é", "a+b = 123"):
        assert ours.encode(text, add_special_tokens=False) == encoding.encode(text)
    assert ours.convert_tokens_to_ids("[EOS]") == 261 == ours.eos_token_id
    assert ours.chat_template == said["chat_template"]
