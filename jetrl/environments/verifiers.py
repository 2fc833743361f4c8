"""The built-in environment `verifiers`: an environment of the package `verifiers` talks to the policy, unmodified.

`environment.params.env` is its `[env]` block. It runs in a process of its own (`verifiers_worker.py`), many episodes at
once, and finds the policy by the base URL and key of a session, as any provider's. Its calls are the conversation, and
the reward of its trace is the conversation's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jetrl
from jetrl.environments.spoken import Spoken
from jetrl.environments.worker import Worker, Workers, give_up, result_of
from jetrl.errors import UserError
from jetrl.requirements import install, packages
from jetrl.serve.gateway import MODEL

_HELD_OUT_SEEDS = 2**30  # from here on, of held-out problems (`tasks.environment_task.problem_seed`)
_PACKAGE = str(Path(jetrl.__file__).parents[1])
_PROGRAM = (
    sys.executable, "-c",
    f"import sys; sys.path.insert(0, {_PACKAGE!r}); from jetrl.environments.verifiers_worker import main; main()",
)
WORKERS = Workers(most=1000)  # verifiers keeps a client for each endpoint that it has seen


class Verifiers(Spoken):
    """One episode. `env`: the block `[env]` of verifiers' config, with `taskset.id`; `num_held_out`: so many of its
    last tasks are for evaluations only (0: these have the same tasks); `most_tasks`: how many of its first tasks are
    used, which an endless taskset needs; `folder`: where its module is, if it is not installed; `time_limit`: seconds
    for an episode."""

    def __init__(
        self, env: Mapping[str, Any], num_held_out: int = 0, most_tasks: int | None = None,
        folder: str | None = None, time_limit: float = 600.0, forks: bool = True, ignore: Sequence[str] = (),
    ) -> None:
        super().__init__(time_limit, forks, ignore)
        if folder is not None and not os.path.isdir(folder):
            raise UserError(f"environment.params.folder = {folder!r}: there is no such folder.")
        self.num_held_out = num_held_out
        self.asked = {
            "env": env_of(env), "most_tasks": most_tasks, "folder": None if folder is None else os.path.abspath(folder),
        }
        for name, value in (("num_held_out", num_held_out), ("most_tasks", most_tasks)):
            if value is not None and (type(value) is not int or value < (name == "most_tasks")):
                raise UserError(f"environment.params.{name}: must be a number of tasks, got {value!r}.")
        self.worker: Worker | None = None
        self.result: dict[str, Any] = {}

    def begin(self, problem: dict[str, Any]) -> None:
        """Start the episode of the problem's task."""
        self.worker = WORKERS.take(self.episode.id, _PROGRAM, self.asked)
        said = self.worker.wait()
        if "num_tasks" not in said:
            why = said.get("refused") or f"verifiers has ended before its first episode: {self.worker.tail()}"
            raise UserError(f"environment.params.env: {why}")
        self.speaks_in(self.worker)
        self.worker.send({
            "episode": self.episode.id, "url": self.episode.url, "key": self.episode.key, "model": MODEL,
            "task": task_of(problem, said["num_tasks"], self.num_held_out),
        })

    def over(self) -> bool:
        """Whether the episode has ended well."""
        assert self.worker is not None
        self.result = result_of(self.worker, self.episode.id)
        return bool(self.result)

    def scored(self) -> float | None:
        """The reward of its trace."""
        return self.result["reward"]

    def end(self) -> None:
        """Give the episode up."""
        if self.worker is not None:
            give_up(self.worker, self.episode.id)


def require_verifiers() -> None:
    """UserError where the packages of the extra `verifiers` are missing."""
    if missing := [package for package in packages("verifiers") if not package.fits]:
        raise UserError(f'environment.name = "verifiers": {missing[0]}. Install what it needs: {install("verifiers")}')


def env_of(env: Any) -> dict[str, Any]:
    """The `[env]` block, with programs of agents in processes of this machine unless it says where; UserError for what
    is none."""
    taskset = env.get("taskset") if isinstance(env, Mapping) else None
    if not isinstance(taskset, Mapping) or not isinstance(taskset.get("id"), str) or not taskset["id"]:
        raise UserError(
            "environment.params.env: write the block [env] of the verifiers config, at least "
            '{ taskset = { id = "the installed taskset" } }.'
        )
    given = dict(env)
    if "agent" in given or "id" not in given:
        agent = dict(given.get("agent") or {})
        given["agent"] = {"runtime": {"type": "subprocess"}, **agent}
    return given


def task_of(problem: Mapping[str, Any], num_tasks: int, num_held_out: int) -> int:
    """The place of a problem's task: the training tasks in order, again and again; held-out ones likewise."""
    if num_held_out >= num_tasks:
        raise UserError(
            f"environment.params.num_held_out = {num_held_out}: the taskset has {num_tasks} tasks. Leave some to train "
            "on."
        )
    index, evaluated = problem["index"], problem["seed"] >= _HELD_OUT_SEEDS
    if evaluated and num_held_out:
        return num_tasks - num_held_out + index % num_held_out
    return index % (num_tasks - num_held_out)
