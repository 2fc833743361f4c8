"""`Section`, the base of every table of the config; `Rule` and `Problem`: what does not go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from jetrl.config.errors import union_members
from jetrl.config.toml import plain_value, toml_literal


@dataclass(frozen=True, slots=True)
class Rule:
    """`keys` have no effect while the value of `switch` is one of `off`: then any but their usual values are a mistake.

    `instead`: keys that stand in for the switch; who states one of them has switched it off. All are relative to the
    section that states the rule and may be dotted.
    """

    keys: tuple[str, ...]
    switch: str
    off: tuple[Any, ...]
    instead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """A contradiction: `key` (full) does not go with the keys `because`. `load_config` lets the key give way if
    somebody stated one of those later, on the command line.

    `text` says what is wrong and, after a semicolon, what to do. `void`: the key has no effect, so it also gives way
    within one file that states both. `either`: it may as well be the first of `because` that gives way.
    """

    key: str
    text: str
    because: tuple[str, ...] = ()
    void: bool = False
    either: bool = False

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


class Contradiction(ValueError):
    """All problems of a section."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


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
        problems = [_problem(found) for found in self.problems()]
        for rule in self.rules:
            value, switch = self._lookup(rule.switch), self.full_key(rule.switch)
            for key in rule.keys if value in rule.off else ():
                if self._differs(key):
                    why = f"has no effect while {switch} = {toml_literal(value)}; change that, or remove this key"
                    because = (switch, *map(self.full_key, rule.instead))
                    problems.append(Problem(self.full_key(key), why, because, void=True))
        if problems:
            raise Contradiction(problems)
        return self

    def problems(self) -> Iterator[Problem | str]:
        """Contradictions between keys; those that nothing can give way to as lines `section.key: what and the cure`."""
        yield from ()

    def without_effect(self) -> set[str]:
        """The keys, relative to this section, that have no effect with the other values."""
        return {key for rule in self.rules if self._lookup(rule.switch) in rule.off for key in rule.keys}

    def _lookup(self, key: str) -> Any:
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def usual(self, name: str) -> Any:
        """The value that a key of this section has if nobody gives it."""
        return type(self).model_fields[name].get_default(call_default_factory=True)

    def _differs(self, key: str) -> bool:
        """Whether the key has another value than it would have if nobody gave it: only then it says anything."""
        parent, _, name = key.rpartition(".")
        home: Section = self._lookup(parent) if parent else self
        return bool(getattr(home, name) != home.usual(name))


def _problem(found: Problem | str) -> Problem:
    if isinstance(found, Problem):
        return found
    key, _, text = found.partition(": ")
    return Problem(key, text)
