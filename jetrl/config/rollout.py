"""The sections [rollout] and [environment]: how completions are sampled, the engine's sizes, and conversations."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from jetrl import moved
from jetrl.choices import LogprobsOf
from jetrl.config.base import Problem, Section
from jetrl.config.markers import (
    Elsewhere,
    Holds,
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

NOT_VLLM = NoEffectWhile("rollout.engine", ("vllm",))
CONVERSATIONS_ONLY = NoEffectWhile("environment.name", (None,))


class RolloutConfig(Section):
    """How completions are sampled, and the sizes of the engine."""

    section: ClassVar[str] = "rollout"
    engine: Annotated[
        str, Holds("code"), Kernels(),
        Elsewhere("TRL: use_vllm", ' = "vllm" (the default engine is built in, and keeps the learner\'s bits)'),
        Elsewhere("verl: rollout.name", ' ("vllm" is there, and the default, "jetrl", keeps the learner\'s bits)'),
    ] = Field(
        default="jetrl", min_length=1, description="jetrl: the engine that keeps the learner's bits. vllm: vLLM, which "
        "does not (docs/ENGINES.md). Or your own, as module:Class or path/to/file.py:Class.",
    )
    prompts_per_step: Annotated[
        int,
        Elsewhere(
            "verl, SkyRL: train_batch_size; verl: gen_batch_size; TRL: generation_batch_size "
            "per_device_train_batch_size; NeMo RL: num_prompts_per_step; slime: rollout_batch_size; prime-rl: "
            "batch_size; torchtitan: num_prompts_per_train_step",
            " (prompts, not completions)"),
        Elsewhere(
            "TRL: gradient_accumulation_steps",
            " (it sets the batch, micro-batches are packed up to train.max_tokens_per_gpu)"),
    ] = Field(default=16, ge=1, description="Prompts per training step.")
    group_size: Annotated[
        int,
        Elsewhere(
            "verl: n; TRL: num_generations; NeMo RL: num_generations_per_prompt; slime, OpenRLHF, SkyRL: "
            "n_samples_per_prompt"),
    ] = Field(
        default=8, ge=1, description="Completions per prompt. At least 2 if they are each other's baseline.")
    max_response_length: Annotated[
        int,
        Elsewhere(
            "TRL: max_completion_length; verl: response_length; slime: rollout_max_response_len; SkyRL: "
            "max_generate_length; transformers: max_new_tokens",
            same=("verl",)),
        Elsewhere(
            "NeMo RL: max_total_sequence_length; TRL: vllm_max_model_length; verl: max_model_len",
            ", with task.max_prompt_length"),
    ] = Field(
        default=64, ge=1, description="Longest completion in tokens; in a conversation, everything after the prompt.")
    temperature: Annotated[
        float, Elsewhere(same=("TRL", "verl")),
        Elsewhere("slime: rollout_temperature; SkyRL: sampling_params", ", top_p and top_k"),
    ] = Field(default=1.0, gt=0, description="Sampling temperature; the learner's log-probs use the same.")
    top_p: Annotated[float, Kernels(off=(1.0,)), Elsewhere(same=("TRL", "verl"))] = Field(
        default=1.0, gt=0, le=1, description="Nucleus sampling: keep this much probability. 1: off.")
    top_k: Annotated[int, Kernels(off=(0,)), Elsewhere(same=("TRL", "verl"))] = Field(
        default=0, ge=0, description="Sample among the k most probable tokens. 0: off.")
    min_p: Annotated[float, Kernels(off=(0.0,)), Elsewhere(same=("TRL",))] = Field(
        default=0.0, ge=0, lt=1, description="Drop tokens below this share of the top token's probability. 0: off.")
    logprobs: Annotated[
        LogprobsOf | None, Since("0.1.0", "full"), Kernels(off=(None, "full")),
        Elsewhere("SkyRL: enable_sample_support_replay", ' = "sampled", which stores nothing'),
    ] = Field(
        default=None, validate_default=True, description="Which distribution is trained if top_p, top_k or min_p "
        "truncates it. sampled: the truncated one, from which tokens are drawn; the learner finds the kept tokens in "
        "its own logits. full: the whole one at the temperature, which is not the policy that samples. none: sampled "
        "(docs/ALGORITHMS.md).")
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], WarmStart()] = Field(
        default=(), description="Strings that end a completion, in addition to the end-of-sequence token.")
    page_size: Annotated[int | None, NOT_VLLM, Kernels()] = Field(
        default=None, ge=1, description="Tokens per page of the KV cache. none: 128 on a GPU, 16 on a CPU. At most "
        "the longest sequence rounded up to a power of two, or 128 if that is more.")
    merge_prefix: Annotated[Literal["auto", "on", "off"], NOT_VLLM, NoBits()] = Field(
        default="auto", description="Whether decode steps read the pages that a prompt's samples share only once for "
        "all of them; tokens and log-probs do not change. auto: where this was measured to be faster. on (or true): "
        "wherever pages are shared, for tests. off (or false): never. No effect on a CPU (docs/RUNS.md).")
    max_num_seqs: Annotated[
        int, Kernels(), SavesMemory(9, lambda c: [n for n in halves(c.rollout.max_num_seqs, 4, 1) if n >= 8]),
        Elsewhere(same=("verl",)),
    ] = Field(default=256, ge=1, description="Maximum number of sequences that run at the same time.")
    max_tokens_per_step: Annotated[int | None, Kernels(), Elsewhere("verl: max_num_batched_tokens")] = Field(
        default=None, ge=1,
        description="Tokens per engine step; longer prompts take several. none: 8192 on a GPU, 2048 on a CPU.")
    kv_cache_tokens: Annotated[
        int | None, SavesMemory(8, lambda c: halves(c.rollout.kv_cache_tokens or 0, 3, c.longest)),
    ] = Field(default=None, ge=1, description="Size of the KV cache in tokens. none: what is needed, if memory allows.")
    keep_kv_cache: Annotated[
        Literal["auto", "always", "never"], NOT_VLLM, NoBits(), SavesMemory(1, {"always": "auto"}),
    ] = Field(
        default="auto", description="Whether the KV cache stays on a GPU during the update, with the CUDA graphs of "
        "decode steps; otherwise each rollout captures them again. auto: if the predicted peak of the update leaves "
        "room. Changes no bit. No effect on a CPU.",
    )
    speculate: Annotated[Literal["off", "auto", "on"], NOT_VLLM, NoBits()] = Field(
        default="off", description="Guess tokens from the answer so far, its siblings, and earlier answers to its "
        "prompt, and compute several at once; tokens and log-probs do not change. auto: as many as pay off, judged by "
        "measured acceptance and times. on: always max_draft_tokens, for tests (docs/RUNS.md).",
    )
    max_draft_tokens: Annotated[int, NOT_VLLM, NoEffectWhile("rollout.speculate", ("off",)), NoBits()] = Field(
        default=7, ge=1, le=7, description="Maximum number of tokens guessed per sequence and step. Steps guess 0, 1, "
        "3 or 7, so 2 means 1, and 4, 5 and 6 mean 3.")

    overcommit: Annotated[float, Since("0.3.0", 0.0)] = Field(
        default=0.0, ge=0, le=1, description="Groups that are under way beside the prompts_per_step that a step needs, "
        "as a share of these. The step ends when enough groups are complete; the others go on in the next one, under "
        "its weights (docs/ASYNC.md). 0: none, all answers are of the newest weights.")

    @property
    def num_carried(self) -> int:
        """Groups under way beside those that a step learns from."""
        return ceil(self.overcommit * self.prompts_per_step - 1e-9)

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from truncated distributions."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def usual(self, name: str) -> Any:
        """As in `Section`; `logprobs` is filled in where nobody gives it."""
        return ("sampled" if self.truncates else "full") if name == "logprobs" else super().usual(name)

    def problems(self) -> Iterator[Problem | str]:
        if self.logprobs == "sampled" and not self.truncates:
            yield Problem(
                "rollout.logprobs", "has no effect while rollout.top_p, top_k and min_p truncate nothing; set one of "
                "these, or remove this key", ("rollout.top_p", "rollout.top_k", "rollout.min_p"), void=True,
            )

    def without_effect(self) -> set[str]:
        return super().without_effect() | (set() if self.truncates else {"logprobs"})

    @field_validator("logprobs")
    @classmethod
    def _of_what_is_sampled(cls, value: Any, info: ValidationInfo) -> Any:
        """Nobody said: of the distribution that tokens are drawn from, which without a filter is the whole one."""
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        truncates = any(info.data.get(key, usual) != usual for key, usual in off.items())
        return value or ("sampled" if truncates else "full")

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
    name: Annotated[
        str | None, Holds("code"),
        Elsewhere("verl: multi_turn.enable interaction_config_path; TRL: environment_factory"),
    ] = Field(
        default=None, description="calculator, retry, tools, command, verifiers, or your own as module:Class "
        "or path/to/file.py:Class. none: single answers.",
    )
    params: Annotated[
        dict[str, Any], CONVERSATIONS_ONLY,
        Elsewhere("verl: multi_turn.format", ' (its call_format, with environment.name = "tools")'),
    ] = Field(default_factory=dict, description="Arguments of the environment's constructor.")
    tools: Annotated[
        str | tuple[str, ...] | None, CONVERSATIONS_ONLY, Since("0.1.0", None), Holds("code"),
        Elsewhere("TRL: tools; verl: tool_config_path", ' (with environment.name = "tools")'),
    ] = Field(
        default=None, min_length=1, description='For name = "tools": the functions and classes that the policy may '
        "call, as module:name or path/to/file.py:name, or a list of them (docs/ENVIRONMENTS.md).")
    max_turns: Annotated[
        int, CONVERSATIONS_ONLY,
        Elsewhere("TRL: max_tool_calling_iterations; verl: max_assistant_turns max_user_turns"),
    ] = Field(default=8, ge=1, description="Maximum number of policy turns in a conversation.")
    max_turn_tokens: Annotated[int | None, CONVERSATIONS_ONLY] = Field(
        default=None, ge=1, description="Maximum tokens in one turn. none: what is left of "
        "rollout.max_response_length, which bounds all turns together, the environment's included.",
    )
    timeout: Annotated[float, CONVERSATIONS_ONLY, MayChange()] = Field(
        default=60.0, gt=0, description="Time limit for one call of the environment, in seconds.")
    max_concurrent: Annotated[int, CONVERSATIONS_ONLY, MayChange(), Elsewhere("verl: max_parallel_calls")] = Field(
        default=64, ge=1, description="Maximum number of environment calls at the same time.")
    reply_tokens: Annotated[
        int, CONVERSATIONS_ONLY, NoEffectWhile("rollout.overcommit", (0.0,)), Since("0.3.0", 64),
    ] = Field(
        default=64, ge=0, description="With rollout.overcommit: as how many drawn tokens a reply counts where a step "
        "is cut. About its seconds by those of a decode step (docs/ASYNC.md).",
    )
    at_limit: Annotated[Literal["keep", "zero"], CONVERSATIONS_ONLY] = Field(
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
