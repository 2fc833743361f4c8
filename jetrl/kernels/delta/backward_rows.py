"""Gradients of the convolution, the gated norm and the output gate on a GPU, in one or two passes over their tensors.

They are those of `backward.py` in FP32, rounded once. Sums over rows (of weights) are made by blocks of rows, each in a
program, and then over the blocks by torch: in one order.
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
_ROWS = 32  # in a program
_CHANNELS = 128
_TILE, _TILES = 8, 32  # rows of a tile, and tiles of a program, of the convolution's sums


@triton.jit(do_not_specialize=["rows"])
def _conv_sums_kernel(
    x_p, w_p, dq_p, dk_p, dv_p, local_p, sum_p, dw_p, stride, rows, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):
    """A (block of N tiles of R rows, head): the gradient of the convolution's sums, FP32 [T, C]; from these rows that
    of the weight [blocks, W, C], whose products are added up tile by tile and only then over the rows of a tile."""
    block, head = tl.program_id(0), tl.program_id(1)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    is_v = head >= 2 * HK
    width = tl.where(is_v, DV, DK)
    channel = tl.where(is_v, 2 * HK * DK + (head - 2 * HK) * DV, head * DK)
    r, c = tl.arange(0, R), tl.arange(0, D)
    inside = c < width
    weights, grads = (), ()
    for i in tl.static_range(W):
        w = tl.load(w_p + i * C + channel + c, mask=inside, other=0.0).to(tl.float32)
        weights = weights + (w[None, :],)  # type: ignore[assignment]
        grads = grads + (tl.zeros((R, D), tl.float32),)  # type: ignore[assignment]
    for n in tl.range(0, N, num_stages=1):
        start = block.to(tl.int64) * (N * R) + n * R
        live = start + r < rows
        here = live[:, None] & inside[None, :]
        local = tl.load(local_p + start + r, mask=live, other=0)
        total, taken = tl.zeros((R, D), tl.float32), ()
        for i in tl.static_range(W):
            seen = here & (local >= W - 1 - i)[:, None]
            at = (r - (W - 1 - i))[:, None] * stride + c[None, :]
            x = tl.load(x_p + start * stride + channel + at, mask=seen, other=0.0)
            total += weights[i] * x.to(tl.float32)
            taken = taken + (x,)  # type: ignore[assignment]
        sig = 1.0 / (tl.exp(-total) + 1.0)
        if is_v:
            place = ((start * HV + head - 2 * HK) * DV) + (r[:, None] * (HV * DV) + c[None, :])
            d = tl.load(dv_p + place, mask=here, other=0.0).to(tl.float32)
        else:
            place = ((start * HK + head % HK) * DK) + (r[:, None] * (HK * DK) + c[None, :])
            if head < HK:
                up = tl.load(dq_p + place, mask=here, other=0.0).to(tl.float32)
            else:
                up = tl.load(dk_p + place, mask=here, other=0.0).to(tl.float32)
            y = total * sig
            inverse = tl.math.rsqrt(tl.sum(y * y, axis=1) + _EPS)[:, None]
            y *= inverse
            d = inverse * (up - y * tl.sum(up * y, axis=1)[:, None])
        d *= sig * (1.0 + total * (1.0 - sig))
        tl.store(sum_p + (start * C + channel) + (r[:, None] * C + c[None, :]), d, mask=here)
        added = ()
        for i in tl.static_range(W):
            added = added + (grads[i] + d * taken[i].to(tl.float32),)  # type: ignore[assignment]
        grads = added
    dw_p += block.to(tl.int64) * (W * C) + channel
    for i in tl.static_range(W):
        tl.store(dw_p + i * C + c, tl.sum(grads[i], axis=0), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _conv_inputs_kernel(sum_p, w_p, left_p, dx_p, rows, C, W: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """R rows of N channels of dx: row t is in the sums of rows t to t + W - 1 of its sequence, of which it has `left`
    after it."""
    start, c = tl.program_id(0).to(tl.int64) * R, tl.program_id(1) * N + tl.arange(0, N)
    r = tl.arange(0, R)
    live, inside = start + r < rows, c < C
    left = tl.load(left_p + start + r, mask=live, other=-1)
    dx = tl.zeros((R, N), tl.float32)
    for i in tl.static_range(W):
        ahead = W - 1 - i
        w = tl.load(w_p + i * C + c, mask=inside, other=0.0).to(tl.float32)
        at = (r + ahead)[:, None] * C + c[None, :]
        dx += w[None, :] * tl.load(sum_p + start * C + at, mask=(left >= ahead)[:, None] & inside[None, :], other=0.0)
    to = r[:, None] * C + c[None, :]
    tl.store(dx_p + start * C + to, dx.to(tl.bfloat16), mask=live[:, None] & inside[None, :])


def conv_heads_backward(
    grads: tuple[Tensor, Tensor, Tensor], x: Tensor, weight: Tensor, sizes: HeadSizes, parts: Parts
) -> tuple[Tensor, Tensor]:
    """See `backward.conv_heads_backward`; BF16, rows of `x` may be those of a wider tensor."""
    (hk, hv, dk, dv), (rows, channels), width = sizes, x.shape, weight.shape[1]
    assert x.stride(1) == 1 and weight.is_contiguous() and x.dtype == torch.bfloat16
    cu, place = parts.cu_seqlens, torch.arange(rows, dtype=torch.int32, device=x.device)
    part = parts.owners()
    local, left = place - cu[part], cu[part + 1] - 1 - place
    blocks, taps = triton.cdiv(rows, _TILES * _TILE), weight.T.contiguous()  # [W, C]: channels side by side
    sums = torch.empty(rows, channels, dtype=torch.float32, device=x.device)
    by_block = torch.empty(blocks, width, channels, dtype=torch.float32, device=x.device)
    _conv_sums_kernel[(blocks, 2 * hk + hv)](
        x, taps, *(t.contiguous() for t in grads), local, sums, by_block, x.stride(0), rows, HK=hk, HV=hv, DK=dk,
        DV=dv, D=triton.next_power_of_2(max(dk, dv)), W=width, R=_TILE, N=_TILES, num_warps=4,
    )
    dx = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    _conv_inputs_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(channels, _CHANNELS))](
        sums, taps, left, dx, rows, channels, W=width, R=_ROWS, N=_CHANNELS, num_warps=4,
    )
    return dx, by_block.sum(0).T.contiguous()


@triton.jit(do_not_specialize=["rows"])
def _gate_grads_kernel(
    dy_p, x_p, gate_p, w_p, dx_p, dgate_p, dw_p, stride, step, rows, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
    R: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr,
):
    """R heads of rows, see `triton._gate_kernel`: gradients of x and of the gate; with `NORM`, of the weight those from
    these heads [programs, D]."""
    start = tl.program_id(0).to(tl.int64) * R
    n, c = start + tl.arange(0, R), tl.arange(0, B)
    live, inside = n < rows, c < D
    here = live[:, None] & inside[None, :]
    at = tl.arange(0, R)[:, None] * D + c[None, :]
    x = tl.load(x_p + start * D + at, mask=here, other=0.0).to(tl.float32)
    dy = tl.load(dy_p + start * D + at, mask=here, other=0.0).to(tl.float32)
    z = tl.load(gate_p + ((n // H) * stride + (n % H) * step)[:, None] + c[None, :], mask=here, other=0.0)
    z = z.to(tl.float32)
    sig = 1.0 / (tl.exp(-z) + 1.0)
    if NORM:
        inverse = tl.math.rsqrt(tl.sum(x * x, axis=1) / D + EPS)[:, None]
        w = tl.load(w_p + c, mask=inside, other=0.0).to(tl.float32)[None, :]
        x *= inverse
        dgate = dy * (x * w) * (sig * (1.0 + z * (1.0 - sig)))
        dy *= z * sig
        tl.store(dw_p + tl.program_id(0).to(tl.int64) * D + c, tl.sum(dy * x, axis=0), mask=inside)
        dy *= w
        dx = (dy - x * (tl.sum(dy * x, axis=1) / D)[:, None]) * inverse
    else:
        dx = dy * sig
        dgate = dy * x * (sig * (1.0 - sig))
    tl.store(dx_p + start * D + at, dx.to(tl.bfloat16), mask=here)
    tl.store(dgate_p + start * D + at, dgate.to(tl.bfloat16), mask=here)


def _gate_grads(grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    (count, heads, size), dx, d_gate = x.shape, torch.empty_like(x), torch.empty_like(x)
    assert x.is_contiguous() and gate.stride(2) == 1 and x.dtype == gate.dtype == torch.bfloat16
    programs = triton.cdiv(count * heads, _ROWS)
    norm = weight is not None
    dw = torch.empty(programs if norm else 0, size, dtype=torch.float32, device=x.device)
    _gate_grads_kernel[(programs,)](
        grad.contiguous(), x, gate, weight if norm else x, dx, d_gate, dw if norm else x, gate.stride(0),
        gate.stride(1), count * heads, H=heads, D=size, B=triton.next_power_of_2(size), R=_ROWS, EPS=eps, NORM=norm,
        num_warps=4,
    )
    return dx, d_gate, dw.sum(0)


def gated_norm_backward(grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    """See `backward.gated_norm_backward`; BF16, rows of `gate` may be those of a wider tensor."""
    return _gate_grads(grad, x, gate, weight, eps)


def output_gate_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """See `backward.output_gate_backward`; likewise."""
    dx, d_gate, _ = _gate_grads(grad, x, gate, None, 0.0)
    return dx, d_gate
