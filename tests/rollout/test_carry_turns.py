"""Conversations that are carried over: against their definition, whatever engine and environments take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from guessing import ASKED, WAIT, Guess, prompts
from hash_model import make_engine

from jetrl.chat.tokenizer import arithmetic_tokenizer
from jetrl.config import TaskConfig
from jetrl.environments.conversations import EnvironmentPool, build_pool
from jetrl.environments.environment import Factory
from jetrl.errors import UserError
from jetrl.rollout.carry import Conversation, RolledOn, UnderWay, chosen
from jetrl.rollout.carry_turns import begin_talks, talk_on
from jetrl.rollout.rollout import roll_out
from jetrl.types import StepReport, Trajectory, WeightSet


@pytest.fixture
def pools() -> Iterator[Any]:
    made: list[EnvironmentPool] = []

    def make(kind: type = Guess, **params: Any) -> EnvironmentPool:
        made.append(build_pool(Factory(kind, params), arithmetic_tokenizer(), TaskConfig(name="addition"), timeout=20))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


Whole = dict[int, Trajectory]


def whole_of(groups: list[UnderWay], pools: Any) -> Whole:
    """All conversations to their ends, in a rollout that waits for all."""
    found: Whole = {}
    for group in groups:
        first = min(a.id for a in group.answers if isinstance(a, Conversation))
        asked = replace(ASKED, first_id=first)
        done = roll_out(make_engine(max_num_seqs=64), [group.prompt], asked, pools())
        every = [t for g in done.groups for t in g.trajectories] + [t for _, t in done.failed]
        found |= {t.request_id: t for t in every if t.request_id is not None}
    return found


def places(whole: Trajectory, before: Conversation | None) -> list[tuple[int, int, int]]:
    """(place, segments, tokens of the segment that is being drawn) after each event, from the state `before` on; the
    last one is the end. By walking the finished trajectory token by token."""
    at, done = 0, len(before.segments) if before else 0
    had = len(before.turn.tokens) if before and before.turn else 0
    due = before is None or before.turn is None
    found = [] if due else [(0, done, had)]
    reply = 0  # a reply that was due before counts nothing
    segments = whole.segments
    while True:
        if due:
            at += reply
            if done == len(segments):
                return [*found, (at, done, -1)]
            if segments[done].author == "environment":
                done += 1
            elif done:
                raise AssertionError("this environment always says something")
            found.append((at, done, 0))
            had, due, reply = 0, False, WAIT
            if done == len(segments):
                return [*found[:-1], (at, done, -1)]
        for drawn in range(had + 1, len(segments[done].tokens) + 1):
            at += 1
            found.append((at, done, drawn))
        done, due, reply = done + 1, True, WAIT
        found[-1] = (at, done, 0)
        if done == len(segments) and whole.end == "length" and whole.response_length == ASKED.sampling.max_tokens:
            return [*found, (at, done, -1)]


def check(groups: list[UnderWay], result: RolledOn, wanted: int, whole: Whole) -> None:
    tracks = [
        [None if isinstance(a, Trajectory) else places(whole[a.id], a) for a in group.answers] for group in groups
    ]
    remaining = {i: max(0 if one is None else one[-1][0] for one in own) for i, own in enumerate(tracks)}
    horizon, kept = chosen(remaining, len(groups), wanted) or (-1, [])
    assert result.horizon == horizon
    assert [g.prompt.index for g in result.complete] == [groups[i].prompt.index for i in kept]
    after = {g.prompt.index: g for g in (*result.complete, *result.under_way)}
    for group, own in zip(groups, tracks, strict=True):
        for before, now, track in zip(group.answers, after[group.prompt.index].answers, own, strict=True):
            if track is None:
                assert now == before
                continue
            assert not isinstance(before, Trajectory)
            full = whole[before.id]  # type: ignore[union-attr]
            assert isinstance(now, Trajectory) == (track[-1][0] <= horizon)
            if isinstance(now, Trajectory):
                assert now == full
                continue
            assert isinstance(now, Conversation)
            _, segments, drawn = [event for event in track if event[0] <= horizon][-1]
            assert len(now.segments) == segments
            for mine, other in zip(now.segments, full.segments, strict=False):
                assert mine.tokens.tobytes() == other.tokens.tobytes() and mine.author == other.author
            if now.turn is None:
                assert segments == 0 or (now.segments[-1].author == "policy" and now.segments[-1].reward is None)
            else:
                turn = full.segments[segments]
                assert now.turn.tokens.tolist() == turn.tokens[:drawn].tolist()
                assert now.turn.logprobs.tobytes() == turn.logprobs[:drawn].tobytes()
                assert now.turn.request.tokens == tuple(np.concatenate([s.tokens for s in now.segments]).tolist())


@pytest.mark.parametrize(("slots", "slow"), [(64, 0.0), (64, 0.02), (3, 0.0)])
def test_what_is_complete_depends_on_what_was_said_alone(slots: int, slow: float, pools: Any) -> None:
    """Three rounds; what is under way goes on beside new groups. After each the engine is idle and holds no page."""
    engine, pool = make_engine(max_num_seqs=slots), pools(slow=slow)
    groups, states = begin_talks(prompts(6), ASKED), set()
    whole = whole_of(groups, pools)
    for number, wanted in enumerate((2, 3, 2)):
        result = talk_on(engine, groups, wanted, (), pool, ASKED, WAIT)
        check(groups, result, wanted, whole)
        assert not engine.has_work and engine._began is None and engine._scheduler.allocator.num_used == 0
        assert set(pool._talks) == {a.id for g in result.under_way for a in g.answers if isinstance(a, Conversation)}
        states |= {(a.turn is None, bool(a.segments)) for g in result.under_way for a in g.answers
                   if isinstance(a, Conversation)}
        new = begin_talks(prompts(wanted, 10 * number + 10), replace(ASKED, first_id=2000 + 100 * number))
        whole |= whole_of(new, pools)
        groups = [*result.under_way, *new]
    assert {(True, True), (False, True)} <= states, "some were within a turn, and some waited for a reply"


def test_an_environment_that_was_ahead_is_begun_again(pools: Any) -> None:
    """While two groups wait for slow tools, the others get far beyond the horizon. Their environments then hear again
    what they heard up to there, and the result is what it is without the delay."""

    found, made = [], []
    for late in (0.0, 0.4):
        engine, pool, Guess.made = make_engine(), pools(late=late, few=True), 0
        first = talk_on(engine, begin_talks(prompts(4), ASKED), 2, (), pool, ASKED, 2)
        found.append((first, talk_on(engine, first.under_way, 2, (), pool, ASKED, 2)))
        made.append(Guess.made)
    assert found[0] == found[1] and 8 <= made[0] < made[1] <= 16


def test_conversations_go_on_in_another_pool_with_newer_weights(pools: Any) -> None:
    """As after a resumption, and on another rank: a reply that was due is given, and all are learned from once."""
    engine = make_engine()
    first = talk_on(engine, begin_talks(prompts(5), ASKED), 2, (), pools(few=True), ASKED, 2)
    engine.load(WeightSet(4, "flow", {}))
    both = pools(few=True), pools(few=True, slow=0.01)
    found = [talk_on(engine, first.under_way, 3, (), pool, ASKED, 2) for pool in both]
    assert found[0] == found[1] and not found[0].under_way
    spans = {spans for group in found[0].complete for spans in group.spans}
    assert {s[0][1] for s in spans} == {3, 4} and any(len(s) == 2 for s in spans)
    assert all(group.oldest == 3 for group in found[0].complete)


def test_an_environment_that_says_something_else_is_told(pools: Any) -> None:
    class Moody(Guess):
        number = 0

        def reset(self, problem: dict[str, Any]) -> str:
            Moody.number += 1
            super().reset(problem)
            return f"{Moody.number}+"

    engine = make_engine()
    first = talk_on(engine, begin_talks(prompts(4), ASKED), 1, (), pools(Moody), ASKED, WAIT)
    with pytest.raises(UserError, match=r"Environment Moody, problem p\d: it was begun again .* depend on these and"):
        talk_on(engine, first.under_way, 3, (), pools(Moody), ASKED, WAIT)
    assert not engine.has_work and engine._began is None


def test_a_rollout_that_is_given_up_can_be_repeated(pools: Any) -> None:
    engine, pool = make_engine(), pools(few=True)
    first = talk_on(engine, begin_talks(prompts(5), ASKED), 2, (), pool, ASKED, WAIT)
    looks = 0

    def stop(report: StepReport) -> None:
        nonlocal looks
        looks += 1
        if looks == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk_on(engine, first.under_way, 2, (), pool, ASKED, WAIT, stop)
    assert not engine.has_work and engine._began is None and pool.poll(False) == []
    again = talk_on(engine, first.under_way, 2, (), pool, ASKED, WAIT)
    assert again == talk_on(make_engine(), first.under_way, 2, (), pools(few=True), ASKED, WAIT)
