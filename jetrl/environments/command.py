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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty
from typing import IO, Any

from jetrl.chat.fields import Message
from jetrl.chat.tool_calls import CallFormat
from jetrl.environments.asked import Asked, Said
from jetrl.environments.retry import score_answer
from jetrl.errors import UserError, shorten
from jetrl.rewards.function import RewardFunction
from jetrl.serve.calls import for_template
from jetrl.serve.gateway import MODEL, Call, Gateway, Rules
from jetrl.untrusted import json_value

_PERIOD = 0.05  # seconds between two looks at the program
_SHOWN = 2000  # bytes of what it printed that are read at its end
_GATEWAY = Gateway()


class ProgramFailed(Exception):
    """The program did not do its part."""


class Command:
    """One conversation. `time_limit`: seconds for the whole program, after which it is ended. `forks`: whether its
    calls may change the history; `ignore`: fields of its calls that are not read, such as "temperature"."""

    chat = True  # whether a chat template is in use; `for_tokenizer` says so, and how calls of tools are written
    form: CallFormat | None = None

    def __init__(
        self, command: str | Sequence[str], reward: RewardFunction | None = None, time_limit: float = 600.0,
        forks: bool = True, ignore: Sequence[str] = (),
    ) -> None:
        self.words = words_of(command)
        if type(time_limit) not in (int, float) or not time_limit > 0:
            raise UserError(f"environment.params.time_limit: must be seconds above 0, got {time_limit!r}.")
        if type(forks) is not bool:
            raise UserError(f"environment.params.forks: must be true or false, got {forks!r}.")
        if isinstance(ignore, str) or not all(isinstance(name, str) for name in ignore):
            raise UserError(f"environment.params.ignore: must be a list of fields, got {ignore!r}.")
        self.reward, self.time_limit, self.forks, self.ignore = reward, time_limit, forks, frozenset(ignore)
        self.call: Call | None = None  # the one that the policy answers now
        self.process: subprocess.Popen[bytes] | None = None

    def reset(self, problem: dict[str, Any]) -> Asked:
        """Start the program; the messages of its first call."""
        self.problem, self.last = problem, ""
        self.episode = _GATEWAY.open(Rules(self.forks, self.ignore, self.chat, self.form))
        self.deadline = time.monotonic() + self.time_limit
        self.output, self.errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        given = {
            "OPENAI_BASE_URL": self.episode.url, "OPENAI_API_KEY": self.episode.key, "OPENAI_MODEL": MODEL,
            # a plain `python` is the one that runs jetrl
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
        }
        with tempfile.TemporaryFile() as task:
            task.write(json.dumps(problem, ensure_ascii=False, default=str).encode())
            task.seek(0)
            try:
                self.process = subprocess.Popen(
                    self.words, stdin=task, stdout=self.output, stderr=self.errors, env=os.environ | given,
                    start_new_session=True,
                )
            except OSError as error:
                raise UserError(f"environment.params.command: {self.words[0]} cannot be started: {error}.") from error
        messages = self._next()
        if messages is None:
            raise ProgramFailed("the program ended without asking the policy")
        return messages

    def step(self, action: Said) -> tuple[Sequence[Message], float | None, bool]:
        """Answer the program's call; the messages of its next one, or its end and its reward."""
        assert self.call is not None
        self.last = action.turn.text
        self.episode.answer(self.call, action.prompt, action.turn)
        messages = self._next()
        return ([], self._reward(), True) if messages is None else (messages, None, False)

    def close(self) -> None:
        """End the program, and what it has started, wherever it is."""
        if self.process is None:
            return
        self.episode.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.output.close()
        self.errors.close()

    def _next(self) -> Asked | None:
        """The messages of the next call; None: the program has ended, without an error."""
        assert self.process is not None
        while True:
            status = self.process.poll()
            with suppress(Empty):  # a call that came before its end counts
                self.call = self.episode.asks.get(timeout=_PERIOD)
                return Asked(for_template(self.call.new), self.call.ask.variables, self.call.after)
            if status:
                raise ProgramFailed(f"the program ended with status {status}: {_tail(self.errors)}")
            if status == 0:
                return None
            if time.monotonic() > self.deadline:
                os.killpg(self.process.pid, signal.SIGKILL)
                raise ProgramFailed(f"the program took longer than time_limit = {self.time_limit:g} seconds")

    def _reward(self) -> float | None:
        if self.episode.reward is not None:
            return self.episode.reward
        lines = _tail(self.output).splitlines()
        with suppress(ValueError):
            found = json_value(lines[-1] if lines else "")
            if isinstance(found, dict) and "reward" in found:
                return found["reward"]  # the pool checks it
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
    return words


def _tail(file: IO[bytes]) -> str:
    """The end of what was written."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _SHOWN))
    return file.read(_SHOWN).decode("utf-8", "replace").strip()
