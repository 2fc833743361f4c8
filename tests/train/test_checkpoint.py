"""Checkpoints: the same bits back, atomic writing, pruning, and damage that is seen."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.errors import UserError
from jetrl.model.shards import Part
from jetrl.train import checkpoint, store
from jetrl.train.checkpoint import Meta


def meta(step: int) -> Meta:
    return Meta(step=step, weight_version=step + 1, flow_digest="flow", settings={}, paths={}, initial_accuracy=0.25)


def tensors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.a": torch.randn(7, 5, generator=generator), "model.b": torch.randn(9, generator=generator).bfloat16(),
        "optimizer.0.step": torch.tensor([step]), "model.odd": torch.tensor([float("nan"), -0.0, 1e-45]),
        "model.view": torch.randn(6, 4, generator=generator).T,
    }


def write_model(folder: Path, told: checkpoint.Told) -> None:
    with told():
        (folder / "model.safetensors").write_bytes(b"weights")


def write(folder: Path, step: int, keep: int = 2) -> Path:
    parts = {name: Part(value, tuple(value.shape), 0) for name, value in tensors(step).items()}
    return checkpoint.save(folder, meta(step), parts, write_model, keep)


def test_what_was_saved_comes_back_to_the_bit(tmp_path: Path) -> None:
    path = write(tmp_path / "c", 3)
    assert path.name == "step_000003" and (path / "model").is_dir()
    loaded = checkpoint.load(path)
    assert replace(loaded, files=None) == meta(3)
    places = {name: torch.empty_like(value) for name, value in tensors(3).items()}
    checkpoint.read(path, lambda stored: {name: Part(places[name], size, 0) for name, (size, _) in stored.items()})
    for name, value in tensors(3).items():
        assert_bitwise_equal(places[name], value, name)
        assert_bitwise_equal(store.whole(path / "state")[name], value, name)


def test_hashes_are_of_all_files(tmp_path: Path) -> None:
    files = checkpoint.load(write(tmp_path, 3)).files
    assert files == {
        str(p.relative_to(tmp_path / "step_000003")): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in (tmp_path / "step_000003").rglob("*.safetensors")
    }
    assert [name.split("/")[0] for name in files] == ["model", "state"]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_only_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for step in (0, 10, 20, 30):
        write(tmp_path, step, keep)
    assert [p.name for p in checkpoint.complete(tmp_path)] == [f"step_{s:06d}" for s in (0, 10, 20, 30)][-keep:]
    assert checkpoint.newest(tmp_path) == tmp_path / "step_000030"


@pytest.mark.parametrize("keep", [1, 2])
def test_writing_an_earlier_step_again_never_removes_it(tmp_path: Path, keep: int) -> None:
    """A run that is resumed from an earlier checkpoint finds later ones in the folder."""
    for step in (1, 2, 3):
        write(tmp_path, step, keep=3)
    assert write(tmp_path, 2, keep) == tmp_path / "step_000002"
    assert checkpoint.newest(tmp_path) == tmp_path / "step_000002"
    assert len(checkpoint.complete(tmp_path)) == keep


def test_without_the_pointer_the_newest_complete_one_counts(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "latest").unlink()
    (tmp_path / "step_000003").mkdir()  # half a checkpoint
    assert checkpoint.newest(tmp_path) == tmp_path / "step_000002"
    (tmp_path / "latest").write_text("step_000009\n")  # a pointer to nothing
    assert checkpoint.newest(tmp_path) == tmp_path / "step_000002"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "I/O error")])
def test_a_failed_write_leaves_the_older_ones_and_no_rubbish(
    tmp_path: Path, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(store, "write", fail)
    with pytest.raises(UserError if error.errno == errno.ENOSPC else OSError) as raised:
        write(tmp_path, 2)
    assert (error.errno == errno.ENOSPC) == ("MiB are free" in str(raised.value))
    assert {p.name for p in tmp_path.iterdir()} == {"step_000001", "latest"}
    assert checkpoint.newest(tmp_path) == tmp_path / "step_000001"


@pytest.mark.parametrize("place", ["store.write", "checkpoint.sync", "model"])
def test_a_full_disk_says_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_model(folder: Path, told: checkpoint.Told) -> None:
        with told():
            full()

    for expected in ("There is no checkpoint yet, so a resumed run starts over", "step_000001 is intact"):
        with monkeypatch.context() as patch, pytest.raises(UserError, match=expected):
            patch.setattr(*{
                "store.write": (store, "write", full), "checkpoint.sync": (checkpoint, "sync", full),
                "model": (sys.modules[__name__], "write_model", full_model),
            }[place])
            write(tmp_path, 2)
        assert not list(tmp_path.glob(".writing*"))
        write(tmp_path, 1)


def test_damage_is_seen_and_the_file_named(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (state,) = (path / "state").iterdir()
    data = state.read_bytes()
    named = re.escape(str(state)) + " does not have the hash"
    for damaged in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), data + b"x", b""):
        state.write_bytes(damaged)
        with pytest.raises(UserError, match=named):
            checkpoint.load(path)
    state.unlink()
    with pytest.raises(UserError, match="is missing: the file was removed"):
        checkpoint.load(path)
    state.write_bytes(data)
    (path / "state" / "more.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=r"more\.safetensors is not one of the files"):
        checkpoint.load(path)
    (path / "state" / "more.safetensors").unlink()
    text = (path / "state.json").read_text()
    for broken in ("{", "[1]", json.dumps({"step": 1}), json.dumps(json.loads(text) | {"new": 1}),
                   json.dumps(json.loads(text) | {"files": None})):
        (path / "state.json").write_text(broken)
        with pytest.raises(UserError, match=r"state\.json cannot be read"):
            checkpoint.load(path)
    for field, wrong, told in (
        ("step", "1", "step is '1', and must be a whole number from 0 on"),
        ("step", True, "step is True"), ("num_prompts", 2.5, "num_prompts is 2.5"),
        ("weight_version", -1, "weight_version is -1"),
        ("first_row", None, "first_row is None"), ("settings", [], r"settings is \[\], and must be a table"),
        ("paths", "x", "paths is 'x'"), ("flow_digest", 3, "flow_digest is 3, and must be a text"),
        ("initial_accuracy", "high", "initial_accuracy is 'high', and must be a number or null"),
        ("files", {"a": 1}, "files is {'a': 1}, and must be names with hashes"), ("data", [1], "data is"),
    ):
        (path / "state.json").write_text(json.dumps(json.loads(text) | {field: wrong}))
        with pytest.raises(UserError, match=rf"state\.json cannot be read \({told}.*Choose another step"):
            checkpoint.load(path)
    (path / "state.json").write_text(json.dumps(json.loads(text) | {"sha256": "0"}))
    with pytest.raises(UserError, match="written by an older version"):
        checkpoint.load(path)
    (path / "state.json").unlink()
    with pytest.raises(UserError, match="not a complete checkpoint"):
        checkpoint.load(path)


def test_what_is_asked_for_must_be_there(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    for name, value, message in (
        ("model.c", torch.empty(7, 5), "lacks model.c"),
        ("model.a", torch.empty(7, 6), r"holds \(7, 5\) in torch.float32 as model.a"),
        ("model.a", torch.empty(7, 5, dtype=torch.bfloat16), r"holds \(7, 5\) in torch.float32 as model.a"),
    ):
        with pytest.raises(UserError, match=message):
            checkpoint.read(path, lambda _, n=name, v=value: {n: Part(v, tuple(v.shape), 0)})
