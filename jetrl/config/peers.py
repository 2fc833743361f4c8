"""What other systems call our keys: for messages, `jetrl settings` and docs/FROM_TRL.md, docs/FROM_VERL.md."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from functools import cache

from jetrl.config.keys import keys
from jetrl.config.markers import Elsewhere

# What others have and jetrl has no key for: what to do instead | whose: names; whose: names. Indented lines belong to
# the line above. Names may have sections and wildcards. The other names stand at our keys (`markers.Elsewhere`).
NO_KEY = """
micro-batches are always packed by tokens: train.max_tokens_per_gpu | verl: use_dynamic_bsz log_prob_use_dynamic_bsz
  use_remove_padding; TRL: pad_to_multiple_of
jetrl's KL weight is fixed: rl.kl_coef | verl: kl_ctrl.type kl_ctrl.horizon kl_ctrl.target_kl
jetrl has no SAPO and no VESPO, rl.surrogate is "clip" or "cispo" | TRL: sapo_* vespo_*; verl: tau_pos tau_neg
rewards are summed first, then normalized | TRL: multi_objective_aggregation
a separate critic has the policy's architecture, and begins with its weights | verl: critic.model.path
jetrl has no Clip-Cov and no KL-Cov | verl: clip_cov_* kl_cov_ratio ppo_kl_coef
the constant is rollout.max_response_length, with rl.loss_agg = "seq_mean_token_sum_norm" | verl: loss_scale_factor
importance weights correct the policy term only | TRL: use_bias_correction_kl; verl: rollout_is_batch_normalize
the log-probs of sampling are the old ones where the engine keeps the learner's bits | verl: bypass_mode
rl.entropy_coef is fixed: there is no adaptive control | TRL: use_adaptive_entropy entropy_coef_* entropy_target
jetrl learns from all tokens of a completion, whatever their entropy | TRL: top_entropy_quantile
rl.rollout_rs masks by the ratio of learner and sampler, whatever the advantage | TRL: off_policy_mask_threshold
jetrl records log-probs at sampling always | verl: calculate_log_probs
the reference model is the model before training, and stays | TRL: sync_ref_model ref_model_*
sampling has rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p and rollout.stop | TRL:
  generation_kwargs repetition_penalty cache_implementation; verl: do_sample ignore_eos
rollouts and updates take turns, with one model | verl: rollout.mode hybrid_engine over_sample_rate
  agent.num_workers layered_summon update_weights_bucket_megabytes
vLLM's own options are the keys of [vllm] | verl: engine_kwargs engine_kwargs.* load_format disable_log_stats
  multi_stage_wake_up
jetrl runs vLLM inside of the training process: rollout.engine = "vllm" | TRL: vllm_mode vllm_server_*
  vllm_group_port vllm_model_impl use_transformers_* transformers_continuous_batching_config
the KV cache takes what it needs, if memory allows, and rollout.kv_cache_tokens bounds it | TRL:
  vllm_gpu_memory_utilization; verl: gpu_memory_utilization
jetrl has no tensor, pipeline or context parallelism: a model fits one GPU | TRL: vllm_tensor_parallel_size; verl:
  tensor_model_parallel_size pipeline_model_parallel_size expert_parallel_size ulysses_sequence_parallel_size
long prompts are computed in chunks, and shared ones once, always | verl: enable_chunked_prefill
  enable_prefix_caching
no structured outputs | TRL: vllm_structured_outputs_regex
a run evaluates before its first step always, unless eval.eval_interval = 0 | verl: val_before_train; TRL:
  eval_on_start
`jetrl eval RUN` evaluates without training | verl: val_only
an evaluation draws from the whole distribution, at eval.temperature | verl: val_kwargs.top_p val_kwargs.top_k
logits and log-probs are always in FP32 | TRL: cast_lm_head_to_fp32
jetrl has no reward models, but a function may ask a server, task.reward | verl: reward_model.model.path
jetrl runs no code of a model's folder, and knows its families: Llama 3, Qwen2.5, Qwen3, Qwen3-MoE, SmolLM2 | TRL:
  trust_remote_code model_init_kwargs attn_implementation; verl: trust_remote_code external_lib override_config
LoRA is on with lora.rank, and has no dropout, bias, DoRA or 4-bit base | TRL: use_peft peft_config lora_dropout
  lora_task_type lora_target_parameters lora_modules_to_save use_dora load_in_4bit load_in_8bit bnb_4bit_*
  use_bnb_nested_quant; PEFT: qlora peft lora_dropout
the divergence is the reverse KL, and with teacher.top_k all other tokens are one outcome | TRL: loss_add_tail
  reverse_kl_top_1_mode
teacher.path may be an address | TRL: use_teacher_server
adapters are read from model.path, a folder or a name on the hub | verl: lora_adapter_path
jetrl has no reward models: rewards are functions, task.reward | TRL: reward_model_path; verl: reward_model
  reward_model.*
only Adam's moments can leave the GPU, by train.offload_optimizer | verl: param_offload enable_activation_offload
  offload_policy reshard_after_forward forward_prefetch
jetrl train --nproc N shards masters, gradients and moments by itself | TRL: deepspeed fsdp fsdp_config
  ds3_gather_for_generation; verl: strategy fsdp_config fsdp_size
jetrl brings its own kernels | TRL: use_liger_kernel torch_compile; verl: use_liger use_torch_compile
  use_fused_kernels
rows are held in memory | TRL: dataloader_num_workers dataloader_pin_memory dataloader_drop_last
  dataloader_prefetch_factor; verl: filter_overlong_prompts_workers
jetrl computes log-probs and entropy in chunks by itself | verl: entropy_from_logits_with_chunking
  entropy_checkpointing
