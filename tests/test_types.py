"""Tokens and log-probs as read-only arrays: what is taken, what equals what, what travels, and spans of versions."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetrl.arrays import log_probs, token_ids
from jetrl.types import Completion, Segment, Trajectory

PROMPT = token_ids(range(40_000, 40_300))


@pytest.mark.parametrize(
    "ids",
    [(1, 2, 2**31 - 1), [1, 2, 2**31 - 1], np.array([1, 2, 2**31 - 1]), np.array([1, 2, 2**31 - 1], np.uint32),
     torch.tensor([1, 2, 2**31 - 1])],
    ids=["tuple", "list", "int64", "uint32", "tensor"],
)
def test_whatever_is_a_row_of_integers_becomes_the_same_read_only_array(ids: Any) -> None:
    found = token_ids(ids)
    assert found.dtype == np.int32 and found.tolist() == [1, 2, 2**31 - 1]
    assert token_ids(found) is found and found is not ids
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 7
    segment = Segment("environment", ids, "")
    assert segment.tokens.dtype == np.int32 and not segment.tokens.flags.writeable
    assert segment.logprobs.dtype == np.float32 and not len(segment.logprobs)
    with pytest.raises(dataclasses.FrozenInstanceError):
        segment.tokens = found  # type: ignore[misc]


def test_an_array_that_its_owner_can_change_is_copied() -> None:
    tokens, logprobs = np.array([1, 2], dtype=np.int32), np.array([-1.0, -2.0], dtype=np.float32)
    one = Completion(0, tokens, logprobs, "", "stop", 0, "")
    tokens[0], logprobs[0] = 9, -9.0
    assert one.tokens.tolist() == [1, 2] and one.logprobs.tolist() == [-1.0, -2.0]
    assert tokens.flags.writeable, "what was given stays the giver's"


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (token_ids, [1.0, 2.0], "a row of integers, got .*float64"),
        (token_ids, [True], "a row of integers, got .*bool"),
        (token_ids, "12", "a row of integers"),
        (token_ids, [[1, 2]], r"a row of integers, got an array of shape \(1, 2\)"),
        (token_ids, [[1], [2, 3]], "a row of integers"),
        (token_ids, [2**31], "2147483648: they must fit into 32 bits"),
        (token_ids, [-(2**31) - 1], "they must fit into 32 bits"),
        (token_ids, [2**70], "a row of integers, got .*object"),
        (token_ids, [None], "a row of integers, got .*object"),
        (log_probs, [0], "a row of floats, got .*int64"),
        (log_probs, ["-1"], "a row of floats"),
        (log_probs, -1.0, r"a row of floats, got an array of shape \(\)"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),  # an address differs between processes
)
def test_anything_else_is_refused(make: Any, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(values)
    name = "tokens" if make is token_ids else "logprobs"
    good = {"tokens": (1,), "logprobs": (-1.0,)} | {name: values}
    with pytest.raises(ValueError, match=message):
        Completion(0, text="", finish_reason="stop", weight_version=0, flow_digest="", **good)


def test_log_probs_are_rounded_to_float32_once_and_what_is_no_number_is_kept() -> None:
    values = [-0.1, -1e300, math.nan, -0.0]
    found = log_probs(values)
    assert found.dtype == np.float32 and found[0] == np.float32(-0.1)
    assert found[1] == -math.inf and np.isnan(found[2]) and math.copysign(1, found[3]) == -1


def segment(**changes: Any) -> Segment:
    given: dict[str, Any] = {
        "author": "policy", "tokens": (1, 2), "text": "x", "logprobs": (-0.5, math.nan), "reward": 0.5,
        "messages": ({"role": "tool", "content": "4"},), "opened": None, "spans": ((0, 3),),
        "branch": None,
    }
    assert given.keys() == {field.name for field in fields(Segment)}
    return Segment(**given | changes)


@pytest.mark.parametrize(
    "changes",
    [{"author": "environment"}, {"tokens": (1, 3)}, {"tokens": (1,)}, {"text": "y"}, {"logprobs": (-0.5, -0.5)},
     {"logprobs": (-0.5,)}, {"reward": None}, {"messages": ()}, {"opened": ""}, {"spans": ((0, 2), (1, 3))}],
    ids=str,
)
def test_segments_are_equal_where_all_fields_have_the_same_bits(changes: dict[str, Any]) -> None:
    one = segment()
    assert one == segment(tokens=np.array([1, 2]), logprobs=np.array([-0.5, math.nan])) and one != segment(**changes)
    assert hash(one) == hash(segment()), "also with messages, which are tables"
    assert one != "x" and one != Completion(0, (1, 2), (-0.5, math.nan), "x", "stop", 0, "")  # type: ignore[arg-type]
    trajectories = [Trajectory((part,), "stop", "flow") for part in (one, segment(), segment(**changes))]
    assert trajectories[0] == trajectories[1] != trajectories[2]
    assert len({*trajectories}) == 2 and trajectories[1] in trajectories[:1] and trajectories[2] not in trajectories[:2]


def test_equal_bits_are_told_from_equal_numbers() -> None:
    done = Completion(0, (1, 2), (0.0, math.nan), "x", "stop", 0, "")  # type: ignore[arg-type]
    assert done == replace(done) and done == copy.deepcopy(done) and hash(done) == hash(replace(done))
    assert done != replace(done, logprobs=(-0.0, math.nan)) and done != replace(done, weight_version=1)
    assert replace(done, text="y").tokens is done.tokens, "an array that nobody can change is shared"


def trajectory(tokens: Any, logprobs: Any) -> Trajectory:
    messages = ({"role": "tool", "content": "4"},)
    return Trajectory(
        (Segment("environment", PROMPT, "2 + 2", opened="<think>"),
         Segment("policy", tokens, "text", logprobs, 0.25, spans=((0, 3),)),
         Segment("environment", token_ids((1, 2)), "4", messages=messages)), "turns", "flow", "late",
    )


def sent(trajectories: dict[int, Trajectory]) -> dict[int, Trajectory]:
    return pickle.loads(pickle.dumps(trajectories, pickle.HIGHEST_PROTOCOL))


FLOATS = st.one_of(st.floats(-100, 0, width=32), st.sampled_from([-0.0, math.inf, -math.inf, math.nan]))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.data())
def test_what_arrives_at_another_rank_equals_what_was_sent(tokens: list[int], data: st.DataObject) -> None:
    """Values that are no numbers are kept for the packer to refuse."""
    logprobs = data.draw(st.lists(FLOATS, min_size=len(tokens), max_size=len(tokens)))
    one = trajectory(tokens, logprobs) if tokens else trajectory([], [])
    (found,) = sent({7: one}).values()
    assert found == one and hash(found) == hash(one) and sent({7: found}) == {7: one}
    turn = found.turns[0]
    assert turn.tokens.tolist() == tokens and turn.logprobs.tobytes() == np.array(logprobs, np.float32).tobytes()
    assert not turn.tokens.flags.writeable and not turn.logprobs.flags.writeable
    assert turn.tokens.dtype == np.int32 and turn.logprobs.dtype == np.float32
    assert (found.length, found.num_policy_tokens, found.weight_version) == (one.length, len(tokens), 3)
    assert found.segments[0].opened == "<think>" and found.segments[2].messages == one.segments[2].messages


def test_an_array_travels_as_one_buffer_and_a_shared_prompt_stays_one() -> None:
    logprobs = log_probs(np.random.default_rng(0).standard_normal(4096).astype(np.float32))
    group = {i: trajectory(np.full(4096, i), logprobs) for i in range(8)}
    data = pickle.dumps(group, pickle.HIGHEST_PROTOCOL)
    assert len(data) < 4 * (8 * 4096 + 4096 + 300) + 4096, "4 bytes a token and a log-prob, each array once"
    found = pickle.loads(data)
    scored = [replace(t, segments=(replace(t.segments[0], reward=1.0), *t.segments[1:])) for t in found.values()]
    assert len({id(t.segments[0].tokens) for t in scored}) == 1 == len({id(t.turns[0].logprobs) for t in scored})


def test_what_is_unpickled_passes_the_constructor() -> None:
    """A pickle that holds other arrays than a segment's is refused, and one that can be changed is copied."""
    make, values = segment().__reduce__()
    for bad in (np.array([1.5, 2.5]), np.array([[1, 2]]), np.array([{}, {}]), np.array([2**40, 1])):
        data = pickle.dumps(_Forged(make, (values[0], bad, *values[2:])))
        with pytest.raises(ValueError, match="token ids"):
            pickle.loads(data)
    writeable = pickle.loads(pickle.dumps(_Forged(make, (values[0], np.array([1, 2], np.int32), *values[2:]))))
    assert writeable == segment() and not writeable.tokens.flags.writeable
    place = [field.name for field in fields(Segment)].index("spans")
    with pytest.raises(ValueError, match="spans"):
        pickle.loads(pickle.dumps(_Forged(make, (*values[:place], ((1, 3),), *values[place + 1 :]))))


