"""Parts of the server without a server: bodies, names of requests, texts in pieces, keys and addresses."""

from __future__ import annotations

import json
import random
import socket
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer

from jetrl import UserError
from jetrl.serve import address, wire
from jetrl.serve.address import listen, require_key
from jetrl.serve.counts import Counts
from jetrl.serve.names import Names
from jetrl.serve.refusal import Refused
from jetrl.serve.text import TextStream, visible
from jetrl.types import SamplingParams

TEXT = "a <stop one, é and ü, <<stop> 漢字 <sto <stop>> behind"


@pytest.mark.parametrize("stops", [("<stop>",), ("<stop>", "字 <"), ("nothing of it",), ()])
def test_pieces_of_a_text_are_its_text_and_nothing_is_taken_back(stops: tuple[str, ...]) -> None:
    tokenizer = byte_tokenizer(None)
    tokens = tokenizer.encode(TEXT)
    for seed in range(20):
        draw, stream, at, pieces = random.Random(seed), TextStream(tokenizer, stops), 0, []
        while at < len(tokens):
            at = min(len(tokens), at + draw.randint(1, 4))
            pieces.append(stream.more(tokens[:at]))
            assert visible(TEXT, stops).startswith("".join(pieces))
        pieces.append(stream.rest(visible(TEXT, stops)))
        assert "".join(pieces) == visible(TEXT, stops)
    assert visible(TEXT, ("<stop>",)) == "a <stop one, é and ü, <" and visible(TEXT, ()) == TEXT


def test_names_count_equal_requests_unless_they_say_a_seed() -> None:
    names, params = Names(), SamplingParams(5)
    first, second = names.take([1, 2], params, 2, False), names.take([1, 2], params, 2, False)
    assert len({*first, *second}) == 4 and Names().take([1, 2], params, 4, False) == [*first, *second]
    assert names.take([1, 2], params, 2, True) == first == names.take([1, 2], params, 2, True)
    others = [
        names.take([1, 2, 0], params, 1, True), names.take([1, 2], SamplingParams(6), 1, True),
        names.take([1, 2], SamplingParams(5, seed=1), 1, True), Names("x").take([1, 2], params, 1, True),
    ]
    found = {first[0].id, *(name.id for (name,) in others)}
    assert len(found) == 5 and all(0 <= id < 2**63 for id in found)


def test_answers_that_nobody_got_are_the_next_ones() -> None:
    names, params = Names(), SamplingParams(5)
    five = names.take([1], params, 5, False)
    names.give_back([1], params, [five[3], five[1], five[1]])
    assert names.take([1], params, 1, False) == [five[1]]
    names.claim([1], params, [five[3]])
    assert names.take([1], params, 1, False)[0].place == 5
    names.give_back([1], params, [five[0]])
    assert [name.place for name in names.take([1], params, 3, False)] == [0, 6, 7]


def test_what_an_ask_holds() -> None:
    ask = wire.chat_ask({
        "model": "m", "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c", "name": None},
        ],
        "max_completion_tokens": 7, "seed": -1, "temperature": 0, "top_k": -1, "stop": "x", "user": "me",
        "frequency_penalty": 0.0, "logit_bias": {}, "tools": [], "chat_template_kwargs": {"think": False},
    }, "m", 50)
    assert ask.messages == ({"role": "system", "content": "ab"}, {"role": "user", "content": "c"})
    assert (ask.max_tokens, ask.seed, ask.sampling.temperature, ask.sampling.top_k) == (7, 2**64 - 1, 0, 0)
    assert ask.sampling.stop == ("x",) and ask.variables == {"think": False} and not ask.logprobs
    assert wire.chat_ask({"messages": [{"role": "user", "content": "c"}]}, "m", 50).max_tokens is None
    assert wire.completion_ask({"prompt": [[1], "a"], "logprobs": 1}, "m", 50).prompts == ((1,), "a")
    generate = wire.generate_ask({"token_ids": [3], "sampling_params": {"max_tokens": 2, "logprobs": True}}, "m", 50)
    assert generate.prompts == ((3,),) and generate.max_tokens == 2 and generate.logprobs


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(("data", "text"), [
    (CHAT | {"max_tokens": 1, "max_completion_tokens": 2}, "differ"),
    (CHAT | {"top_logprobs": 3}, "top_logprobs = 3 is not supported"),
    (CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT | {"tool_choice": "required"}, "tool_choice"),
    (CHAT | {"echo": 0}, "echo = 0"),
    (CHAT | {"tools": [{"type": "web_search"}]}, "tools: send"),
    (CHAT | {"stream": "yes"}, "stream = 'yes'"),
    (CHAT | {"stream_options": {"x": 1}}, "stream_options"),
    (CHAT | {"chat_template_kwargs": {"a": [1]}}, "texts, numbers"),
    ({"messages": [{"role": "user", "content": "a", "x": float}]}, "messages[0]"),
])
def test_what_is_refused(data: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused) as caught:
        wire.chat_ask(data, "m", 50)
    assert text in str(caught.value) and caught.value.status == 400 and caught.value.param is not None


