"""Groups of sequences with the same first pages: nothing is read that is not there, and what can be saved is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl.rollout.sharing import Sharing, find_sharing

PAGE = 256


def table_of(rows: list[list[int]], width: int) -> np.ndarray:
    return np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int32)


def check(found: Sharing, table: np.ndarray, positions: np.ndarray, size: int) -> None:
    """Every sequence is in at most one chunk, and its shared tiles are full of the same keys, before its own page."""
    seen: set[int] = set()
    saved = 0
    for members, tiles in zip(found.members.tolist(), found.tiles.tolist(), strict=True):
        real = [m for m in members if m >= 0]
        assert len(members) == size and members[: len(real)] == real and len(real) >= 2 and not seen & set(real)
        assert tiles > 0 and tiles * 128 % PAGE == 0
        seen |= set(real)
        pages = tiles * 128 // PAGE
        for m in real:
            assert found.first[m] == tiles and positions[m] // PAGE >= pages
            assert (table[m, :pages] == table[real[0], :pages]).all()
        saved += (len(real) - 1) * tiles * 128
    assert found.saved == saved
    assert (found.first[[b for b in range(len(table)) if b not in seen]] == 0).all()


def test_samples_of_two_prompts() -> None:
    rows = [[1, 2, 3, 7], [4, 5, 8], [1, 2, 3, 9], [4, 5, 10, 11], [1, 2, 3, 12], [13, 14]]
    table, positions = table_of(rows, 6), np.array([3 * PAGE, 2 * PAGE + 9, 4 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1, 300])
    found = find_sharing(table, positions, PAGE, 4)
    check(found, table, positions, 4)
    assert found.first.tolist() == [6, 4, 6, 4, 6, 0]
    assert sorted(found.members.tolist()) == [[0, 2, 4, -1], [1, 3, -1, -1]]
    assert found.saved == 2 * 3 * PAGE + 2 * PAGE


def test_the_page_of_a_new_token_is_not_shared() -> None:
    """Copies of a partial page are taken when they are written to; until then the table shows one page."""
    table = table_of([[1, 2], [1, 2]], 2)
    found = find_sharing(table, np.array([PAGE + 5, PAGE + 5]), PAGE, 8)
    assert found.first.tolist() == [2, 2]
    found = find_sharing(table, np.array([PAGE - 1, PAGE + 5]), PAGE, 8)
    assert not found.members.size and not found.tiles.size and not found.saved


def test_what_shares_more_stays_together() -> None:
    """A page that all have, and prompts of eight pages that four have each."""
    rows = [[1, *range(10 * g, 10 * g + 7), 100 + 10 * g + i] for i in range(4) for g in (1, 2, 3)]
    table = table_of(rows, 12)
    found = find_sharing(table, np.full(12, 8 * PAGE + 3), PAGE, 16)
    check(found, table, np.full(12, 8 * PAGE + 3), 16)
    assert sorted(found.tiles.tolist()) == [16, 16, 16] and found.saved == 3 * 3 * 8 * PAGE


def test_a_large_group_falls_into_chunks_and_a_small_gain_does_not_pay() -> None:
    table = table_of([[1, 2 + i] for i in range(9)], 3)
    found = find_sharing(table, np.full(9, PAGE + 1), PAGE, 4)
    check(found, table, np.full(9, PAGE + 1), 4)
    assert len(found.members) == 2 and found.first.tolist().count(0) == 1 and not found.pays(2048)
    deep = table_of([[*range(1, 17), 20 + i] for i in range(256)], 20)
    assert find_sharing(deep, np.full(256, 16 * PAGE), PAGE, 16).pays(2048)


def test_padding_names_no_sequence() -> None:
    found = find_sharing(table_of([[1, 2], [3, 4], [1, 5]], 2), np.full(3, PAGE), PAGE, 4)
    first, members, tiles = found.padded(8)
    assert first.tolist() == [2, 0, 2, 0, 0, 0, 0, 0] and tiles.tolist() == [2, 0, 0, 0]
    assert members.tolist() == [[0, 2, -1, -1]] + [[-1] * 4] * 3


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_tables(data: st.DataObject) -> None:
    """Whatever pages are shared: nothing wrong is read, and equal prompts are found."""
    count, size = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    width = 6
    rows, positions = [], []
    fresh = iter(range(1000, 9999))
    prompts = [[100 * p + i for i in range(data.draw(st.integers(0, 4)))] for p in range(1, 4)]
    for _ in range(count):
        row = list(data.draw(st.sampled_from(prompts)))
        positions.append(len(row) * PAGE + data.draw(st.integers(0, PAGE - 1)))
        rows.append([*row, next(fresh)])
    table, at = table_of(rows, width), np.array(positions)
    found = find_sharing(table, at, PAGE, size)
    check(found, table, at, size)
    if size > 1:
        best = 0
        for prompt in prompts:
            n = sum(row[:-1] == prompt for row in rows)
            best += (n - -(-n // size)) * len(prompt) * PAGE
        assert found.saved >= best


@pytest.mark.parametrize("count", [0, 1])
def test_nobody_to_share_with(count: int) -> None:
    found = find_sharing(np.ones((count, 3), dtype=np.int32), np.full(count, 600), PAGE, 4)
    assert found.first.tolist() == [0] * count and not found.saved and not found.pays(2048)
