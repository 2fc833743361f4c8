"""What other systems call our keys: for messages, `jetrl settings` and docs/FROM_TRL.md, docs/FROM_VERL.md."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

# ours (and a note) | whose: names; whose: names. Indented lines belong to the line above. What jetrl has no key for
# begins with "- " and says what to do instead. Names may have sections and wildcards.
PEERS = """
rollout.group_size | verl: n; TRL: num_generations; NeMo RL: num_generations_per_prompt; slime, OpenRLHF, SkyRL:
  n_samples_per_prompt
rollout.prompts_per_step (prompts, not completions) | verl, SkyRL: train_batch_size; verl: gen_batch_size; TRL:
  generation_batch_size
  per_device_train_batch_size; NeMo RL: num_prompts_per_step; slime: rollout_batch_size; prime-rl: batch_size;
  torchtitan: num_prompts_per_train_step
rollout.prompts_per_step (it sets the batch, micro-batches are packed up to train.max_tokens_per_gpu) | TRL:
  gradient_accumulation_steps
rl.updates_per_step (how many, not their size) | verl: ppo_mini_batch_size ppo_epochs; TRL: steps_per_generation
  num_iterations; NeMo RL: train_global_batch_size; slime: num_steps_per_rollout; SkyRL: policy_mini_batch_size
train.max_tokens_per_gpu | verl: ppo_max_token_len_per_gpu; NeMo RL: train_mb_tokens; SkyRL:
  max_tokens_per_microbatch
train.max_tokens_per_gpu (tokens, not sequences) | TRL: per_device_eval_batch_size; verl:
  ppo_micro_batch_size_per_gpu ppo_micro_batch_size
  log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu
- micro-batches are always packed by tokens: train.max_tokens_per_gpu | verl: use_dynamic_bsz log_prob_use_dynamic_bsz
  use_remove_padding; TRL: pad_to_multiple_of
quant.kv_cache | vLLM, SGLang: kv_cache_dtype
rollout.max_response_length | TRL: max_completion_length; verl: response_length; slime: rollout_max_response_len;
  SkyRL: max_generate_length; transformers: max_new_tokens
rollout.max_response_length, with task.max_prompt_length | NeMo RL: max_total_sequence_length; TRL:
  vllm_max_model_length; verl: max_model_len
task.max_prompt_length | verl: prompt_length
rl.clip_ratio_low and rl.clip_ratio_high | verl: clip_ratio
rl.clip_ratio_low | TRL: epsilon; NeMo RL: ratio_clip_min; slime: eps_clip; SkyRL: eps_clip_low; torchtitan:
  ratio_clip_low
rl.clip_ratio_high | TRL: epsilon_high; NeMo RL: ratio_clip_max; slime, SkyRL: eps_clip_high; torchtitan:
  ratio_clip_high
rl.clip_ratio_c | TRL: delta; NeMo RL: ratio_clip_c; slime: eps_clip_c
rl.kl_coef (0: no reference model), with rl.kl_in = "loss" | verl: use_kl_loss; verl, slime, SkyRL: kl_loss_coef
rl.kl_in = "reward", with rl.kl_coef above 0 | verl: use_kl_in_reward
rl.kl_coef (0: no reference model) | TRL: beta; NeMo RL: reference_policy_kl_penalty
rl.kl_estimator (low_var_kl is "k3", kl is "k1", mse is "k2") | verl: kl_loss_type kl_penalty
rl.kl_estimator | slime: kl_loss_type; NeMo RL: reference_policy_kl_type; SkyRL: kl_estimator_type
- jetrl's KL weight is fixed: rl.kl_coef | verl: kl_ctrl.type kl_ctrl.horizon kl_ctrl.target_kl
rl.loss_agg ("dapo" and "bnpo" are "token_mean", "grpo" is "seq_mean_token_mean", "dr_grpo" is
  "seq_mean_token_sum_norm", "cispo" is rl.algo = "cispo", and sapo, luspo and vespo are not there) | TRL: loss_type
