"""Reward functions by name, and the arguments that they take."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jetrl.errors import UserError
from jetrl.tasks.importing import FILE_MODULE, import_attribute
from jetrl.tasks.protocol import completion_text

_VERL = {"data_source", "solution_str", "ground_truth"}  # the parameters that tell verl's `compute_score`


def import_function(name: str, key: str = "task.reward") -> Callable[..., Any]:
    """The function of `module:function` or `path/to/file.py:function`. verl's `compute_score` is adapted."""
    function = import_attribute(name, key, "function")
    if not callable(function):
        raise UserError(f"{key}: {name} is of type {type(function).__name__}, not a function.")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{key}: {name} is an async function; wrap it in a plain one that runs it.")
    parameters = inspect.signature(function).parameters
    return _adapt_verl(function) if parameters.keys() >= _VERL else function


def _adapt_verl(compute_score: Callable[..., Any]) -> Callable[..., list[float]]:
    """verl's form, one completion a call and a number or {"score": number} back, as a function over the batch."""

    def reward(
        completions: Sequence[Any], answer: Sequence[str], data_source: Sequence[Any] | None = None,
        extra_info: Sequence[Any] | None = None,
    ) -> list[float]:
        scores = []
        for i, (completion, gold) in enumerate(zip(completions, answer, strict=True)):
            score = compute_score(
                data_source=None if data_source is None else data_source[i],
                solution_str=completion_text(completion),
                ground_truth=gold, extra_info=None if extra_info is None else extra_info[i],
            )
            scores.append(score["score"] if isinstance(score, Mapping) else score)
        return scores

    reward.__module__, reward.__qualname__ = compute_score.__module__, reward_name(compute_score).rpartition(":")[2]
    return reward


def reward_name(function: Callable[..., Any]) -> str:
    """How messages call the function: `module:function`, or the type of a callable object."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", type(function).__module__)
    file = getattr(sys.modules.get(module), "__file__", None) if module.startswith(FILE_MODULE) else None
    return f"{file or module}:{name}"


def select_columns(function: Callable[..., Any], columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns that the function names, or all where it takes `**columns`. Raises where one that it needs lacks."""
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
