"""The config tree: every section and key of a recipe, with its type, default, meaning and the rules between keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jetrl.choices import CacheKind, Precision, ScaleKind, Schedule, WgradKind
from jetrl.config.base import NAME, Problem, Section
from jetrl.config.lora import LoraConfig
from jetrl.config.markers import (
    Elsewhere,
    FirstWeights,
    GoesWith,
    Holds,
    Kernels,
    MayChange,
    NoBits,
    NoEffectWhile,
    PartOf,
    SavesMemory,
    Since,
    WarmStart,
)
from jetrl.config.rl import RLConfig
from jetrl.config.rollout import EnvironmentConfig as EnvironmentConfig
from jetrl.config.rollout import RolloutConfig
from jetrl.config.supervised import of_rl_alone, supervised_problems
from jetrl.config.task import TaskConfig as TaskConfig
from jetrl.config.teacher import TeacherConfig, teacher_problems
from jetrl.config.toml import toml_literal
from jetrl.config.train import TrainConfig
from jetrl.config.vllm import VLLMConfig, vllm_problems

WARM_START_ONLY = NoEffectWhile("sft.steps", (0,))
NAMED_RUNS_ONLY = NoEffectWhile("track.backends", ((), ("tensorboard",)))


class ModelConfig(Section):
    """Which model is trained: a Hugging Face folder or name, or an architecture with random weights."""

    section: ClassVar[str] = "model"
    path: Annotated[
        str | None, Holds("file"),
        Elsewhere("TRL: model_name_or_path; NeMo RL: model_name; slime: hf_checkpoint", same=("verl",)),
    ] = Field(
        default=None, description="Hugging Face folder with config.json, safetensors and a tokenizer; or a name on "
        "the hub, such as Qwen/Qwen3-0.6B. If a folder of that name exists, it wins.")
    revision: Annotated[
        str | None, NoEffectWhile("model.path", (None,), instead=("model.arch",)), PartOf("model.path"),
        Elsewhere("TRL: model_revision"),
    ] = Field(default=None, min_length=1, description="Branch, tag or commit of a model from the hub. none: main.")
    base_revision: Annotated[
        str | None, NoEffectWhile("model.path", (None,), instead=("model.arch",)), NoEffectWhile("lora.rank", (None,)),
        PartOf("model.path"), MayChange(), Since("0.3.0", None),
    ] = Field(
        default=None, min_length=1, description="Branch, tag or commit of the base of the adapters in model.path, "
        "where that is on the hub. none: what the adapters say, or main.")
    arch: dict[str, Any] | None = Field(
        default=None, min_length=1, description="Keys of a Hugging Face config.json (model_type, hidden_size, ...) for "
        "a model with random weights. Without vocab_size, the tokenizer gives it.",
    )
    tokenizer: Annotated[
        str | None, GoesWith("model.arch"), Holds("file"), WarmStart(),
        Elsewhere("verl: tokenizer_path data.tokenizer"),
    ] = Field(
        default=None, description="Tokenizer folder or hub name, or builtin:arithmetic. none: the tokenizer of "
        "model.path.")
    tokenizer_revision: Annotated[
        str | None, NoEffectWhile("model.tokenizer", (None,)), PartOf("model.tokenizer"), WarmStart(),
    ] = Field(default=None, min_length=1, description="Branch, tag or commit of a tokenizer from the hub. none: main.")
    init_seed: Annotated[int, NoEffectWhile("model.arch", (None,), instead=("model.path",))] = Field(
        default=0, ge=0, description="Seed of the random weights of model.arch.")

    def problems(self) -> Iterator[Problem | str]:
        if (self.path is None) == (self.arch is None):
            found = "neither is set" if self.path is None else "both are set"
            yield Problem(
                "model.path", "needs exactly one of model.path (a folder, or a name on the hub) and model.arch (random "
                f"weights); {found}", ("model.arch",), either=True,
            )
        if self.arch is not None and self.tokenizer is None:
            yield 'model.tokenizer: is needed with model.arch; set a tokenizer folder or "builtin:arithmetic"'


class QuantConfig(Section):
    """Details of the FP8 recipe; the blocks are 128x128 for weights and 1x128 for activations and gradients."""

    section: ClassVar[str] = "quant"
    weight_scale: Annotated[ScaleKind, NoEffectWhile("precision", ("w8a16",))] = Field(
        default="fp32", description="Scales of weight blocks: any FP32 number, or powers of two.")
    activation_scale: Annotated[ScaleKind, NoEffectWhile("precision", ("w8a16",))] = Field(
        default="fp32", description="Scales of activation and gradient blocks: any FP32 number, or powers of two.")
    num_first_layers_in_bf16: int = Field(
        default=0, ge=0, description="Layers at the bottom that stay in BF16, on both sides.")
    num_last_layers_in_bf16: int = Field(
        default=0, ge=0, description="Layers at the top that stay in BF16, on both sides.")
    wgrad: Annotated[WgradKind, NoEffectWhile("precision", ("fp8_rollout", "w8a16"))] = Field(
        default="tile", description="Scales of the activations that weight gradients read (dense layers; experts "
        "always use row). row: one for each feature and 128 tokens. tile: one for each 128x128 tile, as in weights. "
        "On Hopper, tile is the faster GEMM; SwiGLU's output is recomputed, and a micro-batch's weight gradient is "
        "rounded to BF16 before it is added.")
    saved_gate_up: Annotated[
        CacheKind, NoEffectWhile("quant.wgrad", ("row",)), NoEffectWhile("precision", ("fp8_rollout", "w8a16")),
    ] = Field(
        default="bf16", description="Format in which SwiGLU's input is kept for the backward pass (dense layers; fp8 "
        "is refused if all layers have experts). fp8: rounded like an activation, which saves a quarter of the memory "
        "that a layer keeps for the backward pass.")
    kv_cache: Annotated[
        CacheKind, SavesMemory(10, {"bf16": "fp8"}, unless=("precision", "bf16")),
        Elsewhere("vLLM, SGLang: kv_cache_dtype"),
    ] = Field(default="bf16", description="Format of keys and values in the rollout's cache. Training rounds them the "
        "same way.")


class SFTConfig(Section):
    """Supervised warm start on the task's worked solutions, before RL."""

    section: ClassVar[str] = "sft"
    steps: Annotated[int, Kernels(off=(0,))] = Field(
        default=0, ge=0, description="Optimizer steps of the warm start. 0: no warm start.")
    batch_size: Annotated[int, WARM_START_ONLY] = Field(default=32, ge=1, description="Sequences per step.")
    lr: Annotated[float, WARM_START_ONLY] = Field(default=1e-3, gt=0, le=1e30, description="Peak learning rate.")
    warmup_steps: Annotated[int, WARM_START_ONLY] = Field(default=0, ge=0, description="Steps of linear warm-up.")
    lr_schedule: Annotated[Schedule, WARM_START_ONLY] = Field(
        default="constant", description="Learning rate after the warm-up.")
    num_examples: Annotated[int | None, WARM_START_ONLY] = Field(
        default=None, ge=1, description="Distinct examples to draw from. none: as many as needed.")
    cache_dir: Annotated[str, WARM_START_ONLY, MayChange(), Holds("place"), WarmStart(reads=False)] = Field(
        default="~/.cache/jetrl/sft", description="Where warm-started weights are kept for the next run.")

    def problems(self) -> Iterator[Problem | str]:
        if 0 < self.steps < self.warmup_steps:
            yield Problem(
                "sft.warmup_steps", f"must be at most sft.steps = {self.steps}, got {self.warmup_steps}; for a short "
                "warm start add sft.warmup_steps=0", ("sft.steps",),
            )


