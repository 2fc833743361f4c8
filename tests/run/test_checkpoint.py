"""Checkpoints: the same bits back, atomic writing, pruning, and damage that is seen."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from tolerances import assert_bitwise_equal
from torch import Tensor

from jetrl.cli import _message_of
from jetrl.errors import UserError
from jetrl.model.shards import Part
from jetrl.run.checkpoint import checkpoint, store
from jetrl.run.checkpoint.beside import HostCopy
from jetrl.run.checkpoint.checkpoint import Meta


def meta(step: int) -> Meta:
    return Meta(step=step, weight_version=step + 1, flow_digest="flow", settings={}, paths={}, initial_accuracy=0.25)


def tensors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.a": torch.randn(7, 5, generator=generator), "model.b": torch.randn(9, generator=generator).bfloat16(),
        "optimizer.0.step": torch.tensor([step]), "model.odd": torch.tensor([float("nan"), -0.0, 1e-45]),
        "model.view": torch.randn(6, 4, generator=generator).T,
    }


def write_model(folder: Path, state: Path, parts: Any, check: Callable[[], None]) -> list[Path]:
    (folder / "model.safetensors").write_bytes(b"weights")
    return [folder / "model.safetensors"]


def parts_of(step: int) -> dict[str, Part]:
    return {name: Part(value, tuple(value.shape), 0) for name, value in tensors(step).items()}


def write(folder: Path, step: int, keep: int = 2, background: bool = False) -> Path:
    """In the background, the tensors change as soon as they may."""
    parts = parts_of(step)
    copy = HostCopy().after(parts) if background else None
    writing = checkpoint.begin(folder, meta(step), parts, write_model, keep, copy=copy)
    writing.release()
    for part in parts.values() if background else ():
        part.value.zero_()
    return writing.finish()


both = pytest.mark.parametrize("background", [False, True])


@both
def test_what_was_saved_comes_back_to_the_bit(tmp_path: Path, background: bool) -> None:
    path = write(tmp_path / "c", 3, background=background)
    assert path.name == "step_000003" and (path / "model").is_dir()
    loaded = checkpoint.load(path)
    assert replace(loaded, files=None, digest=None) == meta(3)
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


class Killed(BaseException):
    """In place of SIGKILL: from the first on, nothing changes on the disk any more."""


CHANGES = ((checkpoint.os, "replace"), (checkpoint.shutil, "rmtree"), (checkpoint, "sync"))


def dies_at(call: int, patch: pytest.MonkeyPatch) -> None:
    """Die in call number `call` of what changes folders. One that was being removed has lost all but state.json."""
    calls = []

    def dying(whole: Callable[..., Any], name: str) -> Callable[..., Any]:
        def changed(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) < call:
                return whole(*args, **options)
            if len(calls) == call and name == "rmtree":
                for file in (p for p in args[0].rglob("*") if p.is_file() and p.name != "state.json"):
                    file.unlink()
            raise Killed

        return changed

    for module, name in CHANGES:
        patch.setattr(module, name, dying(getattr(module, name), name))


@both
@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_at_any_call_leaves_whole_checkpoints_and_no_rubbish_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, keep: int, background: bool
) -> None:
    """Step 3 is new, step 2 is written again."""
    for count in range(1, 100):
        folder = tmp_path / str(count)
        for earlier in (1, 2):
            write(folder, earlier)
        with monkeypatch.context() as patch:
            dies_at(count, patch)
            try:
                write(folder, step, keep, background)
                killed = False
            except Killed:
                killed = True
        whole = checkpoint.complete(folder)
        assert checkpoint.newest(folder) in whole and all(checkpoint.load(path) for path in whole)
        write(folder, 4, keep)
        assert {p.name for p in folder.iterdir()} == {"latest", *(p.name for p in checkpoint.complete(folder))}
        assert len(checkpoint.complete(folder)) == keep
        if not killed:
            assert count > 8, "each rename, sync and removal was cut off once"
            return
    raise AssertionError("it is never done")


def test_copies_are_the_users_and_steps_are_numbers(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        write(tmp_path, step)
    shutil.copytree(tmp_path / "step_999999", tmp_path / "step_999999_best")
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step_999999", "step_1000000"]
    write(tmp_path, 1_000_001, keep=1)
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step_1000001"]
    assert checkpoint.load(tmp_path / "step_999999_best").step == 999_999


def test_what_cannot_be_removed_is_told_and_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step_000001").rename(tmp_path / "elsewhere" / "step_000001")
    (tmp_path / "step_000001").symlink_to(tmp_path / "elsewhere" / "step_000001")
    write(tmp_path, 2, keep=1)  # the link goes, and not what it points to
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step_000002"]
    assert checkpoint.load(tmp_path / "elsewhere" / "step_000001").step == 1

    def denied(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied", "tokenizer.json")

    match = r"removed_step_000002 cannot be removed .*Permission denied"
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=match):
        patch.setattr(shutil, "rmtree", denied)
        write(tmp_path, 3, keep=1)
        (tmp_path / ".writing_step_000003").mkdir()
        write(tmp_path, 3, keep=1)  # its own name is taken, and that to which the one before goes
        write(tmp_path, 3, keep=1)
    assert checkpoint.newest(tmp_path) == tmp_path / "step_000003" == checkpoint.complete(tmp_path)[-1]
    assert checkpoint.load(tmp_path / "step_000003").step == 3
    write(tmp_path, 4, keep=1)
    assert {p.name for p in tmp_path.iterdir()} == {"elsewhere", "latest", "step_000004"}


def test_full_disks_of_libraries_without_oserror_are_told(tmp_path: Path) -> None:
    def full(folder: Path, state: Path, parts: Any, check: Callable[[], None]) -> list[Path]:
        raise Exception("No space left on device (os error 28)")  # as tokenizers says it

    with pytest.raises(UserError, match="MiB are free. There is no checkpoint yet"):
        checkpoint.save(tmp_path, meta(1), {}, full, 1)
    assert _message_of(SafetensorError("I/O error: File too large (os error 27)")) == (
        "cannot read or write: I/O error: File too large (os error 27). Check the path and its permissions."
    )
    for ours in (RuntimeError("anything else"), AssertionError("rank 1 said (os error 2)"), KeyError("(os error 28)")):
        assert _message_of(ours) is None


def test_a_changed_record_is_seen_and_an_older_one_has_no_hash(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    record = json.loads((path / "state.json").read_text())
    for changed in ({"num_prompts": 3}, {"step": 2}, {"settings": {"seed": 1}}, {"digest": "0" * 64}):
        (path / "state.json").write_text(json.dumps(record | changed))
        with pytest.raises(UserError, match=r"state\.json cannot be read \(it does not have the hash.*another step"):
            checkpoint.load(path)
    del record["digest"]
    (path / "state.json").write_text(json.dumps(record))
    assert replace(checkpoint.load(path), files=None) == meta(1)


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


def test_nobody_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors may change, and the older checkpoint counts, while files are written; then the new one is whole."""
    write(tmp_path, 1)
    disk, true = threading.Event(), store.write

    def slow(*args: Any) -> list[Path]:
        assert disk.wait(60)
        return true(*args)

    monkeypatch.setattr(store, "write", slow)
    parts = parts_of(2)
    writing = checkpoint.begin(tmp_path, meta(2), parts, write_model, 2, copy=HostCopy().after(parts))
    writing.release()
    assert not writing.done() and checkpoint.newest(tmp_path) == tmp_path / "step_000001"
    for part in parts.values():
        part.value.zero_()
    disk.set()
    assert writing.finish() == tmp_path / "step_000002" == checkpoint.newest(tmp_path) and writing.done()
    for name, value in tensors(2).items():
        assert_bitwise_equal(store.whole(tmp_path / "step_000002" / "state")[name], value, name)


