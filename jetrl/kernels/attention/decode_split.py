"""Attention of one new token per sequence for few sequences with many keys: the bits of `decode.py`, in parallel.

There one program per key head walks through all keys. Here only what must keep an order is a chain; the rest runs for
all tiles of 128 keys at once. Three kernels:

1. scores of a tile and their maximum per query;
2. the running maximum at a tile is the largest of the maxima of this tile and of the later ones (tiles go from the last
   to the first, and a maximum is exact in any order). From it follow the softmax weights, in FP32 for their sum and
   rounded to BF16 for the product, and the factor that rescales older results;
3. chains: `acc = acc * shrink + weights @ values` by 16 or more elements of the head per program
   (`decode_chain.py`), and, in a program of their own, the four parts of the sums, each weight added in its turn.
   The program of a key head that ends last divides, rounds and quantizes.

Each number is computed by the same operations in the same order as there, so the bits are the same (that module's text
lists the operations). Sums are written out one by one: no layout decides their order. Products go through `tl.dot` with
operands in shared memory or from 16-bit loads; see `_widened`.

Legend: `B` sequences, `N` query heads, `G` key/value heads, `H` head size, `T` tiles, `Q` queries of a key head,
padded to a power of two.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.attention.decode_chain import _TILE, TILE, chain_kernel
from jetrl.kernels.launch import LAUNCH, begin
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import _FLOOR_BITS, new_heads, widened
from jetrl.types import LayerCache

_PROGRAMS = 4096  # of the first kernel, about: more walk through several tiles each
_PROCESSORS = 132
SCRATCH_BYTES = 1 << 28  # the most that a call takes
SUMS_AHEAD = 4  # tiles whose weights the chain of sums holds


class Shape(NamedTuple):
    """How the chains are cut: it changes no bits."""

    cols: int  # elements of a head per program
    ahead: int  # tiles whose values a program holds


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit
def power_of_two(scales, page, group, inside, alive, which: tl.constexpr, G: tl.constexpr, PAGE: tl.constexpr):
    """The powers of two of a tile's keys (`which` 0) or values (1), FP32; 0 where no key is."""
    at = scales + ((page * G + group) * PAGE + inside) * 2 + which
    return tl.load(at, mask=alive, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["table_stride", "T", "split"])
