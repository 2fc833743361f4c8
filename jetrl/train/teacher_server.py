"""A teacher behind a URL: log-probs of given token ids over HTTP, from `vllm serve` or `jetrl serve`.

What is asked is vLLM's form of `/v1/completions`: token ids as `prompt`, and `prompt_logprobs`. The answer has a table
for each token but the first, by token id as text, with its log-prob at temperature 1 and, in `decoded_token`, its text.
vLLM always draws a token; `jetrl serve` is asked for none.

Requests that fail for a reason that may pass (no connection, no answer, status 429 or from 500 on) are repeated, at
growing intervals, up to a time limit. Then, and at once where the server refuses, there is a UserError.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from jetrl.arguments import fits_header
from jetrl.config.teacher import SERVER_KEY as KEY
from jetrl.errors import UserError, shown
from jetrl.untrusted import json_value, no_constant

AT_ONCE = 32  # requests that are under way: the server makes batches of them
MOST_BYTES = 1 << 30  # of one answer
FIRST_WAIT, LONGEST_WAIT = 0.25, 15.0  # seconds between two attempts
CONNECTING = 10.0  # seconds until a connection counts as failed


@dataclass(frozen=True, slots=True)
class About:
    """The model that a server has. `most_tokens` None: it does not say how many it takes."""

    name: str
    most_tokens: int | None
    draws_nothing: bool  # takes max_tokens = 0
    values: str  # what it says of the flow and the version of its weights; empty where it says nothing


@dataclass(frozen=True, slots=True)
class Judged:
    """Of a sequence of n tokens: float32 [n - 1], the log-prob of each but the first. `top_tokens` int64 and
    `top_logprobs` float32 [n - 1, K]: the most probable tokens at its place, the first one first."""

    logprobs: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


class _Asking:
    """Requests that are under way together. Once one has failed, the others end too, and wait for no answer."""

    def __init__(self) -> None:
        self.failed = threading.Event()
        self._open, self._lock = set[http.client.HTTPConnection](), threading.Lock()

    def end(self) -> None:
        """Let all of them end."""
        with self._lock:
            self.failed.set()
            for connection in self._open:
                if connection.sock is not None:
                    with suppress(OSError):  # it has no connection any more
                        connection.sock.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def over(self, connection: http.client.HTTPConnection) -> Iterator[None]:
        """A request over this connection, which has none yet."""
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.remove(connection)


class _Passing(Exception):
    """Why an attempt failed that may be repeated."""


@dataclass(eq=False)
class TeacherServer:
    """The server at `url` (with or without `/v1`). `key`: the setting that names it, for messages; `timeout`: seconds
    until a request counts as failed, with its repeats."""

    url: str
    timeout: float = 300.0
    key: str = "teacher.path"

    @cached_property
    def about(self) -> About:
        """The first model that the server names. A server that is not there is not waited for. UserError as below."""
        body = self._asked("GET", "/v1/models", None, _Asking(), repeats=False)
        try:
            card = body["data"][0]
            name, most = card["id"], card.get("max_model_len")
            if not isinstance(name, str) or not (most is None or type(most) is int):
                raise TypeError
        except (LookupError, TypeError, AttributeError):
            raise self._error(f"/v1/models names no model: {shown(body, 200)}") from None
        values = "".join(f" {card[key]}" for key in ("flow_digest", "weight_version") if key in card)
        return About(name, most, card.get("owned_by") == "jetrl", values)

    @property
    def base_digest(self) -> str:
        """Names the model, and with `jetrl serve` its flow and the version of its weights; not the weights' values."""
        return hashlib.sha256(f"served {self.about.name}{self.about.values}".encode()).hexdigest()

    def judge(self, sequences: Sequence[Sequence[int] | np.ndarray], top: int = 0) -> list[Judged]:
        """Log-probs of sequences of at least two tokens. UserError where one cannot be had."""
        return [_judged(rows, tokens, top, self) for rows, tokens in
                zip(self._tables(sequences, top), sequences, strict=True)]

    def texts(self, tokens: Sequence[int]) -> list[str | None]:
        """What each of these tokens is as text; None where the server does not say. UserError as `judge`."""
        most = min(self.about.most_tokens or 256, 257) - 1 - (not self.about.draws_nothing)
        if most < 1:
            raise self._error(f"it takes {self.about.most_tokens} tokens")
        pieces = [tokens[start : start + most] for start in range(0, len(tokens), most)]
        found: list[str | None] = []
        for piece, rows in zip(pieces, self._tables([[piece[0], *piece] for piece in pieces], 0), strict=True):
            for token, row in zip(piece, rows, strict=True):
                text = _entry(row, token, self).get("decoded_token")
                found.append(text if isinstance(text, str) else None)
        return found

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _tables(self, sequences: Sequence[Sequence[int] | np.ndarray], top: int) -> list[list[Any]]:
        """The answers' tables of each sequence, without that of its first token."""
        asking, errors = _Asking(), list[BaseException]()

        def ask(tokens: Sequence[int] | np.ndarray) -> list[Any]:
            try:
                body = {
                    "model": self.about.name, "prompt": [int(token) for token in tokens], "prompt_logprobs": top,
                    "max_tokens": 0 if self.about.draws_nothing else 1, "temperature": 1.0,
                }
                return self._table(self._asked("POST", "/v1/completions", body, asking), len(tokens))
            except BaseException as error:
                errors.append(error)
                asking.end()  # the others need not go on
                raise

        pool = ThreadPoolExecutor(min(AT_ONCE, max(1, len(sequences))), "teacher")
        try:
            return list(pool.map(ask, sequences))
        except UserError:
            raise errors[0] from None  # the one that ended the others
        finally:
            asking.end()
            pool.shutdown(cancel_futures=True)

    def _table(self, body: Any, count: int) -> list[Any]:
        try:
            choice = body["choices"][0]
            table = choice.get("prompt_logprobs") or body.get("prompt_logprobs")
        except (LookupError, TypeError, AttributeError):
            table = None
        if not isinstance(table, list) or len(table) != count:
            raise self._error(
                "its answer has no prompt_logprobs of every token. It must be a server that computes them, such as "
                "`vllm serve` or `jetrl serve`"
            )
        return table[1:]

    def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None, asking: _Asking, repeats: bool = True
    ) -> Any:
        """The JSON of an answer, after as many attempts as the time limit allows."""
        end, wait = time.monotonic() + self.timeout, FIRST_WAIT
        while True:
            try:
                return self._attempt(method, path, body, end, asking)
            except _Passing as error:
                left = end - time.monotonic()
                if not repeats:
                    raise self._error(f"{error}. Is it running there?") from error
                if left <= wait or asking.failed.is_set():
                    raise self._error(
                        f"{error}. There was no answer within teacher.timeout = {self.timeout:g} s. Start the server "
                        "again; a run continues with --resume after its last finished step."
                    ) from error
            if asking.failed.wait(wait):
                raise self._error("another request to it has failed")
            wait = min(2 * wait, LONGEST_WAIT)

    def _attempt(
        self, method: str, path: str, body: Mapping[str, Any] | None, end: float, asking: _Asking
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "accept": "application/json"}
        if given := os.environ.get(KEY):
            if not fits_header(given):
                raise UserError(f"The environment variable {KEY} must be one word of printable ASCII characters.")
            headers["authorization"] = f"Bearer {given}"
        try:
            left = max(0.1, end - time.monotonic())
            with closing(self._connection(min(CONNECTING, left))) as connection, asking.over(connection):
                connection.connect()
                if asking.failed.is_set():  # set before there was a connection to cut
                    raise _Passing("another request to it has failed")
                connection.sock.settimeout(left)
                connection.request(method, self._prefix + path, data, headers)
                answer = connection.getresponse()
                text, status = bytearray(), answer.status
                while piece := answer.read(1 << 20):
                    text += piece
                    if len(text) > MOST_BYTES:
                        raise self._error(f"its answer has more than {MOST_BYTES >> 20} MiB")
                    if time.monotonic() > end:
                        raise TimeoutError("its answer takes too long")
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        if status == 429 or status >= 500:
            raise _Passing(f"status {status}: {_said(bytes(text))}")
        if status != 200:
            raise self._error(f"it refuses {path} with status {status}: {_said(bytes(text))}" + (
                f". Set its key as the environment variable {KEY}" if status in (401, 403) else ""))
        try:
            return json_value(bytes(text), parse_constant=no_constant)
        except ValueError as error:
            raise self._error(f"its answer is not JSON: {error}") from error

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        """A new connection. No proxy is used."""
        parts = urlsplit(self.url)
        if parts.scheme == "https":
            secure = ssl.create_default_context()
            return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=timeout, context=secure)
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)

    @property
    def _prefix(self) -> str:
        """What the paths of all requests begin with."""
        return urlsplit(self.url).path.rstrip("/").removesuffix("/v1")

    def _error(self, what: str) -> UserError:
        return UserError(f"{self.key} = {self.url}: {what}")


