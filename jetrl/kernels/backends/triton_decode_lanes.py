"""The accumulator's chain of `triton_decode_split`, written lane by lane: one warp per 16 or 32 elements of a head.

`triton_decode_chain` takes each tile of values through shared memory, which costs three barriers a tile. Here every
tensor has 32 elements, one for each lane of the only warp, and a lane reads from memory just what it hands to the
tensor core (`mma.sync`, 16 keys at a time, as PTX lays it out): no shared memory, no barrier. So the chain of products
is what takes the time; codes are widened while the tensor core works.

- Rows of a product are elements of the head, columns queries. Which element is which row does not matter, so a lane
  takes 2 (or 4) neighbouring elements of a key in one word. Keys keep their natural order: it decides the bits.
- `weights` hold for each query and tile what lane after lane needs: `place_of`.
- `AHEAD` tiles are in registers; `DEEP` more are on their way to the L2 cache, the first of them before the kernels
  that compute the weights have ended.
- Rounds have `AHEAD` tiles. What the first round lacks are tiles of zeros behind the last key: they come first and
  leave an accumulator of zeros as it is.

Legend as in `triton_decode_split`. A word: the elements of one key that a lane takes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl

from jetrl.kernels.backends.triton_decode_chain import _TILE, finish, read, sum_chain
from jetrl.kernels.backends.triton_launch import begin

_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)
_READ_FOUR = tl.constexpr("ld.global.v4.b32 {$0,$1,$2,$3}, [$4];")
_AHEAD = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")
# Words of two keys, $2 and $3, of two elements each -> two registers, each with both keys' BF16 of an element
_PAIR = tl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")
# The same from E4M3 codes, in the lower halves (0x4501) or upper halves (0x6723). 2**120 corrects the exponent's bias
_WIDEN = """{ .reg .b32 x, t, u, c; mov.b32 c, 0x7b807b80; prmt.b32 x, $2, $3, SELECT;
    shr.b32 t, x, 4; and.b32 t, t, 0x07f007f0; and.b32 u, x, 0x80008000; or.b32 t, t, u; mul.bf16x2 $0, t, c;
    shl.b32 t, x, 4; and.b32 t, t, 0x07f007f0; shl.b32 u, x, 8; and.b32 u, u, 0x80008000; or.b32 t, t, u;
    mul.bf16x2 $1, t, c; }"""
_LOWER, _UPPER = (tl.constexpr(_WIDEN.replace("SELECT", by)) for by in ("0x4501", "0x6723"))
# The same with the processor's conversion, through FP16 and FP32, all of them exact
_CONVERT = """{ .reg .b16 x, y, low, high; .reg .b32 p; .reg .f32 a, b, c, d; mov.b32 XWORD, $2; mov.b32 YWORD, $3;
    cvt.rn.f16x2.e4m3x2 p, x; mov.b32 {low, high}, p; cvt.f32.f16 a, low; cvt.f32.f16 b, high;
    cvt.rn.f16x2.e4m3x2 p, y; mov.b32 {low, high}, p; cvt.f32.f16 c, low; cvt.f32.f16 d, high;
    cvt.rn.bf16x2.f32 $0, c, a; cvt.rn.bf16x2.f32 $1, d, b; }"""
_LOWER_BY_CVT = tl.constexpr(_CONVERT.replace("XWORD", "{x, high}").replace("YWORD", "{y, high}"))
_UPPER_BY_CVT = tl.constexpr(_CONVERT.replace("XWORD", "{low, x}").replace("YWORD", "{low, y}"))


def place_of(key: int) -> int:
    """Where the weight of a tile's key stands among the 128 of its query."""
    return key // 2 % 4 * 32 + key // 8 * 2 + key % 2


# ---- a lane's registers ---------------------------------------------------------------------------------------------


