"""The section `[rl]`: an algorithm is a preset of its keys, and every key can be overridden."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jetrl.choices import (
    AdvEstimator,
    Algo,
    Clip,
    DynamicSampling,
    KLEstimator,
    KLIn,
    LossAgg,
    MaskedSequences,
    Ratio,
    RolloutIS,
    RolloutRS,
    Surrogate,
)
from jetrl.config.base import Problem, Section
from jetrl.config.markers import Elsewhere, Holds, Kernels, Needs, NoBits, NoEffectWhile, Since, marks
from jetrl.config.toml import toml_literal
from jetrl.presets import OWN, PRESETS

OwnFunction = Annotated[str, Field(pattern=r"^[^:\s].*:[A-Za-z_]\w*$")]
"""A function of the user's: `module:function` or `path/to/file.py:function`."""

OFF_POLICY_ONLY = NoEffectWhile("rl.updates_per_step", (1,))
# A function of the user's gets no values: it has no critic.
CRITIC_ONLY = NoEffectWhile("rl.adv_estimator", ("grpo", "rloo", "reinforce_pp", "teacher", OWN))


class RLConfig(Section):
    """The objective. `algo` sets the defaults of the other keys (docs/ALGORITHMS.md); each can be overridden."""

    section: ClassVar[str] = "rl"
    algo: Annotated[
        Algo, Elsewhere("slime, OpenRLHF, SkyRL: advantage_estimator", ", or rl.adv_estimator alone"),
    ] = Field(default="grpo", description="The algorithm: a preset of the keys below.")
    adv_estimator: Annotated[AdvEstimator | OwnFunction, Holds("code"), Kernels(), Elsewhere(same=("verl",))] = Field(
        default="grpo", description="Advantages: relative to the group (grpo), to the others of the group (rloo), "
        "normalized over the step (reinforce_pp), from a critic (gae), from the teacher alone (teacher). Or yours, as "
        "path/to/file.py:function (docs/ALGORITHMS.md).",
    )
    norm_adv_by_std: Annotated[
        bool, NoEffectWhile("rl.adv_estimator", ("rloo", "reinforce_pp", "teacher")),
        Elsewhere(
            "verl: norm_adv_by_std_in_grpo; NeMo RL: normalize_rewards; SkyRL: grpo_norm_by_std; torchtitan: "
            "should_std_normalize"),
        Elsewhere(
            "TRL: scale_rewards",
            ' ("group" is true, "none" is false, and rl.algo = "reinforce_pp" normalizes over the step)'),
        Elsewhere("slime: disable_grpo_std_normalization", ", the other way round"),
    ] = Field(
        default=True, description="Divide advantages by the standard deviation of the group (grpo) or step (gae).")
    adv_epsilon: Annotated[
        float, NoEffectWhile("rl.adv_estimator", ("rloo", "teacher")), NoEffectWhile("rl.norm_adv_by_std", (False,)),
    ] = Field(
        default=1e-6, ge=0, description="Added to the standard deviation that advantages are divided by (in verl 1e-6, "
        "in TRL 1e-4).",
    )
    gamma: Annotated[
        float, NoEffectWhile("rl.adv_estimator", ("grpo", "rloo", "teacher")), Elsewhere(same=("verl",)),
    ] = Field(
        default=1.0, gt=0, le=1, description="Discount of a token's later rewards.")
    gae_lambda: Annotated[float, CRITIC_ONLY, Elsewhere("verl: lam")] = Field(
        default=1.0, ge=0, le=1, description="Lambda of generalized advantage estimation.")
    ratio: Annotated[
        Ratio,
        Needs(
            ("sequence_mean", "sequence"), "rl.adv_estimator", ("grpo", "rloo", OWN),
            "a ratio of the whole sequence needs one advantage for the whole sequence"),
        Elsewhere(
            "TRL: importance_sampling_level",
            ' ("sequence" is "sequence_mean", and rl.algo = "gspo" sets GSPO\'s other keys too)'),
    ] = Field(
        default="token", description="Policy ratio. token: of the token. sequence_mean: the geometric mean over its "
        "sequence (GSPO). sequence: the product over its sequence (RLOO).",
    )
    surrogate: Annotated[
        Surrogate | OwnFunction,
        Needs(
            ("cispo",), "rl.ratio", ("token", "sequence_mean"),
            "cispo weights the log-prob of each token; with the product over the sequence it has no definition"),
        Holds("code"), Elsewhere("verl: loss_mode", ' and rl.ratio, or rl.algo ("gspo", "cispo")'),
    ] = Field(
        default="clip", description="clip: PPO's clipped ratio. cispo: the ratio is clipped, the gradient is not. Or "
        "yours, as path/to/file.py:function (docs/ALGORITHMS.md).",
    )
    loss_agg: Annotated[
        LossAgg | OwnFunction, Holds("code"),
        Elsewhere(
            "TRL: loss_type",
            ' ("dapo" and "bnpo" are "token_mean", "grpo" is "seq_mean_token_mean", "dr_grpo" is '
            '"seq_mean_token_sum_norm", "cispo" is rl.algo = "cispo", and sapo, luspo and vespo are not there)'),
        Elsewhere(
            "verl: loss_agg_mode; NeMo RL: token_level_loss; slime: calculate_per_token_loss; SkyRL: loss_reduction"),
    ] = Field(
        default="token_mean", description="token_mean: mean over all tokens. seq_mean_token_mean: mean over each "
        "sequence, then over sequences. seq_mean_token_sum: sum over each sequence, mean over sequences. "
        "seq_mean_token_sum_norm: that, divided by max_response_length. Or yours, as "
        "path/to/file.py:function (docs/ALGORITHMS.md).",
    )
    clip_ratio_low: Annotated[
        float, OFF_POLICY_ONLY, Elsewhere(same=("verl",)), Elsewhere("verl: clip_ratio", " and rl.clip_ratio_high"),
        Elsewhere(
            "TRL: epsilon; NeMo RL: ratio_clip_min; slime: eps_clip; SkyRL: eps_clip_low; torchtitan: ratio_clip_low"),
    ] = Field(default=0.2, gt=0, le=1, description="The policy ratio is clipped from below at 1 - this.")
    clip_ratio_high: Annotated[
        float, OFF_POLICY_ONLY,
        Elsewhere(
            "TRL: epsilon_high; NeMo RL: ratio_clip_max; slime, SkyRL: eps_clip_high; torchtitan: ratio_clip_high",
            same=("verl",)),
    ] = Field(default=0.2, gt=0, description="The policy ratio is clipped from above at 1 + this.")
    clip_ratio_c: Annotated[
        float | None, NoEffectWhile("rl.surrogate", ("cispo",)), OFF_POLICY_ONLY,
        Elsewhere("TRL: delta; NeMo RL: ratio_clip_c; slime: eps_clip_c", same=("verl",)),
    ] = Field(
        default=None, gt=1, description="Dual clip: bound on the ratio where the advantage is negative. none: off.")
    clip: Annotated[
        Clip, OFF_POLICY_ONLY, NoEffectWhile("precision", ("bf16", "fp8_rollout")),
        Since("0.1.0", "fixed"), Kernels(),
        Needs(("calibrated",), "rl.surrogate", ("clip",), "what is calibrated is what PPO's clip cuts off"),
        Needs(("calibrated",), "rl.ratio", ("token",), "bounds are found for the ratios of tokens"),
    ] = Field(
        default="fixed", description="fixed: the policy ratio is clipped at the two bounds above. calibrated: at "
        "bounds that cut off as much in this precision as those do in BF16, found with passes of a BF16 copy of the "
        "policy (docs/ALGORITHMS.md).")
    calibration_interval: Annotated[
        int, OFF_POLICY_ONLY, NoEffectWhile("rl.clip", ("fixed",)), Since("0.1.0", 20),
    ] = Field(default=20, ge=1, description="Steps from one calibration of the clip to the next, from step 1 on.")
    kl_coef: Annotated[
        float, Kernels(off=(0.0,)), Elsewhere(same=("verl",)),
        Elsewhere(
            "verl: use_kl_loss; verl, slime, SkyRL: kl_loss_coef",
            ' (0: no reference model), with rl.kl_in = "loss"'),
        Elsewhere("TRL: beta; NeMo RL: reference_policy_kl_penalty", " (0: no reference model)"),
    ] = Field(default=0.0, ge=0, description="Weight of the KL penalty. 0: no reference model is loaded.")
    kl_estimator: Annotated[
        KLEstimator, NoEffectWhile("rl.kl_coef", (0,)),
        Needs(
            ("k1",), "rl.kl_in", ("reward",),
            "as a loss k1 has gradient grad log pi, whose mean is 0: noise, no pull towards the reference"),
        Elsewhere("verl: kl_loss_type kl_penalty", ' (low_var_kl is "k3", kl is "k1", mse is "k2")'),
        Elsewhere("slime: kl_loss_type; NeMo RL: reference_policy_kl_type; SkyRL: kl_estimator_type"),
    ] = Field(
        default="k3", description="Estimator of the KL to the reference model (k1 in the reward only: as a loss, its "
        "gradient is noise).",
    )
    kl_in: Annotated[
        KLIn, NoEffectWhile("rl.kl_coef", (0,)),
        Elsewhere("verl: use_kl_in_reward", ' = "reward", with rl.kl_coef above 0'),
    ] = Field(
        default="loss", description="Whether the KL penalty is a loss term or is subtracted from each token's reward.")
    critic: Annotated[Literal["separate", "shared"], CRITIC_ONLY, Kernels()] = Field(
        default="separate", description="The critic of gae: a model with its own weights, in the same precision "
        "flow, or a value head on the policy.",
    )
    critic_lr: Annotated[
        float, CRITIC_ONLY, NoEffectWhile("rl.critic", ("shared",)), Elsewhere("verl: critic.optim.lr"),
    ] = Field(default=1e-5, gt=0, le=1e30, description="Learning rate of a separate critic.")
    critic_warmup_steps: Annotated[
        int, CRITIC_ONLY, NoEffectWhile("rl.critic", ("shared",)), Elsewhere("verl: critic_warmup"),
    ] = Field(default=0, ge=0, description="Steps at the start in which only the (separate) critic learns.")
    value_coef: Annotated[float, CRITIC_ONLY, NoEffectWhile("rl.critic", ("separate",))] = Field(
        default=0.5, gt=0, description="Weight of the value loss of a shared critic.")
    value_clip: Annotated[float | None, CRITIC_ONLY, OFF_POLICY_ONLY, Elsewhere("verl: cliprange_value")] = Field(
        default=0.2, gt=0, description="Values may move by this much in a step before the loss stops them. none: off.")
    updates_per_step: Annotated[
        int,
        Elsewhere(
            "verl: ppo_mini_batch_size ppo_epochs; TRL: steps_per_generation num_iterations; NeMo RL: "
            "train_global_batch_size; slime: num_steps_per_rollout; SkyRL: policy_mini_batch_size",
            " (how many, not their size)"),
    ] = Field(default=1, ge=1, description="Optimizer updates per step. 1: on-policy, all ratios are 1.")
    noise_interval: Annotated[int, OFF_POLICY_ONLY, Since("0.1.0", 1), NoBits()] = Field(
        default=1, ge=0, description="Steps between measurements of how many tokens the clip cuts off because of "
        "rounding alone (policy/noise_*). Each takes one more forward pass of one micro-batch. 0: never "
        "(docs/ALGORITHMS.md).")
    rollout_is: Annotated[
        RolloutIS, Elsewhere(same=("verl",)),
        Elsewhere(
            "TRL: vllm_importance_sampling_*; NeMo RL: use_importance_sampling_correction "
            "truncated_importance_sampling_*; slime: use_tis tis_*; OpenRLHF: is_correction_*; SkyRL: "
            "off_policy_correction",
            " and rl.rollout_is_threshold (with jetrl's engine there is nothing to correct)"),
    ] = Field(
        default="none", description="Truncated importance weights between sampler and learner (for fp8_rollout, vllm, "
        "rollout.overcommit).")
    rollout_is_threshold: Annotated[
        float, NoEffectWhile("rl.rollout_is", ("none",)), Elsewhere(same=("verl",)),
    ] = Field(default=2.0, gt=0, description="Importance weights are capped at this value.")
    rollout_rs: Annotated[
        RolloutRS, Elsewhere(same=("verl",)),
        Elsewhere("slime: rs_*", ", rl.rollout_rs_threshold and rl.rollout_rs_lower"),
    ] = Field(default="none", description="Mask tokens or sequences where sampler and learner disagree too much.")
    rollout_rs_threshold: Annotated[
        float, NoEffectWhile("rl.rollout_rs", ("none",)), Elsewhere(same=("verl",)),
    ] = Field(default=2.0, gt=1, description="Ratios above this are masked.")
    rollout_rs_lower: Annotated[
        Annotated[float, Field(ge=0, lt=1)] | Literal["inverse"], NoEffectWhile("rl.rollout_rs", ("none",)),
    ] = Field(
        default="inverse", description="Ratios below this (less than 1) are masked. inverse: below 1 / "
        "rollout_rs_threshold. 0: none, a one-sided mask, as in TRL's default.",
    )
    rollout_veto: float | None = Field(
        default=None, gt=0, lt=1, description="Leave out an answer if the learner's probability of one of its tokens "
        "is below this fraction of the sampler's, such as 1e-4. none: off.")
    dynamic_sampling: Annotated[
        DynamicSampling,
        Elsewhere(
            "verl: filter_groups filter_groups.enable; NeMo RL: use_dynamic_sampling "
            "dynamic_sampling_max_gen_batches; slime: dynamic_sampling_filter_path; OpenRLHF: dynamic_filtering*; "
            "prime-rl: filter_zero_advantages; torchtitan: drop_zero_std_reward_groups"),
    ] = Field(
        default="off", description="What to do about groups whose answers all have the same rl.signal. drop: leave "
        "them out. refill: also sample further prompts, until prompts_per_step groups carry a signal. off: learn from "
        "all.",
    )
    signal: Annotated[
        Annotated[str, Field(min_length=1)], Since("0.1.0", "reward"),
        Elsewhere("verl: filter_groups.metric", " (what counts as all alike, the name of a reward function)"),
    ] = Field(
        default="reward", description="The number that decides whether a group carries a signal, and that evaluations "
        "report. reward: the weighted sum, before the overlong penalty. Or the name of one function of task.reward, "
        "as in metrics: its own score; a completion without that score is not learned from.",
    )
    max_refill_rounds: Annotated[
        int, NoEffectWhile("rl.dynamic_sampling", ("off", "drop")), Elsewhere("verl: max_num_gen_batches"),
    ] = Field(default=8, ge=1, description="Maximum rounds of refill in a step, after its first sampling.")
    overlong_buffer_len: Annotated[
        int,
        Elsewhere(
            "verl: overlong_buffer_cfg overlong_buffer_cfg.len overlong_buffer.len overlong_buffer; TRL: "
            "soft_punish_cache; NeMo RL: overlong_buffer_length"),
        Elsewhere("verl: overlong_buffer_cfg.enable overlong_buffer.enable", " (0: off)"),
    ] = Field(
        default=0, ge=0, description="Soft length penalty over the last tokens before max_response_length. 0: off.")
    overlong_penalty_factor: Annotated[
        float, NoEffectWhile("rl.overlong_buffer_len", (0,)),
        Elsewhere(
            "verl: overlong_buffer_cfg.penalty_factor overlong_buffer.penalty_factor; NeMo RL: "
            "overlong_buffer_penalty"),
    ] = Field(default=1.0, gt=0, description="Penalty at the end of that buffer.")
    mask_truncated: Annotated[
        bool, Elsewhere("NeMo RL: overlong_filtering; SkyRL: apply_overlong_filtering"),
        Elsewhere("TRL: mask_truncated_completions", ' (with rl.masked_sequences = "count")'),
    ] = Field(
        default=False, description="Leave answers that hit max_response_length, and conversations that hit a limit, "
        "out of the loss.",
    )
    masked_sequences: Annotated[MaskedSequences, NoEffectWhile("rl.mask_truncated", (False,))] = Field(
        default="drop", description="How answers that mask_truncated leaves out are counted. drop: in no mean. count: "
        "in the denominators of loss_agg, with loss 0, as in TRL.",
    )
    max_off_policy_steps: Annotated[
        int, NoEffectWhile("rollout.overcommit", (0.0,)), Since("0.3.0", 2),
    ] = Field(
        default=2, ge=0, description="With rollout.overcommit: the most updates that lie between the weights that drew "
        "a token and those that learn from it.")
    on_stale: Annotated[
        Literal["wait", "drop"], NoEffectWhile("rollout.overcommit", (0.0,)), Since("0.3.0", "wait"),
    ] = Field(
        default="wait", description="With rollout.overcommit: what becomes of groups that would get older than "
        "max_off_policy_steps. wait: the step goes on until they are complete, and learns from them. drop: they are "
        "left out, and never learned from: cheaper, and it prefers short answers.")
    entropy_coef: Annotated[float, Kernels(off=(0.0,)), Elsewhere("verl: entropy_coeff", same=("TRL",))] = Field(
        default=0.0, ge=0, description="Weight of an entropy bonus.")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        """The algorithm's values for the keys that are not given."""
        algo = data.get("algo", "grpo") if isinstance(data, Mapping) else None
        preset = PRESETS.get(algo) if isinstance(algo, str) else None  # a wrong type is reported by its field
        return dict(preset.values) | dict(data) if preset is not None else data

    def usual(self, name: str) -> Any:
        """As in `Section`, with the algorithm's own values."""
        return PRESETS[self.algo].values.get(name, super().usual(name))

    def problems(self) -> Iterator[Problem | str]:
        for name, field in type(self).model_fields.items():
            for need in marks(field, Needs):
                value, other = getattr(self, name), self._lookup(need.other.removeprefix("rl."))
                if value in need.values and other not in need.allowed and name not in self.without_effect():
                    known = ["a function of yours" if one is OWN else toml_literal(one) for one in need.allowed]
                    whose = f" (of rl.algo = {toml_literal(self.algo)})" if name in PRESETS[self.algo].values else ""
                    text = f"{toml_literal(value)}{whose} needs {need.other} = {' or '.join(known)}: {need.why}"
                    yield Problem(f"rl.{name}", f"{text}; change one of the two", (need.other,))
