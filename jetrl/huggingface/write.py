"""Writing Hugging Face folders: whole or not at all, in shards, the tokenizer with it."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from jetrl.errors import UserError
from jetrl.huggingface import provenance as trained
from jetrl.huggingface.config import hf_config
from jetrl.huggingface.files import GENERIC_TOKENIZERS, INDEX, SINGLE, TOKENIZER_FILES, read_json
from jetrl.model.names import stored_types, tensor_table, to_hf
from jetrl.phrases import some
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec

MAX_SHARD_BYTES = 5 * 10**9
MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors", INDEX, *TOKENIZER_FILES)


def save_model(
    folder: str | Path,
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    tokenizer: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    base_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    trained_with: Recipe | None = None,
) -> None:
    """Write a folder that transformers, vLLM and SGLang can load; it appears whole or not at all.

    `base_config` is the config.json that the model came from: its other keys (token ids, initializer_range) stay. The
    token ids of a model without one are the tokenizer's. `trained_with` is noted in the new one.
    """
    config = _config(spec, tokenizer, dtype, base_config, trained_with)
    types = stored_types(spec, dtype)
    tensors = {name: (tensor, types[name]) for name, tensor in to_hf(spec, state).items()}
    write_folder(folder, config, tensors, lambda target: _extras(target, tokenizer, generation_config), max_shard_bytes)


def small_files(
    spec: ModelSpec, *, tokenizer: Any = None, dtype: torch.dtype = torch.bfloat16,
    base_config: Mapping[str, Any] | None = None, generation_config: Mapping[str, Any] | None = None,
    trained_with: Recipe | None = None,
) -> dict[str, bytes]:
    """What `save_model` writes next to the tensors and their index, by path in the folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_json(folder / "config.json", _config(spec, tokenizer, dtype, base_config, trained_with))
        _extras(folder, tokenizer, generation_config)
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def write_shards(
    folder: Path, spec: ModelSpec, whole: Callable[[str], Tensor], small: Mapping[str, bytes], rank: int = 0,
    size: int = 1, *, dtype: torch.dtype = torch.bfloat16, max_shard_bytes: int = MAX_SHARD_BYTES,
    check: Callable[[], None] = lambda: None,
) -> list[Path]:
    """Fill the existing `folder` with this rank's part of what `save_model` writes: file i is rank i % size's, and the
    `small_files` and the index are the first one's. Its files of tensors. Not collective.

    `whole(our name)` gives a parameter with the rows of all ranks. Host memory is that of the file at hand. `check()`
    is called before each file, and may raise. Everything is synced to the disk.
    """
    table = tensor_table(spec)
    pieces_of = [piece for pieces in table.values() for piece in pieces]
    sizes = {piece.name: prod(piece.shape) * piece.stored(dtype).itemsize for piece in pieces_of}
    files = _layout(sizes, max_shard_bytes)
    if rank == 0:
        for name, content in small.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
            sync(folder / name)
        if _write_index(folder, files, sizes):
            sync(folder / INDEX)
    written = []
    for file, names in list(files.items())[rank::size]:
        check()
        held: dict[str, Tensor] = {}
        for ours, pieces in table.items():
            if not any(piece.name in names for piece in pieces):
                continue
            value = whole(ours)
            for piece, part in zip(pieces, value.split([piece.shape[0] for piece in pieces]), strict=True):
                if piece.name in names:
                    stored = part.to("cpu", piece.stored(dtype), copy=True)
                    held[piece.name] = stored.reshape(piece.shape).contiguous()
            del value, part
        _write_file(folder / file, held)
        written.append(folder / file)
    return written


def _config(
    spec: ModelSpec, tokenizer: Any, dtype: torch.dtype, base: Mapping[str, Any] | None, recipe: Recipe | None
) -> dict[str, Any]:
    config = hf_config(spec, base, dtype=str(dtype).removeprefix("torch."), tokenizer=tokenizer)
    if recipe is not None:
        config[trained.KEY] = trained.record(recipe)
    return config


def _extras(target: Path, tokenizer: Any, generation_config: Mapping[str, Any] | None) -> None:
    if tokenizer is not None:
        _save_tokenizer(tokenizer, target)
    if generation_config is not None:
        _write_json(target / "generation_config.json", generation_config)


def _save_tokenizer(tokenizer: Any, target: Path) -> None:
    tokenizer.save_pretrained(str(target))
    name_tokenizer_class(target)


def name_tokenizer_class(folder: Path) -> None:
    """Write the generic tokenizer class in tokenizer_config.json by the name that transformers 4 and 5 both know."""
    path = folder / "tokenizer_config.json"
    if path.is_file() and (config := read_json(path)).get("tokenizer_class") in GENERIC_TOKENIZERS:
        _write_json(path, config | {"tokenizer_class": GENERIC_TOKENIZERS[0]})


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[Tensor, torch.dtype]],
    extras: Callable[[Path], None],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json, tensors (cast to their dtypes) and `extras(folder)` to a temporary folder, then rename it."""
    folder = Path(folder).absolute()
    _require_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        _write_json(temporary / "config.json", config)
        _write_tensors(temporary, tensors, max_shard_bytes)
        extras(temporary)
        mode = (temporary / "config.json").stat().st_mode
        for path in temporary.iterdir():
            path.chmod(mode)
            sync(path)
        temporary.chmod(0o755)  # mkdtemp makes folders that only their owner reads
        if folder.exists():
            # Two renames: no folder can be renamed onto a filled one. A crash between them leaves both folders there.
            old = temporary.with_suffix(".old")
            folder.rename(old)
            temporary.rename(folder)
            shutil.rmtree(old)
        else:
            temporary.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # there is nothing left to remove after the rename


def _require_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; give the path of a new folder.")
    names = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in MODEL_FILES)]
    if foreign:
        raise UserError(
            f"{folder} holds {some(foreign)}: no part of a model folder, and writing would replace the whole folder. "
            "Give another path, or remove what is there."
        )


def _write_tensors(folder: Path, tensors: Mapping[str, tuple[Tensor, torch.dtype]], max_shard_bytes: int) -> None:
    sizes = {name: tensor.numel() * dtype.itemsize for name, (tensor, dtype) in tensors.items()}
    files = _layout(sizes, max_shard_bytes)
    for file, names in files.items():
        # A copy of one shard at a time: safetensors refuses views of one storage, which fused rows are.
        shard = {name: tensors[name][0].detach().to("cpu", tensors[name][1], copy=True).contiguous() for name in names}
        _write_file(folder / file, shard)
    _write_index(folder, files, sizes)


def _layout(sizes: Mapping[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """The tensors of each file: in order, until a file would grow beyond the limit."""
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    files = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(1, len(shards) + 1)]
    return dict(zip(files, shards, strict=True))


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a shard to the disk. safetensors makes files that only their owner reads; this one, all do."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync(path)


def _write_index(folder: Path, files: Mapping[str, list[str]], sizes: Mapping[str, int]) -> bool:
    """Whether there is one: a single file needs none."""
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        _write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    return len(files) > 1


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