jetrl packs and deals micro-batches by itself | verl: balance_batch use_shm dataloader_num_workers
checkpoints stay, the newest checkpoint.keep of them | verl: del_local_ckpt_after_load; TRL: load_best_model_at_end
  metric_for_best_model greater_is_better
a run never goes into the folder of another: it gets -2, -3 behind its name | TRL: overwrite_output_dir
there is no HDFS, output_dir is a folder | verl: default_hdfs_dir
checkpoints hold all that an exact resume needs | TRL: save_only_model; verl: save_contents load_contents
jetrl profiles nothing, metrics.jsonl has the seconds of each part of a step | verl: profiler global_profiler
train.min_lr_ratio is the only argument of a schedule | TRL: lr_scheduler_kwargs; verl: num_cycles
jetrl uses no Ray, but processes of its own | verl: ray_kwargs ray_kwargs.* ray_init.*
jetrl frees memory by itself | TRL: torch_empty_cache_steps
models have no dropout here | TRL: disable_dropout
jetrl train --nproc N starts a process per GPU (torchrun on several machines) | verl: n_gpus_per_node nnodes; TRL:
  num_processes
an evaluation is one rollout of task.num_eval problems | verl: val_batch_size validation_shuffle
all rows are used, a shorter file has fewer | verl: train_max_samples
your own rows come from jetrl.train(dataset=...), or a file | verl: custom_cls custom_cls.* datagen sampler.*
prompts and messages are kept always | verl: return_raw_chat return_raw_input_ids return_full_prompt
jetrl trains on text alone | verl: return_multi_modal_inputs image_key video_key freeze_vision_tower
the tokenizer's chat template counts, model.tokenizer may name another folder | verl: custom_chat_template
all columns reach the reward functions that ask for them | TRL: remove_unused_columns; verl: reward_fn_key
rows come in an order that depends on seed | TRL: shuffle_dataset data_seed; verl: shuffle
a reward function has its own defaults for further arguments, or reads them as columns | verl: reward_kwargs
  reward_kwargs.*
an environment cuts its own replies | verl: max_tool_response_length
every step is logged, in metrics.jsonl and report.html | TRL: logging_steps logging_strategy logging_first_step
samples.jsonl and report.html show completions of every step | TRL: log_completions num_completions_to_print
  log_unique_prompts log_multimodal; verl: rollout_data_dir
report.html shows held-out answers | verl: log_val_generations validation_data_dir
`jetrl export RUN FOLDER` writes a Hugging Face folder, which you can upload | TRL: push_to_hub hub_model_id
  hub_strategy log_completions_hub_repo
"""
FOREIGN_SECTIONS = frozenset({
    "trainer", "actor_rollout_ref", "algorithm", "data", "critic", "custom_reward_function", "reward_model",
    "ray_kwargs", "reward",
})  # of verl


@dataclass(frozen=True, slots=True)
class Peer:
    """One key of another system. `ours`: our full key and what is said of it, or, where there is no `key` of ours, what
    to do instead."""

    key: str | None
    ours: str
    whose: str
    name: str

    @property
    def answer(self) -> str:
        """What follows the semicolon of a message."""
        return self.ours if self.key is None else f"here it is {self.ours}"


@cache
def peers() -> tuple[Peer, ...]:
    """Each name that another system has and jetrl has not: those of our keys, then those that have none."""
    rows: list[tuple[str | None, str, str]] = [
        (key.full, f"{key.full}{called.note}", called.names) for key in keys().values()
        for called in key.all(Elsewhere) if called.names
    ]
    for line in NO_KEY.replace("\n  ", " ").strip().splitlines():
        instead, _, names = line.partition(" | ")
        rows.append((None, instead, names))
    return tuple(
        Peer(key, ours, whose, name) for key, ours, given in rows for entry in given.split("; ")
        for whose, _, names in [entry.partition(": ")] for name in names.split()
    )


def same_in(whose: str) -> list[str]:
    """Our full keys that have the same name in another system."""
    return [key.full for key in keys().values() if any(whose in called.same for called in key.all(Elsewhere))]


def peer_name(key: str) -> str | None:
    """A sentence for a key of another system, or None: `"beta" is TRL's name; here it is rl.kl_coef`.

    Of a dotted key that which says most is looked up: all of it, then without its first sections, at last the sections
    that it is in. In a section of verl's only verl's names count, those that it shares with jetrl too.
    """
    parts, words = key.lower().replace("-", "_").split("."), key.split(".")
    foreign = parts[0] in FOREIGN_SECTIONS
    known = [peer for peer in peers() if not foreign or "verl" in peer.whose.split(", ")]
    plain = {peer.name: peer for peer in reversed(known)}
    shared = {full.rpartition(".")[2]: full for full in same_in("verl")}
    wild = [peer for peer in known if "*" in peer.name]
    ends = [(start, len(parts)) for start in range(len(parts))]
    inner = [(start, end) for end in range(len(parts) - 1, 0, -1) for start in range(end)] if foreign else []
    for places in (ends, inner):
        names = [(".".join(parts[start:end]), ".".join(words[start:])) for start, end in places]
        found = [(said, plain[name]) for name, said in names if name in plain]
        if not found and foreign and (same := shared.get(parts[-1])) is not None:
            return f'"{key}" is verl\'s name; here it is {same}'
        found += [(said, peer) for name, said in names for peer in wild if fnmatch.fnmatchcase(name, peer.name)]
        for said, peer in found:
            return f'"{said}" is {" and ".join(peer.whose.rsplit(", ", 1))}\'s name; {peer.answer}'
    return None
