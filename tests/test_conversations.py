"""Whole runs with an environment: parity over all turns, failures counted apart, limits, resume, a user's own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import numbers, tiny_config, tiny_run, weights_hash

from jetrl.config import parse_config
from jetrl.errors import UserError
from jetrl.report.recorder import read_samples

PARITY = "parity/logprob_abs_diff_max"
# Digits in the policy's turn are worth something; the reply depends on them and on the problem's seed.
ENVIRONMENT = """\
import random
import time


class Count:
    def __init__(self, last=3, fail="", delay=False):
        self.last, self.fail, self.delay, self.turns = last, fail, delay, 0

    def reset(self, problem):
        self.random = random.Random(problem["seed"])
        if self.fail == "all":
            raise RuntimeError("the server is down")
        self.problem = problem
        return f"{self.random.randint(10, 99)}+{problem['index']}="

    def step(self, action):
        self.turns += 1
        if self.delay:
            time.sleep(self.random.random() / 50)
        if self.fail == "some" and self.problem["seed"] % 2:
            raise ValueError("no such move")
        if self.fail == "hang" and self.problem["seed"] % 3 == 0:
            time.sleep(30)
        if self.fail == "type":
            return "only a text"
        digits = sum(c.isdigit() for c in action)
        return f"({digits % 7}|", digits / 10, self.turns >= self.last
