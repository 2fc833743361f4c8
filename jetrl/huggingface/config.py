"""`config.json` of Hugging Face <-> `ModelSpec`. A key that would change the computation is refused by name.

Defaults of absent keys are those of transformers. Both layouts of the rotary keys are read: `rope_theta` with
`rope_scaling`, and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jetrl.errors import UserError
from jetrl.huggingface import deepseek, fp8, hybrid
from jetrl.huggingface import provenance as trained
from jetrl.spec import ExpertSpec, ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Family:
    """What `model_type` alone implies: transformers' class and default length, and the keys that are always written."""

    architecture: str
    max_position: int
    written: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None  # if the key is absent; None: hidden_size / num_attention_heads
    kv_heads_optional: bool = False  # an absent num_key_value_heads means num_attention_heads
    experts: bool = False
    hybrid: bool = False  # layers of Gated DeltaNet, and gated attention
    latent: bool = False  # latent attention, and DeepSeek's experts
    hidden_act: str = "silu"


_NO_BIAS, _NO_WINDOW = {"attention_bias": False}, {"use_sliding_window": False}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", 2048, _NO_BIAS | {"mlp_bias": False}, kv_heads_optional=True),
    "qwen2": Family("Qwen2ForCausalLM", 32768, _NO_WINDOW, qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", 32768, _NO_BIAS | _NO_WINDOW, qk_norm=True, head_dim=128),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", 32768, _NO_BIAS | _NO_WINDOW, qk_norm=True, experts=True),
    hybrid.TEXT: Family("Qwen3_5ForCausalLM", 32768, _NO_BIAS, qk_norm=True, head_dim=256, hybrid=True),
    hybrid.TEXT_MOE: Family(
        "Qwen3_5MoeForCausalLM", 32768, _NO_BIAS, qk_norm=True, head_dim=256, hybrid=True, experts=True
    ),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", 2048, _NO_BIAS, kv_heads_optional=True, experts=True, latent=True),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", 4096, _NO_BIAS, kv_heads_optional=True, experts=True, latent=True),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM", 202752, _NO_BIAS, kv_heads_optional=True, experts=True, latent=True
    ),
}

