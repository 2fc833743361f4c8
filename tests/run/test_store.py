"""What ranks write together: any number of them reads it, a killed rank leaves the last one intact, damage is named."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_ranks import ALL, NAMES, parts_of, save
from ranks import run_ranks
from tiny import files_of
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.model.master import parts_of as model_parts
from jetrl.model.sharding import digest, fill, shard_model
from jetrl.model.shards import Part, shard
from jetrl.model.transformer import Transformer
from jetrl.parallel.world import ALONE, World
from jetrl.precision.recipe import build_recipe
from jetrl.run.checkpoint import checkpoint, store
from jetrl.run.checkpoint.beside import HostCopy
from jetrl.spec import ModelSpec, RopeSpec

HERE = Path(__file__).parents[1]
SPEC = ModelSpec(  # o and down have one block of rows: fewer than ranks
    family="qwen2", vocab_size=300, hidden_size=40, intermediate_size=136, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(1e4), max_position=64, tie_embeddings=False, qkv_bias=True,
    qk_norm=False,
)
LIMIT = 15_000  # bytes of a file of the Hugging Face folder: more files than ranks


def made(world: World, seed: int) -> Transformer:
    with torch.device("meta"):
        model = Transformer(SPEC, build_recipe("fp8", 2))
    shard_model(model, world)
    fill(model, model.random_values(seed))
    return model


def bits(value: Tensor) -> bytes:
    return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


SIZES = (1, 2, 3, 9)


@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_ranks_reads_what_any_number_wrote(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without processes: neither writing nor reading asks others. Several files each, odd values, flat parts."""
    monkeypatch.setattr(store, "FILE_BYTES", 6000)
    g, sections = torch.Generator().manual_seed(0), (128, 40, 128, 300)  # 6 blocks: some of 9 ranks own nothing
    matrix = torch.randn(sum(sections), 7, generator=g)
    matrix[0, 0], matrix[-1, -1], matrix[300, 1] = float("nan"), -0.0, 1e-45
    flat, vector = (torch.arange(matrix.numel()) % 251).to(torch.uint8), torch.randn(9, generator=g).bfloat16()

    def parts(world: World, empty: bool) -> dict[str, Part]:
        cut = shard(sections, world)
        values = {"matrix": cut.own(matrix), "vector": vector, "count": torch.tensor([3]),
                  "flat": flat[7 * cut.start : 7 * (cut.start + cut.rows[world.rank])]}
        starts = {"matrix": cut.start, "flat": 7 * cut.start}
        sizes = {"matrix": tuple(matrix.shape), "flat": tuple(flat.shape)}
        if empty:
            values = {name: torch.zeros_like(value) for name, value in values.items()}
        return {n: Part(value, sizes.get(n, tuple(value.shape)), starts.get(n, 0)) for n, value in values.items()}

    for rank in range(size):
        store.write(tmp_path / "s", parts(World(rank, size), False), World(rank, size))
    assert len(list((tmp_path / "s").iterdir())) > size // 2
    for readers in SIZES:
        for rank in range(readers):
            places = parts(World(rank, readers), True)
            store.read(tmp_path / "s", places)
            for name, part in parts(World(rank, readers), False).items():
                assert bits(places[name].value) == bits(part.value), (readers, rank, name)
    assert {name: bits(value) for name, value in store.whole(tmp_path / "s").items()} == {
        "matrix": bits(matrix), "flat": bits(flat), "vector": bits(vector), "count": bits(torch.tensor([3]))
    }


class AsTheyAre(DefaultSavePlanner):
    """Gives torch's writer the whole value of a part."""

    def __init__(self, parts: dict[str, Part]) -> None:
        super().__init__()
        self.parts = parts

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.parts[write_item.index.fqn].value


