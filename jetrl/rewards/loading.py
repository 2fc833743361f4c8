"""Reward functions by name: TRL's form as it is, verl's adapted, several with weights."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jetrl.config import TaskConfig
from jetrl.errors import UserError
from jetrl.rewards.calls import WeightedReward, distinct_names, reward_name
from jetrl.rewards.function import RewardFunction, completion_text
from jetrl.user_code.from_python import NOTHING, FromPython
from jetrl.user_code.importing import import_attribute

_VERL = {"data_source", "solution_str", "ground_truth"}  # the parameters by which verl's `compute_score` is recognized


def import_reward(config: TaskConfig, own: FromPython = NOTHING) -> RewardFunction | None:
    """What `task.reward` names: one function as it is, or several (or an async or verl's one) with their weights."""
    if config.reward is None:
        return None
    names = (config.reward,) if isinstance(config.reward, str) else config.reward
    functions = tuple(import_function(name, own=own) for name in names)
    plain = not is_async(functions[0]) and not getattr(functions[0], "gives_dicts", False)
    if len(functions) == 1 and config.reward_weights is None and plain:
        return functions[0]
    weights = config.reward_weights or (1.0,) * len(functions)
    return WeightedReward(functions, weights, distinct_names([name.rpartition(":")[2] for name in names]))


def import_function(name: str, key: str = "task.reward", own: FromPython = NOTHING) -> Callable[..., Any]:
    """The function of `module:function` or `path/to/file.py:function`. verl's `compute_score` is adapted."""
    function = import_attribute(name, key, "function", own=own)
    if not callable(function):
        raise UserError(f"{key}: {name} is of type {type(function).__name__}, not a function.")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # of a builtin
        raise UserError(
            f"{key}: Python cannot tell the parameters of {name} ({error}). Write a function "
            "f(completions, answer, **columns) that calls it."
        ) from error
    return _adapt_verl(function) if parameters.keys() >= _VERL else function


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine: an `async def`, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def needs_answer(reward: RewardFunction | None) -> bool:
    """Whether one of its functions names `answer`, without a default; then the data must have it."""
    functions = reward.functions if isinstance(reward, WeightedReward) else () if reward is None else (reward,)
    found = [inspect.signature(function).parameters.get("answer") for function in functions]
    return any(p is not None and p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in found)


def _adapt_verl(compute_score: Callable[..., Any]) -> Callable[..., Any]:
    """verl's form (one completion per call, and a number or {"score": number, ...} back) as a function over the batch.
    An async one runs for all completions at the same time."""

    def calls(
        completions: Sequence[Any], answer: Sequence[str], data_source: Sequence[Any] | None,
        extra_info: Sequence[Any] | None,
    ) -> list[Any]:
        return [
            compute_score(
                data_source=None if data_source is None else data_source[i],
                solution_str=completion_text(completion),
                ground_truth=gold, extra_info=None if extra_info is None else extra_info[i],
            )
            for i, (completion, gold) in enumerate(zip(completions, answer, strict=True))
        ]

    def reward(
        completions: Sequence[Any], answer: Sequence[str], data_source: Sequence[Any] | None = None,
        extra_info: Sequence[Any] | None = None,
    ) -> list[Any]:
        return calls(completions, answer, data_source, extra_info)

    async def async_reward(
        completions: Sequence[Any], answer: Sequence[str], data_source: Sequence[Any] | None = None,
        extra_info: Sequence[Any] | None = None,
    ) -> list[Any]:
        return list(await asyncio.gather(*calls(completions, answer, data_source, extra_info)))

    adapted = async_reward if is_async(compute_score) else reward
    setattr(adapted, "__signature__", inspect.signature(adapted))  # noqa: B010 -- its own, whatever it wraps
    setattr(adapted, "__wrapped__", compute_score)  # noqa: B010 -- messages name the user's line
    setattr(adapted, "gives_dicts", True)  # noqa: B010 -- an environment that calls it gets numbers
    adapted.__module__, adapted.__qualname__ = compute_score.__module__, reward_name(compute_score).rpartition(":")[2]
    return adapted
