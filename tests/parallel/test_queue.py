"""Which rank takes which trajectories: each is given once, equal parts first, groups whole, small chunks at the end."""

from __future__ import annotations

import random

import pytest

from jetrl.parallel.world import ALONE
from jetrl.rollout.queue import Abandoned, Everything, Queues, SharedQueue, chunks, shares


@pytest.mark.parametrize("seed", range(40))
def test_every_trajectory_is_given_once(seed: int) -> None:
    rng = random.Random(seed)
    group, size, slots = rng.randint(1, 9), rng.randint(1, 7), rng.randint(1, 20)
    number = group * rng.randint(0, 30)
    own, rest = shares([rng.choice([1.0, 5.0, 40.0]) for _ in range(number)], group, slots, size)
    assert [n for part in [*own, *rest] for n in part] == list(range(number)), "in order, none twice"
    assert len(own) == size and max(map(len, own)) <= slots
    if number <= slots * size:
        assert not rest
    else:
        assert len(set(map(len, own))) == 1 and all(part.start // group == (part.stop - 1) // group for part in rest)
        lengths = [len(part) for part in rest]
        assert lengths[-1] == 1 or group == 1, "single ones at the end"


def test_first_parts_by_hand() -> None:
    # 6 groups of 4 over 2 ranks: 12 each. Over 4: 6 each, and a group in two parts is dearer than a part of 8 or 4.
    assert shares([1.0] * 24, 4, 100, 2)[0] == [range(12), range(12, 24)]
    assert shares([1.0] * 24, 4, 100, 4)[0] == [range(6), range(6, 12), range(12, 18), range(18, 24)]
    # 100 of groups of 16 over 2: 50, and 48 is near enough to keep the fourth group whole
    assert shares([1.0] * 96, 16, 100, 2)[0] == [range(48), range(48, 96)]
    assert shares([1.0] * 112, 16, 100, 2)[0] == [range(56), range(56, 112)]
    assert shares([1.0] * 336, 16, 400, 2)[0] == [range(160), range(160, 336)]
    # two long ones weigh as much as six short ones; with few slots the short ones are spread
    assert shares([3.0, 3.0, *[1.0] * 6], 1, 8, 2)[0] == [range(2), range(2, 8)]
    assert shares([3.0, 3.0, *[1.0] * 6], 1, 4, 2)[0] == [range(4), range(4, 8)]
    assert shares([1.0] * 3, 1, 8, 5)[0].count(range(0, 0)) >= 1 and sum(map(len, shares([1.0] * 3, 1, 8, 5)[0])) == 3
    assert shares([], 4, 8, 2) == ([range(0), range(0)], [])


def test_chunks_shrink_by_hand() -> None:
    # 2 ranks, groups of 4: whole while 16 are left, then left // 4
    assert [len(c) for c in chunks(0, 32, 4, 2)] == [4, 4, 4, 4, 4, 3, 1, 2, 1, 1, 1, 1, 1, 1]
    assert [len(c) for c in chunks(24, 28, 4, 2)] == [1, 1, 1, 1] and chunks(8, 8, 4, 2) == []


def queue(own: range, rest: list[range], slots: int, taken: list[int], ended: list[int]) -> SharedQueue:
    def add(to: list[int]):  # type: ignore[no-untyped-def]
        def of(n: int) -> int:
            to[0] += n
            return to[0]

        return of

    times = iter(range(1000))
    return SharedQueue(own, rest, slots, add(taken), add(ended), lambda: float(next(times)))


def test_a_rank_takes_what_it_has_room_for() -> None:
    taken, ended = [0], [0]
    rest = [range(8, 10), range(10, 11), range(11, 12)]
    one, two = (queue(own, rest, 4, taken, ended) for own in (range(4), range(4, 8)))
    assert one.take(0, 0, 0) == [0, 1, 2, 3] and two.take(0, 0, 0) == [4, 5, 6, 7]
    assert one.take(4, 0, 0) == [] and taken == [0], "no room, no question"
    assert one.take(3, 0, 0) == [8, 9] and one.take(3, 0, 1) == [], "one of its own waits already"
    assert two.take(4, 1, 0) == [10], "a resting conversation needs no slot"
    assert two.take(9, 9, 0) == [], "but all of them come back"
    assert not two.empty
    assert two.take(2, 0, 0) == [11] and two.empty
    assert one.take(0, 0, 0) == [] and one.empty and taken == [5]
    assert one.report(3) == 3 and two.report(2) == 5 and one.report(4) == 6 and ended == [6]
    two.fail()
    with pytest.raises(Abandoned):
        one.report(5)


def test_one_process_takes_everything_at_once() -> None:
    everything = Everything(5)
    assert not everything.empty and everything.take(0, 0, 0) == range(5)
    assert everything.empty and everything.take(0, 0, 0) == () and everything.report(3) == 3 and Everything(0).empty
    alone = Queues(ALONE, 2).open([1.0] * 5, 1)
    assert list(alone.take(0, 0, 0)) == [0, 1] and list(alone.take(0, 0, 0)) == [2, 3]
    assert list(alone.take(0, 0, 0)) == [4] and alone.empty
