"""The base of a run with adapters: who makes it, where it is kept, and that it is the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_run

from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.model.adapter import BaseHash
from jetrl.run.checkpoint import base

LORA: dict[str, Any] = {"lora.rank": 2, "train.steps": 2, "eval.eval_interval": 0, "train.lr": 1e-2}


def test_who_makes_it(tmp_path: Path) -> None:
    folder = {"model.arch": None, "model.path": str(tmp_path / "model")}
    for changes, here in ((folder, False), ({}, True), (folder | {"sft.steps": 2}, True)):
        config = tiny_config(tmp_path, {"lora.rank": 2} | changes)
        assert (base.made_here(config), base.stays(config)) == (here, not here)
        where = tmp_path / "checkpoints" / "base" if here else tmp_path / "model"
        assert base.named(config, tmp_path / "checkpoints") == (str(where), None)
    plain = tiny_config(tmp_path, folder)
    assert not base.made_here(plain) and not base.stays(plain)


def test_a_base_from_a_folder_stays_there_and_must_be_the_same_at_a_resume(tmp_path: Path) -> None:
    whole = tiny_run(tmp_path / "whole", {"train.steps": 1, "checkpoint.save_interval": 1, "eval.eval_interval": 0})
    folder = whole / "checkpoints" / "step_000001" / "model"
    changes = LORA | {"model.arch": None, "model.tokenizer": None, "model.path": str(folder)}
    run_dir = tiny_run(tmp_path / "ours", changes)
    assert not (run_dir / "checkpoints" / "base").exists()
    spec, hashes = hf.spec_from_folder(folder), BaseHash()
    assert dict(hashes.through(hf.parameters_of(folder, spec)))
    assert f'"base": "{hashes.digest()}"' in (run_dir / "checkpoints" / "step_000002" / "state.json").read_text()
    again = changes | {"train.steps": 3, "checkpoint.resume": "auto"}
    tiny_run(tmp_path / "ours", again)
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"] += 1
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="of another base: it has the digest .* Give back the base that the run began"):
        tiny_run(tmp_path / "ours", again | {"train.steps": 4})


def test_a_missing_base_is_told(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, LORA)
    (run_dir / "checkpoints" / "base").rename(tmp_path / "gone")
    with pytest.raises(UserError, match="base is missing: it holds the base of the run's adapters. Start a new run"):
        tiny_run(tmp_path, LORA | {"train.steps": 3, "checkpoint.resume": "auto"})
