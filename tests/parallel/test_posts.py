"""What ranks tell each other without a collective, from threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from ranks import run_ranks

from jetrl.parallel.posts import Abandoned, Posts
from jetrl.parallel.progress import LostContact
from jetrl.parallel.world import ALONE, World


def nothing() -> None:
    pass


def exchanged(world: World) -> list[Any]:
    """In a thread of each rank, while the main threads make a collective; then posts that one rank gives up."""
    posts, found = Posts(world), []

    def work() -> None:
        posts.put("rows", {"of": world.rank})
        found.append(posts.all("rows", nothing))

    thread = threading.Thread(target=work)
    thread.start()
    found.append(world.gather(world.rank))
    thread.join()
    posts = Posts(world)
    try:
        if world.rank == 1:
            posts.fail()
        else:
            posts.put("rows", 1)
            posts.all("rows", nothing)
    except Abandoned:
        found.append("abandoned")
    world.barrier()
    return sorted(found, key=str)


def test_threads_of_ranks_exchange_values_and_give_up_together() -> None:
    first, second = run_ranks(exchanged, 2)
    both = [[0, 1], [{"of": 0}, {"of": 1}]]
    assert first == sorted([*both, "abandoned"], key=str) and second == sorted(both, key=str)


def stopped(world: World) -> str:
    def stop() -> None:
        raise ZeroDivisionError

    try:
        if world.first:
            Posts(world).all("never", stop)
    except ZeroDivisionError:
        return "stopped"
    finally:
        world.barrier()
    return ""


def test_who_waits_asks_whether_to_go_on() -> None:
    assert run_ranks(stopped, 2) == ["stopped", ""]


def test_one_process_needs_no_store() -> None:
    posts = Posts(ALONE)
    posts.put("x", [1])
    posts.fail()
    assert posts.all("x", nothing) == [[1]]


def test_a_store_that_is_gone_is_lost_contact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")

    def gone() -> None:
        raise RuntimeError("Connection refused")

    monkeypatch.setattr("jetrl.parallel.posts.connect", gone)
    with pytest.raises(LostContact, match=r"the store of the run: Connection refused"):
        Posts(World(0, 2, 0)).put("x", 1)
    Posts(World(0, 2, 0)).fail()  # then nobody waits
