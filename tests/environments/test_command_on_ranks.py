"""`environment.name = "command"` on several ranks: each has its own address, and the run is that of one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiny import numbers, tiny_config, tiny_run, weights_hash

from jetrl.parallel import launch
from jetrl.parallel.world import World
from jetrl.report.recorder import read_samples
from jetrl.run.loop import run
from jetrl.run.stopping import StopRequest

pytest.importorskip("starlette", reason="needs the extra serve")
pytestmark = pytest.mark.timeout(300)

# Two turns, then a second reply to the first one, which is a branch. A program is no rank, whatever rank starts it.
AGENT = '''
import json, os, pathlib, sys, urllib.request
problem = json.load(sys.stdin)
base = os.environ["OPENAI_BASE_URL"]
assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"} & os.environ.keys()
with open(pathlib.Path(__file__).with_suffix(".urls"), "a") as urls:
    urls.write(base.partition("/sessions/")[0] + "\\n")

def said(text):
    return {"role": "user", "content": text}

def chat(messages):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    asked = urllib.request.Request(base + "/chat/completions", json.dumps({"messages": messages}).encode(), headers)
    with urllib.request.urlopen(asked, timeout=200) as answer:
        return json.load(answer)["choices"][0]["message"]

first = said(problem["prompt"])
one = chat([first])
answers = [one, chat([first, one, said("+1=")]), chat([first, one, said("+2=")])]
text = "".join(answer["content"] for answer in answers)
print(json.dumps({"reward": sum(c.isdigit() for c in text) / (1 + len(text))}))
'''


def rank_run(world: World, folder: Path, changes: dict[str, Any]) -> bool:
    """The run on the ranks of `world`; whether it came to its last step."""
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(world.rank)}
    with StopRequest(world) as stop:
        return run(tiny_config(folder / str(world.rank), changes), folder / "runs" / "tiny", ["test"], stop)


@pytest.mark.slow
def test_one_rank_and_two_are_the_same_run(tmp_path: Path) -> None:
    def changes(folder: Path) -> dict[str, Any]:
        folder.mkdir()
        (folder / "agent.py").write_text(AGENT)
        return {
            "environment.name": "command", "environment.timeout": 200, "task.reward": None, "eval.eval_interval": 0,
            "environment.params": {"command": [sys.executable, str(folder / "agent.py")]},
            "environment.max_turns": 4, "environment.max_turn_tokens": 6, "rollout.max_response_length": 48,
            "rollout.prompts_per_step": 2, "rollout.group_size": 2, "train.steps": 2, "train.reduction": "fixed",
            "train.max_tokens_per_gpu": 128, "checkpoint.save_interval": 1,
        }

    one = tiny_run(tmp_path / "one", changes(tmp_path / "alone"))
    assert run_ranks(rank_run, 2, tmp_path, changes(tmp_path / "both"), seconds=200.0) == [True, True]
    two = tmp_path / "runs" / "tiny"
    assert numbers(two) == numbers(one) and list(read_samples(two)) == list(read_samples(one))
    assert [weights_hash(two, step) for step in (1, 2)] == [weights_hash(one, step) for step in (1, 2)]
    rows = numbers(one)[-2:]
    assert [row["parity/logprob_abs_diff_max"] for row in rows] == [0.0, 0.0]
    assert [row["environment/num_errors"] for row in rows] == [0, 0] and any(row["reward/mean"] > 0 for row in rows)
    assert any("after" in turn for sample in read_samples(one) for turn in sample["turns"])
    urls = [(tmp_path / name / "agent.urls").read_text().split() for name in ("alone", "both")]
    assert len(urls[0]) == len(urls[1]) == 8 and [len(set(each)) for each in urls] == [1, 2]


def test_programs_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "1", "ROLE_RANK": "1", "MASTER_ADDR": "a", "TORCHELASTIC_RUN_ID": "x", launch.SPAWNED: "f"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANKING", "kept")
    found = launch.outside()
    assert not given.keys() & found.keys() and found["RANKING"] == "kept" and found["PATH"] == os.environ["PATH"]
