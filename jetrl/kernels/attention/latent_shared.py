"""Latent attention of decoding sequences whose first pages are the same: those are read once for several of them.

Keys are in chunks at absolute positions, and a chunk is a chain of tiles from the first to the last (`latent_triton`),
so what sequences share comes first in the order of each. A program here takes the shared tiles of one chunk with the
heads of several sequences as its rows, and leaves maxima, sums and outputs in FP32, where `latent_triton` keeps those
of its own programs. A chunk that is shared to its end is finished with that. Where the shared pages end inside a chunk,
the sequence's own program goes on from there. Rows do not affect each other, each has the same tiles in the same order,
and the tensor core gives a row equal bits in programs of 16, 32 and 64 rows: the bits are those without sharing.

For 256 sequences in groups of 16 with 4,096 shared keys, Moonlight's 16 heads and 1,152 bytes a key, a layer reads 302
MB of shared keys instead of 1,208, for 64 rows at a time. Its 36 GFLOP then weigh more than its bytes.

Legend: as in `latent_triton`; `S` sequences in a group of `SharedPages`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.attention.latent import LatentSizes, Steps
from jetrl.kernels.attention.latent_chain import add_tile, queries_of
from jetrl.kernels.attention.state import SharedPages
from jetrl.kernels.launch import LAUNCH, begin

UNIT = 128  # keys of a tile as `SharedPages` counts them


@triton.jit(do_not_specialize=["width", "low", "high", "chunks"])
def _shared_kernel(
    q, rows, table, members, tiles_of, tops, sums, accs, scale, width, low, high, chunks, N: tl.constexpr,
    L: tl.constexpr, R: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):
    """The shared tiles of one chunk, for as many sequences of a group as have their heads in ROWS; of sequences from
    `low` to `high`."""
    begin(PDL)
    SEQUENCES: tl.constexpr = ROWS // N
    PARTS: tl.constexpr = (S + SEQUENCES - 1) // SEQUENCES
    group, part, chunk = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    end = tl.minimum((chunk + 1) * CHUNK, tl.load(tiles_of + group) * UNIT)
    r, e, f, k = tl.arange(0, ROWS), tl.arange(0, L), tl.arange(0, R), tl.arange(0, TILE)
    member = part * SEQUENCES + r // N
    here = (r // N < SEQUENCES) & (member < S) & (chunk * CHUNK < end)
    sequence = tl.load(members + group * S + member, mask=here, other=-1)
    alive = (sequence >= low) & (sequence < high)
    if tl.max(alive.to(tl.int32), axis=0) > 0:
        at = sequence.to(tl.int64) * N + r % N
        qc, qr = queries_of(q, at, alive, L, R)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        acc, total = tl.zeros([ROWS, L], tl.float32), tl.zeros([ROWS, 16], tl.float32)
        pages = table + tl.load(members + group * S) * width
        for t in range(chunk * CHUNK, end, TILE):
            line = tl.load(pages + t // PAGE).to(tl.int64) * PAGE + t % PAGE + k
            c = tl.load(rows + line[:, None] * (L + R) + e[None, :])
            kr = tl.load(rows + line[:, None] * (L + R) + (L + f)[None, :])
            top, total, acc = add_tile(qc, qr, c, kr, None, top, total, acc, scale, ROWS, TILE, False)
        to = ((sequence - low).to(tl.int64) * N + r % N) * chunks + chunk
        tl.store(tops + to, top, mask=alive)
        tl.store(sums + to, tl.max(total, axis=1), mask=alive)
        tl.store(accs + to[:, None] * L + e[None, :], acc, mask=alive[:, None])


def merges(steps: Steps, heads: int) -> bool:
    """Whether a program of such kernels has room for the heads of two sequences."""
    return steps.shared >= 2 * heads


def begin_chunks(
    q: Tensor, pages: Tensor, table: Tensor, shared: SharedPages, state: tuple[Tensor, Tensor, Tensor], scale: float,
    sizes: LatentSizes, low: int, high: int, chunks: int, chunk: int, steps: Steps, gluon: bool,
) -> None:
    """The shared tiles of the sequences `low` to `high` of `q` [B, N, L + R] over `pages` [pages, page, L + R], to
    `state`: maxima, sums [(high - low) * N * chunks] and outputs [..., L], FP32, at (sequence, head, chunk). `scale`
    is for powers of two; a chunk has `chunk` keys. `gluon`: by `latent_rows`, with the same bits."""
    groups, size = shared.members.shape
    assert all(x.is_contiguous() for x in (q, pages, shared.members, shared.tiles)) and table.stride(1) == 1
    assert UNIT % steps.tile == 0 and chunk % steps.tile == 0 and pages.shape[1] % steps.tile == 0
    parts = triton.cdiv(size, steps.shared // sizes.heads)
    kernel: Any = _shared_kernel
    more: dict[str, Any] = {"ROWS": steps.shared, "TILE": steps.tile, "num_stages": 2}
    if gluon:
        from jetrl.kernels.attention.latent_rows import shared_kernel

        kernel, more = shared_kernel, {}
    kernel[(groups * parts, chunks)](
        q, pages, table, shared.members, shared.tiles, *state, scale, table.stride(0), low, high, chunks, N=sizes.heads,
        L=sizes.rank, R=sizes.rope, S=size, PAGE=pages.shape[1], CHUNK=chunk, UNIT=UNIT, num_warps=8,
        enable_fp_fusion=False, **more, **LAUNCH,
    )
