"""Hub names in a config are each pinned to one commit, so that a run stays on what it started with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jetrl.chat.tokenizer import BUILTIN_PREFIX
from jetrl.config import Config
from jetrl.config.teacher import is_url
from jetrl.errors import UserError
from jetrl.huggingface import hub
from jetrl.run.prepare import adapters_in
from jetrl.untrusted import json_file

# section, key of the name, key of its revision, kind of repository
_NAMES = (
    ("model", "path", "revision", "model"),
    ("teacher", "path", "revision", "model"),
    ("model", "tokenizer", "tokenizer_revision", "model"),
    ("task", "dataset", "dataset_revision", "dataset"),
    ("task", "eval_dataset", "eval_dataset_revision", "dataset"),
)
BASE = "model.base_revision"  # the key of a pin: the base of adapters is named in their folder


@dataclass(frozen=True, slots=True)
class Pin:
    """A hub name, the revision that the recipe asked for (None: main), and the commit that this was."""

    key: str
    name: str
    asked: str | None
    commit: str


def pinned(config: Config, before: Iterable[Pin] = ()) -> tuple[Config, list[Pin]]:
    """The config with a commit for each hub name, and the pins; a folder on disk stays as it is.

    `before` are the pins of the run that is resumed: what it asked for under the same name keeps its commit, even if a
    branch has moved on since.
    """
    kept = {(pin.key, pin.name, asked): pin for pin in before for asked in (pin.asked, pin.commit)}
    pins = []
    for section, key, revision_key, kind in _NAMES:
        table = getattr(config, section)
        name, asked = getattr(table, key), getattr(table, revision_key)
        if section == "teacher" and is_url(name):
            continue
        if name is None or name.startswith(BUILTIN_PREFIX) or hub.on_disk(name, asked, kind) is not None:
            continue
        if section == "teacher" and Path(name).parent == Path(config.output_dir):  # the hub may have such a name
            raise UserError(
                f"teacher.path = {name}: there is no such run yet. Train the teacher first, or name another one."
            )
        full = f"{section}.{key}"
        pin = kept.get((full, name, asked)) or Pin(full, name, asked, _commit(name, asked, kind))
        pins.append(pin)
        update = {revision_key: pin.commit}
        config = config.model_copy(update={section: getattr(config, section).model_copy(update=update)})
    found = adapters_in(config) if config.lora.rank is not None else None
    if found is not None and found.local_base() is None:
        asked = found.revision
        pin = kept.get((BASE, found.base, asked)) or Pin(BASE, found.base, asked, _commit(found.base, asked, "model"))
        pins.append(pin)
        config = config.model_copy(update={"model": config.model.model_copy(update={"base_revision": pin.commit})})
    return config, pins


def _commit(name: str, asked: str | None, kind: str) -> str:
    if hub.is_commit(asked):
        return str(asked)
    patterns, ignore = (hub.SMALL, ("*/*",)) if kind == "model" else (("README.md",), ())
    return hub.fetch(name, asked, kind, patterns, ignore).commit


def weights_to_come(config: Config) -> str:
    """For a pinned config: whether the weights of model, base and teacher are here, or what a run will download; empty
    for folders."""
    m, t = config.model, config.teacher
    found = adapters_in(config) if m.base_revision is not None else None
    base = None if found is None else found.base
    named = ((m.path, m.revision), (base, m.base_revision), (t.path, t.revision))
    told = (hub.weights_to_come(path, commit) for path, commit in named if path is not None and commit is not None)
    return "\n".join(filter(None, told))


def record(pins: Iterable[Pin]) -> dict[str, Any]:
    """What env.json says about the hub."""
    return {"hub": rows} if (rows := [asdict(pin) for pin in pins]) else {}


def pins_of(environment: Path) -> list[Pin]:
    """The pins of a run's env.json; none where it is missing or damaged, as it is only a record."""
    try:
        found = json_file(environment)
    except (OSError, ValueError):
        return []
    rows = found.get("hub") if isinstance(found, Mapping) else None
    keys = ("key", "name", "asked", "commit")
    rows = [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    rows = [row for row in rows if all(isinstance(row.get(key, 0), str | None) for key in keys)]
    return [Pin(*(row[key] for key in keys)) for row in rows]
