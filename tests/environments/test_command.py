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
from byte_tokenizer import HERMES, saved
from tiny import tiny_config, tiny_run

from jetrl import UserError
from jetrl.environments import spoken
from jetrl.environments.asked import Said
from jetrl.environments.command import WORKERS, Command, words_of
from jetrl.environments.worker import ConversationFailed, Worker, Workers, give_up
from jetrl.report.recorder import read_metrics, read_samples
from jetrl.run.replay.checks import replay
from jetrl.serve import gateway
from jetrl.trust import code_of
from jetrl.types import Completion, log_probs, token_ids

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


def says(text: str) -> Said:
    return Said((1, 2), Completion(1, token_ids([3]), log_probs([-0.5]), text, "stop", 0, "flow"))


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
    assert environment.step(says("one")) == (
        [{"role": "user", "content": "b"}, {"role": "tool", "content": "c", "tool_call_id": "x"}], None, False
    )
    assert environment.step(says(" two\n")) == ([], 0.25, True)
    environment.errors.seek(0)
    assert json.loads(environment.errors.read()) == [200, True, " two\n"]


def test_rewards(talk: Any) -> None:
    posted, _ = talk('''
chat([said("a")])
wrong = [reward(value)[0] for value in ("1", None)]
assert wrong == [400, 400] and reward(0)[0] == 200 and reward(1)[0] == 409
''')
    assert posted.step(says("x")) == ([], 0.0, True)
    none, _ = talk('chat([said("a")])\nprint("no reward")')
    assert none.step(says("x")) == ([], None, True)
    seen = []

    def score(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        seen.append((completions, answer, columns["seed"]))
        return [0.75]

    task, _ = talk('chat([said("a")])', reward=score)
    assert task.step(says("x")) == ([], 0.75, True) and seen == [(["x"], ["2"], [3])]


REFUSED = {
    "another history": (
        'chat([said("a")])\nprint(json.dumps(chat([said("b"), said("c")])))', 400, "begin with"),
    "nothing new": (
        'a = chat([said("a")])[1]["choices"][0]["message"]\nprint(json.dumps(chat([said("a"), a])))', 400,
        "send what follows it"),
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
    environment, _ = talk(code, forks=False)
    assert environment.step(says("x"))[2]
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
    with pytest.raises(ConversationFailed, match=text):
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
    for name, wrong in (("forks", 1), ("lasting", "yes"), ("ignore", "temperature"), ("ignore", [1])):
        with pytest.raises(UserError, match=f"environment.params.{name}"):
            Command("x", **{name: wrong})
    for limit in (0, -1, "5", True):
        with pytest.raises(UserError, match="time_limit"):
            Command("x", time_limit=limit)
    for program in ("/nowhere/agent", "no_such_agent --fast", "/tmp"):
        with pytest.raises(UserError, match="cannot be started: there is no such program"):
            Command(program)


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


LASTING = """
import json, sys, threading, urllib.request

def play(asked):
    problem, messages, text = asked["problem"], [{"role": "user", "content": asked["problem"]["prompt"]}], ""
    for turn in range(2):
        headers = {"Content-Type": "application/json", "Authorization": "Bearer " + asked["key"]}
        body = json.dumps({"model": asked["model"], "messages": messages}).encode()
        made = urllib.request.Request(asked["url"] + "/chat/completions", body, headers)
        message = json.load(urllib.request.urlopen(made, timeout=300))["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "+1="}]
        text += message["content"]
        if "die" in text:
            sys.stdout.flush(), sys.stderr.write("it broke"), sys.stderr.flush(), __import__("os")._exit(3)
    return {"error": "no luck"} if problem["seed"] == 13 else {"reward": text.count("1") / (1 + len(text))}

def tell(line):
    sys.stdout.write(line + "\\n"), sys.stdout.flush()    # in one piece: `print` writes the end of a line apart

def one(asked):
    tell("some words")
    tell(json.dumps({"episode": asked["episode"], **play(asked)}))

for line in sys.stdin:
    asked = json.loads(line)
    if "cancel" not in asked:
        threading.Thread(target=one, args=(asked,)).start()
"""


@pytest.fixture
def lasting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Begins a conversation with a program that has many."""
    monkeypatch.setattr(spoken, "_TOLD", 300.0)  # its end is told, and not looked for
    path, made = tmp_path / "lasting.py", list[Command]()
    path.write_text(LASTING)

    def begin(seed: int = 1, **params: Any) -> Command:
        made.append(Command([sys.executable, str(path)], lasting=True, **params))
        made[-1].reset({"prompt": "1+1=", "answer": "2", "id": "p", "seed": seed})
        return made[-1]

    yield begin
    for one in made:
        one.close()
    WORKERS.stop()


# It answers what it hears, and ends with its input.
ECHO = """
import json, sys
for line in sys.stdin:
    said = json.loads(line)
    id = said.get("episode") or "cancelled " + said["cancel"]
    print(json.dumps({"episode": id, "reward": float("episode" in said)}), flush=True)
"""


def answer_of(worker: Worker, id: str) -> dict[str, Any]:
    end = time.monotonic() + 60
    while id not in worker.results and time.monotonic() < end:
        time.sleep(0.01)
    return worker.results[id]


def test_one_program_has_many_conversations(lasting: Any) -> None:
    start = time.monotonic()
    one, two, bad = lasting(), lasting(), lasting(seed=13)
    assert one.worker is two.worker is bad.worker and one.process is None
    assert not two.step(says("11"))[2] and not one.step(says("x"))[2] and not bad.step(says("x"))[2]
    assert two.step(says("1")) == ([], 0.75, True) and one.step(says("x")) == ([], 0.0, True)
    with pytest.raises(ConversationFailed, match="no luck"):
        bad.step(says("x"))
    late = lasting()
    assert late.worker is one.worker and not late.step(says("a"))[2]
    dead = lasting()
    with pytest.raises(ConversationFailed, match="has ended before the conversation: it broke"):
        dead.step(says("die"))
    with pytest.raises(ConversationFailed, match="it broke"):
        late.step(says("b"))
    again = lasting()
    assert again.worker is not one.worker and not again.step(says("a"))[2]
    with pytest.raises(UserError, match="cannot be started"):
        Workers().take("a", ["/nowhere/agent"])
    assert time.monotonic() - start < 200


def test_a_retired_program_has_all_conversations_that_it_was_given() -> None:
    """Also those that begin only after another process has taken its place, and it hears of a cancel."""
    few, echo = Workers(most=2), [sys.executable, "-c", ECHO]
    first, same, second = (few.take(id, echo) for id in "abc")
    assert first is same is not second and first.alive
    first.send({"episode": "a"})
    give_up(first, "b")  # it never began
    assert answer_of(first, "a") == {"episode": "a", "reward": 1.0} and first.alive
    first.send({"cancel": "a"})
    assert answer_of(first, "cancelled a")["reward"] == 0.0
    give_up(first, "a")
    give_up(first, "a")
    first._process.wait(30)
    assert first._process.returncode == 0 and second.alive
    few.stop()
    assert not second.alive


def test_a_run_trains_through_a_lasting_program(tmp_path: Path) -> None:
    agent = tmp_path / "lasting.py"
    agent.write_text(LASTING)
    rows = read_metrics(tiny_run(tmp_path, {
        "environment.name": "command", "task.reward": None, "train.steps": 2, "eval.eval_interval": 0,
        "environment.params": {"command": [sys.executable, str(agent)], "lasting": True},
        "rollout.prompts_per_step": 2, "rollout.group_size": 4, "rollout.max_response_length": 40,
        "environment.max_turn_tokens": 10, "environment.timeout": 300,
    }))[-2:]
    WORKERS.stop()
    assert [row["parity/logprob_abs_diff_max"] for row in rows] == [0.0, 0.0]
    failed = [row["environment/num_errors"] + row["environment/num_timeouts"] for row in rows]
    assert all(row["environment/turns_mean"] == 2.0 for row in rows) and failed == [0, 0]
    assert rows[0]["time/rollout"] < 200  # nobody waited for an end that was not told


FORKS = PROGRAM + """
first, other = said(problem["prompt"]), said("1+2=")
one = streamed([first])
two = chat([first, one, said("+1=")])[1]["choices"][0]["message"]
again = chat([first, one, said("+2=")])[1]["choices"][0]["message"]    # another reply to the first turn
anew = chat([other, said(two["content"][:2] + "=")])[1]["choices"][0]["message"]    # a history of its own
last = chat([first, one, said("+1="), two, said("+3=")])[1]["choices"][0]["message"]    # the first one goes on
assert chat([first])[1]["choices"][0]["message"]["content"] == one["content"]
text = "".join(m["content"] for m in (one, two, again, anew, last))
print(json.dumps({"reward": sum(c.isdigit() for c in text) / (1 + len(text))}))
"""


STREAMED = """
def streamed(messages):
    body = {"messages": messages, "stream": True, "temperature": 0.3, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    asked = urllib.request.Request(base + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=300) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in answer.read().decode().split("\\n\\n") if line]
    assert events.pop() == "[DONE]"
    events = [json.loads(event) for event in events]
    assert events.pop()["usage"]["completion_tokens"] > 0
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    return {"role": "assistant", "content": text}
"""


def test_a_changed_history_trains_each_drawn_token_once(tmp_path: Path) -> None:
    """Branches behind a turn and from an own prompt, in a run: parity 0 over all rows, and the replay of log-probs, of
    draws and of the update differs in nothing."""
    agent = tmp_path / "agent.py"
    agent.write_text(FORKS.replace("first, other", STREAMED + "first, other"))
    params = {"command": [sys.executable, str(agent)], "ignore": ["temperature"]}
    changes = {
        "environment.name": "command", "environment.params": params, "environment.max_turns": 6,
        "task.reward": None, "train.steps": 2, "eval.eval_interval": 0, "rollout.prompts_per_step": 2,
        "rollout.group_size": 2, "rollout.max_response_length": 60, "environment.max_turn_tokens": 4,
        "environment.timeout": 300, "checkpoint.replay_steps": 2, "model.arch.max_position_embeddings": 128,
    }
    run_dir = tiny_run(tmp_path, changes)
    rows = read_metrics(run_dir)[-2:]
    assert [row["parity/logprob_abs_diff_max"] for row in rows] == [0.0, 0.0]
    assert [row["environment/num_errors"] for row in rows] == [0, 0]
    samples = list(read_samples(run_dir))
    whole = [one for one in samples if one["finish_reason"] == "stop"]
    assert whole and all([turn.get("after") for turn in one["turns"] if "after" in turn] == [0, -1] for one in whole)
    for one in whole:
        texts = [turn["text"] for turn in one["turns"]]
        assert [texts[i] for i in (1, 3, 5)] == ["+1=", "+3=", "+2="] and texts[7][:4] == "1+2="
        assert len(one["turns"]) == 9 and sum(len(t.get("tokens", ())) for t in one["turns"]) == len(one["tokens"])
    for what in ("logprobs", "rollout", "update"):
        found = replay(run_dir, 2, what)
        assert found.same and found.checked, (what, found)
    drawn = sum(len(one["tokens"]) for one in samples if one["step"] == 2)
    assert replay(run_dir, 2, "logprobs").checked == drawn


def test_tools_are_shown_called_and_answered(tmp_path: Path) -> None:
    """In a run with a chat template: the schemas are in the prompt, calls come as such, and parity is 0."""
    agent = tmp_path / "agent.py"
    agent.write_text(PROGRAM + """
tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}}}}]
messages = [said(problem["prompt"])]
made = 0
for turn in range(3):
    status, answer = chat(messages, tools=tools, tool_choice="auto")
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    messages.append(message)
    calls = message.get("tool_calls", [])
    assert (answer["choices"][0]["finish_reason"] == "tool_calls") == bool(calls)
    made += len(calls)
    messages += [{"role": "tool", "tool_call_id": c["id"], "content": c["function"]["arguments"]} for c in calls]
    if not calls:
        messages.append(said("Go on."))