# Read into the spec.
_SPEC_KEYS = frozenset(
    "model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps max_position_embeddings tie_word_embeddings rope_theta rope_scaling "
    "rope_parameters layer_types".split()
)
# Likewise, in families with experts. transformers 5 writes num_experts as num_local_experts.
_EXPERT_KEYS = frozenset(
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step "
    "mlp_only_layers".split()
)
# Of a training loss, whose weight is a key of the recipe here: train.router_aux_loss_coef.
_EXPERT_HARMLESS = frozenset("router_aux_loss_coef output_router_logits".split())
# How other families name the number of experts; whoever has one is a mixture of experts.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# The only value with which jetrl computes the right model, and what another value would mean.
_REQUIRED_VALUES: dict[str, tuple[Any, str]] = {
    "attention_bias": (False, "a bias on the attention projections"),
    "mlp_bias": (False, "a bias on the MLP projections"),
    "attention_dropout": (0, "dropout in attention"),
    "hidden_dropout": (0, "dropout"),
    "pretraining_tp": (1, "projections summed in slices"),
    "use_sliding_window": (False, "sliding-window attention"),
    "partial_rotary_factor": (1, "rotary embedding of a part of the head"),
    "rope_interleaved": (False, "interleaved rotary embedding"),
    "scale_embeddings": (False, "scaled embeddings"),
    "is_decoder": (True, "a model that is not a decoder"),
    "add_cross_attention": (False, "cross attention"),
    "is_encoder_decoder": (False, "an encoder"),
}
# Without effect on the logits: bookkeeping, token ids, initialization, what transformers returns, sliding-window sizes
# of models that do not use them, and sampling defaults that old configs carry.
_HARMLESS_KEYS = frozenset(
    "_name_or_path transformers_version torch_dtype dtype use_cache initializer_range bos_token_id eos_token_id "
    "pad_token_id unk_token_id sep_token_id decoder_start_token_id sliding_window max_window_layers is_llama_config "
    "transformers.js_config attn_implementation _attn_implementation _attn_implementation_autoset output_attentions "
    "output_hidden_states return_dict use_return_dict torchscript chunk_size_feed_forward gradient_checkpointing "
    "id2label label2id problem_type finetuning_task task_specific_params do_sample temperature top_p top_k min_p "
    "typical_p repetition_penalty length_penalty max_length min_length num_beams num_return_sequences early_stopping "
    "max_new_tokens no_repeat_ngram_size num_beam_groups diversity_penalty encoder_no_repeat_ngram_size unsloth_fixed "
    "unsloth_version".split()
) | {trained.KEY}
# Far above all known models: what is more is a mistake, and names and shapes of so many tensors would fill the memory.
_MOST = {"num_hidden_layers": 2048, "num_experts": 8192, "num_local_experts": 8192, "head_dim": 4096}
_MOST_ELSE = 2**24
_MOST_MLPS = 2**17  # experts of all layers
_ROPE_KEYS = frozenset("rope_type type rope_theta partial_rotary_factor".split())
_LLAMA3_KEYS = frozenset("factor low_freq_factor high_freq_factor original_max_position_embeddings".split())


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a `config.json`; UserError for any key that would make it another model."""
    config = hybrid.text_config(config)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        which, known = _supported(config)
        what = "model_type is missing" if family is None else f"model_type = {family!r}{which} is not supported"
        raise UserError(f"{what}; jetrl runs {known} models.")
    _refuse_other_models(config, family)
    facts = FAMILIES[family]
    num_heads = _size(config, "num_attention_heads")
    hidden_size = _size(config, "hidden_size")
    num_kv_heads = _size(config, "num_key_value_heads", default=num_heads if facts.kv_heads_optional else None)
    if num_heads % num_kv_heads:
        raise UserError(f"num_attention_heads = {num_heads} is not a multiple of num_key_value_heads = {num_kv_heads}.")
    max_position = _size(config, "max_position_embeddings", default=facts.max_position)
    if facts.latent:
        if num_kv_heads != num_heads:
            raise UserError(f"num_key_value_heads = {num_kv_heads} with num_attention_heads = {num_heads}: latent "
                            "attention makes keys and values for every head, so both must be equal.")
    read = deepseek.Read(_size, _positive, _flag)
    latent = deepseek.latent_of(config, read) if facts.latent else None
    experts = None
    if facts.experts and latent is None:
        experts = _gated_experts(config) if facts.hybrid else _experts(config)
    head_dim = _head_dim(config, family, hidden_size, num_heads) if latent is None else latent.rope
    return ModelSpec(
        family=family,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        # no layer of a hybrid mixture is dense
        intermediate_size=_size(config, "intermediate_size", experts.gated_shared if experts is not None else None),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, facts),
        max_position=max_position,
        tie_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=facts.qkv_bias,
        qk_norm=facts.qk_norm,
        experts=experts if latent is None else deepseek.experts_of(config, family, read),
        latent=latent,
        **(_hybrid(config, head_dim) if facts.hybrid else {}),
    )


def _hybrid(config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """What the spec of a hybrid model has beyond others; absent keys have the defaults of transformers."""
    defaults = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
                "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
    sizes = {key: _size(config, key, default) for key, default in defaults.items()}
    kinds = hybrid.layer_types(
        config, _size(config, "num_hidden_layers"), _size(config, "full_attention_interval", 4)
    )
    rope = config.get("rope_parameters") or {}
    factor = _positive({**config, **rope}, "partial_rotary_factor", 0.25)
    return {
        "delta": hybrid.delta_of(sizes, kinds), "rotary_dim": hybrid.rotary_dim(factor, head_dim),
        "attention_gate": True, "norm_offset": True,
    }


def _supported(config: Mapping[str, Any]) -> tuple[str, str]:
    """For the refusal of a family: what it is, if that can be said, and what takes its place."""
    if unlike := hybrid.NOT_YET.get(str(config.get("model_type"))):
        return unlike, ", ".join(FAMILIES)
    if isinstance(config.get("model_type"), str | None) and any(config.get(key) for key in _EXPERT_COUNTS):
        return ", a mixture of experts,", ", ".join(name for name, facts in FAMILIES.items() if facts.experts) + \
            " and, without experts, " + ", ".join(name for name, facts in FAMILIES.items() if not facts.experts)
    return "", ", ".join(FAMILIES)


def _gated_experts(config: Mapping[str, Any]) -> ExpertSpec:
    """Those of a hybrid, with a shared one; absent keys have the defaults of transformers' Qwen3_5MoeTextConfig."""
    defaults = {"num_experts": 256, "moe_intermediate_size": 512}
    given = {key: value for key, value in config.items() if value is not None}
    if "num_local_experts" in given:
        del defaults["num_experts"]
    plain = _experts({**defaults, **given, "norm_topk_prob": True})
    return replace(plain, gated_shared=_size(config, "shared_expert_intermediate_size", 512))


