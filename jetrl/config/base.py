"""`Section`, the base of every table of the config; `Problem`: what does not go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from jetrl.config.markers import NoEffectWhile, marks
from jetrl.config.toml import plain_value, toml_literal

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # of a run, of a study and its arms: folders are named after them
NAME_RULE = "must be letters, digits, '.', '_' and '-', beginning with a letter or digit"


def union_members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


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

    @classmethod
    def full_key(cls, key: str) -> str:
        """`key` of this section as users write it in an override."""
        return f"{cls.section}.{key}" if cls.section else key

    @classmethod
    def rules(cls) -> tuple[tuple[str, NoEffectWhile], ...]:
        """The markers that this section checks, each with its key, relative to the section: those with a switch in it.
        `Config` checks all others."""
        return _rules_of(cls)

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
        for key, rule in self.rules():
            value = self._switch(rule)
            if value in rule.off and self._differs(key):
                why = f"has no effect while {rule.switch} = {toml_literal(value)}; change that, or remove this key"
                problems.append(Problem(self.full_key(key), why, (rule.switch, *rule.instead), void=True))
        if problems:
            raise Contradiction(problems)
        return self

    def problems(self) -> Iterator[Problem | str]:
        """Contradictions between keys; those that nothing can give way to as lines `section.key: what and the cure`."""
        yield from ()

    def without_effect(self) -> set[str]:
        """The keys, relative to this section, that have no effect with the other values."""
        return {key for key, rule in self.rules() if self._switch(rule) in rule.off}

    def _switch(self, rule: NoEffectWhile) -> Any:
        return self._lookup(rule.switch.removeprefix(f"{self.section}."))

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


@cache
def _rules_of(section: type[Section]) -> tuple[tuple[str, NoEffectWhile], ...]:
    found: list[tuple[str, NoEffectWhile]] = []
    for name, field in section.model_fields.items():
        own, inner = marks(field, NoEffectWhile), field.annotation
        if not (isinstance(inner, type) and issubclass(inner, Section)):
            found += [(name, rule) for rule in own if section.section in ("", _home(rule))]
            continue
        found += [(f"{name}.{key}", rule) for key in inner.model_fields for rule in own]
        found += [
            (f"{name}.{key}", rule) for key, deeper in inner.model_fields.items()
            for rule in marks(deeper, NoEffectWhile) if _home(rule) != inner.section
        ]
    return tuple(found)


def _home(rule: NoEffectWhile) -> str:
    """The section of the switch."""
    return rule.switch.rpartition(".")[0]


def _problem(found: Problem | str) -> Problem:
    if isinstance(found, Problem):
        return found
    key, _, text = found.partition(": ")
    return Problem(key, text)