@triton.jit
def _bf16(x, at: tl.constexpr, FP8: tl.constexpr):
    """Element `at` of words, without assembly."""
    if FP8:
        return (x >> 8 * at & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    else:
        return (x >> 16 * at & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _both(x, y, at: tl.constexpr, FP8: tl.constexpr):
    low = _bf16(x, at, FP8).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return _bf16(y, at, FP8).to(tl.int16, bitcast=True).to(tl.int32) << 16 | low


@triton.jit
def _two(x, y, UPPER: tl.constexpr, FP8: tl.constexpr, CVT: tl.constexpr, ON_GPU: tl.constexpr):
    """The lower (or upper) two elements of the words x and y of neighbouring keys, each with both keys, as BF16."""
    if ON_GPU:
        if not FP8:
            text: tl.constexpr = _PAIR
        elif CVT:
            text: tl.constexpr = _UPPER_BY_CVT if UPPER else _LOWER_BY_CVT  # type: ignore[no-redef]
        else:
            text: tl.constexpr = _UPPER if UPPER else _LOWER  # type: ignore[no-redef]
        return tl.inline_asm_elementwise(text, "=&r,=&r,r,r", [x, y], (tl.int32, tl.int32), True, 1)
    else:
        return _both(x, y, 2 * UPPER, FP8), _both(x, y, 2 * UPPER + 1, FP8)


@triton.jit
def _operands(v, WIDE: tl.constexpr, FP8: tl.constexpr, CVT: tl.constexpr, ON_GPU: tl.constexpr):
    """A lane's part of 16 keys, words of four keys: the four registers of a product's left operand, eight if WIDE."""
    if not WIDE:
        return _two(v[0], v[1], False, FP8, CVT, ON_GPU) + _two(v[2], v[3], False, FP8, CVT, ON_GPU)
    elif FP8:
        first = _two(v[0], v[1], False, FP8, CVT, ON_GPU) + _two(v[2], v[3], False, FP8, CVT, ON_GPU)
        return first + _two(v[0], v[1], True, FP8, CVT, ON_GPU) + _two(v[2], v[3], True, FP8, CVT, ON_GPU)
    else:
        low, high = (), ()
        for i in tl.static_range(4):
            low = low + (v[i].to(tl.int32),)  # type: ignore[assignment]
            high = high + ((v[i] >> 32).to(tl.int32),)  # type: ignore[assignment]
        return _operands(low, False, FP8, CVT, ON_GPU) + _operands(high, False, FP8, CVT, ON_GPU)


@triton.jit
def _halves(x):
    return tl.join(_bf16(x, 0, False), _bf16(x, 1, False))


@triton.jit
def _product(a, b, c, ON_GPU: tl.constexpr):
    """`c + a @ b`, [16, 8] += [16, 16] @ [16, 8].

    Lane 4 g + t holds of `a` the columns 2 t and 2 t + 1 of the rows g (a[0]) and g + 8 (a[1]), and the columns 8 later
    (a[2], a[3]); of `b` the rows 2 t and 2 t + 1 (b[0]) and those 8 later (b[1]) of column g; of `c` the row g, columns
    2 t (c[0]) and 2 t + 1 (c[1]), and the row g + 8 (c[2], c[3]).
    """
    if ON_GPU:
        kinds: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
        return tl.inline_asm_elementwise(
            _MMA, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]], kinds, False, 1,
        )
    else:
        left = tl.join(tl.join(_halves(a[0]), _halves(a[1])), tl.join(_halves(a[2]), _halves(a[3])))
        left = left.reshape(8, 4, 2, 2, 2).permute(3, 0, 4, 1, 2).reshape(16, 16)
        right = tl.join(_halves(b[0]), _halves(b[1])).reshape(8, 4, 2, 2).permute(3, 1, 2, 0).reshape(16, 8)
        old = tl.join(tl.join(c[0], c[1]), tl.join(c[2], c[3])).reshape(8, 4, 2, 2).permute(3, 0, 1, 2).reshape(16, 8)
        new = tl.dot(left, right, old).reshape(2, 8, 4, 2).permute(1, 2, 3, 0).reshape(32, 2, 2)
        top, bottom = new.split()
        c0, c1 = top.split()
        c2, c3 = bottom.split()
        return c0, c1, c2, c3


@triton.jit
def _read_four(at, ON_GPU: tl.constexpr):
    """Four neighbouring words of 32 bits."""
    if ON_GPU:
        kinds: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
        return tl.inline_asm_elementwise(_READ_FOUR, "=r,=r,=r,=r,l", [at.to(tl.int64)], kinds, False, 1)
    else:
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


# ---- tiles ----------------------------------------------------------------------------------------------------------


@triton.jit
def _row(page, block, KEY: tl.constexpr, PAGE: tl.constexpr):
    """Where a tile begins in the values; `KEY` words are a key of all heads."""
    return (page.to(tl.int64) * PAGE + (block * _TILE) % PAGE) * KEY


