"""The config tree: every section and key of a recipe, with its type, default, meaning and the rules between keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from jetrl import moved
from jetrl.choices import CacheKind, Precision, ScaleKind, Schedule, WgradKind
from jetrl.config.base import Problem, Rule, Section
from jetrl.config.data import DATA_KEYS, MAX_DATA_GIB, ROW_KEYS, reward_problems, silent_columns, source_problems
from jetrl.config.errors import NAME
from jetrl.config.rl import RLConfig
from jetrl.config.toml import toml_literal
from jetrl.config.train import TrainConfig
from jetrl.config.vllm import VLLMConfig, vllm_problems


class ModelConfig(Section):
    """Which model is trained: a Hugging Face folder or name, or an architecture with random weights."""

    section: ClassVar[str] = "model"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("init_seed",), "arch", (None,), instead=("path",)),
        Rule(("revision",), "path", (None,), instead=("arch",)),
        Rule(("tokenizer_revision",), "tokenizer", (None,)),
    )
    path: str | None = Field(
        default=None, description="Hugging Face folder with config.json, safetensors and a tokenizer; or a name on "
        "the hub, such as Qwen/Qwen3-0.6B. If a folder of that name exists, it wins.")
    revision: str | None = Field(
        default=None, min_length=1, description="Branch, tag or commit of a model from the hub. none: main.")
    arch: dict[str, Any] | None = Field(
        default=None, min_length=1, description="Keys of a Hugging Face config.json (model_type, hidden_size, ...) for "
        "a model with random weights. Without vocab_size, the tokenizer gives it.",
    )
    tokenizer: str | None = Field(
        default=None, description="Tokenizer folder or hub name, or builtin:arithmetic. none: the tokenizer of "
        "model.path.")
    tokenizer_revision: str | None = Field(
        default=None, min_length=1, description="Branch, tag or commit of a tokenizer from the hub. none: main.")
    init_seed: int = Field(default=0, ge=0, description="Seed of the random weights of model.arch.")

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
    rules: ClassVar[tuple[Rule, ...]] = (Rule(("saved_gate_up",), "wgrad", ("row",)),)
    weight_scale: ScaleKind = Field(
        default="fp32", description="Scales of weight blocks: any FP32 number, or powers of two.")
    activation_scale: ScaleKind = Field(
        default="fp32", description="Scales of activation and gradient blocks, likewise.")
    num_first_layers_in_bf16: int = Field(
        default=0, ge=0, description="Layers at the bottom that stay in BF16, on both sides.")
    num_last_layers_in_bf16: int = Field(
        default=0, ge=0, description="Layers at the top that stay in BF16, on both sides.")
    wgrad: WgradKind = Field(
        default="tile", description="Activations that weight gradients read (dense layers; experts take row). row: a "
        "scale for each feature and 128 tokens. tile: for each 128x128 tile, as weights have; on Hopper the faster "
        "GEMM, SwiGLU's output is made again, a micro-batch's weight gradient is rounded to BF16 before it is added.")
    saved_gate_up: CacheKind = Field(
        default="bf16", description="What the backward pass reads of SwiGLU's input (dense layers; fp8 is refused "
        "where all layers have experts). fp8: rounded as an activation is, which saves a quarter of a layer's memory "
        "for the backward pass.")
    kv_cache: CacheKind = Field(
        default="bf16", description="Keys and values in the rollout's cache; training rounds them the same way.")


LONG = ("chain", "sorting", "tracking", "recurrence")  # tasks of jetrl/tasks/long.py


class TaskConfig(Section):
    """Which problems are asked, and how answers are scored."""

    section: ClassVar[str] = "task"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule((*DATA_KEYS, *ROW_KEYS), "name", ("addition", "gym", "environment", *LONG)),
        Rule(("dataset_config", "dataset_revision", "train_split"), "dataset", (None,), instead=("train_file",)),
        Rule(("eval_dataset_config", "eval_dataset_revision"), "eval_dataset", (None,), instead=("eval_file",)),
        Rule(("system_prompt", "chat_template_kwargs"), "chat_template", (False,)),
        Rule(("reward_weights",), "reward", (None,)),
    )
    name: Literal["addition", "file", "gym", "environment", "chain", "sorting", "tracking", "recurrence"] = Field(
        description="addition: sums made on the fly. file: your jsonl or parquet, or a data set by name. gym: a "
        "reasoning-gym data set. environment: problems that the environment itself makes from a seed. chain, sorting, "
        "tracking, recurrence: long answers of a chosen length, made on the fly.",
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the task itself: digits, style (addition); dataset and "
        "its own settings (gym); steps or tokens, style, credit (chain, sorting, tracking, recurrence); forget_carry "
        "(addition, recurrence); factors (recurrence); gold_template, check_gold (all).",
    )
    train_file: str | None = Field(default=None, description="Training problems of task file: jsonl or parquet.")
    eval_file: str | None = Field(default=None, description="Held-out problems of task file.")
    dataset: str | None = Field(
        default=None, min_length=1, description="Training problems of task file by name on the Hugging Face hub, such "
        "as openai/gsm8k, instead of train_file (docs/MODELS_AND_DATA.md).")
    dataset_config: str | None = Field(
        default=None, min_length=1, description="Configuration (subset) of the data set. none: its only one.")
    dataset_revision: str | None = Field(
        default=None, min_length=1, description="Branch, tag or commit of the data set. none: main.")
    train_split: str = Field(default="train", min_length=1, description="Split of the data set to train on.")
    eval_split: str | None = Field(
        default=None, min_length=1, description="Split for evaluation, of eval_dataset if that is set, else of "
        "dataset. none: problems are held out of the training ones.")
    eval_dataset: str | None = Field(
        default=None, min_length=1, description="Another data set for evaluation, by name; needs eval_split.")
    eval_dataset_config: str | None = Field(
        default=None, min_length=1, description="Configuration of eval_dataset. none: its only one.")
    eval_dataset_revision: str | None = Field(
        default=None, min_length=1, description="Branch, tag or commit of eval_dataset. none: main.")
    prompt_column: str = Field(
        default="prompt", min_length=1, description="Column of the prompts, texts or chat messages.")
    answer_column: str = Field(default="answer", min_length=1, description="Column of the answers.")
    prompt_template: str | None = Field(
        default=None, min_length=1, description="The prompt made of a row's columns, instead of prompt_column: "
        '"{question} Answer with a number." Write {{ for a brace.')
    eval_prompt_column: str | None = Field(
        default=None, min_length=1, description="prompt_column of the evaluation data. none: as in training.")
    eval_answer_column: str | None = Field(
        default=None, min_length=1, description="answer_column of the evaluation data. none: as in training.")
    eval_prompt_template: str | None = Field(
        default=None, min_length=1, description="prompt_template of the evaluation data. none: as in training.")
    reward: str | tuple[str, ...] | None = Field(
        default=None, min_length=1, description="Your reward, as module:function or path/to/file.py:function, or a "
        "list of several, which are added up (docs/REWARDS.md). none: the task's own.")
    reward_weights: tuple[float, ...] | None = Field(
        default=None, description="What each function of task.reward is multiplied by. none: 1.")
    reward_calls: Literal["step", "group"] = Field(
        default="step", description="step: the reward is called after the rollout, with all completions. group: with "
        "those of a prompt as soon as they have ended, in a thread next to the rollout (docs/REWARDS.md).")
    max_prompt_length: int = Field(default=512, ge=1, description="Longest prompt in tokens, chat template included.")
    overlong_prompts: Literal["error", "drop"] = Field(
        default="error", description="What to do about longer prompts in the data: stop, or leave them out.")
    repeated_prompts: Literal["keep", "drop"] = Field(
        default="keep", description="Rows of the data that repeat an earlier prompt: keep, or leave them out.")
    max_data_gib: float = Field(
        default=MAX_DATA_GIB, gt=0, description="Most memory in GiB for the rows of one file or split, as estimated; a "
        "file whose rows need more is refused before it is in memory.")
    num_eval: int = Field(default=128, ge=1, description="Held-out problems in an evaluation.")
    chat_template: bool | Literal["auto"] = Field(
        default="auto", description="Whether prompts go through the tokenizer's chat template. auto: if it has one.")
    system_prompt: str | None = Field(
        default=None, description="System message in front of each prompt (chat template only).")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of the chat template, such as enable_thinking = false.")

    @field_validator("reward", mode="before")
    @classmethod
    def _as_named_now(cls, value: Any) -> Any:
        """A reward of the package under the name that an earlier version gave it."""
        return moved.current(value)

    def problems(self) -> Iterator[Problem | str]:
        if self.name == "file":
            yield from source_problems(self)
            for key, (why, because) in silent_columns(self).items():
                if self._differs(key):
                    text = f"has no effect, because {why}; change that, or remove this key"
                    yield Problem(f"task.{key}", text, because, void=True)
        yield from reward_problems(self)

    def without_effect(self) -> set[str]:
        return super().without_effect() | silent_columns(self).keys()


class RolloutConfig(Section):
    """How completions are sampled, and the sizes of the engine."""

    section: ClassVar[str] = "rollout"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("page_size", "keep_kv_cache", "merge_prefix", "speculate", "max_draft_tokens"), "engine", ("vllm",)),
        Rule(("max_draft_tokens",), "speculate", ("off",)),
    )
    engine: str = Field(
        default="jetrl", min_length=1, description="jetrl: the engine that keeps the learner's bits. vllm: vLLM, which "
        "does not (docs/ENGINES.md). Or your own, as module:Class or path/to/file.py:Class.",
    )
    prompts_per_step: int = Field(default=16, ge=1, description="Prompts in a training step.")
    group_size: int = Field(
        default=8, ge=1, description="Completions of each prompt. At least 2 where they are each other's baseline.")
    max_response_length: int = Field(
        default=64, ge=1, description="Longest completion in tokens; in a conversation, all that follows the prompt.")
    temperature: float = Field(
        default=1.0, gt=0, description="Sampling temperature; the learner's log-probs use the same.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling: keep this much probability. 1: off.")
    top_k: int = Field(default=0, ge=0, description="Sample among the k most probable tokens. 0: off.")
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="Drop tokens below this share of the top token's probability. 0: off.")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="Strings that end a completion, in addition to the end-of-sequence token.")
    page_size: int | None = Field(
        default=None, ge=1, description="Tokens in a page of the KV cache. none: 128 on a GPU, 16 on a CPU. At most "
        "the longest sequence rounded up to a power of two, or 128 if that is more.")
    merge_prefix: Literal["auto", "on", "off"] = Field(
        default="auto", description="Whether decode steps read pages that samples of a prompt share once for all of "
        "them; tokens and log-probs keep their bits. auto: where that was measured to take less time. on (or true): "
        "wherever pages are shared, for tests. off (or false): never. On a CPU it does nothing (docs/RUNS.md).")
    max_num_seqs: int = Field(default=256, ge=1, description="Maximum number of sequences that run at the same time.")
    max_tokens_per_step: int | None = Field(
        default=None, ge=1,
        description="Tokens in one engine step; longer prompts take several. none: 8192 on a GPU, 2048 on a CPU.")
    kv_cache_tokens: int | None = Field(
        default=None, ge=1, description="Size of the KV cache in tokens. none: what is needed, if memory allows.")
    keep_kv_cache: Literal["auto", "always", "never"] = Field(
        default="auto", description="Whether the KV cache stays on a GPU during the update, with the CUDA graphs of "
        "decode steps, which each rollout else captures again. auto: where the predicted peak of the update leaves "
        "room for it. Changes no bit. On a CPU it does nothing.",
    )
    speculate: Literal["off", "auto", "on"] = Field(
        default="off", description="Guess tokens from what stands in the answer so far, in its siblings and in earlier "
        "answers to its prompt, and compute several at once; tokens and log-probs keep their bits. auto: as many as "
        "pay, by measured acceptance and times. on: always max_draft_tokens, for tests (docs/RUNS.md).",
    )
    max_draft_tokens: int = Field(
        default=7, ge=1, le=7, description="Most tokens guessed for a sequence in a step. Steps guess 0, 1, 3 or 7, so "
        "2 means 1, and 4, 5 and 6 mean 3.")

    @field_validator("merge_prefix", mode="before")
    @classmethod
    def _switched(cls, value: Any) -> Any:
        """true and false, as this key once was."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @field_validator("engine", mode="before")
    @classmethod
    def _as_named_now(cls, value: Any) -> Any:
        """An engine of the package under the name that an earlier version gave it."""
        return moved.current(value)


