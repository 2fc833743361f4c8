"""The task that a config names, and its problems step by step as prompts.

The names of tasks are in one table, `TASKS`; a new task is a module with a class and a line there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jetrl.chat.prompts import OverlongPrompt, encode_problem, opened_text
from jetrl.config import Config, TaskConfig
from jetrl.rewards.function import RewardFunction
from jetrl.tasks.addition import AdditionTask
from jetrl.tasks.environment_task import EnvironmentTask, problem_seed
from jetrl.tasks.files import FileTask
from jetrl.tasks.gym import GymTask
from jetrl.tasks.long import KINDS, LongTask
from jetrl.tasks.protocol import Task
from jetrl.types import Problem, Prompt
from jetrl.user_code.from_python import NOTHING, FromPython

__all__ = ["TASKS", "RewardFunction", "Task", "build_task", "encode_problem", "eval_prompts", "prompt_of", "sample"]

@dataclass(frozen=True, slots=True)
class Given:
    """What a task is built from. `environment` is its name, or empty. The last four are for `FileTask`."""

    config: TaskConfig
    seed: int
    tokenizer: Any
    environment: str
    needs_answer: bool
    hold_out: bool
    own: FromPython = NOTHING
    given: Callable[[Problem], object] | None = None


# task.name -> its builder
TASKS: Mapping[str, Callable[[Given], Task]] = {
    "addition": lambda given: AdditionTask(given.config.params, given.seed, given.tokenizer),
    "file": lambda given: _file_task(given),
    "gym": lambda given: GymTask(given.config.params, given.seed, given.config.num_eval),
    "environment": lambda given: EnvironmentTask(given.config.params, given.seed, given.environment),
    **dict.fromkeys(KINDS, lambda given: LongTask(given.config.name, given.config.params, given.seed, given.tokenizer)),
}


def build_task(
    config: TaskConfig, seed: int, tokenizer: Any, environment: str | None = None, *, needs_answer: bool = True,
    hold_out: bool = True, own: FromPython = NOTHING, given: Callable[[Problem], object] | None = None,
) -> Task:
    """The task that the config names. The tokenizer decides what addition's `style = "auto"` means.

    `needs_answer`: whether the reward reads answers. `hold_out` False: a file's rows are all for training.
    `own`: rows that a program gave. `given`: encodes an answer that a row holds; None: nothing is learned from rows.
    """
    return TASKS[config.name](Given(config, seed, tokenizer, environment or "", needs_answer, hold_out, own, given))


def rows_of_epoch(task: Task) -> int | None:
    """How many problems one pass over the training data has; None: they are made without end."""
    return task.num_rows if isinstance(task, FileTask) else None


def holds_out(config: Config) -> bool:
    """Whether problems are kept for evaluation: while evaluation is off, a file's own rows are not."""
    task = config.task
    own_rows = task.name == "file" and task.eval_file is None and task.eval_split is None
    return not own_rows or config.eval.eval_interval > 0


def num_eval_shapes_training(config: Config) -> bool:
    """Whether `task.num_eval` says what is trained on: held-out problems are taken out of a file's own rows and of
    reasoning-gym's questions. Made problems are held out by their hash, an environment's by their seed, whatever their
    number."""
    task = config.task
    own_rows = task.name == "file" and task.eval_file is None and task.eval_split is None
    return task.name == "gym" or (own_rows and holds_out(config))


def _file_task(given: Given) -> FileTask:
    """Without an environment, all prompts or given answers are encoded once, so that a bad one stops the run before it
    begins or is left out. With one, the environment makes the prompts."""

    def fits(problem: Problem) -> bool:
        try:
            if given.given is not None:
                given.given(problem)
            else:
                encode_problem(problem, given.tokenizer, given.config)
        except OverlongPrompt:
            if given.config.overlong_prompts == "error":
                raise
            return False
        return True

    return FileTask(
        given.config, given.seed, needs_answer=given.needs_answer, hold_out=given.hold_out,
        fits=None if given.environment else fits, own=given.own, given=given.given is not None,
    )


def sample(
    task: Task, tokenizer: Any, first: int, count: int, config: Config, conversations: bool = False
) -> list[Prompt]:
    """`count` prompts of the training stream, from number `first` (from 0) on.

    With `conversations`, problems get the `index` and `seed` that environments see, and prompts have no tokens:
    the environment's first messages will be the prompt.
    """
    indices = range(first, first + count)
    if conversations:
        return [_opening(i, task.problem(i), config.seed) for i in indices]
    return [prompt_of(i, task.problem(i), tokenizer, config.task) for i in indices]


def eval_prompts(task: Task, tokenizer: Any, config: Config, conversations: bool = False) -> list[Prompt]:
    """The held-out prompts of an evaluation: `task.num_eval`, or all if a file has fewer."""
    problems = list(enumerate(task.eval_problems(config.task.num_eval)))
    if conversations:
        return [_opening(i, problem, None) for i, problem in problems]
    return [prompt_of(i, problem, tokenizer, config.task) for i, problem in problems]


def prompt_of(index: int, problem: Problem, tokenizer: Any, config: TaskConfig) -> Prompt:
    """The problem as the prompt of number `index`. UserError where it cannot be encoded."""
    tokens = tuple(encode_problem(problem, tokenizer, config))
    return Prompt(index, problem, tokens, opened_text(problem, tokenizer, config))


def _opening(index: int, problem: Problem, seed: int | None) -> Prompt:
    """A problem for an environment. The data's own columns `index` and `seed` stay as they are."""
    stream = {"index": index, "seed": problem_seed(seed, index)}
    return Prompt(index, replace(problem, extra={**stream, **problem.extra}), ())
