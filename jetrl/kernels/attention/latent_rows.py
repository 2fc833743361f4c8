"""Latent attention of many rows (training, prompts, what sequences share) for Hopper in Gluon: the bits of
`latent_triton`'s and `latent_shared`'s programs.

A program has 64 rows, which are four tokens with 16 heads or fewer with more, and the tiles of one chunk. Triton gives
both warp groups the whole product of queries and keys there, for the scores go on into a second product: half of that
work is done twice. Here each warp group has half of the keys in the first product and half of the latents' columns in
the second. Instructions, their order along a sum and everything between them are those of `latent_chain.add_tile`:

    s      wgmma over the latent's 512 values, and on to the shared key's 64 in the same accumulator
    p      BF16 of exp2((s - max) * scale), through shared memory, where both warp groups read all of it
    sums   wgmma of p with ones;  outputs: wgmma of p with the latents, after the old ones were rescaled

Shared memory holds the queries and two tiles of rows: one is computed while the next is copied. Nothing else fits
(226.5 of 227 KB).

Gluon has no interpreter: `tests/kernels/test_triton_layouts.py` reads what is compiled, and
`tests/gpu/test_latent_hopper.py` compares its bits with `latent_triton`'s.

Legend: as in `latent_triton`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from jetrl.kernels.launch import begin

ROWS, TILE = 64, 64
_ROWS, _TILE = gl.constexpr(ROWS), gl.constexpr(TILE)
_AT_ONCE = gl.constexpr(256)  # sequences, in the search for a program's own

# two warp groups: halves of the keys; of the latents' columns; of columns of ones
_SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16]))
_VALUES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 8, 16]))
_WIDE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_NARROW = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))
_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))  # of latents
_COPY_KEYS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))


@gluon.jit
def _last(queries, sequences, first, most, TOKENS: gl.constexpr):
    """`latent_triton._last`."""
    found = gl.zeros([_AT_ONCE], gl.int32, layout=_LINE)
    for start in range(0, sequences, _AT_ONCE):
        s = start + gl.arange(0, _AT_ONCE, layout=_LINE)
        block = (gl.load(queries + s, mask=s < sequences, other=0) - first + s * (TOKENS - 1)) // TOKENS
        found += ((block <= most) & (s < sequences)).to(gl.int32)
    return gl.sum(found, axis=0) - 1


@gluon.jit
def _place(index, queries, sequences, first, low, TOKENS: gl.constexpr):
    """`latent_triton._place`."""
    block = index
    if low > 0:
        s = _last(queries, sequences, first, low, 1)
        start = gl.load(queries + s) - first
        block += (start + s * (TOKENS - 1)) // TOKENS + (low - start) // TOKENS
    s = _last(queries, sequences, first, block, TOKENS)
    return s, block - (gl.load(queries + s) - first + s * (TOKENS - 1)) // TOKENS


@gluon.jit
def _lines(t, page, origin, depth, k, PAGE: gl.constexpr):
    """Which rows the keys `t + k` are: of a page, or of a packed sequence (behind the last key lie others, or none)."""
    if PAGE > 0:
        return page.to(gl.int64) * PAGE + t % PAGE + k
    else:
        return origin.to(gl.int64) + gl.minimum(t + k, depth - 1)


@gluon.jit
def _copy_tile(slot, key_slot, rows, t, page, origin, depth, L: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr):
    """Begin to copy the tile of key `t`."""
    line = _lines(t, page, origin, depth, gl.arange(0, _TILE, layout=gl.SliceLayout(1, _COPY)), PAGE)
    e = gl.arange(0, L, layout=gl.SliceLayout(0, _COPY))
    async_copy.async_copy_global_to_shared(slot, rows + line[:, None] * (L + R) + e[None, :])
    line = _lines(t, page, origin, depth, gl.arange(0, _TILE, layout=gl.SliceLayout(1, _COPY_KEYS)), PAGE)
    f = gl.arange(0, R, layout=gl.SliceLayout(0, _COPY_KEYS))
    async_copy.async_copy_global_to_shared(key_slot, rows + line[:, None] * (L + R) + (L + f)[None, :])


@gluon.jit
def _row(token0, mine, low, high, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Token and head of each row, and whether it is one of `mine` tokens from `token0` on and of `low` to `high`."""
    r = gl.arange(0, _ROWS, layout=LAYOUT)
    token = token0 + r // N
    return token, r % N, (r // N < mine) & (token >= low) & (token < high)


@gluon.jit
def _copy_part(to, q, row, here, first, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin to copy columns of the rows `row` of `q`, from column `first` on; zeros if not `here`."""
    column = first + gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = q + (row.to(gl.int64) * WIDTH)[:, None] + column[None, :]
    async_copy.async_copy_global_to_shared(to, at, mask=here[:, None])


@gluon.jit
def _copy_queries(qc, qr, q, token0, low, high, mine, N: gl.constexpr, L: gl.constexpr, R: gl.constexpr):
    """Begin to copy the queries of `_row`; zeros for other rows."""
    token, head, here = _row(token0, mine, low, high, N, gl.SliceLayout(1, _COPY))
    _copy_part(qc, q, token * N + head, here, 0, L + R, _COPY)
    token, head, here = _row(token0, mine, low, high, N, gl.SliceLayout(1, _COPY_KEYS))
    _copy_part(qr, q, token * N + head, here, L, L + R, _COPY_KEYS)


@gluon.jit
def _shared(L: gl.constexpr, R: gl.constexpr):
    """Queries; two tiles of latents and of shared keys; weights; ones."""
    qc = gl.allocate_shared_memory(gl.bfloat16, [_ROWS, L], _WIDE)
    qr = gl.allocate_shared_memory(gl.bfloat16, [_ROWS, R], _WIDE)
    ring = gl.allocate_shared_memory(gl.bfloat16, [2, _TILE, L], _WIDE)
    key_ring = gl.allocate_shared_memory(gl.bfloat16, [2, _TILE, R], _WIDE)
    p_slot = gl.allocate_shared_memory(gl.bfloat16, [_ROWS, _TILE], _WIDE)
    ones = gl.allocate_shared_memory(gl.bfloat16, [_TILE, 16], _NARROW)
    ones.store(gl.full([_TILE, 16], 1.0, gl.bfloat16, layout=gl.BlockedLayout([1, 8], [16, 2], [8, 1], [1, 0])))
    return qc, qr, ring, key_ring, p_slot, ones


@gluon.jit
def _arrived():
    """All that this program copied is here for the tensor core, and all of it is done with what it computed before."""
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _add_tile(qc, qr, c, kr, p_slot, ones, seen, top, total, acc, scale, MASK: gl.constexpr):
    """`latent_chain.add_tile`, with maxima [ROWS] by `_SCORES`."""
    s = warpgroup_mma(
        qc, c.permute((1, 0)), gl.zeros([_ROWS, _TILE], gl.float32, layout=_SCORES), use_acc=False, is_async=True
    )
    s = warpgroup_mma(qr, kr.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=0, deps=[s])
    if MASK:
        s = gl.where(seen, s, float("-inf"))
    new = gl.maximum(top, gl.max(s, axis=1))
    known = gl.where(new == float("-inf"), 0.0, new)
    shrink = gl.exp2((top - known) * scale)
    p = gl.exp2((s - known[:, None]) * scale).to(gl.bfloat16)
    p_slot.store(p)
    fence_async_shared()
    gl.thread_barrier()
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, _SUMS))[:, None]
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, _VALUES))[:, None]
    total = warpgroup_mma(p_slot, ones, total, is_async=True)
    acc = warpgroup_mma(p_slot, c, acc, is_async=True)
    total, acc = warpgroup_mma_wait(num_outstanding=0, deps=[total, acc])
    return new, total, acc


@gluon.jit
def _walk(
    buffers, rows, pages, origin, depth, begun, end, last, scale, L: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr,
    MASK: gl.constexpr,
):
    """Maxima, sums and outputs of the tiles from key `begun` to `end`. Copies of queries have begun. MASK: a row sees
    keys up to `last`, else all."""
    qc, qr, ring, key_ring, p_slot, ones = buffers
    page = origin
    if PAGE > 0:
        page = gl.load(pages + begun // PAGE)
    _copy_tile(ring.index(0), key_ring.index(0), rows, begun, page, origin, depth, L, R, PAGE)
    async_copy.commit_group()
    if PAGE > 0:
        page = gl.load(pages + gl.minimum(begun + _TILE, end - 1) // PAGE)
    k = gl.arange(0, _TILE, layout=gl.SliceLayout(0, _SCORES))
    top = gl.full([_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, _SCORES))
    total = gl.zeros([_ROWS, 16], gl.float32, layout=_SUMS)
    acc = gl.zeros([_ROWS, L], gl.float32, layout=_VALUES)
    for t in range(begun, end, _TILE):
        now = (t - begun) // _TILE % 2
        _arrived()
        if t + _TILE < end:
            _copy_tile(ring.index(1 - now), key_ring.index(1 - now), rows, t + _TILE, page, origin, depth, L, R, PAGE)
        async_copy.commit_group()
        if PAGE > 0:
            page = gl.load(pages + gl.minimum(t + 2 * _TILE, end - 1) // PAGE)
        seen = (t + k)[None, :] <= last[:, None]
        top, total, acc = _add_tile(
            qc, qr, ring.index(now), key_ring.index(now), p_slot, ones, seen, top, total, acc, scale, MASK
        )
    top = gl.convert_layout(top, gl.SliceLayout(1, _VALUES))
    return top, gl.convert_layout(gl.max(total, axis=1), gl.SliceLayout(1, _VALUES)), acc  # of 16 equal columns


@gluon.jit
def _leave(tops, sums, accs, to, here, top, sum_of, acc, L: gl.constexpr):
    """What a merge reads of rows whose chunk has not the last of their keys."""
    gl.store(tops + to, top, mask=here)
    gl.store(sums + to, sum_of, mask=here)
    e = gl.arange(0, L, layout=gl.SliceLayout(0, _VALUES))
    gl.store(accs + to[:, None] * L + e[None, :], acc, mask=here[:, None])


@gluon.jit
def _write(
    out, lse, slot, top, sum_of, acc, natural, row0, mine, low, high, all_tokens, N: gl.constexpr, L: gl.constexpr,
    LSE: gl.constexpr,
):
    """Rows that are final; by way of `slot` [ROWS, L] of shared memory, in lines of 16 bytes."""
    y = gl.div_rn(acc, sum_of[:, None] + gl.zeros_like(acc)).to(gl.bfloat16)
    gl.thread_barrier()  # the other warp group has read the tile
    slot.store(y)
    gl.thread_barrier()
    token, head, alive = _row(row0, mine, low, high, N, gl.SliceLayout(1, _COPY))
    e = gl.arange(0, L, layout=gl.SliceLayout(0, _COPY))[None, :]
    gl.store(out + (token.to(gl.int64) * N + head)[:, None] * L + e, slot.load(_COPY), mask=alive[:, None])
    if LSE:
        token, head, alive = _row(row0, mine, low, high, N, gl.SliceLayout(1, _VALUES))
        gl.store(lse + head * all_tokens + token, top * natural + gl.log(sum_of), mask=alive)


@gluon.jit
def _finish(
    out, lse, tops, sums, accs, slot, top, sum_of, acc, natural, alone, row0, mine, low, high, all_tokens, chunks,
    chunk, N: gl.constexpr, L: gl.constexpr, WHOLE: gl.constexpr, LSE: gl.constexpr,
):
    """`latent_triton._end`."""
    if WHOLE:
        _write(out, lse, slot, top, sum_of, acc, natural, row0, mine, low, high, all_tokens, N, L, LSE)
    elif alone:
        _write(out, lse, slot, top, sum_of, acc + 0.0, natural, row0, mine, low, high, all_tokens, N, L, LSE)
    else:
        token, head, alive = _row(row0, mine, low, high, N, gl.SliceLayout(1, _VALUES))
        to = ((token - low).to(gl.int64) * N + head) * chunks + chunk
        _leave(tops, sums, accs, to, alive, top, sum_of, acc, L)


@gluon.jit(do_not_specialize=["width", "low", "high", "sequences", "first", "all_tokens", "chunks"])
def rows_kernel(
    q, rows, table, queries, keys, done, out, lse, tops, sums, accs, scale, natural, width, low, high, sequences, first,
    all_tokens, chunks, N: gl.constexpr, L: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr,
    WHOLE: gl.constexpr, LSE: gl.constexpr, PDL: gl.constexpr,
):
    """`latent_triton._rows_kernel` with 64 rows, of sequences with any number of tokens. `done` is not read."""
    begin(PDL)
    TOKENS: gl.constexpr = _ROWS // N
    chunk = gl.program_id(1)
    sequence, part = _place(gl.program_id(0), queries, sequences, first, low, TOKENS)
    start = gl.load(queries + sequence)
    count = gl.load(queries + sequence + 1) - start
    origin = gl.load(keys + sequence)
    if PAGE > 0:
        depth = origin
    else:
        depth = gl.load(keys + sequence + 1) - origin
    here = part * TOKENS
    row0, pos0 = start - first + here, depth - count + here
    mine = gl.minimum(count - here, TOKENS)
    begun = chunk * CHUNK
    end = gl.minimum(begun + CHUNK, pos0 + mine)
    if (mine > 0) & (begun < end) & (row0 < high) & (row0 + mine > low):
        buffers = _shared(L, R)
        _copy_queries(buffers[0], buffers[1], q, row0, low, high, mine, N, L, R)
        last = pos0 + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _SCORES)) // N  # key that a row sees
        pages = table + sequence * width
        top, sum_of, acc = _walk(buffers, rows, pages, origin, depth, begun, end, last, scale, L, R, PAGE, True)
        alone = depth - count + gl.minimum(here + TOKENS, count) <= CHUNK  # `latent_triton._is_alone`
        _finish(
            out, lse, tops, sums, accs, buffers[2].index(0), top, sum_of, acc, natural, alone, row0, mine, low, high,
            all_tokens, chunks, chunk, N, L, WHOLE, LSE,
        )


@gluon.jit
def _member(members, group, part, low, high, N: gl.constexpr, S: gl.constexpr, LAYOUT: gl.constexpr):
    """Sequence and head of each row, and whether it is one of `low` to `high`."""
    r = gl.arange(0, _ROWS, layout=LAYOUT)
    SEQUENCES: gl.constexpr = _ROWS // N
    member = part * SEQUENCES + r // N
    there = (r // N < SEQUENCES) & (member < S)
    sequence = gl.load(members + group * S + member, mask=there, other=-1)
    return sequence, r % N, (sequence >= low) & (sequence < high)


@gluon.jit(do_not_specialize=["width", "low", "high", "chunks"])
def shared_kernel(
    q, rows, table, members, tiles_of, tops, sums, accs, scale, width, low, high, chunks, N: gl.constexpr,
    L: gl.constexpr, R: gl.constexpr, S: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr, UNIT: gl.constexpr,
    PDL: gl.constexpr,
):
    """`latent_shared._shared_kernel` with 64 rows."""
    begin(PDL)
    PARTS: gl.constexpr = (S + _ROWS // N - 1) // (_ROWS // N)
    group, part, chunk = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS, gl.program_id(1)
    begun = chunk * CHUNK
    end = gl.minimum(begun + CHUNK, gl.load(tiles_of + group) * UNIT)
    member, head, here = _member(members, group, part, low, high, N, S, gl.SliceLayout(1, _COPY))
    if (begun < end) & (gl.max(here.to(gl.int32), axis=0) > 0):
        buffers = _shared(L, R)
        _copy_part(buffers[0], q, member * N + head, here, 0, L + R, _COPY)
        again, its_head, there = _member(members, group, part, low, high, N, S, gl.SliceLayout(1, _COPY_KEYS))
        _copy_part(buffers[1], q, again * N + its_head, there, L, L + R, _COPY_KEYS)
        pages = table + gl.load(members + group * S) * width
        last = gl.zeros([_ROWS], gl.int32, layout=gl.SliceLayout(1, _SCORES))
        top, sum_of, acc = _walk(buffers, rows, pages, end, end, begun, end, last, scale, L, R, PAGE, False)
        sequence, of, alive = _member(members, group, part, low, high, N, S, gl.SliceLayout(1, _VALUES))
        to = ((sequence - low).to(gl.int64) * N + of) * chunks + chunk
        _leave(tops, sums, accs, to, alive, top, sum_of, acc, L)