class EnvironmentConfig(Section):
    """Conversations: an environment that answers the policy, turn by turn (docs/ENVIRONMENTS.md)."""

    section: ClassVar[str] = "environment"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("params", "tools", "max_turns", "max_turn_tokens", "timeout", "max_concurrent", "at_limit"),
            "name", (None,),
        ),
    )
    name: str | None = Field(
        default=None, description="calculator, retry, tools, or your own as module:Class or path/to/file.py:Class. "
        "none: single answers.",
    )
    params: dict[str, Any] = Field(default_factory=dict, description="Arguments of the environment's constructor.")
    tools: str | tuple[str, ...] | None = Field(
        default=None, min_length=1, description='For name = "tools": the functions and classes that the policy may '
        "call, as module:name or path/to/file.py:name, or a list of them (docs/ENVIRONMENTS.md).")
    max_turns: int = Field(default=8, ge=1, description="Maximum number of policy turns in a conversation.")
    max_turn_tokens: int | None = Field(
        default=None, ge=1, description="Maximum tokens in one turn. none: what is left of "
        "rollout.max_response_length, which bounds all turns together, the environment's included.",
    )
    timeout: float = Field(default=60.0, gt=0, description="Seconds for one call of the environment.")
    max_concurrent: int = Field(default=64, ge=1, description="Maximum number of environment calls at the same time.")
    at_limit: Literal["keep", "zero"] = Field(
        default="keep", description="Reward of a conversation that hit max_turns or max_response_length: what the "
        "environment has given so far (not scored if nothing), or 0.",
    )

    def problems(self) -> Iterator[str]:
        if self.name == "tools" and self.tools is None:
            yield ('environment.tools: is needed with environment.name = "tools"; list functions, as in '
                   '["my_tools.py:search"]')
        if self.name not in (None, "tools") and self.tools is not None:
            yield ('environment.tools: has no effect with environment.name = '
                   f'{toml_literal(self.name)}; set environment.name = "tools", or remove this key')


