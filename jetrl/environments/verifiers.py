"""The built-in environment `verifiers`: an environment of the package `verifiers` talks to the policy, unmodified.

`environment.params.env` is its `[env]` block. It runs in a process of its own (`verifiers_worker.py`), many episodes at
once, and finds the policy by the base URL and key of a session, as any provider's. Its calls are the conversation, and
the reward of its trace is the conversation's.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jetrl
from jetrl.environments.spoken import ProgramFailed, Spoken
from jetrl.errors import UserError
from jetrl.requirements import install, packages
from jetrl.serve.gateway import MODEL

_HELD_OUT_SEEDS = 2**30  # from here on, of held-out problems (`tasks.environment_task.problem_seed`)
_MOST_EPISODES = 1000  # of one process: verifiers keeps a client for each endpoint that it has seen
_SHOWN = 2000


class _Worker:
    """A process that runs episodes of one environment. `num_tasks` is known once it is ready."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self.results: dict[str, dict[str, Any]] = {}
        self.num_tasks, self.started = 0, 0
        self._errors = tempfile.TemporaryFile()
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._refused: str | None = None
        paths = [str(Path(jetrl.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jetrl.environments.verifiers_worker"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
        )
        self.send(asked)
        threading.Thread(target=self._read, name="jetrl-verifiers", daemon=True).start()
        atexit.register(self.stop)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ready(self) -> None:
        """Wait until it takes episodes. UserError where it cannot."""
        self._ready.wait()
        if self._refused is not None:
            raise UserError(f"environment.params.env: {self._refused}")
        if not self.num_tasks:
            raise UserError(f"environment.params.env: verifiers has ended before its first episode: {self.tail()}")

    def send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._lock, suppress(OSError, ValueError):  # it has ended, which `over` says
            self._process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            self._process.stdin.flush()

    def tail(self) -> str:
        """The end of what it has said of errors."""
        end = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, end - _SHOWN))
        return self._errors.read(_SHOWN).decode("utf-8", "replace").strip()

    def retire(self) -> None:
        """No more episodes: it ends with the last of those that it has."""
        with self._lock, suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def stop(self) -> None:
        """End it."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, 15)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, 9)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "episode" in message:
                self.results[message["episode"]] = message
            else:
                self.num_tasks, self._refused = message.get("num_tasks", 0), message.get("refused")
                self._ready.set()
        self._ready.set()


class _Workers:
    """The process of each environment that is in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: dict[str, _Worker] = {}

    def take(self, asked: Mapping[str, Any]) -> _Worker:
        """A process for one more episode."""
        key = json.dumps(asked, sort_keys=True, default=str)
        with self._lock:
            worker = self._current.get(key)
            if worker is not None and worker.started >= _MOST_EPISODES:
                worker.retire()
                worker = None
            if worker is None or not worker.alive:
                worker = self._current[key] = _Worker(asked)
            worker.started += 1
        worker.ready()
        return worker

    def stop(self) -> None:
        """End all of them."""
        with self._lock:
            for worker in self._current.values():
                worker.stop()
            self._current.clear()


WORKERS = _Workers()


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
        self.worker: _Worker | None = None
        self.result: dict[str, Any] = {}

    def begin(self, problem: dict[str, Any]) -> None:
        """Start the episode of the problem's task."""
        self.worker = WORKERS.take(self.asked)
        self.worker.send({
            "episode": self.episode.id, "url": self.episode.url, "key": self.episode.key, "model": MODEL,
            "task": task_of(problem, self.worker.num_tasks, self.num_held_out),
        })

    def over(self) -> bool:
        """Whether the episode has ended well."""
        assert self.worker is not None
        ended = not self.worker.alive
        self.result = self.worker.results.get(self.episode.id, {})
        if "error" in self.result:
            raise ProgramFailed(self.result["error"])
        if not self.result and ended:
            raise ProgramFailed(f"the process of verifiers has ended: {self.worker.tail()}")
        return bool(self.result)

    def scored(self) -> float | None:
        """The reward of its trace."""
        return self.result["reward"]

    def end(self) -> None:
        """Give the episode up."""
        if self.worker is not None:
            self.worker.send({"cancel": self.episode.id})
            self.worker.results.pop(self.episode.id, None)


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
