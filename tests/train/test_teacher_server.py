"""A teacher behind a URL: what is asked, what is taken, what is asked again, and what is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from jetrl.errors import UserError
from jetrl.train import teacher_server
from jetrl.train.teacher_server import KEY, TeacherServer

pytestmark = pytest.mark.timeout(60)
Reply = Callable[[dict[str, Any]], tuple[int, Any]]


def table(tokens: list[int], top: int) -> list[Any]:
    """vLLM's form, with log-probs -(token + place / 8) and others that are more probable."""
    rows: list[Any] = [None]
    for place, token in enumerate(tokens[1:], 1):
        row = {str(token): {"logprob": -(token + place / 8), "rank": 9, "decoded_token": f"<{token}>"}}
        row |= {str(100 + i): {"logprob": -i / 4 - 0.125, "rank": i + 1, "decoded_token": "x"} for i in range(top)}
        rows.append(row)
    return rows


def answer(body: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"choices": [{"prompt_logprobs": table(body["prompt"], body["prompt_logprobs"])}]}


@contextmanager
def server(reply: Reply = answer, card: dict[str, Any] | None = None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A stub of a server: its address, and the bodies and keys that came."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:  # noqa: N802
            self._send(200, {"data": [{"id": "big", "max_model_len": 64} | (card or {})]})

        def do_POST(self) -> None:  # noqa: N802
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append(body | {"path": self.path, "key": self.headers.get("authorization")})
            self._send(*reply(body))

        def log_message(self, *args: Any) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_address[1]}", seen
    finally:
        found.shutdown()
        found.server_close()
        thread.join(5)


def test_log_probs_are_those_of_each_token_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "word")
    with server() as (url, seen):
        teacher = TeacherServer(url + "/v1/")
        found = teacher.judge([[3, 4, 5], [7, 1]], 2)
        assert found[0].logprobs.tolist() == [-4.125, -5.25] and found[1].logprobs.tolist() == [-1.125]
        assert found[0].top_tokens.tolist() == [[100, 101]] * 2
        assert found[0].top_logprobs.dtype == np.float32 and found[0].top_logprobs.tolist() == [[-0.125, -0.375]] * 2
        assert teacher.judge([[3, 4]])[0].top_tokens.shape == (1, 0)
        assert teacher.texts([5, 9]) == ["<5>", "<9>"]
    first = next(one for one in seen if one["prompt"] == [3, 4, 5])
    assert first == {
        "model": "big", "prompt": [3, 4, 5], "prompt_logprobs": 2, "max_tokens": 1, "temperature": 1.0,
        "path": "/v1/completions", "key": "Bearer word",
    }


def test_our_own_server_is_asked_to_draw_nothing() -> None:
    with server(card={"owned_by": "jetrl"}) as (url, seen):
        TeacherServer(url).judge([[1, 2]])
    assert seen[0]["max_tokens"] == 0


def test_what_may_pass_is_tried_again_and_a_refusal_is_not() -> None:
    tries: list[int] = []

    def busy(body: dict[str, Any]) -> tuple[int, Any]:
        tries.append(1)
        return answer(body) if len(tries) > 2 else (429 if len(tries) == 1 else 503, {"error": {"message": "busy"}})

    with server(busy) as (url, _):
        assert TeacherServer(url, 20.0).judge([[1, 2]])[0].logprobs.tolist() == [-2.125] and len(tries) == 3
    with server(lambda body: (400, {"error": {"message": "Token id 9 is out of vocabulary."}})) as (url, seen):
        with pytest.raises(UserError, match="refuses /v1/completions with status 400: Token id 9 is out of vocab"):
            TeacherServer(url).judge([[1, 9]])
        assert len(seen) == 1
    with server(lambda body: (401, {"error": "no"})) as (url, _):
        with pytest.raises(UserError, match=f"status 401: no. Set its key as the environment variable {KEY}"):
            TeacherServer(url).judge([[1, 9]])


