"""The gated delta rule for packed sequences that begin here, on a GPU: the forward pass of training, with the bits of
`general.py`.

`_sums_kernel` and `_chunk_blocks_kernel` do what no state changes, for all chunks at once: G, and in BF16 the tiles of
16 x 16 that products read, of each block of rows: L with the blocks before it, T, P with the blocks before it and its
own (20 tiles of a chunk). `_walk_kernel` goes from chunk to chunk of a sequence, with some columns of one value head,
whose state stays in registers. Everything is transposed there (columns of values by rows), so that what one product
gives is what the next one reads, in the same registers of the same thread.

A product's sum is what `general.py` has: over keys 16 at a time, and over the rows of a chunk from the first block to
the last. Blocks that are zeros there are left out here: zeros change no accumulator. All products have fewer than 64
rows, so they are `mma.sync` (D155).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.delta.general import planes
from jetrl.kernels.delta.parts import Parts

_COLUMNS = 32  # of values, in a program that walks
_WARPS, _STAGES = 2, 2  # of it: a warp has 16 columns; chunks on their way or in use
_TILES = 20 * 256  # numbers of a chunk's tiles


@triton.jit
def _sums_kernel(g_p, start_p, count_p, G_p, HV: tl.constexpr, H: tl.constexpr):
    """A chunk: G [C, HV, 64], the sums of g from its first row on, one by one; from its last on, the last."""
    c, h = tl.program_id(0).to(tl.int64), tl.arange(0, H)
    tok, count = tl.load(start_p + c).to(tl.int64), tl.load(count_p + c)
    run = tl.zeros((H,), tl.float32)
    for t in range(0, 64, 16):
        some = ()
        for i in tl.static_range(16):
            g = tl.load(g_p + (tok + t + i) * HV + h, mask=(h < HV) & (t + i < count), other=0.0)
            some = some + (g,)  # type: ignore[assignment]
        for i in tl.static_range(16):
            run = run + some[i]
            tl.store(G_p + (c * HV + h) * 64 + t + i, run, mask=h < HV)


@triton.jit
def _rows(x_p, first, count, N: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr):
    """N rows of a head of D, from row `first` of a chunk on; zeros from its row `count` on."""
    r, x = tl.arange(0, N), tl.arange(0, D)
    x_p += first * STEP
    return tl.load(x_p + (r[:, None] * STEP + x[None, :]), mask=(r < count - first)[:, None], other=0.0)


@triton.jit
def _chunk_blocks_kernel(
    q_p, k_p, beta_p, start_p, count_p, G_p, L_p, tiles_p, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
):
    """A (chunk, key head): tiles [C, HV, 20, 16, 16] of its value heads. `L_p`: room for L of a block with itself, FP32
    [C, HV, 4, 16, 16]."""
    c, hk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tok, count = tl.load(start_p + c).to(tl.int64), tl.load(count_p + c)
    r, j = tl.arange(0, 16), tl.arange(0, 64)
    q_p += (tok * HK + hk) * DK
    k_p += (tok * HK + hk) * DK
    tile = r[:, None] * 16 + (j // 16 * 256 + j % 16)[None, :]  # of the block that a column is in
    ka = tl.trans(_rows(k_p, 0, count, 64, DK, HK * DK))
    for b in tl.static_range(4):
        k = _rows(k_p, b * 16, count, 16, DK, HK * DK)
        q = _rows(q_p, b * 16, count, 16, DK, HK * DK)
        kk, qk = tl.dot(k, ka, tl.zeros((16, 64), tl.float32)), tl.dot(q, ka, tl.zeros((16, 64), tl.float32))
        i = b * 16 + r
        under = (j[None, :] <= i[:, None]) & (i < count)[:, None]
        prior, own = (j < b * 16)[None, :], ((j >= b * 16) & (j < b * 16 + 16))[None, :]
        for h in range(hk * (HV // HK), (hk + 1) * (HV // HK)):
            at = c * HV + h
            G, Gj = tl.load(G_p + at * 64 + i)[:, None], tl.load(G_p + at * 64 + j)[None, :]
            beta = tl.load(beta_p + (tok + i) * HV + h, mask=i < count, other=0.0)[:, None]
            E = tl.exp(tl.where(under, G - Gj, 0.0))
            L = tl.where(under & (j[None, :] < i[:, None]), (beta * E) * kk, 0.0)
            to = tiles_p + at * 5120 + b * (b + 1) * 256 + tile  # the rows before have 0, 2, 6, 12 tiles
            tl.store(to, L.to(tl.bfloat16), mask=prior)
            tl.store(to + (b + 1) * 256, tl.where(under, E * qk, 0.0).to(tl.bfloat16), mask=prior | own)
            tl.store(L_p + at * 1024 + b * 256 + (r[:, None] * 16 + (j % 16)[None, :]), L, mask=own)
    tl.debug_barrier()
    b = tl.arange(0, 4)
    for h in range(hk * (HV // HK), (hk + 1) * (HV // HK)):
        at = c * HV + h
        rows = ()
        for t in tl.static_range(16):  # forward substitution, the rows of all four blocks at once
            row = tl.zeros((4, 16), tl.float32) + tl.where(r == t, 1.0, 0.0)[None, :]
            for s in tl.static_range(t):
                row = row - tl.load(L_p + at * 1024 + b * 256 + (t * 16 + s))[:, None] * rows[s]
            rows = rows + (row,)  # type: ignore[assignment]
        to = tiles_p + at * 5120 + (b * (b + 1) + b)[:, None] * 256 + r[None, :]
        for t in tl.static_range(16):
            tl.store(to + t * 16, rows[t].to(tl.bfloat16))


@triton.jit
def _walk_kernel(
    q_p, k_p, v_p, beta_p, o_p, cu_p, base_p, G_p, tiles_p, scale, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):
    """(`BV` columns, value head, sequence), transposed: S [BV, DK], rows of a block [BV, 16]."""
    y0, h, s = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    tok, end, first = tl.load(cu_p + s).to(tl.int64), tl.load(cu_p + s + 1), tl.load(base_p + s).to(tl.int64)
    hk, chunks, r = h // (HV // HK), tl.load(base_p + s + 1) - tl.load(base_p + s), tl.arange(0, 16)
    count, square = (end - tok).to(tl.int32), r[:, None] * 16 + r[None, :]
    q_p += (tok * HK + hk) * DK
    k_p += (tok * HK + hk) * DK
    v_p += (tok * HV + h) * DV + y0
    o_p += (tok * HV + h) * DV + y0
    beta_p += tok * HV + h
    G_p += (first * HV + h) * 64
    tiles_p += (first * HV + h) * 5120
    to = tl.arange(0, BV)[:, None] + r[None, :] * (HV * DV)
    zero, S = tl.zeros((BV, 16), tl.float32), tl.zeros((BV, DK), tl.float32)
    for _ in tl.range(0, chunks, num_stages=STAGES):
        high, total, tiles = planes(S)[0], tl.load(G_p + 63), tiles_p + square
        S = tl.exp(total) * S
        ds = ()
        for b in tl.static_range(4):
            k, q = _rows(k_p, b * 16, count, 16, DK, HK * DK), _rows(q_p, b * 16, count, 16, DK, HK * DK)
            v, live = _rows(v_p, b * 16, count, 16, BV, HV * DV), r < count - b * 16
            v = tl.trans(v).to(tl.float32)
            beta = tl.load(beta_p + b * 16 * HV + r * HV, mask=live, other=0.0)[None, :]
            G = tl.load(G_p + b * 16 + r)
            gam = tl.exp(G)[None, :]
            KS, o = tl.dot(high, tl.trans(k), zero), gam * tl.dot(high, tl.trans(q), zero)
            LD = zero
            for a in tl.static_range(b):
                LD = tl.dot(ds[a], tl.trans(tl.load(tiles + (b * (b + 1) + a) * 256)), LD)
                o = tl.dot(ds[a], tl.trans(tl.load(tiles + (b * (b + 1) + b + 1 + a) * 256)), o)
            X = (beta * (v - gam * KS) - LD).to(tl.bfloat16)
            d = tl.dot(X, tl.trans(tl.load(tiles + (b * (b + 1) + b) * 256)), zero).to(tl.bfloat16)
            U = (tl.exp(total - G)[None, :] * d.to(tl.float32)).to(tl.bfloat16)
            S = tl.dot(U, k, S)
            o = scale * tl.dot(d, tl.trans(tl.load(tiles + (b * (b + 1) + 2 * b + 1) * 256)), o)
            tl.store(o_p + b * 16 * (HV * DV) + to, o.to(tl.bfloat16), mask=live[None, :])
            ds = ds + (d,)  # type: ignore[assignment]
        q_p += 64 * HK * DK
        k_p += 64 * HK * DK
        v_p += 64 * HV * DV
        o_p += 64 * HV * DV
        beta_p += 64 * HV
        G_p += 64 * HV
        tiles_p += 5120 * HV
        count -= 64


def packed_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parts: Parts) -> Tensor:
    """See `reference.delta_rule`, for sequences that begin here and of which no state is kept."""
    (hk, dk), (hv, dv), device = k.shape[1:], v.shape[1:], v.device
    base, start, count, chunks = parts.chunks()
    out, sums = torch.empty_like(v), torch.empty(chunks, hv, 64, dtype=torch.float32, device=device)
    tiles = torch.empty(chunks, hv, _TILES, dtype=v.dtype, device=device)
    own = torch.empty(chunks, hv, 4, 256, dtype=torch.float32, device=device)
    _sums_kernel[(chunks,)](g, start, count, sums, HV=hv, H=triton.next_power_of_2(hv), num_warps=1)
    _chunk_blocks_kernel[(chunks, hk)](
        q, k, beta, start, count, sums, own, tiles, HK=hk, HV=hv, DK=dk, num_warps=8, num_stages=1,
        enable_fp_fusion=False,
    )
    block = min(_COLUMNS, dv)
    _walk_kernel[(dv // block, hv, len(parts.lengths))](
        q, k, v, beta, out, parts.cu_seqlens, base, sums, tiles, dk**-0.5, HK=hk, HV=hv, DK=dk, DV=dv, BV=block,
        STAGES=_STAGES, num_warps=min(_WARPS, block // 16), num_stages=1, enable_fp_fusion=False,
    )
    return out
