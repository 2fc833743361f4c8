"""Attention of one new token per sequence for few sequences with many keys: the bits of `gluon_attention`, in parallel.

There one program per key head walks through all keys. Here only what must keep an order is a chain; the rest runs for
all tiles of 128 keys at once. Three kernels:

1. scores of a tile and their maximum per query;
2. the running maximum at a tile is the largest of the maxima of this tile and of the later ones (tiles go from the last
   to the first, and a maximum is exact in any order). From it follow the softmax weights, in FP32 for their sum and
   rounded to BF16 for the product, and the factor that rescales older results;
3. chains: `acc = acc * shrink + weights @ values` by 16 or more elements of the head per program, and, in a program
   of their own, the four parts of the sums, each weight added in its turn. The program of a key head that ends last
   divides, rounds and quantizes.

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

from jetrl.kernels.backends.triton_launch import LAUNCH, begin
from jetrl.kernels.backends.triton_quant import _FLOOR_BITS, abs_bits, encode, new_codes, new_scale, scale_from
from jetrl.kernels.qtensor import QTensor
from jetrl.precision.formats import BLOCK
from jetrl.types import LayerCache

TILE = 128  # keys
_TILE = tl.constexpr(TILE)
_PROGRAMS = 4096  # of the first kernel, about: more walk through several tiles each
_PROCESSORS = 132
SCRATCH_BYTES = 1 << 28  # the most that a call takes
SUMS_AHEAD = 4  # tiles whose weights the chain of sums holds


class Shape(NamedTuple):
    """How the chains are cut: it changes no bits."""

    cols: int  # elements of a head per program
    ahead: int  # tiles whose values a program holds
    warps: int = 4


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


# PTX: four E4M3 codes in $2 -> BF16, in order, two in $0 and two in $1; 2**120 corrects the exponent's bias
_WIDEN = tl.constexpr("""{ .reg .b32 high, low, t, c; mov.b32 c, 0x7b807b80;
    shr.b32 t, $2, 4; and.b32 t, t, 0x07070707; and.b32 high, $2, 0x80808080; or.b32 high, high, t;
    shl.b32 low, $2, 4; and.b32 low, low, 0xf0f0f0f0;
    prmt.b32 t, low, high, 0x5140; mul.bf16x2 $0, t, c; prmt.b32 t, low, high, 0x7362; mul.bf16x2 $1, t, c; }""")


@triton.jit
def widened(x, FP8: tl.constexpr, ON_GPU: tl.constexpr):
    """E4M3 codes (as bytes) -> BF16, exact.

    "Not pure" is for Triton's choice of layouts: it looks through pure operations, and from a load of 8 bits it makes
    an operand that holds four neighbouring keys per thread, which the tensor core would multiply in another order.
    """
    if FP8 and ON_GPU:
        return tl.inline_asm_elementwise(_WIDEN, "=&r,=&r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=4)
    elif FP8:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    else:
        return x


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


@triton.jit
def _rows(at, Q: tl.constexpr):
    """The rows of 4 Q numbers of a tile."""
    rows = ()
    for i in tl.static_range(_TILE // 4):
        rows = rows + (tl.load(at + i * 4 * Q),)  # type: ignore[assignment]
    return rows


@triton.jit
def _sum_chain(scores, shrinks, sums, first, tiles, to, Q: tl.constexpr, AHEAD: tl.constexpr):
    """The four sums of each query, [4, Q] at `sums + to`: the 32 rows of a tile's 4 Q weights, one after another.

    A tile's numbers are held in one of `AHEAD` sets of registers. A set is read anew as soon as it is added up, so no
    register moves. The branch for each tile keeps the compiler from collecting these reads at the end of a round.
    """
    ROWS: tl.constexpr = _TILE // 4
    lane, last = tl.arange(0, 4 * Q), tiles - 1
    total = tl.zeros((4 * Q,), tl.float32)
    rows, units = (), ()
    for d in tl.static_range(AHEAD):
        tile = first + tl.maximum(last - d, 0)
        units = units + (tl.load(shrinks + tile * Q + lane % Q),)  # type: ignore[assignment]
        rows = rows + _rows(scores + tile * (_TILE * Q) + lane, Q)
    for step in range(0, tiles, AHEAD):
        new_rows, new_units = (), ()
        for d in tl.static_range(AHEAD):
            set_rows, unit = rows[d * ROWS : (d + 1) * ROWS], units[d]  # type: ignore[var-annotated]
            if step + d < tiles:
                total = tl.fma(total, unit, set_rows[0])
                for i in tl.static_range(1, ROWS):
                    total = total + set_rows[i]
                tile = first + tl.maximum(last - step - d - AHEAD, 0)
                unit = tl.load(shrinks + tile * Q + lane % Q)
                set_rows = _rows(scores + tile * (_TILE * Q) + lane, Q)
            new_units = new_units + (unit,)  # type: ignore[assignment]
            new_rows = new_rows + set_rows  # type: ignore[assignment]
        rows, units = new_rows, new_units  # type: ignore[assignment]
    tl.store(sums + to + lane, total)


@triton.jit
def _values_at(values, page, block, group, col, G: tl.constexpr, H: tl.constexpr, PAGE: tl.constexpr):
    row = page.to(tl.int64) * PAGE + (block * _TILE) % PAGE + tl.arange(0, _TILE)
    return values + (row * G + group)[:, None] * H + col[None, :]


@triton.jit
def _value_chain(
    values, pages, weights, shrinks, acc_out, sequence, group, part, first, tiles, length,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, PAGE: tl.constexpr, COLS: tl.constexpr,
    AHEAD: tl.constexpr, FP8: tl.constexpr, ON_GPU: tl.constexpr,
):
    """Elements `part * COLS` ... of the heads of a group, unscaled, to `acc_out` [B, N, H]; products are transposed.

    Tiles are held in `AHEAD` sets of registers as in `_sum_chain`. A set of values is codes until the tile before is
    multiplied; where its next tile lies was read one round earlier.
    """
    COLUMNS: tl.constexpr = max(Q, 8)
    query, key, last = tl.arange(0, COLUMNS), tl.arange(0, _TILE), tiles - 1
    col = part * COLS + tl.arange(0, COLS)
    acc = tl.zeros((COLS, COLUMNS), tl.float32)
    at_w = weights + (query * _TILE)[None, :] + key[:, None]
    real = (query < Q)[None, :]
    v, w, units, next_pages = (), (), (), ()
    for d in tl.static_range(AHEAD):
        block = tl.maximum(last - d, 0)
        at = _values_at(values, tl.load(pages + block * _TILE // PAGE), block, group, col, G, H, PAGE)
        real_key = (block * _TILE + key < length)[:, None]
        v = v + (tl.load(at, mask=real_key, other=0.0, eviction_policy="evict_first"),)  # type: ignore[assignment]
        w = w + (tl.load(at_w + (first + block) * Q * _TILE, mask=real, other=0.0),)  # type: ignore[assignment]
        unit = tl.load(shrinks + (first + block) * Q + query, mask=query < Q, other=0.0)
        units = units + (unit,)  # type: ignore[assignment]
        page = tl.load(pages + tl.maximum(last - d - AHEAD, 0) * _TILE // PAGE)
        next_pages = next_pages + (page,)  # type: ignore[assignment]
    wide = widened(v[0], FP8, ON_GPU)  # type: ignore[misc]
    for step in range(0, tiles, AHEAD):
        new_v, new_w, new_units, new_pages = (), (), (), ()
        for d in tl.static_range(AHEAD):
            block = tl.maximum(last - step - d - AHEAD, 0)  # full of keys, or not used
            at = _values_at(values, next_pages[d], block, group, col, G, H, PAGE)
            new_v = new_v + (tl.load(at, eviction_policy="evict_first"),)  # type: ignore[assignment]
            page = tl.load(pages + tl.maximum(last - step - d - 2 * AHEAD, 0) * _TILE // PAGE)
            new_pages = new_pages + (page,)  # type: ignore[assignment]
            next_wide = widened(v[d + 1] if d + 1 < AHEAD else new_v[0], FP8, ON_GPU)  # type: ignore[misc]
            now = tl.dot(tl.trans(wide), w[d], acc * units[d][None, :])
            acc = tl.where(step + d < tiles, now, acc)
            wide = next_wide
            one = tl.load(at_w + (first + block) * Q * _TILE, mask=real, other=0.0)
            new_w = new_w + (one,)  # type: ignore[assignment]
            unit = tl.load(shrinks + (first + block) * Q + query, mask=query < Q, other=0.0)
            new_units = new_units + (unit,)  # type: ignore[assignment]
        v, w, units, next_pages = new_v, new_w, new_units, new_pages
    to = acc_out + (sequence * N + group * (N // G) + query)[None, :] * H + col[:, None]
    tl.store(to, acc, mask=(query < N // G)[None, :])


@triton.jit
def store_heads(
    y, at, alive, sequence, head, out, codes, code_scales, codes_stride, scales_stride,
    H: tl.constexpr, QUANT: tl.constexpr, FLOOR: tl.constexpr, POW2: tl.constexpr,
):
    """Heads `y` [rows, H] in BF16 to `out + at`, or quantized: a head is a group of 128 columns."""
    if QUANT:
        x = y.to(tl.float32)
        unit = scale_from(tl.max(abs_bits(x), axis=1), FLOOR, POW2)
        to = codes + (sequence.to(tl.int64) * codes_stride + head * H)[:, None] + tl.arange(0, H)[None, :]
        tl.store(to, encode(x, unit[:, None]).to(tl.uint8, bitcast=True), mask=alive[:, None])
        tl.store(code_scales + head * scales_stride + sequence, unit, mask=alive)
    else:
        tl.store(out + at, y, mask=alive[:, None])


@triton.jit(do_not_specialize=["table_stride", "scales_stride", "T"])
def _chain_kernel(
    values, table, lengths, scores, weights, shrinks, acc, sums, arrived, out, codes, code_scales,
    table_stride, codes_stride, scales_stride, T,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, PAGE: tl.constexpr, COLS: tl.constexpr,
    AHEAD: tl.constexpr, SUMS_AHEAD: tl.constexpr, FP8: tl.constexpr, QUANT: tl.constexpr, FLOOR: tl.constexpr,
    POW2: tl.constexpr, PDL: tl.constexpr,
):
    begin(PDL)
    PARTS: tl.constexpr = H // COLS
    pair, part = tl.program_id(0) // (PARTS + 1), tl.program_id(0) % (PARTS + 1)
    sequence, group = pair // G, pair % G
    length = tl.load(lengths + sequence)
    tiles, first = tl.cdiv(length, _TILE), pair.to(tl.int64) * T
    if part == PARTS:
        _sum_chain(scores, shrinks, sums, first, tiles, pair * 4 * Q, Q, SUMS_AHEAD)
    else:
        _value_chain(
            values, table + sequence * table_stride, weights, shrinks, acc, sequence, group, part, first, tiles, length,
            N, G, H, Q, PAGE, COLS, AHEAD, FP8, PDL,
        )
    tl.debug_barrier()  # all threads have stored what they computed
    if tl.atomic_add(arrived + pair, 1, sem="acq_rel") == PARTS:
        row = tl.arange(0, Q)
        at_sums = sums + pair * 4 * Q + row
        s0, s1 = tl.load(at_sums, cache_modifier=".cg"), tl.load(at_sums + Q, cache_modifier=".cg")
        s2, s3 = tl.load(at_sums + 2 * Q, cache_modifier=".cg"), tl.load(at_sums + 3 * Q, cache_modifier=".cg")
        head, alive = group * (N // G) + row, row < N // G
        at = (sequence * N + head)[:, None] * H + tl.arange(0, H)[None, :]
        x = tl.load(acc + at, mask=alive[:, None], other=0.0, cache_modifier=".cg")
        y = (x * _reciprocal((s0 + s1) + (s2 + s3))[:, None]).to(tl.bfloat16)
        rows = tl.zeros_like(row) + sequence
        store_heads(
            y, at, alive, rows, head, out, codes, code_scales, codes_stride, scales_stride, H, QUANT, FLOOR, POW2
        )


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
    """`gluon_attention.decode`, the same bits; `shape` for benchmarks."""
    out = torch.empty_like(q) if out is None else out
    launch(q, cache, table, lengths, scale, out, None, False, shape)
    return out


def decode_quantize(
    q: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, scale: float, pow2: bool, shape: Shape | None = None
) -> QTensor:
    """`gluon_attention.decode_quantize`, the same bits."""
    batch, heads, head_dim = q.shape
    assert head_dim == BLOCK, "a group of the quantizer is a head"
    codes, scales = new_codes(batch, heads * head_dim, q.device), new_scale(batch, heads, q.device)
    quantized = QTensor(codes, scales, "1x128", (batch,), (heads * head_dim,))
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
    _chain_kernel[(batch * groups * (head_dim // shape.cols + 1),)](
        values, table, lengths, scores, weights, shrinks, acc, sums, arrived, out, codes, units, table.stride(0),
        codes.stride(0), units.stride(1), tiles, N=heads, H=head_dim, COLS=shape.cols, AHEAD=shape.ahead,
        SUMS_AHEAD=SUMS_AHEAD, QUANT=quantized is not None, FLOOR=_FLOOR_BITS, POW2=pow2, num_warps=shape.warps,
        **sizes,
    )
