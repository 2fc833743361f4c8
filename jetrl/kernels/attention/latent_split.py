"""Latent attention of decode steps with few sequences: the bits of `latent_triton`, by many programs.

There one program takes a chunk of 1,024 keys of a sequence, so one sequence of 8K keys occupies 8 of a GPU's 132
processors. Here

    scores   of each tile of keys are a program's, and are kept in FP32: they depend on their tile alone
    values   go through a chunk's tiles as there (`latent_chain.add_scores`), each program for some columns of the
             latents; maxima and sums, which each of them needs, are computed by all

Columns of a product do not meet, and scores in memory are those that were computed. What a chunk leaves is what a
program of `latent_triton` leaves. Rows are read twice, the second time from the cache of the GPU.

Legend: as in `latent_triton`; `B` sequences.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.attention.latent import LatentSizes, Steps
from jetrl.kernels.attention.latent_chain import add_scores, queries_of, scores_of
from jetrl.kernels.launch import LAUNCH, begin

SEQUENCES = 1  # at most, for which this is faster (benchmarks/bench_latent.py --parts forms)
SCRATCH_BYTES = 1 << 28  # the most that scores take
_COLUMNS = 64  # of a program


@triton.jit(do_not_specialize=["width", "low", "first", "tiles"])
def _scores_kernel(
    q, rows, table, queries, keys, scores, width, low, first, tiles, N: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):
    """Scores [B, tiles, ROWS, TILE] of one tile of a sequence with one token; -inf behind the last key."""
    begin(PDL)
    sequence, t = low + tl.program_id(0), tl.program_id(1) * TILE
    depth = tl.load(keys + sequence)
    if t < depth:
        r, e, f, k = tl.arange(0, ROWS), tl.arange(0, L), tl.arange(0, R), tl.arange(0, TILE)
        line = tl.load(table + sequence * width + t // PAGE).to(tl.int64) * PAGE + t % PAGE + k
        c = tl.load(rows + line[:, None] * (L + R) + e[None, :])
        kr = tl.load(rows + line[:, None] * (L + R) + (L + f)[None, :])
        at = (tl.load(queries + sequence) - first).to(tl.int64) * N + r
        qc, qr = queries_of(q, at, r < N, L, R)
        s = tl.where((t + k < depth)[None, :], scores_of(qc, qr, c, kr), float("-inf"))
        to = scores + (tl.program_id(0) * tiles + tl.program_id(1)).to(tl.int64) * (ROWS * TILE)
        tl.store(to + r[:, None] * TILE + k[None, :], s)


@triton.jit(do_not_specialize=["width", "low", "first", "tiles", "chunks"])
def _values_kernel(
    rows, table, queries, keys, scores, out, tops, sums, accs, scale, width, low, first, tiles, chunks,
    N: tl.constexpr, L: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    PAGE: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):
    """COLUMNS columns of a chunk's outputs. WHOLE: there is one chunk, and the result is final."""
    begin(PDL)
    sequence, chunk, part = low + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    depth = tl.load(keys + sequence)
    begun = chunk * CHUNK
    end = tl.minimum(begun + CHUNK, depth)
    if begun < end:
        r, e, k = tl.arange(0, ROWS), part * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, TILE)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        acc, total = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, 16], tl.float32)
        at_s = scores + tl.program_id(0).to(tl.int64) * tiles * (ROWS * TILE) + r[:, None] * TILE + k[None, :]
        pages = table + sequence * width
        page = tl.load(pages + begun // PAGE)
        for t in range(begun, end, TILE):
            line = page.to(tl.int64) * PAGE + t % PAGE + k
            page = tl.load(pages + tl.minimum(t + TILE, end - 1) // PAGE)  # the next tile's
            s = tl.load(at_s + t * ROWS)
            c = tl.load(rows + line[:, None] * (L + R) + e[None, :])
            top, total, acc = add_scores(s, c, top, total, acc, scale, TILE)
        sum_of, alive = tl.max(total, axis=1), r < N  # of 16 equal columns
        token = (tl.load(queries + sequence) - first).to(tl.int64)
        if WHOLE:
            result = tl.div_rn(acc, tl.broadcast_to(sum_of[:, None], [ROWS, COLUMNS])).to(out.dtype.element_ty)
            tl.store(out + (token * N + r)[:, None] * L + e[None, :], result, mask=alive[:, None])
        else:
            to = ((token - low) * N + r) * chunks + chunk
            if part == 0:
                tl.store(tops + to, top, mask=alive)
                tl.store(sums + to, sum_of, mask=alive)
            tl.store(accs + to[:, None] * L + e[None, :], acc, mask=alive[:, None])


def splits(sequences: int, deepest: int, heads: int) -> bool:
    """Whether steps of so many sequences with one token each, and up to `deepest` keys, go through these kernels."""
    rows = triton.next_power_of_2(max(16, heads))
    return 0 < sequences <= SEQUENCES and 4 * sequences * deepest * rows <= SCRATCH_BYTES


def attend_chunks(
    q: Tensor, pages: Tensor, table: Tensor, queries: Tensor, keys: Tensor, out: Tensor,
    state: tuple[Tensor, Tensor, Tensor], scale: float, sizes: LatentSizes, low: int, high: int, first: int,
    chunks: int, chunk: int, whole: bool, steps: Steps,
) -> None:
    """What `latent_triton`'s programs of the sequences `low` to `high` compute, with one token each: `out`, if `whole`,
    else `state`. `scale` is for powers of two."""
    few, page = triton.next_power_of_2(max(16, sizes.heads)), pages.shape[1]
    tiles, count = table.shape[1] * page // steps.tile, high - low
    scores = torch.empty(count * tiles * few * steps.tile, dtype=torch.float32, device=q.device)
    common: dict[str, Any] = dict(
        N=sizes.heads, L=sizes.rank, R=sizes.rope, ROWS=few, TILE=steps.tile, PAGE=page, num_warps=4,
        enable_fp_fusion=False, **LAUNCH,
    )
    _scores_kernel[(count, tiles)](
        q, pages, table, queries, keys, scores, table.stride(0), low, first, tiles, num_stages=1, **common
    )
    columns = min(_COLUMNS, sizes.rank)
    _values_kernel[(count, chunks, sizes.rank // columns)](
        pages, table, queries, keys, scores, out, *state, scale, table.stride(0), low, first, tiles, chunks,
        COLUMNS=columns, CHUNK=chunk, WHOLE=whole, num_stages=4, **common,
    )
