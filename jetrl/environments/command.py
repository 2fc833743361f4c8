"""The built-in environment `command`: a program of any kind talks to the policy, through OpenAI's API.

Each conversation starts the program. It finds the policy at OPENAI_BASE_URL, with the key OPENAI_API_KEY, and reads the
problem as JSON from its standard input. Each of its calls is a turn of the policy. When it ends, so does the
conversation; its reward is what it posted, or the last line that it printed, {"reward": 0.5}, or else the task's reward
for the policy's last turn. A program that fails is a failed conversation, which is not one with reward 0.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

from jetrl.environments.retry import score_answer
from jetrl.environments.spoken import Spoken
from jetrl.environments.worker import (
    ConversationFailed,
    Worker,
    Workers,
    give_up,
    path_of_programs,
    result_of,
)
from jetrl.errors import UserError, shorten
from jetrl.parallel.launch import outside
from jetrl.rewards.function import RewardFunction
from jetrl.serve.gateway import MODEL
from jetrl.untrusted import json_value

_SHOWN = 2000  # bytes of what it printed that are read at its end


WORKERS = Workers()


class Command(Spoken):
    """A program speaks, one for each conversation, which is ended after `time_limit` seconds; or with `lasting` one
    for all of them (`environments/worker.py`)."""

    def __init__(
        self, command: str | Sequence[str], reward: RewardFunction | None = None, time_limit: float = 600.0,
        forks: bool = True, ignore: Sequence[str] = (), lasting: bool = False,
    ) -> None:
        super().__init__(time_limit, forks, ignore)
        if type(lasting) is not bool:
            raise UserError(f"environment.params.lasting: must be true or false, got {lasting!r}.")
        self.words, self.reward, self.lasting = words_of(command), reward, lasting
        self.worker: Worker | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self, problem: dict[str, Any]) -> None:
        """Start the program, or tell the one that runs."""
        if self.lasting:
            self.worker = WORKERS.take(self.episode.id, self.words)
            self.speaks_in(self.worker)
            self.worker.send({
                "episode": self.episode.id, "url": self.episode.url, "key": self.episode.key, "model": MODEL,
                "problem": problem,
            })
            return
        self.output, self.errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        given = {
            "OPENAI_BASE_URL": self.episode.url, "OPENAI_API_KEY": self.episode.key, "OPENAI_MODEL": MODEL,
            "PATH": path_of_programs(),
        }
        with tempfile.TemporaryFile() as task:
            task.write(json.dumps(problem, ensure_ascii=False, default=str).encode())
            task.seek(0)
            try:
                self.process = subprocess.Popen(
                    self.words, stdin=task, stdout=self.output, stderr=self.errors, env=outside() | given,
                    start_new_session=True,
                )
            except OSError as error:
                raise UserError(f"environment.params.command: {self.words[0]} cannot be started: {error}.") from error

    def over(self) -> bool:
        """Whether the program has ended with status 0, or has done with this conversation."""
        if self.worker is not None:
            return bool(result_of(self.worker, self.episode.id))
        assert self.process is not None
        status = self.process.poll()
        if status:
            raise ConversationFailed(f"the program ended with status {status}: {_tail(self.errors)}")
        return status == 0

    def end(self) -> None:
        """End the program, and what it has started, wherever it is."""
        if self.worker is not None:
            give_up(self.worker, self.episode.id)
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the conversation and the program."""
        super().close()
        if self.process is not None:
            self.process.wait()
            self.output.close()
            self.errors.close()

    def scored(self) -> float | None:
        """What it posted or printed, or the task's reward."""
        if self.episode.reward is not None:
            return self.episode.reward
        if self.worker is not None and "reward" in (found := result_of(self.worker, self.episode.id)):
            return found["reward"]  # the pool checks it
        lines = _tail(self.output).splitlines() if self.process is not None else []
        with suppress(ValueError):
            found = json_value(lines[-1] if lines else "")
            if isinstance(found, dict) and "reward" in found:
                return found["reward"]
        return None if self.reward is None else score_answer(self.reward, self.problem, self.last)


def words_of(command: Any) -> list[str]:
    """The program and its arguments; UserError for what is none."""
    try:
        words = shlex.split(command) if isinstance(command, str) else list(command)
    except (TypeError, ValueError):
        words = []
    if not words or not all(isinstance(word, str) and word for word in words):
        raise UserError(
            f"environment.params.command = {shorten(repr(command))}: write a program and its arguments, such as "
            '"python agent.py".'
        )
    if shutil.which(words[0], path=path_of_programs()) is None:
        raise UserError(
            f"environment.params.command: {words[0]} cannot be started: there is no such program, or it may not be "
            "executed. Name one that is in the PATH, or a file with its folder."
        )
    return words


def _tail(file: IO[bytes]) -> str:
    """The end of what was written."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _SHOWN))
    return file.read(_SHOWN).decode("utf-8", "replace").strip()
