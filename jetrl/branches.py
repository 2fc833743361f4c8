"""A conversation whose history was changed is a tree of turns. No torch.

Its segments are in the order of the tree: each follows the one before it, or begins a branch, which says what it goes
on from. The learner computes rows: the paths from a prompt to an end. A segment that several rows have is trained in
the first of them, and is context in the others.

    0 prompt, 1 turn, 2 reply, 3 turn, 4 other reply (branch after 1), 5 turn
    rows: 0 1 2 3, and 0 1 4 5, of which 4 and 5 are its own
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

_FORKED = 1 << 62  # in the ids of branches, so that they are none of those that a run counts


class Branch(NamedTuple):
    """Where a segment begins a branch. `after`: the place of the segment that it follows, -1: it begins anew, with
    another prompt. `stream`: the request id that names the branch's random stream."""

    after: int
    stream: int


class Row(NamedTuple):
    """One sequence for the learner. Its segments from place `own` on are in no row before. `stream`: the request id
    that drew those; None: the trajectory's."""

    segments: tuple[Any, ...]  # of `types.Segment`
    own: int
    stream: int | None


def in_order(parents: Sequence[int]) -> list[int]:
    """The places of segments in the order of their tree. `parents`: what each follows, a segment before it or -1."""
    below: dict[int, list[int]] = {}
    for place, parent in enumerate(parents):
        below.setdefault(parent, []).append(place)
    order: list[int] = []
    left = below.get(-1, [])[::-1]
    while left:
        place = left.pop()
        order.append(place)
        left += below.get(place, [])[::-1]
    return order


def stream_of(key: int, tokens: Sequence[int], taken: Any) -> int:
    """The request id of a branch of conversation `key` that goes on from `tokens`: none of those that are `taken`.

    A random stream of its own: with that of the conversation, what a branch draws would depend on what was drawn at
    the same place before, which its prompt may hold.
    """
    row = np.array(tokens, dtype=np.int32).tobytes()
    count = 0
    while True:
        digest = blake2b(b"%d %d " % (key, count) + row, digest_size=8).digest()
        if (found := int.from_bytes(digest, "big") >> 2 | _FORKED) not in taken:
            return found
        count += 1


def rows_of(segments: Sequence[Any]) -> list[Row]:
    """The rows of a trajectory's segments, in order: one, unless there are branches."""
    rows: list[Row] = []
    paths: list[tuple[Any, ...]] = []
    path: tuple[Any, ...] = ()
    own = 0
    stream: int | None = None
    if not any(one.branch for one in segments):
        return [Row(tuple(segments), 0, None)]
    for one in segments:
        if one.branch is not None:
            rows.append(Row(path, own, stream))
            path = paths[one.branch.after] if one.branch.after >= 0 else ()
            own, stream = len(path), one.branch.stream
        path = (*path, one)
        paths.append(path)
    return [*rows, Row(path, own, stream)]


def packed_length(segments: Sequence[Any]) -> int:
    """Tokens of all rows: what several have counts in each."""
    return sum(len(one.tokens) for row in rows_of(segments) for one in row.segments)
