"""Which keys hold paths. They become absolute once, when a run is built: the user's code may change the folder later.

config.toml keeps them as they were written, so that a run and its data can move together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetrl.config.keys import marked, value_of
from jetrl.config.markers import Holds
from jetrl.config.sections import Config
from jetrl.errors import UserError


def holding(*kinds: str) -> list[str]:
    """The full keys that hold a "place", a "file", "data" or "code": the kinds of `markers.Holds`."""
    return [key for key, mark in marked(Holds).items() if mark.kind in kinds]


def absolute_paths(config: Config) -> Config:
    """The config with every path absolute, seen from the current folder. Names that are not paths stay as they are."""
    changed: dict[str, Any] = {}
    for key, mark in marked(Holds).items():
        value = value_of(config, key)
        if value is None:
            continue
        section, _, name = key.rpartition(".")
        new = _absolute(value, mark.kind)
        if section:
            changed.setdefault(section, {})[name] = new
        else:
            changed[name] = new
    sections = {s: getattr(config, s).model_copy(update=v) for s, v in changed.items() if isinstance(v, dict)}
    return config.model_copy(update=changed | sections)


def in_own_folder(config: Config, recipe: str, overrides: Sequence[str]) -> Config:
    """For a run's own config.toml that is resumed: with the output folder that it is in, wherever that was moved or is
    reached from. UserError if the run folder has another name than the run."""
    folder = Path(recipe).absolute().parent
    own = Path(recipe).name == "config.toml" and (folder / "checkpoints").is_dir()
    said = {text.partition("=")[0].strip() for text in overrides}
    if own and folder.name != config.name and not said & {"output_dir", "name"}:
        raise UserError(
            f"{recipe} belongs to the run {config.name}, but its folder is called {folder.name}. To continue with what "
            f"the folder holds, rename it to {config.name} (elsewhere, if that name is taken). To continue the run in "
            f"{config.output_dir}, give output_dir={config.output_dir}."
        )
    here = (Path(config.output_dir) / config.name).absolute() == folder
    if not own or "output_dir" in said or folder.name != config.name or here:
        return config
    return config.model_copy(update={"output_dir": str(folder.parent)})


def path_values(config: Config) -> dict[str, Any]:
    """The values of the keys that may hold paths, by full key."""
    values = {key: value_of(config, key) for key in marked(Holds)}
    named = (key for key, value in values.items() if key.startswith("rl.") and ":" not in value)  # a part of jetrl's
    left_out = {key for key, value in values.items() if value is None}.union(named)
    return {key: value for key, value in values.items() if key not in left_out}


def _absolute(value: Any, kind: str) -> Any:
    if isinstance(value, Mapping):
        return {_absolute(k, kind): v for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_absolute(inner, kind) for inner in value)
    if kind == "code":
        place, colon, name = value.rpartition(":")
        return f"{_full(place)}:{name}" if colon and place.endswith(".py") and _exists(place) else value
    return _full(value) if kind == "place" or _exists(value) else value


def _exists(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except OSError:  # a name too long for the file system, say
        return False


def _full(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))