class EvalConfig(Section):
    """Evaluation on held-out problems; their number is task.num_eval."""

    section: ClassVar[str] = "eval"
    eval_interval: Annotated[
        int, Elsewhere("verl: test_freq; TRL: eval_steps; NeMo RL: val_period"),
        Elsewhere("TRL: eval_strategy do_eval", " (10 by default, 0: never)"),
    ] = Field(default=10, ge=0, description="Steps between evaluations. 0: never.")
    temperature: Annotated[
        float, Elsewhere("verl: val_kwargs.temperature"),
        Elsewhere("verl: val_kwargs.do_sample", " (0: greedy)"),
        Elsewhere("verl: val_kwargs", ", eval.num_samples and eval.max_response_length"),
    ] = Field(default=0.0, ge=0, description="Sampling temperature. 0: greedy.")
    num_samples: Annotated[
        int, Elsewhere("slime: n_samples_per_eval_prompt; TRL: num_generations_eval; verl: val_kwargs.n"),
    ] = Field(default=1, ge=1, description="Completions per problem: the k of avg@k and pass@k.")
    max_response_length: int | None = Field(
        default=None, ge=1, description="Longest completion in tokens. none: rollout.max_response_length.")
    pass_reward: Annotated[float, NoBits()] = Field(
        default=1.0, ge=-1e30, le=1e30, description="pass@k counts a problem if the rl.signal of one of its "
        "completions reaches this (minus 0.001, for rounding).")
    num_samples_kept: Annotated[int, NoBits()] = Field(
        default=32, ge=0, description="How many completions of each evaluation to write to eval_samples.jsonl, spread "
        "evenly over the problems and always from the same ones. 0: none.")

    def problems(self) -> Iterator[Problem | str]:
        if self.num_samples > 1 and self.temperature == 0:
            yield Problem(
                "eval.num_samples", f"{self.num_samples} greedy samples of a problem (eval.temperature = 0) are all "
                "the same; set eval.temperature above 0, or 1 sample", ("eval.temperature",), void=True,
            )