class SFTConfig(Section):
    """Supervised warm start on the task's worked solutions, before RL."""

    section: ClassVar[str] = "sft"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("batch_size", "lr", "warmup_steps", "lr_schedule", "num_examples", "cache_dir"), "steps", (0,)),
    )
    steps: int = Field(default=0, ge=0, description="Optimizer steps of the warm start. 0: no warm start.")
    batch_size: int = Field(default=32, ge=1, description="Sequences in a step.")
    lr: float = Field(default=1e-3, gt=0, le=1e30, description="Peak learning rate.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    lr_schedule: Schedule = Field(default="constant", description="Learning rate after the warm-up.")
    num_examples: int | None = Field(
        default=None, ge=1, description="Distinct examples to draw from. none: as many as needed.")
    cache_dir: str = Field(
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
    eval_interval: int = Field(default=10, ge=0, description="Steps between evaluations. 0: never.")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature. 0: greedy.")
    num_samples: int = Field(default=1, ge=1, description="Completions of each problem: the k of avg@k and pass@k.")
    max_response_length: int | None = Field(
        default=None, ge=1, description="Longest completion in tokens. none: rollout.max_response_length.")
    pass_reward: float = Field(
        default=1.0, ge=-1e30, le=1e30, description="pass@k counts a problem if one of its completions reaches this "
        "(less 0.001, for rounding) in what rl.signal names.")
    num_samples_kept: int = Field(
        default=32, ge=0, description="Completions of each evaluation that go to eval_samples.jsonl, evenly over the "
        "problems and always of the same ones. 0: none.")

    def problems(self) -> Iterator[Problem | str]:
        if self.num_samples > 1 and self.temperature == 0:
            yield Problem(
                "eval.num_samples", f"{self.num_samples} greedy samples of a problem (eval.temperature = 0) are all "
                "the same; set eval.temperature above 0, or 1 sample", ("eval.temperature",), void=True,
            )


class CheckpointConfig(Section):
    """Saving and resuming."""

    section: ClassVar[str] = "checkpoint"
    rules: ClassVar[tuple[Rule, ...]] = (Rule(("keep", "background"), "save_interval", (0,)),)
    save_interval: int = Field(default=10, ge=0, description="Steps between checkpoints. 0: never.")
    keep: int = Field(default=2, ge=1, description="Newest checkpoints to keep.")
    background: Literal["auto", "on", "off"] = Field(
        default="auto", description="Whether a checkpoint is written while the run goes on, from a copy in host "
        "memory. auto: where that copy fits. on: refused where it does not. off: the run waits.")
    resume: str = Field(
        default="never", min_length=1, description="never, auto (the run's newest checkpoint, if any) or a folder.")
    allow_changed_data: bool = Field(
        default=False, description="Resume although a local data file or the tokenizer has another content now.")


class TrackConfig(Section):
    """Experiment trackers, in addition to metrics.jsonl and report.html, which are always written."""

    section: ClassVar[str] = "track"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(("project", "group", "tags", "run_name"), "backends", ((), ("tensorboard",))),
        Rule(("entity", "num_samples"), "backends", ((),)),
    )
    backends: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = Field(
        default=(), description="Trackers that also receive the metrics (docs/TRACKING.md). Checked before the model "
        "is loaded; one that fails later does not end the run.")
    project: str | None = Field(
        default=None, description="Project (wandb, trackio) or experiment (mlflow). Default: the tracker's own "
        'variable (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME), else "jetrl".')
    entity: str | None = Field(
        default=None, description="wandb's user or team. Default: WANDB_ENTITY, else that of the login.")
    group: str | None = Field(
        default=None, description="Group of the run (wandb, trackio), or its tag `group` (mlflow). Default: "
        "WANDB_RUN_GROUP, else none.")
    tags: tuple[str, ...] = Field(
        default=(), description="Tags of the run; `key=value` for mlflow. Default: WANDB_TAGS, else none.")
    run_name: str | None = Field(
        default=None, description="The run's name in the tracker. Default: WANDB_NAME or MLFLOW_RUN_NAME, else the "
        "name of the run folder.")
    num_samples: int = Field(
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
    """A whole run. `device` and `kernels` are concrete once `resolve` has run."""

    section: ClassVar[str] = ""
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(tuple(f"quant.{key}" for key in QuantConfig.model_fields), "precision", ("bf16",)),
        Rule(("quant.wgrad", "quant.saved_gate_up"), "precision", ("fp8_rollout", "w8a16")),
        Rule(("quant.weight_scale", "quant.activation_scale"), "precision", ("w8a16",)),
        Rule(tuple(f"vllm.{key}" for key in VLLMConfig.model_fields), "rollout.engine", ("jetrl",)),
    )
    name: str = Field(pattern=NAME, description="Name of the run and of its folder.")
    seed: int = Field(default=0, ge=0, description="Seed of data and sampling.")
    precision: Precision = Field(
        default="fp8", description="bf16 or fp8 on both sides; w8a16: FP8 weights with scales of powers of two and "
        "BF16 activations, on both sides; fp8_rollout: FP8 sampling, BF16 training.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: the GPU if there is one.")
    kernels: Literal["auto", "reference", "hopper", "hopper_scaled_mm"] = Field(
        default="auto", description="auto: reference on a CPU, hopper on a GPU. hopper_scaled_mm: torch's FP8 GEMMs.")
    output_dir: str = Field(default="runs", min_length=1, description="Parent of the run folder.")
    num_threads: int | None = Field(default=None, ge=1, le=1024, description="CPU threads. none: torch's own choice.")
    model: ModelConfig = Field(description="The model.")
    quant: QuantConfig = Field(default=QuantConfig(), description="FP8 details.")
    task: TaskConfig = Field(description="Problems and rewards.")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="Sampling.")
    vllm: VLLMConfig = Field(default=VLLMConfig(), description="vLLM as the rollout's engine.")
    environment: EnvironmentConfig = Field(default=EnvironmentConfig(), description="Conversations.")
    rl: RLConfig = Field(default=RLConfig(), description="Objective.")
    train: TrainConfig = Field(default=TrainConfig(), description="Optimizer.")
    sft: SFTConfig = Field(default=SFTConfig(), description="Warm start.")
    eval: EvalConfig = Field(default=EvalConfig(), description="Evaluation.")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="Saving and resuming.")
    track: TrackConfig = Field(default=TrackConfig(), description="Trackers.")

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

    def problems(self) -> Iterator[Problem | str]:
        rollout = self.rollout
        yield from vllm_problems(self)
        yield from self._size_problems()
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

    def _size_problems(self) -> Iterator[Problem | str]:
        """Sizes that do not hold one prompt and one response."""
        rollout, longest = self.rollout, self.task.max_prompt_length + self.rollout.max_response_length
        sizes = f"task.max_prompt_length + rollout.max_response_length = {longest}"
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
