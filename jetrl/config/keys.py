"""Every key of a config with its markers: read by whatever must know something of each key.

Nothing outside of a key's field lists keys: a new one is its field, with the markers that fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic.fields import FieldInfo

from jetrl.config.base import Section
from jetrl.config.markers import MayChange, NoBits
from jetrl.config.sections import Config

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Key:
    """One key. `full`: its name as users write it in an override; `section`: "" for those outside of all sections."""

    full: str
    section: str
    name: str
    field: FieldInfo
    markers: tuple[Any, ...]  # of its field, then of its section

    def all(self, kind: type[M]) -> list[M]:
        """All markers of a kind."""
        return [marker for marker in self.markers if isinstance(marker, kind)]

    def get(self, kind: type[M]) -> M | None:
        """The marker of a kind; the field's own goes before that of the section."""
        return next(iter(self.all(kind)), None)


def sections() -> dict[str, type[Section]]:
    """The sections of a config by name, in order."""
    kinds = {name: field.annotation for name, field in Config.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}


@cache
def keys() -> Mapping[str, Key]:
    """All keys by their full name, in the order of the sections."""
    found = []
    for name, field in Config.model_fields.items():
        section = sections().get(name)
        if section is None:
            found.append(Key(name, "", name, field, tuple(field.metadata)))
            continue
        for inner, own in section.model_fields.items():
            found.append(Key(f"{name}.{inner}", name, inner, own, (*own.metadata, *field.metadata)))
    return {key.full: key for key in found}


def key_of(name: str) -> Key | None:
    """The key of a full name, which may go on inside of the key's table: `task.params.digits` is of task.params."""
    parts = name.split(".")
    return keys().get(".".join(parts[:2])) or keys().get(parts[0])


def marked(kind: type[M]) -> dict[str, M]:
    """The keys that have a marker of this kind, by full name, with the marker."""
    found = {full: key.get(kind) for full, key in keys().items()}
    return {full: marker for full, marker in found.items() if marker is not None}


def value_of(config: Config, full: str) -> Any:
    """The value of a key."""
    section, _, name = full.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def changes_no_bit(name: str) -> bool:
    """Whether a setting, by its full name, may differ between a run and its resumption, whatever the others are."""
    key = key_of(name)
    return key is not None and (key.get(NoBits) is not None or any(m.where is None for m in key.all(MayChange)))


def may_change(name: str, config: Config) -> bool:
    """Whether a setting, by its full name, may differ between a run of this config and its resumption."""
    key = key_of(name)
    conditions = key.all(MayChange) if key is not None else ()
    return changes_no_bit(name) or any(m.where and value_of(config, m.where) == m.value for m in conditions)