class CheckpointConfig(Section):
    """Saving and resuming."""

    section: ClassVar[str] = "checkpoint"
    save_interval: Annotated[
        int, Elsewhere("verl: save_freq; TRL: save_steps; NeMo RL: save_period; SkyRL: ckpt_interval"),
        Elsewhere("TRL: save_strategy", " (0: never)"),
    ] = Field(default=10, ge=0, description="Steps between checkpoints. 0: never.")
    keep: Annotated[
        int, NoEffectWhile("checkpoint.save_interval", (0,)),
        Elsewhere("TRL: save_total_limit; verl: max_actor_ckpt_to_keep max_critic_ckpt_to_keep"),
    ] = Field(default=2, ge=1, description="Newest checkpoints to keep.")
    background: Annotated[
        Literal["auto", "on", "off"], NoEffectWhile("checkpoint.save_interval", (0,)), NoBits(),
        Elsewhere("verl: async_save"),
    ] = Field(
        default="auto", description="Whether a checkpoint is written while the run goes on, from a copy in host "
        "memory. auto: where that copy fits. on: refused where it does not. off: the run waits.")
    resume: Annotated[
        str, Holds("file"),
        Elsewhere("verl, SkyRL: resume_mode; verl: resume_from_path; TRL: resume_from_checkpoint; slime: load"),
    ] = Field(
        default="never", min_length=1, description="never, auto (the run's newest checkpoint, if any) or a folder.")
    replay_steps: Annotated[int, NoBits(), Since("0.3.0", 0)] = Field(
        default=100, ge=0, description="Newest steps whose tokens, log-probs and digests are kept for `jetrl replay` "
        "and `jetrl bisect` (docs/REPLAY.md). 0: none.")
    allow_changed_data: bool = Field(
        default=False, description="Resume even if a local data file or the tokenizer has changed.")


