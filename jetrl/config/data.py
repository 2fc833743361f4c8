"""Which keys of `[task]` say where problems and rewards come from, and which of them go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jetrl.config.base import Problem

if TYPE_CHECKING:
    from jetrl.config.sections import TaskConfig

# Keys for task.name = "file" only.
DATA_KEYS = (
    "train_file", "eval_file", "dataset", "dataset_config", "dataset_revision", "train_split", "eval_split",
    "eval_dataset", "eval_dataset_config", "eval_dataset_revision", "prompt_column", "answer_column", "prompt_template",
    "eval_prompt_column", "eval_answer_column", "eval_prompt_template",
)
ROW_KEYS = ("overlong_prompts", "repeated_prompts", "max_data_gib")  # which rows are used; as above
MAX_DATA_GIB = 4.0  # default of task.max_data_gib
# What jetrl itself passes to a chat template.
TEMPLATE_ARGUMENTS = ("conversation", "chat_template", "add_generation_prompt", "tokenize", "messages")


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
        text = "does not go together with task.eval_file; take one of the two"
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
        yield "task.reward_weights: all are 0, so that nothing is rewarded; give one of them another weight"
    if own := sorted(set(task.chat_template_kwargs) & set(TEMPLATE_ARGUMENTS)):
        yield f"task.chat_template_kwargs.{own[0]}: is set by jetrl; remove this key"
