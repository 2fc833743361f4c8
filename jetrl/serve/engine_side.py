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
from jetrl.model.transformer import Transformer
from jetrl.serve import pipe
from jetrl.serve.scoring import prompt_logprobs
from jetrl.types import Completion, Request, SamplingParams

BEAT = 1.0  # seconds between two signs of life of an idle engine


class _Side:
    def __init__(self, engine: PagedEngine, connection: Connection) -> None:
        self.engine, self.connection = engine, connection
        self.streams: set[int] = set()
        self.known: set[int] = set()  # requests that wait or run
        self.news: list[list[Any]] = []
        self.scores: list[dict[str, Any]] = []  # prompts whose log-probs are asked for
        engine.on_tokens = self._on_tokens

    def _on_tokens(self, drawn: list[NewTokens]) -> None:
        self.news += [
            [new.request_id, new.start, new.tokens, new.logprobs]
            for new in drawn if new.request_id in self.streams and len(new.tokens)
        ]

    def send(self, **message: Any) -> None:
        pipe.send(self.connection, message)

    def take(self, message: dict[str, Any]) -> None:
        if "score" in message:
            self.scores.append(message)
            return
        if "cancel" in message:
            self.scores = [one for one in self.scores if one["score"] not in message["cancel"]]
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

    def score(self) -> None:
        """Compute the log-probs of the first prompts that wait, as many as a step of the engine has tokens."""
        first, used = [self.scores.pop(0)], 0
        while self.scores and self.scores[0]["top"] == first[0]["top"]:
            used += len(first[-1]["tokens"])
            if used + len(self.scores[0]["tokens"]) > self.engine.settings.max_tokens_per_step:
                break
            first.append(self.scores.pop(0))
        model = self.engine.model
        assert isinstance(model, Transformer), "what `jetrl serve` loads"
        try:
            found = prompt_logprobs(model, [one["tokens"] for one in first], first[0]["top"])
        except UserError as error:
            self.send(failed={"ids": [one["score"] for one in first], "message": str(error)})
            return
        self.send(scored=[
            {"id": one["score"], "logprobs": each.logprobs, "top_tokens": each.top_tokens.ravel(),
             "top_logprobs": each.top_logprobs.ravel()}
            for one, each in zip(first, found, strict=True)
        ])

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
            while pipe.ready(connection, 0 if engine.has_work or side.scores else beat / 2):
                side.take(pipe.receive(connection))
            if side.scores:
                side.score()
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
