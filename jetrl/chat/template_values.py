"""Whether a chat template has written the values of messages: judged by what it writes for others in their place.

A rendering with markers shows where each value comes out (`Skeleton`); a rendering of the data is compared with it,
which costs no rendering. Where that does not decide, one value is changed to another of the same shape (`changed`), so
that what a template decides by length or kind stays, and the two renderings are compared (`Difference`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]  # of a value in messages or keywords: keys and places
_NUMBER = 731_000_000  # markers of numbers count up from here
SURE = 16  # characters that do not stand somewhere else by chance
_MARKS = re.compile(r"jetrl-text-\d{6}-end|731\d{6}(?:\.5)?")


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths to all texts, numbers and empty containers."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    elif isinstance(value, list | tuple) and value:
        for i, each in enumerate(value):
            yield from leaves(each, (*path, i))
    else:
        yield path


def at_path(value: Any, path: Path) -> Any:
    """The value at a path."""
    for key in path:
        value = value[key]
    return value


def replaced(value: Any, path: Path, new: Any) -> Any:
    """The value with `new` at `path`."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, Mapping):
        return {k: replaced(v, tuple(rest), new) if k == key else v for k, v in value.items()}
    return [replaced(v, tuple(rest), new) if i == key else v for i, v in enumerate(value)]


def changed(value: Any, path: Path) -> Any:
    """The value with another leaf at `path`, of the same kind and length where it has one."""
    leaf = at_path(value, path)
    if isinstance(leaf, bool):
        new: Any = not leaf
    elif isinstance(leaf, int | float):
        new = leaf + 1
    else:
        new = _other_text(leaf) if isinstance(leaf, str) and leaf.strip() else f"{leaf or ''}jetrl"
    return replaced(value, path, new)


def _other_text(text: str) -> str:
    """Other letters and digits, or other signs where there are none; white space as it is."""
    if not any(c.isalnum() for c in text):
        return "".join(c if c.isspace() else "x" for c in text)
    return "".join(map(_other, text))


def _other(c: str) -> str:
    if c.isascii() and c.isalpha():
        return chr(ord(c) + 1) if c not in "zZ" else chr(ord(c) - 25)
    if c.isascii() and c.isdigit():
        return str((int(c) + 1) % 10)
    return c if not c.isalnum() else "\u00e9" if c != "\u00e9" else "\u00e8"


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a rendering differs from one with another value."""

    text: str
    begin: int
    end: int

    @classmethod
    def of(cls, text: str, other: str) -> Difference:
        """Of two renderings, as a span of the first."""
        begin = _shared(text, other)
        behind = _shared(text[begin:][::-1], other[begin:][::-1])
        return cls(text, begin, len(text) - behind)

    @property
    def empty(self) -> bool:
        """Nothing of the first one has gone: it did not hold the value."""
        return self.begin == self.end

    def find(self, value: str) -> int:
        """Where `value` stands at this place; -1: nowhere."""
        found = self.text.find(value, max(0, self.begin - len(value) + 1))
        return found if 0 <= found < self.end else -1


def _shared(one: str, two: str) -> int:
    """Characters that two texts share at their beginnings."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == two[:middle] else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class Marked:
    """Messages with markers for their texts and numbers, and the place of each value, (message, keys...), by marker."""

    messages: list[Mapping[str, Any]]
    places: Mapping[str, Path]


def marked(messages: Sequence[Mapping[str, Any]], policy: int | None) -> Marked:
    """All texts and numbers marked but roles, types, and the stand-in for the policy's turn."""
    places: dict[str, Path] = {}
    made: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        new: Any = message
        for path in leaves(message) if i != policy else ():
            value = at_path(message, path)
            if path[0] == "role" or path[-1] == "type" or isinstance(value, bool):
                continue
            number = len(places)
            if isinstance(value, str) and value.strip():
                mark: Any = f"jetrl-text-{number:06}-end"
            elif isinstance(value, int | float):
                mark = type(value)(_NUMBER + number) + (0.5 if isinstance(value, float) else 0)
            else:  # nothing that could be looked for
                continue
            places[str(mark)] = (i, *path)
            new = replaced(new, path, mark)
        made.append(new)
    return Marked(made, places)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """What a template writes around the values of messages of one kind: texts, and the places of values, in order."""

    parts: tuple[str | Path, ...]
    written: frozenset[Path]

    @classmethod
    def of(cls, text: str, places: Mapping[str, Path]) -> Skeleton:
        """From a rendering of marked messages."""
        parts: list[str | Path] = []
        done = 0
        for match in _MARKS.finditer(text):
            if match[0] in places:
                parts += [text[done : match.start()], places[match[0]]]
                done = match.end()
        return cls((*parts, text[done:]), frozenset(part for part in parts if not isinstance(part, str)))

    def sides(self, place: Path) -> tuple[str, str]:
        """What the template writes directly before and behind a value, as far as it takes to know the place."""
        at = self.parts.index(place)
        before, after = (side if isinstance(side, str) else "" for side in (self.parts[at - 1], self.parts[at + 1]))
        return before[-SURE:], after[:SURE]

    def shows(self, text: str, place: Path, value: Any) -> bool:
        """Whether `text` has the value, with both sides. A short one could stand there by chance: then False."""
        before, after = self.sides(place)
        framed = (before + form + after for form in forms(value, trims=True))
        return any(len(form) >= SURE and form in text for form in framed)

    def fits(self, text: str, messages: Sequence[Mapping[str, Any]], trims: bool) -> bool:
        """Whether `text` is this, with the values of `messages` in their places: as they are, as JSON or, with `trims`,
        without white space at their ends."""
        ends = {0}
        for part in self.parts:
            choices = (part,) if isinstance(part, str) else forms(at_path(messages, part), trims or len(part) > 2)
            ends = {end + len(choice) for end in ends for choice in choices if text.startswith(choice, end)}
        return len(text) in ends


def forms(value: Any, trims: bool) -> set[str]:
    """How a template may write a text or a number."""
    if not isinstance(value, str):
        return {str(value), json.dumps(value)}
    texts = {value, value.strip(), value.lstrip(), value.rstrip()} if trims else {value}
    return texts | {json.dumps(text, ensure_ascii=plain)[1:-1] for text in texts for plain in (False, True)}
