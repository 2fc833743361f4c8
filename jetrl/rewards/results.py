"""What one call of a reward function gave: a number for each completion, and what it logged besides.

A function logs in two ways. It returns verl's dicts, `{"score": 1.0, "acc": 1}`, or it names TRL's parameters
`log_metric` and `log_extra` and calls them. `trainer_state` is TRL's third one. Each call has a `Log` of its own, so
that calls next to a rollout do not mix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetrl.errors import UserError, shown
from jetrl.values import entries_of, value_of

MAX_REWARD = 1e30
# What jetrl itself writes as reward/NAME, and as reward/FUNCTION/NAME.
OWN_METRICS = frozenset((
    "mean", "std", "min", "max", "num_errors", "frac_unscored", "frac_zero_std", "num_groups_dropped",
    "overlong_penalty_mean", "kl_penalty_mean", "before_penalty_min", "before_penalty_max",
))
OWN_OF_FUNCTION = frozenset(("mean", "std"))

Number = float | None  # None: not scored, or not logged


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one function, one entry for each completion: `values` (None: not scored), the further numbers of its dicts by
    key, and the columns of `log_extra` with the dicts' other values. `logged`: name -> (sum, count) of `log_metric`,
    each call of which counts as often as its function's call had completions."""

    values: tuple[Number, ...]
    numbers: Mapping[str, tuple[Number, ...]] = field(default_factory=dict)
    extra: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    logged: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.values)

    def part(self, start: int, end: int) -> Scores:
        """The completions from `start` to `end`, without what the whole call logged."""
        def cut(columns: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
            return {key: column[start:end] for key, column in columns.items()}

        return Scores(self.values[start:end], cut(self.numbers), cut(self.extra))


def joined(parts: Sequence[Scores]) -> Scores:
    """The parts one after the other, as one call would have given them. A column that a part lacks is None there."""
    def columns(get: Callable[[Scores], Mapping[str, tuple[Any, ...]]]) -> dict[str, tuple[Any, ...]]:
        keys = dict.fromkeys(key for part in parts for key in get(part))
        return {
            key: tuple(v for part in parts for v in get(part).get(key, (None,) * len(part))) for key in keys
        }

    logged: dict[str, tuple[float, int]] = {}
    for name in dict.fromkeys(name for part in parts for name in part.logged):
        pairs = [part.logged[name] for part in parts if name in part.logged]
        logged[name] = math.fsum(total for total, _ in pairs), sum(count for _, count in pairs)
    values = tuple(value for part in parts for value in part.values)
    return Scores(values, columns(lambda p: p.numbers), columns(lambda p: p.extra), logged)


@dataclass(slots=True)
class TrainerState:
    """What `trainer_state` holds, as TRL names it: optimizer steps that are done, and those of the whole run."""

    global_step: int = 0
    max_steps: int = 0


_STATE = TrainerState()  # of the run in this process; environments and threads that score see it too


def tell_state(step: int, max_steps: int) -> None:
    """From now on `trainer_state` says so. Called while nothing is being scored."""
    _STATE.global_step, _STATE.max_steps = step, max_steps


class Misused(UserError):
    """A reward function called `log_metric` or `log_extra` wrongly; the traceback says where."""


class Log:
    """TRL's `log_metric` and `log_extra` for one call of the function `name` with `count` completions."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self._metrics: list[tuple[str, float]] = []
        self._extra: dict[str, tuple[Any, ...]] = {}

    def arguments(self) -> dict[str, Any]:
        """By parameter name; a function gets those that it names."""
        state = TrainerState(_STATE.global_step, _STATE.max_steps)
        return {"log_metric": self.log_metric, "log_extra": self.log_extra, "trainer_state": state}

    def log_metric(self, name: str, value: Any) -> None:
        """A number of the step, `reward/NAME` in metrics.jsonl; from several calls their mean over completions. A
        missing value (None, NaN, masked) is not logged: it says nothing of these completions."""
        _check_key(name, OWN_METRICS, f"Reward function {self.name}: log_metric")
        if (one := value_of(value)) is None:
            return
        number = plain_number(one)
        if number is None or math.isinf(number):
            raise Misused(f"Reward function {self.name}: log_metric({name!r}, ...) needs a finite number, got "
                          f"{shown(value)}; None or NaN, where there is none, is not logged.")
        if not math.isnan(number):
            self._metrics.append((name, number))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """A column with a value for each completion: `extra` in samples.jsonl."""
        _check_key(column, frozenset(), f"Reward function {self.name}: log_extra")
        listed = as_list(values)
        if listed is None or len(listed) != self.count:
            got = "no list" if listed is None else f"{len(listed)} values"
            raise Misused(
                f"Reward function {self.name}: log_extra({column!r}, ...) needs a list with a value for each of "
                f"{self.count} completions, got {got}."
            )
        self._extra[column] = tuple(map(plain, listed))

    def scores(self, values: Sequence[Number], dicts: Sequence[Mapping[str, Any]]) -> Scores:
        """What the call gave: its numbers, the rest of its dicts ({} where there was none), and what it logged."""
        numbers: dict[str, tuple[Number, ...]] = {}
        extra: dict[str, tuple[Any, ...]] = {}
        for key in dict.fromkeys(key for one in dicts for key in one):
            _check_key(key, OWN_OF_FUNCTION, f"Reward function {self.name}: a dict")
            column = [value_of(one.get(key)) for one in dicts]
            extra[key] = tuple(map(plain, column))
            found = [plain_number(value) for value in column]
            if all(n is not None or v is None for n, v in zip(found, column, strict=True)):
                numbers[key] = tuple(n if n is not None and math.isfinite(n) else None for n in found)
        metrics: dict[str, tuple[float, int]] = {}
        for name in dict.fromkeys(name for name, _ in self._metrics):
            own = [value for one, value in self._metrics if one == name]
            metrics[name] = math.fsum(own) * self.count, len(own) * self.count
        return Scores(tuple(values), numbers, {**extra, **self._extra}, metrics)


def split(value: Any) -> tuple[Any, Mapping[str, Any]]:
    """A score, None where it is missing, and what verl's dict holds besides; {} for a plain score. KeyError for a dict
    without a score."""
    value = value_of(value)
    if not isinstance(value, Mapping):
        return value, {}
    return value_of(value["score"]), {key: one for key, one in value.items() if key != "score"}


def as_list(value: Any) -> list[Any] | None:
    """The entries of a result that has an order and a length; None for all else (texts, dicts, sets, generators, a
    single number, also one of numpy or torch)."""
    if isinstance(value, (str, bytes, Mapping, set, frozenset)) or not hasattr(value, "__getitem__"):
        return None
    try:
        return entries_of(value) if len(value) >= 0 else None
    except (RuntimeError, TypeError, ValueError):  # a length that raises: single numbers of arrays, nested tensors
        return None


def plain_number(value: Any) -> float | None:
    """A number of Python, numpy, torch or Arrow as a float; None for anything else, and where it is missing."""
    value = value_of(value)
    try:
        one = value.item() if hasattr(value, "item") else value  # an array with one entry
        return float(one) if isinstance(one, (int, float)) else None
    except (ValueError, RuntimeError, TypeError, OverflowError):  # an array; an integer beyond a float
        return None


def plain(value: Any) -> Any:
    """The value as JSON has it: numbers, texts, lists, dicts, and null where it is missing; anything else, NaN too, as
    its text."""
    value = value_of(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, int):
        return value if abs(value) < 2**63 else str(value)
    number = plain_number(value)
    return number if number is not None and math.isfinite(number) else str(value)


def _check_key(key: Any, taken: frozenset[str], where: str) -> None:
    if not isinstance(key, str) or not key.strip():
        raise Misused(f"{where} needs a name that is a string, got {key!r}.")
    if key in taken:
        raise Misused(f"{where} uses the name {key!r}, which is one of jetrl's own metrics. Choose another.")
