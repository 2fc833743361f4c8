"""The frozen base of a run with adapters: where it is read from, where it is kept, and whether it is the same one.

A base that comes from `model.path` as it is stays there. One that the run has made, by a warm start or from random
weights, is kept once beside the checkpoints, as a Hugging Face folder in BF16 (`checkpoints/base`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from jetrl.config import Config
from jetrl.errors import UserError
from jetrl.huggingface import read as hf
from jetrl.huggingface.write import sync
from jetrl.model.adapter import base_digest, is_adapter
from jetrl.model.master import frozen_values
from jetrl.model.transformer import Transformer
from jetrl.parallel.agreement import on_rank0, together
from jetrl.parallel.world import World
from jetrl.run.checkpoint.store import told_if_full

FOLDER = "base"


def made_here(config: Config) -> bool:
    """Whether the run makes the base of its adapters itself."""
    return config.lora.rank is not None and (config.sft.steps > 0 or config.model.path is None)


def stays(config: Config) -> bool:
    """Whether it is read from `model.path` whenever a run begins or goes on: no checkpoint holds it."""
    return config.lora.rank is not None and not made_here(config)


def named(config: Config, checkpoints: Path) -> tuple[str, str | None]:
    """What the base is called in a folder of adapters: a folder or a name on the hub, and its revision."""
    if made_here(config):
        return str(checkpoints.absolute() / FOLDER), None
    assert config.model.path is not None
    return config.model.path, config.model.revision


def keep(model: Transformer, small: Mapping[str, bytes], checkpoints: Path, world: World) -> None:
    """Write `checkpoints/base`, whole or not at all, in the place of one that may be there. `small`: the model's other
    files. Collective; every rank holds the whole base, and the first writes it."""
    temporary, final = checkpoints / f".writing_{FOLDER}", checkpoints / FOLDER
    values = {name: value for name, value in frozen_values(model).items() if not is_adapter(name)}

    def write() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        with told_if_full(final, checkpoints, lambda: "Free some space."):
            temporary.mkdir(parents=True)
            hf.write_shards(temporary, model.spec, lambda name: values[name](), small)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(temporary, final)
            sync(checkpoints)

    on_rank0(world, write)


def read_back(model: Transformer, checkpoints: Path, world: World) -> None:
    """Publish the base that `keep` has written. Every rank reads all of it. Collective."""
    folder = checkpoints / FOLDER
    with together(world):
        if not folder.is_dir():
            raise UserError(f"{folder} is missing: it holds the base of the run's adapters. Start a new run.")
        model.publish_frozen(hf.parameters_of(folder, model.spec))


def check(model: Transformer, expected: str | None, path: Path, config: Config, world: World) -> str:
    """The digest of the base. UserError if the checkpoint `path` says another one. Collective."""
    def own() -> str:
        found = base_digest(model)
        if expected is not None and found != expected:
            where = path.parent / FOLDER if made_here(config) else config.model.path
            raise UserError(
                f"{path} holds adapters of another base: it has the digest {expected}, and {where} has {found}. "
                "Give back the base that the run began with, or start a new run."
            )
        return found

    return on_rank0(world, own)
