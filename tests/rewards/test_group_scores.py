"""Groups scored next to the rollout: the scores of a call after it, while it runs, and errors as soon as they come."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from rewards.test_reward_calls import RL, group, weighted
from test_ranks_loop import rank_run
from tiny import numbers, tiny_run, weights_hash

from jetrl.errors import UserError
from jetrl.parallel.world import World
from jetrl.report.recorder import read_metrics, read_samples
from jetrl.rewards.group_scores import GroupScores, scores_beside
from jetrl.rewards.results import Scores
from jetrl.rewards.score import rewards_of, score_parts
from jetrl.user_code import guard as user_code_module
from jetrl.user_code.guard import user_code

BY_GROUP = {"task.reward_calls": "group"}


def lengths(completions: list[str]) -> list[float | None]:
    return [None if c == "none" else float(len(c)) for c in completions]


async def vowels(completions: list[str]) -> list[float | None]:
    await asyncio.sleep(0.001)
    return [None if c == "none" else float(sum(x in "aeiou" for x in c)) for c in completions]


GROUPS = [group("a", "bcd"), group("eee", "none", index=1), group("iou", "x", index=2)]


@pytest.mark.parametrize("known", [(), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("reward", [lengths, vowels, weighted((lengths, 2.0), (vowels, -0.5))])
def test_the_rewards_are_those_of_one_call(reward: Any, known: tuple[int, ...]) -> None:
    want = rewards_of(GROUPS, reward, RL, conversations=False, at_limit="keep")
    with scores_beside(reward, "group", False) as scores:
        assert scores is not None
        for place in reversed(known):
            scores.add(place, GROUPS[place])
        found = rewards_of(GROUPS, reward, RL, conversations=False, at_limit="keep", known=scores.take())
    assert found == want and None in want.values


def test_one_call_at_a_time_in_the_order_of_ends_next_to_the_caller() -> None:
    go, calls, most, running = threading.Event(), [], 0, 0

    def slow(completions: list[str]) -> list[float]:
        nonlocal most, running
        running += 1
        most = max(most, running)
        calls.append((tuple(completions), threading.current_thread() is threading.main_thread()))
        assert go.wait(30)
        running -= 1
        return [0.0] * len(completions)

    scores = GroupScores(slow, False)
    for place in (2, 0, 1):
        scores.add(place, GROUPS[place])  # returns while nothing has been scored
    assert not go.is_set()
    go.set()
    assert scores.take() == {place: [Scores((0.0, 0.0))] for place in range(3)}
    assert [texts for texts, _ in calls] == [("iou", "x"), ("a", "bcd"), ("eee", "none")]
    assert most == 1 and not any(in_main for _, in_main in calls) and scores.busy() > 0
    scores.stop()


def test_an_error_is_raised_where_the_rollout_meets_it() -> None:
    raised = threading.Event()

    def broken(completions: list[str]) -> list[float]:
        raised.set()
        raise KeyError("judge")

    scores = GroupScores(broken, False)
    scores.add(0, GROUPS[0])
    assert raised.wait(30)
    with pytest.raises(UserError, match=r"broken raised KeyError: 'judge' .*test_group_scores.py, line"):
        scores.take()
    with pytest.raises(UserError, match="KeyError"):
        scores.add(1, GROUPS[1])
    scores.stop()


def test_a_setting_of_the_whole_process_is_refused() -> None:
    def careless(completions: list[str]) -> list[float]:
        torch.set_default_dtype(torch.float64)
        return [0.0] * len(completions)

    scores = GroupScores(careless, False)
    scores.add(0, GROUPS[0])
    with pytest.raises(UserError, match=r"careless changes .*set_default_dtype\(torch.float64\). It runs in a thread"):
        scores.take()
    assert torch.get_default_dtype() == torch.float32
    scores.stop()


def test_the_settings_of_an_engine_are_not_the_rewards() -> None:
    """The main thread runs an engine of the user's with settings of its own while a reward runs in its thread."""
    go = threading.Event()

    def slow(completions: list[str]) -> list[float]:
        assert go.wait(30)
        return [0.0] * len(completions)

    def step() -> None:
        torch.set_float32_matmul_precision("high")
        go.set()
        time.sleep(0.05)

    scores = GroupScores(slow, False)
    scores.add(0, GROUPS[0])
    with user_code("engine"):
        step()
    try:
        assert scores.take() == {0: [Scores((0.0, 0.0))]} and torch.get_float32_matmul_precision() == "highest"
    finally:
        scores.stop()
        user_code_module._theirs.clear()