def _experts(config: Mapping[str, Any]) -> ExpertSpec:
    """The experts of a config.json; absent keys have the defaults of transformers' Qwen3MoeConfig."""
    counts = {_size(config, key) for key in ("num_experts", "num_local_experts") if config.get(key) is not None}
    if len(counts) > 1:
        raise UserError(f"num_experts = {config['num_experts']} and num_local_experts = {config['num_local_experts']} "
                        "differ; both mean the number of experts. Keep the one that the model was trained with.")
    count = _size({"num_experts": counts.pop() if counts else None}, "num_experts", 128)
    per_token = _size(config, "num_experts_per_tok", 8)
    if per_token > count:
        raise UserError(f"num_experts_per_tok = {per_token} is more than num_experts = {count}; a token runs through "
                        "different experts, so it can have at most all of them.")
    layers, dense = _size(config, "num_hidden_layers"), config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(i) is int and 0 <= i < layers for i in dense):
        raise UserError(f"mlp_only_layers = {dense!r} must be a list of layers from 0 to {layers - 1}.")
    if layers * count > _MOST_MLPS:
        raise UserError(f"num_hidden_layers = {layers} with num_experts = {count} are {layers * count} experts; jetrl "
                        f"takes up to {_MOST_MLPS}.")
    experts = ExpertSpec(
        count=count, per_token=per_token, intermediate_size=_size(config, "moe_intermediate_size", 768),
        normalized=_flag(config, "norm_topk_prob"), step=_size(config, "decoder_sparse_step", 1),
        dense_layers=tuple(sorted(set(dense))),
    )
    if not any(experts.in_layer(i) for i in range(layers)):
        raise UserError(f"decoder_sparse_step = {experts.step} and mlp_only_layers = {list(dense)} leave no layer with "
                        "experts. Use model_type = 'qwen3' for a dense model.")
    return experts


