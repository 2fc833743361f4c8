"""Calling reward functions: the columns that they take, several at once, their weighted sum, the statistics of each.

A function that returns None for a completion does not count for it; a completion that no function scores is None in the
sum too. Coroutines of all functions run at the same time, on one event loop that lives as long as the program, so that
a client that a function keeps (its connections belong to a loop) works in every step.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import statistics
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jetrl.errors import UserError
from jetrl.tasks.calls import Call, Loop
from jetrl.tasks.importing import FILE_MODULE
from jetrl.tasks.user_code import code_in_thread, user_code

_FOREVER = math.inf  # a reward function takes as long as it takes

Scores = Sequence[float | None]  # of one function, a completion each


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """The sum of `weights[i] * functions[i](...)`; itself a reward function, of all columns. Names are distinct."""

    functions: tuple[Callable[..., Any], ...]
    weights: tuple[float, ...]
    names: tuple[str, ...]

    def __call__(self, **columns: list[Any]) -> list[float | None]:
        """For an environment that scores by itself. Raises what a function raises; results are not checked."""
        calls = call_all([(f, select_columns(f, columns)) for f in self.functions])
        for call in calls:
            if call.error is not None:
                raise call.error
        return self.summed([list(call.value) for call in calls])

    @property
    def gold_template(self) -> str:
        """The form of a right answer, from the first function that has one."""
        return next((str(f.gold_template) for f in self.functions if hasattr(f, "gold_template")), "{answer}")

    def gold_answer(self, answer: str) -> str:
        """What a row's answer is, according to the first function that says so."""
        read = next((f.gold_answer for f in self.functions if hasattr(f, "gold_answer")), str)
        return str(read(answer))

    def summed(self, scores: Sequence[Scores]) -> list[float | None]:
        """The weighted sum over the functions, completion by completion; None where no function scored it."""
        sums: list[float | None] = []
        for row in zip(*scores, strict=True):
            terms = [w * value for w, value in zip(self.weights, row, strict=True) if value is not None]
            sums.append(math.fsum(terms) if terms else None)
        return sums

    def best(self, scores: Sequence[Scores]) -> list[float | None]:
        """The largest weighted score of each completion: for a gold answer it must be positive."""
        rows = [
            [w * value for w, value in zip(self.weights, row, strict=True) if value is not None]
            for row in zip(*scores, strict=True)
        ]
        return [max(row) if row else None for row in rows]

    def stats(self, scores: Sequence[Scores]) -> dict[str, float]:
        """`reward/NAME/mean` and `/std` (n - 1; 0 for one value) of each function, without its weight, over what it
        scored. A function that scored nothing has none."""
        found = {}
        for name, own in zip(self.names, scores, strict=True):
            if values := [value for value in own if value is not None]:
                found[f"reward/{name}/mean"] = math.fsum(values) / len(values)
                found[f"reward/{name}/std"] = statistics.stdev(values) if len(values) > 1 else 0.0
        return found


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with `_2`, `_3`, ... appended to repeated ones."""
    taken: list[str] = []
    for name in names:
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name}_{number}"
        taken.append(free)
    return tuple(taken)


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


def select_columns(function: Callable[..., Any], columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns that the function names, or all if it takes `**columns`. Raises if one that it needs is missing."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        chosen = dict(columns)
    else:
        chosen = {p.name: columns[p.name] for p in parameters if p.name in columns}
    missing = [
        p.name for p in parameters
        if p.name not in columns and p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing:
        raise UserError(
            f"Reward function {reward_name(function)} needs {', '.join(missing)}, but the problems have only: "
            f"{', '.join(columns)}. Rename its parameters or add the columns to the data."
        )
    return chosen
