"""Unmodified clients of OpenAI's API, each a program of `clients/` in a process of its own, against `jetrl serve`.

The policy says what the script says (`scripted_model.py`): first it calls a tool, then it answers. What each client
makes of it is its own business; what the server has recorded must be the learner's, token for token and bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib import request

import numpy as np
import pytest
from scripted_model import Piece, scripted_model
from serving import Served, served

pytest.importorskip("starlette", reason="needs the extra serve")
pytestmark = pytest.mark.timeout(240)
HERE = Path(__file__).parent / "clients"
# "Let me" is one token, and the policy draws two: what it said does not encode to what it drew.
BEGINS: list[Piece] = [("Let", "I let"), " me"]
CALL: list[Piece] = [
    *BEGINS, " see. ", "<tool_call>\n", '{"name": "add", "arguments": {"a": 20', ', "b": 22}}', "\n</tool_call>",
]
ANSWER: list[Piece] = [("So", "Then"), " the", " answer", " is 42", "."]
FINAL: list[Piece] = ["<tool_call>", '{"name": "final_answer", ', '"arguments": {"answer": "42"}}', "</tool_call>"]
WRITE: list[Piece] = [
    *BEGINS, " write.", "<tool_call>", '{"name": "bash", ', '"arguments": {"command": "echo 42 > answer"}}',
    "</tool_call>",
]
SUBMIT: list[Piece] = [
    ("Done.", "Now I am done."), " <tool_call>\n",
    '{"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}', "\n</tool_call>",
]
SAID = {"So the answer is 42.", "Then the answer is 42."}


def needs(package: str) -> None:
    """Skip where a client is not installed; nothing of it is imported here."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not here: install the extra clients")


def run(name: str, url: str, folder: Path, path: str = "") -> dict[str, Any]:
    """What a client's program prints last. It finds the server as any program does, and nothing of this project."""
    env = os.environ | {
        "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "OPENAI_MODEL": "tiny", "HOME": str(folder),
        "PYTHONPATH": path, "OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_SILENT_STARTUP": "1", "NO_COLOR": "1",
    }
    done = subprocess.run(
        [sys.executable, "-P", HERE / f"{name}.py"], env=env, cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def recorded(server: Served, session: str) -> list[dict[str, Any]]:
    """The rows of a session. Each drawn token's log-prob is the learner's: 0 bits differ."""
    with request.urlopen(f"{server.url}/sessions/{session}/traces", timeout=100) as answer:
        rows = json.load(answer)["rows"]
    for row in rows:
        tokens = [token for segment in row["segments"] for token in segment["tokens"]]
        learner, at = server.policy.logprobs(tokens).numpy(), 0
        for segment in row["segments"]:
            end = at + len(segment["tokens"])
            if segment["author"] == "policy":
                assert np.array(segment["logprobs"]).astype(np.float32).tobytes() == learner[at - 1 : end - 1].tobytes()
            at = end
    return rows


def drawn(server: Served, row: dict[str, Any]) -> list[str]:
    """The texts of the policy's segments."""
    return [server.about.tokenizer.decode(s["tokens"]) for s in row["segments"] if s["author"] == "policy"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = scripted_model(tmp_path_factory.mktemp("script") / "tiny", [CALL, ANSWER], ["Let me", "I let me"])
    with served(folder) as running:
        yield running


def check_adder(server: Served, session: str, conversations: int = 1) -> None:
    """Conversations of two turns, in one row each: nothing was encoded again, nothing forked."""
    rows = recorded(server, session)
    assert len(rows) == conversations
    tokenizer = server.about.tokenizer
    for row in rows:
        first, second = (s["tokens"] for s in row["segments"] if s["author"] == "policy")
        assert tokenizer.encode(tokenizer.decode(first)) != first  # a server that encodes it again would train others
        assert tokenizer.decode(second).removesuffix("<|im_end|>") in SAID
        assert all(s["trained"] == (s["author"] == "policy") for s in row["segments"])


def openai_2() -> str:
    """A folder with openai 2.x beside the environment's own (the Makefile makes it), or ""."""
    found = Path(sys.prefix) / "openai2"
    return str(found) if (found / "openai").is_dir() else ""


@pytest.mark.parametrize("major", [2, 3])
def test_openai(server: Served, tmp_path: Path, major: int) -> None:
    from importlib.metadata import version

    needs("openai")
    installed = version("openai").startswith(f"{major}.")
    path = openai_2() if major == 2 and not installed else ""
    if not (installed or path):
        pytest.skip(f"openai {major}.x is not here: make .venv/.installed-dev")
    found = run("with_openai", f"{server.url}/sessions/openai{major}/v1", tmp_path, path)
    assert found["version"].startswith(f"{major}.")
    assert found["said"] in SAID and found["called"] == ['{"a": 20, "b": 22}'] and found["drawn"] == 6
    assert found["streamed"] in [[text, found["called"]] for text in ("Let me see. ", "I let me see. ")]
    rows = recorded(server, f"openai{major}")
    assert [len(drawn(server, row)) for row in rows] == [2, 1]  # the conversation, and the streamed beginning


@pytest.mark.parametrize("package, program, conversations", [
    ("litellm", "with_litellm", 1), ("agents", "with_openai_agents", 2), ("inspect_ai", "with_inspect_ai", 1),
])
def test_agents_that_add(server: Served, tmp_path: Path, package: str, program: str, conversations: int) -> None:
    needs(package)
    found = run(program, f"{server.url}/sessions/{program}/v1", tmp_path)
    assert {found["said"], found.get("again", found["said"])} <= SAID and found.get("score", 1) == 1
    assert len(found["called"]) == conversations
    check_adder(server, program, conversations)


def test_smolagents(tmp_path: Path) -> None:
    needs("smolagents")
    with served(scripted_model(tmp_path / "tiny", [CALL, FINAL], ["Let me"])) as server:
        found = run("with_smolagents", f"{server.url}/sessions/a/v1", tmp_path)
        assert found["said"] == "42" and found["called"] == [[20, 22]]
        assert sum(len(drawn(server, row)) for row in recorded(server, "a")) == 2


def test_mini_swe_agent(tmp_path: Path) -> None:
    needs("minisweagent")
    with served(scripted_model(tmp_path / "tiny", [WRITE, SUBMIT], ["Let me"])) as server:
        found = run("with_mini_swe_agent", f"{server.url}/sessions/a/v1", tmp_path)
        assert found["said"] == "Submitted" and found["called"] == ["42"]
        (row,) = recorded(server, "a")
        assert len(drawn(server, row)) == 2
