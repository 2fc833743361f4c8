"""The section [train]: the optimizer, micro-batches, and what a GPU holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from jetrl.choices import Reduction, Schedule
from jetrl.config.base import Problem, Rule, Section
from jetrl.config.toml import toml_literal


class TrainConfig(Section):
    """The optimizer (AdamW) and its schedule."""

    section: ClassVar[str] = "train"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("min_lr_ratio",), "lr_schedule", ("constant",)), Rule(("reduction_lanes",), "reduction", ("fast",)),
    )
    steps: int = Field(
        default=100, ge=1, description="Training steps; each samples, scores and updates. Not with train.epochs.")
    epochs: float | None = Field(
        default=None, gt=0, le=1e6, description="Instead of train.steps, for task file: passes over the training rows. "
        "The run has ceil(epochs * rows / rollout.prompts_per_step) steps (docs/MODELS_AND_DATA.md).")
    lr: float = Field(default=1e-6, gt=0, le=1e30, description="Peak learning rate.")
    lr_schedule: Schedule = Field(default="constant", description="Learning rate after the warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="Last learning rate as a share of the peak.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    adam_betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="Decay of Adam's two moments.")
    adam_eps: float = Field(default=1e-8, gt=0, description="Added to Adam's denominator.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are scaled down to this global norm.")
    max_tokens_per_gpu: int = Field(default=8192, ge=1, description="Packed tokens in a micro-batch.")
    share_prompts: bool = Field(
        default=False,
        description="Compute a prompt once for all its samples in a micro-batch, in every pass of the update. "
        "Log-probs keep their bits; gradients are those of the same loss, rounded elsewhere. Not in the warm start "
        "(docs/MEMORY.md).")
    master_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Type of the optimizer's weights.")
    grad_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Type in which gradients are added up over micro-batches.")
    reduction: Reduction = Field(
        default="fast",
        description="Order in which gradients of micro-batches are added. fast: each GPU adds its own up, then the "
        "GPUs' sums are added; each GPU holds whole gradients. fixed: in an order that does not depend on the number "
        "of GPUs, which gives the same bits on any number of them.")
    reduction_lanes: int | None = Field(
        default=None, ge=1,
        description="For fixed: micro-batch i is added up in lane i % reduction_lanes, and then the lanes, which the "
        "GPUs share; each holds whole gradients, as with fast, and sends them once for each of its lanes. Not set: a "
        "lane for each micro-batch, which takes the least memory, and all gradients travel for each micro-batch.")
    optimizer_dtype: Literal["float32", "bfloat16", "8bit"] = Field(
        default="float32", description="Type of Adam's two moments. 8bit: torchao's AdamW8bit (the extra optim8).")
    offload_optimizer: bool = Field(
        default=False, description="Keep Adam's moments in host memory, streamed through the GPU. CPU: no change.")
    activation_checkpointing: bool = Field(
        default=False,
        description="Recompute layers in the backward pass, and transposed FP8 weights, to save memory.")
    lean_backward: bool = Field(
        default=True,
        description="Make the heads of attention and FP8 weights' transposes again in each backward pass instead of "
        "keeping them: 10 GiB less for Qwen3-8B and 8K tokens, about 1 % of the update's time. No bit depends on it.")
    compile_ahead: bool = Field(
        default=True, description="On a GPU, compile the run's kernels in several processes before it starts, once for "
        "each machine and kind of run. false: each when it is needed, as the run goes. No number depends on it.")
    collective_timeout: float = Field(
        default=600.0, ge=1, le=604_800, description="Seconds that a rank may wait for another one in an exchange "
        "before the run ends. One process: no meaning.")
    router_aux_loss_coef: float = Field(
        default=0.0, ge=0, le=1, description="Mixtures of experts (MoE): weight of the loss that evens the experts' "
        "load, within each sequence (1 where the load is even), in the warm start too; usually 1e-3 to 1e-2. 0: off.")
    router_z_loss_coef: float = Field(
        default=0.0, ge=0, le=1, description="Mixtures of experts (MoE): weight of the mean of logsumexp(router "
        "logits)^2, in the warm start too; usually 1e-3. 0: off.")
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
                "train.offload_optimizer", 'does not work with train.optimizer_dtype = "8bit"; take one of the two',
                ("train.optimizer_dtype",), either=True,
            )
        if self.epochs is not None and "steps" in self.model_fields_set:
            yield Problem(
                "train.steps", f"does not go together with train.epochs = {toml_literal(self.epochs)}, which says how "
                "many steps there are; take one of the two", ("train.epochs",), either=True,
            )
        if self.epochs is None and self.warmup_steps > self.steps:
            yield Problem(
                "train.warmup_steps", f"must be at most train.steps = {self.steps}, got {self.warmup_steps}; for a "
                "short run add train.warmup_steps=0", ("train.steps",),
            )

    def without_effect(self) -> set[str]:
        return super().without_effect() | ({"steps"} if self.epochs is not None else set())
