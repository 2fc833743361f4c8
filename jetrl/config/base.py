"""`Section`, the base of every table of the config, and `Rule`, which refuses options without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from jetrl.config.errors import union_members
from jetrl.config.toml import plain_value, toml_literal


@dataclass(frozen=True, slots=True)
class Rule:
    """`keys` have no effect while the value of `switch` is one of `off`; then setting them is a mistake.

    Both are relative to the section that states the rule and may be dotted.
    """

    keys: tuple[str, ...]
    switch: str
    off: tuple[Any, ...]


class Section(BaseModel):
    """Frozen; strict types, no unknown keys, no options without effect."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    section: ClassVar[str]
    rules: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def full_key(cls, key: str) -> str:
        """`key` of this section as users write it in an override."""
        return f"{cls.section}.{key}" if cls.section else key

    @field_validator("*", mode="before")
    @classmethod
    def _from_toml(cls, value: Any, info: ValidationInfo) -> Any:
        """TOML has no null and no tuples: `"none"` means None where None is allowed, and lists become tuples."""
        assert info.field_name is not None
        members = union_members(cls.model_fields[info.field_name].annotation)
        if value == "none" and type(None) in members:
            return None
        kinds = {get_origin(member) for member in members}
        if isinstance(value, list) and tuple in kinds:
            return tuple(value)
        if isinstance(value, Mapping) and dict in kinds:
            return plain_value(value, cls.full_key(info.field_name))
        return value

    @model_validator(mode="after")
    def _check(self) -> Section:
        """Raises all problems of this section at once, one line each; every line starts with the full key."""
        problems = list(self.problems())
        for rule in self.rules:
            value = self._lookup(rule.switch)
            for key in rule.keys if value in rule.off else ():
                if self._was_set(key):
                    why = f"has no effect while {self.full_key(rule.switch)} = {toml_literal(value)}"
                    problems.append(f"{self.full_key(key)}: {why}; change that, or remove this key")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def problems(self) -> Iterator[str]:
        """Contradictions between keys, as lines `section.key: what is wrong and what to do`."""
        yield from ()

    def without_effect(self) -> set[str]:
        """The keys, relative to this section, that have no effect with the other values."""
        return {key for rule in self.rules if self._lookup(rule.switch) in rule.off for key in rule.keys}

    def _lookup(self, key: str) -> Any:
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def _was_set(self, key: str) -> bool:
        """Whether the user gave the key; None is the same as leaving it out, because TOML has no null."""
        parent, _, name = key.rpartition(".")
        home = self._lookup(parent) if parent else self
        return name in home.model_fields_set and getattr(home, name) is not None