rl.loss_agg | verl: loss_agg_mode; NeMo RL: token_level_loss; slime: calculate_per_token_loss; SkyRL: loss_reduction
rl.ratio ("sequence" is "sequence_mean", and rl.algo = "gspo" sets GSPO's other keys too) | TRL:
  importance_sampling_level
rl.surrogate and rl.ratio, or rl.algo ("gspo", "cispo") | verl: loss_mode
- jetrl has no SAPO and no VESPO, rl.surrogate is "clip" or "cispo" | TRL: sapo_* vespo_*; verl: tau_pos tau_neg
rl.norm_adv_by_std | verl: norm_adv_by_std_in_grpo; NeMo RL: normalize_rewards; SkyRL: grpo_norm_by_std; torchtitan:
  should_std_normalize
rl.norm_adv_by_std ("group" is true, "none" is false, and rl.algo = "reinforce_pp" normalizes over the step) | TRL:
  scale_rewards
rl.norm_adv_by_std, the other way round | slime: disable_grpo_std_normalization
- rewards are summed first, then normalized | TRL: multi_objective_aggregation
rl.algo, or rl.adv_estimator alone | slime, OpenRLHF, SkyRL: advantage_estimator
rl.gae_lambda | verl: lam
rl.value_clip | verl: cliprange_value
rl.critic_warmup_steps | verl: critic_warmup
rl.critic_lr | verl: critic.optim.lr
- a separate critic has the policy's architecture, and begins with its weights | verl: critic.model.path
rl.entropy_coef | verl: entropy_coeff
- jetrl has no Clip-Cov and no KL-Cov | verl: clip_cov_* kl_cov_ratio ppo_kl_coef
- the constant is rollout.max_response_length, with rl.loss_agg = "seq_mean_token_sum_norm" | verl: loss_scale_factor
- importance weights correct the policy term only | TRL: use_bias_correction_kl; verl: rollout_is_batch_normalize
- the log-probs of sampling are the old ones where the engine keeps the learner's bits | verl: bypass_mode
- rl.entropy_coef is fixed: there is no adaptive control | TRL: use_adaptive_entropy entropy_coef_* entropy_target
- jetrl learns from all tokens of a completion, whatever their entropy | TRL: top_entropy_quantile
rl.rollout_is and rl.rollout_is_threshold (with jetrl's engine there is nothing to correct) | TRL:
  vllm_importance_sampling_*; NeMo RL: use_importance_sampling_correction truncated_importance_sampling_*; slime:
  use_tis tis_*; OpenRLHF: is_correction_*; SkyRL: off_policy_correction
- rl.rollout_rs masks by the ratio of learner and sampler, whatever the advantage | TRL: off_policy_mask_threshold
rl.rollout_rs, rl.rollout_rs_threshold and rl.rollout_rs_lower | slime: rs_*
- jetrl records log-probs at sampling always | verl: calculate_log_probs
- the reference model is the model before training, and stays | TRL: sync_ref_model ref_model_*
rl.dynamic_sampling | verl: filter_groups filter_groups.enable; NeMo RL: use_dynamic_sampling
  dynamic_sampling_max_gen_batches; slime:
  dynamic_sampling_filter_path; OpenRLHF: dynamic_filtering*; prime-rl: filter_zero_advantages; torchtitan:
  drop_zero_std_reward_groups
rl.signal (what counts as all alike, the name of a reward function) | verl: filter_groups.metric
rl.max_refill_rounds | verl: max_num_gen_batches
rl.overlong_buffer_len | verl: overlong_buffer_cfg overlong_buffer_cfg.len overlong_buffer.len overlong_buffer; TRL:
  soft_punish_cache; NeMo RL: overlong_buffer_length
rl.overlong_buffer_len (0: off) | verl: overlong_buffer_cfg.enable overlong_buffer.enable
rl.overlong_penalty_factor | verl: overlong_buffer_cfg.penalty_factor overlong_buffer.penalty_factor; NeMo RL:
  overlong_buffer_penalty
rl.mask_truncated | NeMo RL: overlong_filtering; SkyRL: apply_overlong_filtering
rl.mask_truncated (with rl.masked_sequences = "count") | TRL: mask_truncated_completions
rollout.temperature, top_p and top_k | slime: rollout_temperature; SkyRL: sampling_params
- sampling has rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p and rollout.stop | TRL:
  generation_kwargs repetition_penalty cache_implementation; verl: do_sample ignore_eos
rollout.engine = "vllm" (the default engine is built in, and keeps the learner's bits) | TRL: use_vllm
rollout.engine ("vllm" is there, and the default, "jetrl", keeps the learner's bits) | verl: rollout.name
- rollouts and updates take turns, with one model | verl: rollout.mode hybrid_engine over_sample_rate agent.num_workers
  layered_summon update_weights_bucket_megabytes
- vLLM's own options are the keys of [vllm] | verl: engine_kwargs engine_kwargs.* load_format disable_log_stats
  multi_stage_wake_up
- jetrl runs vLLM inside of the training process: rollout.engine = "vllm" | TRL: vllm_mode vllm_server_* vllm_group_port
  vllm_model_impl use_transformers_*
  transformers_continuous_batching_config
vllm.sleep | TRL: vllm_enable_sleep_mode; verl: free_cache_engine
- the KV cache takes what it needs, if memory allows, and rollout.kv_cache_tokens bounds it | TRL:
  vllm_gpu_memory_utilization; verl: gpu_memory_utilization
- jetrl has no tensor, pipeline or context parallelism: a model fits one GPU | TRL:
  vllm_tensor_parallel_size; verl: tensor_model_parallel_size pipeline_model_parallel_size expert_parallel_size
  ulysses_sequence_parallel_size
rollout.max_tokens_per_step | verl: max_num_batched_tokens
- long prompts are computed in chunks, and shared ones once, always | verl: enable_chunked_prefill
  enable_prefix_caching
- no structured outputs | TRL: vllm_structured_outputs_regex
task.num_eval | verl: val_max_samples
eval.num_samples | slime: n_samples_per_eval_prompt; TRL: num_generations_eval
eval.eval_interval | verl: test_freq; TRL: eval_steps; NeMo RL: val_period
eval.eval_interval (10 by default, 0: never) | TRL: eval_strategy do_eval
- a run evaluates before its first step always, unless eval.eval_interval = 0 | verl: val_before_train; TRL:
  eval_on_start
- `jetrl eval RUN` evaluates without training | verl: val_only
eval.num_samples | verl: val_kwargs.n
eval.temperature | verl: val_kwargs.temperature
eval.temperature (0: greedy) | verl: val_kwargs.do_sample
- an evaluation draws from the whole distribution, at eval.temperature | verl: val_kwargs.top_p val_kwargs.top_k
eval.temperature, eval.num_samples and eval.max_response_length | verl: val_kwargs
checkpoint.save_interval | verl: save_freq; TRL: save_steps; NeMo RL: save_period; SkyRL: ckpt_interval
checkpoint.save_interval (0: never) | TRL: save_strategy
checkpoint.background | verl: async_save
checkpoint.keep | TRL: save_total_limit; verl: max_actor_ckpt_to_keep max_critic_ckpt_to_keep
checkpoint.resume | verl, SkyRL: resume_mode; verl: resume_from_path; TRL: resume_from_checkpoint; slime: load
precision (one key for both sides) | verl, SkyRL: quantization; NeMo RL: fp8_cfg; slime: fp8_format fp8_recipe
precision ("bf16", and by default "fp8") | TRL: bf16 fp16; verl: dtype
train.master_dtype and train.optimizer_dtype | TRL: dtype torch_dtype; verl: fsdp_config.model_dtype model_dtype
- logits and log-probs are always in FP32 | TRL: cast_lm_head_to_fp32
- jetrl has no reward models, but a function may ask a server, task.reward | verl: reward_model.model.path
model.path | TRL: model_name_or_path; NeMo RL: model_name; slime: hf_checkpoint
model.revision | TRL: model_revision
model.tokenizer | verl: tokenizer_path data.tokenizer
- jetrl runs no code of a model's folder, and knows its families: Llama 3, Qwen2.5, Qwen3, Qwen3-MoE, SmolLM2 | TRL:
  trust_remote_code model_init_kwargs attn_implementation; verl: trust_remote_code external_lib override_config
- jetrl has no LoRA yet: it trains all weights | TRL: use_peft peft_config lora_* use_rslora use_dora load_in_4bit
  load_in_8bit bnb_4bit_* use_bnb_nested_quant; verl: lora_rank lora_alpha lora_adapter_path target_modules;
  PEFT: lora qlora peft
- jetrl has no reward models: rewards are functions, task.reward | TRL: reward_model_path; verl: reward_model
  reward_model.*
train.lr | TRL: learning_rate
train.lr_schedule | TRL: lr_scheduler_type; verl: optim.lr_scheduler_type
train.lr_schedule (constant, linear, cosine) | verl: warmup_style
train.warmup_steps (steps, not a share) | TRL: warmup_ratio; verl: lr_warmup_steps lr_warmup_steps_ratio
train.adam_betas | TRL: adam_beta1 adam_beta2; verl: betas
train.adam_eps | TRL: adam_epsilon
train.optimizer_dtype (the optimizer is AdamW, "8bit" is torchao's) | TRL: optim; verl: optimizer
train.steps | TRL: max_steps; verl: total_training_steps; slime: num_rollout
train.epochs | TRL: num_train_epochs; verl: total_epochs
train.activation_checkpointing | TRL: gradient_checkpointing; verl: enable_gradient_checkpointing
train.max_grad_norm | slime: clip_grad; verl: grad_clip clip_grad
train.offload_optimizer (the moments only) | verl: optimizer_offload; slime: optimizer_cpu_offload
- only Adam's moments can leave the GPU, by train.offload_optimizer | verl:
  param_offload enable_activation_offload offload_policy reshard_after_forward forward_prefetch
- jetrl train --nproc N shards masters, gradients and moments by itself | TRL: deepspeed
  fsdp fsdp_config ds3_gather_for_generation; verl: strategy fsdp_config fsdp_size
- jetrl brings its own kernels | TRL: use_liger_kernel torch_compile; verl: use_liger
  use_torch_compile use_fused_kernels
train.activation_checkpointing | TRL: gradient_checkpointing_kwargs
train.collective_timeout | TRL: ddp_timeout
device = "cpu" | TRL: use_cpu no_cuda
- rows are held in memory | TRL: dataloader_num_workers dataloader_pin_memory dataloader_drop_last
  dataloader_prefetch_factor; verl: filter_overlong_prompts_workers
- jetrl computes log-probs and entropy in chunks by itself | verl: entropy_from_logits_with_chunking
  entropy_checkpointing
- jetrl packs and deals micro-batches by itself | verl: balance_batch use_shm dataloader_num_workers
- checkpoints stay, the newest checkpoint.keep of them | verl: del_local_ckpt_after_load; TRL: load_best_model_at_end
  metric_for_best_model greater_is_better
- a run never goes into the folder of another: it gets -2, -3 behind its name | TRL: overwrite_output_dir
- there is no HDFS, output_dir is a folder | verl: default_hdfs_dir
- checkpoints hold all that an exact resume needs | TRL: save_only_model; verl: save_contents load_contents
- jetrl profiles nothing, metrics.jsonl has the seconds of each part of a step | verl: profiler global_profiler
- train.min_lr_ratio is the only argument of a schedule | TRL: lr_scheduler_kwargs; verl: num_cycles
- jetrl uses no Ray, but processes of its own | verl: ray_kwargs ray_kwargs.* ray_init.*
- jetrl frees memory by itself | TRL: torch_empty_cache_steps
- models have no dropout here | TRL: disable_dropout
- jetrl train --nproc N starts a process per GPU (torchrun on several machines) | verl: n_gpus_per_node
  nnodes; TRL: num_processes
task.train_file | verl: train_files; slime: prompt_data
task.eval_file | verl: val_files; slime: eval_prompt_data
task.dataset | TRL: dataset_name
task.dataset_config | TRL: dataset_config_name
task.train_split | TRL: dataset_train_split
task.eval_split | TRL: dataset_test_split
task.prompt_column | verl: prompt_key; slime, OpenRLHF: input_key
task.answer_column | slime, OpenRLHF: label_key
task.prompt_template | OpenRLHF: input_template
task.overlong_prompts | verl: filter_overlong_prompts
task.overlong_prompts ("error" or "drop", prompts are never cut) | verl: truncation; TRL: max_length
task.chat_template_kwargs | verl: apply_chat_template_kwargs
- an evaluation is one rollout of task.num_eval problems | verl: val_batch_size validation_shuffle
- all rows are used, a shorter file has fewer | verl: train_max_samples
- your own rows come from jetrl.train(dataset=...), or a file | verl: custom_cls custom_cls.* datagen sampler.*
- prompts and messages are kept always | verl: return_raw_chat return_raw_input_ids return_full_prompt
- jetrl trains on text alone | verl: return_multi_modal_inputs image_key video_key freeze_vision_tower
- the tokenizer's chat template counts, model.tokenizer may name another folder | verl: custom_chat_template
- all columns reach the reward functions that ask for them | TRL: remove_unused_columns; verl: reward_fn_key
- rows come in an order that depends on seed | TRL: shuffle_dataset data_seed; verl: shuffle
task.reward | TRL: reward_funcs; verl: custom_reward_function; slime: custom_rm_path
task.reward (file and function are one text, with a colon between them) | verl: custom_reward_function.path
  custom_reward_function.name
task.reward (a function of whole batches, see task.reward_calls) | verl: reward_manager reward_model.reward_manager
- a reward function has its own defaults for further arguments, or reads them as columns | verl: reward_kwargs
  reward_kwargs.*
task.reward_calls = "group" | verl: launch_reward_fn_async
environment.params (its call_format, with environment.name = "tools") | verl: multi_turn.format
environment.name | verl: multi_turn.enable interaction_config_path; TRL: environment_factory
environment.tools (with environment.name = "tools") | TRL: tools; verl: tool_config_path
environment.max_concurrent | verl: max_parallel_calls
- an environment cuts its own replies | verl: max_tool_response_length
environment.max_turns | TRL: max_tool_calling_iterations; verl: max_assistant_turns max_user_turns
track.backends | TRL: report_to; verl: logger
track.project | verl: project_name; TRL: project
name (of the run and its folder, for the tracker alone track.run_name) | TRL: run_name; verl: experiment_name
output_dir | verl: default_local_dir
- every step is logged, in metrics.jsonl and report.html | TRL: logging_steps logging_strategy logging_first_step
- samples.jsonl and report.html show completions of every step | TRL: log_completions num_completions_to_print
  log_unique_prompts log_multimodal; verl: rollout_data_dir
- report.html shows held-out answers | verl: log_val_generations validation_data_dir
- `jetrl export RUN FOLDER` writes a Hugging Face folder, which you can upload | TRL: push_to_hub hub_model_id
  hub_strategy log_completions_hub_repo
"""

# Keys that have the same name there, by our full key.
SAME = {
    "TRL": (
        "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p", "rl.entropy_coef",
        "task.reward_weights", "task.chat_template_kwargs", "task.max_prompt_length", "train.router_aux_loss_coef",
        "train.warmup_steps",
        "train.weight_decay", "train.max_grad_norm", "output_dir", "seed",
    ),
    "verl": (
        "rl.adv_estimator", "rl.gamma", "rl.kl_coef", "rl.clip_ratio_low", "rl.clip_ratio_high", "rl.clip_ratio_c",
        "rl.rollout_is", "rl.rollout_is_threshold", "rl.rollout_rs", "rl.rollout_rs_threshold",
        "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.max_response_length",
        "rollout.max_num_seqs", "task.max_prompt_length", "model.path", "train.lr", "train.weight_decay",
        "train.min_lr_ratio", "vllm.enforce_eager", "device", "seed",
    ),
}
FOREIGN_SECTIONS = frozenset({
    "trainer", "actor_rollout_ref", "algorithm", "data", "critic", "custom_reward_function", "reward_model",
    "ray_kwargs", "reward",
})  # of verl


@dataclass(frozen=True, slots=True)
class Peer:
    """One key of another system. `ours` begins with a full key of ours, or with "- " if there is none."""

    ours: str
    whose: str
    name: str

    @property
    def answer(self) -> str:
        """What follows the semicolon of a message."""
        return self.ours.removeprefix("- ") if self.ours.startswith("- ") else f"here it is {self.ours}"


def peers() -> Iterator[Peer]:
    """Each name of the table, in its order."""
    for line in PEERS.replace("\n  ", " ").strip().splitlines():
        ours, _, told = line.partition(" | ")
        for entry in told.split("; "):
            whose, _, names = entry.partition(": ")
            yield from (Peer(ours, whose, name) for name in names.split())


_SAME_IN_VERL = {key.rpartition(".")[2]: key for key in SAME["verl"]}


def peer_name(key: str) -> str | None:
    """A sentence for a key of another system, or None: `"beta" is TRL's name; here it is rl.kl_coef`.

    Of a dotted key that which says most is looked up: all of it, then without its first sections, at last the sections
    that it is in. In a section of verl's only verl's names count, those that it shares with jetrl too.
    """
    parts, words = key.lower().replace("-", "_").split("."), key.split(".")
    foreign = parts[0] in FOREIGN_SECTIONS
    known = [peer for peer in peers() if not foreign or "verl" in peer.whose.split(", ")]
    plain = {peer.name: peer for peer in reversed(known)}
    wild = [peer for peer in known if "*" in peer.name]
    ends = [(start, len(parts)) for start in range(len(parts))]
    inner = [(start, end) for end in range(len(parts) - 1, 0, -1) for start in range(end)] if foreign else []
    for places in (ends, inner):
        names = [(".".join(parts[start:end]), ".".join(words[start:])) for start, end in places]
        found = [(said, plain[name]) for name, said in names if name in plain]
        if not found and foreign and (same := _SAME_IN_VERL.get(parts[-1])) is not None:
            return f'"{key}" is verl\'s name; here it is {same}'
        found += [(said, peer) for name, said in names for peer in wild if fnmatch.fnmatchcase(name, peer.name)]
        for said, peer in found:
            return f'"{said}" is {" and ".join(peer.whose.rsplit(", ", 1))}\'s name; {peer.answer}'
    return None