INFERENCE = torch.inference_mode()


@pytest.mark.parametrize("change, told", [
    (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "set_num_threads"),
    (INFERENCE.__enter__, "inference_mode"),
])
def test_what_a_thread_may_not_leave_behind(change: Callable[[], object], told: str) -> None:
    def leaves(completions: list[str]) -> list[float]:
        change()
        return [0.0] * len(completions)

    scores = GroupScores(leaves, False)
    scores.add(0, GROUPS[0])
    with pytest.raises(UserError, match=told):
        scores.take()
    scores.stop()


def test_what_comes_after_the_rollout_has_no_thread() -> None:
    before = threading.active_count()
    for reward, calls in ((lengths, "step"), (None, "group")):
        with scores_beside(reward, calls, False) as scores:
            assert scores is None and threading.active_count() == before
    assert score_parts(GROUPS, lengths, False) == [Scores((1.0, 3.0, 3.0, None, 3.0, 1.0))]


def same_runs(run_dir: Path, other: Path) -> None:
    assert numbers(run_dir) == numbers(other) and list(read_samples(run_dir)) == list(read_samples(other))
    assert weights_hash(run_dir, 4) == weights_hash(other, 4)


def test_a_run_has_the_bits_of_one_that_scores_afterwards(tmp_path: Path) -> None:
    after = tiny_run(tmp_path / "after")
    beside = tiny_run(tmp_path / "beside", BY_GROUP)
    same_runs(beside, after)
    assert {row["reward/num_errors"] for row in read_metrics(beside)[1:]} == {0.0}


def test_so_has_a_run_of_refilled_conversations(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(  # of an answer, and of the whole conversation
        "def reward(completions, answer, **_):\n"
        "    texts = [c if isinstance(c, str) else c[-1]['content'] for c in completions]\n"
        "    return [len(set(c) & set(a)) / len(set(a)) for c, a in zip(texts, answer)]\n"
    )
    talks = {
        "environment.name": "retry", "environment.params": {"feedback": "="}, "rl.dynamic_sampling": "refill",
        "rollout.max_num_seqs": 3, "task.reward": f"{tmp_path}/talk.py:reward",
    }
    same_runs(tiny_run(tmp_path / "beside", talks | BY_GROUP), tiny_run(tmp_path / "after", talks))


def two_ranks(world: World, folder: Path, changes: dict[str, Any]) -> bool:
    return rank_run(world, folder, changes)


def test_and_one_of_two_ranks_each_scoring_what_it_has_sampled(tmp_path: Path) -> None:
    """The reward notes who calls it: ranks call it for groups of their own; what they share is scored by the first."""
    (tmp_path / "noted.py").write_text(
        "import os, threading\n\n"
        "def reward(completions, answer, **_):\n"
        f"    with open(f'{tmp_path}/calls', 'a') as file:\n"
        "        aside = threading.current_thread() is not threading.main_thread()\n"
        "        file.write(f'{os.getpid()} {aside} {len(completions)}\\n')\n"
        "    return [len(set(c) & set(a)) / len(set(a)) for c, a in zip(completions, answer)]\n"
    )
    changes = {"task.reward": f"{tmp_path}/noted.py:reward", "train.reduction": "fixed",
               "train.max_tokens_per_gpu": 64, "checkpoint.save_interval": 4}
    alone = tiny_run(tmp_path / "alone", changes)
    (tmp_path / "calls").unlink()
    assert run_ranks(two_ranks, 2, tmp_path / "two", changes | BY_GROUP) == [True, True]
    same_runs(tmp_path / "two" / "runs" / "tiny", alone)
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert len({pid for pid, aside, _ in calls if aside == "True"}) == 2, "both ranks score"
    assert {count for _, aside, count in calls if aside == "True"} <= {"4", "1"}, "groups of a step, an evaluation"
