"""Tensors that ranks hold in parts, in one folder that any number of ranks reads: masters, moments, a reference policy.

Every rank writes its rows and reads its own, in the safetensors form of PyTorch's distributed checkpoint (DCP), so that
nothing is unpickled: `shard-00001-model-00001-of-00003.safetensors` is the first file of rank 0. A file holds rows of
many tensors and says where in the whole they belong. safetensors writes them (D95), DCP reads them. Our cut restarts at
sections (`model.shards`), which no DTensor placement describes, so DCP's planner is given chunks.

A `sealed` folder has `files.json` next to the tensors, with the SHA-256 of each file, and appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from jetrl.errors import UserError, disk_full
from jetrl.hashing import sha256_of_file
from jetrl.huggingface.write import sync
from jetrl.model.shards import Part
from jetrl.parallel.agreement import gather_from_ranks, on_rank0, together
from jetrl.parallel.world import ALONE, World
from jetrl.untrusted import json_file

FILE_BYTES = 1 << 30  # of tensors in a file; a rank's host memory while it writes is that of one file, or one tensor
_HASHING = 4  # files that a rank reads at once to hash them
_FILES = "files.json"
TENSORS = "tensors"
Stored = dict[str, tuple[tuple[int, ...], torch.dtype]]  # by name: shape and type of the whole


class _Reads(DefaultLoadPlanner):
    """Gives DCP the places that its read items fill."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__()
        self._parts = parts

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        place = self._parts[read_item.dest_index.fqn].value
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            place = place.narrow(dim, start, length)
        return place

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It was read into its place."""


def write(
    folder: Path, parts: Mapping[str, Part], world: World = ALONE, check: Callable[[], None] = lambda: None
) -> list[Path]:
    """Write the parts of all ranks to the new `folder`, synced to the disk; returns this rank's files. Not collective:
    call it on every rank.

    A tensor that is whole on every rank is written by the first. Values have one dimension at least. `check()` is
    called before each file, and may raise.
    """
    own = {name: part for name, part in parts.items() if part.value.numel() and (world.first or part.start)}
    folder.mkdir(exist_ok=True)
    files, written = _files(own), []
    for number, names in enumerate(files, 1):
        check()
        path = folder / f"shard-{world.rank + 1:05}-model-{number:05}-of-{len(files):05}.safetensors"
        offsets = {name: {"saved_offsets": list(_chunk(own[name]).offsets)} for name in names}
        form = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        save_file({name: own[name].value.contiguous().cpu() for name in names}, path, form)
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors makes files that only their owner reads
        sync(path)
        written.append(path)
    return written


class Reader:
    """A folder that any number of ranks has written. Verify its files first. Not collective."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, HuggingFaceStorageReader(str(folder))
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        self.stored: Stored = {
            name: (tuple(one.size), one.properties.dtype)
            for name, one in sorted(self._metadata.state_dict_metadata.items())
            if isinstance(one, TensorStorageMetadata)
        }

    def whole(self, name: str) -> Tensor:
        """One tensor, with the rows of all ranks, in host memory."""
        size, dtype = self.stored[name]
        value = torch.empty(size, dtype=dtype)
        self.read({name: Part(value, size, 0)})
        return value

    def read(self, parts: Mapping[str, Part]) -> None:
        """Fill the parts' values in place, this rank's rows only.

        Raises ValueError for a name, shape or type that the folder does not have.
        """
        items: list[ReadItem] = []
        for name, part in parts.items():
            held = self._metadata.state_dict_metadata.get(name)
            if not isinstance(held, TensorStorageMetadata):
                raise ValueError(f"{self.folder} lacks {name}")
            if (tuple(held.size), held.properties.dtype) != (part.size, part.value.dtype):
                found = f"{tuple(held.size)} in {held.properties.dtype}"
                raise ValueError(f"{self.folder} holds {found} as {name}, not {part.size} in {part.value.dtype}")
            new = create_read_items_for_chunk_list(name, held, [_chunk(part)]) if part.value.numel() else []
            if sum(prod(item.lengths) for item in new) != part.value.numel():
                raise ValueError(f"{self.folder} does not hold all of {name}")
            items += new
        self._reader.read_data(LoadPlan(items), _Reads(parts)).wait()


def read(folder: Path, parts: Mapping[str, Part]) -> None:
    """`Reader.read` of a folder."""
    Reader(folder).read(parts)


def stored(folder: Path) -> Stored:
    """What a folder holds."""
    return Reader(folder).stored