def header(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, without the order of its keys, and what follows."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    found = json.loads(data[8 : 8 + size])
    found["__metadata__"]["DCP_SHARDING_INFO"] = json.loads(found["__metadata__"]["DCP_SHARDING_INFO"])
    return found, data[8 + size :]


def test_files_are_those_of_torchs_own_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, headers, bytes and modes, for rank 1 of two with three files; torch's writer is several times as slow."""
    monkeypatch.setattr(store, "FILE_BYTES", 6000)
    values = {
        "w": torch.randn(700, 2), "m": torch.randn(300, 3).bfloat16(), "c": torch.arange(5), "x": torch.randn(40, 40)
    }
    parts = {n: Part(v, (1000 + len(v), *v.shape[1:]), 1000) for n, v in values.items()}
    store.write(tmp_path / "ours", parts, World(1, 2))
    items = [
        WriteItem(
            MetadataIndex(name, torch.Size((1000, *(0 for _ in part.size[1:])))), WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size((1000, *(0 for _ in part.size[1:]))), part.value.shape),
                TensorProperties(dtype=part.value.dtype), torch.Size(part.size),
            ),
        )
        for name, part in parts.items()
    ]
    numbers = {"w": 1, "m": 2, "c": 2, "x": 3}
    writer = HuggingFaceStorageWriter(str(tmp_path / "torch's"), numbers, save_distributed=True)
    plan = writer.prepare_local_plan(SavePlan(items))
    (_, plan) = writer.prepare_global_plan([SavePlan([]), plan])
    writer.write_data(plan, AsTheyAre(parts)).wait()
    theirs = {file.name: header(file) for file in (tmp_path / "torch's").iterdir()}
    assert {file.name: header(file) for file in (tmp_path / "ours").iterdir()} == theirs and len(theirs) == 3
    (tmp_path / "plain").write_text("")
    modes = {file.stat().st_mode for file in (tmp_path / "ours").iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}


def written(world: World, folder: Path) -> dict[str, Any]:
    """A model by all ranks: Hugging Face folder, sealed folder and checkpoint; then errors that one rank meets."""
    model, found = made(world, 0), {"digest": digest(made(world, 0), world)}

    def write_model(target: Path, state: Path, parts: Any, check: Callable[[], None]) -> list[Path]:
        return hf.write_shards(
            target, SPEC, store.Reader(state).whole, hf.small_files(SPEC, generation_config={"top_k": 5}),
            world.rank, world.size, max_shard_bytes=LIMIT, check=check,
        )

    meta = checkpoint.Meta(1, 1, "flow", {}, {})
    path = checkpoint.save(folder, meta, model_parts(model), write_model, 2, world)
    store.seal(folder / "sealed", model_parts(model), world)
    other = made(world, 1)
    store.unseal(folder / "sealed", lambda _: model_parts(other), "Cure.", world)
    found["read"] = digest(other, world)
    found["verified"] = checkpoint.load(path, world).step

    parts = model_parts(model)
    writing = checkpoint.begin(
        folder, replace(meta, step=2), parts, write_model, 2, world, HostCopy().after(parts)
    )
    writing.release()
    for part in parts.values():
        part.value.zero_()
    found["beside"] = checkpoint.load(writing.finish(), world).step, writing.done()

    write = store.write
    if world.rank == 1:
        store.write = full
    for name, copy in (("full", None), ("full beside", HostCopy().after(parts))):
        writing = checkpoint.begin(folder, meta, parts, write_model, 2, world, copy)
        found[name] = error_of(writing.finish)
    store.write = write
    found["left"] = checkpoint.load(path, world).step
    found["rubbish"] = [p.name for p in folder.glob(".writing*")]
    world.barrier()
    if world.first:
        damage(sorted((folder / "sealed" / "tensors").iterdir())[-1])
    world.barrier()
    found["damaged"] = error_of(lambda: store.unseal(folder / "sealed", lambda _: model_parts(other), "Cure.", world))
    return found


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def error_of(act: Any) -> str:
    try:
        act()
    except UserError as error:
        return str(error)
    return ""