print(json.dumps({"reward": made}))
""")
    names = [f'<tool_call>{{"name": "add", "arguments": {{"a": {i}}}}}</tool_call>' for i in range(64)]
    params = {"command": [sys.executable, str(agent)]}
    run_dir = tiny_run(tmp_path, {
        "model.tokenizer": saved(tmp_path / "tokenizer", HERMES, names), "model.arch.max_position_embeddings": 1024,
        "environment.name": "command", "environment.params": params, "environment.max_turns": 4,
        "environment.max_turn_tokens": 6, "environment.timeout": 300, "task.reward": None,
        "task.max_prompt_length": 512, "train.steps": 2, "eval.eval_interval": 0, "rollout.prompts_per_step": 2,
        "rollout.group_size": 4, "rollout.max_response_length": 400,
    })
    rows = read_metrics(run_dir)[-2:]
    assert [row["parity/logprob_abs_diff_max"] for row in rows] == [0.0, 0.0]
    assert [row["environment/num_errors"] for row in rows] == [0, 0] and rows[-1]["environment/turns_mean"] == 3.0
    samples = list(read_samples(run_dir))
    assert all('"description": "Adds."' in one["prompt_rendered"] for one in samples if "prompt_rendered" in one)
    told = [role for one in samples for turn in one["turns"] for role, _ in turn.get("roles", ())]
    assert "tool" in told and any(row["reward/mean"] > 0 for row in rows)


def test_the_http_process_is_found_again_after_it_died(talk: Any) -> None:
    first, _ = talk('chat([said("a")])')
    process = spoken.GATEWAY._process
    assert process is not None and first.step(says("x"))[2]
    os.kill(process.pid, 9)
    process.wait(60)
    second, _ = talk('chat([said("a")])')
    assert second.step(says("x"))[2] and spoken.GATEWAY._process is not process
    assert gateway.MODEL == "policy"
