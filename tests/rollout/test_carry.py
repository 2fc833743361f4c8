"""A rollout that ends when enough groups are complete: against its definition, whatever the engine's sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hash_model import BurstRunner, HashModel, make_engine, straight

from jetrl.engine.engine import PagedEngine
from jetrl.engine.speculation.speculator import build_speculator
from jetrl.errors import UserError
from jetrl.rollout.carry import RolledOn, UnderWay, begin, chosen, roll_on
from jetrl.rollout.requests import RolloutRequest
from jetrl.types import Problem, Prompt, Request, SamplingParams, StepReport, Trajectory, Unfinished, WeightSet

ASKED = RolloutRequest(SamplingParams(40, stop_token_ids=(3, 4)), 3, 1000)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(i, Problem(f"p{i}", f"text {i}", ""), (1 + i, 2, 3 + i % 2)) for i in range(count)]


@pytest.mark.parametrize(("remaining", "wanted", "forced", "found"), [
    ({0: 9, 2: 4}, 2, (), (9, [0, 2])),
    ({0: 9, 2: 4}, 3, (), None),
    ({0: 9, 2: 4, 3: 4}, 2, (), (4, [2, 3])),
    ({0: 4, 2: 4, 3: 4}, 2, (), (4, [0, 2])),  # of equal ones the first
    ({0: 9, 2: 4, 3: 1}, 2, (0,), (9, [0, 3])),
    ({2: 4, 3: 1}, 2, (0,), None),  # nobody knows how long the one that must end will take
    ({0: 0, 1: 0, 2: 7}, 2, (), (0, [0, 1])),
    ({0: 9, 1: 2, 2: 4}, 2, (0, 2), (9, [0, 2])),
    ({}, 0, (), (0, [])),
])
def test_the_horizon_by_hand(
    remaining: dict[int, int], wanted: int, forced: tuple[int, ...], found: tuple[int, list[int]] | None
) -> None:
    assert chosen(remaining, 5, wanted, forced) == found


def whole_answers(groups: list[UnderWay]) -> list[list[int]]:
    """New tokens to the end of each answer, computed without a cache or a batch."""
    found = []
    for group in groups:
        own = []
        for a in group.answers:
            if isinstance(a, Trajectory):
                own.append(0)
                continue
            left = replace(a.request.sampling, max_tokens=a.request.sampling.max_tokens - len(a.tokens))
            again = Request(a.request.id, (*a.request.tokens, *a.tokens.tolist()), left)
            own.append(len(straight(HashModel(), again)[0]))
        found.append(own)
    return found


def check(groups: list[UnderWay], result: RolledOn, wanted: int, forced: tuple[int, ...] = ()) -> None:
    remaining = whole_answers(groups)
    horizon, places = chosen({i: max(own) for i, own in enumerate(remaining)}, len(groups), wanted, forced) or (-1, [])
    assert result.horizon == horizon and [g.prompt.index for g in result.complete] == [
        groups[i].prompt.index for i in places
    ]
    after = {g.prompt.index: g for g in (*result.complete, *result.under_way)}
    assert len(after) == len(groups)
    for group, own in zip(groups, remaining, strict=True):
        for before, now, more in zip(group.answers, after[group.prompt.index].answers, own, strict=True):
            assert isinstance(now, Trajectory) == (more <= horizon)
            if isinstance(now, Unfinished) and isinstance(before, Unfinished):
                assert len(now.tokens) == len(before.tokens) + horizon and now.first(len(before.tokens)) == before
    assert result.drawn == sum(min(more, horizon) for own in remaining for more in own)


def engines() -> dict[str, Callable[[], PagedEngine]]:
    def bursts() -> PagedEngine:
        engine = make_engine()
        engine.runner = BurstRunner(engine.model, engine.settings)
        return engine

    def drafts() -> PagedEngine:
        engine = make_engine(page_size=4)
        engine.speculator = build_speculator("on", 3, engine.settings.max_num_seqs)
        return engine

    return {
        "plain": make_engine, "bursts": bursts, "drafts": drafts, "few slots": lambda: make_engine(max_num_seqs=4),
        "few pages": lambda: make_engine(page_size=4, kv_cache_tokens=140, max_tokens_per_step=9),
    }


@pytest.mark.parametrize("name", engines())
def test_what_is_complete_depends_on_the_answers_alone(name: str) -> None:
    """Three rounds; what is under way goes on, beside new groups. The engine is idle after each, and holds no page."""
    engine = engines()[name]()
    groups = begin(prompts(6), ASKED)
    for wanted, forced in ((2, ()), (3, (1,)), (4, (0, 2))):
        result = roll_on(engine, groups, wanted, forced)
        check(groups, result, wanted, forced)
        assert not engine.has_work and engine._began is None and engine._scheduler.allocator.num_used == 0
        groups = [*result.under_way, *begin(prompts(3 * wanted + 3)[-3:], replace(ASKED, first_id=2000 * wanted))]
    assert any(len(span) for group in groups for span in group.spans), "nothing was carried over"


def test_all_that_are_wanted_are_complete_already() -> None:
    engine = make_engine()
    complete = roll_on(engine, begin(prompts(2), ASKED), 2).complete
    groups = [*complete, *begin(prompts(5)[2:], replace(ASKED, first_id=5000))]
    result = roll_on(engine, groups, 2)
    assert result == RolledOn(complete, tuple(groups[2:]), 0, 0)
    assert complete[0].oldest == 3 and groups[2].oldest is None
    assert all(one.group.trajectories == one.answers for one in complete)
    with pytest.raises(AssertionError, match="an answer has not ended"):
        _ = groups[2].group


def test_a_group_goes_on_under_newer_weights() -> None:
    engine = make_engine()
    first = roll_on(engine, begin(prompts(4), ASKED), 1)
    engine.load(WeightSet(4, "flow", {}))
    second = roll_on(engine, first.under_way, 3)
    spans = [spans for group in second.complete for spans in group.spans]
    assert ((0, 3), (first.horizon, 4)) in spans and {s[0] for s in spans} == {(0, 3)}
    assert all(group.oldest == 3 for group in second.complete) and not second.under_way


def test_mistakes_name_the_problem_and_leave_the_engine_idle() -> None:
    engine = make_engine()
    with pytest.raises(UserError, match=r"Problem p1: the prompt 'text 1' has no tokens. Remove it"):
        begin([prompts(1)[0], replace(prompts(2)[1], tokens=())], ASKED)
    long = [prompts(1)[0], replace(prompts(2)[1], tokens=(1,) * 100)]
    with pytest.raises(UserError, match=r"Problem p1: request 1003: 100 prompt tokens .* beyond the model's 128"):
        roll_on(engine, begin(long, ASKED), 1)

    def stop(report: StepReport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        roll_on(engine, begin(prompts(3), ASKED), 1, on_step=stop)
    assert not engine.has_work and engine._began is None
    check(begin(prompts(3), ASKED), roll_on(engine, begin(prompts(3), ASKED), 1), 1)
