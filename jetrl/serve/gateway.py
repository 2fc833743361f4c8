"""The run's side of `environment.name = "command"`: sessions of programs that call the policy over HTTP.

The HTTP process (`serve/relay.py`) sends each call here. A session is one conversation: a call's messages must begin
with all that was said before in it. What follows goes to the environment as the messages of its turn, and the policy's
next turn is the answer. So tokens are the rollout's own, and nothing is encoded again. Thread-safe.
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
import time
import uuid
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jetrl
from jetrl.chat.fields import Message
from jetrl.errors import shown
from jetrl.serve import pipe
from jetrl.serve.address import listen, require_extra
from jetrl.serve.refusal import Refused
from jetrl.serve.sessions import reward_of, said_of
from jetrl.serve.wire import messages_of

MODEL = "policy"  # the name of the model for programs
_ALLOWED = {"model", "messages", "n", "stream", "user", "metadata", "store"}


class Episode:
    """One program's session. `asks` holds the new messages of each call that has come."""

    def __init__(self, gateway: Gateway) -> None:
        self.id, self.key, self.gateway = uuid.uuid4().hex, secrets.token_urlsafe(24), gateway
        self.asks: queue.Queue[list[Message]] = queue.Queue()
        self.reward: float | None = None
        self._lock = threading.Lock()
        self._said: list[Message] = []  # by both sides, up to the policy's last turn
        self._asked: list[Message] | None = None  # all messages of the call that is not answered yet
        self._before: tuple[list[Message], dict[str, Any]] | None = None  # the last call that was, and its answer
        self._waiting: list[int] = []
        self._closed = False

    @property
    def url(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.gateway.url}/sessions/{self.id}/v1"

    def answer(self, text: str) -> None:
        """The policy's turn: what every caller of the open call gets."""
        with self._lock:
            assert self._asked is not None, "no call is open"
            body = _answer(text)
            self._before = self._asked, body
            self._said = [*self._asked, {"role": "assistant", "content": text}]
            self._asked, waiting, self._waiting = None, self._waiting, []
        for number in waiting:
            self.gateway.send(number, 200, body)

    def close(self, why: str = "The conversation has ended.") -> None:
        """No more calls. One that is open is refused."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, []
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
                self._take_chat(number, body)
                return
        found = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "jetrl"}]}
        self.gateway.send(number, 200, found if what == "models" else {"reward": self.reward})

    def _take_chat(self, number: int, body: Mapping[str, Any]) -> None:
        for key, value in body.items():
            if key not in _ALLOWED and value is not None:
                raise Refused(
                    f"{key} = {shown(value, 60)}: in training the recipe says how the policy is sampled. Leave it out.",
                    param=key, code="unsupported_parameter",
                )
        if body.get("n") not in (None, 1) or body.get("stream") not in (None, False):
            raise Refused("In training n is 1, and answers come whole.", param="n", code="unsupported_parameter")
        messages = list(messages_of(body.get("messages")))
        said = [said_of(message) for message in messages]
        if self._before is not None and said == [said_of(message) for message in self._before[0]]:
            self.gateway.send(number, 200, self._before[1])  # another attempt: the first answer was lost
            return
        if self._asked is not None:
            if said != [said_of(message) for message in self._asked]:
                raise Refused("Another call of this session is open: a conversation has one turn at a time.", 409)
            self._waiting.append(number)
            return
        if len(messages) <= len(self._said) or said[: len(self._said)] != [said_of(m) for m in self._said]:
            raise Refused(
                "The messages do not begin with those of the session's last call and its answer. In training a session "
                "is one conversation: send the whole history, unchanged, and what follows it.",
                param="messages", code="history_changed",
            )
        new = messages[len(self._said) :]
        self._asked = messages
        self._waiting.append(number)
        self.asks.put(new)


class Gateway:
    """The HTTP process and all sessions of a run's process. It starts with the first episode."""

    def __init__(self) -> None:
        self.url = ""
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._episodes: dict[str, Episode] = {}
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> Episode:
        """A session for a program. UserError where the extra is missing."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            episode = Episode(self)
            self._episodes[episode.id] = episode
        return episode

    def forget(self, id: str) -> None:
        """The session takes no more calls."""
        with self._lock:
            self._episodes.pop(id, None)

    def send(self, number: int, status: int, body: Mapping[str, Any]) -> None:
        """Answer a call."""
        self._write({"call": number, "status": status, "body": body})

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


def _answer(text: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time()), "model": MODEL,
        "choices": [{
            "index": 0, "finish_reason": "stop", "logprobs": None,
            "message": {"role": "assistant", "content": text, "refusal": None},
        }],
        "usage": None,
    }


def conversation(messages: Sequence[Message]) -> list[Message]:
    """Messages of a call as an environment returns them."""
    return [dict(message) for message in messages]
