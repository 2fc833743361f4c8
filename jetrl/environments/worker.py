"""A process that has many conversations at once: what the run tells it, and what it says at their ends.

JSON by lines. In: what `hello` says, if anything; then for each conversation its id (`episode`), the policy's `url`,
`key` and `model`, and what else there is of it; then perhaps that it was cancelled. Out: of each conversation, in any
order, its `episode` with `reward` or `error`. Other lines that it prints are passed by.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jetrl.errors import UserError
from jetrl.parallel.launch import outside
from jetrl.untrusted import json_value

_SHOWN = 2000  # bytes of its errors
_PATIENCE = 5.0


def path_of_programs() -> str:
    """The variable PATH of a program that is started: a plain `python` is the one that runs jetrl."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


class Worker:
    """The process. `results`: by conversation, until they are taken; `wakes`: called once when one of them comes, or
    will not come; `said`: its other messages. UserError where it cannot be started."""

    def __init__(self, words: Sequence[str], hello: Mapping[str, Any] | None = None) -> None:
        self.results: dict[str, dict[str, Any]] = {}
        self.wakes: dict[str, Callable[[], object]] = {}
        self.said: dict[str, Any] = {}
        self.started, self.done = 0, False  # done: it has said all that it will
        self._open, self._retired = set[str](), False
        self._errors = tempfile.TemporaryFile()
        self._lock, self._spoke = threading.Lock(), threading.Event()
        try:
            self._process = subprocess.Popen(
                list(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                start_new_session=True, env=outside() | {"PATH": path_of_programs(), "PYTHONUNBUFFERED": "1"},
            )
        except OSError as error:
            raise UserError(f"environment.params.command: {words[0]} cannot be started: {error}.") from error
        if hello is not None:
            self.send(hello)
        threading.Thread(target=self._read, name="jetrl-worker", daemon=True).start()
        atexit.register(self.stop)

    @property
    def alive(self) -> bool:
        return not self.done and self._process.poll() is None

    def wait(self) -> dict[str, Any]:
        """Its first message that is no conversation's; empty where it ended without one."""
        self._spoke.wait()
        return self.said

    def send(self, message: Mapping[str, Any]) -> None:
        """Tell it something. Nothing happens where it has ended."""
        assert self._process.stdin is not None
        with self._lock, suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message, ensure_ascii=False, default=str).encode() + b"\n")
            self._process.stdin.flush()

    def tail(self) -> str:
        """The end of what it has said of errors."""
        with self._lock:
            end = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, end - _SHOWN))
            return self._errors.read(_SHOWN).decode("utf-8", "replace").strip()

    def opens(self, id: str) -> None:
        """Conversation `id` is its to have, and may begin later."""
        self.started += 1
        with self._lock:
            self._open.add(id)

    def closes(self, id: str) -> None:
        """Conversation `id` is over, or will not begin."""
        with self._lock:
            self._open.discard(id)
            self._close_if_unused()

    def retire(self) -> None:
        """No more conversations: it ends when the last of those that it has is over."""
        with self._lock:
            self._retired = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        assert self._process.stdin is not None
        if self._retired and not self._open:
            with suppress(OSError):
                self._process.stdin.close()

    def stop(self) -> None:
        """End it, and what it has started."""
        atexit.unregister(self.stop)
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, 15)
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, 9)
                self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = json_value(line)
            except ValueError:  # a print of its own
                continue
            if isinstance(message, dict) and isinstance(message.get("episode"), str):
                self.results[message["episode"]] = message
                self._wake(message["episode"])
            elif isinstance(message, dict):
                self.said = message
                self._spoke.set()
        self.done = True
        self._spoke.set()
        for id in list(self.wakes):
            self._wake(id)

    def _wake(self, id: str) -> None:
        wake = self.wakes.pop(id, None)
        if wake is not None:
            wake()


class ConversationFailed(Exception):
    """The other side did not do its part."""


def result_of(worker: Worker, id: str) -> dict[str, Any]:
    """What it has said at the end of conversation `id`; empty while that goes on. ConversationFailed: an error."""
    ended = worker.done  # before its results are looked at
    found = worker.results.get(id, {})
    if "error" in found:
        raise ConversationFailed(str(found["error"]))
    if not found and ended:
        raise ConversationFailed(f"the program has ended before the conversation: {worker.tail()}")
    return found


def give_up(worker: Worker, id: str) -> None:
    """Conversation `id` is over for the run."""
    worker.wakes.pop(id, None)
    if worker.results.pop(id, None) is None:
        worker.send({"cancel": id})
    worker.closes(id)


class Workers:
    """The process of each kind that is in use. After `most` conversations another one takes its place."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._current: dict[str, Worker] = {}

    def take(self, id: str, words: Sequence[str], hello: Mapping[str, Any] | None = None) -> Worker:
        """A process for conversation `id`, which `give_up` ends."""
        key = json.dumps([list(words), hello], sort_keys=True, default=str)
        with self._lock:
            worker = self._current.get(key)
            if worker is not None and self.most is not None and worker.started >= self.most:
                worker.retire()
                worker = None
            if worker is None or not worker.alive:
                worker = self._current[key] = Worker(words, hello)
            worker.opens(id)
        return worker

    def stop(self) -> None:
        """End all of them."""
        with self._lock:
            for worker in self._current.values():
                worker.stop()
            self._current.clear()
