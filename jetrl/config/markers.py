"""Markers: what is known of a key beside its type, default and meaning. They stand on its field, and nowhere else.

    max_draft_tokens: Annotated[int, NoEffectWhile("rollout.speculate", ("off",)), NoBits()] = Field(default=7, ...)

A marker on a section's field in `Config` holds for every key of the section. `keys.py` finds them: the check of a
recipe, the docs, resuming, digests, the phase that compiles and the dry run ask there. Keys are named in full.

Markers are not frozen, so that they have no hash: `typing` keeps an `Annotated` by its parts, and takes
`Literal["off", "on"]` for `Literal["on", "off"]`. With equal markers that can be hashed, a key would get the choices of
another one, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic.fields import FieldInfo

M = TypeVar("M")


def marks(field: FieldInfo, kind: type[M]) -> list[M]:
    """The markers of a kind on a field."""
    return [marker for marker in field.metadata if isinstance(marker, kind)]


@dataclass(slots=True)
class NoEffectWhile:
    """The key has no effect while the value of `switch` is one of `off`: any but its usual value is a mistake then.

    `instead`: keys that stand in for the switch; who states one of them has switched it off. Of several markers each
    counts.
    """

    switch: str
    off: tuple[Any, ...]
    instead: tuple[str, ...] = ()


@dataclass(slots=True)
class Needs:
    """While the key has one of `values`, `other` must have one of `allowed`: `why` says what would go wrong."""

    values: tuple[Any, ...]
    other: str
    allowed: tuple[Any, ...]
    why: str


@dataclass(slots=True)
class PartOf:
    """The key names a part or a version of what `whole` names. An override with another whole drops it."""

    whole: str


@dataclass(slots=True)
class GoesWith:
    """The key is dropped from a recipe with `other`: it says how that is meant."""

    other: str


@dataclass(slots=True)
class NoBits:
    """The key changes no bit of a run, only its time, its memory or what it checks. It may change when a run is
    resumed, and two runs that differ in it count as the same one."""


@dataclass(slots=True)
class MayChange:
    """The key may change when a run is resumed; where `where` is given, only while that key has the value `value`. Of
    several markers one is enough."""

    where: str | None = None
    value: Any = None


@dataclass(slots=True)
class Since:
    """The key came with a version. At the value `before` a run is what it was without the key, and so is its digest."""

    version: str
    before: Any


@dataclass(slots=True)
class Holds:
    """The value names something that is looked for from the current folder on: made absolute once, when a run is
    built. `place`: a folder that is written to. `file`: a file, or a name that is none (on the hub, say) where there is
    no such file. `data`: a file whose content must stay for a resume. `code`: path/to/file.py:name or module:name, or
    several; it is shown before others' code runs."""

    kind: Literal["place", "file", "data", "code"]


@dataclass(slots=True)
class WarmStart:
    """Whether the warm start reads the key, so that another value makes other warm-started weights."""

    reads: bool = True


@dataclass(slots=True)
class FirstWeights:
    """The key decides the weights that a warm start begins with, or the arithmetic of the machine."""


@dataclass(slots=True)
class Kernels:
    """The key decides which kernels a run compiles: by its value or, where `off` is given, by whether it is none of
    these."""

    off: tuple[Any, ...] = ()

    def decides(self, value: Any) -> Any:
        """What of a value counts."""
        return value not in self.off if self.off else value


@dataclass(slots=True)
class SavesMemory:
    """Another value makes a run need less memory of a GPU. Ways are tried from the cheapest on: up to a `cost` of 6
    they take time only, up to 10 they round more or run fewer sequences, above small updates are lost.

    `ways`: the better value for a worse one; or a function of the config that lists better values, mildest first.
    `unless`: a key and its value with which there is nothing to gain. `also`: what may change too, to save more.
    """

    cost: int
    ways: Mapping[Any, Any] | Callable[[Any], Sequence[Any]]
    unless: tuple[str, Any] | None = None
    also: tuple[tuple[str, Any], ...] = ()


def halves(value: int, times: int, least: int) -> list[int]:
    """`value` halved up to `times` times, not below `least`; only what is less than it."""
    return [n for n in dict.fromkeys(max(least, value >> i) for i in range(1, times + 1)) if n < value]


@dataclass(slots=True)
class Elsewhere:
    """What other systems call the key: `names` as in "verl: n; slime, SkyRL: n_samples_per_prompt". `note` follows the
    key in answers and tables. `same`: systems in which the key has the same name."""

    names: str = ""
    note: str = ""
    same: tuple[str, ...] = ()
