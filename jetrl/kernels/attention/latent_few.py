"""Latent attention of decode steps with up to 16 heads for Hopper in Gluon: the bits of `latent_triton`'s programs.

There a program computes a tile's scores, then its softmax, then its outputs, and waits for each: a score is a chain of
36 products, one after another, and a warp has two of them. Here the scores of the next tile are computed between the
outputs of this one, which do not depend on each other, so the tensor core has work. Three tiles of rows are in shared
memory: one gives outputs, one scores, one is being copied. Queries stay in registers.

Products go by blocks of 64 columns: eight of the latents, one of the shared keys. These, their order along a sum and
everything between them are those of `latent_chain.add_tile`; columns of the outputs do not meet.

Gluon has no interpreter: `tests/kernels/test_triton_layouts.py` reads what is compiled, and
`tests/gpu/test_latent_hopper.py` compares its bits with `latent_triton`'s.

Legend: as in `latent_triton`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
# (kernels take pointers and compile-time numbers, for which there are no types; their tuples grow)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from jetrl.kernels.launch import begin

ROWS, TILE, WARPS = 16, 64, 8
_ROWS, _TILE, _SLOTS = gl.constexpr(ROWS), gl.constexpr(TILE), gl.constexpr(3)
_WIDTH = gl.constexpr(64)  # of a block of columns
_MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_MMA, k_width=2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(operand_index=1, parent=_MMA, k_width=2))
_BLOCK = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0]))  # of latents
_COPY_KEYS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0]))


@gluon.jit
def _copy_part(to, rows, page, inside, first, WIDTH: gl.constexpr, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin to copy columns of a tile, from column `first` on, that begins at row `inside` of a page."""
    k = gl.arange(0, _TILE, layout=gl.SliceLayout(1, LAYOUT))
    column = first + gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = rows + (page.to(gl.int64) * PAGE + inside + k)[:, None] * WIDTH + column[None, :]
    async_copy.async_copy_global_to_shared(to, at)


@gluon.jit
def _copy_tile(rings, slot, rows, page, inside, L: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr):
    """Begin to copy a tile to `slot`."""
    _copy_part(rings[0].index(slot), rows, page, inside, 0, L + R, PAGE, _COPY)
    _copy_part(rings[1].index(slot), rows, page, inside, L, L + R, PAGE, _COPY_KEYS)


