"""`Spoken`: an environment that others speak through: their calls of the policy, over HTTP, are its messages.

`command` and `verifiers` are such. A session of the gateway is the conversation; whoever speaks in it starts with
`begin`, and `over` says whether he has ended.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty
from typing import Any

from jetrl.chat.fields import Message
from jetrl.chat.tool_calls import CallFormat
from jetrl.environments.asked import Asked, Said
from jetrl.environments.worker import ConversationFailed, Worker
from jetrl.errors import UserError
from jetrl.serve.calls import for_template
from jetrl.serve.gateway import Call, Gateway, Rules

_PERIOD = 0.05  # seconds between two looks at whether it is over
_TOLD = 1.0  # the same where its end is told: a hundred threads that look often take a core
GATEWAY = Gateway()


class Spoken(ABC):
    """One conversation. `time_limit`: seconds for all of it; `forks`: whether calls may change the history; `ignore`:
    fields of calls that are not read, such as "temperature"."""

    chat = True  # whether a chat template is in use; `environment.for_tokenizer` says so, and how tools are called
    form: CallFormat | None = None

    def __init__(self, time_limit: float, forks: bool, ignore: Sequence[str]) -> None:
        if type(time_limit) not in (int, float) or not time_limit > 0:
            raise UserError(f"environment.params.time_limit: must be seconds above 0, got {time_limit!r}.")
        if type(forks) is not bool:
            raise UserError(f"environment.params.forks: must be true or false, got {forks!r}.")
        if isinstance(ignore, str) or not all(isinstance(name, str) for name in ignore):
            raise UserError(f"environment.params.ignore: must be a list of fields, got {ignore!r}.")
        self.time_limit, self.forks, self.ignore = time_limit, forks, frozenset(ignore)
        self.call: Call | None = None  # the one that the policy answers now
        self.period = _PERIOD

    @abstractmethod
    def begin(self, problem: dict[str, Any]) -> None:
        """Let it speak, to `self.episode`."""

    @abstractmethod
    def over(self) -> bool:
        """Whether it has ended without an error; ConversationFailed with one."""

    @abstractmethod
    def scored(self) -> float | None:
        """The reward at its end."""

    @abstractmethod
    def end(self) -> None:
        """End what still speaks. Also where it never began."""

    def reset(self, problem: dict[str, Any]) -> Asked:
        """Begin; the messages of the first call."""
        self.problem, self.last = problem, ""
        self.episode = GATEWAY.open(Rules(self.forks, self.ignore, self.chat, self.form))
        self.deadline = time.monotonic() + self.time_limit
        self.begin(problem)
        messages = self._next()
        if messages is None:
            raise ConversationFailed("the program ended without asking the policy")
        return messages

    def speaks_in(self, worker: Worker) -> None:
        """It is a conversation of a process that has many, and tells their ends."""
        self.period = _TOLD
        worker.wakes[self.episode.id] = lambda: self.episode.asks.put(None)

    def step(self, action: Said) -> tuple[Sequence[Message], float | None, bool]:
        """Answer the call; the messages of the next one, or the end and its reward."""
        assert self.call is not None
        self.last = action.turn.text
        self.episode.answer(self.call, action.prompt, action.turn)
        messages = self._next()
        return ([], self.scored(), True) if messages is None else (messages, None, False)

    def close(self) -> None:
        """End the conversation, and what speaks in it."""
        episode = getattr(self, "episode", None)
        if episode is not None:
            episode.close()
        self.end()

    def _next(self) -> Asked | None:
        """The messages of the next call; None: it has ended, without an error."""
        while True:
            failed, over = None, False
            try:
                over = self.over()
            except ConversationFailed as error:
                failed = error
            with suppress(Empty):  # a call that came before its end counts
                call = self.episode.asks.get(timeout=_PERIOD if over or failed else self.period)
                if call is not None:
                    self.call = call
                    return Asked(for_template(call.new), call.ask.variables, call.after)
            if failed is not None:
                raise failed
            if over:
                return None
            if time.monotonic() > self.deadline:
                self.end()
                raise ConversationFailed(f"the program took longer than time_limit = {self.time_limit:g} seconds")
