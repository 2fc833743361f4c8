"""Which decoding sequences have their first pages in common, so that attention reads those once. No torch.

Samples of a prompt share its full pages (the last, partial one is private as soon as they write). The page table alone
tells: equal pages at the same place hold the same keys. What is found stays right while the sequences grow, so one
search serves a burst of steps. Nothing here changes a bit (`kernels.attention.decode_shared`, `latent_shared`).

Legend: `B` sequences, `M` pages per sequence, `C` chunks, `S` sequences in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jetrl.precision.blocks.attention import KEYS
from jetrl.precision.blocks.latent import LATENT
from jetrl.precision.blocks.layouts import states_of
from jetrl.spec import ModelSpec

Merge = Literal["auto", "on", "off"]  # `rollout.merge_prefix`
TILE = 128  # keys
SHARE_FROM = 17  # sequences; "auto" merges for no fewer: their keys are read in parallel
READ_RATE = 3.8e6  # bytes per microsecond of decode attention
# Microseconds of a layer's shared tiles: at all, and for each tile of the longest chunk. From benchmarks/bench_tail.py
# on an H200 (groups of 8 and 16): nothing that merges by these is slower. Measured before tiles were read ahead, which
# needs less per tile, so they ask for more than needed.
START_COST, TILE_COST = 16.0, 4.6
# The same of latent attention, whose products cost more than the bytes: what a program of 64 heads takes for a tile,
# and the rate at which sequences read for themselves, some of it from L2. From `benchmarks/bench_latent.py --parts
# shared` on an H200, groups of 16: of seven cases four merge by these, which were 1.4 to 1.6 times as fast.
LATENT_TILE_COST = 9.0
LATENT_READ_RATE = 4.6e6  # bytes per microsecond
LATENT_CHUNK = 8  # tiles that one program takes
PROCESSORS = 132  # programs at once


def served(spec: ModelSpec, page_size: int) -> bool:
    """Whether there are kernels that read shared pages once, for such heads and pages of whole tiles."""
    kept = {name for _, name in states_of(spec)}
    if LATENT in kept:
        return page_size % TILE == 0 and chunk_size(spec.num_heads) > 1
    if KEYS not in kept:
        return False
    return page_size % TILE == 0 and spec.num_heads // spec.num_kv_heads <= 16 and spec.head_dim in (64, 128)


def heads_of_a_key(spec: ModelSpec) -> int:
    """Query heads that read one key: of a latent, all."""
    return spec.num_heads if spec.latent is not None else spec.num_heads // spec.num_kv_heads


def chunk_size(heads: int) -> int:
    """Sequences whose `heads` query heads of a key/value head fit in the 64 rows of the tensor core."""
    return 64 // heads


@dataclass(frozen=True, slots=True)
class Sharing:
    """The columns of `types.SharedPages`, and what they save."""

    first: np.ndarray  # [B] int32
    members: np.ndarray  # [C, S] int32
    tiles: np.ndarray  # [C] int32
    saved: int  # keys that are not read again, of all sequences

    @property
    def room(self) -> int:
        """The chunks, rounded up to a power of two: what a graph is captured for. 0: nothing is shared."""
        chunks = len(self.members)
        return 1 << (chunks - 1).bit_length() if chunks else 0

    def pays(self, key_bytes: int, latent: bool = False) -> bool:
        """Whether a layer whose keys and values, or latents, take `key_bytes` a token needs less time: an estimate from
        what was measured."""
        deepest = int(self.tiles.max(initial=0))
        if not latent:
            return self.saved * key_bytes / READ_RATE > START_COST + TILE_COST * deepest
        apart = (self.saved + TILE * int(self.tiles.sum())) * key_bytes / LATENT_READ_RATE
        rounds = -(-int((-(-self.tiles // LATENT_CHUNK)).sum()) // PROCESSORS)
        return apart > START_COST + LATENT_TILE_COST * rounds * min(LATENT_CHUNK, deepest)

    def merges(self, mode: Merge, sequences: int, key_bytes: int, latent: bool = False) -> bool:
        """Whether a step of so many sequences reads what they share once, as `rollout.merge_prefix` asks."""
        if mode == "on":
            return bool(self.saved)
        return mode == "auto" and sequences >= SHARE_FROM and self.pays(key_bytes, latent)

    def padded(self, rows: int, room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`first`, `members` and `tiles` for `rows` sequences and `room` chunks."""
        chunks, size = self.members.shape
        assert chunks <= room and len(self.first) <= rows
        first, members, tiles = np.zeros(rows, np.int32), np.full((room, size), -1, np.int32), np.zeros(room, np.int32)
        first[: len(self.first)], members[:chunks], tiles[:chunks] = self.first, self.members, self.tiles
        return first, members, tiles


def find_sharing(table: np.ndarray, positions: np.ndarray, page: int, size: int) -> Sharing:
    """Sequences with the pages `table` [B, M], whose new tokens have `positions` [B]; a chunk has up to `size`.

    Only pages that are full for all members are shared, and never the one of the new token. Where a group falls into
    parts that share more, the choice is what reads the fewest keys.
    """
    assert page % TILE == 0 and size >= 1
    count, width = table.shape
    order = np.argsort(np.ascontiguousarray(table).view(f"V{4 * width}")[:, 0], kind="stable")
    rows, full = table[order], positions[order] // page
    common = np.cumprod(rows[1:] == rows[:-1], axis=1).sum(1)
    common = np.minimum(common, np.minimum(full[1:], full[:-1]))  # pages shared with the row before
    first, members, tiles = np.zeros(count, dtype=np.int32), [], []
    saved = 0
    for start, end, depth in _groups(common, 0, count, size)[1]:
        for at in range(start, end, size):
            chunk = np.sort(order[at : min(at + size, end)])
            if len(chunk) < 2:
                continue
            padded = np.full(size, -1, dtype=np.int32)
            padded[: len(chunk)] = chunk
            first[chunk] = depth * page // TILE
            members.append(padded)
            tiles.append(depth * page // TILE)
            saved += (len(chunk) - 1) * depth * page
    shape = (len(members), size)
    return Sharing(first, np.array(members, dtype=np.int32).reshape(shape), np.array(tiles, dtype=np.int32), saved)


def _groups(common: np.ndarray, start: int, end: int, size: int) -> tuple[int, list[tuple[int, int, int]]]:
    """The best groups (start, end, pages) among the sorted rows `start:end`, and how many pages they save."""
    if end - start < 2:
        return 0, []
    inner = common[start : end - 1]
    depth = int(inner.min())
    saved, found = 0, list[tuple[int, int, int]]()
    cuts = [start, *(start + 1 + np.flatnonzero(inner == depth)).tolist(), end]
    for a, b in zip(cuts[:-1], cuts[1:], strict=True):
        more, parts = _groups(common, a, b, size)
        saved, found = saved + more, found + parts
    whole = depth * (end - start - -(-(end - start) // size))
    return (whole, [(start, end, depth)]) if whole >= saved and whole else (saved, found)