@triton.jit
def _send(values, page, block, KEY: tl.constexpr, PAGE: tl.constexpr):
    """Begin to bring a tile of this program's values to the L2 cache."""
    at = values + _row(page, block, KEY, PAGE)
    for i in tl.static_range(_TILE // 32):
        key = at + (i * 32 + tl.arange(0, 32)) * KEY
        tl.inline_asm_elementwise(_AHEAD, "=r,l", [key.to(tl.int64)], tl.int32, False, 1)


@triton.jit
def _words(at, KEY: tl.constexpr, ON_GPU: tl.constexpr):
    """A lane's 32 words of a tile's values."""
    v = ()
    for i in tl.static_range(_TILE // 4):
        v = v + (read(at + (i // 2 * 8 + i % 2) * KEY, ON_GPU),)  # type: ignore[assignment]
    return v


@triton.jit
def _pages(pages, block, DEEP: tl.constexpr, PAGE: tl.constexpr):
    """The page of a tile, and of that which is sent for when it is read."""
    block = tl.maximum(block, 0)
    return tl.load(pages + block * _TILE // PAGE), tl.load(pages + tl.maximum(block - DEEP, 0) * _TILE // PAGE)


@triton.jit
def _weights(at, units, block, Q: tl.constexpr, ON_GPU: tl.constexpr):
    """A lane's 16 words of weights, for each 8 queries, and what rescales its columns."""
    lane, words, shrinks = tl.arange(0, 32), (), ()
    for n in tl.static_range((Q + 7) // 8):
        # columns beyond the queries repeat them; nothing is stored of these
        row = at + ((block * Q + (lane // 4 + 8 * n) % Q) * 4 + lane % 4) * 16
        for i in tl.static_range(4):
            words = words + _read_four(row + 4 * i, ON_GPU)  # type: ignore[assignment]
        for j in tl.static_range(2):
            one = read(units + block * Q + (lane % 4 * 2 + j + 8 * n) % Q, ON_GPU)
            shrinks = shrinks + (one,)  # type: ignore[assignment]
    return words, shrinks


@triton.jit
def _first_round(at_v, at_w, units, pages, top, tiles, length, KEY: tl.constexpr, Q: tl.constexpr, PAGE: tl.constexpr,
                 AHEAD: tl.constexpr, ON_GPU: tl.constexpr):
    """Words of the values, of the weights, and factors, of tiles `top` and before it; zeros beyond the last key."""
    v, w, u, key = (), (), (), tl.arange(0, 32) % 4 * 2
    for d in tl.static_range(AHEAD):
        block, known = top - d, top - d < tiles
        there = tl.where(known, block, tiles - 1)
        at = at_v + _row(tl.load(pages + there * _TILE // PAGE), there, KEY, PAGE)
        some = _words(at, KEY, ON_GPU)
        for i in tl.static_range(_TILE // 4):
            left = length - block * _TILE - (i // 2 * 8 + i % 2)
            v = v + (tl.where(key < left, some[i], 0),)  # type: ignore[assignment, misc]
        words, shrinks = _weights(at_w, units, there, Q, ON_GPU)
        for i in tl.static_range((Q + 7) // 8 * 16):
            w = w + (tl.where(known, words[i], 0),)  # type: ignore[assignment, misc]
        for i in tl.static_range((Q + 7) // 8 * 2):
            u = u + (tl.where(known, shrinks[i], 0.0),)  # type: ignore[assignment, misc]
    return v, w, u


@triton.jit
def _add_tile(
    acc, head, v, w, u, NS: tl.constexpr, WIDE: tl.constexpr, FP8: tl.constexpr, CVT: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """`acc * u + weights @ values`; `head`: the operands of the first 16 keys."""
    MS: tl.constexpr = 2 if WIDE else 1  # products by rows and (NS) by columns
    scaled = ()
    for i in tl.static_range(4 * MS * NS):
        scaled = scaled + (acc[i] * u[i // (4 * MS) * 2 + i % 2],)  # type: ignore[assignment]
    acc = scaled
    for s in tl.static_range(_TILE // 16):
        if s == 0:
            all_of = head
        else:
            all_of = _operands(v[4 * s : 4 * s + 4], WIDE, FP8, CVT, ON_GPU)
        after = ()
        for i in tl.static_range(MS * NS):
            a = all_of[i % MS * 4 : i % MS * 4 + 4]
            b = w[i // MS * 16 + 2 * s : i // MS * 16 + 2 * s + 2]
            after = after + _product(a, b, acc[4 * i : 4 * i + 4], ON_GPU)  # type: ignore[assignment]
        acc = after
    return acc


@triton.jit
def _lane_chain(
    values, pages, weights, shrinks, out, tiles, length,
    KEY: tl.constexpr, WIDE: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, Q: tl.constexpr, PAGE: tl.constexpr,
    AHEAD: tl.constexpr, DEEP: tl.constexpr, FP8: tl.constexpr, CVT: tl.constexpr, ON_GPU: tl.constexpr,
):
    """The accumulator's 16 elements (32 if WIDE) of a key head's queries, from `values` on, to `out` [HEADS, H]."""
    lane, rounds = tl.arange(0, 32), tl.cdiv(tiles, AHEAD)
    MS: tl.constexpr = 2 if WIDE else 1
    NS: tl.constexpr = (Q + 7) // 8
    at_v, top, acc = values + lane // 4 + lane % 4 * (2 * KEY), rounds * AHEAD - 1, ()
    for _ in tl.static_range(4 * MS * NS):
        acc = acc + (tl.zeros((32,), tl.float32),)  # type: ignore[assignment]
    v, w, u = _first_round(at_v, weights, shrinks, pages, top, tiles, length, KEY, Q, PAGE, AHEAD, ON_GPU)
    next_pages = ()  # where the next round's reads go, read a round before
    for d in tl.static_range(AHEAD):
        next_pages = next_pages + _pages(pages, top - d - AHEAD, DEEP, PAGE)
    head = _operands(v[0:4], WIDE, FP8, CVT, ON_GPU)
    for step in range(0, rounds):
        new_v, new_w, new_u, new_pages = (), (), (), ()
        for d in tl.static_range(AHEAD):
            set_v, set_w = v[d * 32 : d * 32 + 32], w[d * 16 * NS : (d + 1) * 16 * NS]  # type: ignore[misc]
            set_u, where = u[d * 2 * NS : (d + 1) * 2 * NS], next_pages[2 * d : 2 * d + 2]  # type: ignore[misc]
            next_v = v[(d + 1) * 32 : (d + 1) * 32 + 4] if d + 1 < AHEAD else new_v[0:4]  # type: ignore[misc]
            now = top - step * AHEAD - d
            # Always so, but the compiler does not know it: with this branch it does not put off the reads, which it
            # otherwise collects at the end of a round, where their results would be waited for
            if now * _TILE < length + AHEAD * _TILE:
                acc = _add_tile(acc, head, set_v, set_w, set_u, NS, WIDE, FP8, CVT, ON_GPU)
                block = tl.maximum(now - AHEAD, 0)  # full of keys, or not used
                at = at_v + _row(where[0], block, KEY, PAGE)
                if ON_GPU:
                    _send(values, where[1], tl.maximum(block - DEEP, 0), KEY, PAGE)
                set_v = _words(at, KEY, ON_GPU)
                set_w, set_u = _weights(weights, shrinks, block, Q, ON_GPU)
                where = _pages(pages, block - AHEAD, DEEP, PAGE)
                head = _operands(next_v, WIDE, FP8, CVT, ON_GPU)
            new_v, new_w = new_v + set_v, new_w + set_w  # type: ignore[assignment]
            new_u, new_pages = new_u + set_u, new_pages + where  # type: ignore[assignment]
        v, w, u, next_pages = new_v, new_w, new_u, new_pages
    for i in tl.static_range(4 * MS * NS):
        element, query = lane // 4 * (2 * MS) + i // 4 % MS * 2 + i % 4 // 2, lane % 4 * 2 + i % 2 + i // (4 * MS) * 8
        tl.store(out + query * H + element, acc[i], mask=query < HEADS)


@triton.jit(do_not_specialize=["table_stride", "codes_stride", "scales_stride", "T"])  # one kernel for all batches
def lane_chain_kernel(
    values, table, lengths, scores, weights, shrinks, acc, sums, arrived, out, codes, code_scales,
    table_stride, codes_stride, scales_stride, T,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, PAGE: tl.constexpr, COLS: tl.constexpr,
    AHEAD: tl.constexpr, SUMS_AHEAD: tl.constexpr, DEEP: tl.constexpr, FP8: tl.constexpr, CVT: tl.constexpr,
    QUANT: tl.constexpr, FLOOR: tl.constexpr, POW2: tl.constexpr, PDL: tl.constexpr,
):
    """`values` in words, `weights` in pairs, as int32."""
    PARTS: tl.constexpr = H // COLS
    WORDS: tl.constexpr = H // (COLS // 8)  # of a key's head
    pair, part = tl.program_id(0) // (PARTS + 1), tl.program_id(0) % (PARTS + 1)
    sequence, group = pair // G, pair % G
    length, pages = tl.load(lengths + sequence), table + sequence * table_stride
    tiles, first = tl.cdiv(length, _TILE), pair.to(tl.int64) * T
    mine = values + group * WORDS + part * 8
    if PDL:
        if part < PARTS:
            # before the wait: values were written before the scores' kernel, and this one starts after that has ended
            for i in range(0, tl.minimum(AHEAD + DEEP, tiles)):
                block = tiles - 1 - i
                _send(mine, tl.load(pages + block * _TILE // PAGE), block, G * WORDS, PAGE)
    begin(PDL)
    if part == PARTS:
        sum_chain(scores, shrinks, sums, first, tiles, pair * 4 * Q, Q, SUMS_AHEAD, PDL)
    else:
        to = acc + (sequence * N + group * (N // G)) * H + part * COLS
        _lane_chain(
            mine, pages, weights + first * (Q * _TILE // 2), shrinks + first * Q, to, tiles, length,
            G * WORDS, COLS == 32, H, N // G, Q, PAGE, AHEAD, DEEP, FP8, CVT, PDL,
        )
    finish(
        acc, sums, arrived, out, codes, code_scales, codes_stride, scales_stride, pair, sequence, group, PARTS, N, G, H,
        Q, QUANT, FLOOR, POW2,
    )
