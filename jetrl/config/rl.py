"""The section `[rl]`: an algorithm is a preset of its keys, and every key can be overridden."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jetrl.choices import (
    AdvEstimator,
    Algo,
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
from jetrl.config.base import Problem, Rule, Section
from jetrl.config.toml import toml_literal
from jetrl.presets import IGNORED, OWN, PRESETS, REQUIRED

OwnFunction = Annotated[str, Field(pattern=r"^[^:\s].*:[A-Za-z_]\w*$")]
"""A function of the user's: `module:function` or `path/to/file.py:function`."""


class RLConfig(Section):
    """The objective. `algo` sets the defaults of the other keys (docs/ALGORITHMS.md); each can be overridden."""

    section: ClassVar[str] = "rl"
    rules: ClassVar[tuple[Rule, ...]] = (
        *(Rule(ignored.keys, ignored.switch, ignored.off) for ignored in IGNORED),
        Rule(("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "value_clip"), "updates_per_step", (1,)),
        Rule(("critic", "critic_lr", "critic_warmup_steps"), "adv_estimator", ("grpo", "rloo", "reinforce_pp", OWN)),
        Rule(("value_coef",), "critic", ("separate",)),
        Rule(("critic_lr", "critic_warmup_steps"), "critic", ("shared",)),
        Rule(("rollout_is_threshold",), "rollout_is", ("none",)),
        Rule(("rollout_rs_threshold", "rollout_rs_lower"), "rollout_rs", ("none",)),
        Rule(("masked_sequences",), "mask_truncated", (False,)),
        Rule(("overlong_penalty_factor",), "overlong_buffer_len", (0,)),
    )
    algo: Algo = Field(
        default="grpo", description="The algorithm: a preset of the keys below.")
    adv_estimator: AdvEstimator | OwnFunction = Field(
        default="grpo", description="Advantages: relative to the group (grpo), to the others of the group (rloo), "
        "normalized over the step (reinforce_pp), from a critic (gae). Or yours, as path/to/file.py:function "
        "(docs/ALGORITHMS.md).",
    )
    norm_adv_by_std: bool = Field(
        default=True, description="Divide advantages by the standard deviation of the group (grpo) or step (gae).")
    adv_epsilon: float = Field(
        default=1e-6, ge=0, description="Added to the standard deviation that advantages are divided by (in verl 1e-6, "
        "in TRL 1e-4).",
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount of a token's later rewards.")
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="Lambda of generalized advantage estimation.")
    ratio: Ratio = Field(
        default="token", description="Policy ratio. token: of the token. sequence_mean: the geometric mean over its "
        "sequence (GSPO). sequence: the product over its sequence (RLOO).",
    )
    surrogate: Surrogate | OwnFunction = Field(
        default="clip", description="clip: PPO's clipped ratio. cispo: the ratio is clipped, the gradient is not. Or "
        "yours, as path/to/file.py:function (docs/ALGORITHMS.md).",
    )
    loss_agg: LossAgg | OwnFunction = Field(
        default="token_mean", description="token_mean: mean over all tokens. seq_mean_token_mean: mean over each "
        "sequence, then over sequences. seq_mean_token_sum: sum over each sequence, mean over sequences. "
        "seq_mean_token_sum_norm: that, divided by max_response_length. Or yours, as "
        "path/to/file.py:function (docs/ALGORITHMS.md).",
    )
    clip_ratio_low: float = Field(
        default=0.2, gt=0, le=1, description="The policy ratio is clipped from below at 1 - this.")
    clip_ratio_high: float = Field(default=0.2, gt=0, description="The policy ratio is clipped from above at 1 + this.")
    clip_ratio_c: float | None = Field(
        default=None, gt=1, description="Dual clip: bound on the ratio where the advantage is negative. none: off.")
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of the KL penalty. 0: no reference model is loaded.")
    kl_estimator: KLEstimator = Field(
        default="k3", description="Estimator of the KL to the reference model (k1 in the reward only: as a loss, its "
        "gradient is noise).",
    )
    kl_in: KLIn = Field(
        default="loss", description="Whether the KL penalty is a loss term or is subtracted from each token's reward.")
    critic: Literal["separate", "shared"] = Field(
        default="separate", description="The critic of gae: a model with its own weights, in the same precision "
        "flow, or a value head on the policy.",
    )
    critic_lr: float = Field(default=1e-5, gt=0, le=1e30, description="Learning rate of a separate critic.")
    critic_warmup_steps: int = Field(
        default=0, ge=0, description="Steps at the start in which only the (separate) critic learns.")
    value_coef: float = Field(default=0.5, gt=0, description="Weight of the value loss of a shared critic.")
    value_clip: float | None = Field(
        default=0.2, gt=0, description="Values may move by this much in a step before the loss stops them. none: off.")
    updates_per_step: int = Field(
        default=1, ge=1, description="Optimizer updates in a step. 1: on-policy, all ratios are 1.")
    rollout_is: RolloutIS = Field(
        default="none", description="Truncated importance weights between sampler and learner (for fp8_rollout, vllm).")
    rollout_is_threshold: float = Field(default=2.0, gt=0, description="Importance weights are capped at this value.")
    rollout_rs: RolloutRS = Field(
        default="none", description="Mask tokens or sequences where sampler and learner disagree too much.")
    rollout_rs_threshold: float = Field(
        default=2.0, gt=1, description="Ratios above this are masked.")
    rollout_rs_lower: Annotated[float, Field(ge=0, lt=1)] | Literal["inverse"] = Field(
        default="inverse", description="Ratios below this (less than 1) are masked. inverse: below 1 / "
        "rollout_rs_threshold. 0: none, a one-sided mask, as in TRL's default.",
    )
    rollout_veto: float | None = Field(
        default=None, gt=0, lt=1, description="Leave out an answer if the learner gives one of its tokens less than "
        "this times the sampler's probability, such as 1e-4. none: off.")
    dynamic_sampling: DynamicSampling = Field(
        default="off", description="Groups in which all of rl.signal are equal. drop: leave them out. "
        "refill: also sample further prompts, until prompts_per_step groups carry a signal. off: learn from all.",
    )
    signal: Annotated[str, Field(min_length=1)] = Field(
        default="reward", description="The number that says whether a group carries a signal, and that evaluations "
        "report. reward: the weighted sum, before the overlong penalty. Or the name of one function of task.reward, as "
        "in metrics: its own score, which a completion must have to be learned from.",
    )
    max_refill_rounds: int = Field(
        default=8, ge=1, description="Maximum rounds of refill in a step, after its first sampling.")
    overlong_buffer_len: int = Field(
        default=0, ge=0, description="Soft length penalty over the last tokens before max_response_length. 0: off.")
    overlong_penalty_factor: float = Field(default=1.0, gt=0, description="Penalty at the end of that buffer.")
    mask_truncated: bool = Field(
        default=False, description="Leave answers that hit max_response_length, and conversations that hit a limit, "
        "out of the loss.",
    )
    masked_sequences: MaskedSequences = Field(
        default="drop", description="What mask_truncated leaves out. drop: counts in no mean. count: stays in the "
        "denominators of loss_agg with loss 0, as in TRL.",
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of an entropy bonus.")

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
        for rule in REQUIRED:
            value, other = getattr(self, rule.key), getattr(self, rule.other)
            if value in rule.values and other not in rule.allowed and rule.key not in self.without_effect():
                known = ["a function of yours" if value is OWN else toml_literal(value) for value in rule.allowed]
                allowed = " or ".join(known)
                whose = f" (of rl.algo = {toml_literal(self.algo)})" if rule.key in PRESETS[self.algo].values else ""
                text = f"{toml_literal(value)}{whose} needs rl.{rule.other} = {allowed}: {rule.why}"
                yield Problem(f"rl.{rule.key}", f"{text}; change one of the two", (f"rl.{rule.other}",))
