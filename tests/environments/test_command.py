"""`environment.name = "command"`: programs that talk to the policy over HTTP, and all that they can do wrong."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_config, tiny_run

from jetrl import UserError
from jetrl.environments import command
from jetrl.environments.command import Command, ProgramFailed, words_of
from jetrl.report.recorder import read_metrics
from jetrl.serve import gateway
from jetrl.trust import code_of

pytest.importorskip("starlette", reason="needs the extra serve")
pytestmark = pytest.mark.timeout(400)

PROGRAM = '''
import json, os, sys, time, urllib.request, urllib.error
problem = json.load(sys.stdin)
base = os.environ["OPENAI_BASE_URL"]

def call(path, body, key=os.environ["OPENAI_API_KEY"], url=base):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    asked = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

def chat(messages, **more):
    return call("/chat/completions", {"model": os.environ["OPENAI_MODEL"], "messages": messages, **more})

def said(text):
    return {"role": "user", "content": text}

def reward(value):
    return call("/reward", {"reward": value}, url=base.removesuffix("/v1"))
'''
# Two turns; the reward is the share of digits in both.
AGENT = PROGRAM + '''
messages = [said(problem["prompt"])]
for turn in range(2):
    status, answer = chat(messages)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    messages += [message, said("+1=")]
    if os.environ.get("SOME_FAIL") and len(message["content"]) % 3 == 0:
        sys.exit("no luck")
text = "".join(m["content"] for m in messages if m["role"] == "assistant")
print("done")
print(json.dumps({"reward": sum(c.isdigit() for c in text) / (1 + len(text))}))
'''


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Any]:
    """Starts a program and gives its environment and first messages."""
    open_ones = []

    def start(code: str, **params: Any) -> tuple[Command, Any]:
        path = tmp_path / f"agent{len(open_ones)}.py"
        path.write_text(PROGRAM + code)
        environment = Command([sys.executable, str(path)], **params)
        open_ones.append(environment)
        return environment, environment.reset({"prompt": "1+1=", "answer": "2", "id": "p", "seed": 3})

    yield start
    for environment in open_ones:
        environment.close()


def test_a_conversation_goes_on_with_what_is_new(talk: Any) -> None:
    environment, messages = talk('''
history = [{"role": "system", "content": "s"}, said(problem["prompt"])]
status, answer = chat(history)
again = chat(history)[1]
history += [answer["choices"][0]["message"], said("b"), {"role": "tool", "content": "c", "tool_call_id": "x"}]
second = chat(history)[1]["choices"][0]["message"]["content"]
print(json.dumps([status, again == answer, second]), file=sys.stderr)
print("something")
print(json.dumps({"reward": 0.25}))
''')
    assert messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}]
    assert environment.step("one") == (
        [{"role": "user", "content": "b"}, {"role": "tool", "content": "c", "tool_call_id": "x"}], None, False
    )
    assert environment.step(" two\n") == ([], 0.25, True)
    environment.errors.seek(0)
    assert json.loads(environment.errors.read()) == [200, True, " two\n"]


def test_rewards(talk: Any) -> None:
    posted, _ = talk('''
chat([said("a")])
wrong = [reward(value)[0] for value in ("1", None)]
assert wrong == [400, 400] and reward(0)[0] == 200 and reward(1)[0] == 409
''')
    assert posted.step("x") == ([], 0.0, True)
    none, _ = talk('chat([said("a")])\nprint("no reward")')
    assert none.step("x") == ([], None, True)
    seen = []

    def score(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        seen.append((completions, answer, columns["seed"]))
        return [0.75]

    task, _ = talk('chat([said("a")])', reward=score)
    assert task.step("x") == ([], 0.75, True) and seen == [(["x"], ["2"], [3])]


REFUSED = {
    "another history": ('chat([said("a")])\nprint(json.dumps(chat([said("b"), said("c")])))', 400, "begin with"),
    "nothing new": (
        'a = chat([said("a")])[1]["choices"][0]["message"]\nprint(json.dumps(chat([said("a"), a])))', 400,
        "begin with"),
    "sampling": (
        'print(json.dumps(chat([said("a")], temperature=0.5)))\nchat([said("a")])', 400, "the recipe says how"),
    "two answers": ('print(json.dumps(chat([said("a")], n=2)))\nchat([said("a")])', 400, "n is 1"),
    "no messages": ('print(json.dumps(chat([])))\nchat([said("a")])', 400, "at least one"),
    "a wrong key": (
        'print(json.dumps(call("/chat/completions", {"messages": [said("a")]}, key="x")))\nchat([said("a")])', 401,
        "not its own"),
    "another session": (
        'print(json.dumps(call("/chat/completions", {}, url=base.replace("sessions/", "sessions/x"))))\n'
        'chat([said("a")])', 401, "no such session"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_conversation_cannot_be(talk: Any, what: str) -> None:
    code, status, text = REFUSED[what]
    environment, _ = talk(code)
    assert environment.step("x")[2]
    environment.output.seek(0)
    found, body = json.loads(environment.output.read())
    assert found == status and text in body["error"]["message"]


@pytest.mark.parametrize(("code", "params", "text"), [
    ("sys.exit('it broke')", {}, "ended with status 1: it broke"),
    ("", {}, "without asking the policy"),
    ("time.sleep(300)", {"time_limit": 1.0}, "longer than time_limit = 1 seconds"),
    ("os.kill(os.getpid(), 9)", {}, "ended with status -9"),
])
def test_programs_that_fail(talk: Any, code: str, params: dict[str, Any], text: str) -> None:
    with pytest.raises(ProgramFailed, match=text):
        talk(code, **params)


def test_what_a_program_has_started_ends_with_the_conversation(talk: Any, tmp_path: Path) -> None:
    child = tmp_path / "child"
    environment, _ = talk(f'''
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open({str(child)!r}, "w").write(str(child.pid))
print(chat([said("a")]))
''')
    environment.close()
    number = int(child.read_text())
    end = time.monotonic() + 60
    while Path(f"/proc/{number}").exists() and "State:\tZ" not in Path(f"/proc/{number}/status").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert environment.process is not None and environment.process.returncode == -9


def test_bad_parameters() -> None:
    for wrong in ("", [], 3, "a 'b", [""], ["a", 1]):
        with pytest.raises(UserError, match="environment.params.command"):
            words_of(wrong)
    assert words_of("python 'my agent.py'") == ["python", "my agent.py"]
    for limit in (0, -1, "5", True):
        with pytest.raises(UserError, match="time_limit"):
            Command("x", time_limit=limit)
    with pytest.raises(UserError, match="cannot be started"):
        Command("/nowhere/agent").reset({"prompt": "a"})


def test_a_program_is_code_that_a_run_folder_names(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, {"environment.name": "command", "environment.params": {"command": "rm -r x"}})
    assert ("environment.params.command", "rm -r x") in [(one.key, one.name) for one in code_of(config)]


@pytest.mark.parametrize("fail", [False, True])
def test_a_run_trains_through_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: bool) -> None:
    """Parity 0 over all turns; conversations that fail are counted apart, and the others are trained."""
    if fail:
        monkeypatch.setenv("SOME_FAIL", "1")
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    changes = {
        "environment.name": "command", "environment.params": {"command": [sys.executable, str(agent)]},
        "task.reward": None, "train.steps": 2, "eval.eval_interval": 0, "rollout.prompts_per_step": 2,
        "rollout.group_size": 4, "rollout.max_response_length": 40, "environment.max_turn_tokens": 10,
        "environment.timeout": 300,
    }
    rows = read_metrics(tiny_run(tmp_path, changes))[-2:]
    assert [row["parity/logprob_abs_diff_max"] for row in rows] == [0.0, 0.0]
    assert all(row["environment/turns_mean"] == 2.0 and row["environment/tokens_mean"] == 3.0 for row in rows)
    errors = [row["environment/num_errors"] for row in rows]
    assert 0 < sum(errors) < 16 if fail else errors == [0, 0]
    assert any(row["reward/mean"] > 0 for row in rows)


def test_the_http_process_is_found_again_after_it_died(talk: Any) -> None:
    first, _ = talk('chat([said("a")])')
    process = command._GATEWAY._process
    assert process is not None and first.step("x")[2]
    os.kill(process.pid, 9)
    process.wait(60)
    second, _ = talk('chat([said("a")])')
    assert second.step("x")[2] and command._GATEWAY._process is not process
    assert gateway.MODEL == "policy"
