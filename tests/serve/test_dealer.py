"""Which worker gets a request, without HTTP and engines: links over pipes whose other ends a test holds."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from jetrl.serve import pipe
from jetrl.serve.dealer import SILENCE, SLACK, Dealer
from jetrl.serve.link import Flight
from jetrl.serve.refusal import Refused
from jetrl.serve.sessions import Session
from jetrl.types import SamplingParams

pytestmark = pytest.mark.timeout(60)
PARAMS = SamplingParams(4)


def row(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def prompt(length: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int32)


def nothing() -> None:
    pass


class Table:
    """A dealer and the engines' ends of its pipes. Ids are counted."""

    def __init__(self, size: int, most: int = 1000) -> None:
        ends = [multiprocessing.Pipe() for _ in range(size)]
        self.engines = [theirs for _, theirs in ends]
        self.dealer = Dealer([ours for ours, _ in ends], most)
        self.count = 0

    def ask(self, tokens: np.ndarray, session: Session | None = None, n: int = 1, wake: Any = nothing) -> list[Flight]:
        asked = [(self.count + i, tokens, PARAMS) for i in range(n)]
        self.count += n
        return self.dealer.submit(asked, False, wake, session)

    async def got(self, worker: int) -> list[dict[str, Any]]:
        """What an engine was sent since the last call."""
        await asyncio.sleep(0)  # what is sent in one turn of the loop leaves at its end
        found = []
        while self.engines[worker].poll():
            found.append(pipe.receive(self.engines[worker]))
        return found

    def answer(self, flight: Flight) -> None:
        done = {"id": flight.id, "tokens": row(7), "logprobs": np.array([-0.5], dtype=np.float32), "text": "x"}
        pipe.send(self.engines[flight.worker], {"news": [], "done": [done], "state": {"running": 0, "waiting": 0}})


def dealt(size: int, play: Callable[[Table], Coroutine[Any, Any, None]], most: int = 1000) -> None:
    async def run() -> None:
        table = Table(size, most)
        await play(table)
        table.dealer.close()
        for link in table.dealer.links:
            asyncio.get_running_loop().remove_reader(link.connection.fileno())

    asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def workers(flights: Sequence[Flight]) -> list[int]:
    return [flight.worker for flight in flights]


def test_a_session_begins_where_the_fewest_requests_are_and_stays() -> None:
    async def play(table: Table) -> None:
        sessions = [Session(str(i)) for i in range(5)]
        first = [table.ask(row(i), session)[0] for i, session in enumerate(sessions)]
        assert workers(first) == [0, 1, 2, 0, 1] == [session.worker for session in sessions]
        for flight in (first[0], first[3]):
            table.answer(flight)
        await until(lambda: first[0].ended and first[3].ended)
        assert first[0].tokens == [7] and first[3].logprobs == [-0.5]
        # worker 0 has nothing to do, but a session stays; what begins goes there
        assert table.ask(row(9), sessions[2])[0].worker == 2
        assert table.ask(row(9), Session("new"))[0].worker == 0
        assert table.ask(row(9), sessions[0], n=3)[0].worker == 0
        assert [len(await table.got(worker)) for worker in range(3)] == [6, 2, 2]

    dealt(3, play)


def test_one_after_another_they_take_turns() -> None:
    """Nothing is open when the next one begins: the fewest were dealt to it."""
    async def play(table: Table) -> None:
        found = []
        for i in range(5):
            (flight,) = table.ask(row(i))
            table.answer(flight)
            await until(lambda flight=flight: flight.ended)  # type: ignore[misc]
            found.append(flight.worker)
        assert found == [0, 1, 0, 1, 0]

    dealt(2, play)


def test_answers_to_one_prompt_stay_together_and_prompts_are_spread() -> None:
    async def play(table: Table) -> None:
        rows = [row(1), row(2), row(3), row(4)]
        asked = [(10 * i + k, one, PARAMS) for i, one in enumerate(rows) for k in range(3)]
        flights = table.dealer.submit(asked, False, nothing)
        assert [flight.id for flight in flights] == [id for id, _, _ in asked]
        assert workers(flights) == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3
        scored = table.dealer.score(rows, 2, nothing)
        assert workers(scored) == [0, 1, 0, 1] and [one["top"] for one in (await table.got(1))[-2:]] == [2, 2]
        table.dealer.leave(scored, nothing)
        assert await table.got(1) == [{"cancel": [scored[1].id, scored[3].id]}] and table.dealer.num_open == 12
        session = Session("s")
        (one,) = table.dealer.score(rows[:1], 0, nothing, session)
        assert session.worker == one.worker == table.ask(row(1), session)[0].worker

    dealt(2, play)


