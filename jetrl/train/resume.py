"""Which settings must be those of the checkpoint that a run is resumed from, and how a difference is told."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jetrl.config import Config, load_config, sections
from jetrl.config.paths import path_values
from jetrl.config.toml import toml_literal
from jetrl.errors import UserError
from jetrl.train.checkpoint import Meta

MAY_CHANGE = (
    "train.steps, the sections eval, checkpoint and track, output_dir, sft.cache_dir, environment.timeout and "
    "max_concurrent, how a path is written and, with BF16 masters or moments, train.offload_optimizer"
)
# The keys of the digest in checkpoints that do not hold their settings: those before 2026-11-23.
_OLD_KEYS = {
    "": "name seed precision device kernels output_dir num_threads",
    "model": "path arch tokenizer init_seed",
    "quant": "weight_scale activation_scale num_first_layers_in_bf16 num_last_layers_in_bf16 kv_cache",
    "task": "name params train_file eval_file reward max_prompt_length num_eval chat_template system_prompt",
    "rollout": "engine prompts_per_step group_size max_response_length temperature top_p top_k min_p stop page_size "
    "max_num_seqs max_tokens_per_step kv_cache_tokens",
    "environment": "name params max_turns max_turn_tokens timeout max_concurrent at_limit",
    "rl": "algo adv_estimator norm_adv_by_std adv_epsilon gamma gae_lambda ratio surrogate loss_agg clip_ratio_low "
    "clip_ratio_high clip_ratio_c kl_coef kl_estimator kl_in critic critic_lr critic_warmup_steps value_coef "
    "value_clip updates_per_step rollout_is rollout_is_threshold rollout_rs rollout_rs_threshold dynamic_sampling "
    "max_refill_rounds overlong_buffer_len overlong_penalty_factor mask_truncated entropy_coef",
    "train": "steps lr lr_schedule warmup_steps min_lr_ratio weight_decay adam_betas adam_eps max_grad_norm "
    "max_tokens_per_gpu master_dtype grad_dtype optimizer_dtype offload_optimizer activation_checkpointing",
    "sft": "steps batch_size lr warmup_steps lr_schedule num_examples cache_dir",
    "eval": "eval_interval temperature num_samples max_response_length",
    "checkpoint": "save_interval keep resume",
    "track": "backends",
}


def settings(config: Config) -> dict[str, Any]:
    """The settings that must not change between a run and its resumption, by full key."""
    free = {"output_dir", "sft.cache_dir", "environment.timeout", "environment.max_concurrent"}
    if config.train.lr_schedule == "constant":
        free |= {"train.steps", "train.warmup_steps"}
    if "bfloat16" in (config.train.master_dtype, config.train.optimizer_dtype):
        free |= {"train.offload_optimizer"}  # one optimizer and the same bits, on or off; all in FP32 it is another
    found = dict(_flat("", config.model_dump(mode="json")))
    return {k: v for k, v in found.items() if k not in free and k.split(".")[0] not in ("eval", "checkpoint", "track")}


def paths(config: Config) -> dict[str, Any]:
    """The values of a config with absolute paths that `check` takes for equal to another spelling."""
    return {key: value for key, value in path_values(config).items() if key in settings(config)}


def check(path: Path, meta: Meta, given: Config, absolute: Config, flow_digest: str) -> None:
    """UserError that names every setting in which this run is not the one that wrote the checkpoint."""
    if meta.settings is None:
        same = meta.config_digest == old_digest(given)
        told = [] if same else [*_differences(_of_run(path), {}, given, absolute)]
    else:
        told = [*_differences(meta.settings, meta.paths or {}, given, absolute)]
        same = not told
    if same and meta.flow_digest == flow_digest:
        return
    if meta.flow_digest != flow_digest and not told:
        told = [f"the flow of the model: {meta.flow_digest} there, {flow_digest} here (its config.json, or jetrl's "
                "version)"]
    lines = told or ["it does not hold them, and the run's config.toml does not tell either"]
    raise UserError(
        f"{path} was written by a run with other settings:\n" + "\n".join(f"  {line}" for line in lines)
        + "\nResume with the run's own config.toml, or start a run under a new name. Free to change are "
        f"{MAY_CHANGE}."
    )


def _differences(
    there: Mapping[str, Any], paths_there: Mapping[str, Any], given: Config, absolute: Config
) -> Iterator[str]:
    """One line for each key whose value is another one."""
    here, defaults, paths_here = settings(given), _defaults(), json.loads(json.dumps(paths(absolute)))
    for key in {**there, **here} if there else ():
        old, new = (values.get(key, defaults.get(key)) for values in (there, here))
        same_file = key in paths_here and paths_here[key] == paths_there.get(key)
        if old != new and not same_file and (key in here or key in there):
            yield f"{key} = {toml_literal(old)} there, {toml_literal(new)} here"


def _of_run(path: Path) -> dict[str, Any]:
    """The settings in the config.toml of a checkpoint's run, for messages; empty where it cannot be read."""
    file = path.absolute().parents[1] / "config.toml"
    try:
        return settings(load_config(file))
    except UserError:
        return {}


def _defaults() -> dict[str, Any]:
    """What the keys say that neither side sets, by full key: of those that came later than the checkpoint."""
    fields = [(f"{name}.{key}", field) for name, kind in sections().items() for key, field in kind.model_fields.items()]
    fields += [(key, field) for key, field in Config.model_fields.items() if key not in sections()]
    return {key: json.loads(json.dumps(f.get_default(call_default_factory=True), default=str)) for key, f in fields}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else key, inner)
    else:
        yield prefix, value


def old_digest(config: Config) -> str:
    """The digest that stood in checkpoints before they held their settings; keys that came later count if they differ
    from their defaults."""
    free: dict[str, Any] = {"steps": 1, "warmup_steps": 0} if config.train.lr_schedule == "constant" else {}
    if "bfloat16" in (config.train.master_dtype, config.train.optimizer_dtype):
        free["offload_optimizer"] = False
    waiting = {"timeout": 60.0, "max_concurrent": 64}
    fixed = config.model_copy(
        update={
            "environment": config.environment.model_copy(update=waiting),
            "checkpoint": type(config.checkpoint)(), "track": type(config.track)(), "eval": type(config.eval)(),
            "output_dir": "runs", "train": config.train.model_copy(update=free),
        }
    )
    data, defaults = fixed.model_dump(mode="json"), _defaults()
    for name, table in [("", data), *((name, data[name]) for name in sections())]:
        known = set(_OLD_KEYS.get(name, "").split()) | (set(sections()) if not name else set())
        for key in [k for k in table if k not in known]:
            if table[key] == defaults[f"{name}.{key}" if name else key]:
                del table[key]
    for name in [name for name in sections() if name not in _OLD_KEYS and not data[name]]:
        del data[name]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