def hf_config(
    spec: ModelSpec, base: Mapping[str, Any] | None = None, dtype: str = "bfloat16", tokenizer: Any = None
) -> dict[str, Any]:
    """The `config.json` of a spec: `spec_from_hf(hf_config(spec)) == spec`. Further keys of `base` stay.

    Rotary keys are written in both layouts, so that programs on transformers 4 and 5 read the same model.
    """
    of_the_base = ("quantization_config", trained.KEY)  # about weights other than those of this config
    base = None if base is None else hybrid.text_config(base)
    config: dict[str, Any] = {key: value for key, value in (base or {}).items() if key not in of_the_base}
    if base is not None and spec_from_hf(config) != spec:
        raise ValueError(f"base_config describes another model: {spec_from_hf(config)}, not {spec}")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if config.get(key) is None:
            config[key] = getattr(tokenizer, key, None)
    config.update(
        architectures=[FAMILIES[spec.family].architecture],
        model_type=spec.family,
        torch_dtype=dtype,
        dtype=dtype,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden_act=FAMILIES[spec.family].hidden_act,
        rms_norm_eps=spec.rms_norm_eps,
        max_position_embeddings=spec.max_position,
        tie_word_embeddings=spec.tie_embeddings,
        rope_theta=spec.rope.theta,
        rope_scaling=_rope_scaling(spec.rope),
        rope_parameters={"rope_theta": spec.rope.theta, **(_rope_scaling(spec.rope) or {"rope_type": "default"})},
    )
    if spec.latent is not None:
        config.update(deepseek.written(spec))
    elif (e := spec.experts) is not None:
        config.update(
            num_experts=e.count, num_experts_per_tok=e.per_token, moe_intermediate_size=e.intermediate_size,
            norm_topk_prob=e.normalized, decoder_sparse_step=e.step, mlp_only_layers=list(e.dense_layers),
        )
    if spec.delta is not None:
        if spec.experts is not None:  # keys that transformers' config of this family does not have
            for key in ("intermediate_size", *hybrid.REQUIRED_OF_EXPERTS):
                del config[key]
        config.update(hybrid.written(spec))
        config.pop("full_attention_interval", None)  # layer_types says it
        config["rope_parameters"]["partial_rotary_factor"] = config["partial_rotary_factor"]
    return config | dict(FAMILIES[spec.family].written)


