"""The gated delta rule for one token of each sequence on a GPU: what a decode step computes, with the bits of
`general.py`.

Of a block of 16 rows one is live here, so key and query are two rows of one tile, t and t ^ 8 for the block's row t: a
product with the keys before, one with the state, one with the updates of earlier blocks serve both. Rows of a product
do not meet, each row's accumulator begins as in the general form, and sums have its order. Of the block's inverse one
row is computed, from those before it.

`_token_keys_kernel` does what depends on keys, once for all columns, and `_token_kernel` what reads the state. Programs
share rows of the caches, but read rows before the token's and write its own. So are forks: what lies in the row that is
read goes to the one that is written, without the token's rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.delta.general import COLUMNS, joined, planes
from jetrl.kernels.delta.parts import DeltaState, Parts

_PART = 64  # columns of a value head in a program
_HEADS = 1  # value heads that a program computes, one after the other, the next one's memory asked for meanwhile
_WARPS, _STAGES = 4, 2
_REGISTERS, _KEYS_REGISTERS = 128, 168  # of a thread: 4 programs on a processor, 12 (of a warp) for what keys need


@triton.jit
def _place(before_p, s):
    """The token's row in its chunk, its row in its block, and the block's first row. Padding has -1 before it."""
    n0 = tl.maximum(tl.load(before_p + s), 0) % 64
    return n0, n0 % 16, n0 // 16 * 16


@triton.jit
def _copied(state_p, read, write, at, mask):
    tl.store(state_p + write + at, tl.load(state_p + read + at, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["HK"])
def _token_keys_kernel(
    q_p, k_p, g_p, beta_p, before_p, read_p, write_p, kc_p, G_p, T_p, kq_p, LP_p, TP_p, HK, GROUP: tl.constexpr,
    DK: tl.constexpr,
):
    """A (block of 16 rows, key head, sequence), up to the token's block. Key and query side by side [B, HK, 2, DK]; in
    BF16 rows of L and P in earlier blocks [B, HV, 2, 64], of T and P in its own [B, HV, 2, 16]; caches of keys, G, T.
    All that it reads is asked for first, for its `GROUP` value heads."""
    b, hk, s = tl.program_id(0) * 16, tl.program_id(1), tl.program_id(2)
    read, write = tl.load(read_p + s) * HK + hk, tl.load(write_p + s) * HK + hk
    n0, t, b0 = _place(before_p, s)
    if b <= b0:
        r, x, here, own = tl.arange(0, 16), tl.arange(0, DK), s * HK + hk, b == b0
        is_k, is_q, before = (r == t)[:, None], (r == (t ^ 8))[:, None], b + r < n0
        both, second, tile = is_k | is_q, tl.where(is_q, 1, 0), (b + r)[:, None] * DK + x[None, :]
        old = tl.load(kc_p + read * (64 * DK) + tile, mask=before[:, None], other=0.0)
        k, q = tl.load(k_p + here * DK + x), tl.load(q_p + here * DK + x)
        runs, betas, sums, rows = (), (), (), ()
        for n in tl.static_range(GROUP):
            of, at = (read * GROUP + n) * 64, here * GROUP + n
            run = tl.load(G_p + of + n0 - 1, mask=n0 > 0, other=0.0) + tl.load(g_p + at)
            runs, betas = runs + (run,), betas + (tl.load(beta_p + at),)  # type: ignore[assignment]
            sums = sums + (tl.load(G_p + of + b + r, mask=before, other=0.0),)  # type: ignore[assignment]
            for u in tl.static_range(15):
                row = tl.load(T_p + of * 4 + r + u * 16, mask=(r >= 0) & own & (u < t), other=0.0)
                rows = rows + (row,)  # type: ignore[assignment]
        kq = tl.where(is_k, k[None, :], tl.where(is_q, q[None, :], 0.0))
        ka = tl.where(is_k & own, k[None, :], old)
        product = tl.dot(kq, tl.trans(ka), tl.zeros((16, 16), tl.float32))
        for n in tl.static_range(GROUP):
            to, at = (write * GROUP + n) * 64, here * GROUP + n
            E = tl.exp(tl.where(before, runs[n] - sums[n], 0.0))[None, :]
            LP = tl.where(is_k, betas[n] * E, E) * product
            if own:
                T = tl.where(r == t, 1.0, 0.0)  # row t of the inverse, from the rows before it, in their order
                L = tl.sum(tl.where(is_k & before[None, :], LP, 0.0), 0)
                for u in tl.static_range(15):
                    T = tl.where(u < t, T - tl.sum(tl.where(r == u, L, 0.0), 0) * rows[n * 15 + u], T)
                P = tl.where((r <= t)[None, :], LP, 0.0).to(tl.bfloat16)
                tl.store(TP_p + at * 32 + (16 * second + r[None, :]), P, mask=is_q)
                tl.store(TP_p + at * 32 + r, T.to(tl.bfloat16))  # apart from P, it keeps a layout of 16 numbers
                tl.store(T_p + to * 4 + r + t * 16, T)
                tl.store(G_p + to + n0, runs[n])
            else:
                tl.store(LP_p + at * 128 + (second * 64 + (b + r)[None, :]), LP.to(tl.bfloat16), mask=both)
            if read != write:
                tl.store(G_p + to + b + r, sums[n], mask=before)
                square = r[:, None] * 16 + r[None, :]
                _copied(T_p, (read * GROUP + n) * 256, to * 4, square, (r < t)[:, None] & own)
        if own:
            tl.store(kc_p + write * (64 * DK) + n0 * DK + x, k)
            tl.store(kq_p + here * (2 * DK) + x, k)
            tl.store(kq_p + here * (2 * DK) + DK + x, q)
        if read != write:
            tl.store(kc_p + write * (64 * DK) + tile, old, mask=before[:, None])


@triton.jit
def _forked(S_p, dc_p, X_p, of, to, n0, y0, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr):
    """A token's sequence leaves its state in another row: what is before it goes there. A state that moves is written
    anyway."""
    r, y = tl.arange(0, 16), y0 + tl.arange(0, BV)
    if n0 < 63:
        for x in range(0, 2 * DK, 16):  # both planes
            state = (x + r)[:, None] * DV + y[None, :]
            _copied(S_p, of * (2 * DK * DV), to * (2 * DK * DV), state, state >= 0)
    for j in range(0, 64, 16):
        rows = (j + r)[:, None]
        _copied(dc_p, of * (64 * DV), to * (64 * DV), rows * DV + y[None, :], rows < n0)
    _copied(X_p, of * (16 * DV), to * (16 * DV), r[:, None] * DV + y[None, :], (r < n0 % 16)[:, None])


@triton.jit
def _moved(S_p, kc_p, dc_p, G_p, of, to, k_to, y0, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
           BS: tl.constexpr):
    """The chunk's last row is there: the state moves, `BS` columns at a time."""
    j, x = tl.arange(0, 64), tl.arange(0, DK)
    k = tl.load(kc_p + k_to * (64 * DK) + j[:, None] * DK + x[None, :])
    total = tl.load(G_p + to * 64 + 63)
    e = tl.exp(total - tl.load(G_p + to * 64 + j))
    for y1 in range(0, BV, BS):
        y = y0 + y1 + tl.arange(0, BS)
        d = tl.load(dc_p + to * (64 * DV) + j[:, None] * DV + y[None, :])
        U = (e[:, None] * d.to(tl.float32)).to(tl.bfloat16)
        at = x[:, None] * DV + y[None, :]
        read, write = S_p + of * (2 * DK * DV) + at, S_p + to * (2 * DK * DV) + at
        S = joined(tl.load(read), tl.load(read + DK * DV))
        high, low = planes(tl.dot(tl.trans(k), U, tl.exp(total) * S))
        tl.store(write, high)
        tl.store(write + DK * DV, low)


