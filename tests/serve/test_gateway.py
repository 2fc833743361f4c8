"""The gateway of a run without programs: calls of sessions as a relay passes them on."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from multiprocessing import Pipe
from typing import Any
from urllib import error, request

import pytest

from jetrl.serve.gateway import _MOST_OPEN, Call, Episode, Gateway, Rules
from jetrl.serve.whole import events_of
from jetrl.types import Completion, log_probs, token_ids

pytestmark = pytest.mark.timeout(60)


class Told(Gateway):
    """Keeps what it would send."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, int, Any]] = []

    def send(self, number: int, status: int, body: Any, ask: Any = None) -> None:
        self.told.append((number, status, body))

    def ask(self, episode: Episode, number: int, messages: Any, key: str | None = None, **more: Any) -> None:
        self._episodes[episode.id] = episode
        self._take({
            "call": number, "session": episode.id, "key": episode.key if key is None else key, "what": "completions",
            "body": {"messages": messages, **more},
        })


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def says(text: str, finish: str = "stop") -> Completion:
    return Completion(1, token_ids([5, 6]), log_probs([-0.5, -1.0]), text, finish, 3, "flow")  # type: ignore[arg-type]


def answers(episode: Episode, text: str) -> Call:
    """Answer the oldest call; what it asked."""
    call = episode.asks.get_nowait()
    episode.answer(call, (1, 2, 3), says(text))
    return call


def test_calls_are_answered_in_their_order_and_attempts_join() -> None:
    gateway = Told()
    episode = Episode(gateway)
    gateway.ask(episode, 1, [user("a")])
    gateway.ask(episode, 2, [user("a")])  # another attempt, while the first waits
    gateway.ask(episode, 3, [user("b")])  # and another conversation beside it
    first, second = episode.asks.get_nowait(), episode.asks.get_nowait()
    assert (first.new, first.after, second.new, second.after) == ((user("a"),), -1, (user("b"),), -1)
    with pytest.raises(queue.Empty):
        episode.asks.get_nowait()
    episode.answer(first, (1, 2), says("x"))
    assert [(number, status) for number, status, _ in gateway.told] == [(1, 200), (2, 200)]
    gateway.ask(episode, 4, [user("a")])  # and after it
    assert gateway.told[-1] == (4, 200, gateway.told[1][2])
    history = [user("a"), {"role": "assistant", "content": "x", "annotations": []}, user("c")]
    gateway.ask(episode, 5, history)
    third = episode.asks.get_nowait()
    assert (third.new, third.after) == ((user("c"),), 0)
    episode.close("Over.")
    assert [told[:2] for told in gateway.told[-2:]] == [(3, 410), (5, 410)]
    assert gateway.told[-1][2]["error"]["message"] == "Over."
    gateway.ask(episode, 6, history)
    assert gateway.told[-1][:2] == (6, 410)


def test_a_changed_history_goes_on_from_where_it_is_the_same() -> None:
    gateway = Told()
    episode = Episode(gateway)
    one, two = ({"role": "assistant", "content": text} for text in ("one", "two"))
    gateway.ask(episode, 1, [user("a")])
    answers(episode, "one")
    gateway.ask(episode, 2, [user("a"), one, user("b")])
    answers(episode, "two")
    for number, (history, new, after) in enumerate([
        ([user("a"), one, user("c")], (user("c"),), 0),
        ([user("a"), one, user("b"), two, user("c")], (user("c"),), 1),
        ([user("a"), {"role": "assistant", "content": "edited"}, user("b")], None, -1),
        ([user("summary")], None, -1),
    ], 3):
        gateway.ask(episode, number, history)
        call = answers(episode, str(number))
        assert (call.new, call.after) == (tuple(history) if new is None else new, after)
    gateway.ask(episode, 9, [user("a"), one])
    assert gateway.told[-1][1] == 400 and "its own" not in gateway.told[-1][2]["error"]["message"]
    strict = Episode(gateway, Rules(forks=False))
    gateway.ask(strict, 10, [user("a")])
    gateway.ask(strict, 11, [user("b")])
    assert gateway.told[-1][:2] == (11, 400)
    answers(strict, "one")
    gateway.ask(strict, 12, [user("b")])
    assert gateway.told[-1][:2] == (12, 400) and "forks" in gateway.told[-1][2]["error"]["message"]
    gateway.ask(strict, 13, [user("a"), one, user("b")])
    assert answers(strict, "two").after == 0