def test_the_message_is_that_of_the_request_that_failed_and_others_are_not_waited_for() -> None:
    def one_bad(body: dict[str, Any]) -> tuple[int, Any]:
        return (400, {"message": "bad"}) if body["prompt"][0] == 5 else (503, {"message": "later"})

    with server(one_bad) as (url, _):
        start = time.monotonic()
        with pytest.raises(UserError, match="status 400: bad"):
            TeacherServer(url, 50.0).judge([[1, 2], [3, 4], [5, 6]])
        assert time.monotonic() - start < 10


def test_a_server_that_has_gone_is_told_after_the_time_limit() -> None:
    with server() as (url, _):
        teacher = TeacherServer(url, 0.6)
        teacher.judge([[1, 2]])
    with pytest.raises(UserError, match="refused. There was no answer within teacher.timeout = 0.6 s. Start"):
        teacher.judge([[1, 2], [3, 4]])
    with pytest.raises(UserError, match="Is it running there"):
        _ = TeacherServer(url, 60.0).about  # at a start nobody waits


def test_a_server_that_says_nothing_is_told_after_the_time_limit() -> None:
    done = threading.Event()
    with server(lambda body: (done.wait(20), answer(body))[1]) as (url, _):
        try:
            with pytest.raises(UserError, match="timed out. There was no answer within teacher.timeout = 0.5 s"):
                TeacherServer(url, 0.5).judge([[1, 2]])
        finally:
            done.set()


@pytest.mark.parametrize(("body", "said"), [
    ({"choices": [{"text": ""}]}, "its answer has no prompt_logprobs of every token"),
    ({"choices": [{"prompt_logprobs": [None]}]}, "its answer has no prompt_logprobs of every token"),
    ({"choices": []}, "its answer has no prompt_logprobs of every token"),
    ({"choices": [{"prompt_logprobs": [None, {"8": {"logprob": -1.0}}]}]}, "no entry for the token 2 at its place"),
    ({"choices": [{"prompt_logprobs": [None, {"2": {"logprob": "x"}}]}]}, "a log-prob in its answer is 'x'"),
    ({"choices": [{"prompt_logprobs": [None, {"2": {"logprob": -1.0}}]}]}, "has 1 of the 2 most probable tokens"),
    (b'{"choices": NaN}', "its answer is not JSON"), (b"[" * 9999, "its answer is not JSON"),
], ids=str)
def test_answers_that_are_none(body: Any, said: str) -> None:
    with server(lambda asked: (200, body)) as (url, _), pytest.raises(UserError, match=said):
        TeacherServer(url).judge([[1, 2]], 2)


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_server, "MOST_BYTES", 100)
    with server(lambda body: (200, b" " * 5000)) as (url, _), pytest.raises(UserError, match="more than 0 MiB"):
        TeacherServer(url).judge([[1, 2]])


def test_models_of_other_names_have_other_digests() -> None:
    with server() as (a, _), server(card={"id": "small"}) as (b, _), server() as (c, _):
        one, other, same = (TeacherServer(url).base_digest for url in (a, b, c))
    assert one == same != other


def test_our_own_server_says_which_weights_it_has() -> None:
    def of(**more: Any) -> str:
        with server(card={"id": "m", "owned_by": "jetrl", "flow_digest": "f", "weight_version": 0, **more}) as (url, _):
            return TeacherServer(url).base_digest

    assert of() == of() and len({of(), of(flow_digest="g"), of(weight_version=1)}) == 3


def test_a_request_that_waits_for_its_answer_ends_with_the_one_that_failed() -> None:
    done = threading.Event()

    def one_bad(body: dict[str, Any]) -> tuple[int, Any]:
        if body["prompt"][0] != 5:
            done.wait(30)
        return 400, {"message": "bad"}

    start = time.monotonic()
    with server(one_bad) as (url, _):
        try:
            with pytest.raises(UserError, match="status 400: bad"):
                TeacherServer(url, 50.0).judge([[1, 2], [3, 4], [5, 6]])
            assert time.monotonic() - start < 10
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("teacher")]
        finally:
            done.set()


def test_a_key_that_no_header_can_carry_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret\r")
    with server() as (url, _), pytest.raises(UserError, match=f"{KEY} must be one word") as told:
        TeacherServer(url).judge([[1, 2]])
    assert "secret" not in str(told.value)