class _Forged:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def test_arrays_become_json_only_as_lists() -> None:
    one = segment(logprobs=(-0.5, -0.25))
    assert json.loads(json.dumps([one.tokens.tolist(), one.logprobs.tolist()])) == [[1, 2], [-0.5, -0.25]]
    with pytest.raises(TypeError):
        json.dumps(one.tokens)


@pytest.mark.parametrize(
    ("spans", "versions"),
    [
        ((), [-1] * 5), (((0, 4),), [4] * 5), (((0, 2), (3, 3)), [2, 2, 2, 3, 3]),
        (((0, 2), (1, 3), (4, 5)), [2, 3, 3, 3, 5]), (((0, 3), (2, 3)), [3] * 5),
    ],
    ids=str,
)
def test_each_token_knows_the_version_that_drew_it(spans: Any, versions: list[int]) -> None:
    one = segment(tokens=(7,) * 5, logprobs=(-1.0,) * 5, spans=spans)
    assert one.versions.tolist() == versions and one.versions.dtype == np.int64


@pytest.mark.parametrize("spans", [((1, 0),), ((0, 1), (0, 2)), ((0, 1), (3, 2), (2, 3)), ((0, 1), (5, 2)), ((-1, 0),)])
def test_spans_begin_at_the_first_token_and_none_is_empty(spans: Any) -> None:
    with pytest.raises(ValueError, match="spans .* of 5 tokens"):
        segment(tokens=(7,) * 5, logprobs=(-1.0,) * 5, spans=spans)


def test_a_trajectory_is_of_its_last_spans_version() -> None:
    opening = Segment("environment", PROMPT, "?")
    first, second = segment(spans=((0, 1), (1, 2))), segment(spans=((0, 3),))
    assert Trajectory((opening,), "error", "").weight_version is None
    assert Trajectory((opening, first), "stop", "").weight_version == 2
    talk = Trajectory((opening, first, opening, second, opening), "stop", "")
    assert talk.weight_version == 3 and talk.num_older(3) == 2 and talk.num_older(2) == 3
    assert Trajectory((opening, second), "stop", "").num_older(3) == 0