def test_a_prompt_goes_where_its_beginning_is_known() -> None:
    async def play(table: Table) -> None:
        one, two = prompt(300), prompt(300, first=5)
        assert workers([*table.ask(one), *table.ask(two)]) == [0, 1]
        grown = [np.concatenate([each[:256], prompt(200, first=1000)]) for each in (one, two)]
        assert workers([*table.ask(grown[1]), *table.ask(grown[0])]) == [1, 0]
        assert table.ask(prompt(127))[0].worker == 0  # less than a block is not known: the first of two equal ones
        assert table.ask(prompt(127))[0].worker == 1
        # the longest beginning that is known decides: `grown` was at 1, then at 0
        table.dealer._beginnings.update({key: 1 for key in list(table.dealer._beginnings)[-1:]})
        assert table.ask(np.concatenate([grown[0], prompt(9)]))[0].worker == 1

    dealt(2, play)


def test_a_shared_beginning_does_not_pile_up_on_one_worker() -> None:
    async def play(table: Table) -> None:
        rows = [np.append(prompt(256), i).astype(np.int32) for i in range(100)]
        found = [table.ask(one)[0].worker for one in rows]
        assert abs(found.count(0) - found.count(1)) <= SLACK + 1 and found[: SLACK + 1] == [0] * (SLACK + 1)

    dealt(2, play)


def test_equal_ids_are_one_request_wherever_it_is() -> None:
    async def play(table: Table) -> None:
        (first,) = table.ask(row(1))
        table.ask(row(2))
        table.ask(row(3), n=4)
        again = table.dealer.submit([(first.id, row(1), PARAMS)], False, print)
        assert again == [first] and first.wake == [nothing, print]
        assert [len(await table.got(worker)) for worker in range(2)] == [5, 1]
        table.dealer.leave([first], nothing)
        assert not await table.got(0)
        table.dealer.leave([first], print)
        assert await table.got(0) == [{"cancel": [first.id]}] and table.dealer.num_open == 5

    dealt(2, play)


def test_a_full_server_takes_all_or_none() -> None:
    async def play(table: Table) -> None:
        table.ask(row(1), n=3)
        session = Session("s")
        with pytest.raises(Refused, match="3 requests, and room for 4") as full:
            table.ask(row(2), session, n=2)
        assert full.value.status == 429 and full.value.retry_after == 1 and table.dealer.num_open == 3
        assert session.worker is None and not await table.got(1)
        assert table.ask(row(2), session)[0].worker == 1

    dealt(2, play, most=4)


def test_a_worker_that_ends_fails_its_own_requests_by_name() -> None:
    async def play(table: Table) -> None:
        sessions = [Session("a"), Session("b")]
        woken: list[int] = []
        flights = [table.ask(row(i), one, wake=lambda i=i: woken.append(i))[0] for i, one in enumerate(sessions)]
        known = table.ask(prompt(200))[0]
        assert workers([*flights, known]) == [0, 1, 0]
        table.engines[0].close()
        await until(lambda: flights[0].ended)
        for gone in (flights[0], known):
            assert gone.error is not None and gone.error.status == 503 and gone.error.code == "engine_ended"
            assert str(gone.error).startswith("Worker 0 has ended before the answer. Send it again")
        assert not flights[1].ended and woken == [0] and not table.dealer.gone.is_set()
        # the next call of its session goes on elsewhere, and so does a prompt that it knew
        assert table.ask(row(5), sessions[0])[0].worker == 1 == sessions[0].worker
        assert table.ask(prompt(200))[0].worker == 1 and table.dealer.links[0].state["running"] == 0
        table.engines[1].close()
        await until(table.dealer.gone.is_set)
        with pytest.raises(Refused, match="Start the server again") as ended:
            table.ask(row(6))
        assert ended.value.status == 503

    dealt(2, play)


def test_a_silent_worker_gets_nothing_new() -> None:
    async def play(table: Table) -> None:
        old = Session("old")
        assert table.ask(prompt(200), old)[0].worker == 0
        table.dealer.links[0].heard -= SILENCE + 1
        assert workers(table.ask(row(1)) + table.ask(row(2)) + table.ask(row(3))) == [1, 1, 1]
        assert table.ask(row(4), old)[0].worker == 0  # its pages are there, and it may only be compiling
        table.dealer.links[1].heard -= SILENCE + 1
        assert table.ask(row(5))[0].worker == 0

    dealt(2, play)
