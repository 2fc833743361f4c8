"""`jetrl serve` as a user starts it, and what it refuses before a model is loaded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib import request

import pytest
from serving import small_model

from jetrl.serve.address import listen

pytest.importorskip("starlette", reason="needs the extra serve")
pytestmark = pytest.mark.timeout(400)


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """The program, which is ended with the block."""
    variables = {key: value for key, value in os.environ.items() if key != "JETRL_API_KEY"}
    program = subprocess.Popen(
        [sys.executable, "-m", "jetrl", "serve", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=variables | {"COLUMNS": "200"},
    )
    watch = threading.Timer(300, program.kill)
    watch.start()
    try:
        yield program
    finally:
        watch.cancel()
        program.kill()
        program.wait()


def test_it_serves_a_folder_until_ctrl_c(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "mine")
    with started(str(folder), "--port", "0", "--device", "cpu") as program:
        assert program.stdout is not None
        lines = iter(program.stdout.readline, "")
        found = next(m for m in (re.search(r"Serving (\S+) at (http://127.0.0.1:\d+)/v1", line) for line in lines) if m)
        assert found[1] == "mine"
        body = json.dumps({"prompt": "a", "max_tokens": 3, "seed": 1, "return_token_ids": True}).encode()
        asked = request.Request(f"{found[2]}/v1/completions", body, {"content-type": "application/json"})
        with request.urlopen(asked, timeout=200) as answer:
            (choice,) = json.load(answer)["choices"]
        assert 1 <= len(choice["token_ids"]) <= 3 and choice["weight_versions"][0]["version"] == 0
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=200)
        assert program.returncode == 130 and "Traceback" not in errors, errors


@pytest.mark.slow
def test_several_engines_end_with_the_program_however_it_ends(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "mine")
    with started(str(folder), "--port", "0", "--device", "cpu", "--nproc", "2") as program:
        assert program.stdout is not None
        lines = iter(program.stdout.readline, "")
        found = next(m for m in (re.search(r"at (http://127.0.0.1:\d+)/v1 with 2 eng", line) for line in lines) if m)
        url = found[1]
        body = json.dumps({"prompt": ["a", "b"], "max_tokens": 3, "seed": 1}).encode()
        asked = request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with request.urlopen(asked, timeout=200) as answer:
            assert len(json.load(answer)["choices"]) == 2
        with request.urlopen(f"{url}/metrics", timeout=200) as answer:
            text = answer.read().decode()
        drawn = re.findall(r'jetrl_worker_generated_tokens_total\{worker="."\} (\d+)', text)
        assert len(drawn) == 2 and all(map(int, drawn)), text
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        assert len(children) >= 3  # two engines and the front
        program.kill()
        program.wait(60)
        end = time.monotonic() + 60
        for number in children:
            status = Path(f"/proc/{number}/status")
            while status.exists() and "State:\tZ" not in status.read_text():
                assert time.monotonic() < end, number
                time.sleep(0.05)


@pytest.mark.parametrize(("words", "text"), [
    (["--host", "0.0.0.0"], "a key is needed"), (["--api-key", "a b"], "one word"),
    (["--port", "TAKEN"], "choose another port"), (["--nproc", "0"], "--nproc"),
])
def test_what_is_refused_at_once(words: list[str], text: str) -> None:
    with listen("127.0.0.1", 0) as taken:
        given = [word.replace("TAKEN", str(taken.getsockname()[1])) for word in words]
        with started("no/such/model", *given) as program:
            _, errors = program.communicate(timeout=200)
    assert program.returncode == 2 and text in " ".join(errors.split()) and "Traceback" not in errors
