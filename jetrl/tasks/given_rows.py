"""Rows that hold their answer, for supervised fine-tuning: a whole conversation, or a prompt with its completion.

A conversation becomes a prompt, up to the assistant's first message, and a solution, from there on. An assistant's
message may have `weight` 0 or 1, as in OpenAI's format: 0 means that its turn is read, and not learned.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jetrl.chat.fields import Message, message_of
from jetrl.errors import UserError, shown
from jetrl.types import Problem
from jetrl.untrusted import json_value

LEARNED, TOOLS = "jetrl:learned", "jetrl:tools"  # of `Problem.extra`: which turns are; schemas


def messages_in(value: Sequence[Any], where: str, key: str, padded: bool) -> tuple[Message, ...]:
    """Chat messages with all their keys; UserError naming what is wrong."""
    messages = []
    for message in value:
        try:
            messages.append(message_of(message, padded=padded))
        except ValueError as error:
            raise UserError(f"{where}: column {key!r}: {error}, got {shown(message)}.") from error
    return tuple(messages)


def given_answer(
    row: Mapping[str, Any], where: str, column: str, prompt: str, padded: bool
) -> Problem | None:
    """The problem of a row with the conversation `column`, or with a `completion` beside its `prompt` column, as TRL
    has it. None for a row with a prompt and a solution. UserError for one without any answer, and for a conversation
    from which nothing can be learned.

    Of a prompt and a completion in chat messages, the prompt's turns are not learned.
    """
    if row.get(column) is not None:
        return _conversation(_listed(row[column], where, column, padded), where, column, row)
    completion = row.get("completion")
    if completion is None:
        if row.get("solution") is None:
            raise UserError(
                f"{where}: there is no answer to learn: the row has neither {column!r} nor 'completion' nor "
                f"'solution', but {', '.join(map(repr, row)) or 'nothing'}. Set task.messages_column to the column of "
                "conversations."
            )
        return None
    if prompt not in row:
        raise UserError(f"{where}: it has a completion, and no column {prompt!r}. Set task.prompt_column.")
    if isinstance(completion, str) and isinstance(row[prompt], str):
        return Problem(where, _text(row[prompt], where, prompt), "", _text(completion, where, "completion"))
    before = _listed(row[prompt], where, prompt, padded)
    read = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in before]
    return _conversation([*read, *_listed(completion, where, "completion", padded)], where, "completion", row)


def _text(value: str, where: str, column: str) -> str:
    if not value.strip():
        raise UserError(f"{where}: column {column!r} is empty. Remove the row, or write its text.")
    return value


def _listed(value: Any, where: str, column: str, padded: bool) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise UserError(f"{where}: column {column!r} must be a list of chat messages, got {shown(value)}.")
    return messages_in(value, where, column, padded)


def _conversation(messages: Sequence[Message], where: str, column: str, row: Mapping[str, Any]) -> Problem:
    """The conversation as prompt and solution, once it is known that something can be learned from it."""
    weights = _weights(messages, where, column)
    _check_turns(messages, where, column)
    for place, message in enumerate(messages):
        if weights.get(place) and message.keys() <= {"role", "content", "weight"} and not message["content"].strip():
            raise UserError(
                f"{where}: column {column!r}: message {place} is an empty turn of the assistant, from which only its "
                "end could be learned. Remove the row, write the turn, or give it \"weight\": 0."
            )
    if not any(weights.values()):
        raise UserError(f"{where}: column {column!r}: every turn of the assistant has weight 0. Remove the row.")
    bare = tuple({k: v for k, v in message.items() if k != "weight"} for message in messages)
    first = next(place for place, message in enumerate(bare) if message["role"] == "assistant")
    extra: dict[str, Any] = {LEARNED: tuple(weights.values())}
    if tools := _tools(row.get("tools"), where):
        extra[TOOLS] = tools
    return Problem(where, bare[:first], "", bare[first:], extra)


def _weights(messages: Sequence[Message], where: str, column: str) -> dict[int, bool]:
    """Whether each turn of the assistant is learned, by its place."""
    found = {}
    for place, message in enumerate(messages):
        weight, own = message.get("weight", 1), message["role"] == "assistant"
        if isinstance(weight, bool) or weight not in (0, 1) or ("weight" in message and not own):
            raise UserError(
                f"{where}: column {column!r}: message {place} of role {message['role']!r} has \"weight\": "
                f"{shown(weight)}. A weight is 0 or 1, and only for the assistant's messages."
            )
        if own:
            found[place] = bool(weight)
    return found


def _check_turns(messages: Sequence[Message], where: str, column: str) -> None:
    """The assistant answers another role each time, and has the last word."""
    own = [message["role"] == "assistant" for message in messages]
    if own[0] or not own[-1] or any(a and b for a, b in itertools.pairwise(own)):
        raise UserError(
            f"{where}: column {column!r}: another role must begin, the assistant must end, and it must not speak twice "
            f"in a row; the roles are {', '.join(m['role'] for m in messages)}. Change or remove the row."
        )


def _tools(value: Any, where: str) -> list[Any] | None:
    """The schemas of the row's tools, which data sets often hold as JSON text."""
    if isinstance(value, str):
        try:
            value = json_value(value)
        except ValueError as error:
            raise UserError(f"{where}: column 'tools' is a text that is not JSON ({error}).") from error
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise UserError(f"{where}: column 'tools' must be a list of JSON schemas, got {shown(value)}.")
    return value
