"""`jetrl serve --nproc`: one front over engines in processes of their own, on a CPU."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib import error, request

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from serving import small_model

from jetrl import UserError, load_model
from jetrl.api import served_model
from jetrl.errors import OutOfMemory
from jetrl.serve.address import FrontSettings, listen
from jetrl.serve.names import Names
from jetrl.serve.service import About
from jetrl.serve.workers import Worker, _Ready, _work, require_gpus, serve_workers, start_of
from jetrl.types import Request, SamplingParams

pytest.importorskip("starlette", reason="needs the extra serve")
pytestmark = pytest.mark.timeout(300)


@dataclass
class Running:
    """A server of two workers in a thread of this process."""

    url: str
    folder: Path
    workers: list[Worker]
    told: list[str]
    raised: list[BaseException]
    thread: threading.Thread


def build_of(folder: Path) -> Any:
    return partial(served_model, str(folder), "tiny", "fp8", "cpu", "", None, 0, 8, None)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = small_model(tmp_path_factory.mktemp("model") / "tiny")
    said, told, raised, stop = list[str](), list[str](), list[BaseException](), threading.Event()
    before = {child.pid for child in multiprocessing.active_children()}

    def run() -> None:
        try:
            serve_workers(
                build_of(folder), 2, False, listen("127.0.0.1", 0), FrontSettings(),
                lambda about, formats, url: said.append(url), told.append, stop.is_set,
            )
        except UserError as one:
            raised.append(one)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait(lambda: said or raised)
    assert not raised, raised
    made = {child.name: child for child in multiprocessing.active_children() if child.pid not in before}
    ours, _ = multiprocessing.Pipe()
    workers = [Worker(number, made[f"jetrl-serve-{number}"], ours, ours) for number in range(2)]
    wait(lambda: call(f"{said[0]}/health")[0] == 200)
    yield Running(said[0], folder, workers, told, raised, thread)
    stop.set()
    thread.join(60)
    assert not thread.is_alive() and not [w for w in made.values() if w.is_alive()]


def call(url: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Status and body of a plain HTTP request."""
    data = None if body is None else json.dumps(body).encode()
    asked = request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    try:
        with request.urlopen(asked, timeout=120) as answer:
            status, text = answer.status, answer.read().decode()
    except error.HTTPError as failed:
        status, text = failed.code, failed.read().decode()
    except OSError as failed:  # it does not listen yet
        return 0, str(failed)
    return status, json.loads(text) if text.startswith("{") else text


def wait(holds: Any, seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def metrics(url: str) -> dict[str, float]:
    lines = call(f"{url}/metrics")[1].splitlines()
    return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}


def test_answers_are_those_of_one_engine_whoever_gives_them(running: Running) -> None:
    """Each answer is its stream's; the streams of equal requests are those that a server of one engine counts."""
    engine = load_model(running.folder, "fp8", "cpu").engine
    body = {"prompt": [1, 2, 3], "max_tokens": 12, "return_token_ids": True}
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda i=i: answers.append(call(
        f"{running.url}/v1/completions", body, {"x-session-id": f"s{i % 4}"} if i < 8 else {}
    ))) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    choices = [answer["choices"][0] for status, answer in answers if status == 200]
    assert len(choices) == 12
    sampling = SamplingParams(12, seed=0)
    names = {name.id for scope, n in (("", 4), *((f"s{i}", 2) for i in range(4)))
             for name in Names(scope).take([1, 2, 3], sampling, n, False)}
    assert {choice["jetrl"]["stream"][1] for choice in choices} == names and len(names) == 12
    for choice in choices:
        (own,) = engine.generate([Request(choice["jetrl"]["stream"][1], (1, 2, 3), sampling)])
        assert own.tokens.tolist() == choice["token_ids"]
    found = metrics(running.url)
    drawn = [found[f'jetrl_worker_generated_tokens_total{{worker="{i}"}}'] for i in range(2)]
    assert min(drawn) > 0 and sum(drawn) == found["jetrl_generated_tokens_total"]
    assert sum(drawn) == sum(len(choice["token_ids"]) for choice in choices)


