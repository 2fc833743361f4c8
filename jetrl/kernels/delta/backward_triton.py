"""Gradients of the gated delta rule on a GPU, chunk by chunk: all chunks at once, but for two walks over the states.

With the rule of `reference.py`, in one chunk of 64 rows and without its roundings, T = (I + L)^-1:

    D = T (beta v) - T (beta gam k) S = U - W S          o = scale (gam (q S) + P D)          e_j = exp(G_63 - G_j)
    S' = exp(G_63) S + k^T (e D)

S' and D are made again in a walk from the first chunk on, and from dS' at the end of a chunk there follow, in one from
the last chunk back,

    dD = scale P^T dO + e (k dS')          dS = exp(G_63) dS' + scale (gam q)^T dO - W^T dD

and then, of each chunk by itself, dR = T^T dD, dv = beta dR, N = -E (dR D^T) below the diagonal, M = scale E (dO D^T):

    dq = scale gam (dO S^T) + M k          dk = beta (N k - gam (dR S^T)) + e (D dS'^T) + M^T q + N^T (beta k)
    dG_i = q_i.dq_i + k_i.(what dk has by row i) - k_i.(what it has by column i), and of e and exp(G_63) at row 63

where what is within a chunk is summed before M and N are rounded.

The forward pass keeps no states for this: in a layer of 32 value heads of 128 x 128 they are 16 KB a token in BF16, so
12.9 GB for 32K tokens in the 24 layers of the 9B model, and a walk makes them again. While a layer goes backward, 2.3
KB a token and value head are held at that size: T 256 bytes, W (later dR), U and P^T dO 256 each, S and dS 512 each, M
and N 128 each, vectors 32.

Products have BF16 operands and FP32 sums; the inverse of I + L is FP32 (TF32 x 3 where blocks meet), rounded for its
products. Nothing is added in an order left to chance: a program owns what it writes. Every product has 16 or 32 rows,
so it is `mma.sync` on Hopper too: Triton 3.6 miscompiles `wgmma` in a walk over chunks. States are transposed (dv x
dk) here for that reason.

Legend: `C` chunks, `T` tokens, `HK`, `HV` heads of keys and values, `DK`, `DV` their sizes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.delta.parts import Parts

_COLUMNS = 32  # of values, in a program that walks over states
_KEYS = 128  # columns of dq and dk in a program


@triton.jit
def _tile(x_p, tok, left, head, x, HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """Columns `x` of R rows of a head of D, from token `tok` on; zeros from row `left` on."""
    r = tl.arange(0, R)
    x_p += (tok * HEADS + head) * D
    return tl.load(x_p + (r[:, None] * (HEADS * D) + x[None, :]), mask=(r < left)[:, None], other=0.0)


@triton.jit
def _column(x_p, tok, left, head, HEADS: tl.constexpr, R: tl.constexpr):
    """Of R rows the numbers of a head [R]; zeros from row `left` on."""
    r = tl.arange(0, R)
    x_p += tok * HEADS + head
    return tl.load(x_p + r * HEADS, mask=r < left, other=0.0)


@triton.jit
def _lower(
    k_p, beta_p, G_p, tok, count, i0, j0, h, hk, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    R: tl.constexpr,
):
    """R rows from `i0` and R columns from `j0` on of L, FP32."""
    i, j = i0 + tl.arange(0, R), j0 + tl.arange(0, R)
    x = tl.arange(0, DK)
    ki = _tile(k_p, tok + i0, count - i0, hk, x, HK, DK, R)
    kj = _tile(k_p, tok + j0, count - j0, hk, x, HK, DK, R)
    under = j[None, :] < i[:, None]
    E = tl.exp(tl.where(under, tl.load(G_p + i)[:, None] - tl.load(G_p + j)[None, :], 0.0))
    beta = _column(beta_p, tok + i0, count - i0, h, HV, R)
    return tl.where(under, (beta[:, None] * E) * tl.dot(ki, tl.trans(kj)), 0.0)


@triton.jit
def _merged(T_p, L, at, R: tl.constexpr):
    """Write the block below the inverses of R rows from `at` on and of the R rows after them: -T2 (L T1)."""
    r = tl.arange(0, R)
    upper, lower = at + r, at + R + r
    there = r[None, :] <= r[:, None]
    first = tl.load(T_p + upper[:, None] * 64 + upper[None, :], mask=there, other=0.0)
    second = tl.load(T_p + lower[:, None] * 64 + lower[None, :], mask=there, other=0.0)
    inner = tl.dot(L, first, input_precision="tf32x3")
    tl.store(T_p + lower[:, None] * 64 + upper[None, :], -tl.dot(second, inner, input_precision="tf32x3"))


@triton.jit
def _inverse_kernel(
    k_p, g_p, beta_p, start_p, count_p, G_p, L_p, T_p, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
):
    """A (chunk, value head): G [C, HV, 64] and the lower half of T [C, HV, 64, 64], FP32. Blocks of 16 by forward
    substitution, row after row and all four at once, then joined."""
    c, h = tl.program_id(0), tl.program_id(1)
    hk = h // (HV // HK)
    tok, count = tl.load(start_p + c).to(tl.int64), tl.load(count_p + c)
    at = c.to(tl.int64) * HV + h
    G_p += at * 64
    L_p += at * 1024
    T_p += at * 4096
    j, r, b = tl.arange(0, 64), tl.arange(0, 16), tl.arange(0, 4)
    tl.store(G_p + j, tl.cumsum(_column(g_p, tok, count, h, HV, 64), 0))
    tl.debug_barrier()
    for n in tl.static_range(4):
        L = _lower(k_p, beta_p, G_p, tok, count, n * 16, n * 16, h, hk, HK, HV, DK, 16)
        tl.store(L_p + n * 256 + r[:, None] * 16 + r[None, :], L)
    tl.debug_barrier()
    rows = ()
    for t in tl.static_range(16):
        row = tl.zeros((4, 16), tl.float32) + tl.where(r == t, 1.0, 0.0)[None, :]
        for s in tl.static_range(t):
            row = row - tl.load(L_p + b * 256 + t * 16 + s)[:, None] * rows[s]
        rows = rows + (row,)  # type: ignore[assignment]
    for t in tl.static_range(16):
        tl.store(T_p + (b * 16 + t)[:, None] * 64 + (b * 16)[:, None] + r[None, :], rows[t])
    tl.debug_barrier()
    for n in tl.static_range(2):
        L = _lower(k_p, beta_p, G_p, tok, count, n * 32 + 16, n * 32, h, hk, HK, HV, DK, 16)
        _merged(T_p, L, n * 32, 16)
    tl.debug_barrier()
    _merged(T_p, _lower(k_p, beta_p, G_p, tok, count, 32, 0, h, hk, HK, HV, DK, 32), 0, 32)


@triton.jit
def _chunk_rows_kernel(
    q_p, k_p, v_p, do_p, beta_p, start_p, count_p, G_p, T_p, W_p, U_p, V_p, scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):
    """A (chunk, value head, half of its rows): W [C, HV, 64, DK], and U and scale P^T dO [C, HV, DV, 64]."""
    c, h, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * 32
    hk = h // (HV // HK)
    tok, count = tl.load(start_p + c).to(tl.int64), tl.load(count_p + c)
    at = c.to(tl.int64) * HV + h
    G_p += at * 64
    i, j, x, y = first + tl.arange(0, 32), tl.arange(0, 64), tl.arange(0, DK), tl.arange(0, DV)
    G, beta = tl.load(G_p + j), _column(beta_p, tok, count, h, HV, 64)
    T = tl.load(T_p + at * 4096 + (i[:, None] * 64 + j[None, :]), mask=j[None, :] <= i[:, None], other=0.0)
    T = T.to(tl.bfloat16)
    k = (beta * tl.exp(G))[:, None] * _tile(k_p, tok, count, hk, x, HK, DK, 64).to(tl.float32)
    W = tl.dot(T, k.to(tl.bfloat16))
    tl.store(W_p + at * (64 * DK) + (i[:, None] * DK + x[None, :]), W.to(tl.bfloat16))
    v = beta[:, None] * _tile(v_p, tok, count, h, y, HV, DV, 64).to(tl.float32)
    turned = y[None, :] * 64 + i[:, None]
    tl.store(U_p + at * (64 * DV) + turned, tl.dot(T, v.to(tl.bfloat16)).to(tl.bfloat16))
    ki, q = _tile(k_p, tok + first, count - first, hk, x, HK, DK, 32), _tile(q_p, tok, count, hk, x, HK, DK, 64)
    after = i[:, None] <= j[None, :]
    E = tl.exp(tl.where(after, G[None, :] - tl.load(G_p + i)[:, None], 0.0))
    P = tl.where(after, (scale * E) * tl.dot(ki, tl.trans(q)), 0.0).to(tl.bfloat16)
    tl.store(V_p + at * (64 * DV) + turned, tl.dot(P, _tile(do_p, tok, count, h, y, HV, DV, 64)).to(tl.bfloat16))


@triton.jit
def _states_kernel(
    k_p, cu_p, base_p, G_p, W_p, U_p, S_p, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BV: tl.constexpr,
):
    """A (block of values, value head, sequence): S at the start of each chunk [C, HV, DV, DK]; D in place of U."""
    y0, h, s = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    hk = h // (HV // HK)
    tok, end = tl.load(cu_p + s).to(tl.int64), tl.load(cu_p + s + 1)
    first, last = tl.load(base_p + s), tl.load(base_p + s + 1)
    at = first.to(tl.int64) * HV + h
    j, x, y = tl.arange(0, 64), tl.arange(0, DK), y0 + tl.arange(0, BV)
    k_p += tok * (HK * DK) + hk * DK
    G_p += at * 64
    W_p += at * (64 * DK)
    U_p += at * (64 * DV)
    S_p += at * (DK * DV)
    length = (end - tok).to(tl.int32)
    S = tl.zeros((BV, DK), tl.float32)
    for n in tl.range(0, last - first, num_stages=3):
        high = S.to(tl.bfloat16)
        tl.store(S_p + y[:, None] * DK + x[None, :], high)
        W = tl.load(W_p + j[:, None] * DK + x[None, :])
        U = tl.load(U_p + y[:, None] * 64 + j[None, :]).to(tl.float32)
        k = tl.load(k_p + j[:, None] * (HK * DK) + x[None, :], mask=(j < length - n * 64)[:, None], other=0.0)
        G, total = tl.load(G_p + j), tl.load(G_p + 63)
        D = U - tl.dot(high, tl.trans(W))
        tl.store(U_p + y[:, None] * 64 + j[None, :], D.to(tl.bfloat16))
        S = tl.dot((tl.exp(total - G)[None, :] * D).to(tl.bfloat16), k, tl.exp(total) * S)
        k_p += 64 * HK * DK
        G_p += HV * 64
        W_p += HV * 64 * DK
        U_p += HV * 64 * DV
        S_p += HV * DK * DV


@triton.jit
def _state_grads_kernel(
    q_p, k_p, do_p, cu_p, base_p, G_p, W_p, V_p, dS_p, scale, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BV: tl.constexpr,
):
    """A (block of values, value head, sequence), from its last chunk back: dS' at the end of each chunk
    [C, HV, DV, DK]; dD in place of scale P^T dO."""
    y0, h, s = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    hk = h // (HV // HK)
    tok, end = tl.load(cu_p + s).to(tl.int64), tl.load(cu_p + s + 1)
    first, last = tl.load(base_p + s), tl.load(base_p + s + 1)
    at, length = (last - 1).to(tl.int64) * HV + h, (end - tok).to(tl.int32)
    left = length - (last - 1 - first) * 64  # rows of the last chunk
    j, x, y = tl.arange(0, 64), tl.arange(0, DK), y0 + tl.arange(0, BV)
    tok += (last - 1 - first) * 64
    q_p += tok * (HK * DK) + hk * DK
    k_p += tok * (HK * DK) + hk * DK
    do_p += tok * (HV * DV) + h * DV
    G_p += at * 64
    W_p += at * (64 * DK)
    V_p += at * (64 * DV)
    dS_p += at * (DK * DV)
    dS = tl.zeros((BV, DK), tl.float32)
    for n in tl.range(0, last - first, num_stages=2):
        high = dS.to(tl.bfloat16)
        tl.store(dS_p + y[:, None] * DK + x[None, :], high)
        live = (j < left + n * 64)[:, None]  # all but for the last
        k = tl.load(k_p + j[:, None] * (HK * DK) + x[None, :], mask=live, other=0.0)
        q = tl.load(q_p + j[:, None] * (HK * DK) + x[None, :], mask=live, other=0.0)
        do = tl.load(do_p + j[:, None] * (HV * DV) + y[None, :], mask=live, other=0.0)
        W = tl.load(W_p + j[:, None] * DK + x[None, :])
        V = tl.load(V_p + y[:, None] * 64 + j[None, :]).to(tl.float32)
        G, total = tl.load(G_p + j), tl.load(G_p + 63)
        dD = V + tl.exp(total - G)[None, :] * tl.dot(high, tl.trans(k))
        tl.store(V_p + y[:, None] * 64 + j[None, :], dD.to(tl.bfloat16))
        grads = (scale * tl.exp(G))[:, None] * do.to(tl.float32)
        dS = tl.dot(tl.trans(grads.to(tl.bfloat16)), q, tl.exp(total) * dS)
        dS = tl.dot((-dD).to(tl.bfloat16), W, dS)
        q_p -= 64 * HK * DK
        k_p -= 64 * HK * DK
        do_p -= 64 * HV * DV
        G_p -= HV * 64
        W_p -= HV * 64 * DK
        V_p -= HV * 64 * DV
        dS_p -= HV * DK * DV


@triton.jit
def _pairs_kernel(
    q_p, k_p, v_p, do_p, beta_p, start_p, count_p, G_p, T_p, D_p, dD_p, dR_p, M_p, N_p, dv_p, dbeta_p, dE_p, scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):
    """A (chunk, value head, half of its rows): dv; dR [C, HV, 64, DV]; M, N [C, HV, 64, 64]; a part of dbeta. What P
    and L give to G, before M and N are rounded [C, HV, 3, 64]: by row, and by column from each half."""
    c, h, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * 32
    tok, count = tl.load(start_p + c).to(tl.int64), tl.load(count_p + c) - first
    at = c.to(tl.int64) * HV + h
    r, hk = tl.arange(0, 32), h // (HV // HK)
    i, j, x, y = first + r, tl.arange(0, 64), tl.arange(0, DK), tl.arange(0, DV)
    turned = y[:, None] * 64 + j[None, :]
    below = j[None, :] <= i[:, None]
    T = tl.load(T_p + at * 4096 + (j[None, :] * 64 + i[:, None]), mask=i[:, None] <= j[None, :], other=0.0)
    dR = tl.dot(T.to(tl.bfloat16), tl.trans(tl.load(dD_p + at * (64 * DV) + turned)))
    G = tl.load(G_p + at * 64 + i)[:, None] - tl.load(G_p + at * 64 + j)[None, :]
    E = tl.exp(tl.where(below, G, 0.0))
    D = tl.load(D_p + at * (64 * DV) + turned)
    high = dR.to(tl.bfloat16)
    N = tl.where(j[None, :] < i[:, None], -E * tl.dot(high, D), 0.0)
    M = tl.where(below, (scale * E) * tl.dot(_tile(do_p, tok + first, count, h, y, HV, DV, 32), D), 0.0)
    square = i[:, None] * 64 + j[None, :]
    tl.store(M_p + at * 4096 + square, M.to(tl.bfloat16))
    tl.store(N_p + at * 4096 + square, N.to(tl.bfloat16))
    tl.store(dR_p + at * (64 * DV) + (i[:, None] * DV + y[None, :]), high)
    live = r < count
    dv_p += ((tok + first) * HV + h) * DV
    dbeta_p += (tok + first) * HV + h
    beta = _column(beta_p, tok + first, count, h, HV, 32)
    k = tl.trans(_tile(k_p, tok, count + first, hk, x, HK, DK, 64))
    N *= tl.dot(_tile(k_p, tok + first, count, hk, x, HK, DK, 32), k)
    both = M * tl.dot(_tile(q_p, tok + first, count, hk, x, HK, DK, 32), k) + beta[:, None] * N
    dE_p += at * 192
    tl.store(dE_p + i, tl.sum(both, 1))
    tl.store(dE_p + 64 * (1 + tl.program_id(2)) + j, tl.sum(both, 0))
    dv = (beta[:, None] * dR).to(tl.bfloat16)
    tl.store(dv_p + (r[:, None] * (HV * DV) + y[None, :]), dv, mask=live[:, None])
    v = _tile(v_p, tok + first, count, h, y, HV, DV, 32).to(tl.float32)
    tl.store(dbeta_p + r * HV, tl.sum(dR * v, 1) + tl.sum(N, 1), mask=live)


@triton.jit
def _key_grads_kernel(
    q_p, k_p, do_p, beta_p, start_p, count_p, G_p, S_p, dS_p, D_p, dR_p, M_p, N_p, dq_p, dk_p, step_p, dG_p, last_p,
    scale, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
):
    """A (chunk, key head, half of its rows and block of its columns), one value head after another: dq, dk. From these
    columns: of dbeta and of dG [C, HV, DK/BK, 64], of G_63 by its other ways [C, HV, DK/BK, 2], a half each."""
    c, hk, z, part = tl.program_id(0), tl.program_id(1), tl.program_id(2) % 2, tl.program_id(2) // 2
    first = z * 32
    tok, count = tl.load(start_p + c).to(tl.int64), tl.load(count_p + c)
    r = tl.arange(0, 32)
    i, j, x = first + r, tl.arange(0, 64), part * BK + tl.arange(0, BK)
    live = r < count - first
    dq, dk = tl.zeros((32, BK), tl.float32), tl.zeros((32, BK), tl.float32)
    for n in tl.range(0, HV // HK, num_stages=1):
        h = hk * (HV // HK) + n
        at = c.to(tl.int64) * HV + h
        own, by_row, by_column = dq * 0.0, dq * 0.0, dq * 0.0
        both = 0.0
        for y0 in tl.range(0, DV, BV, num_stages=3):
            y = y0 + tl.arange(0, BV)
            state = y[:, None] * DK + x[None, :]
            S, dS = tl.load(S_p + at * (DK * DV) + state), tl.load(dS_p + at * (DK * DV) + state)
            do = _tile(do_p, tok + first, count - first, h, y, HV, DV, 32)
            dR = tl.load(dR_p + at * (64 * DV) + (i[:, None] * DV + y[None, :]))
            D = tl.trans(tl.load(D_p + at * (64 * DV) + (y[:, None] * 64 + i[None, :])))
            own = tl.dot(do, S, own)
            by_row = tl.dot(dR, S, by_row)
            by_column = tl.dot(D, dS, by_column)
            both += tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1), 0)
        G, total = tl.load(G_p + at * 64 + i), tl.load(G_p + at * 64 + 63)
        gam = tl.exp(G)[:, None]
        square, turned = i[:, None] * 64 + j[None, :], j[None, :] * 64 + i[:, None]
        k, q = _tile(k_p, tok, count, hk, x, HK, DK, 64), _tile(q_p, tok, count, hk, x, HK, DK, 64)
        own, by_row, by_column = (scale * gam) * own, -gam * by_row, tl.exp(total - G)[:, None] * by_column
        ki = _tile(k_p, tok + first, count - first, hk, x, HK, DK, 32).to(tl.float32)
        qi = _tile(q_p, tok + first, count - first, hk, x, HK, DK, 32).to(tl.float32)
        beta = _column(beta_p, tok + first, count - first, h, HV, 32)
        to = at * (DK // BK) + part
        step, through = tl.sum(ki * by_row, 1), tl.sum(ki * by_column, 1)
        tl.store(step_p + to * 64 + i, step)
        tl.store(dG_p + to * 64 + i, tl.sum(qi * own, 1) + beta * step - through)
        through = tl.sum(through, 0)  # e has G_63
        tl.store(last_p + to * 2 + z, through + tl.where(z == 0, tl.exp(total) * both, 0.0))
        own = tl.dot(tl.load(M_p + at * 4096 + square), k, own)
        by_row = beta[:, None] * tl.dot(tl.load(N_p + at * 4096 + square), k, by_row)
        by_column = tl.dot(tl.load(M_p + at * 4096 + turned), q, by_column)
        columns = _column(beta_p, tok, count, h, HV, 64)[None, :] * tl.load(N_p + at * 4096 + turned).to(tl.float32)
        by_column = tl.dot(columns.to(tl.bfloat16), k, by_column)
        dq += own
        dk += by_row + by_column
    to, base = r[:, None] * (HK * DK) + x[None, :], ((tok + first) * HK + hk) * DK
    tl.store(dq_p + base + to, dq.to(tl.bfloat16), mask=live[:, None])
    tl.store(dk_p + base + to, dk.to(tl.bfloat16), mask=live[:, None])


@triton.jit
def _decay_kernel(
    start_p, count_p, step_p, dG_p, last_p, dE_p, dg_p, dbeta_p, HV: tl.constexpr, PARTS: tl.constexpr,
):
    """A (chunk, value head): dg, the sum of dG from the row to the chunk's last; dbeta, whose other part is there."""
    c, h = tl.program_id(0), tl.program_id(1)
    tok, count = tl.load(start_p + c).to(tl.int64), tl.load(count_p + c)
    at = (c.to(tl.int64) * HV + h) * PARTS
    j = tl.arange(0, 64)
    dg_p += tok * HV + h
    dbeta_p += tok * HV + h
    dE_p += (c.to(tl.int64) * HV + h) * 192 + j
    dG, last = tl.load(dE_p) - (tl.load(dE_p + 64) + tl.load(dE_p + 128)), 0.0
    step = tl.load(dbeta_p + j * HV, mask=j < count, other=0.0)
    for n in tl.static_range(PARTS):
        dG += tl.load(dG_p + (at + n) * 64 + j)
        step += tl.load(step_p + (at + n) * 64 + j)
        last += tl.load(last_p + (at + n) * 2) + tl.load(last_p + (at + n) * 2 + 1)
    tl.store(dg_p + j * HV, tl.sum(tl.where(j[:, None] >= j[None, :], dG[:, None], 0.0), 0) + last, mask=j < count)
    tl.store(dbeta_p + j * HV, step, mask=j < count)


