"""Calling reward functions: the columns that they take, several at once, their weighted sum.

A function that returns None for a completion does not count for it. A completion that no function with a weight scores
is None in the sum too: a weight of 0 means that a function is logged, and nothing else. Coroutines of all functions run
at the same time, on one event loop that lives as long as the program, so that a client that a function keeps (its
connections belong to a loop) works in every step.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jetrl.errors import UserError, defined_at, shown
from jetrl.rewards.results import MAX_REWARD, Log, as_list, plain_number, split
from jetrl.user_code.calls import Call, Loop
from jetrl.user_code.guard import code_in_thread, user_code
from jetrl.user_code.importing import FILE_MODULE

SUM = "reward"  # what `rl.signal` calls the weighted sum
_FOREVER = math.inf  # a reward function takes as long as it takes


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """The sum of `weights[i] * functions[i](...)`; itself a reward function, of all columns. Names are distinct."""

    functions: tuple[Callable[..., Any], ...]
    weights: tuple[float, ...]
    names: tuple[str, ...]

    def __call__(self, **columns: list[Any]) -> list[float | None]:
        """For an environment that scores by itself. Raises what a function raises, and a UserError where its result is
        not a score for each completion."""
        count = len(columns["completions"])
        logs = [Log(name, count) for name in self.names]
        calls = call_all([(f, select_columns(f, columns, log)) for f, log in zip(self.functions, logs, strict=True)])
        for call in calls:
            if call.error is not None:
                raise call.error
        rows = zip(self.functions, calls, strict=True)
        return self.summed([[_score(f, value) for value in checked_list(f, call, count)] for f, call in rows])

    @property
    def gold_template(self) -> str:
        """The form of a right answer, from the first function that has one."""
        return next((str(f.gold_template) for f in self.functions if hasattr(f, "gold_template")), "{answer}")

    def gold_answer(self, answer: str) -> str:
        """What a row's answer is, according to the first function that says so."""
        read = next((f.gold_answer for f in self.functions if hasattr(f, "gold_answer")), str)
        return str(read(answer))

    def summed(self, scores: Sequence[Sequence[float | None]]) -> list[float | None]:
        """The weighted sum over the functions, completion by completion; None where none with a weight scored it."""
        return [math.fsum(terms) if terms else None for terms in self._terms(scores)]

    def sizes(self, scores: Sequence[Sequence[float | None]]) -> list[float]:
        """The sum of the absolute values of what `summed` adds, completion by completion: its rounding is relative to
        this."""
        return [math.fsum(map(abs, terms)) for terms in self._terms(scores)]

    def best(self, scores: Sequence[Sequence[float | None]]) -> list[float | None]:
        """The largest weighted score of each completion: for a gold answer it must be positive."""
        return [max(terms) if terms else None for terms in self._terms(scores)]

    def _terms(self, scores: Sequence[Sequence[float | None]]) -> list[list[float]]:
        """Weight times score, of each completion, where there are both."""
        return [
            [self._term(i, value) for i, value in enumerate(row) if value is not None and self.weights[i] != 0]
            for row in zip(*scores, strict=True)
        ]

    def _term(self, place: int, value: float) -> float:
        if not abs(term := self.weights[place] * value) <= MAX_REWARD:
            raise UserError(
                f"task.reward_weights: {self.weights[place]:g}, the weight of {self.names[place]}, times its score "
                f"{value:g} is beyond 1e30. Choose a smaller weight."
            )
        return term


def _score(function: Callable[..., Any], value: Any) -> float | None:
    name = reward_name(function)
    return checked_number(split_score(value, name)[0], name)


def checked_list(function: Callable[..., Any], call: Call, count: int) -> list[Any]:
    """What the function returned for `count` completions, as a list; UserError where it is none of that length."""
    name = reward_name(function)
    if (found := as_list(call.value)) is None:
        raise UserError(
            f"Reward function {name} must return a list of numbers, got {type(call.value).__name__} "
            f"({shown(call.value)}). It needs one for each completion, in order."
        )
    if len(found) != count:
        raise UserError(f"Reward function {name} returned {len(found)} scores for {count} completions.")
    return found


def split_score(value: Any, name: str, where: str = "") -> tuple[Any, Mapping[str, Any]]:
    """`split`; UserError, with `where` (" for completion ..."), for a dict without a score."""
    try:
        return split(value)
    except KeyError:
        comma = "," if where else ""
        raise UserError(
            f"Reward function {name} returned a dict without 'score', {shown(value)}{comma}{where}. "
            "Its score must have this key."
        ) from None


