"""Decode attention of sequences whose first pages are the same: those pages are read once for all of them.

Tiles of keys are taken from the last to the first (`decode.py`), so what sequences share comes last in the order
of each. `decode.py` runs each sequence's own tiles and keeps FP32 maximum, four sums and output per head; the
kernel here goes on over the shared tiles with up to 64 query heads of several sequences as the rows of one product.
Rows do not affect each other and every step is the same, so the bits are those of the sequences one by one.

A *chunk* is up to `64 // (N / G)` sequences with the same first tiles. All shared tiles are full of keys, and every
sequence has at least one tile of its own.

Legend: `B` sequences, `N` query heads, `G` key/value heads, `H` head size, `C` chunks, `S` sequences in a chunk.
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

from jetrl.kernels.attention.decode_chain import TILE, _reciprocal, store_heads
from jetrl.kernels.attention.state import SharedPages
from jetrl.kernels.launch import LAUNCH, begin
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import _FLOOR_BITS, widened
from jetrl.types import LayerCache

ROWS = 64  # query heads of a chunk: the rows of a `wgmma`
_ROWS, _TILE = tl.constexpr(ROWS), tl.constexpr(TILE)
STAGES = 3  # tiles that are read ahead, and two


@triton.jit
def _softmax_step(s, top, sums, scale):
    """Weights [64, 128] of a tile, the new maxima, the four sums [64, 4], and what rescales older results.

    Part q of a sum adds the keys 8 i + 2 q and 8 i + 2 q + 1 in order: all of them lie in one thread.
    """
    new = tl.maximum(top, tl.max(s, axis=1))
    shrink = tl.exp2((top - new) * scale)
    zeros = tl.zeros_like(s)
    p = tl.exp2(tl.fma(s, scale + zeros, zeros - (new * scale)[:, None]))
    parts = tl.reshape(tl.permute(tl.reshape(p, (_ROWS, _TILE // 8, 4, 2)), (0, 2, 1, 3)), (_ROWS, 4, _TILE // 4))
    zeros = tl.zeros_like(parts)
    begun = tl.fma(sums[:, :, None] + zeros, shrink[:, None, None] + zeros, parts)
    first = (tl.arange(0, _TILE // 4) == 0)[None, None, :]
    return p, new, tl.sum(tl.where(first, begun, parts), axis=2), shrink


@triton.jit(do_not_specialize=["table_stride", "scales_stride"])
def _shared_kernel(
    q, keys, values, scales, table, members, tiles_of, tops, parts, accs, out, codes, code_scales,
    scale, table_stride, codes_stride, scales_stride,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, QUANT: tl.constexpr, FLOOR: tl.constexpr, POW2: tl.constexpr, PDL: tl.constexpr,
):
    begin(PDL)
    chunk, group = tl.program_id(0) // G, tl.program_id(0) % G
    tiles = tl.load(tiles_of + chunk)
    if tiles > 0:
        NG: tl.constexpr = N // G
        row, col, key, four = tl.arange(0, _ROWS), tl.arange(0, H), tl.arange(0, _TILE), tl.arange(0, 4)
        sequence = tl.load(members + chunk * S + row // NG, mask=row // NG < S, other=-1)
        alive = sequence >= 0
        head = group * NG + row % NG
        each = sequence * N + head
        at = each[:, None] * H + col[None, :]
        query = tl.load(q + at, mask=alive[:, None], other=0.0)
        top = tl.load(tops + each, mask=alive, other=0.0)
        sums = tl.load(parts + each[:, None] * 4 + four[None, :], mask=alive[:, None], other=1.0)
        acc = tl.load(accs + at, mask=alive[:, None], other=0.0)
        pages = table + tl.load(members + chunk * S) * table_stride
        page = tl.load(pages + (tiles - 1) * _TILE // PAGE)
        for step in tl.range(0, tiles, num_stages=STAGES):
            block = tiles - 1 - step
            inside = (block * _TILE) % PAGE + key
            row_at = ((page.to(tl.int64) * PAGE + inside) * G + group)[:, None] * H + col[None, :]
            k = widened(tl.load(keys + row_at), FP8, PDL)
            s = tl.dot(query, tl.trans(k))
            if FP8:  # a word: the powers of two of a key (BF16 in the lower half) and of its value
                word = tl.load(scales + (page.to(tl.int64) * G + group) * PAGE + inside)
                s *= (word << 16).to(tl.float32, bitcast=True)[None, :]
            p, top, sums, shrink = _softmax_step(s, top, sums, scale)
            if FP8:
                p *= (word & -65536).to(tl.float32, bitcast=True)[None, :]
            v = widened(tl.load(values + row_at), FP8, PDL)
            page = tl.load(pages + tl.maximum(block - 1, 0) * _TILE // PAGE)  # a tile ahead of its use
            acc = tl.dot(p.to(tl.bfloat16), v, acc * shrink[:, None])
        total = tl.sum(tl.sum(tl.reshape(sums, (_ROWS, 2, 2)), axis=2), axis=1)
        y = (acc * _reciprocal(total)[:, None]).to(tl.bfloat16)
        store_heads(
            y, at, alive, sequence, head, out, codes, code_scales, codes_stride, scales_stride, H, QUANT, FLOOR, POW2
        )


def go_on(
    q: Tensor, cache: LayerCache, table: Tensor, shared: SharedPages, scale: float, out: Tensor,
    quantized: QTensor | None, pow2: bool, state: tuple[Tensor, Tensor, Tensor],
) -> None:
    """The shared tiles of all chunks, from `state` (maxima [B, N], sums [B, N, 4], outputs [B, N, H], FP32) to the
    heads of their members in `out` [B, N, H] or `quantized`. Other sequences are not touched."""
    (_, heads, head_dim), (page, groups) = q.shape, cache.keys.shape[1:3]
    assert page % TILE == 0 and q.is_contiguous() and table.stride(1) == 1 and out.is_contiguous()
    assert all(x.is_contiguous() for x in (*state, shared.members, shared.tiles))
    (chunks, size), fp8 = shared.members.shape, cache.scales is not None
    assert size * (heads // groups) <= ROWS, "a chunk has more query heads than rows"
    keys, values = (x.view(torch.uint8) if fp8 else x for x in (cache.keys, cache.values))
    scales = cache.scales.view(torch.int32) if cache.scales is not None else q
    log2_scale = float(np.float32(scale) * np.float32(math.log2(math.e)))  # one FP32 product, as in FlashAttention-4
    codes, units = (quantized.codes.view(torch.uint8), quantized.scale) if quantized is not None else (out, out)
    if chunks:
        _shared_kernel[(chunks * groups,)](
            q, keys, values, scales, table, shared.members, shared.tiles, *state, out, codes, units, log2_scale,
            table.stride(0), codes.stride(0), units.stride(1), N=heads, G=groups, H=head_dim, S=size, PAGE=page,
            STAGES=STAGES, FP8=fp8, QUANT=quantized is not None, FLOOR=_FLOOR_BITS, POW2=pow2, num_warps=4,
            enable_fp_fusion=False, **LAUNCH,
        )
