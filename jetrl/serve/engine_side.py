"""The engine's side of the pipe: takes requests, steps, and sends what was drawn. It reads nothing but JSON.

`serve_engine` returns when the front has gone, or when `stop` says so. An error of a step that the user can cure (a
full GPU) is told to all who wait, and the engine goes on; any other ends it, and the front tells its clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from jetrl.engine.engine import PagedEngine
from jetrl.engine.plan import NewTokens
from jetrl.errors import UserError
from jetrl.serve import pipe
from jetrl.types import Completion, Request, SamplingParams

BEAT = 1.0  # seconds between two signs of life of an idle engine


class _Side:
    def __init__(self, engine: PagedEngine, connection: Connection) -> None:
        self.engine, self.connection = engine, connection
        self.streams: set[int] = set()
        self.known: set[int] = set()  # requests that wait or run
        self.news: list[list[Any]] = []
        engine.on_tokens = self._on_tokens

    def _on_tokens(self, drawn: list[NewTokens]) -> None:
        self.news += [
            [new.request_id, new.start, new.tokens, new.logprobs]
            for new in drawn if new.request_id in self.streams and len(new.tokens)
        ]

    def send(self, **message: Any) -> None:
        pipe.send(self.connection, message)

    def take(self, message: dict[str, Any]) -> None:
        if "cancel" in message:
            ids = self.known & set(message["cancel"])
            self.engine.cancel(ids)
            self._ended(ids)
            return
        id, given = message["add"], dict(message["sampling"])
        for key in ("stop", "stop_token_ids"):
            given[key] = tuple(given[key])
        if id in self.known:  # an asker left and came back before the engine heard of either
            return
        try:
            self.engine.add([Request(id, tuple(message["tokens"].tolist()), SamplingParams(**given))])
        except UserError as error:
            self.send(refused={"id": id, "message": str(error)})
            return
        self.known.add(id)
        if message["stream"]:
            self.streams.add(id)

    def step(self) -> None:
        try:
            report = self.engine.step()
        except UserError as error:  # all requests are lost, and the engine is empty
            lost = sorted(self.known)
            self._ended(set(lost))
            self.news = []
            self.send(failed={"ids": lost, "message": str(error)})
            return
        done = [_done(completion) for completion in self.engine.collect()]
        self._ended({one["id"] for one in done})
        news, self.news = self.news, []
        last = {one["id"] for one in done}  # its last news are part of what is done
        self.send(
            news=[one for one in news if one[0] not in last], done=done,
            state={"running": report.running, "waiting": report.waiting},
        )

    def _ended(self, ids: set[int]) -> None:
        self.known -= ids
        self.streams -= ids


def serve_engine(
    engine: PagedEngine, connection: Connection, stop: Callable[[], bool] = lambda: False, beat: float = BEAT
) -> None:
    """Serve requests from the pipe until its other end is closed."""
    side, told = _Side(engine, connection), 0.0
    try:
        while not stop():
            while connection.poll(0 if engine.has_work else beat / 2):
                side.take(pipe.receive(connection))
            if engine.has_work:
                side.step()
            elif time.monotonic() - told > beat:
                told = time.monotonic()
                side.send(state={"running": 0, "waiting": 0})
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the front has ended
    finally:
        engine.on_tokens = None
        engine.cancel(side.known)


def _done(completion: Completion) -> dict[str, Any]:
    return {
        "id": completion.request_id, "tokens": completion.tokens, "logprobs": completion.logprobs,
        "text": completion.text, "finish": completion.finish_reason, "version": completion.weight_version,
        "digest": completion.flow_digest,
    }
