"""The engine's side of the pipe, and prompts and answers without HTTP."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import CHAT, byte_tokenizer
from serving import small_model

from jetrl import UserError
from jetrl.api import served_model
from jetrl.engine.engine import PagedEngine
from jetrl.serve import pipe
from jetrl.serve.engine_side import serve_engine
from jetrl.serve.link import Flight
from jetrl.serve.refusal import Refused
from jetrl.serve.service import About, Service
from jetrl.serve.wire import chat_ask, completion_ask
from jetrl.types import Request, SamplingParams

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> PagedEngine:
    folder = small_model(tmp_path_factory.mktemp("model") / "tiny")
    engine, about, formats = served_model(str(folder), "", "fp8", "cpu", "", None, 3, 4, None)
    assert about.name == "tiny" and about.seed == 3 and "fp8" in formats.lower()
    assert engine.settings.kv_cache_tokens == 4 * about.max_position
    assert engine.settings.keep_bytes > 1 << 50  # type: ignore[operator]  # an idle server keeps its cache
    return engine


def plain(value: Any) -> Any:
    """Lists in the place of arrays."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


class Wire:
    """The front's end of the pipe, as a test plays it."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def add(self, id: int, tokens: list[int], stream: bool = False, **sampling: Any) -> None:
        params = asdict(SamplingParams(**sampling))
        self.send({"add": id, "tokens": np.array(tokens), "sampling": params, "stream": stream})

    def send(self, message: dict[str, Any]) -> None:
        pipe.send(self.connection, message)

    def until(self, key: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The first message that has something for `key`, and those before it."""
        before = []
        while self.connection.poll(200):
            message = plain(pipe.receive(self.connection))
            if message.get(key):
                return message, before
            before.append(message)
        raise AssertionError(f"no {key}")


@contextmanager
def wired(engine: PagedEngine) -> Iterator[Wire]:
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=serve_engine, args=(engine, theirs), kwargs={"beat": 0.05}, daemon=True)
    thread.start()
    try:
        yield Wire(ours)
    finally:
        ours.close()
        thread.join(200)
    assert not thread.is_alive() and not engine.has_work and engine.on_tokens is None


def test_requests_streams_and_cancels(engine: PagedEngine) -> None:
    with wired(engine) as wire:
        wire.add(1, [1, 2, 3], max_tokens=20, ignore_eos=True)
        done, before = wire.until("done")
        assert not any(message.get("news") for message in before)
        (first,) = done["done"]
        wire.add(1, [1, 2, 3], stream=True, max_tokens=20, ignore_eos=True)
        wire.add(9, [4], max_tokens=700, ignore_eos=True)
        again, before = wire.until("done")
        assert again["done"] == [first] and len(first["tokens"]) == 20
        news = [one for message in before for one in message.get("news", ())]
        assert {id for id, *_ in news} == {1} and news
        assert [token for *_, tokens, _ in news for token in tokens] == first["tokens"][: sum(len(n[2]) for n in news)]
        wire.send({"cancel": [9, 77]})
        wire.add(2, [5], max_tokens=1)
        assert [one["id"] for one in wire.until("done")[0]["done"]] == [2]
        wire.add(3, [0] * 2000, max_tokens=1)
        refused, _ = wire.until("refused")
        assert refused["refused"]["id"] == 3 and "2000" in refused["refused"]["message"]
        wire.add(4, [6], max_tokens=700, ignore_eos=True)  # is dropped with the pipe
    (own,) = engine.generate([Request(1, (1, 2, 3), SamplingParams(20, ignore_eos=True))])
    assert own.tokens.tolist() == first["tokens"] and own.logprobs.tolist() == first["logprobs"]


def test_a_step_that_fails_is_told_and_the_engine_goes_on(engine: PagedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, fails = engine._draw, [True]

    def failing() -> Any:
        if fails.pop() if fails else False:
            raise UserError("The GPU is full.")
        return draw()

    with wired(engine) as wire:
        with monkeypatch.context() as patched:
            patched.setattr(engine, "_draw", failing)
            wire.add(1, [1], max_tokens=5)
            failed, _ = wire.until("failed")
        assert failed["failed"] == {"ids": [1], "message": "The GPU is full."}
        wire.add(1, [1], max_tokens=5)
        assert wire.until("done")[0]["done"][0]["id"] == 1


ABOUT = About("m", byte_tokenizer(), 259, 64, "digest", 4, seed=8)


def test_prompts_and_room() -> None:
    service = Service(ABOUT)
    asked = {"messages": [{"role": "user", "content": "a"}]}
    (choice,) = service.choices(chat_ask(asked, "m", 259))
    assert choice.sampling.max_tokens == 64 - len(choice.prompt) and choice.sampling.seed == 8
    assert ABOUT.tokenizer.decode(choice.prompt) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(Refused, match="64 positions") as long:
        service.choices(completion_ask({"prompt": "a" * 64}, "m", 259))
    assert long.value.code == "context_length_exceeded"
    plain = Service(replace(ABOUT, tokenizer=byte_tokenizer(None)))
    with pytest.raises(Refused, match="no chat template"):
        plain.choices(chat_ask(asked, "m", 259))
    four = service.choices(completion_ask({"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "seed": 1}, "m", 259))
    assert [c.index for c in four] == [0, 1, 2, 3] and len({c.id for c in four}) == 4


def test_answers_count_a_prompt_once() -> None:
    service = Service(ABOUT)
    ask = completion_ask({"prompt": "ab", "n": 2, "max_tokens": 3, "logprobs": 1, "return_token_ids": True}, "m", 259)
    choices = service.choices(ask)
    for choice in choices:
        done = {"text": "x", "finish": "length", "version": 4, "digest": "digest"}
        choice.flight = Flight(choice.id, [7, 8, 9], [-0.5, -1.5, -2.5], done)
    answer = service.answer(ask, choices, "cmpl-1", "completion")
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert answer["choices"][1]["token_ids"] == [7, 8, 9] and answer["choices"][1]["index"] == 1
    assert answer["choices"][0]["weight_versions"] == [{"version": 4, "start": 0, "end": 3}]
    assert answer["choices"][0]["jetrl"] == {"stream": [8, choices[0].id], "flow_digest": "digest"}


def test_ids_of_calls_are_the_apis_and_no_template_need_write_them(recwarn: pytest.WarningsRecorder) -> None:
    service = Service(replace(ABOUT, tokenizer=byte_tokenizer(HERMES_CALLS), max_position=4000))
    call = {"id": "call_7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_7", "content": "1"},
    ]
    (choice,) = service.choices(chat_ask({"messages": messages}, "m", 259))
    text = service.about.tokenizer.decode(choice.prompt)
    assert '{"name": "add", "arguments": {"a": 1}}' in text and "call_7" not in text
    assert not [str(one.message) for one in recwarn]


HERMES_CALLS = CHAT.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}",
)
