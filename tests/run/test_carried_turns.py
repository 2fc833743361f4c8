"""Runs whose conversations are carried over: their bits, their checkpoints, their replay, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import ARCH, numbers, tiny_config, tiny_run, weights_hash

from jetrl.errors import UserError
from jetrl.report.recorder import read_samples
from jetrl.run.carried import Carry
from jetrl.run.checkpoint import suspended
from jetrl.run.loop import run
from jetrl.run.replay.checks import replay
from jetrl.run.setup import build
from jetrl.run.stopping import GivenUp, StopRequest

GUESS = '''\
import random

class Guess:
    """A number of turns that it draws, and replies that depend on what was said."""

    def reset(self, problem):
        self.rng, self.said = random.Random(problem["seed"]), ""
        self.turns = self.rng.randint(1, 4)
        return f"{self.rng.randint(10, 99)}+"

    def step(self, action):
        self.said += action
        self.turns -= 1
        if self.turns == 0:
            return None, len(set(self.said) & set("0123456789")) / 10, True
        return f"{len(self.said) % 10}{self.rng.randint(0, 9)}=", 0.0, False
'''


def talking(folder: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Conversations of 1 to 4 turns of up to 9 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "guess.py").write_text(GUESS)
    return {
        "rollout.overcommit": 1.0, "rollout.group_size": 2, "rollout.max_response_length": 40, "rl.rollout_is": "token",
        "model.arch": ARCH | {"initializer_range": 0.02}, "rl.max_off_policy_steps": 3, "train.lr": 1e-3,
        "environment.name": f"{folder}/guess.py:Guess", "environment.max_turns": 6, "environment.reply_tokens": 5,
        "environment.at_limit": "zero", "environment.max_turn_tokens": 9, "task.reward": None,
        "eval.eval_interval": 2, "train.steps": 4, "checkpoint.save_interval": 2,
    } | (changes or {})


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("env")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, env: Path) -> Path:
    """A run without an interruption."""
    return tiny_run(tmp_path_factory.mktemp("whole"), talking(env))


def test_a_run_learns_from_conversations_of_several_versions(whole: Path) -> None:
    rows = numbers(whole)[1:]
    assert all(row["parity/logprob_abs_diff_max"] == 0 for row in rows)
    assert max(row["rollout/off_policy_steps_max"] for row in rows) >= 2
    assert all(row["rollout/carried"] == 4 and row["environment/turns_mean"] > 1 for row in rows)
    assert max(row["rollout/version_spans"] for row in rows) > 1, "a turn of the policy was cut"
    samples = list(read_samples(whole))
    assert len({s["group"] for s in samples}) == 4 * 4 and len(samples) == 4 * 4 * 2, "each is learned from once"


@pytest.mark.parametrize("change", [
    {"rollout.max_num_seqs": 3, "rollout.speculate": "on"}, {"rollout.kv_cache_tokens": 120, "rollout.page_size": 4},
], ids=str)
def test_how_the_engine_works_changes_no_bit(change: dict[str, Any], whole: Path, env: Path, tmp_path: Path) -> None:
    other = tiny_run(tmp_path, talking(env, change))
    assert weights_hash(other, 4) == weights_hash(whole, 4)


def test_a_run_that_stops_goes_on_with_the_same_bits(whole: Path, env: Path, tmp_path: Path) -> None:
    """From a checkpoint in which conversations are under way: their environments hear the same turns again."""
    tiny_run(tmp_path, talking(env, {"train.steps": 2}))
    folder = tmp_path / "runs/tiny/checkpoints/step_000002"
    meta = json.loads((folder / "state.json").read_text())
    session = build(tiny_config(tmp_path, talking(env)))
    groups = suspended.unpacked(folder, meta["under_way"], meta["files"], session)
    session.close()
    table, content = suspended.packed(groups)
    assert table == meta["under_way"] and content == (folder / suspended.FILE).read_bytes()
    answers = [answer for group in table for answer in group["answers"]]
    assert len(answers) == 8 and any(len(row["segments"]) > 1 for row in answers)
    run_dir = tiny_run(tmp_path, talking(env, {"checkpoint.resume": "auto"}))
    assert weights_hash(run_dir, 4) == weights_hash(whole, 4)
    assert [r for r in numbers(run_dir) if r["step"] > 2] == [r for r in numbers(whole) if r["step"] > 2]


def test_a_rollout_that_is_given_up_keeps_what_was_under_way_before(
    whole: Path, env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Carry.round

    def interrupted(self: Carry, count: int, on_step: Any) -> Any:
        looks: list[int] = []

        def stops(report: Any) -> None:
            looks.append(report.step)
            if self.step == 4 and len(looks) == 5:
                raise GivenUp
            on_step(report)

        return right(self, count, stops)

    monkeypatch.setattr(Carry, "round", interrupted)
    assert not run(tiny_config(tmp_path, talking(env)), tmp_path / "runs/tiny", ["test"], StopRequest())
    monkeypatch.undo()
    assert (tmp_path / "runs/tiny/checkpoints/step_000003").is_dir()
    run_dir = tiny_run(tmp_path, talking(env, {"checkpoint.resume": "auto"}))
    assert weights_hash(run_dir, 4) == weights_hash(whole, 4)


def test_an_environment_that_cannot_be_repeated_is_told(env: Path, tmp_path: Path) -> None:
    """At a resumption, where all environments are begun again: what was saved is still there."""
    moody = talking(env, {"environment.name": f"{env}/moody.py:Guess"})
    (env / "moody.py").write_text(GUESS.replace("(10, 99)", f"(10, int(open('{env}/most').read()))"))
    (env / "most").write_text("99")
    tiny_run(tmp_path, moody | {"train.steps": 2})
    (env / "most").write_text("10")
    with pytest.raises(UserError, match=r"Environment Guess, problem .*: it was begun again to hear the same turns"):
        tiny_run(tmp_path, moody | {"checkpoint.resume": "auto"})
    assert (tmp_path / "runs/tiny/checkpoints/step_000002").is_dir()


def test_every_token_is_replayed_with_its_version(env: Path, tmp_path: Path) -> None:
    changes = {"train.steps": 3, "eval.eval_interval": 0, "checkpoint.save_interval": 1}
    run_dir = tiny_run(tmp_path, talking(env, changes))
    for what in ("logprobs", "rollout", "update"):
        found = replay(run_dir, 3, what)
        assert found.same and found.checked > 20, found


def test_what_would_get_too_old_is_dropped_with_its_environment(env: Path, tmp_path: Path) -> None:
    short = {"rl.max_off_policy_steps": 1, "eval.eval_interval": 0, "rl.on_stale": "drop"}
    rows = numbers(tiny_run(tmp_path, talking(env, short)))[1:]
    assert all(row["rollout/off_policy_steps_max"] <= 1 for row in rows)
    assert sum(row["rollout/dropped_stale"] for row in rows) > 0


@pytest.mark.parametrize("name", ["command", "verifiers"])
def test_programs_cannot_be_carried_over(name: str, env: Path, tmp_path: Path) -> None:
    said = f'rollout.overcommit: the programs of environment.name = "{name}" cannot be brought back'
    with pytest.raises(UserError, match=said) as error:
        tiny_config(tmp_path, talking(env, {"environment.name": name}))
    assert len(str(error.value).splitlines()) == 1 and "Set rollout.overcommit = 0" in str(error.value)


def test_a_replys_tokens_need_something_to_be_carried(env: Path, tmp_path: Path) -> None:
    with pytest.raises((UserError, ValueError), match="reply_tokens: has no effect while rollout.overcommit"):
        tiny_config(tmp_path, talking(env, {"rollout.overcommit": 0.0, "rl.max_off_policy_steps": 2}))
