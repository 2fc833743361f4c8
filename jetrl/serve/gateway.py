"""The run's side of `environment.name = "command"`: sessions of programs that call the policy over HTTP.

The HTTP process (`serve/relay.py`) sends each call here. A session is one conversation: where a call's messages begin
with what was said in it, what follows goes to the environment as the messages of its turn, and the policy's next turn
is the answer. So tokens are the rollout's own, and nothing is encoded again. A history that was changed goes on from
the turn up to which it is the same, or begins anew: a branch of the conversation. Thread-safe.
"""

from __future__ import annotations

import atexit
import hmac
import os
import queue
import secrets
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jetrl
from jetrl.chat.fields import Message, message_of
from jetrl.chat.tool_calls import CallFormat
from jetrl.serve import pipe
from jetrl.serve.address import listen, require_extra
from jetrl.serve.refusal import Refused
from jetrl.serve.sessions import reward_of, session_keys
from jetrl.serve.whole import answer_of
from jetrl.serve.wire import Ask, turn_ask
from jetrl.types import Completion

MODEL = "policy"  # the name of the model for programs
_MOST_OPEN = 64  # calls of one session that wait


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call that waits for the policy. `new`: the messages behind what the policy said in turn `after` (-1: all of
    them; nothing that was said before is in it)."""

    ask: Ask
    new: tuple[Message, ...]
    after: int
    key: bytes  # of all its messages


@dataclass(frozen=True, slots=True)
class Rules:
    """What a program may send. `forks`: whether its history may change; `ignore`: fields that are not read; `chat`:
    whether a chat template is in use, which tools need; `form`: how the policy writes calls of tools."""

    forks: bool = True
    ignore: frozenset[str] = frozenset()
    chat: bool = True
    form: CallFormat | None = None


class Episode:
    """One program's session. `asks` holds the calls that have come, which are answered in this order; None: whoever
    waits for one should see whether the program has ended."""

    def __init__(self, gateway: Gateway, rules: Rules | None = None) -> None:
        self.id, self.key, self.gateway = uuid.uuid4().hex, secrets.token_urlsafe(24), gateway
        self.rules = Rules() if rules is None else rules
        self.asks: queue.Queue[Call | None] = queue.Queue()
        self.reward: float | None = None
        self._lock = threading.Lock()
        self._turns: dict[bytes, int] = {}  # turns of the policy, by what was said up to their end
        self._answers: dict[bytes, dict[str, Any]] = {}  # by what was asked
        self._open: dict[bytes, list[tuple[int, Ask]]] = {}  # who waits for the answer to what
        self._num_turns = 0
        self._closed = False

    @property
    def url(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.gateway.url}/sessions/{self.id}/v1"

    def answer(self, call: Call, prompt: tuple[int, ...], turn: Completion) -> None:
        """The policy's turn: what every caller of this call gets."""
        full = replace(call.ask, token_ids=True, logprobs=True)
        body = answer_of(full, prompt, turn, self.rules.form, MODEL)
        said = message_of({key: each for key, each in body["choices"][0]["message"].items() if each is not None})
        with self._lock:
            self._answers[call.key] = body
            self._turns.setdefault(session_keys([*call.ask.messages, said], call.ask.variables)[-1], self._num_turns)
            self._num_turns += 1
            waiting = self._open.pop(call.key)
        for number, ask in waiting:
            self._send(number, ask, body)

    def close(self, why: str = "The conversation has ended.") -> None:
        """No more calls. Those that are open are refused."""
        with self._lock:
            self._closed = True
            waiting = [number for callers in self._open.values() for number, _ in callers]
            self._open = {}
        self.gateway.forget(self.id)
        for number in waiting:
            self.gateway.refuse(number, Refused(why, 410, code="session_closed"))

    def take(self, number: int, what: str, body: Mapping[str, Any]) -> None:
        """A call of the program. Refused: what this conversation cannot be."""
        with self._lock:
            if self._closed:
                raise Refused("The conversation has ended.", 410, code="session_closed")
            if what == "reward":
                self.reward = reward_of(body.get("reward"), self.reward)
            elif what == "completions":
                self._take_chat(number, turn_ask(body, self.rules.ignore))
                return
        found = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "jetrl"}]}
        self.gateway.send(number, 200, found if what == "models" else {"reward": self.reward})

    def _take_chat(self, number: int, ask: Ask) -> None:
        if ask.variables and not self.rules.chat:
            name = "tools" if "tools" in ask.variables else "chat_template_kwargs"
            raise Refused(f"{name}: the run's prompts are plain text, and no chat template reads it.", param=name)
        keys = session_keys(ask.messages, ask.variables)
        if (body := self._answers.get(keys[-1])) is not None:
            self._send(number, ask, body)  # another attempt: the first answer was lost
            return
        if (waiting := self._open.get(keys[-1])) is not None:
            waiting.append((number, ask))
            return
        if len(self._open) >= _MOST_OPEN:
            raise Refused(f"{_MOST_OPEN} calls of this session are open.", 429, code="too_many_calls", retry_after=1)
        if ask.messages[-1]["role"] == "assistant":
            raise Refused("The last message is the policy's own: send what follows it.", param="messages")
        known = next((n for n in range(len(keys) - 1, 0, -1) if keys[n - 1] in self._turns), 0)
        after = self._turns[keys[known - 1]] if known else -1
        if not self.rules.forks and (self._open or after != self._num_turns - 1):
            raise Refused(
                "The messages do not begin with those of the session's last call and its answer. This recipe takes one "
                "conversation (environment.params.forks = false): send the whole history, unchanged, and what follows "
                "it, one call at a time.", param="messages", code="history_changed",
            )
        self._open[keys[-1]] = [(number, ask)]
        self.asks.put(Call(ask, tuple(ask.messages[known:]), after, keys[-1]))

    def _send(self, number: int, ask: Ask, body: Mapping[str, Any]) -> None:
        """What this caller asked for of the answer."""
        choice = dict(body["choices"][0])
        if not ask.token_ids:
            del choice["token_ids"]
        if not ask.logprobs:
            choice["logprobs"] = None
        given = {**body, "choices": [choice]}
        if not ask.token_ids:
            del given["prompt_token_ids"]
        self.gateway.send(number, 200, given, ask)


