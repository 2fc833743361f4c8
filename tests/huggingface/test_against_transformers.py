"""Our model against transformers on one folder: FP32 to rounding, BF16 within twice transformers' own BF16 error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.huggingface import read as hf
from jetrl.kernels.logprob.ops import log_softmax
from jetrl.model.block import Routes
from jetrl.model.sharding import fill
from jetrl.model.transformer import Transformer
from jetrl.precision.recipe import Recipe
from jetrl.types import ForwardBatch, VarlenPlan

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    # Wide enough that norms, biases and attention matter to the logits.
    "initializer_range": 0.08,
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MOE = SIZES | {
    "model_type": "qwen3_moe", "head_dim": 48, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 80,
    "norm_topk_prob": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3": SIZES | {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "qwen2": SIZES | {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3": SIZES | {"model_type": "qwen3", "head_dim": 48, "num_key_value_heads": 1},
    # Like SmolLM2: tied, odd numbers of heads, no size a multiple of 128.
    "smollm2": SIZES
    | {"model_type": "llama", "hidden_size": 72, "intermediate_size": 200, "num_attention_heads": 9,
       "num_key_value_heads": 3, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "qwen3_moe": MOE | {"norm_topk_prob": True},
    # Three layers of Gated DeltaNet with two value heads for a key head, and attention with 8 of 32 places rotated.
    "qwen3_5_text": SIZES
    | {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2,
       "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 32},
    # Experts in both layers, beside a shared one with its gate. Of four layers, transformers' own FP32
    # would be off by 8e-5.
    "qwen3_5_moe_text": SIZES
    | {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
       "head_dim": 32, "linear_num_key_heads": 2,
       "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 32, "num_experts": 8,
       "num_experts_per_tok": 3, "moe_intermediate_size": 80, "shared_expert_intermediate_size": 96},
    # Layers 1 and 3 have experts by the step, layer 3 is an MLP by its mention.
    "qwen3_moe, mixed": MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
}
DEEPSEEK = SIZES | {
    "num_key_value_heads": 4, "kv_lora_rank": 72, "q_lora_rank": None,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 80, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446,
}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "mscale": 0.707, "mscale_all_dim": 0.8,
}
CONFIGS |= {
    "moonlight": DEEPSEEK | {"model_type": "deepseek_v3", "rms_norm_eps": 1e-5},
    # A latent for queries, half of the groups of experts, YaRN, more than one dense layer.
    "deepseek_v3": DEEPSEEK
    | {"model_type": "deepseek_v3", "q_lora_rank": 48, "n_group": 4, "topk_group": 2, "rope_parameters": YARN,
       "num_hidden_layers": 4, "first_k_dense_replace": 2, "n_shared_experts": 1},
    "deepseek_v2": DEEPSEEK
    | {"model_type": "deepseek_v2", "rope_parameters": YARN, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "glm4_moe_lite": DEEPSEEK
    | {"model_type": "glm4_moe_lite", "q_lora_rank": 40, "num_hidden_layers": 3, "v_head_dim": 40,
       "n_shared_experts": 1,
       "mlp_layer_types": ["dense", "sparse", "sparse"]},
}
LENGTHS = (70, 1, 33)


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that transformers saved in BF16, so that FP32 and BF16 start from the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(CONFIGS[request.param])
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:  # norms of 1 and biases of 0 would hide what they do
                p.add_(torch.randn_like(p) * (0.5 if name.endswith("bias") else 0.2))
        for name, p in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                p.add_(torch.randn_like(p) * 0.1)
    path = tmp_path_factory.mktemp(request.param) / "model"
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator) for n in LENGTHS]


@torch.no_grad()
def theirs(folder: Path, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-probs of the whole vocabulary, sequence by sequence, and the sets of chosen experts [T, layers, k]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for name, bias in model.named_buffers():  # from_pretrained rounds it as the weights
        if dtype == torch.bfloat16 and name.endswith("e_score_correction_bias"):
            bias.data = hf.load_state(folder, hf.spec_from_folder(folder))[
                name.replace("model.layers.", "layers.").replace("gate.e_score_correction_bias", "router_bias.weight")
            ].float()
    rows, experts, seen = [], [], list[Tensor]()
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter") or type(module).__name__.endswith("TopkRouter"):
            module.register_forward_hook(lambda _, __, out: seen.append(out[2].sort(-1).values))
    for tokens in sequences():
        out = model(tokens[None])
        rows.append(out.logits[0].float().log_softmax(-1))
        experts.append(torch.stack(seen, 1) if seen else torch.zeros(len(tokens), 1, 1, dtype=torch.int64))
        seen.clear()
    return torch.cat(rows), torch.cat(experts)


@torch.no_grad()
def ours(folder: Path, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same from our model, all sequences in one packed batch."""
    spec = hf.spec_from_folder(folder)
    model = Transformer(spec, Recipe(name="bf16", num_layers=spec.num_layers), dtype=dtype)
    fill(model, ((name, value.float()) for name, value in hf.parameters_of(folder, spec)))
    model.publish()
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    batch = ForwardBatch(torch.cat(sequences()), positions, VarlenPlan(ends, LENGTHS), "train")
    routes = Routes()
    rows = log_softmax(model.logits(model(batch, routes=routes)))
    chosen = [experts.sort(-1).values for experts in routes.chosen.values()]
    return rows, torch.stack(chosen, 1) if chosen else torch.zeros(len(rows), 1, 1, dtype=torch.int64)


def test_fp32_agrees_to_rounding(folder: Path) -> None:
    (rows, experts), (want, wanted) = ours(folder, torch.float32), theirs(folder, torch.float32)
    assert (rows - want).abs().max() <= 1e-4, (rows - want).abs().max()
    assert torch.equal(experts, wanted)


def test_bf16_error_is_at_most_twice_that_of_transformers(folder: Path) -> None:
    exact, experts = theirs(folder, torch.float32)
    rows, chosen = theirs(folder, torch.bfloat16)
    their_error, they_differ = (rows - exact).abs(), (chosen != experts).flatten(1).any(-1)
    rows, chosen = ours(folder, torch.bfloat16)
    our_error, we_differ = (rows - exact).abs(), (chosen != experts).flatten(1).any(-1)
    assert they_differ.float().mean() < 0.05 and we_differ.sum() <= 2 * they_differ.sum()
    assert their_error.mean() > 1e-3, "the models are too smooth to show an error"
    assert our_error.mean() <= 2 * their_error.mean(), (our_error.mean(), their_error.mean())
    same = ~(they_differ | we_differ)  # a token that BF16 sends to another expert is off by as much as experts differ
    ours_max, theirs_max = our_error[same].max(), their_error[same].max()
    assert ours_max <= 2 * theirs_max, (ours_max, theirs_max)


def test_saved_again_it_is_the_same_model_to_transformers(folder: Path, tmp_path: Path) -> None:
    spec = hf.spec_from_folder(folder)
    hf.save_model(tmp_path / "m", spec, hf.load_state(folder, spec), base_config=hf.read_config(folder))
    assert torch.equal(theirs(tmp_path / "m", torch.float32)[0], theirs(folder, torch.float32)[0])
