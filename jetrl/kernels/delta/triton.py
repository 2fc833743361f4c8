"""Gated DeltaNet on a GPU: one kernel body for decoding, prefill in pieces and packed training.

`reference.py` has the formulas. Sums are the tensor core's here (BF16 operands, an FP32 accumulator), so last bits are
not a CPU's; but packed sequences, pieces and single tokens all run `_rule_kernel`, a program of which has one value
head of one sequence and walks over its tiles of 16 rows. A row's values come of products whose rows do not meet, and of
sums over rows in one order, so they do not depend on where a pass began. Tiles have 16 rows everywhere: Triton then
multiplies by `mma.sync`, but for the state's update on sm_90, which is `wgmma` in every form of the kernel.

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

from jetrl.kernels.delta.parts import CHUNK, DeltaState, HeadSizes, Parts, empty_state

_EPS = tl.constexpr(1e-6)  # of L2 norms
_COLUMNS = 32  # of the state that is moved at a time
_COPIED = 4096  # words of a row that a program copies


@triton.jit
def _planes(s):
    """Of an FP32 state the upper 16 bits, rounded, ties away from zero, and the lower ones; both as BF16."""
    bits = s.to(tl.uint32, bitcast=True)
    high = ((bits + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return high, (bits & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _joined(high, low):
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
                S = _joined(tl.load(at), tl.load(at + DK * DV))
                high, low = _planes(tl.dot(tl.trans(ka), U, tl.exp(run) * S))
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
def _fork_kernel(state_p, read_p, write_p, WORDS, N: tl.constexpr):
    """What a sequence reads, in words of 32 bits, to where it leaves its own, if that is another row."""
    s = tl.program_id(0)
    read, write = tl.load(read_p + s), tl.load(write_p + s)
    if read != write:
        at = tl.program_id(1) * N + tl.arange(0, N)
        here = at < WORDS
        tl.store(state_p + write * WORDS + at, tl.load(state_p + read * WORDS + at, mask=here), mask=here)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parts: Parts, kept: DeltaState | None
) -> Tensor:
    """See `reference.delta_rule`; BF16, heads of 16 to 128, a power of two."""
    count, sizes = len(parts.lengths), HeadSizes(k.shape[1], v.shape[1], k.shape[2], v.shape[2])
    assert all(t.is_contiguous() for t in (q, k, v, g, beta)) and v.dtype == torch.bfloat16
    if kept is None:
        held = empty_state(count, sizes, v.dtype, v.device)
        rows = torch.arange(count, device=v.device)
    else:
        assert parts.rows is not None and parts.before is not None
        held, rows = kept, parts.rows.write
        for tensor in held:
            words = tensor[0].numel() * tensor.element_size() // 4
            grid = (count, triton.cdiv(words, _COPIED))
            _fork_kernel[grid](tensor.view(torch.int32), parts.rows.read, rows, words, N=_COPIED, num_warps=4)
    out, before = torch.empty_like(v), parts.before if parts.before is not None else parts.cu_seqlens
    lower = torch.empty(count * sizes.value_heads * 512, dtype=torch.float32, device=v.device)
    tiles = torch.empty(count * sizes.value_heads * 512, dtype=torch.bfloat16, device=v.device)
    _rule_kernel[(sizes.value_heads, count)](
        q, k, v, g, beta, out, parts.cu_seqlens, before, rows, held.state.view(v.dtype), *held[1:], lower, tiles,
        sizes.key_dim**-0.5, sizes.key_heads, sizes.value_heads, DK=sizes.key_dim, DV=sizes.value_dim,
        BV=min(_COLUMNS, sizes.value_dim), BEGUN=kept is not None, num_warps=4, num_stages=1, enable_fp_fusion=False,
    )
    if kept is not None:
        _keep_kernel[(sizes.key_heads, count)](
            k, held.keys, parts.cu_seqlens, before, rows, sizes.key_heads, DK=sizes.key_dim, num_warps=4,
        )
    return out


# ---- the convolution, gates and norms -------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["stride"])
def _conv_kernel(
    x_p, w_p, state_p, q_p, k_p, v_p, cu_p, part_p, before_p, read_p, stride, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, KEPT: tl.constexpr,
):
    """A (row, head): products in order, the oldest first; SiLU; of queries and keys the L2 norm. A state: `R` rows."""
    t, head = tl.program_id(0), tl.program_id(1)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    is_v = head >= 2 * HK
    width = tl.where(is_v, DV, DK)
    first = tl.where(is_v, 2 * HK * DK + (head - 2 * HK) * DV, head * DK)
    c = tl.arange(0, D)
    inside, channel = c < width, first + c
    part = tl.load(part_p + t)
    local = t - tl.load(cu_p + part)
    total = tl.zeros((D,), tl.float32)
    for i in tl.static_range(W):
        back = W - 1 - i
        value = tl.load(x_p + (t - back).to(tl.int64) * stride + channel, mask=inside & (local >= back), other=0.0)
        if KEPT:
            place = tl.load(before_p + part) + local - back
            row = tl.load(read_p + part) * R + tl.maximum(place, 0) % R
            kept = tl.load(state_p + row * C + channel, mask=inside & (local < back) & (place >= 0), other=0.0)
            value = tl.where(local >= back, value, kept)
        total = total + tl.load(w_p + channel * W + i, mask=inside, other=0.0).to(tl.float32) * value.to(tl.float32)
    y = (total * tl.div_rn(1.0, tl.exp(-total) + 1.0)).to(tl.bfloat16)
    if is_v:
        tl.store(v_p + (t * HV + head - 2 * HK) * DV + c, y, mask=inside)
    else:
        wide = tl.where(inside, y.to(tl.float32), 0.0)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(wide * wide, axis=0) + _EPS))
        y = (wide * inverse).to(tl.bfloat16)
        if head < HK:
            tl.store(q_p + (t * HK + head) * DK + c, y, mask=inside)
        else:
            tl.store(k_p + (t * HK + head - HK) * DK + c, y, mask=inside)


@triton.jit(do_not_specialize=["stride"])
def _conv_keep_kernel(
    x_p, state_p, cu_p, before_p, read_p, write_p, stride, C, R: tl.constexpr, B: tl.constexpr, N: tl.constexpr
):
    """The last R rows of a sequence, for later passes. Those of earlier passes are copied to another row, if the
    sequence leaves its state there; in its own they have their places. `B`: a power of two, at least R."""
    s = tl.program_id(0)
    channel, i = tl.program_id(1) * N + tl.arange(0, N), tl.arange(0, B)
    start = tl.load(cu_p + s)
    count, before = tl.load(cu_p + s + 1) - start, tl.load(before_p + s)
    read, write = tl.load(read_p + s), tl.load(write_p + s)
    local = count - R + i  # below 0: a row of an earlier pass
    place = before + local
    here = (channel < C)[None, :] & ((i < R) & (place >= 0))[:, None]
    new, old = here & (local >= 0)[:, None], here & ((local < 0) & (read != write))[:, None]
    rows = (tl.maximum(place, 0) % R)[:, None] * C + channel[None, :]
    x = tl.load(x_p + (start + local)[:, None].to(tl.int64) * stride + channel[None, :], mask=new, other=0.0)
    kept = tl.load(state_p + read * R * C + rows, mask=old, other=0.0)
    tl.store(state_p + write * R * C + rows, tl.where(local[:, None] >= 0, x, kept), mask=new | old)


def conv_heads(
    x: Tensor, weight: Tensor, sizes: HeadSizes, parts: Parts, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.conv_heads`; rows of `x` may be those of a wider tensor."""
    hk, hv, dk, dv = sizes
    count, width, device = len(x), weight.shape[1], x.device
    assert x.stride(1) == 1 and weight.is_contiguous() and width <= 5
    q, k = (torch.empty(count, hk, dk, dtype=x.dtype, device=device) for _ in range(2))
    v = torch.empty(count, hv, dv, dtype=x.dtype, device=device)
    places = torch.arange(count, dtype=torch.int32, device=device)
    part = torch.searchsorted(parts.cu_seqlens[1:].contiguous(), places, right=True)
    kept = state is not None and parts.rows is not None
    read = parts.rows.read if parts.rows is not None else part
    held, size = (state, state.shape[1]) if state is not None else (x, 1)
    before = parts.before if parts.before is not None else parts.cu_seqlens
    _conv_kernel[(count, 2 * hk + hv)](
        x, weight, held, q, k, v, parts.cu_seqlens, part, before, read, x.stride(0), HK=hk, HV=hv, DK=dk, DV=dv,
        D=triton.next_power_of_2(max(dk, dv)), W=width, R=size, KEPT=kept, num_warps=1, enable_fp_fusion=False,
    )
    if kept and parts.rows is not None:
        block = triton.next_power_of_2(size)
        n = max(32, 1024 // block)
        _conv_keep_kernel[(len(parts.lengths), triton.cdiv(x.shape[1], n))](
            x, held, parts.cu_seqlens, before, read, parts.rows.write, x.stride(0), x.shape[1], R=size, B=block, N=n,
            num_warps=4,
        )
    return q, k, v


@triton.jit(do_not_specialize=["HV", "count"])
def _gates_kernel(z_p, a_p, dt_p, g_p, beta_p, HV, count, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    here, t, h = at < count, at // HV, at % HV
    b = tl.load(z_p + t * 2 * HV + h, mask=here, other=0.0)
    x = tl.load(z_p + t * 2 * HV + HV + h, mask=here, other=0.0) + tl.load(dt_p + h, mask=here, other=0.0)
    soft = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    tl.store(g_p + at, -(tl.exp(tl.load(a_p + h, mask=here, other=0.0)) * soft), mask=here)
    tl.store(beta_p + at, tl.div_rn(1.0, tl.exp(-b) + 1.0), mask=here)


def delta_gates(logits: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.delta_gates`."""
    heads = logits.shape[1] // 2
    g, beta = (torch.empty(len(logits), heads, dtype=torch.float32, device=logits.device) for _ in range(2))
    assert logits.is_contiguous() and a_log.dtype == dt_bias.dtype == torch.float32
    n = 256
    _gates_kernel[(triton.cdiv(g.numel(), n),)](
        logits, a_log, dt_bias, g, beta, heads, g.numel(), N=n, num_warps=4, enable_fp_fusion=False
    )
    return g, beta


@triton.jit(do_not_specialize=["stride"])
def _gate_kernel(
    x_p, gate_p, w_p, out_p, stride, step, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr, EPS: tl.constexpr,
    NORM: tl.constexpr,
):
    """A (row, head). `NORM`: the RMSNorm of the head, times silu(gate); else the head, times sigmoid(gate)."""
    t, h = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, B)
    inside = c < D
    x = tl.load(x_p + (t * H + h) * D + c, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate_p + t.to(tl.int64) * stride + h * step + c, mask=inside, other=0.0).to(tl.float32)
    factor = tl.div_rn(1.0, tl.exp(-z) + 1.0)
    if NORM:
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=0) / D + EPS))
        w = tl.load(w_p + c, mask=inside, other=0.0).to(tl.float32)
        x = ((x * inverse).to(tl.bfloat16).to(tl.float32) * w).to(tl.bfloat16).to(tl.float32)
        factor = z * factor
    tl.store(out_p + (t * H + h) * D + c, (x * factor).to(tl.bfloat16), mask=inside)


def _gated(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    (count, heads, size), out = x.shape, torch.empty_like(x)
    assert x.is_contiguous() and gate.stride(2) == 1
    _gate_kernel[(count, heads)](
        x, gate, x if weight is None else weight, out, gate.stride(0), gate.stride(1), H=heads, D=size,
        B=triton.next_power_of_2(size), EPS=eps, NORM=weight is not None, num_warps=1, enable_fp_fusion=False,
    )
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.gated_norm`."""
    return _gated(x, gate, weight, eps)


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See `reference.output_gate`."""
    return _gated(x, gate, None, 0.0)


__all__ = ["CHUNK", "conv_heads", "delta_gates", "delta_rule", "gated_norm", "output_gate"]