def test_tensors_are_needed_until_they_are_copied(tmp_path: Path) -> None:
    copying, parts = threading.Event(), parts_of(1)

    def slow(parts: Any) -> Any:
        assert copying.wait(60)
        return HostCopy().after(parts)(parts)

    writing = checkpoint.begin(tmp_path, meta(1), parts, write_model, 2, copy=slow)
    waits = threading.Thread(target=writing.release)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    copying.set()
    waits.join(60)
    assert not waits.is_alive() and writing.finish() == tmp_path / "step_000001"

    writing = checkpoint.begin(tmp_path, meta(2), parts_of(2), write_model, 2, copy=lambda _: 1 / 0)
    writing.release()  # what fails to be copied holds up nothing
    with pytest.raises(ZeroDivisionError):
        writing.finish()
    assert {p.name for p in tmp_path.iterdir()} == {"step_000001", "latest"}


@both
@pytest.mark.parametrize("place", ["store.write", "checkpoint.sync", "model"])
def test_a_full_disk_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, background: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_model(folder: Path, state: Path, parts: Any, check: Callable[[], None]) -> list[Path]:
        full()
        return []

    for expected in ("There is no checkpoint yet, so a resumed run starts over", "step_000001 is intact"):
        with monkeypatch.context() as patch, pytest.raises(UserError, match=expected):
            patch.setattr(*{
                "store.write": (store, "write", full), "checkpoint.sync": (checkpoint, "sync", full),
                "model": (sys.modules[__name__], "write_model", full_model),
            }[place])
            write(tmp_path, 2, background=background)
        assert not list(tmp_path.glob(".writing*"))
        write(tmp_path, 1)


def test_damage_is_seen_and_the_file_named(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (state,) = (path / "state").iterdir()
    data = state.read_bytes()
    named = re.escape(str(state)) + " does not have the recorded hash"
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
        ("paths", "x", "paths is 'x'"), ("flow_digest", 3, "flow_digest is 3, and must be a string"),
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
