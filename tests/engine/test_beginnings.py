"""Which pages hold which beginning: whole pages, by all tokens up to their end, until they are given out again."""

from __future__ import annotations

import numpy as np
import pytest
from hash_model import HashModel, make_engine, straight
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl.engine.pages import Beginnings, PageAllocator, page_digests
from jetrl.types import Request, SamplingParams, WeightSet


def test_a_digest_is_of_all_tokens_up_to_the_end_of_a_page() -> None:
    tokens = np.arange(11, dtype=np.int32)
    digests = page_digests(tokens, 4)
    assert len(digests) == 2 and len(set(digests)) == 2
    assert page_digests(tokens[:8], 4) == digests and page_digests(tokens, 4, digests[:1]) == digests
    other = tokens.copy()
    other[0] = 9
    assert not set(page_digests(other, 4)) & set(digests), "the second page has equal tokens, but another beginning"


def test_the_longest_known_beginning_is_found() -> None:
    known = Beginnings()
    for digest, page in ((b"a", 4), (b"b", 5), (b"d", 6)):
        known.add(digest, page)
    known.add(b"b", 9)
    assert known.find([b"a", b"b", b"c", b"d"]) == [4, 5] and known.find([b"x", b"a"]) == []
    known.drop([5, 9, 2])
    assert known.find([b"a", b"b"]) == [4] and len(known) == 2
    known.clear()
    assert known.find([b"a"]) == [] and len(known) == 0


def test_pages_that_nobody_holds_are_known_until_they_are_given_out() -> None:
    allocator = PageAllocator(4, 2)
    first, second = allocator.allocate(2)
    allocator.beginnings.add(b"1", first), allocator.beginnings.add(b"2", second)
    allocator.free([first, second])
    assert allocator.allocate(2) == [2, 3], "those that were freed first are given out first"
    allocator.read([first])
    allocator.check_integrity([[first], [2, 3]])
    assert allocator.num_free == 1 and allocator.peak_used == 3
    assert allocator.allocate(1) == [second] and allocator.beginnings.find([b"1", b"2"]) == [first]
    allocator.free([first, 2, 3, second])
    allocator.resize(3)
    assert allocator.beginnings.find([b"1"]) == []


def test_the_page_that_a_sequence_had_begun_is_found_by_its_tokens() -> None:
    known, tokens = Beginnings(), np.arange(9, dtype=np.int32)
    known.add_end(b"a", tokens[:2], 4), known.add_end(b"a", tokens[:3], 5), known.add_end(b"", tokens[:3], 6)
    known.add_end(b"a", tokens[:3], 7), known.add_end(b"b", tokens[:3], 4)
    assert known.find_end(b"a", tokens) == (5, 3) and known.find_end(b"a", tokens[:2]) == (4, 2)
    assert known.find_end(b"", tokens) == (6, 3) and known.find_end(b"a", tokens[:1]) == (0, 0)
    assert known.find_end(b"a", tokens[1:]) == known.find_end(b"c", tokens) == (0, 0) and len(known) == 0
    known.drop([5, 7])
    assert known.find_end(b"a", tokens) == (4, 2) and known.find_end(b"b", tokens) == (4, 3)
    known.drop([4, 6])
    assert not known._ends and not known._keys
    known.add_end(b"a", tokens, 1)
    known.clear()
    assert known.find_end(b"a", tokens) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_conversations_go_on_in_pages_that_were_begun(data: st.DataObject) -> None:
    """Random trees of requests that go on from others' tokens, whole or cut, some beside each other, in a cache that is
    large or hardly enough: each answer is that of a model without a cache."""
    size, seqs = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3))
    engine = make_engine(
        HashModel(), page_size=size, max_num_seqs=seqs, max_tokens_per_step=data.draw(st.integers(3, 30)),
        kv_cache_tokens=data.draw(st.sampled_from([90, 140, 600])),
    )
    known = [tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=9)))]
    for turn in range(data.draw(st.integers(1, 6))):
        asked = []
        for i in range(data.draw(st.integers(1, 3))):
            before = data.draw(st.sampled_from(known))
            cut = data.draw(st.integers(0, len(before))) if data.draw(st.booleans()) else len(before)
            more = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
            tokens = (*before[:cut], *more)[:70]
            asked.append(Request(10 * turn + i, tokens, SamplingParams(data.draw(st.integers(1, 6)), ignore_eos=True)))
        for request, found in zip(asked, engine.generate(asked), strict=True):
            tokens, logprobs = straight(HashModel(), request)
            assert found.tokens.tolist() == tokens and found.logprobs.tolist() == logprobs
            known.append((*request.tokens, *tokens))


def test_an_agents_next_turn_computes_its_new_tokens_and_one_more() -> None:
    """What the last turn drew last was not computed. Two that go on from one turn take a copy each."""
    engine = make_engine(model := HashModel(), page_size=8, kv_cache_tokens=400)
    prompt = tuple(range(1, 14))
    (first,) = engine.generate([Request(0, prompt, SamplingParams(5, ignore_eos=True))])
    history = (*prompt, *first.tokens.tolist())
    model.rows[:] = []
    asked = [Request(i, (*history, i, i), SamplingParams(3, ignore_eos=True)) for i in (1, 2)]
    for request, found in zip(asked, engine.generate(asked), strict=True):
        assert found.tokens.tolist() == straight(HashModel(), request)[0]
    assert model.rows[0] == 6, "of each the two new tokens, and the one that the first turn drew last"


@pytest.mark.parametrize("share", [True, False])
def test_other_requests_read_them_with_the_same_bits(share: bool) -> None:
    """While others run, when nobody does, with other page sizes; not after other weights, nor in a new cache."""
    system = tuple(range(1, 30))
    asked = [Request(i, (*system, i), SamplingParams(4, ignore_eos=True)) for i in range(6)]
    for sizes in ({"page_size": 4}, {"page_size": 3, "kv_cache_tokens": 60, "max_num_seqs": 2}):
        engine = make_engine(model := HashModel(), kv_cache_tokens=sizes.pop("kv_cache_tokens", 400),
                             share_beginnings=share, **sizes)
        for number, r in enumerate(asked):
            (found,) = engine.generate([r])
            tokens, logprobs = straight(HashModel(), r)
            assert found.tokens.tolist() == tokens and found.logprobs.tolist() == logprobs
            computed, model.rows[:] = model.rows[0], []
            assert (computed < 30) == (share and number in (1, 2, 5)), number
            if number == 2:
                engine.load(WeightSet(4, "flow", {}))
            if number == 3:
                engine.release()
        together = engine.generate(asked)
        assert [c.tokens.tolist() for c in together] == [straight(HashModel(), r)[0] for r in asked]


def test_a_cache_that_was_given_back_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where an idle engine frees a cache that training needs the memory of."""
    engine = make_engine(model := HashModel(), page_size=4, kv_cache_tokens=80)
    monkeypatch.setattr(engine.runner, "give_back", engine.runner.release)
    r = Request(1, tuple(range(1, 20)), SamplingParams(3, ignore_eos=True))
    first = engine.generate([r])
    assert engine.generate([r]) == first and [n for n in model.rows if n > 1] == [19, 19]