def _scores_kernel(
    q, keys, scales, table, lengths, scores, maxima, arrived, table_stride, T, split,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, PAGE: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):
    """Scores [B, G, T, 128, Q], -inf beyond the last key, in the order of the sums: element i of part p is key
    8 (i // 2) + 2 p + i % 2 of its tile, and stands at 4 i + p. Their maxima [B, G, T, Q]. Resets `arrived` [B, G]."""
    begin(PDL)
    pair, part = tl.program_id(0) // split, tl.program_id(0) % split
    sequence, group = pair // G, pair % G
    length = tl.load(lengths + sequence)
    tiles = tl.cdiv(length, _TILE)
    if part == 0:
        tl.store(arrived + pair, 0)
    COLUMNS: tl.constexpr = max(Q, 8)
    row, col, key = tl.arange(0, COLUMNS), tl.arange(0, H), tl.arange(0, _TILE)
    place = (key // 8 * 2 + key % 2) * 4 + key // 2 % 4
    at_q = q + (sequence * N + group * (N // G) + row)[None, :] * H + col[:, None]
    query = tl.load(at_q, mask=(row < N // G)[None, :], other=0.0)
    for block in range(part, tiles, split):
        alive = block * _TILE + key < length
        page = tl.load(table + sequence * table_stride + block * _TILE // PAGE).to(tl.int64)
        inside = (block * _TILE) % PAGE + key
        at = ((page * PAGE + inside) * G + group)[:, None] * H + col[None, :]
        # what is read once leaves the L2 cache first: scores and weights are read again
        k = tl.load(keys + at, mask=alive[:, None], other=0.0, eviction_policy="evict_first")
        if FP8:
            unit = power_of_two(scales, page, group, inside, alive, 0, G, PAGE)
        s = tl.dot(widened(k, FP8, PDL), query)
        if FP8:
            s *= unit[:, None]
        s = tl.where(alive[:, None], s, float("-inf"))
        first = (pair * T + block).to(tl.int64)
        to = (first * _TILE + place)[:, None] * Q + row[None, :]
        tl.store(scores + to, s, mask=(row < Q)[None, :])
        tl.store(maxima + first * Q + row, tl.max(s, axis=0), mask=row < Q)


@triton.jit(do_not_specialize=["table_stride", "T"])
def _weights_kernel(
    scales, table, lengths, scores, maxima, weights, shrinks, scale, table_stride, T,
    G: tl.constexpr, Q: tl.constexpr, PAGE: tl.constexpr, TP: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):
    """Scores -> softmax weights, in place; BF16 `weights` [B, G, T, Q, 128], times the value's power of two if FP8;
    `shrinks` [B, G, T, Q]."""
    begin(PDL)
    pair, block = tl.program_id(0) // T, tl.program_id(0) % T
    sequence, group = pair // G, pair % G
    length = tl.load(lengths + sequence)
    if block * _TILE < length:
        tile, head, place = tl.arange(0, TP), tl.arange(0, Q), tl.arange(0, _TILE)
        first = pair.to(tl.int64) * T
        key = place // 8 * 8 + place % 4 * 2 + place // 4 % 2
        if FP8:
            page = tl.load(table + sequence * table_stride + block * _TILE // PAGE).to(tl.int64)
            inside, alive = (block * _TILE) % PAGE + key, block * _TILE + key < length
            unit = power_of_two(scales, page, group, inside, alive, 1, G, PAGE)
        at = scores + ((first + block) * _TILE + place)[:, None] * Q + head[None, :]
        s = tl.load(at)  # everything is read before the first store, behind which no read would begin
        later = (tile > block) & (tile * _TILE < length)
        every = tl.load(
            maxima + (first + tile)[:, None] * Q + head[None, :], mask=later[:, None], other=float("-inf")
        )
        before = tl.max(every, axis=0)
        top = tl.maximum(before, tl.load(maxima + (first + block) * Q + head))
        tl.store(shrinks + (first + block) * Q + head, tl.exp2((before - top) * scale))
        zeros = tl.zeros_like(s)
        p = tl.exp2(tl.fma(s, scale + zeros, zeros - (top * scale)[None, :]))
        tl.store(at, p)
        if FP8:
            p *= unit[:, None]
        to = weights + ((first + block) * Q + head)[None, :] * _TILE + key[:, None]
        tl.store(to, p.to(tl.bfloat16))


# ---- calls ----------------------------------------------------------------------------------------------------------


def scratch_bytes(batch: int, heads: int, groups: int, bound: int) -> int:
    """Bytes that a call takes for sequences of up to `bound` keys: six for each pair of a query head and a key."""
    return 6 * batch * groups * _padded(heads, groups) * (-(-bound // TILE) * TILE)


def _padded(heads: int, groups: int) -> int:
    return triton.next_power_of_2(heads // groups)


def shape_for(pairs: int, head_dim: int, fp8: bool) -> Shape:
    """For `pairs` of a sequence and a key/value head: narrow chains while all run at once. 32 codes are what one read
    of memory brings."""
    few = pairs * (head_dim // 16 + 1) <= 2 * _PROCESSORS
    return Shape(32, 5) if fp8 else Shape(16, 5) if few else Shape(32, 3)


def decode(
    q: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, scale: float, out: Tensor | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """`decode.decode`, the same bits; `shape` for benchmarks."""
    out = torch.empty_like(q) if out is None else out
    launch(q, cache, table, lengths, scale, out, None, False, shape)
    return out


def decode_quantize(
    q: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, scale: float, pow2: bool, shape: Shape | None = None
) -> QTensor:
    """`decode.decode_quantize`, the same bits."""
    quantized = new_heads(q)
    launch(q, cache, table, lengths, scale, q, quantized, pow2, shape)
    return quantized


def launch(
    q: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, scale: float, out: Tensor,
    quantized: QTensor | None, pow2: bool, shape: Shape | None = None,
) -> None:
    """Into `out` or `quantized`. Scratch is taken from torch's allocator: a CUDA graph keeps it in its own pool, where
    all layers use it in turn. `table` [B, M] bounds the keys: M pages."""
    (batch, heads, head_dim), (page, groups) = q.shape, cache.keys.shape[1:3]
    assert page % TILE == 0 and head_dim in (64, 128) and q.is_contiguous() and out.is_contiguous()
    assert cache.keys.is_contiguous() and cache.values.is_contiguous() and table.stride(1) == 1
    if not batch:
        return
    fp8, padded, tiles = cache.scales is not None, _padded(heads, groups), table.shape[1] * page // TILE
    keys, values = (x.view(torch.uint8) if fp8 else x for x in (cache.keys, cache.values))
    scales = cache.scales if cache.scales is not None else q
    shape = shape_for(batch * groups, head_dim, fp8) if shape is None else shape
    scores = torch.empty(batch * groups * tiles * TILE * padded, dtype=torch.float32, device=q.device)
    weights = torch.empty(scores.shape, dtype=torch.bfloat16, device=q.device)
    maxima, shrinks = torch.empty(2, batch * groups * tiles * padded, dtype=torch.float32, device=q.device)
    acc = torch.empty(batch * heads * head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(batch * groups * 4 * padded, dtype=torch.float32, device=q.device)
    arrived = torch.empty(batch * groups, dtype=torch.int32, device=q.device)
    log2_scale = float(np.float32(scale) * np.float32(math.log2(math.e)))  # one FP32 product, as in FlashAttention-4
    codes, units = (quantized.codes.view(torch.uint8), quantized.scale) if quantized is not None else (out, out)
    sizes = {"G": groups, "Q": padded, "PAGE": page, "FP8": fp8, "enable_fp_fusion": False, **LAUNCH}
    split = min(tiles, max(1, _PROGRAMS // (batch * groups)))
    _scores_kernel[(batch * groups * split,)](
        q, keys, scales, table, lengths, scores, maxima, arrived, table.stride(0), tiles, split,
        N=heads, H=head_dim, num_warps=4, num_stages=1, **sizes,
    )
    _weights_kernel[(batch * groups * tiles,)](
        scales, table, lengths, scores, maxima, weights, shrinks, log2_scale, table.stride(0), tiles,
        TP=triton.next_power_of_2(tiles), num_warps=4, **sizes,
    )
    chain_kernel[(batch * groups * (head_dim // shape.cols + 1),)](
        values, table, lengths, scores, weights, shrinks, acc, sums, arrived, out, codes, units, table.stride(0),
        codes.stride(0), units.stride(1), tiles, N=heads, H=head_dim, COLS=shape.cols, AHEAD=shape.ahead,
        SUMS_AHEAD=SUMS_AHEAD, QUANT=quantized is not None, FLOOR=_FLOOR_BITS, POW2=pow2, num_warps=4, **sizes,
    )