def test_ranks_write_what_one_process_writes(tmp_path: Path) -> None:
    size, model = 3, made(ALONE, 0)
    hf.save_model(tmp_path / "whole", SPEC, model.state_dict(), max_shard_bytes=LIMIT, generation_config={"top_k": 5})
    found = run_ranks(written, size, tmp_path / "ranks")
    assert all(one == found[0] for one in found)
    assert found[0]["digest"] == found[0]["read"] == digest(model, ALONE) and found[0]["verified"] == 1
    assert found[0]["full"].startswith("rank 1: No disk space for the checkpoint")
    assert all("step_000002 is intact" in found[0][name] for name in ("full", "full beside"))
    assert found[0]["full beside"].startswith("rank 1: No disk space for the checkpoint")
    assert found[0]["beside"] == (2, True)
    one, other = (files_of(tmp_path / "ranks" / f"step_00000{step}") for step in (1, 2))
    assert one.pop("state.json")["step"] + 1 == other.pop("state.json")["step"]
    assert one == other and one, "the same files beside the run"
    assert found[0]["left"] == 1 and found[0]["rubbish"] == []
    assert "does not have the recorded hash" in found[0]["damaged"] and found[0]["damaged"].endswith("Cure.")
    want, have = tmp_path / "whole", tmp_path / "ranks" / "step_000001" / "model"
    names = sorted(p.name for p in want.iterdir())
    assert sorted(p.name for p in have.iterdir()) == names and len(names) > 3 + 2 * size
    assert all((want / name).read_bytes() == (have / name).read_bytes() for name in names)
    saved = store.whole(tmp_path / "ranks" / "step_000001" / "state")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("limit", [500, 7000, 10**9])
def test_one_process_writes_the_same_folder_one_tensor_at_a_time(limit: int, tmp_path: Path) -> None:
    model = made(ALONE, 0)
    hf.save_model(tmp_path / "whole", SPEC, model.state_dict(), max_shard_bytes=limit)
    (tmp_path / "model").mkdir()
    hf.write_shards(tmp_path / "model", SPEC, model.get_parameter, hf.small_files(SPEC), max_shard_bytes=limit)
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "model" / file.name).read_bytes(), file.name
    assert len(list((tmp_path / "model").iterdir())) == len(list((tmp_path / "whole").iterdir()))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    root = tmp_path_factory.mktemp("killed")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    command = [sys.executable, str(HERE / "killed_ranks.py"), str(root)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ALL)
def test_a_killed_rank_leaves_the_last_checkpoint(name: str, killed: tuple[Path, dict[str, list[int]]]) -> None:
    root, ends = killed
    assert ends[name] == [ALL[name][0], -9], "the rank was not killed as meant"
    folder = root / name
    renamed = name.endswith("renamed, latest not")
    assert [p.name for p in checkpoint.complete(folder)] == ["step_000001", "step_000002"][: 1 + renamed]
    newest = checkpoint.newest(folder)
    assert newest == folder / "step_000001" and (folder / ".writing_step_000002").is_dir() != renamed
    for path in checkpoint.complete(folder):
        assert checkpoint.load(path).step == int(path.name[-1])
        places = {name: part._replace(value=torch.empty(part.size)) for name, part in parts_of(ALONE, 1).items()}
        checkpoint.read(path, lambda _, places=places: places)
        want = parts_of(ALONE, int(path.name[-1]))
        assert all(torch.equal(part.value, want[name].value) for name, part in places.items())
        checkpoint.verify_model(path)
        assert {p.name for p in (path / "model").iterdir()} == {"config.json", *NAMES}
    assert save(ALONE, folder, 2) == checkpoint.newest(folder), "the next writer is not stopped by what is left"
    assert not (folder / ".writing_step_000002").exists() and checkpoint.load(folder / "step_000002").step == 2


def test_of_two_writers_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"x": Part(torch.ones(3), (3,), 0)}
    hashes = store.hashes

    def other_is_faster(folder: Path, world: World) -> dict[str, str]:
        monkeypatch.setattr(store, "hashes", hashes)
        store.seal(tmp_path / "s", parts, mark="_other")
        return hashes(folder, world)

    monkeypatch.setattr(store, "hashes", other_is_faster)
    store.seal(tmp_path / "s", parts, mark="_own")
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    place = torch.empty(3)
    store.unseal(tmp_path / "s", lambda _: {"x": Part(place, (3,), 0)}, "Cure.")
    assert torch.equal(place, torch.ones(3))
    (tmp_path / "s" / "files.json").write_text("{}")
    with pytest.raises(UserError, match=r"files\.json cannot be read.*Cure\."):
        store.unseal(tmp_path / "s", lambda _: {}, "Cure.")