def whole(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, whole, in host memory: to look at."""
    parts = {name: Part(torch.empty(size, dtype=dtype), size, 0) for name, (size, dtype) in stored(folder).items()}
    read(folder, parts)
    return {name: part.value for name, part in parts.items()}


def _chunk(part: Part) -> ChunkStorageMetadata:
    offsets = (part.start, *(0 for _ in part.size[1:]))
    return ChunkStorageMetadata(torch.Size(offsets), part.value.shape)


def _files(parts: Mapping[str, Part]) -> list[list[str]]:
    """The names in each file, filled one after the other."""
    files: list[list[str]] = []
    room = 0
    for name, part in parts.items():
        if not files or (room < part.value.nbytes and room < FILE_BYTES):
            files.append([])
            room = FILE_BYTES
        files[-1].append(name)
        room -= part.value.nbytes
    return files


def hashes(folder: Path, world: World = ALONE) -> dict[str, str]:
    """SHA-256 of every safetensors file below `folder`, by path in it. Ranks divide the files. Collective."""
    def own() -> dict[str, str]:
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.safetensors"))
        return sha256_of(folder, names[world.rank :: world.size])

    return dict(sorted((name, digest) for part in gather_from_ranks(world, own) for name, digest in part.items()))


def verify(folder: Path, expected: Mapping[str, str], advice: str, world: World = ALONE) -> None:
    """UserError that names a file which is missing, has another hash, or is not `expected`. Ranks divide the files.

    Collective.
    """
    def own() -> None:
        found = {str(p.relative_to(folder)) for p in folder.rglob("*.safetensors") if p.is_file()}
        if extra := sorted(found - expected.keys()):
            raise UserError(f"{folder / extra[0]} is not one of the files that were written there. {advice}")
        names = sorted(expected)[world.rank :: world.size]
        for name in names:
            if name not in found:
                raise UserError(f"{folder / name} is missing: the file was removed or renamed. {advice}")
        for name, digest in sha256_of(folder, names).items():
            if digest != expected[name]:
                raise UserError(
                    f"{folder / name} does not have the recorded hash ({expected[name][:16]}...): the file was "
                    f"damaged or changed. {advice}"
                )

    gather_from_ranks(world, own)


@contextmanager
def told_if_full(what: object, folder: Path, advice: Callable[[], str]) -> Iterator[None]:
    """A full disk as a UserError about `what`, which is written in `folder`."""
    try:
        yield
    except Exception as error:  # tokenizers has no class of its own for it
        if not disk_full(error):
            raise
        free = shutil.disk_usage(folder).free / 2**20
        raise UserError(f"No disk space for {what}: {free:.0f} MiB are free. {advice()}") from error


def seal(folder: Path, parts: Mapping[str, Part], world: World = ALONE, mark: str = "") -> None:
    """Write `folder` whole or not at all, in the place of one that may be there. Collective.

    `mark` tells this writer from others that may write the same at the same time: then the first one's folder stays.
    """
    temporary = folder.with_name(f".writing_{folder.name}{mark}")
    full = partial(told_if_full, folder, folder.parent, lambda: "Free some space.")

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        with full():
            temporary.mkdir(parents=True)

    def own() -> None:
        with full():
            write(temporary / TENSORS, parts, world)

    def end() -> None:
        with full():
            (temporary / _FILES).write_text(json.dumps({"files": found}, indent=1) + "\n")
            sync(temporary / _FILES)
        if not mark:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not mark or not folder.is_dir():  # no other writer was faster
                raise
        sync(folder.parent)

    try:
        on_rank0(world, begin)
        gather_from_ranks(world, own)
        found = hashes(temporary, world)
        on_rank0(world, end)
    finally:
        if world.first:
            shutil.rmtree(temporary, ignore_errors=True)


def unseal(
    folder: Path, parts: Callable[[Stored], Mapping[str, Part]], advice: str, world: World = ALONE
) -> None:
    """Read a sealed folder into `parts(what it holds)`, after its hashes were verified. Collective.

    UserError with `advice` for one that is damaged.
    """
    def listed() -> dict[str, str]:
        try:
            files = json_file(folder / _FILES)["files"]
            return {str(name): str(digest) for name, digest in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{folder / _FILES} cannot be read ({error}): the folder is damaged. {advice}") from error

    verify(folder, on_rank0(world, listed), advice, world)
    with together(world):
        try:
            read(folder / TENSORS, parts(stored(folder / TENSORS)))
        except (ValueError, SafetensorError) as error:
            raise UserError(f"{folder} cannot be read ({error}). {advice}") from error


def sha256_of(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of files below `folder`, by name, in the order of `names`."""
    paths = [folder / name for name in names]
    try:
        with ThreadPoolExecutor(_HASHING) as pool:  # hashing lets other threads run
            found = list(pool.map(sha256_of_file, paths))
    except RuntimeError:  # Python ends, and starts no more threads: a program's last checkpoint is waited for then
        found = list(map(sha256_of_file, paths))
    return dict(zip(names, found, strict=True))
