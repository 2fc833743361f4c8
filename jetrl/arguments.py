"""The arguments of the Python API, checked before anything runs: a mistake is a UserError with name, value and cure."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat, cast

from jetrl import errors
from jetrl.errors import UserError

LOWEST_TEMPERATURE = 1e-6  # below it, logits / temperature overflows FP32


def prompts_of(
    prompts: Any, encode: Callable[[str, Any], Sequence[int]], vocab_size: int
) -> list[tuple[int, ...]]:
    """Token ids of each prompt. A single text, or a single list of chat messages, is one prompt. `encode(name, prompt)`
    is called with a text or a list of messages."""
    if isinstance(prompts, str) or _messages(prompts):
        prompts = [prompts]
    if not _listed(prompts):
        raise UserError(f"prompts = {shown(prompts)}: give a string, or a list of strings or of lists of token ids.")
    return [_prompt(f"prompts[{i}]", p, encode, vocab_size) for i, p in enumerate(prompts)]


def _messages(prompt: Any) -> bool:
    """Whether this is a list of chat messages."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and all(isinstance(one, Mapping) for one in prompt)


def _prompt(name: str, prompt: Any, encode: Callable[[str, Any], Sequence[int]], vocab_size: int) -> tuple[int, ...]:
    if _messages(prompt):
        return tuple(encode(name, prompt))
    if not isinstance(prompt, str):
        if isinstance(prompt, int | float):
            raise UserError(
                f"{name} = {shown(prompt)}: a prompt is a string or a list of token ids. For a single prompt of ids, "
                "put its list into a list: [[1, 2, 3]]."
            )
        return token_ids(name, prompt, vocab_size)
    try:
        prompt.encode()
    except UnicodeError as error:  # half of a surrogate pair
        raise UserError(f"{name} = {shown(prompt)}: is not valid Unicode text ({error}). Decode it again.") from error
    return tuple(encode(name, prompt))


def token_ids(name: str, ids: Any, vocab_size: int) -> tuple[int, ...]:
    """A list (or 1-d array) of token ids that the model knows."""
    if isinstance(ids, str):
        raise UserError(f"{name} = {shown(ids)}: give token ids; policy.tokenizer.encode(text) makes them.")
    if not _listed(ids):
        raise UserError(f"{name} = {shown(ids)}: give a list of token ids, such as [1, 2, 3].")
    if isinstance(ids, list) and set(map(type, ids)) == {int} and 0 <= min(ids) and max(ids) < vocab_size:
        return tuple(ids)
    found = []
    for i, value in enumerate(ids):
        try:
            token = None if isinstance(value, bool) else operator.index(value)
        except TypeError:  # a text, a float, a list, a tensor of several numbers or of floats
            token = None
        if token is None:
            raise UserError(f"{name}[{i}] = {shown(value)}: a token id is a whole number.")
        if not 0 <= token < vocab_size:
            raise UserError(
                f"{name}[{i}] = {shown(token)}: the model knows ids from 0 to {vocab_size - 1}. Check that the "
                "ids come from the model's own tokenizer."
            )
        found.append(token)
    if not found:
        raise UserError(f"{name} is empty: give at least one token id.")
    return tuple(found)


def _listed(value: Any) -> bool:
    """Whether `value` can be iterated in order: a list, tuple, array or tensor with one dimension or more."""
    if isinstance(value, str | bytes | dict | set):
        return False
    ndim = getattr(value, "ndim", 1)
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and isinstance(ndim, int) and ndim > 0


def whole(name: str, value: Any, least: int, most: int | None = None, cure: str = "") -> int:
    """A whole number of at least `least`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        allowed = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
        raise UserError(f"{name} = {shown(value)}: must be {allowed}.{cure}")
    return number


def number(name: str, value: Any, holds: Callable[[float], bool], allowed: str) -> float:
    """A finite number for which `holds`."""
    try:
        found = None if isinstance(value, bool | str | bytes) else float(cast(SupportsFloat, value))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several numbers
        found = None
    if found is None or not math.isfinite(found) or not holds(found):
        raise UserError(f"{name} = {shown(value)}: must be {allowed}.")
    return found


def temperature_of(value: Any, greedy: bool) -> float:
    """A sampling temperature; 0 only if `greedy` decoding is allowed."""
    zero = "0 (greedy), or " if greedy else ""
    return number(
        "temperature", value, lambda t: t >= LOWEST_TEMPERATURE or (greedy and t == 0),
        f"{zero}a number of at least {LOWEST_TEMPERATURE:g}",
    )


def stops_of(stop: Any) -> tuple[str, ...]:
    """Strings that end a completion; a single string is one of them."""
    stops = [stop] if isinstance(stop, str) else stop
    if not _listed(stops) or not all(isinstance(one, str) and one for one in stops):
        raise UserError(f"stop = {shown(stop)}: must be a string, or a list of strings, none of them empty.")
    return tuple(stops)


def text(name: str, value: Any, cure: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise UserError(f"{name} = {shown(value)}: {cure}.")
    return value


def shown(value: Any) -> str:
    """A value in a message: its repr, cut if it is long."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of {value.bit_length()} bits"
    return errors.shown(value, 80)


def fits_header(key: str) -> bool:
    """Whether a header can carry a key: one word of printable ASCII characters."""
    return bool(key) and key.isascii() and key.isprintable() and " " not in key
