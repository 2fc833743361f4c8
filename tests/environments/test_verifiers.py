"""`environment.name = "verifiers"`: an environment of that package talks to the policy. Most tests need the package."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_config, tiny_run

from jetrl import UserError, requirements
from jetrl.environments.asked import Said
from jetrl.environments.environment import load_environment
from jetrl.environments.verifiers import WORKERS, Verifiers, env_of, task_of
from jetrl.environments.verifiers_worker import load
from jetrl.environments.worker import ConversationFailed
from jetrl.report.recorder import read_metrics, read_samples
from jetrl.trust import code_of
from jetrl.types import Completion, log_probs, token_ids

EXAMPLES = Path(__file__).parents[2] / "examples"
ENV = {"taskset": {"id": "guess_tasks"}}
pytestmark = pytest.mark.timeout(400)
needs_verifiers = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="needs the extra verifiers")


def says(text: str) -> Said:
    return Said((1, 2), Completion(1, token_ids([3]), log_probs([-0.5]), text, "stop", 0, "flow"))


@pytest.fixture
def start() -> Iterator[Any]:
    """Begins an episode of the example."""
    pytest.importorskip("starlette", reason="needs the extra serve")
    made = []

    def begin(index: int = 3, env: Any = ENV, **params: Any) -> tuple[Verifiers, Any]:
        made.append(Verifiers(env, **{"folder": str(EXAMPLES)} | params))
        return made[-1], made[-1].reset({"seed": 5, "index": index})

    yield begin
    for one in made:
        one.close()
    WORKERS.stop()


def test_what_the_block_of_verifiers_says() -> None:
    assert env_of(ENV) == {**ENV, "agent": {"runtime": {"type": "subprocess"}}}
    given = {**ENV, "agent": {"runtime": {"type": "docker"}, "max_turns": 3}}
    assert env_of(given) == given and env_of({**ENV, "id": "best-of-n"}) == {**ENV, "id": "best-of-n"}
    for wrong in (3, {}, {"taskset": 1}, {"taskset": {"id": ""}}, {"taskset": {"id": 3}}):
        with pytest.raises(UserError, match="environment.params.env"):
            env_of(wrong)
    wrong_params = {"num_held_out": -1, "most_tasks": 0, "folder": "/nowhere", "time_limit": 0, "forks": 1}
    for name, value in wrong_params.items():
        with pytest.raises(UserError, match=f"environment.params.{name}"):
            Verifiers(ENV, **{name: value})


def test_tasks_are_taken_in_order_and_held_out_ones_apart() -> None:
    def task(index: int, seed: int, held_out: int) -> int:
        return task_of({"index": index, "seed": seed}, 10, held_out)

    assert [task(i, 5, 0) for i in (0, 9, 10, 23)] == [0, 9, 0, 3] and task(12, 2**30, 0) == 2
    assert {task(i, 5, 3) for i in range(40)} == set(range(7))
    assert {task(i, 2**30 + i, 3) for i in range(40)} == {7, 8, 9}
    with pytest.raises(UserError, match="num_held_out = 10: the taskset has 10 tasks"):
        task(0, 0, 10)


def test_it_says_what_is_missing_and_what_code_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changes = {"environment.name": "verifiers", "environment.params": {"env": ENV}}
    named = [(one.key, one.name) for one in code_of(tiny_config(tmp_path, changes))]
    assert ("environment.params.env", '{"taskset": {"id": "guess_tasks"}}') in named
    monkeypatch.setattr(requirements, "installed", lambda name: None)
    with pytest.raises(UserError, match=r'"verifiers": verifiers is not installed.*jetrl\[verifiers\]'):
        load_environment("verifiers", {"env": ENV})


@needs_verifiers
def test_an_episode_is_a_conversation(start: Any) -> None:
    episode, messages = start()
    assert list(messages) == [{"role": "user", "content": "1:7?"}] and messages.after == -1
    reply, reward, done = episode.step(says("7"))
    assert (list(reply), reply.after, reward, done) == ([{"role": "user", "content": "<"}], 0, None, False)
    assert episode.step(says("4")) == ([], 1.0, True)
    second, _ = start(index=10)  # the same task again, in the same process
    assert second.worker is episode.worker and second.step(says("4")) == ([], 1.0, True)
    third, _ = start()
    third.close()  # given up: the others are not disturbed
    fourth, _ = start()
    for _ in range(2):
        assert not fourth.step(says("x"))[2]
    assert fourth.step(says("x")) == ([], pytest.approx(-0.3), True)


@needs_verifiers
def test_what_goes_wrong_is_told(start: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no_such_tasks"):
        start(env={"taskset": {"id": "no_such_tasks"}})
    with pytest.raises(UserError, match="environment.params.env: .*nonsense"):
        start(env={"taskset": {"id": "guess_tasks"}, "nonsense": 1})
    broken = (EXAMPLES / "guess_tasks.py").read_text().replace("answer.raise_for_status()", "raise KeyError('gone')")
    (tmp_path / "guess_tasks.py").write_text(broken)
    episode, _ = start(folder=str(tmp_path))
    with pytest.raises(ConversationFailed, match="gone"):
        episode.step(says("7"))
    first, _ = start()
    first.worker.stop()
    with pytest.raises(ConversationFailed, match="has ended before the conversation"):
        first.step(says("7"))
    endless = broken.replace("for secret in range(1, MOST + 1):", "for secret in iter(int, 1):").replace(
        "    def load", "    INFINITE = True\n\n    def load")
    (tmp_path / "endless_tasks.py").write_text(endless)
    with pytest.raises(UserError, match="most_tasks"):
        start(env={"taskset": {"id": "endless_tasks"}}, folder=str(tmp_path))
    assert start(env={"taskset": {"id": "endless_tasks"}}, folder=str(tmp_path), most_tasks=4)[1]
    assert callable(load)


@needs_verifiers
def test_a_run_trains_through_verifiers(tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="needs the extra serve")
    run_dir = tiny_run(tmp_path, {
        "task.name": "environment", "task.params": {}, "task.reward": None, "environment.name": "verifiers",
        "environment.params": {"env": ENV, "folder": str(EXAMPLES)}, "environment.max_turn_tokens": 1,
        "environment.max_turns": 4, "environment.timeout": 300, "rollout.max_response_length": 16, "train.steps": 2,
        "eval.eval_interval": 0, "rollout.prompts_per_step": 3, "rollout.group_size": 4,
    })
    rows = read_metrics(run_dir)[-2:]
    assert [row["parity/logprob_abs_diff_max"] for row in rows] == [0.0, 0.0]
    assert [row["environment/num_errors"] for row in rows] == [0, 0] and rows[0]["environment/turns_mean"] > 2
    assert all(-0.3 <= row["reward/mean"] <= 1 for row in rows) and any(row["policy/grad_norm"] > 0 for row in rows)
    said = {turn["text"] for one in read_samples(run_dir) for turn in one["turns"] if turn["author"] != "policy"}
    assert said and said <= {"?", ">", "<"}
    WORKERS.stop()
