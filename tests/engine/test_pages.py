"""The page allocator: each page has exactly the references that were given out, under any traffic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl.engine.pages import PageAllocator


def test_share_and_free_count_references() -> None:
    allocator = PageAllocator(4, 16)
    pages = allocator.allocate(3)
    assert len(set(pages)) == 3 and allocator.num_free == 1 and allocator.num_used == 3
    allocator.share(pages[:2])
    allocator.free(pages)
    assert allocator.num_used == 2, "shared pages stay in use until the second holder frees them"
    allocator.check_integrity([pages[:2]])
    allocator.free(pages[:2])
    assert allocator.num_free == 4 and allocator.peak_used == 3
    allocator.check_integrity([])


def test_misuse_is_caught() -> None:
    allocator = PageAllocator(2, 4)
    (page,) = allocator.allocate()
    with pytest.raises(AssertionError, match="asked for 2 pages, 1 of 2 are free"):
        allocator.allocate(2)
    allocator.free([page])
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free([page])
    with pytest.raises(AssertionError, match="one of them is free"):
        allocator.share([page])
    with pytest.raises(ValueError, match="page_size=0"):
        PageAllocator(4, 0)


def test_check_integrity_finds_a_leak() -> None:
    allocator = PageAllocator(3, 4)
    pages = allocator.allocate(2)
    with pytest.raises(AssertionError, match="differ from the pages that are held"):
        allocator.check_integrity([pages[:1]])
    allocator.ref_counts[pages[0]] = 0
    with pytest.raises(AssertionError, match="without a reference"):
        allocator.check_integrity()


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert PageAllocator(8, 16).pages_for(tokens) == pages


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7), st.integers(1, 3)), max_size=60))
def test_random_traffic(actions: list[tuple[int, int, int]]) -> None:
    allocator = PageAllocator(8, 4)
    holders: list[list[int]] = []
    for kind, which, count in actions:
        if kind == 0 and count <= allocator.num_free:
            holders.append(allocator.allocate(count))
        elif kind == 1 and holders:
            pages = holders[which % len(holders)]
            allocator.share(pages)
            holders.append(list(pages))
        elif kind == 2 and holders:
            allocator.free(holders.pop(which % len(holders)))
        allocator.check_integrity(holders)