"""


def changes(folder: Path, params: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "count.py").write_text(ENVIRONMENT)
    return {
        "task.name": "environment", "task.params": {}, "task.reward": None,
        "environment.name": f"{folder}/count.py:Count", "environment.params": params or {},
        "environment.max_turn_tokens": 4, "environment.max_turns": 5, "rollout.max_response_length": 30,
    } | {key.replace("__", "."): value for key, value in more.items()}


@pytest.mark.parametrize(
    "more",
    [{"precision": "fp8"}, {"precision": "bf16"}, {"quant__kv_cache": "fp8", "rollout__page_size": 3},
     {"rollout__kv_cache_tokens": 96, "rollout__page_size": 3, "rollout__max_tokens_per_step": 5},
     {"rl__algo": "ppo", "rl__critic_lr": 1e-3, "train__share_prompts": True}, {"rl__algo": "reinforce_pp"}],
    ids=str,
)
def test_parity_is_zero_over_all_turns(tmp_path: Path, more: dict[str, Any]) -> None:
    run_dir = tiny_run(tmp_path, changes(tmp_path, **more))
    rows = numbers(run_dir)
    assert [row[PARITY] for row in rows[1:]] == [0.0] * 4
    assert all(row["environment/turns_mean"] == 3.0 and row["environment/num_errors"] == 0 for row in rows[1:])
    for sample in read_samples(run_dir):
        policy = [t for t in sample["turns"] if t["author"] == "policy"]
        assert len(policy) == 3 and sum(len(t["tokens"]) for t in policy) == len(sample["logprobs"])
        assert sample["reward"] == pytest.approx(sum(t.get("reward", 0.0) for t in policy))


def test_what_runs_when_does_not_matter(tmp_path: Path) -> None:
    """Environments with random delays, one sequence at a time or all, chunks and tiny caches: the same samples."""
    expected = list(read_samples(tiny_run(tmp_path / "a", changes(tmp_path, train__steps=1))))
    assert len(expected) == 16
    for number, more in enumerate((
        {"environment__params": {"delay": True}}, {"rollout__max_num_seqs": 1}, {"environment__max_concurrent": 1},
        {"rollout__kv_cache_tokens": 96, "rollout__page_size": 3, "rollout__max_tokens_per_step": 7},
    )):
        run_dir = tiny_run(tmp_path / str(number), changes(tmp_path, train__steps=1, **more))
        assert list(read_samples(run_dir)) == expected, more


def test_limits_of_turns_and_length(tmp_path: Path) -> None:
    endless = {"last": 99}
    rows = numbers(tiny_run(tmp_path / "a", changes(tmp_path, endless, environment__max_turns=2)))
    assert all(row["environment/frac_max_turns"] == 1.0 == row["response_length/frac_truncated"] for row in rows[1:])
    run_dir = tiny_run(tmp_path / "b", changes(tmp_path, endless, environment__at_limit="zero", train__steps=1))
    samples = list(read_samples(run_dir))
    assert {s["finish_reason"] for s in samples} <= {"length", "turns"} and {s["reward"] for s in samples} == {0.0}
    kept = list(read_samples(tiny_run(tmp_path / "c", changes(tmp_path, endless, train__steps=1))))
    assert any(s["reward"] > 0 for s in kept) and [s["tokens"] for s in kept] == [s["tokens"] for s in samples]


@pytest.mark.parametrize(("fail", "key"), [("some", "num_errors"), ("hang", "num_timeouts")])
def test_failures_are_counted_apart_from_zero_rewards(tmp_path: Path, fail: str, key: str) -> None:
    run_dir = tiny_run(tmp_path, changes(tmp_path, {"fail": fail}, environment__timeout=1.0, train__steps=2))
    rows = numbers(run_dir)
    assert [row[PARITY] for row in rows[1:] if PARITY in row] == [0.0] * 2
    assert all(0 < row[f"environment/{key}"] < 16 for row in rows[1:])
    failed = [s for s in read_samples(run_dir) if s["reward"] is None]
    assert len(failed) == sum(row[f"environment/{key}"] for row in rows[1:])
    assert all(("no such move" if fail == "some" else "environment.timeout") in s["error"] for s in failed)


@pytest.mark.parametrize(
    ("fail", "message"),
    [("all", r"Count\.reset raised RuntimeError: the server is down"), ("type", r"must return three values")],
)
def test_an_environment_that_always_fails_stops_the_run(tmp_path: Path, fail: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"all 16 conversations failed in the environment.*{message}"):
        tiny_run(tmp_path, changes(tmp_path, {"fail": fail}, eval__eval_interval=0))
    saved = tmp_path / "runs" / "tiny" / "checkpoints" / "step_000000"
    assert (saved / "state.json").is_file(), "nothing is lost: what came before the step is saved"


def test_a_stopped_run_resumes_to_the_bit(tmp_path: Path) -> None:
    straight = tiny_run(tmp_path / "a", changes(tmp_path))
    half = changes(tmp_path, train__steps=2)
    tiny_run(tmp_path / "b", half)
    resumed = tiny_run(tmp_path / "b", changes(tmp_path, checkpoint__resume="auto"))
    assert numbers(resumed) == numbers(straight) and weights_hash(resumed, 4) == weights_hash(straight, 4)


def test_the_calculator_and_retry_on_the_addition_task(tmp_path: Path) -> None:
    common = {"task.reward": None, "rollout.max_response_length": 30, "train.steps": 2}
    tools = {"environment.name": "calculator", "environment.at_limit": "zero", "rollout.stop": [">"],
             "task.params": {"digits": [2]}}
    again = {"environment.name": "retry", "environment.params": {"attempts": 2, "feedback": "?"},
             "environment.at_limit": "zero", "environment.max_turn_tokens": 8}
    for number, more in enumerate((tools, again)):
        rows = numbers(tiny_run(tmp_path / str(number), common | more))
        assert [row[PARITY] for row in rows[1:]] == [0.0] * 2
    assert rows[1]["environment/turns_mean"] > 1.5


def test_a_reward_function_sees_the_conversation(tmp_path: Path) -> None:
    (tmp_path / "see.py").write_text(
        "def reward(completions, **_):\n"
        "    assert all(m['role'] in ('assistant', 'user') for c in completions for m in c)\n"
        "    return [float(sum(m['role'] == 'assistant' for m in c)) for c in completions]\n"
    )
    with_reward = changes(tmp_path, train__steps=1) | {"task.reward": f"{tmp_path}/see.py:reward"}
    samples = list(read_samples(tiny_run(tmp_path / "a", with_reward)))
    assert {s["reward"] for s in samples} == {3.0}
    assert not any(turn.get("reward") for s in samples for turn in s["turns"]), "replaced"


def test_settings_of_environments_are_checked(tmp_path: Path) -> None:
    base = json.loads(json.dumps(tiny_config(tmp_path).model_dump(mode="json", exclude_unset=True)))
    for section, key, message in (
        ({"max_turns": 3}, "environment", "environment.max_turns: has no effect while environment.name"),
        ({"name": "environment"}, "task", "environment.name: is needed with task.name"),
    ):
        data = base | {key: base.get(key, {}) | section}
        data["task"] = {k: v for k, v in data["task"].items() if k not in ("params", "reward")}
        with pytest.raises(UserError, match=message):
            parse_config(data)
    with pytest.raises(UserError, match="Did you mean 'calculator'"):
        tiny_run(tmp_path / "x", changes(tmp_path) | {"environment.name": "calculater"})
    with pytest.raises(UserError, match=r"environment.params.lats.*did you mean 'last'"):
        tiny_run(tmp_path / "y", changes(tmp_path, {"lats": 3}))
    with pytest.raises(UserError, match="has no method step"):
        (tmp_path / "half.py").write_text("class Half:\n    def reset(self, problem):\n        return 'x'\n")
        tiny_run(tmp_path / "z", changes(tmp_path) | {"environment.name": f"{tmp_path}/half.py:Half"})


def test_refilling_stops_with_the_environments_error_where_all_fail(tmp_path: Path) -> None:
    more = {"rl__algo": "dapo", "rl__max_refill_rounds": 1, "eval__eval_interval": 0}
    with pytest.raises(UserError, match="Step 1: all 32 conversations failed .* the server is down"):
        tiny_run(tmp_path, changes(tmp_path, {"fail": "all"}, **more))


def test_a_run_may_go_on_with_more_patience(tmp_path: Path) -> None:
    """The advice after time-outs is to raise environment.timeout, so a resumed run must take it."""
    straight = tiny_run(tmp_path / "a", changes(tmp_path))
    tiny_run(tmp_path / "b", changes(tmp_path, train__steps=2))
    more = {"checkpoint.resume": "auto", "environment.timeout": 99.0, "environment.max_concurrent": 2}
    run_dir = tiny_run(tmp_path / "b", changes(tmp_path) | more)
    assert numbers(run_dir) == numbers(straight) and weights_hash(run_dir, 4) == weights_hash(straight, 4)
    with pytest.raises(UserError, match="other settings"):
        tiny_run(tmp_path / "b", changes(tmp_path, train__steps=5, environment__max_turns=2) | more)


UNSCORED = """
class Silent:
    def __init__(self, scores): self.scores = scores

    def reset(self, problem):
        self.seed = problem["seed"]
        return f"{self.seed % 90 + 10}="

    def step(self, action):
        right = float(sum(c.isdigit() for c in action))
        return "", right if self.scores == "some" and len(action) % 2 else None, True
"""


def silent(folder: Path, scores: str) -> dict[str, Any]:
    (folder / "silent.py").write_text(UNSCORED)
    return changes(folder) | {
        "environment.name": f"{folder}/silent.py:Silent", "environment.params": {"scores": scores},
        "train.steps": 1, "eval.eval_interval": 0}


def test_an_episode_without_a_reward_is_not_a_wrong_one(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, silent(tmp_path, "some"))
    row, samples = numbers(run_dir)[-1], list(read_samples(run_dir))
    unscored = [s for s in samples if s["reward"] is None]
    assert 0 < len(unscored) < len(samples) == 16
    assert row["reward/num_errors"] == len(unscored) and row["reward/frac_unscored"] == len(unscored) / 16
    given = [s["reward"] for s in samples if s["reward"] is not None]
    assert row["reward/mean"] == pytest.approx(sum(given) / len(given))
    assert all(s["advantage"] is None and "reward" not in s["turns"][0] for s in unscored)


def test_an_environment_that_never_scores_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Environment \S+silent.py:Silent gave no reward \(None\) in any of 16 conv"):
        tiny_run(tmp_path, silent(tmp_path, "none"))
