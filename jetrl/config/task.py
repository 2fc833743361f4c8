"""The section [task]: which problems are asked, where they come from, and how answers are scored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from jetrl import moved
from jetrl.config.base import Problem, Section
from jetrl.config.markers import Elsewhere, Holds, NoBits, NoEffectWhile, PartOf, Since, WarmStart

MAX_DATA_GIB = 4.0  # default of task.max_data_gib
# What jetrl itself passes to a chat template.
TEMPLATE_ARGUMENTS = ("conversation", "chat_template", "add_generation_prompt", "tokenize", "messages")
LONG = ("chain", "sorting", "tracking", "recurrence")  # tasks of jetrl/tasks/long.py
DATA_ONLY = NoEffectWhile("task.name", ("addition", "gym", "environment", *LONG))
SFT_ONLY = NoEffectWhile("method", ("rl",))


class TaskConfig(Section):
    """Which problems are asked, and how answers are scored."""

    section: ClassVar[str] = "task"
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
    train_file: Annotated[
        str | None, DATA_ONLY, Holds("data"), Elsewhere("verl: train_files; slime: prompt_data"),
    ] = Field(default=None, description="File with the training problems: jsonl or parquet.")
    eval_file: Annotated[
        str | None, DATA_ONLY, Holds("data"), Elsewhere("verl: val_files; slime: eval_prompt_data"),
    ] = Field(default=None, description="File with the held-out problems: jsonl or parquet.")
    dataset: Annotated[str | None, DATA_ONLY, Holds("file"), Elsewhere("TRL: dataset_name")] = Field(
        default=None, min_length=1, description="Data set on the Hugging Face hub with the training problems, such as "
        "openai/gsm8k, instead of train_file (docs/MODELS_AND_DATA.md).")
    dataset_config: Annotated[
        str | None, DATA_ONLY, NoEffectWhile("task.dataset", (None,), instead=("task.train_file",)),
        PartOf("task.dataset"), Elsewhere("TRL: dataset_config_name"),
    ] = Field(default=None, min_length=1, description="Configuration (subset) of the data set. none: its only one.")
    dataset_revision: Annotated[
        str | None, DATA_ONLY, NoEffectWhile("task.dataset", (None,), instead=("task.train_file",)),
        PartOf("task.dataset"),
    ] = Field(default=None, min_length=1, description="Branch, tag or commit of the data set. none: main.")
    train_split: Annotated[
        str, DATA_ONLY, NoEffectWhile("task.dataset", (None,), instead=("task.train_file",)),
        Elsewhere("TRL: dataset_train_split"),
    ] = Field(default="train", min_length=1, description="Split of the data set to train on.")
    eval_split: Annotated[str | None, DATA_ONLY, Elsewhere("TRL: dataset_test_split")] = Field(
        default=None, min_length=1, description="Split for evaluation, of eval_dataset if that is set, else of "
        "dataset. none: some of the training problems are held out.")
    eval_dataset: Annotated[str | None, DATA_ONLY, Holds("file")] = Field(
        default=None, min_length=1, description="Another data set for evaluation, by name; needs eval_split.")
    eval_dataset_config: Annotated[
        str | None, DATA_ONLY, NoEffectWhile("task.eval_dataset", (None,), instead=("task.eval_file",)),
        PartOf("task.eval_dataset"),
    ] = Field(default=None, min_length=1, description="Configuration of eval_dataset. none: its only one.")
    eval_dataset_revision: Annotated[
        str | None, DATA_ONLY, NoEffectWhile("task.eval_dataset", (None,), instead=("task.eval_file",)),
        PartOf("task.eval_dataset"),
    ] = Field(default=None, min_length=1, description="Branch, tag or commit of eval_dataset. none: main.")
    prompt_column: Annotated[str, DATA_ONLY, Elsewhere("verl: prompt_key; slime, OpenRLHF: input_key")] = Field(
        default="prompt", min_length=1, description="Column of the prompts: strings or chat messages.")
    answer_column: Annotated[str, DATA_ONLY, Elsewhere("slime, OpenRLHF: label_key")] = Field(
        default="answer", min_length=1, description="Column of the answers.")
    prompt_template: Annotated[str | None, DATA_ONLY, Elsewhere("OpenRLHF: input_template")] = Field(
        default=None, min_length=1, description="Makes the prompt from a row's columns, instead of prompt_column: "
        '"{question} Answer with a number." Write {{ for a brace.')
    eval_prompt_column: Annotated[str | None, DATA_ONLY] = Field(
        default=None, min_length=1, description="prompt_column of the evaluation data. none: as in training.")
    eval_answer_column: Annotated[str | None, DATA_ONLY] = Field(
        default=None, min_length=1, description="answer_column of the evaluation data. none: as in training.")
    eval_prompt_template: Annotated[str | None, DATA_ONLY] = Field(
        default=None, min_length=1, description="prompt_template of the evaluation data. none: as in training.")
    messages_column: Annotated[str, DATA_ONLY, SFT_ONLY, WarmStart(reads=False), Since("0.3.0", "messages")] = Field(
        default="messages", min_length=1, description="Column of whole conversations, for method = \"sft\". Rows "
        "without it have a prompt and a solution or completion (docs/SFT.md).")
    train_on: Annotated[
        Literal["assistant", "last", "all"], SFT_ONLY, WarmStart(reads=False), Since("0.3.0", "assistant"),
        Elsewhere("TRL: assistant_only_loss completion_only_loss"),
    ] = Field(
        default="assistant", description="Which tokens are learned with method = \"sft\". assistant: every turn of the "
        "assistant, with the token that ends it. last: only its last turn. all: every token but the first.")
    reward: Annotated[
        str | tuple[str, ...] | None, Holds("code"), WarmStart(reads=False),
        Elsewhere("TRL: reward_funcs; verl: custom_reward_function; slime: custom_rm_path"),
        Elsewhere(
            "verl: custom_reward_function.path custom_reward_function.name",
            " (file and function are one string, with a colon between them)"),
        Elsewhere(
            "verl: reward_manager reward_model.reward_manager",
            " (a function of whole batches, see task.reward_calls)"),
    ] = Field(
        default=None, min_length=1, description="Your reward, as module:function or path/to/file.py:function, or a "
        "list of several, which are added up (docs/REWARDS.md). none: the task's own.")
    reward_weights: Annotated[
        tuple[float, ...] | None, NoEffectWhile("task.reward", (None,)), WarmStart(reads=False),
        Elsewhere(same=("TRL",)),
    ] = Field(default=None, description="Weight of each function of task.reward. none: 1.")
    reward_calls: Annotated[
        Literal["step", "group"], WarmStart(reads=False),
        Elsewhere("verl: launch_reward_fn_async", ' = "group"'),
    ] = Field(
        default="step", description="step: the reward is called after the rollout, with all completions. group: with "
        "those of a prompt as soon as they have ended, in a thread next to the rollout (docs/REWARDS.md).")
    max_prompt_length: Annotated[int, Elsewhere("verl: prompt_length", same=("TRL", "verl"))] = Field(
        default=512, ge=1, description="Longest prompt in tokens, chat template included.")
    overlong_prompts: Annotated[
        Literal["error", "drop"], DATA_ONLY, Elsewhere("verl: filter_overlong_prompts"),
        Elsewhere("verl: truncation", ' ("error" or "drop", prompts are never cut)'),
    ] = Field(default="error", description="What to do about longer prompts in the data: stop, or leave them out.")
    repeated_prompts: Annotated[Literal["keep", "drop"], DATA_ONLY] = Field(
        default="keep", description="What to do about rows that repeat an earlier prompt: keep or leave them out.")
    max_data_gib: Annotated[float, DATA_ONLY, NoBits()] = Field(
        default=MAX_DATA_GIB, gt=0, description="Limit, in GiB, on the estimated memory of the rows of one file or "
        "split. A file above it is refused before it is loaded.")
    num_eval: Annotated[int, Elsewhere("verl: val_max_samples")] = Field(
        default=128, ge=1, description="Held-out problems in an evaluation.")
    chat_template: bool | Literal["auto"] = Field(
        default="auto", description="Whether prompts go through the tokenizer's chat template. auto: if it has one.")
    system_prompt: Annotated[str | None, NoEffectWhile("task.chat_template", (False,))] = Field(
        default=None, description="System message in front of each prompt (chat template only).")
    chat_template_kwargs: Annotated[
        dict[str, Any], NoEffectWhile("task.chat_template", (False,)),
        Elsewhere("verl: apply_chat_template_kwargs", same=("TRL",)),
    ] = Field(
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


def source_problems(task: TaskConfig) -> Iterator[Problem]:
    """Contradictions in where the problems of `task.name = "file"` come from, one line each."""
    if (task.train_file is None) == (task.dataset is None):
        found = "neither is set" if task.dataset is None else "both are set"
        yield Problem(
            "task.train_file", 'task.name = "file" needs exactly one of task.train_file (a jsonl or parquet file) and '
            f"task.dataset (a data set by name); {found}", ("task.dataset",), either=True,
        )
    if task.eval_file is not None and (task.eval_dataset is not None or task.eval_split is not None):
        key = "eval_split" if task.eval_dataset is None else "eval_dataset"
        text = "does not go together with task.eval_file; use one of the two"
        yield Problem(f"task.{key}", text, ("task.eval_file",), either=True)
    elif task.eval_dataset is not None and task.eval_split is None:
        text = 'is needed with task.eval_dataset; set the split, such as "test"'
        yield Problem("task.eval_split", text, ("task.eval_dataset",), either=True)
    elif task.eval_split is not None and task.dataset is None and task.eval_dataset is None:
        text = "has no effect without task.dataset or task.eval_dataset; set one, or remove this key"
        yield Problem("task.eval_split", text, ("task.dataset", "task.eval_dataset", "task.train_file"), void=True)


def silent_columns(task: TaskConfig) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The keys of columns and templates that have no effect, with the reason and the full keys that decide it."""
    silent: dict[str, tuple[str, tuple[str, ...]]] = {}
    if task.prompt_template is not None:
        silent["prompt_column"] = "task.prompt_template makes the prompts", ("task.prompt_template",)
    if task.eval_prompt_template is not None:
        silent["eval_prompt_column"] = "task.eval_prompt_template makes the prompts", ("task.eval_prompt_template",)
    if task.eval_file is None and task.eval_split is None:
        why = "problems are held out of the training ones (no task.eval_split, no task.eval_file)"
        sources = ("task.eval_split", "task.eval_file")
        silent |= dict.fromkeys(("eval_prompt_column", "eval_answer_column", "eval_prompt_template"), (why, sources))
    return silent


def reward_problems(task: TaskConfig) -> Iterator[Problem | str]:
    """Functions of `task.reward` named twice, weights that do not fit them, and what no template may get."""
    names = (task.reward,) if isinstance(task.reward, str) else task.reward or ()
    weights = task.reward_weights
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        yield f"task.reward: names {twice} twice; name it once and give it a weight in task.reward_weights"
    if names and weights is not None and len(weights) != len(names):
        text = f"needs one number for each of the {len(names)} functions of task.reward, got {len(weights)}"
        yield Problem("task.reward_weights", f"{text}; add or remove numbers", ("task.reward",))
    if names and weights and not any(weights):
        yield "task.reward_weights: all are 0, so nothing is rewarded; give one of them another weight"
    if own := sorted(set(task.chat_template_kwargs) & set(TEMPLATE_ARGUMENTS)):
        yield f"task.chat_template_kwargs.{own[0]}: is set by jetrl; remove this key"
