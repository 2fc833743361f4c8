"""The section [train]: the optimizer, micro-batches, and what a GPU holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from jetrl.choices import Reduction, Schedule
from jetrl.config.base import Problem, Section
from jetrl.config.markers import (
    Elsewhere,
    FirstWeights,
    Kernels,
    MayChange,
    NoBits,
    NoEffectWhile,
    SavesMemory,
    Since,
    WarmStart,
    halves,
)
from jetrl.config.toml import toml_literal

SFT_ONLY = NoEffectWhile("method", ("rl",))


class TrainConfig(Section):
    """The optimizer (AdamW) and its schedule."""

    section: ClassVar[str] = "train"
    steps: Annotated[
        int, MayChange("train.lr_schedule", "constant"),
        Elsewhere("TRL: max_steps; verl: total_training_steps; slime: num_rollout"),
    ] = Field(default=100, ge=1, description="Training steps; each samples, scores and updates. Not with train.epochs.")
    epochs: Annotated[
        float | None, MayChange("train.lr_schedule", "constant"), Since("0.1.0", None),
        Elsewhere("TRL: num_train_epochs; verl: total_epochs"),
    ] = Field(
        default=None, gt=0, le=1e6, description="Instead of train.steps, for task file: passes over the training rows. "
        "The run has ceil(epochs * rows / rollout.prompts_per_step) steps (docs/MODELS_AND_DATA.md).")
    batch_size: Annotated[int, SFT_ONLY, Since("0.3.0", 32)] = Field(
        default=32, ge=1, description="Rows of the data per step with method = \"sft\".")
    max_length: Annotated[
        int, SFT_ONLY, Since("0.3.0", 2048), Elsewhere("TRL: max_length", ' (with method = "sft", and nothing is cut)'),
    ] = Field(
        default=2048, ge=2, description="Longest conversation in tokens with method = \"sft\", chat template "
        "included. Longer ones are refused or left out (task.overlong_prompts), never cut.")
    lr: Annotated[float, Elsewhere("TRL: learning_rate", same=("verl",))] = Field(
        default=1e-6, gt=0, le=1e30, description="Peak learning rate.")
    lr_schedule: Annotated[
        Schedule, Elsewhere("TRL: lr_scheduler_type; verl: optim.lr_scheduler_type"),
        Elsewhere("verl: warmup_style", " (constant, linear, cosine)"),
    ] = Field(default="constant", description="Learning rate after the warm-up.")
    warmup_steps: Annotated[
        int, Elsewhere(same=("TRL",)),
        Elsewhere("TRL: warmup_ratio; verl: lr_warmup_steps lr_warmup_steps_ratio", " (steps, not a share)"),
    ] = Field(default=0, ge=0, description="Steps of linear warm-up.")
    min_lr_ratio: Annotated[
        float, NoEffectWhile("train.lr_schedule", ("constant",)), Elsewhere(same=("verl",)),
    ] = Field(default=0.0, ge=0, le=1, description="Last learning rate as a share of the peak.")
    weight_decay: Annotated[float, WarmStart(), Elsewhere(same=("TRL", "verl"))] = Field(
        default=0.0, ge=0, description="Decoupled weight decay.")
    adam_betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], WarmStart(),
        Elsewhere("TRL: adam_beta1 adam_beta2; verl: betas"),
    ] = Field(default=(0.9, 0.95), description="Decay of Adam's two moments.")
    adam_eps: Annotated[float, WarmStart(), Elsewhere("TRL: adam_epsilon")] = Field(
        default=1e-8, gt=0, description="Added to Adam's denominator.")
    max_grad_norm: Annotated[
        float, WarmStart(), Elsewhere("slime: clip_grad; verl: grad_clip clip_grad", same=("TRL",)),
    ] = Field(default=1.0, gt=0, description="Gradients are scaled down to this global norm.")
    max_tokens_per_gpu: Annotated[
        int, WarmStart(), Kernels(), SavesMemory(6, lambda c: halves(c.train.max_tokens_per_gpu, 5, c.longest)),
        Elsewhere("verl: ppo_max_token_len_per_gpu; NeMo RL: train_mb_tokens; SkyRL: max_tokens_per_microbatch"),
        Elsewhere(
            "TRL: per_device_eval_batch_size; verl: ppo_micro_batch_size_per_gpu ppo_micro_batch_size "
            "log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu",
            " (tokens, not sequences)"),
    ] = Field(default=8192, ge=1, description="Packed tokens in a micro-batch.")
    share_prompts: Annotated[bool, Kernels()] = Field(
        default=False,
        description="Compute a prompt once for all its samples in a micro-batch, in every pass of the update. "
        "Log-probs keep their bits; gradients are those of the same loss, rounded elsewhere. Not in the warm start "
        "(docs/MEMORY.md).")
    master_dtype: Annotated[
        Literal["float32", "bfloat16"], FirstWeights(), Kernels(),
        SavesMemory(11, {"float32": "bfloat16"}, also=(("train.grad_dtype", "bfloat16"),)),
        Elsewhere("TRL: dtype torch_dtype; verl: fsdp_config.model_dtype model_dtype", " and train.optimizer_dtype"),
    ] = Field(default="float32", description="Data type of the master weights.")
    grad_dtype: Annotated[
        Literal["float32", "bfloat16"], Kernels(),
        SavesMemory(12, {"float32": "bfloat16"}, unless=("train.master_dtype", "float32")),
    ] = Field(default="float32", description="Type in which gradients are added up over micro-batches.")
    reduction: Annotated[Reduction, Kernels(), SavesMemory(3, {"fast": "fixed"})] = Field(
        default="fast",
        description="Order in which gradients of micro-batches are added. fast: each GPU adds up its own, then these "
        "sums are added; each GPU holds whole gradients. fixed: an order that does not depend on the number of GPUs, "
        "so any number of them gives the same bits.")
    reduction_lanes: Annotated[int | None, NoEffectWhile("train.reduction", ("fast",))] = Field(
        default=None, ge=1,
        description="For fixed: micro-batch i is added up in lane i % reduction_lanes, then the lanes are added. The "
        "GPUs share the lanes; each holds whole gradients, as with fast, and sends them once for each of its lanes. "
        "none: a lane for each micro-batch, which takes the least memory, but sends all gradients for each "
        "micro-batch.")
    optimizer_dtype: Annotated[
        Literal["float32", "bfloat16", "8bit"], Kernels(), SavesMemory(7, {"float32": "bfloat16"}),
        Elsewhere("TRL: optim; verl: optimizer", ' (the optimizer is AdamW, "8bit" is torchao\'s)'),
    ] = Field(
        default="float32", description="Type of Adam's two moments. 8bit: torchao's AdamW8bit (the extra optim8).")
    offload_optimizer: Annotated[
        bool, MayChange("train.master_dtype", "bfloat16"), MayChange("train.optimizer_dtype", "bfloat16"), Kernels(),
        SavesMemory(2, {False: True}, unless=("train.optimizer_dtype", "8bit")),
        Elsewhere("verl: optimizer_offload; slime: optimizer_cpu_offload", " (the moments only)"),
    ] = Field(
        default=False, description="Keep Adam's moments in host memory, streamed through the GPU. No effect on a CPU.")
    activation_checkpointing: Annotated[
        bool, Kernels(), SavesMemory(5, {False: True}),
        Elsewhere("TRL: gradient_checkpointing gradient_checkpointing_kwargs; verl: enable_gradient_checkpointing"),
    ] = Field(
        default=False,
        description="To save memory, recompute layers and transposed FP8 weights in the backward pass.")
    lean_backward: Annotated[
        bool, SavesMemory(4, {False: True}, unless=("train.activation_checkpointing", True)),
    ] = Field(
        default=True,
        description="Recompute attention heads and transposed FP8 weights in each backward pass instead of "
        "keeping them: 10 GiB less for Qwen3-8B and 8K tokens, about 1 % of the update's time. No bit depends on it.")
    compile_ahead: Annotated[bool, NoBits()] = Field(
        default=True, description="On a GPU, compile the run's kernels in several processes before it starts, once for "
        "each machine and kind of run. false: each kernel when it is first needed. No number depends on it.")
    collective_timeout: Annotated[float, NoBits(), Elsewhere("TRL: ddp_timeout")] = Field(
        default=600.0, ge=1, le=604_800, description="Seconds that a rank may wait for another one in an exchange "
        "before the run ends. No effect with one process.")
    router_aux_loss_coef: Annotated[float, WarmStart(), Elsewhere(same=("TRL",))] = Field(
        default=0.0, ge=0, le=1, description="Mixtures of experts (MoE): weight of the loss that balances the "
        "experts' load within each sequence (1 if the load is even), also in the warm start; usually 1e-3 to 1e-2. 0: "
        "off.")
    router_z_loss_coef: Annotated[float, WarmStart()] = Field(
        default=0.0, ge=0, le=1, description="Mixtures of experts (MoE): weight of the mean of logsumexp(router "
        "logits)^2, also in the warm start; usually 1e-3. 0: off.")
    freeze_router: Annotated[
        bool, Since("0.3.0", False), Kernels(), Elsewhere("NeMo RL: freeze_moe_router"),
    ] = Field(
        default=False, description="Mixtures of experts (MoE): the policy's routers stay what they are, also in the "
        "warm start. They have no masters, gradients or moments. (A router's bias never learns.)")
    compare_routing: bool = Field(
        default=False, description="Mixtures of experts (MoE): log parity/frac_routing_different, the share of routers "
        "that choose other experts in the rollout's flow than in training's. Costs a forward pass in each step.")

    def problems(self) -> Iterator[Problem | str]:
        if self.grad_dtype == "bfloat16" and self.master_dtype == "float32":
            yield Problem(
                "train.grad_dtype", 'bfloat16 is for train.master_dtype = "bfloat16"; FP32 masters have FP32 gradients',
                ("train.master_dtype",), void=True,
            )
        if self.offload_optimizer and self.optimizer_dtype == "8bit":
            yield Problem(
                "train.offload_optimizer", 'does not work with train.optimizer_dtype = "8bit"; use one of the two',
                ("train.optimizer_dtype",), either=True,
            )
        for key, value in (("aux", self.router_aux_loss_coef), ("z", self.router_z_loss_coef)):
            if self.freeze_router and value:
                yield Problem(
                    "train.freeze_router", f"does not go together with train.router_{key}_loss_coef = {value:g}, a "
                    "loss for routers that learn; use one of the two", (f"train.router_{key}_loss_coef",), either=True,
                )
        if self.epochs is not None and "steps" in self.model_fields_set:
            yield Problem(
                "train.steps", f"does not go together with train.epochs = {toml_literal(self.epochs)}, which says how "
                "many steps there are; use one of the two", ("train.epochs",), either=True,
            )
        if self.epochs is None and self.warmup_steps > self.steps:
            yield Problem(
                "train.warmup_steps", f"must be at most train.steps = {self.steps}, got {self.warmup_steps}; for a "
                "short run add train.warmup_steps=0", ("train.steps",),
            )

    def without_effect(self) -> set[str]:
        return super().without_effect() | ({"steps"} if self.epochs is not None else set())