class TrackConfig(Section):
    """Experiment trackers, in addition to metrics.jsonl and report.html, which are always written."""

    section: ClassVar[str] = "track"
    backends: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...], Elsewhere("TRL: report_to; verl: logger"),
    ] = Field(
        default=(), description="Trackers that also receive the metrics (docs/TRACKING.md). Checked before the model "
        "is loaded; one that fails later does not end the run.")
    project: Annotated[
        str | None, NAMED_RUNS_ONLY, Since("0.1.0", None), Elsewhere("verl: project_name; TRL: project"),
    ] = Field(
        default=None, description="Project (wandb, trackio) or experiment (mlflow). Default: the tracker's own "
        'variable (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME), else "jetrl".')
    entity: Annotated[str | None, NoEffectWhile("track.backends", ((),)), Since("0.1.0", None)] = Field(
        default=None, description="wandb's user or team. Default: WANDB_ENTITY, else that of the login.")
    group: Annotated[str | None, NAMED_RUNS_ONLY, Since("0.1.0", None)] = Field(
        default=None, description="Group of the run (wandb, trackio), or its tag `group` (mlflow). Default: "
        "WANDB_RUN_GROUP, else none.")
    tags: Annotated[tuple[str, ...], NAMED_RUNS_ONLY, Since("0.1.0", [])] = Field(
        default=(), description="Tags of the run; `key=value` for mlflow. Default: WANDB_TAGS, else none.")
    run_name: Annotated[str | None, NAMED_RUNS_ONLY, Since("0.1.0", None)] = Field(
        default=None, description="The run's name in the tracker. Default: WANDB_NAME or MLFLOW_RUN_NAME, else the "
        "name of the run folder.")
    num_samples: Annotated[int, NoEffectWhile("track.backends", ((),)), Since("0.1.0", 8)] = Field(
        default=8, ge=0, description="Completions per step and per evaluation that trackers get as a table. 0: none.")

    def problems(self) -> Iterator[Problem | str]:
        if len(set(self.backends)) < len(self.backends):
            yield f"track.backends: names a tracker twice: {toml_literal(self.backends)}"
        if self.entity is not None and self.backends and "wandb" not in self.backends:
            yield "track.entity: only wandb has entities; name it in track.backends, or remove this key"


def dapo_buffer_len(max_response_length: int) -> int:
    """DAPO's soft length penalty covers a fifth of the longest response (4,096 of 20,480 in the paper)."""
    return max_response_length // 5


