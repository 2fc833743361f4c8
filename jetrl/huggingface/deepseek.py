"""The keys of DeepSeek's architecture in a `config.json`: latent attention, its experts, YaRN. Both directions.

Defaults of absent keys are those of transformers' DeepseekV2Config, DeepseekV3Config and Glm4MoeLiteConfig, except for
sizes, which must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jetrl.errors import UserError
from jetrl.spec import DeepSeekSpec, ExpertSpec, LatentSpec, ModelSpec, YarnSpec

SPEC_KEYS = frozenset(
    "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts num_local_experts "
    "num_experts n_shared_experts num_experts_per_tok moe_intermediate_size norm_topk_prob routed_scaling_factor "
    "n_group topk_group topk_method scoring_func first_k_dense_replace moe_layer_freq mlp_layer_types rope_interleave "
    "qk_head_dim num_nextn_predict_layers num_mtp_layers".split()
)
# Of training losses and of how others place experts; code of the model's own that jetrl does not run.
HARMLESS = frozenset(
    "aux_loss_alpha seq_aux router_aux_loss_coef output_router_logits ep_size auto_map moe_router_dtype".split()
)
YARN_KEYS = frozenset(
    "factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim".split()
)
MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
_MOST_MLPS = 2**17  # experts of all layers


class Read(NamedTuple):
    """The functions of `config.py` that read and check a number."""

    size: Callable[..., int]
    positive: Callable[..., float]
    flag: Callable[..., bool]


def latent_of(config: Mapping[str, Any], read: Read) -> LatentSpec:
    """The sizes of latent attention."""
    value = config.get("rope_interleave")
    if value not in (None, True):
        raise UserError(f"rope_interleave = {value!r} is not supported; jetrl rotates pairs that lie side by side.")
    rank = None if config.get("q_lora_rank") is None else read.size(config, "q_lora_rank")
    sizes = {
        ours: read.size(config, key) for ours, key in (
            ("rank", "kv_lora_rank"), ("nope", "qk_nope_head_dim"), ("rope", "qk_rope_head_dim"),
            ("value", "v_head_dim"),
        )
    }
    if sizes["rope"] % 2:
        raise UserError(
            f"qk_rope_head_dim = {sizes['rope']} is odd; rotary embedding rotates pairs, so it must be even."
        )
    return LatentSpec(**sizes, query_rank=rank)


def experts_of(config: Mapping[str, Any], family: str, read: Read) -> ExpertSpec | None:
    """The experts; None where no layer has any."""
    layers, dense = read.size(config, "num_hidden_layers"), _dense_layers(config, family, read)
    if len(dense) == layers or config.get("n_routed_experts") is None and _count_key(config) is None:
        raise UserError(
            f"a {family} model for jetrl has experts in some layer; this config.json leaves none "
            "(n_routed_experts, first_k_dense_replace)."
        )
    count = read.size(config, _count_key(config) or "n_routed_experts")
    per_token = read.size(config, "num_experts_per_tok")
    sigmoid, groups, kept = _scoring(config, family), *_groups(config, count, read)
    if per_token > count // groups * kept:
        raise UserError(
            f"num_experts_per_tok = {per_token} is more than the {count // groups * kept} experts that topk_group = "
            f"{kept} of n_group = {groups} groups leave."
        )
    normalized = True if sigmoid and config.get("norm_topk_prob") is None else read.flag(config, "norm_topk_prob")
    if normalized and not sigmoid:
        raise UserError("norm_topk_prob = true with softmax scores is not supported for deepseek_v2 models; false is.")
    if layers * count > _MOST_MLPS:
        raise UserError(
            f"num_hidden_layers = {layers} with n_routed_experts = {count} are {layers * count} experts; jetrl takes "
            f"up to {_MOST_MLPS}."
        )
    shared = 0 if config.get("n_shared_experts") in (None, 0) else read.size(config, "n_shared_experts")
    more = DeepSeekSpec(
        sigmoid=sigmoid, bias=sigmoid, scaling=read.positive(config, "routed_scaling_factor", 1.0), shared=shared,
        groups=groups, kept_groups=kept,
    )
    return ExpertSpec(
        count=count, per_token=per_token, intermediate_size=read.size(config, "moe_intermediate_size"),
        normalized=normalized, dense_layers=dense, deepseek=more,
    )


def _count_key(config: Mapping[str, Any]) -> str | None:
    """The key that has the number of experts; transformers 5 writes it under its own names."""
    found = [key for key in ("n_routed_experts", "num_local_experts", "num_experts") if config.get(key) is not None]
    if len({config[key] for key in found}) > 1:
        said = " and ".join(f"{key} = {config[key]!r}" for key in found)
        raise UserError(f"{said} differ; both mean the number of experts. Keep the one that it was trained with.")
    return found[0] if found else None


def _dense_layers(config: Mapping[str, Any], family: str, read: Read) -> tuple[int, ...]:
    layers = read.size(config, "num_hidden_layers")
    if config.get("moe_layer_freq") not in (None, 1):
        raise UserError(f"moe_layer_freq = {config['moe_layer_freq']!r} is not supported; 1 is: every layer after the "
                        "first dense ones has experts.")
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        known = isinstance(kinds, list | tuple) and len(kinds) == layers and set(kinds) <= {"dense", "sparse"}
        if not known:
            raise UserError(f"mlp_layer_types = {kinds!r} must be 'dense' or 'sparse' for each of the {layers} layers.")
        return tuple(i for i, kind in enumerate(kinds) if kind == "dense")
    first = config.get("first_k_dense_replace")
    if first is None:
        first = {"deepseek_v2": 0, "deepseek_v3": 3}.get(family, 1)
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= layers:
        raise UserError(f"first_k_dense_replace = {first!r} must be a number of layers from 0 to {layers}.")
    return tuple(range(first))


def _scoring(config: Mapping[str, Any], family: str) -> bool:
    """Whether scores are sigmoids. The combinations that exist: softmax and greedy, sigmoid with a bias (noaux_tc)."""
    sigmoid = family != "deepseek_v2"
    scoring, method = config.get("scoring_func"), config.get("topk_method")
    wanted = ("sigmoid", "noaux_tc") if sigmoid else ("softmax", "greedy")
    for key, value, right in (("scoring_func", scoring, wanted[0]), ("topk_method", method, wanted[1])):
        if value not in (None, right):
            raise UserError(
                f"{key} = {value!r} is not supported for a {family} model; {right!r} is. (jetrl has softmax scores "
                "without a bias, taken greedily, and sigmoid scores with one, noaux_tc.)"
            )
    return sigmoid


def _groups(config: Mapping[str, Any], count: int, read: Read) -> tuple[int, int]:
    groups = 1 if config.get("n_group") is None else read.size(config, "n_group")
    kept = groups if config.get("topk_group") is None else read.size(config, "topk_group")
    if count % groups:
        raise UserError(f"n_group = {groups} does not divide the {count} experts; groups have the same size.")
    if kept > groups:
        raise UserError(f"topk_group = {kept} is more than n_group = {groups}.")
    if groups > 1 and count // groups < 2:
        raise UserError(f"n_group = {groups} leaves one expert in a group; a group's score is that of its best two.")
    return groups, kept


def mtp_layers(config: Mapping[str, Any]) -> int:
    """How many layers for drafts of further tokens (MTP) lie behind the model's own; jetrl does not run them."""
    found = [config.get(key) for key in MTP_KEYS]
    return next((n for n in found if isinstance(n, int) and n > 0), 0)


