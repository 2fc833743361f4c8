"""The front's side of the pipe to one engine: requests in flight, what has come of each, and who waits for it.

Request ids name random streams: two equal ids are one request, and the second asker joins the first. Which engine has
what is `serve/dealer.py`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from jetrl.serve import pipe
from jetrl.serve.names import plain
from jetrl.serve.refusal import Refused
from jetrl.types import SamplingParams

_IDLE = {"running": 0, "waiting": 0}


@dataclass(eq=False, slots=True)
class Flight:
    """A request that the engine has: what was drawn so far, and at the end how it ended.

    `done` is the engine's last word: tokens, logprobs, text, finish, version. `wake`: called at each change. `worker`:
    the number of the engine.
    """

    id: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    done: dict[str, Any] | None = None
    error: Refused | None = None
    wake: list[Callable[[], object]] = field(default_factory=list)
    worker: int = 0

    @property
    def ended(self) -> bool:
        return self.done is not None or self.error is not None

    def _changed(self) -> None:
        for call in tuple(self.wake):
            call()


class Link:
    """Sends requests through the pipe and spreads what comes back. Used by one asyncio loop.

    `name` is the engine's in messages; `cure` what a client can do about its end; `lost` is called then.
    """

    def __init__(
        self, connection: Connection, number: int = 0, name: str = "The engine", cure: str = "",
        lost: Callable[[], object] = lambda: None,
    ) -> None:
        self.connection, self.number, self.name, self.cure, self.lost = connection, number, name, cure, lost
        self.flights: dict[int, Flight] = {}
        self._scores = count(-1, -1)  # ids of prompts that are scored; those of answers are positive
        self.state: dict[str, Any] = _IDLE  # the engine's last report
        self.heard = time.monotonic()
        self.alive = True
        self._out = pipe.Outbox(connection)
        asyncio.get_running_loop().add_reader(connection.fileno(), self._read)

    @property
    def silent(self) -> float:
        """Seconds since the engine's last word."""
        return time.monotonic() - self.heard

    def ask(
        self, id: int, tokens: np.ndarray, sampling: SamplingParams, stream: bool, wake: Callable[[], object]
    ) -> Flight:
        """Hand a request to the engine, or join it if it is there."""
        flight = self.flights.get(id)
        if flight is None:
            flight = self.flights[id] = Flight(id, worker=self.number)
            self._out.send({"add": id, "tokens": tokens, "sampling": plain(sampling), "stream": stream})
        flight.wake.append(wake)
        return flight

    def score(self, tokens: np.ndarray, top: int, wake: Callable[[], object]) -> Flight:
        """Have the log-probs of a prompt computed, which are then in `done`."""
        flight = Flight(next(self._scores), wake=[wake], worker=self.number)
        self.flights[flight.id] = flight
        self._out.send({"score": flight.id, "tokens": tokens, "top": top})
        return flight

    def leave(self, flights: Iterable[Flight], wake: Callable[[], object]) -> None:
        """This asker has what it wanted, or has gone. What nobody waits for is cancelled."""
        left = []
        for flight in flights:
            if wake in flight.wake:
                flight.wake.remove(wake)
            if not flight.wake and not flight.ended and self.flights.pop(flight.id, None) is not None:
                left.append(flight.id)
        if left:
            self._out.send({"cancel": left})

    def close(self) -> None:
        """Send nothing more."""
        self._out.close()

    def _read(self) -> None:
        try:
            while pipe.ready(self.connection):
                self._take(pipe.receive(self.connection))
        except (EOFError, OSError):
            self._lost()

    def _lost(self) -> None:
        """The engine's process has ended: nobody waits any longer."""
        asyncio.get_running_loop().remove_reader(self.connection.fileno())
        self.alive, self.state = False, _IDLE
        ended = f"{self.name} has ended before the answer.{self.cure}"
        self._fail(list(self.flights), Refused(ended, 503, code="engine_ended"))
        self.lost()

    def _fail(self, ids: Iterable[int], error: Refused) -> None:
        for id in ids:
            if (flight := self.flights.pop(id, None)) is not None:
                flight.error = error
                flight._changed()

    def _take(self, message: dict[str, Any]) -> None:
        self.heard = time.monotonic()
        for id, start, tokens, logprobs in message.get("news", ()):
            flight = self.flights.get(id)
            if flight is not None and start == len(flight.tokens):
                flight.tokens += tokens.tolist()
                flight.logprobs += logprobs.tolist()
                flight._changed()
        for done in message.get("done", ()):
            flight = self.flights.pop(done["id"], None)
            if flight is not None:
                flight.tokens, flight.logprobs = done["tokens"].tolist(), done["logprobs"].tolist()
                flight.done = done
                flight._changed()
        for scored in message.get("scored", ()):
            flight = self.flights.pop(scored["id"], None)
            if flight is not None:
                flight.done = scored
                flight._changed()
        if (refused := message.get("refused")) is not None:
            self._fail([refused["id"]], Refused(refused["message"]))
        if (failed := message.get("failed")) is not None:
            self._fail(failed["ids"], Refused(failed["message"], 500, code="engine_failed"))
        self.state = message.get("state", self.state)
