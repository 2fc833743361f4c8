"""Norms, RoPE, SwiGLU and residual sums as Triton kernels, forward passes bit-equal to `reference`.

The sum of squares is exact: a row is written as integers of at most 20 bits times a power of two, whose squares are
summed in int64; the rest of `inv_rms` is float64. `exp32` repeats `exact.exp` step by step. FP fusion is off.

Legend: `T` tokens, `D` row length, `N` query heads, `G` key/value heads, `H` head size, `F` feed-forward.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.launch import LAUNCH, begin
from jetrl.kernels.qtensor import Coded, QTensor
from jetrl.kernels.quantize.triton import (
    _FLOOR_BITS,
    abs_bits,
    new_codes,
    new_scale,
    quotient,
    reciprocal,
    scale_from,
)

_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds an FP32 of at most 2**22 to an integer, half to even
_MAGIC_BITS = tl.constexpr(0x4B400000)
_BELOW_2 = tl.constexpr(2.0 - 2.0**-23)
# Programs of the first stage of a norm's weight gradient: fixed, so that the order of sums is fixed. As many as an H200
# holds at the same time with rows of 4096, three on each of its 132 multiprocessors.
_PARTIAL_ROWS = 396


@triton.jit
def aligned_squares(x, top):
    """Squares, int64, of `x` [R, B] as integers of 20 bits; `top` [R] is the maximum of `abs_bits` over the row."""
    shift = 146 - (top >> 23)  # 19 - exponent; in two halves, each a normal FP32
    half = shift >> 1
    a = ((half + 127) << 23).to(tl.float32, bitcast=True)
    b = ((shift - half + 127) << 23).to(tl.float32, bitcast=True)
    m = ((x * a[:, None]) * b[:, None] + _MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS
    return m.to(tl.int64) * m.to(tl.int64)


@triton.jit
def inv_rms_from(total, top, D: tl.constexpr, EPS: tl.constexpr):
    """`reference.inv_rms` from the int64 sum of `aligned_squares` [R] and the row maximum."""
    unit2 = ((2 * ((top >> 23) - 146) + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    one = tl.full(total.shape, 1.0, tl.float64)
    inv = (one / tl.sqrt(total.to(tl.float64) * unit2 / D + EPS)).to(tl.float32)
    special = tl.where(top > 0x7F800000, float("nan"), 0.0)  # NaN, else infinity, in the row
    return tl.where(top >= 0x7F800000, special, inv)


@triton.jit
def inv_rms(x, D: tl.constexpr, EPS: tl.constexpr):
    top = tl.max(abs_bits(x), axis=1)
    return inv_rms_from(tl.sum(aligned_squares(x, top), axis=1), top, D, EPS)


@triton.jit
def exp32(x):
    """`exact.exp`: Cephes' polynomial, every operation rounded separately."""
    x = tl.where(x < -87.0, -87.0, tl.where(x > 88.0, 88.0, x))  # NaN stays
    shifted = x * 1.44269504088896340736 + _MAGIC
    n = shifted - _MAGIC
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    p = r * 1.9875691500e-4
    p = (p + 1.3981999507e-3) * r
    p = (p + 8.3334519073e-3) * r
    p = (p + 4.1665795894e-2) * r
    p = (p + 1.6666665459e-1) * r
    p = (p + 5.0000001201e-1) * (r * r)
    p = (p + r) + 1.0
    power = shifted.to(tl.int32, bitcast=True) - _MAGIC_BITS
    return p * ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid32(x):
    """`reference.sigmoid` of BF16 values: a reciprocal corrected twice, of a quarter of the sum (far from denormals).

    Of all sums that a BF16 `x` gives, this is wrong for one, the FP32 below 2 (`tests/kernels/test_quotients.py`).
    """
    quarter = (exp32(x * -1.0) + 1.0) * 0.25
    less, r = quarter * -1.0, reciprocal(quarter)
    r = tl.fma(tl.fma(less, r, 1.0), r, r)
    r = tl.fma(tl.fma(less, r, 1.0), r, r) * 0.25
    return tl.where(quarter == _BELOW_2 * 0.25, 0.5 + 2.0**-24, r)


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def _norm_kernel(
    x, residual, weight, out, total, codes, scale, inverses, num_rows, heads, x_stride, x_head_stride, res_stride,
    codes_stride, scale_stride, written, D: tl.constexpr, EPS: tl.constexpr, B: tl.constexpr, R: tl.constexpr,
    ADD: tl.constexpr, WRITE: tl.constexpr, QUANT: tl.constexpr, KEEP: tl.constexpr, FLOOR: tl.constexpr,
    POW2: tl.constexpr, PDL: tl.constexpr,
):
    """WRITE: the norm's rows in BF16; QUANT: their codes; KEEP: `inv_rms` of each."""
    begin(PDL)
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    cols = tl.arange(0, B)
    alive, inside = rows < num_rows, cols < D
    mask = alive[:, None] & inside[None, :]
    at = (rows // heads) * x_stride + (rows % heads) * x_head_stride
    v = tl.load(x + at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        r = tl.load(residual + rows[:, None] * res_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rounded = (v + r).to(tl.bfloat16)
        tl.store(total + rows[:, None] * D + cols[None, :], rounded, mask=mask)
        v = rounded.to(tl.float32)
    inv = inv_rms(v, D, EPS)
    if KEEP:
        tl.store(inverses + rows, inv, mask=alive)
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    normed = (v * inv[:, None]).to(tl.bfloat16).to(tl.float32)
    y = (normed * w[None, :]).to(tl.bfloat16)
    if WRITE:
        tl.store(out + rows[:, None] * D + cols[None, :], y, mask=mask)
    if QUANT:
        y = tl.where(mask, y.to(tl.float32), 0.0)
        groups = tl.reshape(y, (R, B // 128, 128))
        s = scale_from(tl.max(abs_bits(groups), axis=2), FLOOR, POW2)
        q = tl.reshape(quotient(groups, s[:, :, None], True).to(tl.float8e4nv).to(tl.uint8, bitcast=True), (R, B))
        write = alive[:, None] & (cols < written)[None, :]
        tl.store(codes + rows[:, None] * codes_stride + cols[None, :], q, mask=write)
        group = tl.arange(0, B // 128)
        tl.store(
            scale + group[None, :].to(tl.int64) * scale_stride + rows[:, None], s,
            mask=alive[:, None] & (group * 128 < D)[None, :],
        )


@triton.jit(do_not_specialize=["num_rows"])
def _norm_backward_kernel(
    grad, x, weight, more, dx, partial, num_rows, heads, x_stride, x_head_stride,
    D: tl.constexpr, EPS: tl.constexpr, B: tl.constexpr, R: tl.constexpr, MORE: tl.constexpr,
):
    cols = tl.arange(0, B)
    inside = cols < D
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((R, B), dtype=tl.float32)
    for start in range(tl.program_id(0) * R, num_rows, tl.num_programs(0) * R):
        rows = (start + tl.arange(0, R)).to(tl.int64)
        mask = (rows < num_rows)[:, None] & inside[None, :]
        at = (rows // heads) * x_stride + (rows % heads) * x_head_stride
        v = tl.load(x + at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + rows[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if MORE:  # loaded here, so that all of a row is on its way at the same time
            m = tl.load(more + rows[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        # not the exact sum of `inv_rms`, whose integers take longer than reading: gradients are outside parity
        inv = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(v * v, axis=1) / D + EPS))[:, None]
        n = v * inv
        gw = g * w[None, :]
        mean = tl.sum(gw * n, axis=1) / D
        d = ((gw - n * mean[:, None]) * inv).to(tl.bfloat16)
        if MORE:
            d = (d.to(tl.float32) + m).to(tl.bfloat16)
        tl.store(dx + rows[:, None] * D + cols[None, :], d, mask=mask)
        dw += tl.where(mask, g * n, 0.0)
    tl.store(partial + tl.program_id(0) * D + cols, tl.sum(dw, axis=0), mask=inside)


@triton.jit
def _add_kernel(x, y, out, num_cols, x_stride, y_stride, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * B + tl.arange(0, B)
    inside = cols < num_cols
    a = tl.load(x + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(y + row * y_stride + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * num_cols + cols, (a + b).to(tl.bfloat16), mask=inside)


@triton.jit
def _rope_kernel(
    x, cos, sin, out, heads, x_stride, x_head_stride, H: tl.constexpr, HB: tl.constexpr, R: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * R + tl.arange(0, R)
    cols = tl.arange(0, HB)
    inside = cols < H // 2
    mask = (head < heads)[:, None] & inside[None, :]
    c = tl.load(cos + token * (H // 2) + cols, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + token * (H // 2) + cols, mask=inside, other=0.0)[None, :]
    if BACKWARD:
        s = -s
    at = x + token * x_stride + head[:, None] * x_head_stride + cols[None, :]
    x1 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(at + H // 2, mask=mask, other=0.0).to(tl.float32)
    to = out + (token * heads + head[:, None]) * H + cols[None, :]
    tl.store(to, (x1 * c - x2 * s).to(tl.bfloat16), mask=mask)
    tl.store(to + H // 2, (x2 * c + x1 * s).to(tl.bfloat16), mask=mask)


def rows_view(x: Tensor) -> tuple[int, int, int, int]:
    """Rows, heads, and the strides of token and head, of a [T, D] or [T, N, H] tensor with contiguous rows."""
    if x.dtype != torch.bfloat16:
        raise ValueError(f"the hopper backend computes in BF16, got {x.dtype}")
    assert x.stride(-1) == 1 and x.ndim in (2, 3)
    if x.ndim == 2:
        return x.shape[0], 1, x.stride(0), 0
    return x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)


def _norm_tile(d: int) -> tuple[int, int, int]:
    """Block of columns, rows per program, warps."""
    block = max(128, triton.next_power_of_2(d))
    return block, max(1, 2048 // block), 4 if block <= 4096 else 8


def norm(
    x: Tensor, residual: Tensor | None, w: Tensor, eps: float, quantize: bool, pow2: bool, inv: Tensor | None = None,
    both: bool = False,
) -> tuple[Tensor | QTensor | Coded, Tensor]:
    """The functions below; `inv` FP32 [T] gets `inv_rms` of each row. `both`: not only the codes."""
    rows, heads, stride, head_stride = rows_view(x)
    block, r, warps = _norm_tile(d := x.shape[-1])
    assert residual is None or (x.ndim == 2 and residual.shape == x.shape and residual.stride(1) == 1)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = codes = scale = x
    if quantize:
        codes, scale = new_codes(rows, d, x.device), new_scale(rows, triton.cdiv(d, 128), x.device)
    if both or not quantize:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        _norm_kernel[(triton.cdiv(rows, r),)](
            x, x if residual is None else residual, w, out, total, codes.view(torch.uint8) if quantize else codes,
            scale, scale if inv is None else inv, rows, heads, stride, head_stride,
            0 if residual is None else residual.stride(0), codes.stride(0), scale.stride(1), codes.stride(0), D=d,
            EPS=eps, B=block, R=r, ADD=residual is not None, WRITE=both or not quantize, QUANT=quantize,
            KEEP=inv is not None, FLOOR=_FLOOR_BITS, POW2=pow2, num_warps=warps, enable_fp_fusion=False, **LAUNCH,
        )
    if not quantize:
        return out, total
    quantized = QTensor(codes, scale, "1x128", (rows,), (d,))
    return Coded(out, quantized) if both else quantized, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm`: `x` [T, D] or [T, N, H], rows contiguous (a slice of the fused projection works)."""
    y = norm(x, None, weight, eps, False, False)[0]
    assert isinstance(y, Tensor)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`r = rounded(x + residual)`; returns (`rms_norm(r)`, `r`)."""
    y, total = norm(x, residual, weight, eps, False, False)
    assert isinstance(y, Tensor)
    return y, total


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pow2: bool
) -> tuple[QTensor, Tensor]:
    """`quantize_act(add_rms_norm(...))` and the residual in one kernel; `residual` None: `x` alone."""
    y, total = norm(x, residual, weight, eps, True, pow2)
    assert isinstance(y, QTensor)
    return y, total


def add_rms_norm_coded(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pow2: bool
) -> tuple[Coded, Tensor]:
    """`add_rms_norm_quantize`, with the norm's rows in BF16 too."""
    y, total = norm(x, residual, weight, eps, True, pow2, both=True)
    assert isinstance(y, Coded)
    return y, total


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, more: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients for `x` (rounded) and `weight` (FP32). Deterministic: a fixed split of the rows, no atomics.

    `more`, another gradient of x (from the residual stream), is added to the first after that is rounded.
    """
    assert grad.is_contiguous() and (more is None or (more.is_contiguous() and more.shape == x.shape))
    rows, heads, stride, head_stride = rows_view(x)
    block, r, warps = _norm_tile(d := x.shape[-1])
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty(_PARTIAL_ROWS, d, dtype=torch.float32, device=x.device)
    _norm_backward_kernel[(_PARTIAL_ROWS,)](
        grad, x, weight, grad if more is None else more, dx, partial, rows, heads, stride, head_stride, D=d, EPS=eps,
        B=block, R=r, MORE=more is not None, num_warps=warps, enable_fp_fusion=False,
    )
    return dx, partial.sum(0)


def add(x: Tensor, y: Tensor) -> Tensor:
    """`reference.add`: `y` of the shape of `x` [T, D], or one row [D] (a bias)."""
    rows_view(x)
    assert y.stride(-1) == 1 and x.ndim == 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(2048, triton.next_power_of_2(x.shape[1]))
    if x.shape[0]:
        _add_kernel[(x.shape[0], triton.cdiv(x.shape[1], block))](
            x, y, out, x.shape[1], x.stride(0), y.stride(0) if y.ndim == 2 else 0, B=block, num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def _rope(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    _, heads, stride, head_stride = rows_view(x)
    h = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    r = min(16, triton.next_power_of_2(heads))
    if x.shape[0]:
        _rope_kernel[(x.shape[0], triton.cdiv(heads, r))](
            x, cos, sin, out, heads, stride, head_stride, H=h, HB=triton.next_power_of_2(h // 2), R=r,
            BACKWARD=backward, num_warps=4, enable_fp_fusion=False,
        )
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`reference.rope` of `x` [T, N, H] with FP32 `cos`, `sin` [T, H/2]."""
    return _rope(x, cos, sin, False)


def rope_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse rotation."""
    return _rope(grad, cos, sin, True)
