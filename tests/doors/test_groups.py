"""A door: replicas that several ranks hold together. Four ranks as two replicas of two shards, on a CPU.

What a tensor-parallel engine would need of the rest: both shards of a replica see the same work, each piece of work
goes to one replica, and masters, sums and statistics go over the replicas. Here each shard computes all of its
replica's work, so results must be those of one process.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from hash_model import make_engine
from ranks import run_ranks
from rollout.test_rollout import Script, prompts
from rollout.test_shared_queue import ROUNDS, SLOTS, STOPS, asked_in, failing
from train.test_reduction import CASES, assert_same, data_of, one_thread, trained

from jetrl.errors import UserError
from jetrl.parallel.world import ALONE, World
from jetrl.rollout.queue import Queues
from jetrl.rollout.requests import RolloutRequest
from jetrl.rollout.rollout import Rollout, roll_out
from jetrl.types import SamplingParams

LIMIT = timedelta(seconds=60)


def exchanged(world: World) -> dict[str, Any]:
    """What each call gives in a group whose rows are 3 and 1, rank by rank."""
    rows = [3, 1]
    uneven, even = torch.full((4,), float(world.rank)), torch.full((4,), float(world.rank))
    world.gather_rows(uneven, rows)
    world.gather_rows(even, [2, 2])
    whole = torch.tensor([[10.0 * world.rank + s] for s, n in enumerate(rows) for _ in range(n)])
    received, wait = world.send_rows(whole, rows, 2)
    wait()
    add = world.counter("test")
    add(1)
    world.await_all()
    world.barrier()
    return {
        "gather": world.gather(world.rank), "share": world.share(world.name, 1), "collect": world.collect(world.rank),
        "part": "".join(world.part("abc")), "uneven": uneven.tolist(), "even": even.tolist(),
        "received": received.tolist(), "counter": add(0),
    }


class Watched:
    """An engine that writes down which requests it was given."""

    def __init__(self) -> None:
        self.engine, self.ids = make_engine(page_size=4, max_num_seqs=SLOTS), []  # type: ignore[var-annotated]
        add = self.engine.add

        def watched(requests: Any) -> None:
            self.ids += [request.id for request in requests]
            add(requests)

        self.engine.add = watched  # type: ignore[method-assign]


def one_round(place: int, queues: Queues | None) -> tuple[Rollout, list[int]]:
    engine, script = Watched(), Script(failing, lambda key, turn: key % 3) if ROUNDS[place][3] else None
    return roll_out(engine.engine, prompts(ROUNDS[place][0]), asked_in(place), script, queues=queues), engine.ids


def refused(world: World) -> str:
    """The second replica's engine refuses a prompt; both shards meet the same mistake."""
    engine = make_engine(page_size=4, max_num_seqs=SLOTS)
    if world.replicas.rank == 1:
        def add(requests: Any) -> None:
            raise UserError("no room")

        engine.add = add  # type: ignore[method-assign]
    try:
        asked = RolloutRequest(SamplingParams(8, stop_token_ids=STOPS), 3, 0)
        roll_out(engine, prompts(9), asked, queues=Queues(world, SLOTS))
    except UserError as error:
        return str(error)
    return ""


def four(run: World, case: Any) -> dict[str, Any]:
    world = run.in_shards(2, LIMIT)
    queues = Queues(world, SLOTS)
    return {
        "place": [(w.rank, w.size, w.name) for w in (world, world.replicas, world.shards)],
        "replicas": exchanged(world.replicas), "shards": exchanged(world.shards), "all": world.gather(world.rank),
        "rounds": [one_round(place, queues) for place in range(len(ROUNDS))],
        "refused": refused(world), "trained": trained(world, *case),
    }


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with one_thread():
        return data_of(next(iter(CASES)), tmp_path_factory.mktemp("case"), "fixed")


@pytest.fixture(scope="module")
def found(case: Any) -> list[dict[str, Any]]:
    return run_ranks(four, 4, case, seconds=120.0)


def test_each_rank_is_in_two_groups(found: list[dict[str, Any]]) -> None:
    assert [one["place"] for one in found] == [
        [(r, 4, ""), (r // 2, 2, f"replicas{r % 2}"), (r % 2, 2, f"shards{r // 2}")] for r in range(4)
    ]
    assert all(one["all"] == [0, 1, 2, 3] for one in found)


@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_what_a_group_exchanges_stays_in_it(kind: str, found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        own, group = (rank // 2, rank % 2) if kind == "replicas" else (rank % 2, rank // 2)
        rows = [3, 1][own]
        assert one[kind] == {
            "gather": [0, 1], "share": f"{kind}{group}", "collect": [0, 1] if own == 0 else [],
            "part": ["a", "bc"][own],
            "uneven": [0.0, 0.0, 0.0, 1.0], "even": [0.0, 0.0, 1.0, 1.0],
            "received": [[[10.0 * sender + own]] * rows for sender in range(2)], "counter": 2,
        }


def test_the_queue_deals_each_prompt_to_one_replica(found: list[dict[str, Any]]) -> None:
    """And both shards of a replica see the same work, in the same order; the rollout is one process's."""
    busy = set()
    for place, (number, count, *_, talks) in enumerate(ROUNDS):
        wanted, ids = one_round(place, None)
        heard = [one["rounds"][place][1] for one in found]
        assert heard[0] == heard[1] and heard[2] == heard[3]
        assert not set(heard[0]) & set(heard[2]) and set(heard[0]) | set(heard[2]) == set(ids)
        assert talks or len(ids) == number * count == len(heard[0]) + len(heard[2])
        busy |= {replica for replica in (0, 2) if heard[replica]}
        for one in found:
            rollout = one["rounds"][place][0]
            assert rollout == wanted and len(rollout.parts) == 2, "a part for each replica"
    assert busy == {0, 2}


def test_a_mistake_of_one_replica_is_raised_on_all(found: list[dict[str, Any]]) -> None:
    assert [one["refused"] for one in found] == ["rank 2: no room"] * 4


def test_an_update_goes_over_the_replicas(case: Any, found: list[dict[str, Any]]) -> None:
    with one_thread():
        alone = trained(ALONE, *case)
    for one in found:
        assert_same(one["trained"], alone)


def test_with_one_shard_all_ranks_are_replicas() -> None:
    world = World(2, 4, 0)
    assert world.in_shards(1) is world and world.replicas is world and world.shards is ALONE
    assert ALONE.replicas is ALONE and ALONE.shards is ALONE


@pytest.mark.parametrize("shards", [0, 3, 8])
def test_replicas_are_equal(shards: int) -> None:
    with pytest.raises(ValueError, match=rf"4 ranks cannot be replicas of {shards} ranks each\."):
        World(0, 4).in_shards(shards)
