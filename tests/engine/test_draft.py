"""Drafts against a plain search: which place gives the draft, and how far it reaches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl.engine.speculation.drafts import DEEPEST, NGRAMS, DraftIndex, num_texts

CPU = torch.device("cpu")


class Exact(DraftIndex):
    """Every n-gram of tokens below 4 and groups below 3 has its own place; in a hash table another may take it."""

    def __init__(self, rows: int, longest: int, device: torch.device) -> None:
        super().__init__(rows, longest, device)
        self._sizes = torch.tensor([5**n for n in NGRAMS])
        self._firsts = self._sizes.cumsum(0) - self._sizes
        self.places = torch.full((3 * int(self._sizes.sum()) + 1,), -1, dtype=torch.int64)

    def _keys(self, tail: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        digits = (tail + 1) * 5 ** torch.arange(NGRAMS[0])
        return groups[..., None] * self._sizes.sum() + self._firsts + digits.cumsum(-1)[..., self._last]


def index_of(
    texts: list[list[int]], groups: list[int], pieces: int = 1, kind: type[DraftIndex] = DraftIndex
) -> DraftIndex:
    """An index that got the texts one after another, or all together in `pieces` rounds."""
    index = kind(len(texts), 64, CPU)
    lengths = np.zeros(len(texts), dtype=np.int64)
    for piece in range(pieces):
        parts = [t[len(t) * piece // pieces : len(t) * (piece + 1) // pieces] for t in texts]
        starts, counts = lengths.copy(), np.array([len(p) for p in parts])
        tokens = np.zeros((len(texts), max(counts.max(), 1)), dtype=np.int64)
        for row, part in enumerate(parts):
            tokens[row, : len(part)] = part
        lengths += counts
        index.put(lengths, np.array(groups))
        index.extend(np.arange(len(texts)), starts, tokens, counts)
    return index


def shared_end(a: list[int], b: list[int]) -> int:
    """How many last tokens, up to the longest n-gram, two texts share."""
    count = 0
    while count < min(NGRAMS[0], len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return count


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 2)), min_size=1, max_size=5),
       st.integers(1, 3), st.sampled_from((1, 3, 7)))
def test_a_draft_follows_the_place_with_the_longest_shared_end(
    case: list[tuple[list[int], int]], pieces: int, depth: int
) -> None:
    texts, groups = [t for t, _ in case], [g for _, g in case]
    index = index_of(texts, groups, pieces, Exact)
    drafts, counts, sources = index.draft(torch.arange(len(texts)), depth)
    for row, text in enumerate(texts):
        places = [
            (shared_end(text, other[:end]), r, end)
            for r, other in enumerate(texts) if groups[r] == groups[row] for end in range(len(other))
        ]
        longest = max((n for n, _, _ in places), default=0)
        count, source = int(counts[row]), int(sources[row])
        assert (count > 0) == (longest >= NGRAMS[-1]) == (source < len(texts)), "a place was missed, or made up"
        if not count:
            continue
        draft = drafts[row, :count].tolist()
        assert source == row or count <= len(texts[source])
        if source == row:
            assert count == depth, "a text that repeats itself goes on for ever"
        # ends are looked up by n-grams of a few lengths: a place that shares as many tokens as the next shorter one
        enough = max(n for n in NGRAMS if n <= longest)
        fits = []
        for shared, r, end in places:
            if r == source and shared >= enough:
                rest = texts[r][end:]
                more = rest * depth if r == row else rest
                fits.append(more[:count] == draft and (r == row or len(rest[:depth]) == count))
        assert any(fits), (texts, row, draft)


def test_the_newest_of_equal_places_wins_and_other_prompts_do_not_count() -> None:
    end = [1, 2, 3, 4, 5, 6, 7, 8]
    texts = [[*end, 10, 11], [*end, 20, 21, 22], [*end, 30], list(end)]
    for order, first in (([0, 1, 3], 20), ([1, 0, 3], 10)):
        index = DraftIndex(4, 64, CPU)
        lengths = np.zeros(4, dtype=np.int64)
        for row in order:
            lengths[row] = len(texts[row])
            index.put(lengths, np.array([5, 5, 6, 5]))
            index.extend(np.array([row]), np.array([0]), np.array([texts[row]]), np.array([len(texts[row])]))
        drafts, counts, sources = index.draft(torch.tensor([3, 4]), 3)
        assert int(drafts[0, 0]) == first and int(counts[0]) == (3 if first == 20 else 2)
        assert sources.tolist() == [first // 10 - 1, 4] and int(counts[1]) == 0, "padding rows get no drafts"


def test_writing_step_by_step_is_what_the_host_sends() -> None:
    """Also what a step drew beyond what counts: it is neither a text's nor a place."""
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 3, (3, 60))
    sent, written = index_of(texts.tolist(), [1, 1, 2]), DraftIndex(3, 64, CPU)
    written.put(np.zeros(3, dtype=np.int64), np.array([1, 1, 2]))
    rows, length = torch.tensor([2, 0, 3, 1, 3]), torch.zeros(5, dtype=torch.int64)
    while int(length.min()) < 60 and int(length[:2].min()) < 60:
        counts = torch.minimum(torch.from_numpy(rng.integers(0, 9, 5)), 60 - length)
        counts[rows == 3] = 0
        wide = np.full((5, 8), 7)
        for i, row in enumerate(rows.tolist()):
            if row < 3:
                wide[i, : counts[i]] = texts[row, length[i] : length[i] + counts[i]]
        written.write(rows, length, torch.from_numpy(wide), counts)
        length += counts
        length[rows == 3] = 0
        if bool((length[rows < 3] == 60).all()):
            break
    assert written.lengths.tolist() == [60, 60, 60, 0]
    assert torch.equal(written.texts[:3, :60], sent.texts[:3, :60])
    mask = (1 << 40) - 1  # the places without their stamps: of equal n-grams others may be the newest
    assert torch.equal(written.places[:-1] >= 0, sent.places[:-1] >= 0)
    lonely = index_of([texts[2].tolist()], [2])
    alone = DraftIndex(1, 64, CPU)
    alone.put(np.zeros(1, dtype=np.int64), np.array([2]))
    for first in range(0, 60, 4):
        part = torch.from_numpy(texts[2:3, first : first + 4])
        alone.write(torch.tensor([0]), torch.tensor([first]), part, torch.tensor([4]))
    assert torch.equal(alone.places[:-1] & mask, lonely.places[:-1] & mask)


