"""`Beginnings`: which full pages hold the keys of which beginning of a sequence, so that another reads them. No torch.

A page is known by a digest of all tokens up to its end, once these are computed and final. It stays known after its
last holder has gone, until it is given out again: the page that was freed first is. Only requests that are new look
here; a sequence that was interrupted computes its tokens again.
"""

from __future__ import annotations

import hashlib
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

    def drop(self, pages: Iterable[int]) -> None:
        """These pages are given out, and will hold something else."""
        for page in pages:
            if page in self._digests:
                del self._pages[self._digests.pop(page)]

    def clear(self) -> None:
        """The keys are gone, or of other weights."""
        self._pages.clear()
        self._digests.clear()

    def __len__(self) -> int:
        return len(self._pages)
