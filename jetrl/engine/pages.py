"""`PageAllocator`: which pages of the KV cache are in use, and by how many sequences. Plain numbers; no torch.

A page holds the keys and values of `page_size` neighbouring tokens of one sequence. Sequences with the same beginning
share its pages: each holder has one reference, and a page is free again when its last reference goes. A page with more
than one reference must not be written; the scheduler takes a fresh page and asks the runner to copy (copy on write).

`Beginnings` knows which full pages hold the keys of which beginning of a sequence, so that another reads them. A page
is known by a digest of all tokens up to its end, once these are computed and final. It stays known after its last
holder has gone, until it is given out again: the page that was freed first is. Only requests that are new look there;
a sequence that was interrupted computes its tokens again. Of a sequence that has ended, the page that it had begun is
known as well, by all of its tokens: who goes on from there (an agent's next turn) takes a copy of that page.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np


def page_digests(tokens: np.ndarray, page_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """Of each full page of `tokens` [n] int32 the digest of the tokens up to its end; `known` are the first of them."""
    digests = list(known)
    for page in range(len(digests), len(tokens) // page_size):
        before = digests[-1] if digests else b""
        own = tokens[page * page_size : (page + 1) * page_size].tobytes()
        digests.append(hashlib.blake2b(before + own, digest_size=16).digest())
    return digests


class Beginnings:
    """Pages by the tokens up to their ends."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        # pages that are not full: by the digest of the full ones before, the number of tokens, and these
        self._ends: dict[bytes, dict[int, dict[bytes, int]]] = {}
        self._keys: dict[int, list[tuple[bytes, int, bytes]]] = {}  # of each such page; several: another grew in it

    def add(self, digest: bytes, page: int) -> None:
        """The keys of these tokens are in `page`. Where another page has them already, that one stays."""
        if digest not in self._pages:
            self._pages[digest] = page
            self._digests[page] = digest

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The pages of the longest beginning that is known, from the first one on."""
        pages = []
        for digest in digests:
            if digest not in self._pages:
                break
            pages.append(self._pages[digest])
        return pages

    def add_end(self, before: bytes, tokens: np.ndarray, page: int) -> None:
        """The keys of these `tokens` [n] int32, fewer than a page, behind the full pages up to the digest `before`
        (b"": none), are the first in `page`."""
        key = before, len(tokens), tokens.tobytes()
        same_length = self._ends.setdefault(before, {}).setdefault(len(tokens), {})
        if key[2] not in same_length:
            same_length[key[2]] = page
            self._keys.setdefault(page, []).append(key)

    def find_end(self, before: bytes, tokens: np.ndarray) -> tuple[int, int]:
        """The page that is not full with the most of the first `tokens` [n] int32 behind `before`, and how many; else 0
        and 0."""
        known = self._ends.get(before, {})
        for length in sorted((length for length in known if length <= len(tokens)), reverse=True):
            page = known[length].get(tokens[:length].tobytes())
            if page is not None:
                return page, length
        return 0, 0

    def drop(self, pages: Iterable[int]) -> None:
        """These pages are given out, and will hold something else."""
        for page in pages:
            if page in self._digests:
                del self._pages[self._digests.pop(page)]
            for before, length, tokens in self._keys.pop(page, ()):
                known = self._ends[before]
                del known[length][tokens]
                if not known[length]:
                    del known[length]
                if not known:
                    del self._ends[before]

    def clear(self) -> None:
        """The keys are gone, or of other weights."""
        for known in (self._pages, self._digests, self._ends, self._keys):
            known.clear()

    def __len__(self) -> int:
        return len(self._pages)


class PageAllocator:
    """`num_pages` pages of `page_size` tokens, with a reference count each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"need at least one page of one token, got num_pages={num_pages}, page_size={page_size}")
        self.page_size, self.beginnings = page_size, Beginnings()
        self._begin(num_pages)

    def _begin(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.ref_counts = np.zeros(num_pages, dtype=np.int32)
        self.beginnings.clear()
        self.peak_used = 0
        self._free = OrderedDict.fromkeys(range(num_pages))  # in order: the page freed first is given out first

    def resize(self, num_pages: int) -> None:
        """Another number of pages, while none is in use. `peak_used` begins again."""
        assert self.num_used == 0 and num_pages >= 1, f"{self.num_used} pages are in use"
        self._begin(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a sequence of `num_tokens` tokens fills or begins."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int = 1) -> list[int]:
        """Take `count` free pages, with one reference each. The caller has checked `num_free`."""
        assert 0 <= count <= len(self._free), f"asked for {count} pages, {len(self._free)} of {self.num_pages} are free"
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        self.beginnings.drop(pages)
        self.ref_counts[pages] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return pages

    def read(self, pages: Sequence[int]) -> None:
        """One more reference to each of `pages` (distinct) that `beginnings` has named; free ones are so no longer."""
        for page in pages:
            self._free.pop(page, None)
            self.ref_counts[page] += 1
        self.peak_used = max(self.peak_used, self.num_used)

    def share(self, pages: Sequence[int] | np.ndarray) -> None:
        """One more reference to each of `pages` (distinct pages in use)."""
        assert (self.ref_counts[pages] > 0).all(), f"pages {list(pages)} are shared, but one of them is free"
        self.ref_counts[pages] += 1

    def free(self, pages: Sequence[int] | np.ndarray) -> None:
        """Drop one reference to each of `pages` (distinct); pages without references can be allocated again."""
        for page in pages:
            page = int(page)
            count = self.ref_counts[page]
            assert count > 0, f"page {page} is freed twice"
            self.ref_counts[page] = count - 1
            if count == 1:
                self._free[page] = None

    def check_integrity(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Assert that no page is lost or doubly owned; with `holders` (the pages of each holder), that counts match."""
        free, idle = set(self._free), set(np.flatnonzero(self.ref_counts == 0).tolist())
        assert idle == free, f"pages without a reference that are not free, or the reverse: {idle ^ free}"
        assert (self.ref_counts >= 0).all(), "a negative reference count"
        if holders is not None:
            held = Counter(page for pages in holders for page in pages)
            counts = {page: int(self.ref_counts[page]) for page in np.flatnonzero(self.ref_counts).tolist()}
            assert held == counts, f"references {counts} differ from the pages that are held {dict(held)}"
