"""Which CUDA graph serves a batch: a capture is made for a size that stays, not for one that passes by."""

from __future__ import annotations

import pytest

from jetrl.rollout.graphs import GraphSize, choose, padded_batch


@pytest.mark.parametrize(("n", "size"), [(1, 1), (3, 4), (16, 16), (17, 32), (255, 256), (256, 256), (257, 320)])
def test_sizes_hold_their_batch(n: int, size: int) -> None:
    assert padded_batch(n) == size


def test_the_first_demands_are_met_by_a_captured_graph_of_up_to_twice_the_rows() -> None:
    big, need = GraphSize(256, 32, True), GraphSize(240, 32, True)
    assert choose([], need, 1) == need, "nothing else is there"
    assert choose([big], need, 1) == big and choose([big], need, 2) == big
    assert choose([big], need, 3) == need, "asked for again and again: its own graph pays off"
    assert choose([big, need], need, 1) == need
    assert choose([big, GraphSize(272, 32, True)], need, 1) == big, "the smallest that holds it"


@pytest.mark.parametrize(
    "other", [GraphSize(128, 32, True), GraphSize(512, 32, True), GraphSize(256, 16, True), GraphSize(256, 32, False)]
)
def test_a_graph_that_does_not_fit_is_not_taken(other: GraphSize) -> None:
    """Too few rows, more than twice as many, too narrow a page table, no draws."""
    need = GraphSize(240, 32, True)
    assert choose([other], need, 1) == need


def test_a_wider_table_serves_a_narrower_one() -> None:
    wide = GraphSize(64, 64, True)
    assert choose([wide], GraphSize(64, 32, True), 1) == wide


def test_a_batch_that_runs_dry_captures_few_graphs() -> None:
    """256 sequences of ragged lengths that end one after another, 8 steps a look: each size is met about once."""
    captured: dict[GraphSize, None] = {}
    asked: dict[GraphSize, int] = {}
    for n in range(256, 15, -16):
        need = GraphSize(padded_batch(n), 32, True)
        asked[need] = asked.get(need, 0) + 1
        captured[choose(captured, need, asked[need])] = None
    assert [size.rows for size in captured] == [256, 112, 48, 16]
