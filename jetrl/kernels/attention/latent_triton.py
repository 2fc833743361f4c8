"""Latent attention as Triton kernels for Hopper: the forward passes of training and rollout, and the write to pages.
(`latent_products` has what comes before and after it.)

    attend   rows (token, head) over chunks of 1,024 keys at absolute positions, in tiles of 64 keys:
             s = q . row in one FP32 chain, the latent first; p = bf16(exp2((s - max) * scale)); the sum of p is a
             column of ones beside the values, so it has their order in every layout
    merge    a row's chunks from the first to the last, in FP32, rounded once; the log-sum-exp of the row

A decode step has 16 or 32 rows in a program, a prompt, a packed sequence or what decoding sequences share
(`latent_shared`) 64: the tensor core gives a row equal bits in all of these. So who computes a row changes nothing, and
neither does what else is in the step. The host reads no length, so steps may be captured. Partial sums of long
sequences are FP32 in memory, for some rows at a time.

The backward pass is FlashAttention-4's, of keys and values that are made again (`latent_reference`).

Legend: `T` tokens, `N` heads, `L` the latent, `R` the shared key, `C` chunks; of a head `P` values of its query meet
the latent, and its value has `V`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.attention.latent import STEPS, LatentSizes, Steps, require_page, require_sizes
from jetrl.kernels.attention.latent_chain import add_tile, queries_of
from jetrl.kernels.attention.latent_products import Operand
from jetrl.kernels.attention.latent_shared import UNIT, begin_chunks, merges
from jetrl.kernels.attention.latent_split import attend_chunks, splits
from jetrl.kernels.attention.state import SharedPages
from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.launch import CAPABILITY, LAUNCH, begin
from jetrl.types import PagedPlan, VarlenPlan

CHUNK = 1024  # keys
_PARTIAL_BYTES = 1 << 28  # of partial outputs held at once
_AT_ONCE = tl.constexpr(256)  # sequences, in the search for a program's own
_MAXIMA = tl.constexpr(32)  # of chunks, and
_PARTS = tl.constexpr(4)  # partial outputs of chunks, that a merge reads at the same time
_PROCESSORS = 132
# Whether programs of 64 rows are `latent_rows`', and those of 16 `latent_few`'s where there is one for a processor at
# most. No bit depends on it: tests and `bench_latent.py --parts ops forms` compare both.
ROWS_IN_GLUON, FEW_IN_GLUON = True, True
_LOG2E = math.log2(math.e)


HOPPER = STEPS["hopper"]


@triton.jit
def _write_kernel(row, pages, slots, row_stride, W, B: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot, e = tl.load(slots + token), tl.arange(0, B)
    if slot >= 0:
        v = tl.load(row + token * row_stride + e, mask=e < W)
        tl.store(pages + slot * W + e, v, mask=e < W)


@triton.jit
def _last(queries, sequences, first, most, TOKENS: tl.constexpr):
    """The last sequence whose first block has a number of at most `most`. Blocks have TOKENS tokens; a sequence's first
    one has the number (tokens before it + (TOKENS - 1) * sequences before it) // TOKENS: none has another's."""
    found = tl.zeros([_AT_ONCE], tl.int32)
    for start in tl.range(0, sequences, _AT_ONCE, num_stages=1):
        s = start + tl.arange(0, _AT_ONCE)
        block = (tl.load(queries + s, mask=s < sequences, other=0) - first + s * (TOKENS - 1)) // TOKENS
        found += ((block <= most) & (s < sequences)).to(tl.int32)
    return tl.sum(found, axis=0) - 1


@triton.jit
def _place(index, queries, sequences, first, low, TOKENS: tl.constexpr):
    """Sequence and part of block `index`, counted from the block of token `low`."""
    block = index
    if low > 0:
        s = _last(queries, sequences, first, low, 1)
        start = tl.load(queries + s) - first
        block += (start + s * (TOKENS - 1)) // TOKENS + (low - start) // TOKENS
    s = _last(queries, sequences, first, block, TOKENS)
    return s, block - (tl.load(queries + s) - first + s * (TOKENS - 1)) // TOKENS


