"""The convolution before the delta rule on a GPU, with SiLU and the norms of queries and keys.

`reference.conv_heads` is the definition. A row of a head is 128 channels of one warp in every kernel here, so the sum
of its norm has one order: single tokens and pieces (`_conv_kernel`, with the rows that a state keeps) and whole
sequences (`_conv_rows_kernel`, which reads a row once for all that need it) give equal bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.delta.parts import HeadSizes, Parts

_EPS = tl.constexpr(1e-6)  # of L2 norms
_ROWS = 8  # of a program of `_conv_rows_kernel`


@triton.jit
def _finish(
    total, q_p, k_p, v_p, t, head, c, inside, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):
    """A row's sums of a head [D]: SiLU; of queries and keys the L2 norm."""
    t = t.to(tl.int64)
    y = (total * tl.div_rn(1.0, tl.exp(-total) + 1.0)).to(tl.bfloat16)
    if head >= 2 * HK:
        tl.store(v_p + (t * HV + head - 2 * HK) * DV + c, y, mask=inside)
    else:
        wide = tl.where(inside, y.to(tl.float32), 0.0)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(wide * wide, axis=0) + _EPS))
        y = (wide * inverse).to(tl.bfloat16)
        if head < HK:
            tl.store(q_p + (t * HK + head) * DK + c, y, mask=inside)
        else:
            tl.store(k_p + (t * HK + head - HK) * DK + c, y, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _conv_rows_kernel(
    x_p, w_p, q_p, k_p, v_p, cu_p, part_p, stride, rows, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
):
    """N rows of a head, of sequences that begin in this pass."""
    start, head = tl.program_id(0) * N, tl.program_id(1)
    is_v = head >= 2 * HK
    width = tl.where(is_v, DV, DK)
    first = tl.where(is_v, 2 * HK * DK + (head - 2 * HK) * DV, head * DK)
    c = tl.arange(0, D)
    inside, channel = c < width, first + c
    x_p += start.to(tl.int64) * stride + channel
    values, weights = (), ()
    for i in tl.static_range(W):
        weight = tl.load(w_p + channel * W + i, mask=inside, other=0.0).to(tl.float32)
        weights = weights + (weight,)  # type: ignore[assignment]
    for n in tl.static_range(N + W - 1):
        there = (start + n >= W - 1) & (start + n - (W - 1) < rows)
        value = tl.load(x_p + (n - (W - 1)) * stride, mask=inside & there, other=0.0)
        values = values + (value,)  # type: ignore[assignment]
    for n in tl.static_range(N):
        t = start + n
        if t < rows:
            local = t - tl.load(cu_p + tl.load(part_p + t))
            total = tl.zeros((D,), tl.float32)
            for i in tl.static_range(W):
                value = tl.where(local >= W - 1 - i, values[n + i], 0.0)
                total = total + weights[i] * value.to(tl.float32)
            _finish(total, q_p, k_p, v_p, t, head, c, inside, HK, HV, DK, DV)


@triton.jit(do_not_specialize=["stride"])
def _conv_kernel(
    x_p, w_p, state_p, q_p, k_p, v_p, cu_p, part_p, before_p, read_p, write_p, stride, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """A (row, head): products in order, the oldest first; SiLU; of queries and keys the L2 norm. A state: `R` rows.
    `SINGLE`: a row is a sequence's, and is kept here; else by `_conv_keep_kernel`, when all have read."""
    t, head = tl.program_id(0), tl.program_id(1)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    is_v = head >= 2 * HK
    width = tl.where(is_v, DV, DK)
    first = tl.where(is_v, 2 * HK * DK + (head - 2 * HK) * DV, head * DK)
    c = tl.arange(0, D)
    inside, channel = c < width, first + c
    if SINGLE:
        part, local = t, t * 0
    else:
        part = tl.load(part_p + t)
        local = t - tl.load(cu_p + part)
    total = tl.zeros((D,), tl.float32)
    for i in tl.static_range(W):
        back = W - 1 - i
        value = tl.load(x_p + (t - back).to(tl.int64) * stride + channel, mask=inside & (local >= back), other=0.0)
        place = tl.load(before_p + part) + local - back
        row = tl.load(read_p + part) * R + tl.maximum(place, 0) % R
        kept = tl.load(state_p + row * C + channel, mask=inside & (local < back) & (place >= 0), other=0.0)
        value = tl.where(local >= back, value, kept)
        total = total + tl.load(w_p + channel * W + i, mask=inside, other=0.0).to(tl.float32) * value.to(tl.float32)
    _finish(total, q_p, k_p, v_p, t, head, c, inside, HK, HV, DK, DV)
    if SINGLE:
        _keep_row(x_p + t.to(tl.int64) * stride, state_p, before_p, read_p, write_p, t, channel, inside, C, R)


@triton.jit
def _keep_row(x_p, state_p, before_p, read_p, write_p, s, channel, inside, C: tl.constexpr, R: tl.constexpr):
    """These channels of a sequence's one row, for later passes; and of earlier ones, if it leaves them elsewhere."""
    before, read, write = tl.load(before_p + s), tl.load(read_p + s), tl.load(write_p + s)
    tl.debug_barrier()  # what is written over has been read
    if read != write:
        for back in range(1, R):
            at, there = tl.maximum(before - back, 0) % R * C + channel, inside & (before >= back)
            tl.store(state_p + write * R * C + at, tl.load(state_p + read * R * C + at, mask=there), mask=there)
    at = tl.maximum(before, 0) % R * C + channel  # padding has -1
    tl.store(state_p + write * R * C + at, tl.load(x_p + channel, mask=inside), mask=inside & (before >= 0))


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
    kept = state is not None and parts.rows is not None
    single = kept and parts.single
    part = parts.cu_seqlens if single else parts.owners()
    launch = {"HK": hk, "HV": hv, "DK": dk, "DV": dv, "D": triton.next_power_of_2(max(dk, dv)), "W": width}
    launch |= {"num_warps": 1, "enable_fp_fusion": False}
    if not kept:
        _conv_rows_kernel[(triton.cdiv(count, _ROWS), 2 * hk + hv)](
            x, weight, q, k, v, parts.cu_seqlens, part, x.stride(0), count, **launch, N=_ROWS
        )
        return q, k, v
    assert state is not None and parts.rows is not None and parts.before is not None
    read, write, size, before = parts.rows.read, parts.rows.write, state.shape[1], parts.before
    _conv_kernel[(count, 2 * hk + hv)](
        x, weight, state, q, k, v, parts.cu_seqlens, part, before, read, write, x.stride(0), **launch, R=size,
        SINGLE=single,
    )
    if not single:
        block = triton.next_power_of_2(size)
        n = max(32, 1024 // block)
        _conv_keep_kernel[(len(parts.lengths), triton.cdiv(x.shape[1], n))](
            x, state, parts.cu_seqlens, before, read, write, x.stride(0), x.shape[1], R=size, B=block, N=n,
            num_warps=4,
        )
    return q, k, v