def delta_rule_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parts: Parts
) -> tuple[Tensor, ...]:
    """See `backward.delta_rule_backward`; BF16, heads of 16 to 128, a power of two."""
    (hk, dk), (hv, dv) = k.shape[1:], v.shape[1:]
    assert all(t.is_contiguous() for t in (q, k, v, g, beta)) and v.dtype == torch.bfloat16
    grad = grad.contiguous()
    base, start, count, chunks = parts.chunks()
    scale, device, wide = dk**-0.5, v.device, torch.float32
    sizes = {"HK": hk, "HV": hv, "DK": dk}

    def room(*shape: int, dtype: torch.dtype = v.dtype) -> Tensor:
        return torch.empty(chunks, hv, *shape, dtype=dtype, device=device)

    sums, inverse = room(64, dtype=wide), room(64, 64, dtype=wide)
    _inverse_kernel[(chunks, hv)](
        k, g, beta, start, count, sums, room(4, 16, 16, dtype=wide), inverse, **sizes, num_warps=2, num_stages=1
    )
    by_keys, d, d_grad = room(64, dk), room(dv, 64), room(dv, 64)
    _chunk_rows_kernel[(chunks, hv, 2)](
        q, k, v, grad, beta, start, count, sums, inverse, by_keys, d, d_grad, scale, **sizes, DV=dv, num_warps=4,
        num_stages=1,
    )
    states, state_grads, block = room(dv, dk), room(dv, dk), min(_COLUMNS, dv)
    walk = {**sizes, "DV": dv, "BV": block, "num_warps": 4}
    grid = (dv // block, hv, len(parts.lengths))
    _states_kernel[grid](k, parts.cu_seqlens, base, sums, by_keys, d, states, **walk)
    _state_grads_kernel[grid](q, k, grad, parts.cu_seqlens, base, sums, by_keys, d_grad, state_grads, scale, **walk)
    del by_keys  # its memory is that of what comes next
    right, pairs, under = room(64, dv), room(64, 64), room(64, 64)
    dq, dk_all, dv_all = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    decays = room(3, 64, dtype=wide)
    _pairs_kernel[(chunks, hv, 2)](
        q, k, v, grad, beta, start, count, sums, inverse, d, d_grad, right, pairs, under, dv_all, dbeta, decays, scale,
        **sizes, DV=dv, num_warps=4, num_stages=1, maxnreg=168,
    )
    part = min(_KEYS, dk)
    steps, sum_grads = (room(dk // part, 64, dtype=wide) for _ in range(2))
    last = room(dk // part, 2, dtype=wide)
    _key_grads_kernel[(chunks, hk, 2 * dk // part)](
        q, k, grad, beta, start, count, sums, states, state_grads, d, right, pairs, under, dq, dk_all, steps, sum_grads,
        last, scale, **sizes, DV=dv, BV=block, BK=part, num_warps=4, num_stages=1,
    )
    _decay_kernel[(chunks, hv)](
        start, count, steps, sum_grads, last, decays, dg, dbeta, HV=hv, PARTS=dk // part, num_warps=1
    )
    return dq, dk_all, dv_all, dg, dbeta

