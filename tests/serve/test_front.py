"""`jetrl serve` as clients see it: OpenAI's own client against a server in processes of its own."""

from __future__ import annotations

import json
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib import error, request

import numpy as np
import pytest
from serving import Served, served, small_model

pytest.importorskip("starlette", reason="needs the extra serve")
openai = pytest.importorskip("openai", reason="needs OpenAI's client: the extra dev")

from jetrl import UserError  # noqa: E402
from jetrl.report.sessions import read_sessions  # noqa: E402
from jetrl.serve import pipe  # noqa: E402
from jetrl.serve.address import FrontSettings, listen  # noqa: E402
from jetrl.serve.dealer import SILENCE  # noqa: E402
from jetrl.serve.front import _name_in  # noqa: E402
from jetrl.serve.server import running_front, serve  # noqa: E402
from jetrl.types import Request, SamplingParams  # noqa: E402

pytestmark = pytest.mark.timeout(300)
CHAT = [{"role": "user", "content": "What is 1 + 2?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's sessions are recorded."""
    return tmp_path_factory.mktemp("sessions")


@pytest.fixture(scope="module")
def server(folder: Path, record: Path) -> Iterator[Served]:
    with served(folder, FrontSettings(sessions=record)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=250, max_retries=0)


def call(url: str, body: Any = None, headers: dict[str, str] | None = None, method: str = "") -> tuple[int, Any]:
    """Status and body of a plain HTTP request."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    asked = request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    if method:
        asked.method = method
    try:
        with request.urlopen(asked, timeout=250) as answer:
            status, text = answer.status, answer.read().decode()
    except error.HTTPError as failed:
        status, text = failed.code, failed.read().decode()
    return status, json.loads(text) if text.startswith("{") else text


def own(server: Served, prompt: list[int], stream: list[int], **sampling: Any) -> Any:
    """The same request by an engine without a server."""
    params = SamplingParams(seed=stream[0], **sampling)
    (done,) = server.policy.engine.generate([Request(stream[1], tuple(prompt), params)])
    return done


def f32(values: Any) -> bytes:
    return np.array(values, dtype=np.float64).astype(np.float32).tobytes()


def test_a_chat_has_the_engines_tokens_and_the_learners_log_probs(server: Served, client: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=40, n=3, logprobs=True, temperature=0.8,
        extra_body={"return_token_ids": True},
    )
    prompt = answer.prompt_token_ids
    assert prompt == list(server.about.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"])
    assert len(answer.choices) == 3 and answer.system_fingerprint == server.about.flow_digest
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    for choice in answer.choices:
        done = own(server, prompt, choice.jetrl["stream"], max_tokens=40, temperature=0.8)
        assert choice.token_ids == done.tokens.tolist() and choice.message.content == done.text
        assert choice.finish_reason == done.finish_reason
        found = [one.logprob for one in choice.logprobs.content]
        assert f32(found) == done.logprobs.tobytes() and [float(np.float32(x)) for x in found] == found
        learner = server.policy.logprobs(prompt + choice.token_ids, 0.8)[len(prompt) - 1 :]
        assert f32(found) == learner.numpy().tobytes()
        assert [one.token_id for one in choice.logprobs.content] == choice.token_ids  # type: ignore[attr-defined]
        assert choice.weight_versions == [{"version": 0, "start": 0, "end": len(choice.token_ids)}]
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_says_what_the_whole_answer_says(server: Served, client: Any, n: int) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": CHAT, "max_completion_tokens": 60, "seed": 7, "n": n, "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }
    whole = client.chat.completions.create(**asked)
    texts, ids, logprobs, ends = [""] * n, [[] for _ in range(n)], [[] for _ in range(n)], [None] * n
    counts = None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        counts = chunk.usage or counts
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += getattr(choice, "token_ids", None) or []
            logprobs[choice.index] += [one.logprob for one in choice.logprobs.content] if choice.logprobs else []
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert ids == [choice.token_ids for choice in whole.choices]
    assert logprobs == [[one.logprob for one in choice.logprobs.content] for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert counts is not None and counts.completion_tokens == whole.usage.completion_tokens


def test_answers_are_the_same_json_with_and_without_orjson() -> None:
    values = [-0.1, 1e-45, float(np.float32(-3.4e38)), 0, 2**64 - 1, -(2**63), "ä\n\u2028\"", None, True, {"a": []}]
    http = pytest.importorskip("jetrl.serve.http")
    assert json.loads(http.compact_json(values)) == json.loads(http.slow_json(values)) == values


def test_the_async_client(server: Served) -> None:
    import asyncio

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=250) as client:
            answers = await asyncio.gather(*(
                client.completions.create(model="tiny", prompt=f"{i} + ", max_tokens=8, seed=1) for i in range(20)
            ))
        return [answer.choices[0].text for answer in answers]

    one_by_one = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=250)
    assert asyncio.run(ask()) == [
        one_by_one.completions.create(model="tiny", prompt=f"{i} + ", max_tokens=8, seed=1).choices[0].text
        for i in range(20)
    ]


def test_completions_of_texts_and_of_ids(server: Served, client: Any) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["1 + 1 =", "2"], max_tokens=12, n=2, logprobs=0, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    encode = server.about.tokenizer.encode
    assert [c.prompt_token_ids for c in answer.choices] == [encode("1 + 1 =")] * 2 + [encode("2")] * 2
    for choice in answer.choices:
        done = own(server, choice.prompt_token_ids, choice.jetrl["stream"], max_tokens=12)
        assert choice.token_ids == done.tokens.tolist()
        assert f32(choice.logprobs.token_logprobs) == done.logprobs.tobytes()
    ids = client.completions.create(model="tiny", prompt=[300 % 256, 258], max_tokens=3)
    assert ids.usage.prompt_tokens == 2 and ids.usage.completion_tokens <= 3


def test_token_ids_in_and_out(server: Served) -> None:
    prompt = [200, 201, 255, 256, 3]  # no text has these ids
    status, answer = call(f"{server.url}/inference/v1/generate", {
        "token_ids": prompt, "sampling_params": {"max_tokens": 20, "temperature": 1.3, "logprobs": 1, "seed": 5},
    })
    (choice,) = answer["choices"]
    done = own(server, prompt, choice["jetrl"]["stream"], max_tokens=20, temperature=1.3)
    assert status == 200 and choice["token_ids"] == done.tokens.tolist()
    assert f32([one["logprob"] for one in choice["logprobs"]["content"]]) == done.logprobs.tobytes()
    assert choice["jetrl"]["stream"][0] == 5 and choice["jetrl"]["flow_digest"] == server.about.flow_digest


def test_equal_requests_are_interchangeable_and_seeds_repeat(server: Served, client: Any) -> None:
    def ask(**more: Any) -> str:
        return client.completions.create(model="tiny", prompt="equal", max_tokens=24, **more).choices[0].text

    assert ask(seed=3) == ask(seed=3) != ask(seed=4)
    first = [ask() for _ in range(4)]
    assert len(set(first)) == 4
    with served_again(server) as again:
        other = openai.OpenAI(base_url=f"{again}/v1", api_key="x", timeout=250)
        found: list[str] = []
        threads = [threading.Thread(target=lambda: found.append(
            other.completions.create(model="tiny", prompt="equal", max_tokens=24).choices[0].text
        )) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(250)
    assert sorted(found) == sorted(first)


def served_again(server: Served) -> Any:
    from contextlib import contextmanager

    @contextmanager
    def again() -> Iterator[str]:
        with served(server.folder) as other:
            yield other.url

    return again()


def test_a_session_is_a_tree_of_exact_tokens(server: Served, record: Path) -> None:
    """A fork and an edit of the history; every row has the learner's log-probs at all tokens of the policy."""
    status, session = call(f"{server.url}/sessions", {"id": "tree"})
    assert status == 201 and session["base_url"] == f"{server.url}/sessions/tree/v1"
    client = openai.OpenAI(base_url=session["base_url"], api_key="none", timeout=250, max_retries=0)

    def chat(messages: list[Any], **more: Any) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=20, extra_body={"return_token_ids": True}, **more
        )

    first = chat(CHAT)
    said = [*CHAT, first.choices[0].message.model_dump()]
    exact = first.prompt_token_ids + first.choices[0].token_ids
    longer = [*said, {"role": "user", "content": "And 3?"}]
    second = chat(longer)
    fork = chat([*said, {"role": "user", "content": "And 4?"}])
    edited = chat([{"role": "user", "content": "Sum up."}, *said[1:], {"role": "user", "content": "And 5?"}])
    stream = client.chat.completions.create(
        model="tiny", messages=[*longer, second.choices[0].message, {"role": "user", "content": "6"}], max_tokens=5,
        stream=True, extra_body={"return_token_ids": True},
    )
    chunks = list(stream)
    assert second.prompt_token_ids[: len(exact)] == fork.prompt_token_ids[: len(exact)] == exact
    assert chunks[0].prompt_token_ids[: len(exact)] == exact and edited.prompt_token_ids[: len(exact)] != exact

    traces = call(f"{server.url}/sessions/tree/traces")[1]
    assert traces["num_turns"] == 5 and traces["num_forked"] == 2 and len(traces["rows"]) == 3
    drawn = 0
    for row in traces["rows"]:
        tokens = [token for segment in row["segments"] for token in segment["tokens"]]
        learner, at = server.policy.logprobs(tokens).numpy(), 0
        for segment in row["segments"]:
            at += len(segment["tokens"])
            if segment["author"] == "policy":
                assert f32(segment["logprobs"]) == learner[at - len(segment["tokens"]) - 1 : at - 1].tobytes()
                drawn += segment["trained"] * len(segment["tokens"])
    answers = [first, second, fork, edited]
    assert drawn == sum(a.usage.completion_tokens for a in answers) + sum(
        len(c.choices[0].token_ids) for c in chunks[1:]
    )
    assert call(f"{server.url}/sessions/tree/reward", {"reward": 0.5})[1] == {"id": "tree", "reward": 0.5}
    assert call(f"{server.url}/sessions/tree/reward", {"reward": 1})[0] == 409
    assert call(f"{server.url}/sessions/tree/reward", b'{"reward": NaN}')[0] == 400
    assert call(f"{server.url}/sessions/tree", method="DELETE")[1]["reward"] == 0.5
    with pytest.raises(openai.APIStatusError) as ended:
        chat(CHAT)
    assert ended.value.status_code == 410 and ended.value.code == "session_closed"
    assert call(f"{server.url}/sessions/tree/traces")[0] == 410 and call(f"{server.url}/sessions/no/traces")[0] == 404
    assert call(f"{server.url}/sessions", {"id": "a/b"})[0] == 400
    assert call(f"{server.url}/sessions", b"", method="POST")[0] == 201  # no body: an id of the server's

    (talk,) = [one for one in read_sessions(record).talks if one.id == "tree"]  # of all this, on disk
    assert talk.reward == 0.5 and talk.ended and [talk.turns[i]["after"] for i in range(5)] == [-1, 0, 0, -1, 1]
    assert talk.turns[1]["said"] == [["user", "And 3?"]] and talk.turns[4]["said"] == [["user", "6"]]
    assert [role for role, _ in talk.turns[3]["said"]] == ["user", "assistant", "user"]
    assert talk.turns[0]["text"] == first.choices[0].message.content and "What is 1 + 2?" in talk.turns[0]["read"]
    policy = [one for row in traces["rows"] for one in row["segments"] if one["author"] == "policy" and one["trained"]]
    found = {turn["request"]: turn["logprobs"] for turn in talk.turns.values()}
    assert found == {one["request_id"]: one["logprobs"] for one in policy}


def test_attempts_of_one_request_have_one_answer(server: Served) -> None:
    body = {"prompt": "again", "max_tokens": 12, "return_token_ids": True}

    def ask(**headers: str) -> Any:
        names = {key.replace("_", "-"): value for key, value in headers.items()}
        status, answer = call(f"{server.url}/v1/completions", body, names)
        return answer["choices"][0]["token_ids"] if status == 200 else status

    one, two = ask(idempotency_key="1"), ask(idempotency_key="2")
    assert one != two and ask(idempotency_key="1") == one and ask(idempotency_key="2") == two
    body["max_tokens"] = 13
    assert ask(idempotency_key="1") == 422
    in_session = [ask(x_session_id="s"), ask(x_session_id="s", x_stainless_retry_count="1"), ask(x_session_id="s")]
    assert in_session[0] == in_session[1] != in_session[2]
    traces = call(f"{server.url}/sessions/s/traces")[1]
    assert traces["num_turns"] == 2


def test_stop_strings_end_the_text_and_not_the_tokens(server: Served, client: Any) -> None:
    stops = list("0123456789bcfghj")  # in no special token
    asked = {"model": "tiny", "prompt": "stop", "max_tokens": 90, "seed": 2, "stop": stops}
    body = {"ignore_eos": True, "return_token_ids": True}
    whole = client.completions.create(**asked, extra_body=body).choices[0]
    stream = whole.jetrl["stream"]
    done = own(server, whole.prompt_token_ids, stream, max_tokens=90, stop=tuple(stops), ignore_eos=True)
    assert whole.finish_reason == "stop" and whole.token_ids == done.tokens.tolist()
    assert done.text[-1] in stops and whole.text == done.text[:-1]
    pieces = [c.choices[0].text for c in client.completions.create(**asked, extra_body=body, stream=True)]
    assert "".join(pieces) == whole.text and len(pieces) > 1


def test_models_tokens_health_and_metrics(server: Served, client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.max_model_len == server.about.max_position  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny").id == "tiny"
    status, tokens = call(f"{server.url}/tokenize", {"prompt": "é1"})
    assert status == 200 and tokens["tokens"] == server.about.tokenizer.encode("é1") and tokens["count"] == 3
    assert call(f"{server.url}/detokenize", {"tokens": tokens["tokens"]}) == (200, {"prompt": "é1"})
    assert call(f"{server.url}/tokenize", {"messages": CHAT})[1]["count"] > 20
    assert call(f"{server.url}/health")[1]["status"] == "ok"
    status, text = call(f"{server.url}/metrics")
    assert 'jetrl_requests_total{endpoint="/tokenize",status="200"} 2' in text
    assert "jetrl_requests_in_flight 0" in text and "jetrl_weight_version 0" in text


COMPLETION = {"model": "tiny", "prompt": "a", "max_tokens": 2}
BAD: dict[str, tuple[Any, int, str]] = {
    "broken JSON": (b'{"prompt": ', 400, "not JSON"),
    "half a character": (b'{"prompt": "\\ud800"}', 400, "cannot encode"),
    "no object": (b"[1]", 400, "JSON object"),
    "deep": (b'{"prompt": ' + b"[" * 100_000, 400, "not JSON: lists or tables are nested"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 400, "NaN is not JSON"),
    "another model": (COMPLETION | {"model": "gpt-9"}, 404, "this server has 'tiny'"),
    "id out of range": (COMPLETION | {"prompt": [99999]}, 400, "prompt[0] = 99999"),
    "negative id": (COMPLETION | {"prompt": [-1]}, 400, "= -1"),
    "no prompt": ({"model": "tiny"}, 400, "prompt = None"),
    "empty": (COMPLETION | {"prompt": ""}, 400, "no tokens"),
    "empty ids": (COMPLETION | {"prompt": [[]]}, 400, "empty"),
    "too long": (COMPLETION | {"prompt": "a" * 800}, 400, "768 positions"),
    "too many tokens": (COMPLETION | {"max_tokens": 10**9}, 400, "and 1000000001 with max_tokens = 1000000000; the"),
    "huge number": (COMPLETION | {"max_tokens": 10**400}, 400, "max_tokens"),
    "no tokens": (COMPLETION | {"max_tokens": 0}, 400, "max_tokens = 0"),
    "cold": (COMPLETION | {"temperature": -1}, 400, "temperature = -1"),
    "penalty": (COMPLETION | {"frequency_penalty": 0.5}, 400, "frequency_penalty = 0.5 is not supported"),
    "bias": (COMPLETION | {"logit_bias": {"1": 2}}, 400, "logit_bias"),
    "unknown": (COMPLETION | {"temprature": 1}, 400, "temprature is no field"),
    "alternatives": (COMPLETION | {"logprobs": 5}, 400, "only the log-prob of the drawn token"),
    "choices": (COMPLETION | {"n": 1000}, 400, "n = 1000"),
    "stop": (COMPLETION | {"stop": [""]}, 400, "stop"),
    "seed": (COMPLETION | {"seed": 1.5}, 400, "seed = 1.5"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_completion_is_one_error(server: Served, what: str) -> None:
    body, status, text = BAD[what]
    found, answer = call(f"{server.url}/v1/completions", body)
    assert found == status and text in answer["error"]["message"], answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert call(f"{server.url}/v1/completions", COMPLETION)[0] == 200


MESSAGES: dict[str, tuple[Any, str]] = {
    "none": ([], "at least one"), "no list": ("hi", "send a list"), "no role": ([{"content": "a"}], "'role'"),
    "picture": ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}],
                "reads text only"),
}


@pytest.mark.parametrize("what", MESSAGES)
def test_bad_messages(server: Served, what: str) -> None:
    messages, text = MESSAGES[what]
    status, answer = call(f"{server.url}/v1/chat/completions", {"model": "tiny", "messages": messages})
    assert status == 400 and text in answer["error"]["message"]


def test_no_template_from_clients(server: Served) -> None:
    for more in ({"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}):
        status, answer = call(f"{server.url}/v1/chat/completions", {"messages": CHAT, **more})
        assert status == 400 and "chat_template" in answer["error"]["message"]


def test_addresses_methods_and_types(server: Served) -> None:
    assert call(f"{server.url}/v1/nothing")[0] == 404 and call(f"{server.url}/v1/completions")[0] == 405
    for path, hint in (("/v1/responses", "use chat completions"), ("/chat/completions", "base URL that ends in /v1")):
        status, told = call(server.url + path, {})
        assert status == 404 and hint in told["error"]["message"]
    status, answer = call(f"{server.url}/v1/completions", COMPLETION, {"content-type": "text/plain"})
    assert status == 415 and "application/json" in answer["error"]["message"]
    for host in ("evil.example:80", "evil.example", "127.0.0.1.evil.example", ""):
        status, answer = call(f"{server.url}/v1/completions", COMPLETION, {"host": host})
        assert status == 403 and "Host" in answer["error"]["message"]
    assert [_name_in(host) for host in ("[::1]:8000", "[::1]", "a:5", "a")] == ["::1", "::1", "a", "a"]
    for host in ("localhost", "127.0.0.2:5", "[::1]:8000"):
        assert call(f"{server.url}/v1/models", None, {"host": host})[0] == 200


def test_a_key_and_a_body_that_is_too_long(folder: Path) -> None:
    with served(folder, FrontSettings(api_key="secret", max_body=1000)) as server:
        assert call(f"{server.url}/health")[0] == 200
        wrong = ({}, {"authorization": "Bearer secreT"}, {"authorization": "secret"}, {"authorization": "Bearer \xe9"})
        for headers in wrong:
            status, answer = call(f"{server.url}/v1/models", None, headers)
            assert status == 401 and "Bearer KEY" in answer["error"]["message"]
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", timeout=250)
        assert client.models.list().data[0].id == "tiny"
        for length in ("content-length: 100000000", "transfer-encoding: chunked"):
            with socket.create_connection(server.url.removeprefix("http://").split(":"), timeout=200) as wire:
                wire.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer secret\r\n"
                    b"content-type: application/json\r\n%s\r\n\r\n" % length.encode()
                )
                if "chunked" in length:
                    wire.sendall(b"7d0\r\n" + b" " * 2000 + b"\r\n")
                assert b" 413 " in wire.recv(4096)


def test_a_full_queue_and_clients_that_leave(folder: Path) -> None:
    long = {"prompt": "a", "max_tokens": 700, "ignore_eos": True}
    with served(folder, FrontSettings(max_requests=2), slow=0.05) as server:
        place = server.url.removeprefix("http://").split(":")
        wires = []
        for stream in (False, True):
            body = json.dumps(long | {"stream": stream}).encode()
            wires.append(socket.create_connection(place, timeout=200))
            wires[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                              b"content-length: %d\r\n\r\n%s" % (len(body), body))
        wait(lambda: "jetrl_requests_in_flight 2" in call(f"{server.url}/metrics")[1])
        with pytest.raises(openai.RateLimitError) as full:
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0).completions.create(
                model="tiny", prompt="b", max_tokens=1
            )
        assert full.value.response.headers["retry-after"] == "1" and full.value.code == "queue_full"
        assert wires[1].recv(100).startswith(b"HTTP/1.1 200")
        for wire in wires:
            wire.close()
        wait(lambda: "jetrl_requests_in_flight 0" in call(f"{server.url}/metrics")[1])
        wait(lambda: not server.engine.has_work)
        assert "jetrl_disconnects_total 2" in call(f"{server.url}/metrics")[1]
        assert call(f"{server.url}/v1/completions", COMPLETION)[0] == 200


def test_an_end_of_either_process_is_told(server: Served) -> None:
    before, told, urls = {child.pid for child in multiprocessing.active_children()}, list[str](), list[str]()

    def run() -> None:
        try:
            serve(server.policy.engine, server.about, listen("127.0.0.1", 0), FrontSettings(), urls.append)
        except UserError as error:
            told.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait(lambda: urls and call(f"{urls[0]}/health")[0] == 200)
    (child,) = (child for child in multiprocessing.active_children() if child.pid not in before)
    child.kill()
    thread.join(250)
    assert told and "has ended (status -9)" in told[0]

    listener, answers = listen("127.0.0.1", 0), list[Any]()
    with running_front(listener, server.about, FrontSettings()) as front:  # and no engine at the other end
        asking = threading.Thread(target=lambda: answers.append(call(f"{front.url}/v1/completions", COMPLETION)))
        asking.start()
        assert pipe.receive(front.connection)["tokens"].tolist() == server.about.tokenizer.encode("a")
        front.connection.close()
        asking.join(250)
        ((status, answer),) = answers
        assert status == 503 and answer["error"]["code"] == "engine_ended" and SILENCE > 5
        front.process.join(250)
        assert front.process.exitcode == 0


def wait(holds: Any, seconds: float = 200.0) -> None:
    """Until it holds; an error after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_log_probs_of_prompts_are_the_learners_in_vllms_form(server: Served, client: Any) -> None:
    prompts = [server.about.tokenizer.encode(text) for text in ("1 + 2 = 3", "ab", "one and one is two")]
    for drawn in (0, 3):
        status, body = call(f"{server.url}/v1/completions", {
            "prompt": prompts, "prompt_logprobs": 4, "max_tokens": drawn, "temperature": 0.7,
        })
        assert status == 200 and [len(choice["prompt_logprobs"]) for choice in body["choices"]] == [*map(len, prompts)]
        assert body["usage"]["completion_tokens"] == drawn * len(prompts)
        for prompt, choice in zip(prompts, body["choices"], strict=True):
            first, *rows = choice["prompt_logprobs"]
            found = [row[str(token)]["logprob"] for token, row in zip(prompt[1:], rows, strict=True)]
            assert first is None and f32(found) == server.policy.logprobs(prompt).numpy().tobytes()
            for row in rows:
                best = sorted(row.values(), key=lambda one: -one["logprob"])[:4]
                assert [one["rank"] for one in best] == [1, 2, 3, 4] and len(row) in (4, 5)
            assert rows[0][str(prompt[1])]["decoded_token"] == server.about.tokenizer.decode([prompt[1]])
    whole = client.completions.create(model="tiny", prompt=prompts[0], max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert [*map(len, whole.choices[0].prompt_logprobs[1:])] == [1] * (len(prompts[0]) - 1)


@pytest.mark.parametrize(("changes", "said"), [
    ({"prompt_logprobs": -1}, "prompt_logprobs = -1: must be a whole number from 0 to 128"),
    ({"prompt_logprobs": 0, "n": 2}, "they do not stream, and n must be 1"),
    ({"prompt_logprobs": 0, "session_id": "a"}, "outside of sessions"),
    ({"max_tokens": 0}, "max_tokens = 0: must be a whole number from 1"),
    ({"prompt_logprobs": 0, "max_tokens": 0, "prompt": [1] * 800}, "The prompt has 800 tokens"),
], ids=["negative", "several", "session", "nothing", "long"])
def test_prompt_log_probs_that_are_refused(server: Served, changes: dict[str, Any], said: str) -> None:
    status, body = call(f"{server.url}/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1} | changes)
    assert status == 400 and said in body["error"]["message"], body
