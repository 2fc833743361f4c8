"""The tutorials, followed: their files are written as printed, and their commands run, in fewer steps."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_config, tiny_run

import jetrl
from jetrl.environments.environment import load_environment
from jetrl.report.recorder import read_metrics

ROOT = Path(__file__).parents[1]
FEWER: dict[str, Any] = {"num_threads": 1, "device": "cpu", "train.steps": 1, "task.num_eval": 16, "verbose": False}


def written(page: str, to: Path) -> list[str]:
    """The files of a tutorial: blocks of code whose first line names one."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.findall(r"^```\w+\n(# (\S+\.(?:py|toml))\n.*?)^```", text, re.M | re.S)
    for content, name in found:
        (to / name).write_text(content)
    return [name for _, name in found]


def trained(recipe: str, **settings: Any) -> Any:
    verbose = settings.pop("verbose")
    return jetrl.train(recipe, overrides=settings, verbose=verbose)


def test_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert written("OWN_DATA.md", tmp_path) == ["make_data.py", "rewards.py", "sorting.toml"]
    runpy.run_path("make_data.py")
    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    assert len(rows) > 2000 and all(sorted(row["prompt"][:-1]) == list(row["answer"]) for row in rows)
    assert 0.4 < sum(row["answer"] == row["solution"] for row in rows) / len(rows) < 0.6
    few = {"sft.steps": 2, "sft.warmup_steps": 0, "sft.cache_dir": "cache", "rollout.prompts_per_step": 4}
    done = trained("sorting.toml", **FEWER, **few)
    assert done.finished and {"reward/right/mean", "reward/places/mean"} <= done.metrics.keys()
    assert done.metrics["parity/logprob_abs_diff_max"] == 0.0


@pytest.mark.slow
def test_own_environment_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the tutorial's steps already shows it."""
    monkeypatch.chdir(tmp_path)
    assert written("OWN_ENVIRONMENT.md", tmp_path) == ["higher_lower.py", "higher_lower.toml"]
    settings = {**FEWER, "train.steps": 20, "task.num_eval": 64}
    done = trained("higher_lower.toml", **settings)
    held_out = [row["eval/environment/avg@1"] for row in read_metrics(done.run_dir) if "eval/environment/avg@1" in row]
    assert len(held_out) == 2 and held_out[0] < 0.1 < held_out[1] - held_out[0]
    assert done.metrics["parity/logprob_abs_diff_max"] == 0.0


def test_the_game_is_played_as_the_page_says(tmp_path: Path) -> None:
    written("OWN_ENVIRONMENT.md", tmp_path)
    game = load_environment(f"{tmp_path}/higher_lower.py:HigherLower", {})()
    assert game.reset({"seed": 3}) == "?"
    game.secret = 5
    assert [game.step(text) for text in ("4", "7", "x")] == [(">", 0.0, False), ("<", 0.0, False), (">", -0.1, True)]
    assert game.reset({"seed": 4}) == "?" and game.step(str(game.secret)) == ("", 1.0, True)


def test_metrics_that_the_page_on_flat_rewards_names_exist(tmp_path: Path) -> None:
    """In a run with several updates, two functions and a reference policy."""
    text = (ROOT / "docs/FLAT_REWARD.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:reward|policy|response_length|data|parity)/[\w/]+)`", text))
    assert len(named) > 8
    (tmp_path / "more.py").write_text("def other(completions, **_):\n    return [float(len(c)) for c in completions]\n")
    (tmp_path / "rows.jsonl").write_text("".join(
        json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(30)))
    changes = {
        "rl.updates_per_step": 2, "rl.kl_coef": 0.01, "train.steps": 1, "task.name": "file", "task.params": None,
        "task.train_file": str(tmp_path / "rows.jsonl"),
    }
    reward = tiny_config(tmp_path).task.reward
    run = tiny_run(tmp_path, {**changes, "task.reward": [reward, f"{tmp_path}/more.py:other"]})
    there = {re.sub(r"^reward/(reward|other)/", "reward/NAME/", key) for key in read_metrics(run)[-1]}
    assert named <= there, named - there
