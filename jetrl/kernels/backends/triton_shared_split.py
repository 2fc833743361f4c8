"""The shared tiles of `triton_decode_shared` in parallel, for few chunks: the same bits.

There one program for each chunk and key/value head goes through all tiles: with 4 groups of 16 samples and 8 key heads
32 programs on 132 processors. Here, as in `triton_decode_split`, only what must keep an order is a chain:

1. the scores of a tile and their maximum per row, all tiles at once;
2. the running maximum at a tile is the largest of the sequence's own tiles, of the later tiles and of this one; from it
   follow weights and what rescales older results, all tiles at once;
3. chains: `acc = acc * shrink + weights @ values` by elements of the head, the four parts of the sums in a program of
   their own, both from the state of the own tiles. The program of a chunk and head that ends last divides, rounds and
   quantizes.

Each number is computed by the operations of `triton_decode_shared` in their order; sums are written out one by one.

Legend: `B` sequences, `N` query heads, `G` key/value heads, `H` head size, `C` chunks, `S` sequences in a chunk,
`T` tiles; 64 rows are the query heads of a chunk.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.backends.triton_decode_chain import TILE, _reciprocal, _rows, store_heads, widened
from jetrl.kernels.backends.triton_decode_shared import ROWS, Form, members_of
from jetrl.kernels.backends.triton_launch import LAUNCH, begin
from jetrl.kernels.backends.triton_quant import _FLOOR_BITS
from jetrl.kernels.decode import SharedPages
from jetrl.kernels.qtensor import QTensor
from jetrl.types import LayerCache

_ROWS, _TILE = tl.constexpr(ROWS), tl.constexpr(TILE)
SUMS_AHEAD = 2  # tiles whose weights the chain of sums holds


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["table_stride", "T"])
def _scores_kernel(
    q, keys, scales, table, members, tiles_of, scores, maxima, arrived, table_stride, T,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores [C, G, T, 128, 64] in the order of the sums: element i of part p is key 8 (i // 2) + 2 p + i % 2 of its
    tile, and stands at 4 i + p. Their maxima [C, G, T, 64]. Resets `arrived` [C, G]."""
    begin(PDL)
    pair, block = tl.program_id(0) // T, tl.program_id(0) % T
    chunk, group = pair // G, pair % G
    if block == 0:
        tl.store(arrived + pair, 0)
    if block < tl.load(tiles_of + chunk):
        alive, _, _, each = members_of(members, chunk, group, N // G, N, S)
        row, col, key = tl.arange(0, _ROWS), tl.arange(0, H), tl.arange(0, _TILE)
        query = tl.load(q + each[:, None] * H + col[None, :], mask=alive[:, None], other=0.0)
        page = tl.load(table + tl.load(members + chunk * S) * table_stride + block * _TILE // PAGE).to(tl.int64)
        inside = (block * _TILE) % PAGE + key
        at = ((page * PAGE + inside) * G + group)[:, None] * H + col[None, :]
        # what is read once leaves the L2 cache first: scores and weights are read again
        k = widened(tl.load(keys + at, eviction_policy="evict_first"), FP8, PDL)
        s = tl.dot(query, tl.trans(k))
        if FP8:  # a word: the powers of two of a key (BF16 in the lower half) and of its value
            word = tl.load(scales + (page * G + group) * PAGE + inside)
            s *= (word << 16).to(tl.float32, bitcast=True)[None, :]
        first = pair.to(tl.int64) * T + block
        place = (key // 8 * 2 + key % 2) * 4 + key // 2 % 4
        tl.store(scores + (first * _TILE + place)[None, :] * _ROWS + row[:, None], s)
        tl.store(maxima + first * _ROWS + row, tl.max(s, axis=1))


@triton.jit(do_not_specialize=["table_stride", "T"])
def _weights_kernel(
    scales, table, members, tiles_of, tops, scores, maxima, weights, shrinks, scale, table_stride, T,
    N: tl.constexpr, G: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr, TP: tl.constexpr, FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores -> softmax weights, in place; BF16 `weights` [C, G, T, 64, 128], times the value's power of two if FP8;
    `shrinks` [C, G, T, 64]."""
    begin(PDL)
    pair, block = tl.program_id(0) // T, tl.program_id(0) % T
    chunk, group = pair // G, pair % G
    tiles = tl.load(tiles_of + chunk)
    if block < tiles:
        alive, _, _, each = members_of(members, chunk, group, N // G, N, S)
        tile, row, place = tl.arange(0, TP), tl.arange(0, _ROWS), tl.arange(0, _TILE)
        first = pair.to(tl.int64) * T
        key = place // 8 * 8 + place % 4 * 2 + place // 4 % 2
        at = scores + ((first + block) * _TILE + place)[:, None] * _ROWS + row[None, :]
        s = tl.load(at)  # everything is read before the first store, behind which no read would begin
        later = (tile > block) & (tile < tiles)
        at_maxima = maxima + (first + tile)[:, None] * _ROWS + row[None, :]
        every = tl.load(at_maxima, mask=later[:, None], other=float("-inf"))
        own = tl.load(tops + each, mask=alive, other=0.0)
        before = tl.maximum(own, tl.max(every, axis=0))
        top = tl.maximum(before, tl.load(maxima + (first + block) * _ROWS + row))
        if FP8:
            page = tl.load(table + tl.load(members + chunk * S) * table_stride + block * _TILE // PAGE).to(tl.int64)
            word = tl.load(scales + (page * G + group) * PAGE + (block * _TILE) % PAGE + key)
        tl.store(shrinks + (first + block) * _ROWS + row, tl.exp2((before - top) * scale))
        zeros = tl.zeros_like(s)
        p = tl.exp2(tl.fma(s, scale + zeros, zeros - (top * scale)[None, :]))
        tl.store(at, p)
        if FP8:
            p *= (word & -65536).to(tl.float32, bitcast=True)[:, None]
        to = weights + ((first + block) * _ROWS + row)[None, :] * _TILE + key[:, None]
        tl.store(to, p.to(tl.bfloat16))


@triton.jit
def _sum_chain(total, scores, shrinks, first, tiles, AHEAD: tl.constexpr, ON_GPU: tl.constexpr):
    """The four sums of each row, [4 * 64], from `total` on: the 32 rows of a tile's 4 * 64 weights, one after another.
    Sets of registers as in `triton_decode_chain._sum_chain`."""
    PARTS: tl.constexpr = _TILE // 4
    lane, last = tl.arange(0, 4 * _ROWS), tiles - 1
    rows, units = (), ()
    for d in tl.static_range(AHEAD):
        tile = first + tl.maximum(last - d, 0)
        units = units + (tl.load(shrinks + tile * _ROWS + lane % _ROWS),)  # type: ignore[assignment]
        rows = rows + _rows(scores + tile * (_TILE * _ROWS) + lane, _ROWS, ON_GPU)
    for step in range(0, tiles, AHEAD):
        new_rows, new_units = (), ()
        for d in tl.static_range(AHEAD):
            set_rows, unit = rows[d * PARTS : (d + 1) * PARTS], units[d]  # type: ignore[var-annotated]
            if step + d < tiles:
                total = tl.fma(total, unit, set_rows[0])
                for i in tl.static_range(1, PARTS):
                    total = total + set_rows[i]
                tile = first + tl.maximum(last - step - d - AHEAD, 0)
                unit = tl.load(shrinks + tile * _ROWS + lane % _ROWS)
                set_rows = _rows(scores + tile * (_TILE * _ROWS) + lane, _ROWS, ON_GPU)
            new_units = new_units + (unit,)  # type: ignore[assignment]
            new_rows = new_rows + set_rows  # type: ignore[assignment]
        rows, units = new_rows, new_units  # type: ignore[assignment]
    return total


@triton.jit
def _value_chain(
    acc, values, pages, weights, shrinks, first, tiles, group, mine,
    G: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, ON_GPU: tl.constexpr,
):
    """Elements `mine` of the heads [64, ...] of a chunk, from `acc` on, unscaled."""
    row, key = tl.arange(0, _ROWS), tl.arange(0, _TILE)
    page = tl.load(pages + (tiles - 1) * _TILE // PAGE)
    for step in tl.range(0, tiles, num_stages=STAGES):
        block = tiles - 1 - step
        inside = (block * _TILE) % PAGE + key
        at = ((page.to(tl.int64) * PAGE + inside) * G + group)[:, None] * H + mine[None, :]
        v = widened(tl.load(values + at), FP8, ON_GPU)
        w = tl.load(weights + ((first + block) * _ROWS + row)[:, None] * _TILE + key[None, :])
        shrink = tl.load(shrinks + (first + block) * _ROWS + row)
        page = tl.load(pages + tl.maximum(block - 1, 0) * _TILE // PAGE)  # a tile ahead of its use
        acc = tl.dot(w, v, acc * shrink[:, None])
    return acc


@triton.jit(do_not_specialize=["table_stride", "scales_stride", "T"])
def _chain_kernel(
    values, table, members, tiles_of, scores, weights, shrinks, parts, accs, arrived, out, codes, code_scales,
    table_stride, codes_stride, scales_stride, T,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, SUMS_AHEAD: tl.constexpr, FP8: tl.constexpr, QUANT: tl.constexpr, FLOOR: tl.constexpr,
    POW2: tl.constexpr, PDL: tl.constexpr,
):
    begin(PDL)
    pair, part = tl.program_id(0) // (PARTS + 1), tl.program_id(0) % (PARTS + 1)
    chunk, group = pair // G, pair % G
    tiles, first = tl.load(tiles_of + chunk), pair.to(tl.int64) * T
    if tiles > 0:
        alive, sequence, head, each = members_of(members, chunk, group, N // G, N, S)
        if part == PARTS:
            lane = tl.arange(0, 4 * _ROWS)
            place = lane % _ROWS
            owner = tl.load(members + chunk * S + place // (N // G), mask=place // (N // G) < S, other=-1)
            at_sums = parts + (owner * N + group * (N // G) + place % (N // G)) * 4 + lane // _ROWS
            total = tl.load(at_sums, mask=owner >= 0, other=1.0)
            total = _sum_chain(total, scores, shrinks, first, tiles, SUMS_AHEAD, PDL)
            tl.store(at_sums, total, mask=owner >= 0)
        else:
            COLS: tl.constexpr = H // PARTS
            mine = part * COLS + tl.arange(0, COLS)
            at_acc = accs + each[:, None] * H + mine[None, :]
            acc = tl.load(at_acc, mask=alive[:, None], other=0.0)
            pages = table + tl.load(members + chunk * S) * table_stride
            acc = _value_chain(
                acc, values, pages, weights, shrinks, first, tiles, group, mine, G, H, PAGE, STAGES, FP8, PDL
            )
            tl.store(at_acc, acc, mask=alive[:, None])
        tl.debug_barrier()  # all threads have stored what they computed
        if tl.atomic_add(arrived + pair, 1, sem="acq_rel") == PARTS:
            at = each[:, None] * H + tl.arange(0, H)[None, :]
            s0 = tl.load(parts + each * 4, mask=alive, other=1.0, cache_modifier=".cg")
            s1 = tl.load(parts + each * 4 + 1, mask=alive, other=1.0, cache_modifier=".cg")
            s2 = tl.load(parts + each * 4 + 2, mask=alive, other=1.0, cache_modifier=".cg")
            s3 = tl.load(parts + each * 4 + 3, mask=alive, other=1.0, cache_modifier=".cg")
            x = tl.load(accs + at, mask=alive[:, None], other=0.0, cache_modifier=".cg")
            y = (x * _reciprocal((s0 + s1) + (s2 + s3))[:, None]).to(tl.bfloat16)
            store_heads(
                y, at, alive, sequence, head, out, codes, code_scales, codes_stride, scales_stride, H, QUANT, FLOOR,
                POW2,
            )


# ---- calls ----------------------------------------------------------------------------------------------------------


def scratch_bytes(chunks: int, groups: int, tiles: int) -> int:
    """Bytes that a call takes: six for each pair of a row and a key."""
    return 6 * chunks * groups * tiles * TILE * ROWS


def go_on(
    q: Tensor, cache: LayerCache, table: Tensor, shared: SharedPages, scale: float, out: Tensor,
    quantized: QTensor | None, pow2: bool, state: tuple[Tensor, Tensor, Tensor], form: Form,
) -> None:
    """`triton_decode_shared.go_on`, the same bits. `table` [B, M] bounds the tiles. Scratch is taken from torch's
    allocator: a CUDA graph keeps it in its own pool, where all layers use it in turn."""
    (_, heads, head_dim), (page, groups) = q.shape, cache.keys.shape[1:3]
    assert page % TILE == 0 and q.is_contiguous() and table.stride(1) == 1 and out.is_contiguous()
    assert all(x.is_contiguous() for x in (*state, shared.members, shared.tiles))
    (chunks, size), fp8, tiles = shared.members.shape, cache.scales is not None, table.shape[1] * page // TILE
    assert size * (heads // groups) <= ROWS, "a chunk has more query heads than rows"
    if not chunks:
        return
    keys, values = (x.view(torch.uint8) if fp8 else x for x in (cache.keys, cache.values))
    scales = cache.scales.view(torch.int32) if cache.scales is not None else q
    log2_scale = float(np.float32(scale) * np.float32(math.log2(math.e)))  # one FP32 product, as in FlashAttention-4
    codes, units = (quantized.codes.view(torch.uint8), quantized.scale) if quantized is not None else (out, out)
    scores = torch.empty(chunks * groups * tiles * TILE * ROWS, dtype=torch.float32, device=q.device)
    weights = torch.empty(scores.shape, dtype=torch.bfloat16, device=q.device)
    maxima, shrinks = torch.empty(2, chunks * groups * tiles * ROWS, dtype=torch.float32, device=q.device)
    arrived = torch.empty(chunks * groups, dtype=torch.int32, device=q.device)
    whose, (tops, parts, accs) = (table, shared.members, shared.tiles), state
    sizes = {"N": heads, "G": groups, "S": size, "PAGE": page, "FP8": fp8, "enable_fp_fusion": False, **LAUNCH}
    _scores_kernel[(chunks * groups * tiles,)](
        q, keys, scales, *whose, scores, maxima, arrived, table.stride(0), tiles, H=head_dim, num_warps=4, **sizes,
    )
    _weights_kernel[(chunks * groups * tiles,)](
        scales, *whose, tops, scores, maxima, weights, shrinks, log2_scale, table.stride(0), tiles,
        TP=triton.next_power_of_2(tiles), num_warps=4, **sizes,
    )
    _chain_kernel[(chunks * groups * (form.parts + 1),)](
        values, *whose, scores, weights, shrinks, parts, accs, arrived, out, codes, units, table.stride(0),
        codes.stride(0), units.stride(1), tiles, H=head_dim, PARTS=form.parts, STAGES=form.stages,
        SUMS_AHEAD=SUMS_AHEAD, QUANT=quantized is not None, FLOOR=_FLOOR_BITS, POW2=pow2, num_warps=4, **sizes,
    )
