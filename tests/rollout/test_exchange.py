"""Trajectories that travel between ranks: what arrives is what was sent, and nothing is decoded that nobody reads."""

from __future__ import annotations

import math
import pickle
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetrl.rollout.exchange import Numbers, dumps
from jetrl.types import Segment, Trajectory

PROMPT = tuple(range(40_000, 40_300))


def sent(trajectories: dict[int, Trajectory]) -> dict[int, Trajectory]:
    return pickle.loads(dumps(trajectories))


def trajectory(tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Trajectory:
    messages = ({"role": "tool", "content": "4"},)
    return Trajectory(
        (Segment("environment", PROMPT, "2 + 2", opened="<think>"), Segment("policy", tokens, "text", logprobs, 0.25),
         Segment("environment", (1, 2), "4", messages=messages)), "turns", 3, "flow", "late",
    )


def test_every_field_of_a_segment_travels() -> None:
    """A field that is forgotten in `dumps` would be there on one rank alone, and gone on the others."""
    other = {"author": "policy", "tokens": (1,), "text": "x", "logprobs": (-0.5,), "reward": 0.5,
             "messages": ({"role": "tool", "content": "4"},), "opened": None}
    assert other.keys() == {field.name for field in fields(Segment)}
    segment = Segment(**other)  # type: ignore[arg-type]
    assert sent({0: Trajectory((segment,), "stop", 0, "")})[0].segments == (segment,)


FLOATS = st.one_of(st.floats(-100, 0, width=32), st.floats(-100, 0), st.just(-0.0))


@given(st.lists(st.integers(0, 2**33), max_size=20), st.data())
def test_what_arrives_equals_what_was_sent(tokens: list[int], data: st.DataObject) -> None:
    logprobs = data.draw(st.lists(FLOATS, min_size=len(tokens), max_size=len(tokens)))
    one = trajectory(tuple(tokens), tuple(logprobs))
    (found,) = sent({7: one}).values()
    assert found == one and one == found
    turn = found.turns[0]
    assert [math.copysign(1, x) for x in turn.logprobs] == [math.copysign(1, x) for x in logprobs]
    assert all(type(t) is int for t in turn.tokens) and all(type(x) is float for x in turn.logprobs)
    assert (found.length, found.num_policy_tokens) == (one.length, one.num_policy_tokens)
    assert sent({7: found}) == {7: one}, "also from one that was received"


def test_values_that_are_no_numbers_are_kept_for_the_packer_to_refuse() -> None:
    found = sent({0: trajectory((1, 2), (math.inf, -math.inf))})[0]
    assert found.turns[0].logprobs == (math.inf, -math.inf)
    with pytest.raises(ValueError, match="none of the kinds"):
        Numbers.of((2**70,), "iq")


def test_a_shared_prompt_stays_one_and_is_decoded_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs = tuple(torch.randn(4096).tolist())
    group = {i: trajectory((i,) * 4096, logprobs) for i in range(8)}
    data = dumps(group)
    assert len(data) < 4 * (8 * 4096 + 4096 + 300) + 4096, "4 bytes a token and a log-prob, each object once"
    found = pickle.loads(data)
    decoded = []
    whole = Numbers._whole
    monkeypatch.setattr(Numbers, "_whole", lambda self: decoded.append(len(self)) or whole(self))
    assert [t.length for t in found.values()] == [4096 + 302] * 8 and not decoded
    scored = {i: replace(t, segments=(replace(t.segments[0], reward=1.0), *t.segments[1:])) for i, t in found.items()}
    assert not decoded
    prompts = [t.segments[0].tokens for t in scored.values()]
    assert all(p is prompts[0] for p in prompts) and {prompts[0]: 1}[PROMPT] == 1 and prompts[0][1:3] == PROMPT[1:3]
    assert set(decoded) == {300} and repr(prompts[0]) == repr(PROMPT) and prompts[0] != list(PROMPT)
