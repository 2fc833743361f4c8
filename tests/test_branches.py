"""Trajectories whose history was changed: their segments in order, rows for the learner, ids of their draws."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl.branches import in_order, packed_length, rows_of, stream_of
from jetrl.errors import UserError
from jetrl.rl.advantage import advantages
from jetrl.rollout.requests import RolloutRequest
from jetrl.rollout.talk import Talk
from jetrl.train.packing import by_trajectory, denominators, fill, held, pack, with_rows
from jetrl.types import Group, Problem, Prompt, SamplingParams, Segment, Trajectory

PROMPT = Prompt(0, Problem("p", "", ""), ())
ASKED = RolloutRequest(SamplingParams(1000), 1, 0, 100)


def said(number: int, count: int, policy: bool) -> Segment:
    tokens = np.arange(100 * number, 100 * number + count, dtype=np.int32)
    if not policy:
        return Segment("environment", tokens, str(number))
    return Segment("policy", tokens, str(number), -(tokens + 1.0) / 64, spans=((0, 3),))


def grown(steps: list[tuple[int, int, int]]) -> Talk:
    """A conversation of so many turns: each follows a turn (-1: none), after so many tokens, and draws so many."""
    one = Talk(7, PROMPT, ASKED, forks=True)
    for number, (after, reply, drawn) in enumerate(steps):
        if number:
            one.go_on_from(min(after, one.num_turns - 1))
        for segment in (said(2 * number, reply, False), said(2 * number + 1, drawn, True)):
            one.append(segment, tuple(segment.tokens.tolist()))
        one.num_turns += 1
    return one


def trajectory(one: Talk) -> Trajectory:
    return Trajectory(one.in_order(), "stop", "flow", "", one.key)


STEPS = st.lists(st.tuples(st.integers(-1, 6), st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=9)


def test_rows_by_hand() -> None:
    """Turn 1 follows turn 0, turn 2 too, turn 3 goes on from turn 1, and turn 4 begins anew."""
    one = grown([(-1, 2, 1), (0, 1, 2), (0, 1, 1), (1, 1, 1), (-1, 3, 1)])
    found = trajectory(one)
    assert [s.text for s in found.segments] == ["0", "1", "2", "3", "6", "7", "4", "5", "8", "9"]
    rows = rows_of(found.segments)
    assert [[s.text for s in row.segments] for row in rows] == [list("012367"), list("0145"), list("89")]
    assert [row.own for row in rows] == [0, 2, 0] and rows[0].stream is None
    assert [s.branch.after for s in found.segments if s.branch] == [1, -1]
    assert [row.stream for row in rows[1:]] == one.branches and len({7, *one.branches}) == 3
    assert found.length == one.length == packed_length(found.segments) == 8 + 5 + 4
    assert found.num_policy_tokens == 6
    assert in_order([-1, 0, 1, 1, 2]) == [0, 1, 2, 4, 3]


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_every_segment_is_one_rows_own_behind_what_it_followed(steps: list[tuple[int, int, int]]) -> None:
    one = grown(steps)
    found = trajectory(one)
    rows = rows_of(found.segments)
    assert sorted(s.text for row in rows for s in row.segments[row.own :]) == sorted(s.text for s in one.segments)
    assert found.length == one.length == sum(len(s.tokens) for row in rows for s in row.segments)
    at = {s.text: i for i, s in enumerate(one.segments)}
    for row in rows:
        path = [at[s.text] for s in row.segments]
        assert one._parents[path[0]] == -1 and all(one._parents[b] == a for a, b in pairwise(path))
    assert one.tokens == tuple(t for s in rows_to(one) for t in s.tokens.tolist())
    assert len({row.stream for row in rows}) == len(rows)


def rows_to(one: Talk) -> tuple[Segment, ...]:
    """The row that ends with the last segment."""
    last = one.segments[-1].text
    return next(row.segments[: i + 1] for row in rows_of(one.in_order()) for i, s in enumerate(row.segments)
                if s.text == last)


def test_ids_are_by_what_a_branch_goes_on_from() -> None:
    others = stream_of(2, (1, 2), ()), stream_of(1, (1,), ())
    assert stream_of(1, (1, 2), ()) == stream_of(1, (1, 2), ()) not in others
    taken = [stream_of(1, (1, 2), ())]
    assert stream_of(1, (1, 2), taken) not in taken and 1 << 62 <= taken[0] < 1 << 63


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=3), st.booleans(), st.integers(0, 30))
def test_each_drawn_token_is_trained_once_behind_all_before_it(
    trees: list[list[tuple[int, int, int]]], share: bool, room: int
) -> None:
    """In the packed batch every drawn token is the target of one row with a loss, at its position, in a part that holds
    all tokens of its path; and columns come back in the order of the turns."""
    talks = [trajectory(grown(tree)) for tree in trees]
    group = Group(PROMPT, tuple(talks), (0.0,) * len(talks), (0.0,) * len(talks))
    (batch,) = pack(
        [group], max_tokens_per_gpu=max(t.length for t in talks) + room, flow_digest="flow", weight_version=3,
        share_prompts=share,
    )
    assert batch.sequence_tokens == tuple(t.num_policy_tokens for t in talks)
    assert denominators(batch, 100).num_sequences == len(talks)
    seen: dict[int, list[tuple[tuple[int, ...], float]]] = {i: [] for i in range(len(talks))}
    for micro in batch.micro_batches:
        stems = micro.stems or (-1,) * len(micro.lengths)
        edges = micro.cu_seqlens.tolist()
        for start, end, stem in zip(edges, edges[1:], stems, strict=False):
            before = micro.tokens[edges[stem] : edges[stem + 1]].tolist() if stem >= 0 else []
            for row in range(start, end):
                assert int(micro.positions[row]) == len(before) + row - start
                if micro.loss_mask[row]:
                    path = (*before, *micro.tokens[start : row + 1].tolist(), int(micro.targets[row]))
                    seen[int(micro.sequence_ids[row])].append((path, float(micro.rollout_logprobs[row])))
    for number, talk in enumerate(talks):
        wanted = []
        for row in rows_of(talk.segments):
            path: tuple[int, ...] = ()
            for place, segment in enumerate(row.segments):
                for i, token in enumerate(segment.tokens.tolist()):
                    path = (*path, token)
                    if segment.author == "policy" and place >= row.own:
                        wanted.append((path, float(segment.logprobs[i])))
        assert seen[number] == wanted and len(wanted) == talk.num_policy_tokens
    given_ = [tuple(float(i) for i in range(t.num_policy_tokens)) for t in talks]
    (filled,) = fill([batch], "advantages", given_)
    filled = with_rows(filled, "values", [m.advantages[m.loss_mask > 0] * 2 for m in filled.micro_batches])
    back = by_trajectory([held([filled], "values")], [t.num_policy_tokens for t in talks])
    assert [None if b is None else b.tolist() for b in back] == [[2 * x for x in one] for one in given_]


class _Config:
    adv_estimator, kl_in, kl_coef, norm_adv_by_std = "gae", "loss", 0.0, True
    adv_epsilon, gamma, gae_lambda = 1e-6, 1, 1


def test_a_critic_and_gamma_need_one_sequence() -> None:
    forked, plain = trajectory(grown([(-1, 1, 1), (0, 1, 1), (0, 1, 1)])), trajectory(grown([(-1, 1, 1), (0, 1, 1)]))
    config = _Config()

    def estimate(one: Trajectory) -> None:
        values = [np.zeros(one.num_policy_tokens)] if config.adv_estimator == "gae" else None
        advantages([Group(PROMPT, (one,), (1.0,), ())], config, values=values)  # type: ignore[arg-type]

    for config.adv_estimator, config.gamma in (("gae", 1), ("reinforce_pp", 0.9)):  # type: ignore[assignment]
        estimate(plain)
        with pytest.raises(UserError, match="forks = false"):
            estimate(forked)
    config.adv_estimator, config.gamma = "reinforce_pp", 1
    estimate(forked)