def test_what_an_answer_holds() -> None:
    gateway = Told()
    episode = Episode(gateway, Rules(form="hermes", ignore=frozenset({"temperature"})))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    gateway.ask(episode, 1, [user("a")], tools=tools, temperature=0.5, logprobs=True, parallel_tool_calls=True)
    gateway.ask(episode, 2, [user("a")], tools=tools, return_token_ids=True)
    call = answers(episode, 'Yes.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    assert call.ask.variables == {"tools": tools}
    (_, _, one), (_, _, two) = gateway.told
    choice = one["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Yes."
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert [(one["token_id"], one["logprob"]) for one in choice["logprobs"]["content"]] == [(5, -0.5), (6, -1.0)]
    assert one["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert "token_ids" not in choice and "prompt_token_ids" not in one
    assert (two["prompt_token_ids"], two["choices"][0]["token_ids"]) == ([1, 2, 3], [5, 6])
    assert two["choices"][0]["logprobs"] is None
    asked = {"role": "assistant", "content": None, "tool_calls": [{**made, "id": "mine"}]}
    gateway.ask(episode, 3, [user("a"), asked | {"content": "Yes."}, {"role": "tool", "content": "1"}], tools=tools)
    assert answers(episode, "x").after == 0
    gateway.ask(episode, 4, [user("a"), asked, {"role": "tool", "content": "1"}])  # other tools
    assert answers(episode, "x").after == -1
    plain = Episode(gateway, Rules(chat=False))
    gateway.ask(plain, 5, [user("a")], tools=tools)
    assert gateway.told[-1][1] == 400 and "no chat template" in gateway.told[-1][2]["error"]["message"]


def test_a_stream_says_what_the_whole_answer_does() -> None:
    gateway = Told()
    episode = Episode(gateway, Rules(form="hermes"))
    tools = [{"type": "function", "function": {"name": "add"}}]
    gateway.ask(episode, 1, [user("a")], tools=tools)
    answers(episode, 'Yes.<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    body = gateway.told[0][2]
    events = list(events_of(body, usage=True))
    assert events[-1] == "data: [DONE]\n\n" and all(event.endswith("\n\n") for event in events)
    first, second, last = (json.loads(event[len("data: "):]) for event in events[:-1])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    (call,) = second["choices"][0]["delta"].pop("tool_calls")
    assert {k: v for k, v in call.items() if k != "index"} == body["choices"][0]["message"]["tool_calls"][0]
    assert second["choices"][0]["delta"] == {"content": "Yes."}
    assert second["choices"][0]["finish_reason"] == "tool_calls"
    assert last["choices"] == [] and last["usage"] == body["usage"] and first["id"] == last["id"] == body["id"]
    assert len(list(events_of(body, usage=False))) == len(events) - 1


def test_keys_are_of_one_session() -> None:
    gateway = Told()
    one, two = Episode(gateway), Episode(gateway)
    assert one.key != two.key and one.url.endswith(f"/sessions/{one.id}/v1")
    for number, key in enumerate((two.key, "", "\u00e9", one.key[:-1])):
        gateway.ask(one, number, [user("a")], key)
    assert [status for _, status, _ in gateway.told] == [401] * 4
    for name, value in (("temperature", 0.5), ("max_tokens", 5), ("seed", 1), ("stop", ["x"]), ("top_p", 0.9)):
        gateway.ask(one, 9, [user("a")], **{name: value})
        assert gateway.told[-1][1] == 400 and name in gateway.told[-1][2]["error"]["message"]
    for name, value in (("n", 2), ("n", True), ("stream", 1), ("stream_options", 3), ("tool_choice", "required"),
                        ("logit_bias", {"1": 2}), ("tools", 3), ("unknown", 1), ("messages", [])):
        gateway.ask(one, 9, **({"messages": [user("a")]} | {name: value}))
        assert gateway.told[-1][1] == 400 and name in gateway.told[-1][2]["error"]["message"], name


def test_a_session_has_so_many_open_calls_at_most() -> None:
    gateway = Told()
    episode = Episode(gateway)
    for number in range(_MOST_OPEN + 1):
        gateway.ask(episode, number, [user(str(number))])
    assert [(number, status) for number, status, _ in gateway.told] == [(_MOST_OPEN, 429)]


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
        assert episode.asks.get(timeout=50).new == (user("a"),)
        gateway.stop()
        thread.join(50)
        ((status, answer),) = answers
        assert status == 503 and answer["error"]["code"] == "run_ended"
    finally:
        gateway.stop()


def test_a_connection_outlasts_an_agents_work_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    relay, seen = pytest.importorskip("jetrl.serve.relay"), {}

    async def until(gone: Any, app: Any, listener: Any, patience: int, **options: Any) -> None:
        seen.update(options)

    monkeypatch.setattr(relay, "serve_until", until)
    ours, theirs = Pipe()
    asyncio.run(relay.serve(None, theirs))
    ours.close()
    assert seen["timeout_keep_alive"] >= 600  # uvicorn's own is 5: clients that send then get no answer
