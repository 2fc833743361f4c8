"""Parts of the objective that a user wrote: `rl.surrogate`, `rl.adv_estimator` and `rl.loss_agg` may each name a
function, as `module:function` or `path/to/file.py:function`. docs/ALGORITHMS.md has their signatures.

`run/own_parts.py` loads them and puts them here, by key and name; the rooms that need one ask for it. What they
return is checked in every call, here and, if it is a tensor, in `own_terms.py`. UserErrors name the key, the function
and, where it raised, the user's line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from jetrl.errors import UserError, as_user_error, defined_at, shown, told
from jetrl.types import Trajectory
from jetrl.values import entries_of, is_single, value_of

MAX_ADVANTAGE = float(np.finfo(np.float32).max)
KEYS = ("rl.surrogate", "rl.adv_estimator", "rl.loss_agg")

_functions: dict[tuple[str, str], Callable[..., Any]] = {}


def is_own(name: str) -> bool:
    """Whether a value of one of `KEYS` names a function of the user's."""
    return ":" in name


def put(key: str, name: str, function: Callable[..., Any]) -> None:
    """Make `function` what `key = name` means from now on."""
    _functions[key, name] = function


@dataclass(frozen=True, slots=True)
class Scored:
    """A trajectory as an estimator of the user's sees it.

    `score` is its reward with its KL penalties, where the KL is in the reward; `rewards` [P] are those of its policy
    tokens and add up to the score; `length` is P. `in_loss`: whether its advantage will be used (`rl.mask_truncated`).
    """

    trajectory: Trajectory
    score: float
    rewards: tuple[float, ...]
    in_loss: bool

    @property
    def length(self) -> int:
        return self.trajectory.num_policy_tokens


def advantages(
    name: str, groups: Sequence[Sequence[Scored]], config: Any
) -> list[list[float | tuple[float, ...]]]:
    """`rl.adv_estimator`: for each trajectory of each group one number, or one for each of its policy tokens."""
    key = "rl.adv_estimator"
    found = _listed(call(key, name, [list(group) for group in groups], config))
    if not _is_list(found) or len(found) != len(groups):
        refuse(key, name, f"returned {described(found)} for {len(groups)} groups; it must return one list for each")
    result = []
    for number, (values, group) in enumerate(zip(map(_listed, found), groups, strict=True)):
        if not _is_list(values) or len(values) != len(group):
            refuse(key, name, f"returned {described(values)} for the {len(group)} trajectories of group {number}")
        result.append([_advantage(key, name, v, one, config) for v, one in zip(values, group, strict=True)])
    return result


def _advantage(key: str, name: str, value: Any, one: Scored, config: Any) -> float | tuple[float, ...]:
    if _is_list(value := _listed(value)):
        if len(value) != one.length:
            refuse(key, name, f"returned {len(value)} advantages for a trajectory of {one.length} policy tokens")
        if config.ratio != "token":
            refuse(key, name, f'returned an advantage for each token, and rl.ratio = "{config.ratio}" needs one '
                               "number for the whole trajectory")
        return tuple(_number(key, name, each) for each in value)
    return _number(key, name, value)


def _number(key: str, name: str, value: Any) -> float:
    one = value_of(value)
    try:
        number = math.nan if one is None or isinstance(one, (str, bytes)) else float(one)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        what = described(one) if one is not None or value is None else f"a missing value ({type(value).__name__})"
        refuse(key, name, f"returned {what} as an advantage; it must be a finite number")
    if abs(number) > MAX_ADVANTAGE:  # a micro-batch holds it as float32
        refuse(key, name, f"returned {number:g} as an advantage; float32, in which the loss holds it, has no number "
                           f"beyond {MAX_ADVANTAGE:g}")
    return number


def _listed(value: Any) -> Any:
    """An array or tensor with entries as a list of them, None where they are masked; anything else as it is."""
    try:
        return value if is_single(value) or isinstance(value, (list, tuple)) else entries_of(value)
    except (RuntimeError, TypeError, ValueError):  # nested, or another tensor that has no entries
        return None


def _is_list(value: Any) -> bool:
    """Whether a value has entries in an order; a tensor or array of no dimension is a number."""
    return isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) > 0


def call(key: str, name: str, *given: Any) -> Any:
    """What the function returns; a UserError where it raises."""
    assert (key, name) in _functions, f"{key} = {name} was not loaded"
    try:
        return _functions[key, name](*given)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code
        raise as_user_error(error)(
            f"{key}: {name} raised {told(error, _functions[key, name])}. Fix it; --debug shows the whole "
            "traceback."
        ) from error


def described(value: Any) -> str:
    """A value in words, for a message."""
    if getattr(value, "is_nested", False):
        return "a nested tensor"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a tensor of shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{shown(value, 60)} (type {type(value).__name__})"


def refuse(key: str, name: str, what: str) -> NoReturn:
    """The UserError about what the function did, with the line where it is defined."""
    raise UserError(f"{key}: {name}{defined_at(_functions[key, name])} {what}.")
