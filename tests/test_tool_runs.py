"""Whole runs in which the policy calls tools: parity over all turns, what samples show, the warm start, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import HERMES, saved
from tiny import numbers, tiny_run

from jetrl.config import load_config, resolve
from jetrl.report.recorder import read_samples
from jetrl.run.loop import StopRequest, run
from jetrl.run.sft import SolutionEncoder
from jetrl.run.tryout import prepare_trial, try_out
from jetrl.types import Problem, Trajectory

PARITY = "parity/logprob_abs_diff_max"
TOOLS = '''
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: A.
        b: B.
    """
    return a + b
'''


def tokens() -> list[str]:
    """Whole calls as tokens of their own, many of them, so that a random policy makes some: good and bad ones."""
    some = [("add", '{"a": 1, "b": 2}'), ("ad", "{}"), ("add", '{"a": "x"}'), ("add", "{")]
    more = [("add", f'{{"a": {i}, "b": 1}}') for i in range(60)]
    return [f'<tool_call>{{"name": "{name}", "arguments": {given}}}</tool_call>' for name, given in (*some, *more)]


REWARD = """
def right(completions, answer, **_):
    return [sum(m["content"] == "3" for m in talk if m["role"] == "tool") + len(talk[-1]["content"]) % 3
            for talk in completions]
"""


def changes(folder: Path, **more: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "my_tools.py").write_text(TOOLS)
    (folder / "right.py").write_text(REWARD)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "solution": tokens()[0]} for i in range(24)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model.tokenizer": saved(folder / "tokenizer", HERMES, tokens()),
        "model.arch.max_position_embeddings": 1024,
        "task.name": "file", "task.params": {"check_gold": False}, "task.train_file": str(folder / "sums.jsonl"),
        "task.reward": f"{folder}/right.py:right", "task.max_prompt_length": 512,
        "environment.name": "tools", "environment.tools": [f"{folder}/my_tools.py:add"],
        "environment.max_turns": 4, "environment.max_turn_tokens": 6,
        "rollout.max_response_length": 400, "rollout.prompts_per_step": 2, "eval.eval_interval": 0, "train.steps": 2,
    } | {key.replace("__", "."): value for key, value in more.items()}


def test_parity_is_zero_over_turns_with_tools(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, changes(tmp_path))
    rows = numbers(run_dir)
    assert [row[PARITY] for row in rows[1:]] == [0.0] * 2
    assert all(row["environment/turns_mean"] > 1.0 and row["environment/num_errors"] == 0 for row in rows[1:])
    samples = list(read_samples(run_dir))
    for row in rows[1:]:
        own = [s for s in samples if s["step"] == row["step"]]
        told = [line for s in own for t in s["turns"] if t["author"] == "environment" for line in t["text"].split("\n")]
        assert row["tools/calls_mean"] == pytest.approx(len(told) / len(own)) and len(own) == 8
        failed = sum(line.startswith("Error: ") for line in told)
        assert row["tools/frac_failed_calls"] == pytest.approx(failed / len(told))
    said = [t for s in samples for t in s["turns"] if t["author"] == "environment"]
    assert any(t["text"].isdigit() for t in said) and any(t["text"].startswith("Error: ") for t in said)


def test_a_tasks_own_reward_scores_the_last_turn(tmp_path: Path) -> None:
    own = {"task.name": "addition", "task.params": {}, "task.train_file": None, "task.reward": None}
    rows = numbers(tiny_run(tmp_path, {k: v for k, v in (changes(tmp_path) | own).items() if k != "task.train_file"}))
    assert [row[PARITY] for row in rows[1:]] == [0.0] * 2 and all("reward/mean" in row for row in rows[1:])


def test_the_warm_start_teaches_calls_with_the_schemas_in_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, true = [], SolutionEncoder.trajectory

    def solved(self: SolutionEncoder, problem: Problem) -> Trajectory:
        made = true(self, problem)
        prompts.append(self.turns.tokenizer.decode(made.segments[0].tokens.tolist()))
        return made

    monkeypatch.setattr(SolutionEncoder, "trajectory", solved)
    sft = {"sft__steps": 20, "sft__batch_size": 4, "sft__lr": 1e-2, "sft__cache_dir": str(tmp_path / "cache")}
    run_dir = tiny_run(tmp_path, changes(tmp_path, train__steps=1, **sft))
    turns = [t for s in read_samples(run_dir) for t in s["turns"]]
    told = [t["text"] for t in turns if t["author"] == "environment"]
    assert told.count("3") > 4, "the call of the solutions, and its result"
    assert prompts and all('"name": "add"' in prompt for prompt in prompts)


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It talks as it says, every solution is a call that works, and a step of it keeps parity."""
    monkeypatch.chdir(Path(__file__).parents[1])
    lines: list[str] = []
    turns = [f'<tool_call>{{"name": "keep", "arguments": {{"note": "{note}"}}}}</tool_call>' for note in "ab"]
    trial = prepare_trial("examples/tools.toml")
    assert try_out(trial, iter([*turns, f"It is {trial.prompt.problem.answer}"]), lines.append) == 0
    told = "\n".join(lines)
    assert "tool keep: 1\n" in told and "tool keep: 2\n" in told and "reward: 1.1 by" in told
    rows = [json.loads(line) for line in Path("examples/tools.jsonl").read_text().splitlines()]
    kit = trial.pool.factory.params["kit"]
    for row in rows[:10]:
        (message,), _, done = trial.pool.factory.kind(kit).step(row["solution"])
        assert message["content"] == row["answer"] and not done
    config = load_config("examples/tools.toml", [
        "sft.steps=0", "train.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "eval.eval_interval=0",
        f"output_dir={tmp_path}", "num_threads=1", "device=cpu", "environment.max_turn_tokens=10",
    ])
    before = torch.get_num_threads()
    try:
        assert run(resolve(config, cuda_available=False), tmp_path / config.name, ["test"], StopRequest())
    finally:
        torch.set_num_threads(before)
    last = numbers(tmp_path / config.name)[-1]
    assert last[PARITY] == 0.0 and last["tools/calls_mean"] == 0.0 and "tools/frac_failed_calls" not in last
