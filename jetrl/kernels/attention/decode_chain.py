"""Attention's chains, which add up tile after tile (`decode_split.py`): of the sums, and of the outputs.

Legend: as in `decode_split.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl

from jetrl.kernels.launch import begin
from jetrl.kernels.quantize.triton import abs_bits, encode, scale_from, widened

TILE = 128  # keys
_TILE = tl.constexpr(TILE)
# Reads of sums are assembly: Triton's choice of layouts takes 0.3 s for each other read in a kernel as large as these
_READ = tl.constexpr("ld.global.b32 $0, [$1];")


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _read(at, ON_GPU: tl.constexpr):
    """FP32 numbers."""
    if ON_GPU:
        return tl.inline_asm_elementwise(_READ, "=f,l", [at.to(tl.int64)], tl.float32, False, 1)
    else:
        return tl.load(at)


@triton.jit
def _rows(at, Q: tl.constexpr, ON_GPU: tl.constexpr):
    """The rows of 4 Q numbers of a tile."""
    rows = ()
    for i in tl.static_range(_TILE // 4):
        rows = rows + (_read(at + i * 4 * Q, ON_GPU),)  # type: ignore[assignment]
    return rows


@triton.jit
def sum_chain(scores, shrinks, sums, first, tiles, to, Q: tl.constexpr, AHEAD: tl.constexpr, ON_GPU: tl.constexpr):
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
        units = units + (_read(shrinks + tile * Q + lane % Q, ON_GPU),)  # type: ignore[assignment]
        rows = rows + _rows(scores + tile * (_TILE * Q) + lane, Q, ON_GPU)
    for step in range(0, tiles, AHEAD):
        new_rows, new_units = (), ()
        for d in tl.static_range(AHEAD):
            set_rows, unit = rows[d * ROWS : (d + 1) * ROWS], units[d]  # type: ignore[var-annotated]
            if step + d < tiles:
                total = tl.fma(total, unit, set_rows[0])
                for i in tl.static_range(1, ROWS):
                    total = total + set_rows[i]
                tile = first + tl.maximum(last - step - d - AHEAD, 0)
                unit = _read(shrinks + tile * Q + lane % Q, ON_GPU)
                set_rows = _rows(scores + tile * (_TILE * Q) + lane, Q, ON_GPU)
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

    Tiles are held in `AHEAD` sets of registers as in `sum_chain`. A set of values is codes until the tile before is
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


@triton.jit
def finish(
    acc, sums, arrived, out, codes, code_scales, codes_stride, scales_stride, pair, sequence, group,
    PARTS: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, QUANT: tl.constexpr,
    FLOOR: tl.constexpr, POW2: tl.constexpr,
):
    """The end of a chain's program. The last of a key head's divides outputs by sums."""
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


@triton.jit(do_not_specialize=["table_stride", "scales_stride", "T"])
def chain_kernel(
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
        sum_chain(scores, shrinks, sums, first, tiles, pair * 4 * Q, Q, SUMS_AHEAD, PDL)
    else:
        _value_chain(
            values, table + sequence * table_stride, weights, shrinks, acc, sequence, group, part, first, tiles, length,
            N, G, H, Q, PAGE, COLS, AHEAD, FP8, PDL,
        )
    finish(
        acc, sums, arrived, out, codes, code_scales, codes_stride, scales_stride, pair, sequence, group, PARTS, N, G, H,
        Q, QUANT, FLOOR, POW2,
    )