@triton.jit(do_not_specialize=["HK", "HV"])
def _token_kernel(
    kq_p, LP_p, TP_p, v_p, beta_p, o_p, before_p, read_p, write_p, S_p, kc_p, dc_p, G_p, X_p, scale, HK, HV,
    DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
):
    """(`BV` columns, `HEADS` value heads, sequence), after `_token_keys_kernel`."""
    y0, first, s = tl.program_id(0) * BV, tl.program_id(1) * HEADS, tl.program_id(2)
    n0, t, b0 = _place(before_p, s)
    read, write = tl.load(read_p + s) * HV, tl.load(write_p + s) * HV
    if read != write:
        for h in range(first, first + HEADS):
            _forked(S_p, dc_p, X_p, read + h, write + h, n0, y0, DK, DV, BV)
    r, j, x, y = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, DK), y0 + tl.arange(0, BV)
    is_k, is_q, old, prior = (r == t)[:, None], (r == (t ^ 8))[:, None], (r < t)[:, None], (j < b0)[:, None]
    second, rows, zero = tl.where(is_q, 1, 0), r[:, None] * DV + y[None, :], tl.zeros((16, BV), tl.float32)
    for h in tl.range(first, first + HEADS, num_stages=STAGES):
        of, to, at = read + h, write + h, s * HV + h
        pair = kq_p + (s * HK + h // (HV // HK)) * (2 * DK) + second * DK + x[None, :]
        hi = tl.load(S_p + of * (2 * DK * DV) + (x[:, None] * DV + y[None, :]))
        d_prior = tl.load(dc_p + of * (64 * DV) + (j[:, None] * DV + y[None, :]), mask=prior, other=0.0)
        kq = tl.load(pair, mask=is_k | is_q, other=0.0)
        LP_mask = (is_k | is_q) & (j < b0)[None, :]
        LP = tl.load(LP_p + at * 128 + (second * 64 + j[None, :]), mask=LP_mask, other=0.0)
        T = tl.load(TP_p + at * 32 + (0 * second + r[None, :]), mask=is_k, other=0.0)
        P = tl.load(TP_p + at * 32 + (16 * second + r[None, :]), mask=is_q, other=0.0)
        d_old = tl.load(dc_p + of * (64 * DV) + (b0 * DV + rows), mask=old, other=0.0)
        X_old = tl.load(X_p + of * (16 * DV) + rows, mask=old, other=0.0)
        v, beta = tl.load(v_p + at * DV + y).to(tl.float32)[None, :], tl.load(beta_p + at)
        gam = tl.exp(tl.load(G_p + to * 64 + n0))
        by_state = gam * tl.dot(kq, hi, zero)
        after = tl.dot(LP, d_prior, tl.where(is_q, by_state, 0.0))
        X = tl.where(is_k, (beta * (v - by_state) - after).to(tl.bfloat16), X_old)
        d = tl.where(is_k, tl.dot(T, X, zero).to(tl.bfloat16), d_old)
        o = scale * tl.dot(P, d, after)
        tl.store(o_p + at * DV + (0 * second + y[None, :]), o.to(tl.bfloat16), mask=is_q)
        tl.store(X_p + to * (16 * DV) + rows, X, mask=is_k)
        tl.store(dc_p + to * (64 * DV) + (b0 * DV + rows), d, mask=is_k)
    if n0 == 63:
        tl.debug_barrier()
        for h in range(first, first + HEADS):
            k_to = (write + h) // (HV // HK)
            _moved(S_p, kc_p, dc_p, G_p, read + h, write + h, k_to, y0, DK, DV, BV, BS)


def token_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parts: Parts, kept: DeltaState
) -> Tensor:
    """See `reference.delta_rule`, for `parts.single`."""
    assert parts.single and parts.rows is not None and parts.before is not None
    (count, hk, dk), (hv, dv), out = k.shape, v.shape[1:], torch.empty_like(v)
    place = parts.before, parts.rows.read, parts.rows.write
    pair, rows, own = (v.new_empty(count, *shape) for shape in ((hk, 2, dk), (hv, 2, 64), (hv, 2, 16)))
    _token_keys_kernel[(4, hk, count)](
        q, k, g, beta, *place, kept.keys, kept.sums, kept.inverse, pair, rows, own, hk, GROUP=hv // hk, DK=dk,
        num_warps=1, num_stages=1, maxnreg=_KEYS_REGISTERS, enable_fp_fusion=False,
    )
    block, heads = min(_PART, dv), _HEADS if hv % _HEADS == 0 else 1
    _token_kernel[(dv // block, hv // heads, count)](
        pair, rows, own, v, beta, out, *place, kept.state.view(v.dtype), kept.keys, kept.updates, kept.sums,
        kept.errors, dk**-0.5, hk, hv, DK=dk, DV=dv, BV=block, BS=min(COLUMNS, block), HEADS=heads, STAGES=_STAGES,
        num_warps=_WARPS, num_stages=1, maxnreg=_REGISTERS, enable_fp_fusion=False,
    )
    return out
