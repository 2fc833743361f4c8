"""What must be equal to resume a run: differences are named, the spelling of a path is none, old checkpoints serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_config, tiny_data, tiny_run, weights_hash

from jetrl.config import parse_config, resolve, to_toml
from jetrl.config.paths import absolute_paths
from jetrl.errors import UserError
from jetrl.train import resume
from jetrl.train.checkpoint import Meta


def told(there: Any, here: Any, **meta: Any) -> str:
    """The message of a checkpoint written under `there` for a run under `here`; empty if it is resumed."""
    settings = json.loads(json.dumps([resume.settings(there), resume.paths(absolute_paths(there))]))
    found = Meta(1, 1, "flow", "", settings=settings[0], paths=settings[1])
    try:
        resume.check(Path("/nowhere/checkpoints/step_000001"), found, here, absolute_paths(here), "flow")
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"train.lr": 1e-4}, "train.lr = 0.003 there, 0.0001 here"),
        ({"seed": 5}, "seed = 0 there, 5 here"),
        ({"num_threads": 2}, "num_threads = 1 there, 2 here"),
        ({"name": "other"}, 'name = "tiny" there, "other" here'),
        ({"rl.algo": "dr_grpo"}, 'rl.algo = "grpo" there, "dr_grpo" here'),
        ({"model.arch.hidden_size": 48}, "model.arch.hidden_size = 40 there, 48 here"),
        ({"model.arch.attention_bias": True}, 'model.arch.attention_bias = "none" there, true here'),
        ({"task.params": {"digits": [3]}}, "task.params.digits = [2] there, [3] here"),
        ({"task.reward": "jetrl.tasks.rewards:exact_match"}, '"jetrl.tasks.rewards:exact_match" here'),
        ({"rollout.stop": ["x"]}, 'rollout.stop = [] there, ["x"] here'),
        ({"train.offload_optimizer": True}, "train.offload_optimizer = false there, true here"),
        ({"train.lr_schedule": "linear"}, 'train.lr_schedule = "constant" there, "linear" here'),
    ],
    ids=str,
)
def test_each_difference_is_named_with_both_values(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    message = told(tiny_config(tmp_path), tiny_config(tmp_path, changes))
    assert line in message and "written by a run with other settings" in message, message


@pytest.mark.parametrize(
    "changes",
    [
        {"train.steps": 9}, {"train.steps": 2}, {"eval.eval_interval": 0}, {"checkpoint.save_interval": 7},
        {"checkpoint.resume": "auto"}, {"track.backends": ["tensorboard"]}, {"output_dir": "elsewhere"},
    ],
    ids=str,
)
def test_what_may_change(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert told(tiny_config(tmp_path), tiny_config(tmp_path, changes)) == ""


def test_some_settings_are_free_or_not_beside_others(tmp_path: Path) -> None:
    bf16 = {"train.master_dtype": "bfloat16"}
    assert told(tiny_config(tmp_path, bf16), tiny_config(tmp_path, bf16 | {"train.offload_optimizer": True})) == ""
    linear = {"train.lr_schedule": "linear"}
    longer = told(tiny_config(tmp_path, linear), tiny_config(tmp_path, linear | {"train.steps": 9}))
    assert "train.steps = 4 there, 9 here" in longer
    warm = {"sft.steps": 3, "sft.cache_dir": "a"}
    assert told(tiny_config(tmp_path, warm), tiny_config(tmp_path, warm | {"sft.cache_dir": "b"})) == ""
    more = told(tiny_config(tmp_path, warm), tiny_config(tmp_path, warm | {"sft.steps": 4}))
    assert "sft.steps = 3 there, 4 here" in more


def test_the_spelling_of_a_path_is_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "data.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    data = {"task.name": "file", "task.params": {}}
    spellings = ["data.jsonl", f"{tmp_path}/data.jsonl", "./data.jsonl", "other/../data.jsonl"]
    configs = [tiny_config(tmp_path, data | {"task.train_file": text}) for text in spellings]
    assert all(told(there, here) == "" for there in configs for here in configs)
    (tmp_path / "more.jsonl").write_text("")
    message = told(configs[0], tiny_config(tmp_path, data | {"task.train_file": "more.jsonl"}))
    assert 'task.train_file = "data.jsonl" there, "more.jsonl" here' in message


def test_another_flow_alone_is_told(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    meta = Meta(1, 1, "flow", "", settings=resume.settings(config), paths={})
    with pytest.raises(UserError, match="the flow of the model: flow there, other here"):
        resume.check(tmp_path, meta, config, absolute_paths(config), "other")


@pytest.mark.parametrize(
    ("changes", "digest"),
    [
        ({}, "f680466ea48b892f"),
        ({"rl": {"algo": "dapo"}, "sft": {"steps": 3, "cache_dir": "c"}}, "3a639fa7db014c0a"),
    ],
)
def test_the_digest_of_old_checkpoints(tmp_path: Path, changes: dict[str, Any], digest: str) -> None:
    """Both were made by commit efc6caa, which kept no settings in a checkpoint."""
    data = tiny_data(tmp_path) | {"output_dir": "x"} | changes
    data["task"]["reward"] = "reward.py:reward"
    if changes:
        data["train"]["master_dtype"] = "bfloat16"
    config = resolve(parse_config(data), cuda_available=False)
    assert resume.old_digest(config) == digest
    assert resume.old_digest(config.model_copy(update={"seed": 1})) != digest


def as_old(path: Path, digest: str) -> None:
    """Take the settings out of a checkpoint's record, as it was before it held them."""
    record = json.loads((path / "state.json").read_text())
    for key in ("settings", "paths"):
        del record[key]
    (path / "state.json").write_text(json.dumps(record | {"config_digest": digest}))


def test_an_old_checkpoint_is_resumed_or_refused_by_the_runs_recipe(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, {"train.steps": 2})
    as_old(run_dir / "checkpoints" / "step_000002", resume.old_digest(tiny_config(tmp_path)))
    auto = {"checkpoint.resume": "auto"}
    with pytest.raises(UserError, match=r"train.lr = 0.003 there, 0.0001 here"):
        tiny_run(tmp_path, auto | {"train.lr": 1e-4})
    (run_dir / "config.toml").write_text(to_toml(tiny_config(tmp_path, {"train.lr": 1e-4})))
    with pytest.raises(UserError, match=r"config.toml does not tell either"):  # it was changed by hand
        tiny_run(tmp_path, auto | {"train.lr": 1e-4})
    tiny_run(tmp_path, auto)
    assert weights_hash(run_dir, 4) == weights_hash(tiny_run(tmp_path / "b"), 4)