def checked_number(value: Any, name: str, where: str = "") -> float | None:
    """A score as a number, None where it is None; UserError, with `where`, for anything else."""
    if value is None:
        return None
    if isinstance(value, int) and not -MAX_REWARD <= value <= MAX_REWARD:
        raise UserError(f"Reward function {name} returned an integer beyond 1e30{where}.")
    if (number := plain_number(value)) is None:
        comma = "," if where else ""
        raise UserError(
            f"Reward function {name} returned {shown(value)} ({type(value).__name__}), not a number{comma}{where}."
        )
    if not -MAX_REWARD <= number <= MAX_REWARD:  # NaN as well
        raise UserError(
            f"Reward function {name} returned {shown(number)}{where}. Return None where nothing can be scored."
        )
    return number


def functions_of(reward: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """The functions that a reward consists of."""
    return reward.functions if isinstance(reward, WeightedReward) else (reward,)


def names_of(reward: Callable[..., Any]) -> tuple[str, ...]:
    """Their names, as in metrics."""
    if isinstance(reward, WeightedReward):
        return reward.names
    return (reward_name(reward).rpartition(":")[2].rpartition(".")[2],)


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with `_2`, `_3`, ... appended to repeated ones. One called `reward` among others is `reward_1`:
    `rl.signal = "reward"` is their sum."""
    taken = [SUM] if len(names) > 1 else []
    whole = len(taken)
    for name in names:
        number, free = 0 if name == SUM else 1, name
        while free in taken:
            number += 1
            free = f"{name}_{number}"
        taken.append(free)
    return tuple(taken[whole:])


def call_all(calls: Sequence[tuple[Callable[..., Any], Mapping[str, Any]]]) -> list[Call]:
    """Each function with its arguments: its value, or what it raised, in order.

    Plain functions run here, one after the other; the coroutines of the others run together and are awaited. May be
    called from any thread.
    """
    over = []
    in_main = threading.current_thread() is threading.main_thread()
    guard = user_code if in_main else code_in_thread
    for function, arguments in calls:
        call = Call(lambda: None, _FOREVER)
        with call, guard(f"Reward function {reward_name(function)}"):
            call.value = function(**arguments)
        if call.error is not None and not isinstance(call.error, (Exception, SystemExit, GeneratorExit)):
            raise call.error  # Ctrl-C
        over.append(call)
    if waiting := [call for call in over if call.error is None and inspect.isawaitable(call.value)]:
        future = asyncio.run_coroutine_threadsafe(_await_all(waiting), _loop().events)
        try:
            with guard("An async reward function"):
                future.result()
        finally:
            future.cancel()  # Ctrl-C ends what still runs; a future that is done is not affected
    return over


async def _await_all(calls: Sequence[Call]) -> None:
    await asyncio.gather(*map(_await, calls))


async def _await(call: Call) -> None:
    pending = call.value
    with call:
        call.value = await pending


@functools.cache
def _loop() -> Loop:
    return Loop()


def reward_name(function: Callable[..., Any]) -> str:
    """How messages call the function: `module:function`, or the type of a callable object; several with "and"."""
    if isinstance(function, WeightedReward):
        return " and ".join(map(reward_name, function.functions))
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", None) or type(function).__module__  # None: made by exec
    file = getattr(sys.modules.get(module), "__file__", None) if module.startswith(FILE_MODULE) else None
    return f"{file or module}:{name}"


def select_columns(function: Callable[..., Any], columns: Mapping[str, list[Any]], log: Log) -> dict[str, Any]:
    """The columns that the function names, or all if it takes `**columns`; and of TRL's `log_metric`, `log_extra` and
    `trainer_state` those that it names, where the data has no such column. Raises if one that it needs is missing."""
    parameters = inspect.signature(function).parameters.values()
    chosen: dict[str, Any]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        chosen = dict(columns)
    else:
        chosen = {p.name: columns[p.name] for p in parameters if p.name in columns}
    ours, named = log.arguments(), {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    chosen |= {name: ours[name] for name in ours if name in named and name not in columns}
    missing = [
        p.name for p in parameters
        if p.name not in chosen and p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing:
        raise UserError(
            f"Reward function {reward_name(function)}{defined_at(function)} needs {', '.join(missing)}, but the "
            f"problems have only: {', '.join(columns)}. Rename its parameters or add the columns to the data."
        )
    return chosen
