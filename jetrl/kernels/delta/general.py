"""The general form of the gated delta rule on a GPU: any number of tokens of each sequence, from any position on.

`_rule_kernel` is what the other forms are compared with, bit for bit. A program has one value head of one sequence and
walks over its tiles of 16 rows. A row's values come of products whose rows do not meet, and of sums over rows in one
order, so they do not depend on where a pass began. Tiles have 16 rows everywhere: Triton then multiplies by `mma.sync`,
but for the state's update on sm_90, which is `wgmma`; in each product alone both have the same bits.

Where an accumulator begins is part of the definition: o begins with `gam (q . hi(S))`, S with `exp(G_63) S`.

A head's state lies in its memory as two planes of 16 bits: `hi` (BF16, what products read) of all its elements, then
the lower halves. So a token reads the first half of the bytes; the second is touched at ends of chunks alone. Zeros are
zeros in both forms, and rows are copied as they are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.delta.parts import DeltaState, HeadSizes, Parts, empty_state

COLUMNS = 32  # of the state that is moved at a time
_COPIED, _COPIERS = 4096, 32  # words that a program copies at a time; programs for a sequence


@triton.jit
def planes(s):
    """Of an FP32 state the upper 16 bits, rounded, ties away from zero, and the lower ones; both as BF16."""
    bits = s.to(tl.uint32, bitcast=True)
    high = ((bits + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return high, (bits & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def joined(high, low):
    """The FP32 state of its planes: where the lower half rounded the upper one up, that is taken back."""
    upper = high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    lower = low.to(tl.uint16, bitcast=True).to(tl.uint32)
    return (upper - ((lower >> 15) << 16) + lower).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(L_p, T_p, TB_p, first):
    """(I + L)^-1 of a strictly lower block of 16 x 16 at `L_p`: rows in order, FP32. Rows before `first` are read from
    `T_p`; the others are written there. All go to `TB_p` in BF16. A lane has a column. Both sides need a barrier."""
    c = tl.arange(0, 16)
    rows = ()
    for t in tl.static_range(16):
        row = tl.where(c == t, 1.0, 0.0)
        for s in tl.static_range(t):
            row = row - tl.load(L_p + t * 16 + s) * rows[s]
        held = tl.load(T_p + t * 16 + c)
        rows = rows + (tl.where(t < first, held, row),)  # type: ignore[assignment]
    for t in tl.static_range(16):
        tl.store(T_p + t * 16 + c, rows[t])
        tl.store(TB_p + t * 16 + c, rows[t].to(tl.bfloat16))


@triton.jit(do_not_specialize=["HK", "HV"])
def _rule_kernel(
    q_p, k_p, v_p, g_p, beta_p, o_p, cu_p, before_p, row_p, S_p, kc_p, dc_p, G_p, X_p, T_p, L_p, TB_p, scale, HK, HV,
    DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, BEGUN: tl.constexpr,
):
    """A (value head, sequence). `BEGUN`: sequences have rows before this pass, `before_p` says how many; those of the
    running chunk are in the caches, in row `row_p`. New keys are read from the inputs: `_keep_kernel` writes them."""
    h, s = tl.program_id(0), tl.program_id(1)
    hk = h // (HV // HK)
    tok0 = tl.load(cu_p + s)
    count = tl.load(cu_p + s + 1) - tok0
    before = 0
    if BEGUN:
        before = tl.load(before_p + s)
    at_row = tl.load(row_p + s)
    hv, kv = at_row * HV + h, at_row * HK + hk
    S_p += hv * (2 * DK * DV)
    kc_p += kv * (64 * DK)
    dc_p += hv * (64 * DV)
    G_p += hv * 64
    X_p += hv * (16 * DV)
    T_p += hv * 256
    L_p += (s * HV + h) * 512  # L of the block, then P of it
    TB_p += (s * HV + h) * 512  # T of the block, then P of it, in BF16
    r, j = tl.arange(0, 16), tl.arange(0, 64)
    x, y = tl.arange(0, DK), tl.arange(0, DV)
    r16 = r[:, None] * 16 + r[None, :]
    zero, zero64 = tl.zeros((16, DV), tl.float32), tl.zeros((16, 64), tl.float32)
    done = 0
    while done < count:
        tl.debug_barrier()  # what the tile before has written is read by other threads now
        n0 = (before + done) % 64
        n = tl.minimum(16 - n0 % 16, count - done)
        end, b0 = n0 + n, n0 // 16 * 16
        row = b0 + r
        old, live = row < n0, (row >= n0) & (row < end)
        tok = tok0 + done - n0  # of the chunk's row 0, where its rows are all of this pass
        begun = n0 - done  # rows below are of earlier passes
        new_k = (tok + row)[:, None] * (HK * DK) + hk * DK + x[None, :]
        new_v = ((tok + row) * HV + h)[:, None] * DV + y[None, :]
        hi = tl.load(S_p + x[:, None] * DV + y[None, :])
        fresh = (j >= begun) & (j < end)
        ka = tl.load(k_p + (tok + j)[:, None] * (HK * DK) + hk * DK + x[None, :], mask=fresh[:, None], other=0.0)
        if BEGUN:
            kept = tl.load(kc_p + j[:, None] * DK + x[None, :], mask=(j < begun)[:, None], other=0.0)
            ka = tl.where(fresh[:, None], ka, kept)
        k = tl.load(k_p + new_k, mask=live[:, None], other=0.0)
        q = tl.load(q_p + new_k, mask=live[:, None], other=0.0)
        v = tl.load(v_p + new_v, mask=live[:, None], other=0.0)
        beta = tl.load(beta_p + (tok + row) * HV + h, mask=live, other=0.0)
        dprev = tl.load(dc_p + j[:, None] * DV + y[None, :], mask=(j < b0)[:, None], other=0.0)
        dold = tl.load(dc_p + row[:, None] * DV + y[None, :], mask=old[:, None], other=0.0)
        Xold = tl.load(X_p + r[:, None] * DV + y[None, :], mask=old[:, None], other=0.0)
        Gj = tl.load(G_p + j, mask=j < n0, other=0.0)
        Gr = tl.load(G_p + row, mask=old, other=0.0)
        run = tl.load(G_p + n0 - 1, mask=n0 > 0, other=0.0)
        for t in range(n):  # one by one
            run = run + tl.load(g_p + (tok + n0 + t) * HV + h)
            Gr = tl.where(row == n0 + t, run, Gr)
            Gj = tl.where(j == n0 + t, run, Gj)
        tl.store(G_p + j, Gj, mask=(j >= n0) & (j < end))
        kk = tl.dot(k, tl.trans(ka), zero64)
        qk = tl.dot(q, tl.trans(ka), zero64)
        gam = tl.exp(Gr)[:, None]
        under = (j[None, :] <= row[:, None]) & live[:, None]
        E = tl.exp(tl.where(under, Gr[:, None] - Gj[None, :], 0.0))
        L = tl.where(under & (j[None, :] < row[:, None]), (beta[:, None] * E) * kk, 0.0)
        P = tl.where(under, E * qk, 0.0)
        prior, own = (j < b0)[None, :], ((j >= b0) & (j < b0 + 16))[None, :]
        tl.store(L_p + r[:, None] * 16 + (j % 16)[None, :], L, mask=own)
        tl.store(TB_p + 256 + r[:, None] * 16 + (j % 16)[None, :], P.to(tl.bfloat16), mask=own)
        KS = tl.dot(k, hi, zero)
        QS = tl.dot(q, hi, zero)
        tl.debug_barrier()
        _inverse(L_p, T_p, TB_p, n0 - b0)
        R = beta[:, None] * (v.to(tl.float32) - gam * KS)
        LD = tl.dot(tl.where(prior, L, 0.0).to(tl.bfloat16), dprev, zero)
        X = tl.where(live[:, None], (R - LD).to(tl.bfloat16), Xold)
        tl.store(X_p + r[:, None] * DV + y[None, :], X, mask=live[:, None])
        tl.debug_barrier()
        T = tl.load(TB_p + r16)
        Pown = tl.load(TB_p + 256 + r16)
        d = tl.where(live[:, None], tl.dot(T, X, zero).to(tl.bfloat16), dold)
        tl.store(dc_p + row[:, None] * DV + y[None, :], d, mask=live[:, None])
        o = tl.dot(tl.where(prior, P, 0.0).to(tl.bfloat16), dprev, gam * QS)
        o = scale * tl.dot(Pown, d, o)
        tl.store(o_p + new_v, o.to(tl.bfloat16), mask=live[:, None])
        if end == 64:  # the state moves
            tl.debug_barrier()
            e = tl.exp(run - Gj)
            for y0 in range(0, DV, BV):
                yb = y0 + tl.arange(0, BV)
                da = tl.load(dc_p + j[:, None] * DV + yb[None, :])
                U = (e[:, None] * da.to(tl.float32)).to(tl.bfloat16)
                at = S_p + x[:, None] * DV + yb[None, :]
                S = joined(tl.load(at), tl.load(at + DK * DV))
                high, low = planes(tl.dot(tl.trans(ka), U, tl.exp(run) * S))
                tl.store(at, high)
                tl.store(at + DK * DV, low)
        done += n


@triton.jit(do_not_specialize=["HK"])
def _keep_kernel(k_p, kc_p, cu_p, before_p, row_p, HK, DK: tl.constexpr):
    """The running chunk's new keys, of a (key head, sequence), into the cache: when all heads have read the old."""
    hk, s = tl.program_id(0), tl.program_id(1)
    tok0 = tl.load(cu_p + s)
    count = tl.load(cu_p + s + 1) - tok0
    before = tl.load(before_p + s)
    total = before + count
    start = total // 64 * 64  # where the running chunk begins
    j, x = tl.arange(0, 64), tl.arange(0, DK)
    new = (start + j >= before) & (start + j < total)
    at = (tok0 + start + j - before)[:, None] * (HK * DK) + hk * DK + x[None, :]
    k = tl.load(k_p + at, mask=new[:, None], other=0.0)
    to = kc_p + (tl.load(row_p + s) * HK + hk) * (64 * DK)
    tl.store(to + j[:, None] * DK + x[None, :], k, mask=new[:, None])


