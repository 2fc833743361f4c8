"""The frozen base of a run with adapters: where it is read from, where it is kept, and whether it is the same one.

A base that comes from `model.path` as it is stays there. One that the run has made, by a warm start or from random
weights, is kept once beside the checkpoints, as a Hugging Face folder in BF16 (`checkpoints/base`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.huggingface.adapter import Adapters
from jetrl.huggingface.write import sync
from jetrl.model.adapter import publish_base
from jetrl.model.transformer import Transformer
from jetrl.parallel.agreement import on_rank0, together
from jetrl.parallel.world import World
from jetrl.run.checkpoint import store

FOLDER = "base"


def made_here(config: Config) -> bool:
    """Whether the run makes the base of its adapters itself."""
    return config.lora.rank is not None and (config.sft.steps > 0 or config.model.path is None)


def stays(config: Config) -> bool:
    """Whether it is read from `model.path` whenever a run begins or goes on: no checkpoint holds it."""
    return config.lora.rank is not None and not made_here(config)


def named(config: Config, checkpoints: Path, found: Adapters | None = None) -> tuple[str, str | None]:
    """What the base is called in a folder of adapters: a folder or a name on the hub, and its revision. `found`: the
    adapters that the run goes on from."""
    if made_here(config):
        return str(checkpoints.absolute() / FOLDER), None
    if found is not None:
        local = found.local_base()
        return (found.base, found.revision) if local is None else (str(local.absolute()), None)
    assert config.model.path is not None
    return config.model.path, config.model.revision


def keep(
    model: Transformer, config: Config, small: Mapping[str, bytes], checkpoints: Path, warm: Path | None, world: World
) -> None:
    """Write `checkpoints/base`, whole or not at all, in the place of one that may be there: from the `warm` start, or
    as the model was drawn. `small`: the model's other files. Collective; the first rank writes it."""
    def write() -> None:
        whole: Callable[[str], Tensor]
        if warm is not None:
            whole = store.Reader(warm / store.TENSORS).whole
        else:
            whole = dict(model.random_values(config.model.init_seed)).__getitem__
        _written(checkpoints, lambda folder: hf.write_shards(folder, model.spec, whole, small))

    on_rank0(world, write)


def copy(source: Path, checkpoints: Path, world: World) -> None:
    """Take over the base beside another run's checkpoints. Collective."""
    def take() -> None:
        _written(checkpoints, lambda folder: shutil.copytree(source / FOLDER, folder, dirs_exist_ok=True))

    on_rank0(world, take)


def _written(checkpoints: Path, fill: Callable[[Path], object]) -> None:
    temporary, final = checkpoints / f".writing_{FOLDER}", checkpoints / FOLDER
    shutil.rmtree(temporary, ignore_errors=True)
    with store.told_if_full(final, checkpoints, lambda: "Free some space."):
        temporary.mkdir(parents=True)
        fill(temporary)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        sync(checkpoints)


def read_back(model: Transformer, checkpoints: Path, world: World) -> None:
    """Publish the base that `keep` has written. Every rank reads all of it. Collective."""
    folder = checkpoints / FOLDER
    with together(world):
        if not folder.is_dir():
            raise UserError(f"{folder} is missing: it holds the base of the run's adapters. Start a new run.")
        publish_base(model, hf.parameters_of(folder, model.spec))


def check(model: Transformer, expected: str | None, path: Path, config: Config) -> None:
    """UserError if the checkpoint `path` says another base than the model has."""
    if model.base_digest != expected:
        where = path.parent / FOLDER if made_here(config) else config.model.path
        raise UserError(
            f"{path} holds adapters of another base: it has the digest {expected}, and {where} has "
            f"{model.base_digest}. Give back the base that the run began with, or start a new run."
        )