def test_a_worker_that_is_killed_fails_its_sessions_alone(running: Running) -> None:
    """Its open request ends with 503 by name; the retry has the answer that it would have had; the other one goes on.
    At the end of both the server ends, with a message."""
    long = {"prompt": [7], "max_tokens": 100, "ignore_eos": True, "return_token_ids": True}
    base, told = metrics(running.url), running.told
    answers: dict[str, Any] = {}

    def ask(session: str, **headers: str) -> None:
        names = {key.replace("_", "-"): value for key, value in headers.items()}
        answers[session] = call(f"{running.url}/v1/completions", long, {"x-session-id": session, **names})

    workers = running.workers
    for one in workers:
        os.kill(one.process.pid, signal.SIGSTOP)  # the answers wait
    threads = [threading.Thread(target=ask, args=(f"long{i}",)) for i in range(2)]
    for i, thread in enumerate(threads):
        thread.start()
        wait(lambda i=i: metrics(running.url)["jetrl_requests_in_flight"] == i + 1)
    found = metrics(running.url)
    assert [found[f'jetrl_worker_requests_in_flight{{worker="{i}"}}'] for i in range(2)] == [1, 1]
    os.kill(workers[1].process.pid, signal.SIGKILL)
    os.kill(workers[0].process.pid, signal.SIGCONT)
    for thread in threads:
        thread.join(200)
    lost, kept = sorted(answers, key=lambda name: answers[name][0], reverse=True)
    status, answer = answers[lost]
    assert status == 503 and answer["error"]["message"].startswith("Worker 1 has ended before the answer.")
    assert answer["error"]["code"] == "engine_ended" and answers[kept][0] == 200
    wait(lambda: told)
    assert told == [f"{workers[1]} was ended by SIGKILL, most likely because the machine ran out of memory: its open "
                    "requests have failed. 1 of 2 workers go on."]
    status, health = call(f"{running.url}/health")
    assert status == 200 and health["status"] == "degraded"
    assert [one["status"] for one in health["workers"]] == ["ok", "ended"]
    assert metrics(running.url)['jetrl_worker_up{worker="1"}'] == 0 == base["jetrl_requests_in_flight"]

    ask(lost, x_stainless_retry_count="1")
    status, answer = answers[lost]
    (choice,) = answer["choices"]
    stream = choice["jetrl"]["stream"]
    engine = load_model(running.folder, "fp8", "cpu").engine
    (own,) = engine.generate([Request(stream[1], (7,), SamplingParams(100, ignore_eos=True, seed=0))])
    assert status == 200 and own.tokens.tolist() == choice["token_ids"]

    os.kill(workers[0].process.pid, signal.SIGTERM)
    running.thread.join(60)
    assert [str(one) for one in running.raised] == ["All workers have ended; see above."]
    assert told[1].startswith(f"{workers[0]} was ended by SIGTERM: ")


def refuses() -> Any:
    raise UserError("no such model")


def full() -> Any:
    raise OutOfMemory("the GPU is full")


def unreadable() -> Any:
    open("/nowhere/model")


@pytest.mark.parametrize(("build", "kind", "text"), [
    (refuses, UserError, "no such model"), (full, OutOfMemory, "the GPU is full"),
    (unreadable, UserError, "cannot read or write: .*/nowhere/model"),
])
def test_what_a_worker_tells_that_cannot_begin(
    build: Any, kind: type[UserError], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (ours, theirs), (_, pipe) = multiprocessing.Pipe(), multiprocessing.Pipe()
    _work(0, 1, pipe, theirs, build, False)
    said = ours.recv()
    assert type(said) is kind and re.match(text, str(said))


class Still:
    """A process that has ended with status 5."""

    pid, exitcode, ended = 77, 5, False

    def terminate(self) -> None:
        self.ended = True

    def join(self, seconds: float) -> None:
        pass


def table(*said: Any) -> list[Worker]:
    """Workers that have told this of their start; None: nothing."""
    workers = []
    for number, what in enumerate(said):
        ours, theirs = multiprocessing.Pipe()
        if what is not None:
            theirs.send(what)
        theirs.close()
        workers.append(Worker(number, Still(), ours, ours))
    return workers


READY = _Ready(About("m", byte_tokenizer(), 259, 64, "digest", 4), "fp8", "abc")


@pytest.mark.parametrize(("said", "kind", "text"), [
    (OutOfMemory("the GPU is full"), OutOfMemory, "^Worker 1: the GPU is full$"),
    (None, UserError, r"^Worker 1 \(process 77\) has ended with status 5 before it could serve; see above"),
    (replace(READY, checksum="x"), UserError, r"Workers 0 and 1 have different weights \(abc and x\), so answers"),
    (replace(READY, about=replace(READY.about, flow_digest="x")), UserError,
     r"Workers 0 and 1 compute different flows \(digest and x\), so answers"),
])
def test_workers_that_cannot_serve_together(said: Any, kind: type[UserError], text: str) -> None:
    workers = table(READY, said)
    with pytest.raises(kind, match=text) as caught:
        start_of(workers)
    assert type(caught.value) is kind
    about, formats = start_of(table(READY, READY))
    assert (about.flow_digest, formats) == ("digest", "fp8")


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not require_gpus(100, "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for there, text in ((1, "--nproc 4: 1 GPU is visible"), (3, "--nproc 4: 3 GPUs are visible .* to at most 3")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: there)
        with pytest.raises(UserError, match=text):
            require_gpus(4, "auto")
        assert require_gpus(there, "cuda") and not require_gpus(9, "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not require_gpus(4, "auto")
