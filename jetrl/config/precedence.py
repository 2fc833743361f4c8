"""Which setting gives way: the command line wins over the file, and what it makes void there is dropped with a note.

Two settings that contradict each other on one level are refused, with two exceptions: a file that states a switch as
off and keeps what depends on it, as an edited copy does; and overrides that do so with what changes no bit of a run,
such as the place of a cache, as a script does that always says where things go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from jetrl.config.base import Contradiction, Problem
from jetrl.config.keys import changes_no_bit, marked
from jetrl.config.markers import GoesWith, PartOf
from jetrl.config.toml import toml_literal
from jetrl.presets import PRESETS

NOWHERE, FILE, LINE = range(3)  # where a key is stated; the higher wins

_LONGEST = 60  # characters of a value in a note
_BY_ALGO = {"overlong_buffer_len"}.union(*(preset.values for preset in PRESETS.values()))


class Statements:
    """The tables of a file with the overrides in them, and who stated what. `give_way` changes the tables in place."""

    def __init__(self, data: dict[str, Any], given: Mapping[str, Any]) -> None:
        self.data, self.notes = data, list[str]()
        self._given = set(given)
        self._dropped: dict[str, int] = {}  # by key, the level of what it gave way to

    def give_way(self, error: ValidationError) -> bool:
        """Drop what has to give way to a statement of a higher level; whether there was anything."""
        found = False
        for problem in contradictions(error):
            pairs = [(problem.key, problem.because)]
            if problem.either:
                pairs.append((problem.because[0], (problem.key,)))
            for key, because in pairs:
                level = max((self._level(other) for other in because), default=NOWHERE)
                least = FILE if problem.void else LINE
                own = self._own(key)
                both = own == level == LINE and problem.void and changes_no_bit(key)
                if both or (own == FILE and level >= least):
                    self._drop(key, level, self._given_now(because[0]) if problem.either else _reason(problem.text))
                    found = True
                    break
        return found

    def replace_sources(self, before: Mapping[str, Any]) -> None:
        """Drop revisions and subsets of what an override has replaced by something else; `before`: the file alone."""
        for key, part in marked(PartOf).items():
            source = part.whole
            old = _get(before, source)
            if source in self._given and old is not None and _get(self.data, source) not in (old, None, "none"):
                if self._own(key) == FILE:
                    self._drop(key, LINE, f"it was for {source} = {toml_literal(old)}")

    def _drop(self, key: str, level: int, reason: str) -> None:
        section, _, name = key.rpartition(".")
        place = "recipe" if self._own(key) == FILE else "overrides"
        value = (self.data[section] if section else self.data).pop(name)
        self._dropped[key] = level
        literal = toml_literal(value)
        shown = f"{key} = {literal}" if len(literal) <= _LONGEST and not isinstance(value, Mapping) else key
        self.notes.append(f"dropped {shown} (from the {place}): {reason}")
        for companion, mark in marked(GoesWith).items():
            if mark.other == key and self._own(companion) == FILE:
                self._drop(companion, level, f"it went with {key}")

    def _given_now(self, key: str) -> str:
        value = _get(self.data, key)
        return f"{key} is given" if isinstance(value, Mapping) else f"{key} = {toml_literal(value)} is given"

    def _own(self, key: str) -> int:
        """Where the key itself is stated."""
        if _get(self.data, key) is None:
            return NOWHERE
        parents = {key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1)}
        inside = any(given.startswith(f"{key}.") for given in self._given)
        return LINE if inside or self._given & {key, *parents} else FILE

    def _level(self, key: str) -> int:
        """Where it is said what this key is: itself, by `rl.algo`, or by what it was dropped for."""
        section, _, name = key.rpartition(".")
        own = max(self._own(key), LINE if key in self._given else NOWHERE, self._dropped.get(key, NOWHERE))
        if own == NOWHERE and section == "rl" and name in _BY_ALGO:
            return self._own("rl.algo")
        return own


def contradictions(error: ValidationError) -> Iterator[Problem]:
    """The problems of all sections in pydantic's error."""
    for item in error.errors(include_url=False):
        inner = item.get("ctx", {}).get("error")
        if isinstance(inner, Contradiction):
            yield from inner.problems


def _reason(text: str) -> str:
    """Why a key was dropped, from the text of its refusal: without the cure."""
    why = text.partition("; ")[0].partition(", got ")[0]
    return why.replace("has no effect while", "no effect with").replace("has no effect", "no effect", 1)


def _get(data: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, None if it is not there."""
    value: Any = data
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