def is_mtp(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to a layer behind the last of the model's own."""
    parts = name.split(".")
    layered = parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdigit()
    return layered and int(parts[2]) >= num_layers


def yarn_of(rope: Mapping[str, Any], read: Read) -> YarnSpec:
    """YaRN's numbers, without the theta."""
    return YarnSpec(
        factor=read.positive(rope, "factor", None),
        original_max_position=read.size(rope, "original_max_position_embeddings"),
        beta_fast=read.positive(rope, "beta_fast", 32.0), beta_slow=read.positive(rope, "beta_slow", 1.0),
        mscale=read.positive(rope, "mscale", None) if rope.get("mscale") else 0.0,
        mscale_all_dim=read.positive(rope, "mscale_all_dim", None) if rope.get("mscale_all_dim") else 0.0,
    )


def yarn_keys(yarn: YarnSpec) -> dict[str, Any]:
    """`yarn_of`, back."""
    keys = {
        "rope_type": "yarn", "type": "yarn", "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position, "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    scales = {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    return keys | {key: value for key, value in scales.items() if value}


def written(spec: ModelSpec) -> dict[str, Any]:
    """The keys of latent attention and of the experts of a spec."""
    m, e = spec.latent, spec.experts
    assert m is not None and e is not None and e.deepseek is not None
    more = e.deepseek
    keys: dict[str, Any] = {
        "kv_lora_rank": m.rank, "q_lora_rank": m.query_rank, "qk_nope_head_dim": m.nope, "qk_rope_head_dim": m.rope,
        "v_head_dim": m.value, "n_routed_experts": e.count, "num_experts_per_tok": e.per_token,
        "n_shared_experts": more.shared or None, "moe_intermediate_size": e.intermediate_size,
        "norm_topk_prob": e.normalized, "routed_scaling_factor": more.scaling, "n_group": more.groups,
        "topk_group": more.kept_groups, "rope_interleave": True, "num_nextn_predict_layers": 0,
        "scoring_func": "sigmoid" if more.sigmoid else "softmax",
        "topk_method": "noaux_tc" if more.sigmoid else "greedy",
    }
    if spec.family == "glm4_moe_lite":
        kinds = ["dense" if i in e.dense_layers else "sparse" for i in range(spec.num_layers)]
        return keys | {"mlp_layer_types": kinds, "first_k_dense_replace": len(e.dense_layers)}
    return keys | {"first_k_dense_replace": len(e.dense_layers), "moe_layer_freq": 1}
