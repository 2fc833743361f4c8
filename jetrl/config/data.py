"""Which keys of `[task]` say where problems and rewards come from, and which of them go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

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


def source_problems(task: TaskConfig) -> Iterator[str]:
    """Contradictions in where the problems of `task.name = "file"` come from, one line each."""
    if (task.train_file is None) == (task.dataset is None):
        found = "neither is set" if task.dataset is None else "both are set"
        yield ('task.train_file: task.name = "file" needs exactly one of task.train_file (a jsonl or parquet file) and '
               f"task.dataset (a data set by name); {found}")
    if task.eval_file is not None and (task.eval_dataset is not None or task.eval_split is not None):
        key = "eval_split" if task.eval_dataset is None else "eval_dataset"
        yield f"task.{key}: does not go together with task.eval_file; take one of the two"
    elif task.eval_dataset is not None and task.eval_split is None:
        yield 'task.eval_split: is needed with task.eval_dataset; set the split, such as "test"'
    elif task.eval_split is not None and task.dataset is None and task.eval_dataset is None:
        yield "task.eval_split: has no effect without task.dataset or task.eval_dataset; set one, or remove this key"


def silent_columns(task: TaskConfig) -> dict[str, str]:
    """The keys of columns and templates that have no effect, with the reason."""
    silent = {}
    if task.prompt_template is not None:
        silent["prompt_column"] = "task.prompt_template makes the prompts"
    if task.eval_prompt_template is not None:
        silent["eval_prompt_column"] = "task.eval_prompt_template makes the prompts"
    if task.eval_file is None and task.eval_split is None:
        why = "problems are held out of the training ones (no task.eval_split, no task.eval_file)"
        silent |= dict.fromkeys(("eval_prompt_column", "eval_answer_column", "eval_prompt_template"), why)
    return silent


def reward_problems(task: TaskConfig) -> Iterator[str]:
    """Functions of `task.reward` named twice, weights that do not fit them, and what no template may get."""
    names = (task.reward,) if isinstance(task.reward, str) else task.reward or ()
    weights = task.reward_weights
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        yield f"task.reward: names {twice} twice; name it once and give it a weight in task.reward_weights"
    if names and weights is not None and len(weights) != len(names):
        yield (f"task.reward_weights: needs one number for each of the {len(names)} functions of task.reward; "
               f"got {len(weights)}")
    if names and weights and not any(weights):
        yield "task.reward_weights: all are 0, so that nothing is rewarded; give one of them another weight"
    if own := sorted(set(task.chat_template_kwargs) & set(TEMPLATE_ARGUMENTS)):
        yield f"task.chat_template_kwargs.{own[0]}: is set by jetrl; remove this key"
