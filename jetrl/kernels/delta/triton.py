"""Gated DeltaNet on a GPU: the delta rule's forms, the convolution, gates and norms.

`reference.py` has the formulas. Sums are the tensor core's here (BF16 operands, an FP32 accumulator), so last bits are
not a CPU's. The rule has three forms: `general.py` for any pieces of sequences, `tokens.py` for one token of each, and
`packed.py` for whole ones of which no state is kept. A row has the same bits in all: the same products of the same
numbers, each with the same beginning and the same order, and nothing of other rows. Where a row lies in a tile, which
factor of a product is the left one, and which instruction multiplies, changes none of it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.delta.general import general_rule
from jetrl.kernels.delta.packed import packed_rule
from jetrl.kernels.delta.parts import CHUNK, DeltaState, HeadSizes, Parts
from jetrl.kernels.delta.tokens import token_rule

_EPS = tl.constexpr(1e-6)  # of L2 norms


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parts: Parts, kept: DeltaState | None
) -> Tensor:
    """See `reference.delta_rule`; BF16, heads of 16 to 128, a power of two."""
    assert all(t.is_contiguous() for t in (q, k, v, g, beta)) and v.dtype == torch.bfloat16
    if kept is None:
        return packed_rule(q, k, v, g, beta, parts)
    if parts.single:
        return token_rule(q, k, v, g, beta, parts, kept)
    return general_rule(q, k, v, g, beta, parts, kept)


# ---- the convolution, gates and norms -------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["stride"])
def _conv_kernel(
    x_p, w_p, state_p, q_p, k_p, v_p, cu_p, part_p, before_p, read_p, write_p, stride, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
    KEPT: tl.constexpr, SINGLE: tl.constexpr,
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
    part = parts.cu_seqlens
    if not single:
        places = torch.arange(count, dtype=torch.int32, device=device)
        part = torch.searchsorted(part[1:].contiguous(), places, right=True)
    read, write = (part, part) if parts.rows is None else (parts.rows.read, parts.rows.write)
    held, size = (state, state.shape[1]) if state is not None else (x, 1)
    before = parts.before if parts.before is not None else parts.cu_seqlens
    _conv_kernel[(count, 2 * hk + hv)](
        x, weight, held, q, k, v, parts.cu_seqlens, part, before, read, write, x.stride(0), HK=hk, HV=hv, DK=dk, DV=dv,
        D=triton.next_power_of_2(max(dk, dv)), W=width, R=size, KEPT=kept, SINGLE=single, num_warps=1,
        enable_fp_fusion=False,
    )
    if kept and not single:
        block = triton.next_power_of_2(size)
        n = max(32, 1024 // block)
        _conv_keep_kernel[(len(parts.lengths), triton.cdiv(x.shape[1], n))](
            x, held, parts.cu_seqlens, before, read, write, x.stride(0), x.shape[1], R=size, B=block, N=n,
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


__all__ = ["CHUNK", "conv_heads", "delta_gates", "delta_rule", "general_rule", "gated_norm", "output_gate"]
