"""Answers that are carried over, on several ranks: the bits of one process, through a resumption on another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from guessing import ASKED as TALKS
from guessing import WAIT, Guess, prompts
from hash_model import make_engine
from ranks import run_ranks
from test_ranks_loop import assert_same_run, rank_run
from tiny import tiny_run, weights_hash

from jetrl.chat.tokenizer import arithmetic_tokenizer
from jetrl.config import TaskConfig
from jetrl.engine.engine import PagedEngine
from jetrl.environments.conversations import build_pool
from jetrl.environments.environment import Factory
from jetrl.errors import UserError
from jetrl.parallel.world import World
from jetrl.report.recorder import read_metrics
from jetrl.rollout.carry import RolledOn, begin, roll_on
from jetrl.rollout.carry_turns import begin_talks, talk_on
from jetrl.rollout.requests import RolloutRequest
from jetrl.types import Problem, Prompt, SamplingParams

SECONDS = 300.0
ASKED = RolloutRequest(SamplingParams(40, stop_token_ids=(3, 4)), 3, 1000)
RUN: dict[str, Any] = {
    "rollout.overcommit": 1.0, "rollout.group_size": 2, "rollout.max_response_length": 40, "rl.rollout_is": "token",
    "rl.max_off_policy_steps": 3, "train.reduction": "fixed", "train.max_tokens_per_gpu": 64,
    "checkpoint.save_interval": 1, "checkpoint.keep": 9,
}


def groups(count: int = 6) -> list[Any]:
    prompts = [Prompt(i, Problem(f"p{i}", f"text {i}", ""), (1 + i, 2, 3 + i % 2)) for i in range(count)]
    return begin(prompts, ASKED)


def rounds(world: World, slots: int) -> list[RolledOn]:
    """Two rounds: what is under way after the first goes on."""
    engine = make_engine(max_num_seqs=slots)
    first = roll_on(engine, groups(), 2, (), None, world)
    second = roll_on(engine, first.under_way, 3, (1,), None, world)
    complete = roll_on(engine, [*first.complete, *second.under_way], 2, (), None, world)
    assert not engine.has_work and engine._began is None
    return [first, second, complete]


def talks(world: World, slow: float) -> list[RolledOn]:
    """Three rounds of conversations, with environments that are kept, or begun again on the rank that gets them."""
    engine = make_engine()
    pool = build_pool(Factory(Guess, {"slow": slow}), arithmetic_tokenizer(), TaskConfig(name="addition"), timeout=20)
    try:
        first = talk_on(engine, begin_talks(prompts(7), TALKS), 2, (), pool, TALKS, WAIT, None, world)
        second = talk_on(engine, first.under_way, 3, (), pool, TALKS, WAIT, None, world)
        third = talk_on(engine, second.under_way, 2, (1,), pool, TALKS, WAIT, None, world)
    finally:
        pool.shutdown()
    assert not engine.has_work and engine._began is None
    return [first, second, third]


def broken(world: World) -> str:
    """A mistake on one rank is raised on all, and no engine keeps work."""
    engine = make_engine()
    if world.rank == 1:
        def fails(self: PagedEngine) -> None:
            raise UserError("it cannot go on")

        PagedEngine.step = fails  # type: ignore[method-assign,assignment]
    try:
        roll_on(engine, groups(), 2, (), None, world)
    except UserError as error:
        assert not engine.has_work
        return str(error)
    return ""


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_complete_is_the_same_on_any_number_of_ranks(size: int) -> None:
    alone = rounds(World(), 64)
    assert alone[2].horizon == 0 and alone[0].horizon > 0 < alone[1].horizon
    assert run_ranks(rounds, size, 64, seconds=SECONDS) == [alone] * size
    assert run_ranks(rounds, size, 3, seconds=SECONDS) == [alone] * size, "few slots"


def test_conversations_are_the_same_on_any_number_of_ranks() -> None:
    alone = talks(World(), 0.0)
    assert alone[1].under_way and min(part.drawn for part in alone) > 0
    assert run_ranks(talks, 2, 0.02, seconds=SECONDS) == [alone] * 2
    assert run_ranks(talks, 3, 0.0, seconds=SECONDS) == [alone] * 3, "at last fewer groups than ranks"


def test_a_mistake_on_one_rank_is_raised_on_all() -> None:
    assert run_ranks(broken, 2, seconds=SECONDS) == ["rank 1: it cannot go on"] * 2


def goes_on(world: World, folder: Path, changes: dict[str, Any]) -> bool:
    return rank_run(world, folder, changes | {"checkpoint.resume": "auto"})


@pytest.mark.slow
def test_the_whole_run_has_the_bits_of_one_process(tmp_path: Path) -> None:
    straight = tiny_run(tmp_path / "straight", RUN)
    changes = RUN | {"task.reward": f"{tmp_path}/straight/reward.py:reward"}
    assert run_ranks(rank_run, 2, tmp_path / "two", changes, seconds=SECONDS) == [True, True]
    assert_same_run(tmp_path / "two/runs/tiny", straight)
    assert max(row["rollout/frac_stale_tokens"] for row in read_metrics(straight)[1:]) > 0
    # begun by one process, gone on by two ranks, ended by one
    tiny_run(tmp_path / "mixed", changes | {"train.steps": 1})
    assert run_ranks(goes_on, 2, tmp_path / "mixed", changes | {"train.steps": 3}, seconds=SECONDS) == [True, True]
    mixed = tiny_run(tmp_path / "mixed", changes | {"checkpoint.resume": "auto"})
    assert weights_hash(mixed, 4) == weights_hash(straight, 4)
