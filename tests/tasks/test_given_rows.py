"""Rows that hold their answer: which layouts are read, and what is wrong with one, in one message."""

from __future__ import annotations

from typing import Any

import pytest

from jetrl.errors import UserError
from jetrl.tasks.given_rows import LEARNED, given_answer
from jetrl.types import Problem

U, A = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def read(row: dict[str, Any]) -> Problem | None:
    return given_answer(row, "rows.jsonl:3", "messages", "prompt", False)


def test_layouts():
    whole = read({"messages": [U, A, U, A]})
    assert whole is not None and whole.prompt == (U,) and whole.solution == (A, U, A)
    assert whole.extra == {LEARNED: (True, True)}
    texts = read({"prompt": "p", "completion": "c"})
    assert texts is not None and (texts.prompt, texts.solution) == ("p", "c")
    in_messages = read({"prompt": [U, A, U], "completion": [A]})
    assert in_messages is not None and in_messages.solution == (A, U, A)
    assert in_messages.extra == {LEARNED: (False, True)}, "the prompt's turns are not learned"
    assert read({"prompt": "p", "solution": "s"}) is None, "read as a worked solution is"


@pytest.mark.parametrize(("row", "said"), [
    ({"text": "x"}, "no answer to learn: the row has neither 'messages' nor 'completion' nor 'solution', but 'text'"),
    ({"messages": "x"}, "column 'messages' must be a list of chat messages, got 'x'"),
    ({"messages": []}, "must be a list of chat messages"),
    ({"messages": [{"role": "user"}]}, "a chat message needs the strings 'role' and 'content'"),
    ({"messages": [U]}, "the assistant must end, and it must not speak twice in a row; the roles are user"),
    ({"messages": [A]}, "another role must begin"),
    ({"messages": [U, A, A]}, "the roles are user, assistant, assistant"),
    ({"messages": [U, A | {"content": " "}]}, "message 1 is an empty turn of the assistant"),
    ({"messages": [U, A | {"weight": 0}]}, "every turn of the assistant has weight 0"),
    ({"messages": [U, A | {"weight": 0.5}]}, 'message 1 of role \'assistant\' has "weight": 0.5'),
    ({"messages": [U | {"weight": 1}, A]}, "A weight is 0 or 1, and only for the assistant's messages"),
    ({"messages": [U, A], "tools": "{"}, "column 'tools' is a text that is not JSON"),
    ({"messages": [U, A], "tools": 3}, "column 'tools' must be a list of JSON schemas, got 3"),
    ({"completion": "c"}, "it has a completion, and no column 'prompt'"),
    ({"prompt": "p", "completion": ""}, "column 'completion' is empty"),
    ({"prompt": "p", "completion": [A]}, "column 'prompt' must be a list of chat messages, got 'p'"),
])
def test_a_row_from_which_nothing_can_be_learned_is_named(row: dict[str, Any], said: str):
    with pytest.raises(UserError) as error:
        read(row)
    assert str(error.value).startswith("rows.jsonl:3: ") and said in str(error.value)


def test_an_empty_turn_of_weight_0_is_no_mistake():
    found = read({"messages": [U, {"role": "assistant", "content": "", "weight": 0}, U, A]})
    assert found is not None and found.extra == {LEARNED: (False, True)}