def _refuse_other_models(config: Mapping[str, Any], family: str) -> None:
    facts = FAMILIES[family]
    architectures = config.get("architectures") or [facts.architecture]
    if architectures != [facts.architecture]:
        raise UserError(f"architectures = {architectures} is not supported; a {family} model for jetrl has "
                        f"[{facts.architecture!r}].")
    if config.get("quantization_config"):
        fp8.check(config["quantization_config"])
    required = {"hidden_act": (facts.hidden_act, "another activation function")} | _REQUIRED_VALUES
    if facts.hybrid:
        required = {key: of for key, of in required.items() if key not in hybrid.KEYS} | hybrid.REQUIRED
        required |= hybrid.REQUIRED_OF_EXPERTS if facts.experts else {}
    for key, (value, meaning) in required.items():
        if config.get(key) is not None and config[key] != value:
            given = config[key]
            raise UserError(f"{key} = {given!r} asks for {meaning}, which is not supported; use {key} = {value!r}.")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list | tuple):
        raise UserError(f"layer_types = {layer_types!r} must be a list with a type for each layer.")
    other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if other and not facts.hybrid:
        raise UserError(f"layer_types has {', '.join(other)}, which is not supported; only full_attention is.")
    if layer_types and len(layer_types) != config.get("num_hidden_layers"):
        raise UserError(f"layer_types has {len(layer_types)} entries for num_hidden_layers = "
                        f"{config.get('num_hidden_layers')}.")
    known = _SPEC_KEYS | required.keys() | _HARMLESS_KEYS | {"quantization_config"}
    if facts.latent:
        known |= deepseek.SPEC_KEYS | deepseek.HARMLESS
    elif facts.experts:
        known |= _EXPERT_KEYS | _EXPERT_HARMLESS
    if facts.hybrid:
        known |= hybrid.KEYS | hybrid.HARMLESS | (hybrid.EXPERT_KEYS if facts.experts else frozenset())
    # A key that is off (null, false, zero, empty) asks for nothing.
    if unknown := sorted(key for key, value in config.items() if key not in known and value):
        close = difflib.get_close_matches(unknown[0], known - _HARMLESS_KEYS, 1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise UserError(
            f"{unknown[0]} = {config[unknown[0]]!r} is not known to jetrl for a {family} model and may change what it "
            f"computes (unknown keys: {', '.join(unknown)}). {hint}If the model does not need it, remove it (from "
            "config.json, or model.arch)."
        )


def _rope(config: Mapping[str, Any], facts: Family) -> RopeSpec:
    """Rotary parameters from either layout; if both are given, they must agree."""
    read = [_rope_of(config, key, facts) for key in ("rope_scaling", "rope_parameters") if config.get(key)]
    if not read:
        return RopeSpec(theta=_positive(config, "rope_theta", 10000.0))
    if read[0] != read[-1]:
        raise UserError(
            f"rope_scaling = {config['rope_scaling']} (rope_theta = {config.get('rope_theta')}) and rope_parameters = "
            f"{config['rope_parameters']} differ. Keep the one that the model was trained with."
        )
    return read[0]


def _rope_of(config: Mapping[str, Any], key: str, facts: Family) -> RopeSpec:
    rope = config[key]
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(f"{key} = {rope!r} is not supported; give one set of rotary parameters for all layers.")
    theta = _positive(rope if rope.get("rope_theta") is not None else config, "rope_theta", 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kinds = ("default",) if facts.hybrid else ("default", "yarn") if facts.latent else ("default", "llama3")
    if kind not in kinds:
        raise UserError(
            f"{key}: rope type {kind!r} is not supported; {' and '.join(map(repr, kinds))} "
            f"{'are' if len(kinds) > 1 else 'is'}."
        )
    if not facts.hybrid and rope.get("partial_rotary_factor") not in (None, 1):
        raise UserError(f"{key}: partial_rotary_factor = {rope['partial_rotary_factor']} is not supported; 1.0 is.")
    allowed = _ROPE_KEYS | {"llama3": _LLAMA3_KEYS, "yarn": deepseek.YARN_KEYS}.get(kind, frozenset())
    allowed |= hybrid.ROPE_KEYS if facts.hybrid else frozenset()
    if unknown := sorted(name for name, value in rope.items() if name not in allowed and value is not None):
        raise UserError(f"{key}: {unknown[0]} = {rope[unknown[0]]!r} is not supported with rope type {kind!r}.")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "yarn":
        return RopeSpec(theta=theta, yarn=deepseek.yarn_of(rope, deepseek.Read(_size, _positive, _flag)))
    if missing := sorted(name for name in _LLAMA3_KEYS if rope.get(name) is None):
        raise UserError(f"{key}: rope type 'llama3' needs {', '.join(missing)}.")
    low, high = _positive(rope, "low_freq_factor", None), _positive(rope, "high_freq_factor", None)
    if low >= high:
        raise UserError(f"{key}: low_freq_factor = {low} must be below high_freq_factor = {high}.")
    return RopeSpec(
        theta=theta,
        factor=_positive(rope, "factor", None),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_size(rope, "original_max_position_embeddings"),
    )


def _rope_scaling(rope: RopeSpec) -> dict[str, Any] | None:
    if rope.yarn is not None:
        return deepseek.yarn_keys(rope.yarn)
    if rope.factor is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }


def _head_dim(config: Mapping[str, Any], family: str, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None:
        if (default := FAMILIES[family].head_dim) is not None:
            return default
        if hidden_size % num_heads:
            raise UserError(f"give head_dim: hidden_size = {hidden_size} is not a multiple of {num_heads} heads.")
    head_dim = _size(config, "head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise UserError(f"head_dim = {head_dim} is odd; rotary embedding rotates pairs, so it must be even.")
    return head_dim


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key) if config.get(key) is not None else default
    if value is None:
        raise UserError(f"{key} is missing; a model config needs it.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{key} = {value!r} must be a whole number of at least 1.")
    if value > (most := _MOST.get(key, _MOST_ELSE)):
        raise UserError(f"{key} = {value} is more than any model has; jetrl takes up to {most}.")
    return value


def _positive(config: Mapping[str, Any], key: str, default: float | None) -> float:
    value = config.get(key) if config.get(key) is not None else default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise UserError(f"{key} = {value!r} must be a number above 0.")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise UserError(f"{key} = {value!r} must be true or false.")
    return bool(value)
