"""A rollout over several ranks is that of one process, bit for bit, whoever is slow and however little there is."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hash_model import make_engine
from ranks import run_ranks
from rollout.test_rollout import Script, game, prompts

from jetrl.errors import UserError
from jetrl.parallel.world import ALONE, World
from jetrl.rollout.queue import Queues
from jetrl.rollout.requests import RolloutRequest
from jetrl.rollout.rollout import RankPart, Rollout, merged_parts, roll_out, rollout_stats
from jetrl.types import Reply, SamplingParams

STOPS = tuple(range(1, 6))
# (prompts, samples of each, most tokens, conversations): ragged lengths; fewer trajectories than ranks; many
ROUNDS = [(5, 3, 30, False), (1, 2, 9, False), (9, 4, 20, False), (4, 3, 25, True), (0, 3, 5, False), (7, 1, 12, True)]
SLOTS = 2


def asked_in(place: int) -> RolloutRequest:
    _, count, tokens, talks = ROUNDS[place]
    turns = (4, 6) if talks else (1, None)
    return RolloutRequest(SamplingParams(tokens, stop_token_ids=STOPS, seed=3), count, 1000 * (place + 1), *turns)


def failing(key: int, turn: int) -> Reply:
    return Reply(key, failure="error", error="broken") if key % 5 == 0 and turn == 1 else game(key, turn)


def one_round(place: int, engine: Any, queues: Queues | None) -> Rollout:
    script = Script(failing, lambda key, turn: key % 3) if ROUNDS[place][3] else None
    heard: list[int] = []
    rollout = roll_out(
        engine, prompts(ROUNDS[place][0]), asked_in(place), script, lambda r: heard.append(r.finished), queues
    )
    assert not engine.has_work and engine.collect() == [] and heard == sorted(heard)
    return rollout


def all_rounds(world: World) -> list[Rollout]:
    queues, engine = Queues(world, SLOTS), make_engine(page_size=4, max_num_seqs=SLOTS)
    return [one_round(place, engine, queues) for place in range(len(ROUNDS))]


def everything(world: World) -> dict[str, Any]:
    """All that the tests below ask of ranks, in one start of processes."""
    if world.size > 2:
        return {"rounds": all_rounds(world)}
    return {"rounds": all_rounds(world), "slowed": slowed(world), "broken": broken(world), "small": small_cache(world)}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(everything, 2)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equals_one_process(size: int, request: pytest.FixtureRequest) -> None:
    engine = make_engine(page_size=4, max_num_seqs=SLOTS)
    wanted = [one_round(place, engine, None) for place in range(len(ROUNDS))]
    lengths = [t.num_policy_tokens for g in wanted[2].groups for t in g.trajectories]
    assert len(set(lengths)) > 5 and wanted[3].failed and wanted[5].failed
    for results in request.getfixturevalue("two") if size == 2 else run_ranks(everything, size):
        found = results["rounds"]
        assert found == wanted
        for place, rollout in enumerate(found):
            drawn = [t for g in rollout.groups for t in g.trajectories] + [t for _, t in rollout.failed]
            assert sum(p.trajectories for p in rollout.parts) == len(drawn) == ROUNDS[place][0] * ROUNDS[place][1]
            assert sum(p.tokens for p in rollout.parts) == sum(t.num_policy_tokens for t in drawn)
            assert len(rollout.parts) == size and min(p.idle for p in rollout.parts) == 0
    assert all(p.trajectories for p in found[2].parts), "every rank worked"


def slowed(world: World) -> Rollout:
    engine = make_engine(page_size=4, max_num_seqs=SLOTS)
    if world.rank == 1:
        step = engine.step

        def slow() -> Any:
            time.sleep(0.06)
            return step()

        engine.step = slow  # type: ignore[method-assign]
    asked = RolloutRequest(SamplingParams(12, ignore_eos=True), 4, 100)
    return roll_out(engine, prompts(9), asked, queues=Queues(world, SLOTS))


def test_a_slow_rank_takes_less_and_nobody_waits_long(two: list[dict[str, Any]]) -> None:
    fast, slow = two[0]["slowed"].parts
    assert fast.trajectories + slow.trajectories == 36 and fast.trajectories >= 2 * slow.trajectories, (fast, slow)
    assert fast.idle < 2 * 12 * 0.06 + 0.5, "one trajectory of the slow rank, and the machine's own pauses"


def broken(world: World) -> tuple[str, bool, int, int]:
    engine, steps = make_engine(page_size=4, max_num_seqs=SLOTS), 0
    queues = Queues(world, SLOTS)
    script = Script(lambda key, turn: Reply(key, (), "hm") if key == 101 else game(key, turn))
    if world.rank == 1:
        step = engine.step

        def slow() -> Any:
            nonlocal steps
            steps += 1
            time.sleep(0.05)
            return step()

        engine.step = slow  # type: ignore[method-assign]
    asked = RolloutRequest(SamplingParams(40, ignore_eos=True), 30, 100, 5, 8)
    try:
        roll_out(engine, prompts(1), asked, script, queues=queues)
        text = "no error"
    except UserError as error:
        text = str(error)
    left = engine.has_work or bool(set(script.acts) - set(script.closed))
    taken = steps
    again = roll_out(engine, prompts(2), RolloutRequest(SamplingParams(4), 2, 0), queues=queues)
    return text, left, len(again.groups), taken


def test_a_mistake_on_one_rank_ends_the_rollout_of_all(two: list[dict[str, Any]]) -> None:
    for text, left, groups, steps in (one["broken"] for one in two):
        assert steps < 29 * 40 / SLOTS / 2, "the other rank does not finish what is left"
        assert text.startswith("rank 0: Problem p0: the prompt 'hm' has no tokens") and not left and groups == 2


def small_cache(world: World) -> Rollout:
    """Four short prompts, then long ones. Answers are ragged, so a session does not end between them."""
    engine = make_engine(page_size=4, max_num_seqs=SLOTS)
    long = [replace(p, tokens=(3,) * (1 if p.index < 4 else 40)) for p in prompts(10)]
    asked = RolloutRequest(SamplingParams(12, stop_token_ids=STOPS, seed=4), 1, 0)
    return roll_out(engine, long, asked, queues=Queues(world, SLOTS))


def test_a_cache_has_room_for_prompts_that_come_later(two: list[dict[str, Any]]) -> None:
    """The first ones alone would open a cache in which the long ones have no room."""
    wanted = small_cache(ALONE)
    assert [one["small"] for one in two] == [wanted, wanted]


def test_figures_of_ranks_by_hand() -> None:
    first = Rollout([], [], parts=(RankPart(3, 30, 2.0, 1.0), RankPart(1, 50, 3.0, 0.0)))
    second = Rollout([], [], parts=(RankPart(1, 10, 2.0, 0.0), RankPart(1, 10, 1.0, 1.0)))
    parts = merged_parts([first, second])
    assert parts == (RankPart(4, 40, 4.0, 1.0), RankPart(2, 60, 4.0, 1.0))
    stats = rollout_stats(Rollout([], [], parts=parts), 5.0)
    assert stats["perf/rank_idle_mean_s"] == 1.0 and stats["perf/rank_idle_max_s"] == 1.0
    assert rollout_stats(first, 3.0)["perf/slowest_rank_share"] == 50 * 2 / 80
    assert merged_parts([Rollout([], [])]) == ()