class Config(Section):
    """The run as a whole. Once `resolve` has run, `device` and `kernels` are no longer "auto"."""

    section: ClassVar[str] = ""
    name: Annotated[
        str,
        Elsewhere(
            "TRL: run_name; verl: experiment_name",
            " (of the run and its folder, for the tracker alone track.run_name)"),
    ] = Field(pattern=NAME, description="Name of the run and of its folder.")
    method: Annotated[Literal["rl", "sft"], Kernels(), Since("0.3.0", "rl")] = Field(
        default="rl", description="rl: the policy samples, and rewards or a teacher judge. sft: supervised fine-tuning "
        "on given answers, a run of its own without sampling (docs/SFT.md).")
    seed: Annotated[int, WarmStart(), Elsewhere(same=("TRL", "verl"))] = Field(
        default=0, ge=0, description="Seed of data and sampling.")
    precision: Annotated[
        Precision, Kernels(),
        Elsewhere(
            "verl, SkyRL: quantization; NeMo RL: fp8_cfg; slime: fp8_format fp8_recipe",
            " (one key for both sides)"),
        Elsewhere("TRL: bf16 fp16; verl: dtype", ' ("bf16", and by default "fp8")'),
    ] = Field(
        default="fp8", description="bf16 or fp8 on both sides; w8a16: FP8 weights with scales of powers of two and "
        "BF16 activations, on both sides; fp8_rollout: FP8 sampling, BF16 training.")
    device: Annotated[
        Literal["auto", "cpu", "cuda"], FirstWeights(), Elsewhere(same=("verl",)),
        Elsewhere("TRL: use_cpu no_cuda", ' = "cpu"'),
    ] = Field(default="auto", description="auto: the GPU if there is one.")
    kernels: Annotated[Literal["auto", "reference", "hopper", "hopper_scaled_mm", "triton"], Kernels()] = Field(
        default="auto", description="auto: reference on a CPU, hopper on a Hopper GPU, triton on others (sm_80 and "
        "later). hopper_scaled_mm: torch's FP8 GEMMs.")
    output_dir: Annotated[
        str, MayChange(), Holds("place"), Elsewhere("verl: default_local_dir", same=("TRL",)),
    ] = Field(default="runs", min_length=1, description="Parent of the run folder.")
    num_threads: Annotated[int | None, FirstWeights()] = Field(
        default=None, ge=1, le=1024, description="CPU threads. none: torch's own choice.")
    model: Annotated[ModelConfig, FirstWeights()] = Field(description="The model.")
    quant: Annotated[QuantConfig, NoEffectWhile("precision", ("bf16",)), Kernels()] = Field(
        default=QuantConfig(), description="FP8 details.")
    lora: LoraConfig = Field(default=LoraConfig(), description="Adapters.")
    task: Annotated[TaskConfig, WarmStart()] = Field(description="Problems and rewards.")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="Sampling.")
    vllm: Annotated[VLLMConfig, NoEffectWhile("rollout.engine", ("jetrl",))] = Field(
        default=VLLMConfig(), description="vLLM as the rollout's engine.")
    environment: EnvironmentConfig = Field(
        default=EnvironmentConfig(), description="Conversations.")
    rl: RLConfig = Field(default=RLConfig(), description="Objective.")
    teacher: TeacherConfig = Field(default=TeacherConfig(), description="Distillation.")
    train: TrainConfig = Field(default=TrainConfig(), description="Optimizer.")
    sft: Annotated[SFTConfig, WarmStart()] = Field(default=SFTConfig(), description="Warm start.")
    eval: Annotated[EvalConfig, MayChange()] = Field(default=EvalConfig(), description="Evaluation.")
    checkpoint: Annotated[CheckpointConfig, MayChange()] = Field(
        default=CheckpointConfig(), description="Saving and resuming.")
    track: Annotated[TrackConfig, MayChange()] = Field(default=TrackConfig(), description="Trackers.")

    @property
    def supervised(self) -> bool:
        """Whether this is a run on given answers, which samples nothing."""
        return self.method == "sft"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: of a prompt with its response, or of a given conversation."""
        return self.train.max_length if self.supervised else (
            self.task.max_prompt_length + self.rollout.max_response_length
        )

    @property
    def longest_in_words(self) -> str:
        """The keys that make `longest`."""
        return "train.max_length" if self.supervised else "task.max_prompt_length + rollout.max_response_length"

    @property
    def num_given(self) -> int:
        """How many of a step's prompts have a given answer in place of the policy's own (distillation)."""
        return round(self.teacher.given_fraction * self.rollout.prompts_per_step)

    @property
    def per_step(self) -> tuple[int, str]:
        """How many rows of the data a step takes, and the key that says so."""
        if self.supervised:
            return self.train.batch_size, "train.batch_size"
        return self.rollout.prompts_per_step, "rollout.prompts_per_step"

    @property
    def most_behind(self) -> int:
        """The most updates between the weights that drew a token and those that learn from it."""
        return self.rl.max_off_policy_steps if self.rollout.overcommit else 0

    @model_validator(mode="before")
    @classmethod
    def _dapo_buffer(cls, data: Any) -> Any:
        """DAPO's soft length penalty over the last tokens, unless the user sets one."""
        rl, rollout = (data.get(k) if isinstance(data, Mapping) else None for k in ("rl", "rollout"))
        if not isinstance(rl, Mapping) or rl.get("algo") != "dapo" or "overlong_buffer_len" in rl:
            return data
        longest = rollout.get("max_response_length") if isinstance(rollout, Mapping) else None
        longest = RolloutConfig.model_fields["max_response_length"].default if longest is None else longest
        buffer = dapo_buffer_len(longest) if isinstance(longest, int) else 0  # a wrong type is reported at its own key
        return {**data, "rl": {**rl, "overlong_buffer_len": buffer}}

    def without_effect(self) -> set[str]:
        return super().without_effect() | (set(of_rl_alone(self)) if self.supervised else set())

    def problems(self) -> Iterator[Problem | str]:
        rollout = self.rollout
        yield from vllm_problems(self)
        yield from self._size_problems()
        if rollout.overcommit:
            yield from self._carry_problems()
        yield from self._lora_problems()
        yield from teacher_problems(self)
        yield from supervised_problems(self)
        if self.rl.adv_estimator in ("grpo", "rloo") and rollout.group_size < 2:
            yield (f'rollout.group_size: rl.adv_estimator = "{self.rl.adv_estimator}" needs at least 2 completions of '
                   f"a prompt, got {rollout.group_size}; rl.algo=reinforce_pp and rl.algo=ppo need no groups")
        if self.rl.dynamic_sampling != "off" and rollout.group_size < 2:
            yield Problem(
                "rl.dynamic_sampling", "a group of one (rollout.group_size = 1) never carries a signal; take "
                "larger groups, or \"off\"", ("rollout.group_size",), void=True,
            )
        if self.environment.name is not None and self.task.overlong_prompts != "error":
            yield Problem(
                "task.overlong_prompts", "has no effect with an environment, which makes the prompts; remove this key "
                "or environment.name", ("environment.name",), void=True,
            )
        if self.task.name == "environment" and self.environment.name is None:
            yield 'environment.name: is needed with task.name = "environment"; set the class that makes the problems'
        if self.task.name == "environment" and self.environment.name == "tools":
            yield ('task.name: "environment" has no prompts, and environment.name = "tools" makes none; name a task '
                   "that has problems, such as file")
        if self.train.epochs is not None and self.task.name != "file":
            yield (f"train.epochs: is for problems from data (task.name = \"file\"); those of task "
                   f"{toml_literal(self.task.name)} are made without end. Set train.steps instead")
        if self.train.epochs is None and self.rl.critic_warmup_steps >= self.train.steps:
            yield Problem(
                "rl.critic_warmup_steps", f"must be below train.steps = {self.train.steps}, or the policy never "
                f"learns, got {self.rl.critic_warmup_steps}; lower it, or raise train.steps", ("train.steps",),
            )
        if self.rl.updates_per_step > rollout.prompts_per_step:
            yield Problem(
                "rl.updates_per_step", f"must be at most rollout.prompts_per_step = {rollout.prompts_per_step}, "
                f"because groups are not split, got {self.rl.updates_per_step}; lower it, or raise the other",
                ("rollout.prompts_per_step",),
            )

    def _carry_problems(self) -> Iterator[Problem | str]:
        """What does not go together with answers that are carried over from one step to the next."""
        key, rollout, rl = "rollout.overcommit", self.rollout, self.rl
        if rollout.engine != "jetrl":
            yield Problem(
                key, f"rollout.engine = {toml_literal(rollout.engine)} cannot suspend answers and let them go on with "
                'other weights; set rollout.engine = "jetrl", or rollout.overcommit = 0', ("rollout.engine",),
            )
        if self.environment.name in ("command", "verifiers"):
            yield Problem(
                key, f'the programs of environment.name = "{self.environment.name}" cannot be brought back to where a '
                "step is cut: what they have done is out of our hands. Set rollout.overcommit = 0, or write a class "
                "with reset and step", ("environment.name",),
            )
        if rollout.logprobs == "sampled" and rollout.truncates:
            yield Problem(
                key, "the learner does not know what older weights kept of a truncated distribution; set "
                'rollout.logprobs = "full", remove top_p, top_k and min_p, or set rollout.overcommit = 0',
                ("rollout.logprobs", "rollout.top_p", "rollout.top_k", "rollout.min_p"),
            )
        if rl.rollout_is == "none":
            yield Problem(
                key, "tokens of older weights need importance weights; set rl.rollout_is = \"token\" (truncated at "
                "rl.rollout_is_threshold), or rollout.overcommit = 0", ("rl.rollout_is",),
            )
        if rl.max_off_policy_steps < 1:
            yield Problem(
                "rl.max_off_policy_steps", f"= 0 leaves nothing to carry over, and rollout.overcommit = "
                f"{rollout.overcommit:g}: what is under way after a step is a step older. Set it to 1 or more, or "
                "rollout.overcommit = 0", (key,),
            )

    def _lora_problems(self) -> Iterator[Problem | str]:
        """What does not go with adapters."""
        if self.lora.rank is None:
            return
        if self.rollout.engine != "jetrl":
            yield Problem(
                "lora.rank", f"adapters are sampled from by jetrl's own engine only, and rollout.engine = "
                f"{toml_literal(self.rollout.engine)}; set rollout.engine=jetrl, or remove this key",
                ("rollout.engine",),
            )
        if self.train.freeze_router:
            yield Problem(
                "train.freeze_router", f"has no effect with lora.rank = {self.lora.rank}: adapters alone are trained. "
                "Remove it", ("lora.rank",), void=True,
            )
        if self.rl.adv_estimator == "gae" and self.rl.critic != "shared":
            yield Problem(
                "lora.rank", 'does not go with a critic of its own, which is trained whole; set rl.critic=shared, '
                "or an algorithm without a critic", ("rl.critic", "rl.algo"),
            )

    def _size_problems(self) -> Iterator[Problem | str]:
        """Sizes that do not hold one prompt and one response."""
        rollout, longest = self.rollout, self.longest
        sizes = f"{self.longest_in_words} = {longest}"
        if self.rl.overlong_buffer_len > rollout.max_response_length:
            yield Problem(
                "rl.overlong_buffer_len", f"must be at most rollout.max_response_length = "
                f"{rollout.max_response_length}, got {self.rl.overlong_buffer_len}; lower it, or raise the other",
                ("rollout.max_response_length",),
            )
        lengths = ("rollout.max_response_length", "task.max_prompt_length")
        if self.train.max_tokens_per_gpu < longest:  # the budget of a GPU's memory: never changed for the user
            yield (f"train.max_tokens_per_gpu: must be at least {sizes}, got {self.train.max_tokens_per_gpu}; set "
                   f"train.max_tokens_per_gpu={longest} or more, or allow shorter sequences")
        if rollout.kv_cache_tokens is not None and rollout.kv_cache_tokens < longest:
            yield Problem(
                "rollout.kv_cache_tokens", f"must be at least {sizes}, got {rollout.kv_cache_tokens}; leave it out to "
                "have what is needed", lengths,
            )
        of_eval = self.task.max_prompt_length + (self.eval.max_response_length or 0)
        if (rollout.page_size or 0) > (most := max(128, 1 << (max(longest, of_eval) - 1).bit_length())):
            yield Problem(
                "rollout.page_size", f"must be at most {most}, as the longest sequence has {max(longest, of_eval)} "
                f"tokens (prompt and response); got {rollout.page_size}. 16 to 128 are usual",
                (*lengths, "eval.max_response_length"),
            )
        layers = (self.model.arch or {}).get("num_hidden_layers")
        in_bf16 = self.quant.num_first_layers_in_bf16 + self.quant.num_last_layers_in_bf16
        if isinstance(layers, int) and in_bf16 > layers:
            yield f"quant.num_first_layers_in_bf16: {in_bf16} first and last layers in BF16, but the model has {layers}"