class Gateway:
    """The HTTP process and all sessions of a run's process. It starts with the first episode."""

    def __init__(self) -> None:
        self.url = ""
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._episodes: dict[str, Episode] = {}
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def open(self, rules: Rules | None = None) -> Episode:
        """A session for a program. UserError where the extra is missing."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            episode = Episode(self, rules)
            self._episodes[episode.id] = episode
        return episode

    def forget(self, id: str) -> None:
        """The session takes no more calls."""
        with self._lock:
            self._episodes.pop(id, None)

    def send(self, number: int, status: int, body: Mapping[str, Any], ask: Ask | None = None) -> None:
        """Answer a call, as a stream if `ask` says so."""
        stream = {"usage": ask.usage} if ask is not None and ask.stream else None
        self._write({"call": number, "status": status, "body": body, "stream": stream})

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._connection is not None
        with self._writing:
            try:
                pipe.send(self._connection, message)
            except OSError:
                return  # the HTTP process has ended: the programs notice, and the next episode starts another

    def refuse(self, number: int, error: Refused) -> None:
        """Answer a call with an error."""
        self.send(number, error.status, error.to_json())

    def stop(self) -> None:
        """End the HTTP process."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            self._write({"stop": True})  # closing the pipe would not reach a thread that reads it
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> None:
        require_extra()
        listener = listen("127.0.0.1", 0)
        ours, theirs = Pipe()
        fds = listener.fileno(), theirs.fileno()
        package = str(Path(jetrl.__file__).parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jetrl.serve.relay", *map(str, fds)], pass_fds=fds, stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, start_new_session=True,
        )
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        theirs.close()
        self._connection = ours
        threading.Thread(target=self._read, args=(ours,), name="jetrl-gateway", daemon=True).start()
        atexit.register(self.stop)

    def _read(self, connection: Connection) -> None:
        try:
            while True:
                self._take(pipe.receive(connection))
        except (EOFError, OSError):
            return  # it has ended; the next episode starts another

    def _take(self, message: dict[str, Any]) -> None:
        number = message["call"]
        try:
            with self._lock:
                episode = self._episodes.get(message["session"])
            if episode is None or not hmac.compare_digest(message["key"].encode(), episode.key.encode()):
                raise Refused("There is no such session, or the key is not its own.", 401, code="invalid_api_key")
            episode.take(number, message["what"], message["body"])
        except Refused as error:
            self.refuse(number, error)