@triton.jit
def _copied(state_p, read, write, WORDS: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(1) * N + tl.arange(0, N)
    for first in range(0, WORDS, tl.num_programs(1) * N):
        here = first + at < WORDS
        words = tl.load(state_p + read * WORDS + first + at, mask=here)
        tl.store(state_p + write * WORDS + first + at, words, mask=here)


@triton.jit
def _fork_kernel(
    S_p, kc_p, dc_p, G_p, X_p, T_p, read_p, write_p, S: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    G: tl.constexpr, X: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):
    """What a sequence reads, in words of 32 bits, to where it leaves its own, if that is another row."""
    s = tl.program_id(0)
    read, write = tl.load(read_p + s), tl.load(write_p + s)
    if read != write:
        _copied(S_p, read, write, S, N)
        _copied(kc_p, read, write, K, N)
        _copied(dc_p, read, write, D, N)
        _copied(G_p, read, write, G, N)
        _copied(X_p, read, write, X, N)
        _copied(T_p, read, write, T, N)


def general_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parts: Parts, kept: DeltaState | None
) -> Tensor:
    """See `reference.delta_rule`."""
    count, sizes = len(parts.lengths), HeadSizes(k.shape[1], v.shape[1], k.shape[2], v.shape[2])
    if kept is None:
        held = empty_state(count, sizes, v.dtype, v.device)
        rows = torch.arange(count, device=v.device)
    else:
        assert parts.rows is not None and parts.before is not None
        held, rows = kept, parts.rows.write
        words = [tensor.view(torch.int32) for tensor in held]
        _fork_kernel[(count, _COPIERS)](
            *words, parts.rows.read, rows, *(tensor[0].numel() for tensor in words), N=_COPIED, num_warps=4
        )
    out, before = torch.empty_like(v), parts.before if parts.before is not None else parts.cu_seqlens
    lower = torch.empty(count * sizes.value_heads * 512, dtype=torch.float32, device=v.device)
    tiles = torch.empty(count * sizes.value_heads * 512, dtype=torch.bfloat16, device=v.device)
    _rule_kernel[(sizes.value_heads, count)](
        q, k, v, g, beta, out, parts.cu_seqlens, before, rows, held.state.view(v.dtype), *held[1:], lower, tiles,
        sizes.key_dim**-0.5, sizes.key_heads, sizes.value_heads, DK=sizes.key_dim, DV=sizes.value_dim,
        BV=min(COLUMNS, sizes.value_dim), BEGUN=kept is not None, num_warps=4, num_stages=1, enable_fp_fusion=False,
    )
    if kept is not None:
        _keep_kernel[(sizes.key_heads, count)](
            k, held.keys, parts.cu_seqlens, before, rows, sizes.key_heads, DK=sizes.key_dim, num_warps=4,
        )
    return out
