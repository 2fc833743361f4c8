"""The front's side of the pipe to the engine: requests in flight, what has come of each, and who waits for it.

Request ids name random streams: two equal ids are one request, and the second asker joins the first.
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


@dataclass(eq=False, slots=True)
class Flight:
    """A request that the engine has: what was drawn so far, and at the end how it ended.

    `done` is the engine's last word: tokens, logprobs, text, finish, version. `wake`: called at each change.
    """

    id: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    done: dict[str, Any] | None = None
    error: Refused | None = None
    wake: list[Callable[[], object]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.done is not None or self.error is not None

    def _changed(self) -> None:
        for call in tuple(self.wake):
            call()


class Link:
    """Sends requests through the pipe and spreads what comes back. Used by one asyncio loop."""

    def __init__(self, connection: Connection, most: int) -> None:
        self.connection, self.most = connection, most
        self.flights: dict[int, Flight] = {}
        self._scores = count(-1, -1)  # ids of prompts that are scored; those of answers are positive
        self.state: dict[str, Any] = {"running": 0, "waiting": 0}  # the engine's last report
        self.heard = time.monotonic()
        self.alive = True
        self.gone = asyncio.Event()
        self._out = pipe.Outbox(connection)
        asyncio.get_running_loop().add_reader(connection.fileno(), self._read)

    def submit(
        self, requests: Iterable[tuple[int, np.ndarray, SamplingParams]], stream: bool, wake: Callable[[], object]
    ) -> list[Flight]:
        """Hand requests to the engine, or join those that it has; all or none. Refused (429) where it has too many."""
        wanted = list(requests)
        self._require_room(len({id for id, _, _ in wanted if id not in self.flights}))
        found = []
        for id, tokens, sampling in wanted:
            flight = self.flights.get(id)
            if flight is None:
                flight = self.flights[id] = Flight(id)
                self._out.send({
                    "add": id, "tokens": tokens, "sampling": plain(sampling),
                    "stream": stream,
                })
            flight.wake.append(wake)
            found.append(flight)
        return found

    def score(self, prompts: Iterable[np.ndarray], top: int, wake: Callable[[], object]) -> list[Flight]:
        """Have the log-probs of prompts computed, which are then in `done`. Refused as `submit`."""
        wanted = list(prompts)
        self._require_room(len(wanted))
        found = []
        for tokens in wanted:
            flight = Flight(next(self._scores), wake=[wake])
            self.flights[flight.id] = flight
            self._out.send({"score": flight.id, "tokens": tokens, "top": top})
            found.append(flight)
        return found

    def _require_room(self, new: int) -> None:
        if not self.alive:
            raise Refused("The engine has ended. Start the server again.", 503, code="engine_ended")
        if len(self.flights) + new > self.most and self.flights:
            raise Refused(
                f"The server has {len(self.flights)} requests, and room for {self.most}. Try again later.",
                429, code="queue_full", retry_after=1,
            )

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
            while self.connection.poll():
                self._take(pipe.receive(self.connection))
        except (EOFError, OSError):
            self._lost()

    def _lost(self) -> None:
        """The engine's process has ended: nobody waits any longer."""
        asyncio.get_running_loop().remove_reader(self.connection.fileno())
        self.alive = False
        self._fail(list(self.flights), Refused("The engine has ended before the answer.", 503, code="engine_ended"))
        self.gone.set()

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
