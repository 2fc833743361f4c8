"""Checkpoints that survive a kill at any moment, and resume to the same bits.

A checkpoint is a folder `checkpoints/step_000100`:

    model/            Hugging Face folder (BF16), for `eval`, `export` and other programs
    state.safetensors master weights and optimizer state, to the bit
    state.json        step, counters, flow digest, settings, SHA-256 of state.safetensors and of the model's weights;
                      its presence makes the folder complete

It is written under another name, synced and renamed; `latest` (a file with the folder's name) is replaced last.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetrl.errors import UserError, disk_full

_STATE, _META = "state.safetensors", "state.json"


@dataclass(frozen=True, slots=True)
class Meta:
    """The small part of a checkpoint. The hashes are filled in by `save`."""

    step: int
    weight_version: int
    flow_digest: str
    settings: dict[str, Any]  # by full key: those that must be the same in a resumed run
    paths: dict[str, Any]  # by full key: those of them that are paths, absolute
    initial_accuracy: float | None = None
    num_prompts: int = 0  # taken from the training stream so far
    sha256: str = ""
    model_sha256: dict[str, str] | None = None  # by file name


def save(
    folder: Path, meta: Meta, tensors: Mapping[str, Tensor], write_model: Callable[[Path], Any], keep: int
) -> Path:
    """Write `folder/step_NNNNNN` atomically, point `folder/latest` at it, and remove all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    final, temporary = folder / f"step_{meta.step:06d}", folder / f".writing_step_{meta.step:06d}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write_model(temporary / "model")
        save_file({k: t.contiguous() for k, t in tensors.items()}, temporary / _STATE)
        _sync(temporary / _STATE)
        weights = {p.name: _sha256(p) for p in sorted((temporary / "model").glob("*.safetensors"))}
        record = asdict(meta) | {"sha256": _sha256(temporary / _STATE), "model_sha256": weights}
        (temporary / _META).write_text(json.dumps(record, indent=1) + "\n")
        _sync(temporary / _META)
        if final.exists():  # a run resumed from an earlier step writes this one again
            shutil.rmtree(final)
        os.replace(temporary, final)
        _replace_text(folder / "latest", final.name)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if disk_full(error):
            free = shutil.disk_usage(folder).free / 2**20
            raise UserError(
                f"No disk space for the checkpoint {final}: {free:.0f} MiB are free. {left(folder)} Free some space, "
                "then continue with --resume."
            ) from error
        raise
    others = [p for p in complete(folder) if p != final]  # a run resumed from an earlier step may find later ones here
    for old in others[: max(0, len(others) - keep + 1)]:
        shutil.rmtree(old)
    return final


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    return sorted(p for p in folder.glob("step_*") if (p / _META).is_file())


def newest(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, else the newest complete one, else None."""
    pointer = folder / "latest"
    named = pointer.read_bytes().decode(errors="replace").strip() if pointer.is_file() else ""
    if named.startswith("step_") and (folder / named / _META).is_file():
        return folder / named
    found = complete(folder)
    return found[-1] if found else None


def left(folder: Path) -> str:
    """What a run that stops here can be resumed from, as a sentence."""
    last = newest(folder)
    return "There is no checkpoint yet, so a resumed run starts over." if last is None else f"{last} is intact."


def load(path: Path) -> tuple[Meta, dict[str, Tensor]]:
    """Read a checkpoint and verify its hash."""
    meta = _read_meta(path)
    if not (path / _STATE).is_file() or _sha256(path / _STATE) != meta.sha256:
        raise UserError(
            f"{path / _STATE} does not have the hash in {_META} ({meta.sha256[:16]}...): the file was damaged "
            "or changed. Resume from another step of the run (checkpoint.resume = PATH)."
        )
    try:
        return meta, load_file(path / _STATE)
    except SafetensorError as error:  # unreachable unless the hash was made of a broken file
        raise UserError(f"{path / _STATE} cannot be read: {error}.") from error


def _read_meta(path: Path) -> Meta:
    if not (path / _META).is_file():
        raise UserError(f"{path} is not a complete checkpoint: {_META} is missing. Choose another step or a new run.")
    try:
        record = json.loads((path / _META).read_text())
        if isinstance(record, dict) and "config_digest" in record:
            raise UserError(f"{path} was written by an older version of jetrl and cannot be resumed. Start a new run.")
        meta = Meta(**record)
        if not isinstance(meta.step, int) or not isinstance(meta.weight_version, int):
            raise ValueError("step and weight_version must be integers")
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        raise UserError(f"{path / _META} cannot be read ({error}). Choose another step of the run.") from error
    return meta


def verify_model(path: Path) -> None:
    """Check the hashes of a checkpoint's `model/` weights, for callers that read only these."""
    for name, expected in (_read_meta(path).model_sha256 or {}).items():
        file = path / "model" / name
        if not file.is_file() or _sha256(file) != expected:
            raise UserError(
                f"{file} does not have the hash in {_META}: it was damaged. Use another checkpoint."
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name("." + path.name)
    temporary.write_text(text + "\n")
    _sync(temporary)
    os.replace(temporary, path)