@triton.jit
def _left(tops, sums, accs, to, known, ROWS: tl.constexpr, L: tl.constexpr):
    """Maxima, sums and outputs of rows whose chunk `latent_shared` has begun, where `known`; else those of no key."""
    top = tl.load(tops + to, mask=known, other=float("-inf"))
    total = tl.zeros([ROWS, 16], tl.float32) + tl.load(sums + to, mask=known, other=0.0)[:, None]
    at = to[:, None] * L + tl.arange(0, L)[None, :]
    return top, total, tl.load(accs + at, mask=known[:, None], other=0.0)


@triton.jit
def _write(
    out, lse, at, lse_at, alive, top, sum_of, acc, natural, ROWS: tl.constexpr, L: tl.constexpr, LSE: tl.constexpr
):
    """The result of rows that have one chunk."""
    result = tl.div_rn(acc, tl.broadcast_to(sum_of[:, None], [ROWS, L])).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * L + tl.arange(0, L)[None, :], result, mask=alive[:, None])
    if LSE:
        tl.store(lse + lse_at, top * natural + tl.log(sum_of), mask=alive)


@triton.jit
def _end(
    out, lse, tops, sums, accs, row0, mine, low, high, all_tokens, chunks, chunk, top, total, acc, natural, alone,
    N: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr, LSE: tl.constexpr,
):
    """Of rows whose chunk has ended: the result, if there is no other chunk (WHOLE, or `alone` among rows that have
    several), else what a merge reads."""
    r, sum_of = tl.arange(0, ROWS), tl.max(total, axis=1)  # of 16 equal columns
    token = row0 + r // N
    alive = (r // N < mine) & (token >= low) & (token < high)
    at, lse_at = token.to(tl.int64) * N + r % N, (r % N) * all_tokens + token
    if WHOLE:
        _write(out, lse, at, lse_at, alive, top, sum_of, acc, natural, ROWS, L, LSE)
    elif alone:  # a merge adds to zero: no -0 stays
        _write(out, lse, at, lse_at, alive, top, sum_of, acc + 0.0, natural, ROWS, L, LSE)
    else:
        to = (at - low.to(tl.int64) * N) * chunks + chunk
        tl.store(tops + to, top, mask=alive)
        tl.store(sums + to, sum_of, mask=alive)
        tl.store(accs + to[:, None] * L + tl.arange(0, L)[None, :], acc, mask=alive[:, None])


@triton.jit
def _is_alone(place, before, count, TOKENS: tl.constexpr, CHUNK: tl.constexpr):
    """Whether the block of TOKENS tokens in which token `place` of a sequence is sees the first chunk of its keys only;
    `count` tokens follow `before` keys."""
    here = place // TOKENS * TOKENS
    return before + tl.minimum(here + TOKENS, count) <= CHUNK


@triton.jit(do_not_specialize=["width", "low", "high", "sequences", "first", "all_tokens", "chunks"])
def _rows_kernel(
    q, rows, table, queries, keys, done, out, lse, tops, sums, accs, scale, natural, width, low, high, sequences, first,
    all_tokens, chunks, N: tl.constexpr, L: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PAGE: tl.constexpr, CHUNK: tl.constexpr, ONE: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr,
    LSE: tl.constexpr, PDL: tl.constexpr,
):
    """Rows of one block of a sequence's tokens over one chunk of its keys. `queries`: where sequences begin, counted
    from `first`; `keys`: how many they have (pages), or where these begin. ONE: each has one token. UNIT: if not
    0, the first `done[sequence]` tiles of so many keys were computed; a chunk that they begin goes on from what is
    there. WHOLE: there is one chunk, and the result is final; else maxima, sums and outputs of tokens from `low` to
    `high` are left in FP32."""
    begin(PDL)
    chunk = tl.program_id(1)
    tokens: tl.constexpr = ROWS // N
    if ONE:
        sequence, part = low + tl.program_id(0), 0
    else:
        sequence, part = _place(tl.program_id(0), queries, sequences, first, low, tokens)
    start = tl.load(queries + sequence)
    count = tl.load(queries + sequence + 1) - start
    origin = tl.load(keys + sequence)
    depth = origin if PAGE > 0 else tl.load(keys + sequence + 1) - origin
    here = part * tokens
    row0, pos0 = start - first + here, depth - count + here
    mine = tl.minimum(count - here, tokens)
    begun = chunk * CHUNK
    end = tl.minimum(begun + CHUNK, pos0 + mine)
    if UNIT > 0:
        begun = tl.maximum(begun, tl.load(done + sequence) * UNIT)
    if (mine > 0) & (begun < end) & (row0 < high) & (row0 + mine > low):
        r, e, f, k = tl.arange(0, ROWS), tl.arange(0, L), tl.arange(0, R), tl.arange(0, TILE)
        token = r // N
        alive = (token < mine) & (row0 + token >= low) & (row0 + token < high)
        at = (row0 + token).to(tl.int64) * N + r % N
        qc, qr = queries_of(q, at, alive, L, R)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        acc, total = tl.zeros([ROWS, L], tl.float32), tl.zeros([ROWS, 16], tl.float32)
        if UNIT > 0:
            to = ((row0 + token - low).to(tl.int64) * N + r % N) * chunks + chunk
            top, total, acc = _left(tops, sums, accs, to, alive & (begun > chunk * CHUNK), ROWS, L)
        pages = table + sequence * width
        page = tl.load(pages + (begun // PAGE if PAGE > 0 else 0))
        for t in range(begun, end, TILE):
            if PAGE > 0:
                line = page.to(tl.int64) * PAGE + t % PAGE + k
                page = tl.load(pages + tl.minimum(t + TILE, end - 1) // PAGE)  # the next tile's: rows need not wait
            else:  # behind the last key lie others, or nothing
                line = origin.to(tl.int64) + tl.minimum(t + k, depth - 1)
            c = tl.load(rows + line[:, None] * (L + R) + e[None, :])
            kr = tl.load(rows + line[:, None] * (L + R) + (L + f)[None, :])
            seen = (t + k)[None, :] <= (pos0 + token)[:, None]
            top, total, acc = add_tile(qc, qr, c, kr, seen, top, total, acc, scale, ROWS, TILE, True)
        alone = _is_alone(here, depth - count, count, tokens, CHUNK)
        if UNIT > 0:  # a merge reads all
            alone = alone & (UNIT == 0)
        _end(
            out, lse, tops, sums, accs, row0, mine, low, high, all_tokens, chunks, chunk, top, total, acc, natural,
            alone, N, ROWS, L, WHOLE, LSE,
        )


@triton.jit(do_not_specialize=["low", "first", "sequences", "all_tokens", "chunks"])
def _merge_kernel(
    tops, sums, accs, queries, keys, out, lse, scale, natural, low, first, sequences, all_tokens, chunks,
    N: tl.constexpr, L: tl.constexpr, PAGED: tl.constexpr, CHUNK: tl.constexpr, LSE: tl.constexpr, BB: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):
    """The chunks of HEADS heads of a token, from the first to the last. TOKENS: of a block, if not 0; blocks that have
    one chunk are final."""
    begin(PDL)
    inside = tl.program_id(0).to(tl.int64) * HEADS
    token = low + inside // N
    b = tl.arange(0, BB)
    starts = tl.load(queries + b, mask=b < sequences, other=0x7FFFFFFF) - first
    sequence = tl.sum((starts <= token).to(tl.int32), axis=0) - 1
    start = tl.load(queries + sequence) - first
    count = tl.load(queries + sequence + 1) - first - start
    depth = tl.load(keys + sequence) if PAGED else tl.load(keys + sequence + 1) - tl.load(keys + sequence)
    left = token - start < count
    if TOKENS > 0:
        left = left & (_is_alone(token - start, depth - count, count, TOKENS, CHUNK) == 0)
    if left:
        live = (depth - count + token - start) // CHUNK + 1
        e, c = tl.arange(0, L)[None, :], tl.arange(0, _MAXIMA)[None, :]
        row = inside + tl.arange(0, HEADS)
        head, at = row % N, row * chunks
        tops_of = tl.full([HEADS, _MAXIMA], float("-inf"), tl.float32)
        for begun in tl.range(0, live, _MAXIMA, num_stages=1):
            some = tl.load(tops + at[:, None] + begun + c, mask=begun + c < live, other=float("-inf"))
            tops_of = tl.maximum(tops_of, some)
        top = tl.max(tops_of, axis=1)
        total, acc = tl.zeros([HEADS], tl.float32), tl.zeros([HEADS, L], tl.float32)
        for begun in tl.range(0, live, _PARTS, num_stages=1):
            for i in tl.static_range(_PARTS):  # all are on their way before the first is added
                of, here = at + begun + i, begun + i < live
                part = tl.exp2((tl.load(tops + of, mask=here, other=float("-inf")) - top) * scale)
                total = tl.where(here, total + tl.load(sums + of, mask=here, other=0.0) * part, total)
                x = tl.load(accs + of[:, None] * L + e, mask=here, other=0.0)
                acc = tl.where(here, acc + x * part[:, None], acc)
        done = tl.div_rn(acc, tl.broadcast_to(total[:, None], [HEADS, L]))
        tl.store(out + (token * N + head)[:, None] * L + e, done.to(out.dtype.element_ty))
        if LSE:
            tl.store(lse + head * all_tokens + token, top * natural + tl.log(total))


def prepare_latent(w: Tensor, sizes: LatentSizes, held: Any = None, steps: Steps = HOPPER) -> Operand:
    """The published matrix itself. UserError for sizes that the kernels do not have."""
    require_sizes(sizes, steps)
    assert w.is_contiguous() and w.shape == (sizes.heads * (sizes.nope + sizes.value), sizes.rank)
    return w


def latent_attend(
    q: Tensor, row: Tensor, plan: VarlenPlan, scale: float, sizes: LatentSizes, need_lse: bool, steps: Steps = HOPPER
) -> tuple[Tensor, Tensor | None]:
    """Packed sequences: `q` [T, N, L + R] over the rows [T, L + R] -> [T, N, L], and the log-sum-exp [N, T] FP32."""
    seen = plan if plan.keys is None else plan.keys
    rows = row if plan.keys is None else row.index_select(0, plan.keys.rows)
    out = torch.empty(len(q), sizes.heads, sizes.rank, dtype=q.dtype, device=q.device)
    lse = torch.empty(sizes.heads, len(q), dtype=torch.float32, device=q.device) if need_lse else None
    _attend(
        q, rows.contiguous(), None, plan.cu_seqlens, seen.cu_seqlens, out, lse, scale, sizes, plan.lengths,
        max(seen.lengths, default=0), 0, 0, steps,
    )
    return out, lse


def latent_attend_cached(
    q: Tensor, row: Tensor | None, pages: Tensor, plan: PagedPlan, scale: float, sizes: LatentSizes,
    steps: Steps = HOPPER,
) -> Tensor:
    """Write the rows [T, L + R] to `pages` [pages, page, L + R] at `plan.slots` (-1: nowhere; None: all are
    there); then `q` [T, N, L + R] over the pages of its sequences -> [T, N, L]. Leading sequences with one query each
    run in programs of few rows, or, if they are few, by tiles and columns (`latent_split`); where all have one, pages
    that they share are read once for several (`latent_shared`)."""
    page, width = pages.shape[1], pages.shape[2]
    require_page(page, steps)
    assert pages.is_contiguous()
    if row is not None and len(row):
        assert row.stride(1) == 1
        _write_kernel[(len(row),)](
            row, pages, plan.slots, row.stride(0), width, B=triton.next_power_of_2(width), num_warps=4, **LAUNCH
        )
    out = torch.empty(len(q), sizes.heads, sizes.rank, dtype=q.dtype, device=q.device)
    lengths, deepest = plan.query_lengths, plan.block_table.shape[1] * page
    single = next((i for i, n in enumerate(lengths) if n != 1), len(lengths))
    shared = plan.shared if merges(steps, sizes.heads) else None
    assert shared is None or single == len(lengths), "pages are shared only in steps in which all sequences decode"
    for first, last in ((0, single), (single, len(lengths))):
        if first < last:
            _attend(
                q[first:] if first == single else q[:single], pages, plan.block_table[first:last],
                plan.cu_seqlens[first : last + 1], plan.kv_lengths[first:last],
                out[first:] if first == single else out[:single], None, scale, sizes, lengths[first:last], deepest,
                page, first, steps, shared,
            )
    return out


def blocks_of(tokens: int, lengths: tuple[int, ...], size: int) -> int:
    """How many programs `tokens` tokens in a row need at most, in blocks of `size` that begin at each of their
    sequences; `lengths` are these, or bounds. An empty sequence may lie between any two tokens."""
    apart = min(tokens, len(lengths)) if all(lengths) else len(lengths)
    return (tokens - 1 + (apart + 1) * (size - 1)) // size + 1


def form_of(rows: int, blocks: int, steps: Steps) -> tuple[int, int]:
    """Warps of programs with so many rows, and tiles on their way. No bit depends on them. Of few rows two programs
    share a processor and hide each other's waits, where there are surely so many; else each reads a tile ahead (one
    H200, 1 x 8192: 43 us instead of 55, 64 x 4096: 99 instead of 95). `blocks` bounds programs of a chunk; how many
    chunks have keys is not known."""
    if rows >= 64:
        return 8, 2
    return 4 if rows < steps.tile else 8, steps.stages[0 if blocks <= _PROCESSORS else 1]


def _fits(q: Tensor, sizes: LatentSizes, steps: Steps) -> bool:
    """Whether kernels in Gluon can compute this."""
    found = CAPABILITY[0], q.dtype, steps.tile, sizes.rank, sizes.rope
    return found == (9, torch.bfloat16, 64, 512, 64)


def _kernel_of(
    q: Tensor, one: bool, paged: bool, block: int, blocks: int, sizes: LatentSizes, steps: Steps,
    shared: SharedPages | None,
) -> tuple[Any, dict[str, Any]]:
    """What computes `block` rows over a chunk, and its constants."""
    if ROWS_IN_GLUON and block == 64 and not one and _fits(q, sizes, steps):
        from jetrl.kernels.attention.latent_rows import rows_kernel

        return rows_kernel, {"num_warps": 8}
    few = FEW_IN_GLUON and blocks <= _PROCESSORS
    if few and block == 16 and one and paged and shared is None and _fits(q, sizes, steps):
        from jetrl.kernels.attention import latent_few

        return latent_few.few_kernel, {"num_warps": latent_few.WARPS}
    warps, stages = form_of(block, blocks, steps)
    constants = {"ROWS": block, "TILE": steps.tile, "ONE": one, "UNIT": 0 if shared is None else UNIT}
    return _rows_kernel, constants | {"num_warps": warps, "num_stages": stages}


def _attend(
    q: Tensor, rows: Tensor, table: Tensor | None, queries: Tensor, keys: Tensor, out: Tensor, lse: Tensor | None,
    scale: float, sizes: LatentSizes, lengths: tuple[int, ...], deepest: int, page: int, first: int, steps: Steps,
    shared: SharedPages | None = None,
) -> None:
    """`lengths`: the tokens of each sequence, or bounds where more than 1; `first`: what `queries` says of the first
    token of `q`."""
    heads, tokens, sequences, device = sizes.heads, len(q), len(lengths), q.device
    if not tokens or not any(lengths):
        return
    few, one = triton.next_power_of_2(max(16, heads)), set(lengths) == {1}
    at_once = math.gcd(heads, 4)  # heads that a program merges
    block = few if one else max(steps.rows, few)
    chunks = triton.cdiv(deepest, CHUNK)
    whole = chunks == 1 and shared is None
    slab = tokens if whole else max(1, min(tokens, _PARTIAL_BYTES // (4 * heads * sizes.rank * chunks)))
    empty = torch.empty(0, dtype=torch.float32, device=device)
    tops = sums = accs = empty
    if not whole:
        tops, sums = (torch.empty(slab * heads * chunks, dtype=torch.float32, device=device) for _ in range(2))
        accs = torch.empty(slab * heads * chunks * sizes.rank, dtype=torch.float32, device=device)
    lse_at = empty if lse is None else lse
    common = dict(N=heads, L=sizes.rank, CHUNK=CHUNK, LSE=lse is not None, enable_fp_fusion=False, **LAUNCH)
    split = one and table is not None and shared is None and splits(sequences, deepest, heads)
    state = tops, sums, accs
    for low in range(0, tokens, slab):
        high = min(tokens, low + slab)
        if shared is not None:
            assert table is not None
            gluon = ROWS_IN_GLUON and _fits(q, sizes, steps)
            begin_chunks(q, rows, table, shared, state, scale * _LOG2E, sizes, low, high, chunks, CHUNK, steps, gluon)
        blocks = high - low if one else blocks_of(high - low, lengths, block // heads)
        if split:
            assert table is not None
            attend_chunks(
                q, rows, table, queries, keys, out, state, scale * _LOG2E, sizes, low, high, first, chunks, CHUNK,
                whole, steps,
            )
        else:
            kernel, more = _kernel_of(q, one, page > 0, block, blocks, sizes, steps, shared)
            kernel[(blocks, chunks)](
                q, rows, queries if table is None else table, queries, keys,
                queries if shared is None else shared.first, out, lse_at, *state, scale * _LOG2E, scale,
                0 if table is None else table.stride(0), low, high, sequences, first, tokens, chunks, R=sizes.rope,
                PAGE=page, WHOLE=whole, **more, **common,
            )
        if not whole:
            _merge_kernel[((high - low) * heads // at_once,)](
                *state, queries, keys, out, lse_at, scale * _LOG2E, scale, low, first, sequences, tokens,
                chunks, PAGED=page > 0, BB=triton.next_power_of_2(sequences),
                TOKENS=0 if split or shared is not None else 1 if one else block // heads, HEADS=at_once, num_warps=4,
                **common,
            )


def latent_backward(
    grad: Tensor, q: Tensor, row: Tensor, w: Tensor, operand: Operand, plan: VarlenPlan, scale: float,
    sizes: LatentSizes, out: Tensor, lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`latent_reference.latent_backward` by FlashAttention-4, deterministic, with `lse` of the forward pass."""
    from jetrl.kernels.attention.flash import attend_backward

    return expanded_backward(attend_backward, grad, q, row, w, plan, scale, sizes, out, lse)


def expanded_backward(
    attend_backward: Callable[..., tuple[Tensor, Tensor, Tensor]], grad: Tensor, q: Tensor, row: Tensor, w: Tensor,
    plan: VarlenPlan, scale: float, sizes: LatentSizes, out: Tensor, lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`latent_backward` by a function that has the gradients of attention with keys and values of their own."""
    n = sizes.heads
    c, shared = row.split((sizes.rank, sizes.rope), -1)
    kv = gemm.bf16_gemm(c.contiguous(), gemm.prepare_bf16(w), q.dtype).view(-1, n, sizes.nope + sizes.value)
    k_nope, v = kv.split((sizes.nope, sizes.value), -1)
    k = torch.cat((k_nope, shared[:, None].expand(-1, n, -1)), -1)
    heads = (-1, n, sizes.value)
    dq, dk, dv = attend_backward(
        grad.view(heads).contiguous(), q.contiguous(), k, v.contiguous(), plan, scale, out.view(heads), lse
    )
    d_kv = torch.cat((dk[..., : sizes.nope], dv), -1).flatten(1)
    d_shared = dk[..., sizes.nope :].to(torch.float32).sum(1).to(row.dtype)
    return dq, torch.cat((backend_of(d_kv).bf16_dgrad(d_kv, w), d_shared), -1), d_kv
