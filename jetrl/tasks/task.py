"""The task that a config names, and its problems step by step as prompts.

Names of tasks stand in one table, `TASKS`; a new task is a module with a class and a line there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jetrl.config import Config, TaskConfig
from jetrl.tasks.addition import AdditionTask
from jetrl.tasks.environment_task import EnvironmentTask, problem_seed
from jetrl.tasks.files import FileTask
from jetrl.tasks.gym import GymTask
from jetrl.tasks.prompts import encode_problem
from jetrl.tasks.protocol import RewardFunction, Task
from jetrl.types import Problem, Prompt

__all__ = ["TASKS", "RewardFunction", "Task", "build_task", "encode_problem", "eval_prompts", "sample"]

# task.name -> its builder, from (config, the run's seed, tokenizer, name of the environment)
TASKS: Mapping[str, Callable[[TaskConfig, int, Any, str], Task]] = {
    "addition": lambda config, seed, tokenizer, _: AdditionTask(config.params, seed, tokenizer),
    "file": lambda config, seed, *_: FileTask(config, seed),
    "gym": lambda config, seed, *_: GymTask(config.params, seed, config.num_eval),
    "environment": lambda config, seed, _, environment: EnvironmentTask(config.params, seed, environment),
}


def build_task(config: TaskConfig, seed: int, tokenizer: Any, environment: str | None = None) -> Task:
    """The task that the config names. The tokenizer decides what addition's `style = "auto"` means.

    Without an environment, the prompts of a file are all encoded once, so that a bad one stops the run before it
    begins. With one (its name), the environment makes the prompts.
    """
    task = TASKS[config.name](config, seed, tokenizer, environment or "")
    if isinstance(task, FileTask) and environment is None:
        for problem in task.all_problems():
            encode_problem(problem, tokenizer, config)
    return task


def sample(
    task: Task, tokenizer: Any, first: int, count: int, config: Config, conversations: bool = False
) -> list[Prompt]:
    """`count` prompts of the training stream, from number `first` (from 0) on.

    With `conversations`, problems get the `index` and `seed` that environments are given, and prompts have no tokens:
    the environment's first messages will be the prompt.
    """
    indices = range(first, first + count)
    if conversations:
        return [_opening(i, task.problem(i), config.seed) for i in indices]
    return [_prompt(i, task.problem(i), tokenizer, config.task) for i in indices]


def eval_prompts(task: Task, tokenizer: Any, config: Config, conversations: bool = False) -> list[Prompt]:
    """The held-out prompts of an evaluation: `task.num_eval`, or all where a file has fewer."""
    problems = list(enumerate(task.eval_problems(config.task.num_eval)))
    if conversations:
        return [_opening(i, problem, None) for i, problem in problems]
    return [_prompt(i, problem, tokenizer, config.task) for i, problem in problems]


def _prompt(index: int, problem: Problem, tokenizer: Any, config: TaskConfig) -> Prompt:
    return Prompt(index, problem, tuple(encode_problem(problem, tokenizer, config)))


def _opening(index: int, problem: Problem, seed: int | None) -> Prompt:
    """A problem for an environment. Columns `index` and `seed` of the data stay as they are."""
    stream = {"index": index, "seed": problem_seed(seed, index)}
    return Prompt(index, replace(problem, extra={**stream, **problem.extra}), ())