def _said(text: bytes) -> str:
    """The message of an error's body."""
    try:
        found = json_value(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        said = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        said = text.decode(errors="replace")
    return str(said).strip()[:500].rstrip(".") or "nothing"


def _entry(row: Any, token: int, server: TeacherServer) -> Mapping[str, Any]:
    found = row.get(str(token)) if isinstance(row, dict) else None
    if not isinstance(found, dict):
        raise server._error(f"its answer has no entry for the token {token} at its place")
    return found


def _number(entry: Any, server: TeacherServer) -> float:
    value = entry.get("logprob") if isinstance(entry, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise server._error(f"a log-prob in its answer is {shown(value, 60)}")
    return float(value)


def _judged(
    rows: Sequence[Any], tokens: Sequence[int] | np.ndarray, top: int, server: TeacherServer
) -> Judged:
    count = len(rows)
    logprobs = np.empty(count, np.float32)
    ids, values = np.empty((count, top), np.int64), np.empty((count, top), np.float32)
    for i, row in enumerate(rows):
        logprobs[i] = _number(_entry(row, tokens[i + 1], server), server)
        if top:
            best = sorted(((_number(entry, server), token) for token, entry in row.items()), reverse=True)[:top]
            if len(best) < top or not all(token.isdecimal() and token.isascii() for _, token in best):
                raise server._error(f"its answer has {len(best)} of the {top} most probable tokens")
            values[i], ids[i] = zip(*((value, int(token)) for value, token in best), strict=True)
    return Judged(logprobs, ids, values)
