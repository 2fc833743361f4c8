"""Qwen3.5's keys of `config.json`: Gated DeltaNet, gated attention, and the text model within a model with vision.

Published folders are nested: `model_type = "qwen3_5"` with a `text_config`, and tensors of vision (`model.visual.*`)
and of a head for several tokens (`mtp.*`), which jetrl neither runs nor trains. What it writes in a run is the text
model alone, `qwen3_5_text`, which transformers reads too; an export takes the rest from the folder of the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jetrl.errors import UserError
from jetrl.phrases import some
from jetrl.spec import DeltaSpec, ModelSpec

TEXT, TEXT_MOE = "qwen3_5_text", "qwen3_5_moe_text"
NESTED = {"qwen3_5": TEXT, "qwen3_5_moe": TEXT_MOE}  # with vision -> the text model within
TEXT_PREFIX, CARRIED = "model.language_model.", ("model.visual.", "mtp.")
LINEAR, FULL = "linear_attention", "full_attention"
KEYS = frozenset(
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim "
    "full_attention_interval partial_rotary_factor".split()
)
EXPERT_KEYS = frozenset("shared_expert_intermediate_size".split())
HARMLESS = frozenset("mtp_num_hidden_layers mtp_use_dedicated_embeddings".split())
REQUIRED: dict[str, tuple[Any, str]] = {
    "attn_output_gate": (True, "attention without an output gate"),
    "mamba_ssm_dtype": ("float32", "a state in another type"),
}
REQUIRED_OF_EXPERTS: dict[str, tuple[Any, str]] = {
    "norm_topk_prob": (True, "weights of experts that are not divided by their sum"),
    "decoder_sparse_step": (1, "layers without experts"),
    "mlp_only_layers": ([], "layers without experts"),
}
ROPE_KEYS = frozenset(("mrope_section", "mrope_interleaved"))  # for text, the same as plain RoPE
NOT_YET = {  # what families that look alike have and jetrl lacks
    "qwen3_next": ", a hybrid whose projections are interleaved by key head,",
    "qwen4_exp": ", with sparse attention and hyper-connections,",
}


class Within(NamedTuple):
    """A matrix in a tensor of all experts: the tensor, the expert, the first row, and the tensor's experts and rows.
    """

    name: str
    expert: int
    first: int
    whole: tuple[int, int]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model: `text_config` of a nested one, else `config` itself."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in NESTED:
        return config
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise UserError(f"text_config = {text!r}: a {kind} model has its language model's config there.")
    if config.get("quantization_config"):
        text = {**text, "quantization_config": config["quantization_config"]}
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    kept = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    return {**kept, **text, "model_type": NESTED[kind], "architectures": None, "tie_word_embeddings": tied}


def nested_name(name: str) -> str:
    """The name of a text model's tensor or module in a model with vision."""
    return f"{TEXT_PREFIX}{name.removeprefix('model.')}" if name.startswith("model.") else name


def canonical(name: str) -> str:
    """The reverse: the name of a tensor in a text model."""
    return f"model.{name.removeprefix(TEXT_PREFIX)}" if name.startswith(TEXT_PREFIX) else name


def delta_of(sizes: Mapping[str, int], layer_types: tuple[str, ...]) -> DeltaSpec:
    """The layers of Gated DeltaNet. `sizes`: the values of the `linear_*` keys by name."""
    key_heads, value_heads = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    if value_heads % key_heads:
        raise UserError(
            f"linear_num_value_heads = {value_heads} is not a multiple of linear_num_key_heads = {key_heads}."
        )
    if sizes["linear_conv_kernel_dim"] < 2:
        raise UserError("linear_conv_kernel_dim = 1 would be no convolution; it must be at least 2.")
    layers = tuple(i for i, kind in enumerate(layer_types) if kind == LINEAR)
    if not layers or len(layers) == len(layer_types):
        raise UserError(
            f"layer_types has {LINEAR if layers else FULL} alone; a hybrid model has layers of both kinds. Use "
            "model_type = 'qwen3' for a model of attention alone."
        )
    return DeltaSpec(
        key_heads=key_heads, value_heads=value_heads, key_dim=sizes["linear_key_head_dim"],
        value_dim=sizes["linear_value_head_dim"], conv_width=sizes["linear_conv_kernel_dim"], layers=layers,
    )


def layer_types(config: Mapping[str, Any], count: int, interval: int) -> tuple[str, ...]:
    """The kind of each layer; without the key, every `interval`-th has attention."""
    kinds = config.get("layer_types")
    if not kinds:
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(count))
    if not isinstance(kinds, list | tuple) or len(kinds) != count:
        raise UserError(f"layer_types = {kinds!r} must be a list with a type for each of {count} layers.")
    if unknown := sorted({str(kind) for kind in kinds} - {LINEAR, FULL}):
        raise UserError(f"layer_types has {some(unknown)}, which is not supported; {LINEAR} and {FULL} are.")
    return tuple(kinds)


def rotary_dim(factor: float, head_dim: int) -> int:
    """How much of a head is rotated."""
    size = int(head_dim * factor)
    if not 0 < factor <= 1 or size % 2 or size < 2:
        raise UserError(
            f"partial_rotary_factor = {factor} of head_dim = {head_dim} rotates {size} places; RoPE rotates pairs, so "
            "this must be an even number of 2 up to head_dim."
        )
    return size


def joined(stored: Mapping[str, str], spec: ModelSpec) -> dict[str, Within]:
    """Where each expert's matrix is in folders that hold those of all in one tensor, `experts.gate_up_proj` [E, 2F, D]
    and `experts.down_proj` [E, D, F], by the name that it has elsewhere. `stored`: names in the folder by ours."""
    found: dict[str, Within] = {}
    e = spec.experts
    for layer in spec.expert_layers:
        at = f"model.layers.{layer}.mlp.experts."
        for name, parts, rows in (("gate_up_proj", ("gate_proj", "up_proj"), 2), ("down_proj", ("down_proj",), 1)):
            if e is None or f"{at}{name}" not in stored:
                continue
            size = e.intermediate_size if rows == 2 else spec.hidden_size
            found |= {
                f"{at}{i}.{part}.weight": Within(f"{at}{name}", i, j * size, (e.count, rows * size))
                for i in range(e.count) for j, part in enumerate(parts)
            }
    return found


def written(spec: ModelSpec) -> dict[str, Any]:
    """The keys of a hybrid text model beyond those that all models have."""
    d, e = spec.delta, spec.experts
    assert d is not None and spec.rotary_dim is not None
    return ({} if e is None else {"shared_expert_intermediate_size": e.gated_shared}) | {
        "layer_types": [LINEAR if i in d.layers else FULL for i in range(spec.num_layers)],
        "linear_num_key_heads": d.key_heads, "linear_num_value_heads": d.value_heads,
        "linear_key_head_dim": d.key_dim, "linear_value_head_dim": d.value_dim,
        "linear_conv_kernel_dim": d.conv_width, "partial_rotary_factor": spec.rotary_dim / spec.head_dim,
        "attn_output_gate": True, "mamba_ssm_dtype": "float32",
    }
