"""Paths in a config become absolute; names that are no paths stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_config

from jetrl.config.paths import absolute_paths, holding, in_own_folder, path_values
from jetrl.errors import UserError


def test_paths_become_absolute_and_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "rw.py").write_text("")
    changes = {
        "output_dir": "runs/", "sft.cache_dir": "~/cache", "sft.steps": 1, "task.reward": "./rw.py:reward",
        "rollout.engine": "package.module:Engine", "environment.name": "absent.py:Env", "checkpoint.resume": "auto",
    }
    config = tiny_config(tmp_path, changes)
    changed = absolute_paths(config)
    assert path_values(changed) == {
        "output_dir": f"{tmp_path}/runs", "sft.cache_dir": f"{tmp_path}/home/cache",
        "model.tokenizer": "builtin:arithmetic", "task.reward": f"{tmp_path}/rw.py:reward",
        "rollout.engine": "package.module:Engine", "environment.name": "absent.py:Env", "checkpoint.resume": "auto",
        "teacher.paths": (),
    }
    other = {key.split(".")[0] for key in holding("place", "file", "data", "code")}
    assert all(getattr(changed, k) == getattr(config, k) for k in type(config).model_fields if k not in other)
    assert absolute_paths(changed) == changed, "a second time changes nothing"


def test_a_folder_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny_config(tmp_path, {"model.arch": None, "model.path": "Qwen/Qwen3-0.6B"})
    assert absolute_paths(config).model.path == "Qwen/Qwen3-0.6B"
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert absolute_paths(config).model.path == f"{tmp_path}/Qwen/Qwen3-0.6B"


def test_a_runs_own_recipe_is_resumed_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny_config(tmp_path, {"output_dir": "runs"})
    (tmp_path / "moved" / "tiny" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "checkpoints").mkdir(parents=True)
    assert in_own_folder(config, "moved/tiny/config.toml", []).output_dir == f"{tmp_path}/moved"
    assert in_own_folder(config, "runs/tiny/config.toml", []).output_dir == "runs", "as it was written"
    (tmp_path / "moved" / "copy" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=r"belongs to the run tiny, .* is called copy. .* rename it to tiny"):
        in_own_folder(config, "moved/copy/config.toml", [])
    for recipe, said in (
        ("moved/tiny/config.toml", ["output_dir=x"]), ("moved/copy/config.toml", ["output_dir=runs"]),
        ("moved/tiny/r.toml", []), ("quickstart", []),
    ):
        assert in_own_folder(config, recipe, said) == config