def test_a_short_end_may_be_sent_with_a_long_beginning() -> None:
    """All that is sent at once is as wide as the longest of it; that must not reach beyond a text nearly full."""
    rng = np.random.default_rng(1)
    texts, known = rng.integers(0, 50, (2, 64)), np.array([60, 0])
    index = DraftIndex(2, 64, CPU)
    for starts, counts in ((np.array([0, 0]), known), (known, np.array([4, 64]))):
        tokens = np.zeros((2, 64), dtype=np.int64)
        for row in range(2):
            tokens[row, : counts[row]] = texts[row, starts[row] : starts[row] + counts[row]]
        index.put(starts + counts, np.array([3, 4]))
        index.extend(np.arange(2), starts, tokens, counts)
    assert torch.equal(index.texts[:2, :64], torch.from_numpy(texts).to(torch.int32))
    together = index_of(texts.tolist(), [3, 4])
    mask = (1 << 40) - 1  # places without their stamps
    assert torch.equal(index.places[:-1] & mask, together.places[:-1] & mask)


def test_places_are_forgotten_before_stamps_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetrl.engine.speculation.drafts._MAX_STAMP", 10)
    index = index_of([[1, 2, 3, 1, 2]], [0])
    assert int(index.draft(torch.tensor([0]), 1)[0]) == 3
    index.tick(20)
    assert int(index.stamp) == index.num_stamps == 0 and int(index.draft(torch.tensor([0]), 1)[1]) == 0


def test_memory_is_bounded() -> None:
    for slots in (1, 8, 256, 1024):
        for longest in (64, 2048, 20_000, 40_000):
            rows = num_texts(slots, longest)
            assert slots < rows < 1 << 16 and rows * longest <= max(1 << 23, (slots + 1) * longest)
    index = DraftIndex(num_texts(8, 256), 256, CPU)
    assert index.num_bytes < 2 << 20 and index.texts.shape[1] > 256 + DEEPEST
