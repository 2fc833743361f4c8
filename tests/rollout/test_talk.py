"""A trajectory on its way: its rows, its room and its ends, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from jetrl.errors import UserError
from jetrl.rollout.requests import RolloutRequest
from jetrl.rollout.talk import Talk, spans_of
from jetrl.types import Completion, Problem, Prompt, Reply, SamplingParams

ASKED = RolloutRequest(SamplingParams(10), 1, 7, max_turns=2, max_turn_tokens=4)


def talk() -> Talk:
    return Talk(7, Prompt(0, Problem("p", "text", ""), ()), ASKED)


def turn(*tokens: int, spans: Any = ()) -> Completion:
    return Completion(7, tokens, [-1.0] * len(tokens), "said", "stop", 5, "flow", spans)


def test_turns_take_room_and_begin_with_all_that_was_said() -> None:
    one = talk()
    assert one.heard(Reply(7, (1, 2, 3), "prompt")) is None and one.room == 10
    assert (one.turn().tokens, one.turn().sampling.max_tokens, one.turn().max_conversation) == ((1, 2, 3), 4, 13)
    one.said(turn(4, 5, spans=((0, 4), (1, 5))))
    assert one.heard(Reply(7, (6, 7, 8, 9, 1), "more", 0.5)) is None and one.room == 3
    assert one.turn().tokens == (1, 2, 3, 4, 5, 6, 7, 8, 9, 1) and one.turn().sampling.max_tokens == 3
    one.said(turn(2))
    assert one.heard(Reply(7, (1,), "last", 1.0)) == ("turns", "")
    found = one.trajectory("turns")
    assert [s.author for s in found.segments] == ["environment", "policy", "environment", "policy"]
    assert [s.reward for s in found.turns] == [0.5, 1.0] and found.turns[0].spans == ((0, 4), (1, 5))
    assert (found.request_id, found.flow_digest, found.num_policy_tokens) == (7, "flow", 3)
    assert spans_of(turn(2)) == ((0, 5),)


@pytest.mark.parametrize(("reply", "end"), [
    (Reply(7, (), "", 1.0, done=True), ("stop", "")),
    (Reply(7, (1,) * 8, "too long"), ("length", "")),
    (Reply(7, failure="timeout", error="late"), ("timeout", "late")),
])
def test_how_it_ends_after_a_turn(reply: Reply, end: tuple[str, str]) -> None:
    one = talk()
    one.heard(Reply(7, (1, 2), "prompt"))
    one.said(turn(3, 4))
    assert one.heard(reply) == end


def test_how_it_ends_before_the_first_turn() -> None:
    one = talk()
    assert one.heard(Reply(7, (1,), "over", done=True)) == ("error", "it was over before the first turn")
    assert one.segments[0].tokens.tolist() == [1]
    with pytest.raises(UserError, match="the prompt 'nothing' has no tokens"):
        talk().heard(Reply(7, (), "nothing"))


def test_the_tokens_of_an_only_turn_are_not_copied() -> None:
    one = talk()
    one.heard(Reply(7, (1, 2), "prompt"))
    one.said(turn(3, 4), only=True)
    assert one.tokens == (1, 2) and one.trajectory("stop").length == 4