@gluon.jit
def _copy_queries(to, q, token, first, N: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin to copy columns of a token's heads, from column `first` on; zeros behind the last head."""
    r = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = first + gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = q + (token.to(gl.int64) * N + r)[:, None] * WIDTH + column[None, :]
    async_copy.async_copy_global_to_shared(to, at, mask=(r < N)[:, None])


@gluon.jit
def _block(rings, slot, b: gl.constexpr, BLOCKS: gl.constexpr):
    """Columns of a tile in shared memory: latents, and last the shared keys."""
    if b < BLOCKS - 1:
        return rings[0].index(slot).slice(b * _WIDTH, _WIDTH, dim=1)
    else:
        return rings[1].index(slot)


@gluon.jit
def _queries(rings, BLOCKS: gl.constexpr):
    """The queries, which were copied to the third slot, as left operands, by blocks of columns."""
    found = ()
    for b in gl.static_range(BLOCKS):
        found = found + (_block(rings, 2, b, BLOCKS).slice(0, _ROWS, dim=0).load(_LEFT),)
    return found


@gluon.jit
def _score(s, queries, rings, slot, b: gl.constexpr, BLOCKS: gl.constexpr):
    """Scores [ROWS, TILE] after block `b` of the columns."""
    return mma_v2(queries[b], _block(rings, slot, b, BLOCKS).permute((1, 0)).load(_RIGHT), s)


@gluon.jit
def _weights(s, top, scale):
    """Of scores: BF16 weights as a left operand, new maxima, and what rescales older results."""
    new = gl.maximum(top, gl.max(s, axis=1))
    known = gl.where(new == float("-inf"), 0.0, new)
    p = gl.exp2((s - known[:, None]) * scale).to(gl.bfloat16)
    return gl.convert_layout(p, _LEFT), new, gl.exp2((top - known) * scale)


@gluon.jit
def _step(queries, rings, now, ahead, p, shrink, accs, BLOCKS: gl.constexpr):
    """The outputs after the tile in slot `now`, and the scores of the tile in slot `ahead`."""
    s = gl.zeros([_ROWS, _TILE], gl.float32, layout=_MMA)
    found = ()
    for b in gl.static_range(BLOCKS - 1):
        s = _score(s, queries, rings, ahead, b, BLOCKS)
        value = _block(rings, now, b, BLOCKS).load(_RIGHT)
        found = found + (mma_v2(p, value, accs[b] * shrink[:, None]),)
    return _score(s, queries, rings, ahead, BLOCKS - 1, BLOCKS), found


@gluon.jit
def _arrived():
    """All that this program copied is here, and all of it is done with what it read before."""
    async_copy.wait_group(0)
    gl.thread_barrier()


@gluon.jit
def _finish(
    out, tops, sums, accs, token, place, top, sum_of, parts, alone, chunks, chunk, N: gl.constexpr, L: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """`latent_triton._end` of token `token`, which is number `place` among those whose parts are held."""
    r = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _MMA))
    column, here = gl.arange(0, _WIDTH, layout=gl.SliceLayout(0, _MMA)), r < N
    at = out + (token.to(gl.int64) * N + r)[:, None] * L + column[None, :]
    to = (place.to(gl.int64) * N + r) * chunks + chunk
    if WHOLE:
        for b in gl.static_range(L // _WIDTH):
            y = gl.div_rn(parts[b], sum_of[:, None] + gl.zeros_like(parts[b])).to(gl.bfloat16)
            gl.store(at + b * _WIDTH, y, mask=here[:, None])
    elif alone:
        for b in gl.static_range(L // _WIDTH):
            y = gl.div_rn(parts[b] + 0.0, sum_of[:, None] + gl.zeros_like(parts[b])).to(gl.bfloat16)
            gl.store(at + b * _WIDTH, y, mask=here[:, None])
    else:
        gl.store(tops + to, top, mask=here)
        gl.store(sums + to, sum_of, mask=here)
        for b in gl.static_range(L // _WIDTH):
            gl.store(accs + to[:, None] * L + (b * _WIDTH + column)[None, :], parts[b], mask=here[:, None])


@gluon.jit(do_not_specialize=["width", "low", "high", "sequences", "first", "all_tokens", "chunks"])
def few_kernel(
    q, rows, table, queries, keys, done, out, lse, tops, sums, accs, scale, natural, width, low, high, sequences, first,
    all_tokens, chunks, N: gl.constexpr, L: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr,
    WHOLE: gl.constexpr, LSE: gl.constexpr, PDL: gl.constexpr,
):
    """`latent_triton._rows_kernel` with 16 rows, over pages, where each sequence has one token and none has been begun;
    `done`, `lse`, `high` and the like are not read."""
    begin(PDL)
    BLOCKS: gl.constexpr = (L + R) // _WIDTH
    sequence, chunk = low + gl.program_id(0), gl.program_id(1)
    depth = gl.load(keys + sequence)
    begun = chunk * CHUNK
    end = gl.minimum(begun + CHUNK, depth)
    if begun < end:
        rings = (
            gl.allocate_shared_memory(gl.bfloat16, [_SLOTS, _TILE, L], _BLOCK),
            gl.allocate_shared_memory(gl.bfloat16, [_SLOTS, _TILE, R], _BLOCK),
        )
        token = gl.load(queries + sequence) - first
        _copy_queries(rings[0].index(2).slice(0, _ROWS, dim=0), q, token, 0, N, L + R, _COPY)
        _copy_queries(rings[1].index(2).slice(0, _ROWS, dim=0), q, token, L, N, L + R, _COPY_KEYS)
        pages, last = table + sequence * width, end - 1
        _copy_tile(rings, 0, rows, gl.load(pages + begun // PAGE), begun % PAGE, L, R, PAGE)
        async_copy.commit_group()
        second = begun + _TILE
        if second < end:
            _copy_tile(rings, 1, rows, gl.load(pages + second // PAGE), second % PAGE, L, R, PAGE)
        async_copy.commit_group()
        page = gl.load(pages + gl.minimum(begun + 2 * _TILE, last) // PAGE)
        k = gl.arange(0, _TILE, layout=gl.SliceLayout(0, _MMA))
        ones = gl.full([_TILE, 16], 1.0, gl.bfloat16, layout=_RIGHT)
        top = gl.full([_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, _MMA))
        total = gl.zeros([_ROWS, 16], gl.float32, layout=_MMA)
        parts = ()
        for _ in gl.static_range(BLOCKS - 1):
            parts = parts + (gl.zeros([_ROWS, _WIDTH], gl.float32, layout=_MMA),)
        async_copy.wait_group(1)
        gl.thread_barrier()
        heads = _queries(rings, BLOCKS)
        s = gl.zeros([_ROWS, _TILE], gl.float32, layout=_MMA)
        for b in gl.static_range(BLOCKS):
            s = _score(s, heads, rings, 0, b, BLOCKS)
        now = 0
        for t in range(begun, end, _TILE):
            s = gl.where((t + k < depth)[None, :], s, float("-inf"))
            p, top, shrink = _weights(s, top, scale)
            total = mma_v2(p, ones, total * shrink[:, None])
            _arrived()
            ahead = gl.where(now == 2, 0, now + 1)
            if t + 2 * _TILE < end:
                slot = gl.where(ahead == 2, 0, ahead + 1)
                _copy_tile(rings, slot, rows, page, (t + 2 * _TILE) % PAGE, L, R, PAGE)
            async_copy.commit_group()
            page = gl.load(pages + gl.minimum(t + 3 * _TILE, last) // PAGE)
            s, parts = _step(heads, rings, now, ahead, p, shrink, parts, BLOCKS)  # behind the last tile: not used
            now = ahead
        async_copy.wait_group(0)
        _finish(
            out, tops, sums, accs, token, token - low, top, gl.max(total, axis=1), parts, depth <= CHUNK, chunks, chunk,
            N, L, WHOLE,
        )
