"""The gateway of a run without programs: calls of sessions as a relay passes them on."""

from __future__ import annotations

import json
import queue
import threading
from typing import Any
from urllib import error, request

import pytest

from jetrl.serve.gateway import Episode, Gateway

pytestmark = pytest.mark.timeout(60)


class Told(Gateway):
    """Keeps what it would send."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, int, Any]] = []

    def send(self, number: int, status: int, body: Any) -> None:
        self.told.append((number, status, body))

    def ask(self, episode: Episode, number: int, messages: Any, key: str | None = None, **more: Any) -> None:
        self._episodes[episode.id] = episode
        self._take({
            "call": number, "session": episode.id, "key": episode.key if key is None else key, "what": "completions",
            "body": {"messages": messages, **more},
        })


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_one_turn_at_a_time_and_attempts_join() -> None:
    gateway = Told()
    episode = Episode(gateway)
    gateway.ask(episode, 1, [user("a")])
    gateway.ask(episode, 2, [user("a")])  # another attempt, while the first waits
    gateway.ask(episode, 3, [user("b")])
    assert [(number, status) for number, status, _ in gateway.told] == [(3, 409)]
    assert episode.asks.get_nowait() == [user("a")]
    with pytest.raises(queue.Empty):
        episode.asks.get_nowait()
    episode.answer("x")
    assert [(number, status) for number, status, _ in gateway.told[1:]] == [(1, 200), (2, 200)]
    gateway.ask(episode, 4, [user("a")])  # and after it
    assert gateway.told[-1] == (4, 200, gateway.told[1][2])
    history = [user("a"), {"role": "assistant", "content": "x", "annotations": []}, user("c")]
    gateway.ask(episode, 5, history)
    assert episode.asks.get_nowait() == [user("c")]
    episode.close("Over.")
    assert gateway.told[-1][:2] == (5, 410) and gateway.told[-1][2]["error"]["message"] == "Over."
    gateway.ask(episode, 6, history)
    assert gateway.told[-1][:2] == (6, 410)


def test_keys_are_of_one_session() -> None:
    gateway = Told()
    one, two = Episode(gateway), Episode(gateway)
    assert one.key != two.key and one.url.endswith(f"/sessions/{one.id}/v1")
    for number, key in enumerate((two.key, "", "\u00e9", one.key[:-1])):
        gateway.ask(one, number, [user("a")], key)
    assert [status for _, status, _ in gateway.told] == [401] * 4
    gateway.ask(one, 9, [user("a")], tools=[])
    assert gateway.told[-1][1] == 400 and "tools" in gateway.told[-1][2]["error"]["message"]


def test_a_relay_passes_calls_on_and_tells_when_the_run_has_ended() -> None:
    """By HTTP, and without an environment: errors of both sides, and a client that leaves."""
    pytest.importorskip("starlette", reason="needs the extra serve")
    from jetrl.serve.relay import MOST_BYTES

    assert MOST_BYTES == 32 << 20  # as of `jetrl serve`, by the same function

    gateway = Gateway()
    episode = gateway.open()
    answers: list[tuple[int, Any]] = []

    def post(body: bytes, **headers: str) -> tuple[int, Any]:
        asked = request.Request(f"{episode.url}/chat/completions", body, {
            "content-type": "application/json", "authorization": f"Bearer {episode.key}", **headers,
        })
        try:
            with request.urlopen(asked, timeout=50) as answer:
                return answer.status, json.load(answer)
        except error.HTTPError as failed:
            return failed.code, json.load(failed)

    try:
        assert post(b"{")[0] == 400 and post(b"{}", **{"content-type": "text/plain"})[0] == 415
        thread = threading.Thread(target=lambda: answers.append(post(json.dumps({"messages": [user("a")]}).encode())))
        thread.start()
        assert episode.asks.get(timeout=50) == [user("a")]
        gateway.stop()
        thread.join(50)
        ((status, answer),) = answers
        assert status == 503 and answer["error"]["code"] == "run_ended"
    finally:
        gateway.stop()
