"""Which engine computes a request: one front over several workers, each with all weights.

A session begins on the worker with the fewest open requests and stays there, where the pages of its earlier turns are.
Other requests go where the longest beginning of their prompt was computed last, unless that worker has many more open
requests than another. The answer does not depend on any of this: a request's id names its draws, and every worker has
the same bits. So a session whose worker has ended goes on at another one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import groupby
from multiprocessing.connection import Connection

import numpy as np

from jetrl.serve.link import Flight, Link
from jetrl.serve.refusal import Refused
from jetrl.serve.sessions import Session
from jetrl.types import SamplingParams

SILENCE = 30.0  # seconds without a word of an engine after which it is not healthy
SLACK = 8  # open requests that a worker may have more than another and still get a prompt that it knows
_BLOCK = 128  # tokens
_MOST_BLOCKS = 200_000  # beginnings of prompts that are remembered
_Asked = tuple[int, np.ndarray, SamplingParams]


class Dealer:
    """The links to all workers. `most`: open requests of all of them together. `gone`: all workers have ended."""

    def __init__(self, connections: Sequence[Connection], most: int) -> None:
        self.most, self.gone = most, asyncio.Event()
        several = len(connections) > 1
        cure = " Send it again: another worker answers, and sessions go on there." if several else ""
        self.links = [
            Link(one, number, f"Worker {number}" if several else "The engine", cure, self._lost)
            for number, one in enumerate(connections)
        ]
        self._dealt = [0] * len(connections)  # what has begun on each worker
        self._beginnings: OrderedDict[bytes, int] = OrderedDict()  # digests of prompts' beginnings: the worker

    @property
    def num_open(self) -> int:
        """Answers that the engines owe."""
        return sum(len(link.flights) for link in self.links)

    def submit(
        self, requests: Iterable[_Asked], stream: bool, wake: Callable[[], object], session: Session | None = None,
        beside: int = 0,
    ) -> list[Flight]:
        """Hand requests to engines, or join those that they have; all or none. Refused: 429 where there are too many,
        503 where no worker is left. `beside`: as many prompts are handed to `score` next, for which there is room
        then."""
        wanted = list(requests)
        self._require_room(len({id for id, _, _ in wanted if self._having(id) is None}) + beside)
        found = []
        for _, group in groupby(wanted, lambda one: id(one[1])):  # all answers to one prompt: its pages are shared
            asked = list(group)
            link = self._of_session(session) if session is not None else self._of_prompt(asked[0][1])
            for number, tokens, sampling in asked:
                found.append((self._having(number) or link).ask(number, tokens, sampling, stream, wake))
        return found

    def score(
        self, prompts: Sequence[np.ndarray], top: int, wake: Callable[[], object], session: Session | None = None
    ) -> list[Flight]:
        """Have the log-probs of prompts computed, each on one worker, after `submit` has made room."""
        return [
            (self._of_session(session) if session is not None else self.links[self._begin()]).score(row, top, wake)
            for row in prompts
        ]

    def _require_room(self, new: int) -> None:
        if self.gone.is_set():
            raise Refused("The engine has ended. Start the server again.", 503, code="engine_ended")
        if self.num_open + new > self.most and self.num_open:
            raise Refused(
                f"The server has {self.num_open} requests, and room for {self.most}. Try again later.",
                429, code="queue_full", retry_after=1,
            )

    def leave(self, flights: Sequence[Flight], wake: Callable[[], object]) -> None:
        """This asker has what it wanted, or has gone. What nobody waits for is cancelled."""
        for link in self.links:
            if mine := [flight for flight in flights if flight.worker == link.number]:
                link.leave(mine, wake)

    def close(self) -> None:
        """Send nothing more."""
        for link in self.links:
            link.close()

    def _having(self, number: int) -> Link | None:
        """The link to the engine that has this request."""
        return next((link for link in self.links if number in link.flights), None)

    def _of_session(self, session: Session) -> Link:
        if session.worker is None or not self.links[session.worker].alive:
            session.worker = self._begin()
        return self.links[session.worker]

    def _of_prompt(self, tokens: np.ndarray) -> Link:
        if len(self.links) == 1:
            return self.links[0]
        beginnings = list(_beginnings(tokens))
        known = next((self._beginnings[one] for one in reversed(beginnings) if one in self._beginnings), None)
        worker = known if known is not None and self._has_room(known) else self._begin()
        for one in beginnings:
            self._beginnings[one] = worker
            self._beginnings.move_to_end(one)
        while len(self._beginnings) > _MOST_BLOCKS:
            self._beginnings.popitem(last=False)
        return self.links[worker]

    def _has_room(self, worker: int) -> bool:
        link = self.links[worker]
        least = min(len(one.flights) for one in self.links if one.alive)
        return link.alive and link.silent < SILENCE and len(link.flights) <= least + SLACK

    def _begin(self) -> int:
        """The worker for what begins: alive, not silent, with the fewest open requests, to which the fewest were dealt;
        the first of those."""
        def load(link: Link) -> tuple[bool, int, int, int]:
            return link.silent >= SILENCE, len(link.flights), self._dealt[link.number], link.number

        found = min((link for link in self.links if link.alive), key=load).number
        self._dealt[found] += 1
        return found

    def _lost(self) -> None:
        if not any(link.alive for link in self.links):
            self.gone.set()


def _beginnings(tokens: np.ndarray) -> Iterable[bytes]:
    """A digest for each whole block of a prompt, with all blocks before it."""
    at = blake2b(digest_size=12)
    for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        at.update(tokens[start : start + _BLOCK].tobytes())
        yield at.digest()