def test_counts_are_prometheus_text() -> None:
    counts = Counts()
    counts.answered(0, 5, 7)
    counts.requests["/v1/x", 200] += 2
    lines = counts.text([(True, {"running": 1, "waiting": 2}, 3)], 4).splitlines()
    assert 'jetrl_requests_total{endpoint="/v1/x",status="200"} 2' in lines and "jetrl_prompt_tokens_total 5" in lines
    assert {"jetrl_generated_tokens_total 7", "jetrl_sequences_running 1", "jetrl_sequences_waiting 2",
            "jetrl_requests_in_flight 3", "jetrl_weight_version 4"} <= set(lines)
    named = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(named) == len(set(named)) and all(any(x.startswith(n) for x in lines) for n in named)
    assert not any("worker" in line for line in lines)


def test_counts_of_several_workers_are_sums_and_each_ones() -> None:
    counts = Counts()
    counts.answered(0, 5, 7)
    counts.answered(2, 1, 2)
    state = {"running": 1, "waiting": 2}
    lines = counts.text([(True, state, 3), (False, {"running": 0, "waiting": 0}, 0), (True, state, 1)], 4).splitlines()
    assert {
        "jetrl_prompt_tokens_total 6", "jetrl_generated_tokens_total 9", "jetrl_requests_in_flight 4",
        "jetrl_sequences_running 2", "jetrl_sequences_waiting 4",
        'jetrl_worker_generated_tokens_total{worker="0"} 7', 'jetrl_worker_generated_tokens_total{worker="1"} 0',
        'jetrl_worker_prompt_tokens_total{worker="2"} 1', 'jetrl_worker_requests_in_flight{worker="2"} 1',
        'jetrl_worker_sequences_running{worker="1"} 0', 'jetrl_worker_sequences_waiting{worker="0"} 2',
        'jetrl_worker_up{worker="0"} 1', 'jetrl_worker_up{worker="1"} 0',
    } <= set(lines)
    named = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(named) == len(set(named))


def test_addresses_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.9"):
        require_key(host, None)
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.com", ""):
        with pytest.raises(UserError, match="JETRL_API_KEY"):
            require_key(host, None)
        require_key(host, "key")
    for key in ("", "a b", "é", "a\n"):
        with pytest.raises(UserError, match="one word"):
            require_key("127.0.0.1", key)
    with listen("127.0.0.1", 0) as taken:
        with socket.create_connection(taken.getsockname()), taken.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "an answer in two parts takes 40 ms"
        with pytest.raises(UserError, match="choose another port"):
            listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UserError, match="Choose another address"):
        listen("203.0.113.7", 0)
    monkeypatch.setattr(address, "packages", lambda extra: ())
    address.require_extra()


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetrl.requirements.installed", lambda name: None)
    with pytest.raises(UserError, match=r'starlette is not installed.*pip install "jetrl\[serve\]"'):
        address.require_extra()


@pytest.mark.parametrize("text", [
    '{"a": [1, -2, 2147483648], "b": 0.1, "c": "\\u00e4", "d": null, "a": true}',
    '{"seed": 18446744073709551615}', '{"seed": 184467440737095516150000}', '{"t": 1e-320, "u": 1e999, "v": 2.50e+3}',
    '{"lone": "\\ud800"}', '{"t": 0.30000000000000004, "u": 123456789012345678.5, "v": -0.0}',
])
def test_a_quick_reader_reads_what_json_says(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = repr(wire.parse_json(text.encode()))
    monkeypatch.setattr(wire, "orjson", None)
    assert quick == repr(wire.parse_json(text.encode())) == repr(json.loads(text))


@pytest.mark.parametrize("text", [
    '{"a": NaN}', '{"a": ', "[]", '{"a": "\x01"}', "{'a': 1}", '{"a":' + "[" * 99 + "]" * 99 + "}",
])
def test_a_quick_reader_refuses_in_the_same_words(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused) as quick:
        wire.parse_json(text.encode())
    monkeypatch.setattr(wire, "orjson", None)
    with pytest.raises(Refused) as slow:
        wire.parse_json(text.encode())
    assert str(quick.value) == str(slow.value)
