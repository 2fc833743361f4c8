"""Rows of tokens to their experts and back as Triton kernels, forward passes bit-equal to `reference.py`.

Grouped matrices [R, ...] have rows of padding (`route.PaddedGroups`). `dispatch`, `swiglu_rows` and gradients
write zeros there up to the end of the last group, so that a sum over an expert's rows is unharmed; kernels that
rollouts run in FP8 neither read nor write them: a GEMM's row depends on no other row. Nothing reads the rows beyond
the last group.

Legend: `T` tokens, `k` experts of a token, `R` rows, `E` experts, `D` model, `F` feed-forward, `C` columns. FP fusion
is off: `combine` rounds each product and each sum.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.experts.route import PaddedGroups
from jetrl.kernels.launch import LAUNCH, begin
from jetrl.kernels.pointwise.swiglu import swiglu_gradient
from jetrl.kernels.pointwise.triton import exp32, sigmoid32
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import (
    _FLOOR_BITS,
    abs_bits,
    new_codes,
    new_scale,
    padded,
    quotient,
    scale_from,
    to_bf16,
)
from jetrl.precision.formats import BLOCK


@triton.jit
def _copy_kernel(x, tokens, total, out, D, x_stride, B: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * B + tl.arange(0, B)
    if row < tl.load(total):
        token = tl.load(tokens + row).to(tl.int64)
        v = tl.load(x + token * x_stride + cols, mask=(cols < D) & (token >= 0), other=0.0)
        tl.store(out + row * D + cols, v, mask=cols < D)


@triton.jit(do_not_specialize=["scale_stride"])
def _copy_quantized_kernel(
    x, rows, codes, scale, D, x_stride, codes_stride, scale_stride, written, K: tl.constexpr, B: tl.constexpr,
    FLOOR: tl.constexpr, POW2: tl.constexpr, PDL: tl.constexpr,
):
    """Some groups of 128 columns of a token: quantized once, written k times."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * B
    cols = first + tl.arange(0, B)
    v = tl.load(x + token * x_stride + cols, mask=cols < D, other=0.0).to(tl.float32)
    groups = tl.reshape(v, (B // 128, 128))
    s = scale_from(tl.max(abs_bits(groups), axis=1), FLOOR, POW2)
    q = tl.reshape(quotient(groups, s[:, None], True).to(tl.float8e4nv).to(tl.uint8, bitcast=True), (B,))
    group = first // 128 + tl.arange(0, B // 128)
    for j in tl.static_range(K):
        row = tl.load(rows + token * K + j)
        tl.store(codes + row * codes_stride + cols, q, mask=cols < written)
        tl.store(scale + group.to(tl.int64) * scale_stride + row, s, mask=group * 128 < D)


@triton.jit
def _sum_kernel(
    y, weights, rows, shared, out, D, y_stride, shared_stride, K: tl.constexpr, B: tl.constexpr,
    WEIGHTED: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):
    """A token's k rows added in FP32 in the order of rank, then its row of `shared`, rounded once."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * B + tl.arange(0, B)
    inside = cols < D
    total = tl.zeros((B,), dtype=tl.float32)
    for j in tl.static_range(K):
        row = tl.load(rows + token * K + j)
        v = tl.load(y + row * y_stride + cols, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            v = v * tl.load(weights + token * K + j)
        total = v if j == 0 else total + v
    if SHARED:
        total += tl.load(shared + token * shared_stride + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * D + cols, total.to(tl.bfloat16), mask=inside)


@triton.jit
def _spread_kernel(
    dy, y, weights, rows, tokens, total, d_rows, d_weights, D, dy_stride, y_stride, K: tl.constexpr, KB: tl.constexpr,
    B: tl.constexpr,
):
    """The gradient of one row, and of its weight; zeros in a row of padding."""
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(total):
        cols, rank = tl.arange(0, B), tl.arange(0, KB)
        token = tl.load(tokens + row).to(tl.int64)
        real = token >= 0
        inside = (cols < D) & real
        mine = (tl.load(rows + token * K + rank, mask=(rank < K) & real, other=-1) == row) & real
        w = tl.sum(tl.where(mine, tl.load(weights + token * K + rank, mask=mine, other=0.0), 0.0), axis=0)
        g = tl.load(dy + token * dy_stride + cols, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(y + row * y_stride + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_rows + row * D + cols, tl.where(inside, g * w, 0.0).to(tl.bfloat16), mask=cols < D)
        d = tl.sum(g * v, axis=0) + tl.zeros((KB,), dtype=tl.float32)
        tl.store(d_weights + token * K + rank, d, mask=mine)


@triton.jit(do_not_specialize=["N", "scale_stride"])
def _swiglu_quantized_kernel(
    gate_up, rows_of, codes, scale, N, F, x_stride, codes_stride, scale_stride, written, ROWS: tl.constexpr,
    FLOOR: tl.constexpr, POW2: tl.constexpr, PDL: tl.constexpr,
):
    """`pointwise.swiglu._swiglu_kernel` for the rows of ROWS choices: no program looks at padding."""
    begin(PDL)
    choice = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = choice < N
    rows = tl.load(rows_of + choice, mask=real, other=0)
    group = tl.program_id(1)
    cols = group * 128 + tl.arange(0, 128)
    mask = real[:, None] & (cols < F)[None, :]
    at = gate_up + rows[:, None] * x_stride + cols[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
    y = tl.where(mask, to_bf16(gate * sigmoid32(gate) * up), 0.0)
    s = scale_from(tl.max(abs_bits(y), axis=1), FLOOR, POW2)
    q = quotient(y, s[:, None], True).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes + rows[:, None] * codes_stride + cols[None, :], q, mask=real[:, None] & (cols < written)[None, :])
    tl.store(scale + group.to(tl.int64) * scale_stride + rows, s, mask=real)


@triton.jit(do_not_specialize=["R"])
def _swiglu_kernel(
    grad, gate_up, tokens, total, out, R, F, x_stride, ROWS: tl.constexpr, BACKWARD: tl.constexpr, PDL: tl.constexpr,
):
    """`pointwise/swiglu.py`'s swiglu or its gradient, zeros in padding; rows beyond the last group are left alone."""
    begin(PDL)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    stop = tl.load(total)
    if tl.program_id(0) * ROWS < stop:
        cols = (tl.program_id(1) * 128 + tl.arange(0, 128))[None, :]
        real = tl.load(tokens + rows, mask=rows < R, other=-1) >= 0
        mask, written = real[:, None] & (cols < F), (rows < stop)[:, None] & (cols < F)
        at = gate_up + rows[:, None] * x_stride + cols
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
        if BACKWARD:
            g = tl.load(grad + rows[:, None] * F + cols, mask=mask, other=0.0).to(tl.float32)
            d_gate, d_up, _ = swiglu_gradient(gate, up, g)
            to = out + rows[:, None] * 2 * F + cols
            tl.store(to, d_gate.to(tl.bfloat16), mask=written)
            tl.store(to + F, d_up.to(tl.bfloat16), mask=written)
        else:
            tl.store(out + rows[:, None] * F + cols, (gate * sigmoid32(gate) * up).to(tl.bfloat16), mask=written)


@triton.jit
def _gate_rows_kernel(x, logits, out, D, x_stride, B: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    z = tl.zeros((B,), tl.float32) + tl.load(logits + row)
    sigmoid = tl.div_rn(tl.full([B], 1.0, tl.float32), exp32(z * -1.0) + 1.0)
    v = tl.load(x + row * x_stride + cols, mask=cols < D, other=0.0).to(tl.float32)
    tl.store(out + row * D + cols, (v * sigmoid).to(tl.bfloat16), mask=cols < D)


@triton.jit
def _transpose_kernel(x, out, size, cols, x_stride, out_stride, x_matrix, out_matrix, first, out_first):
    """One section of bytes [size, cols] of each of many matrices -> [cols, out_first + whole blocks of rows]."""
    matrix = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * 128 + tl.arange(0, 128)
    col = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    inside = col < cols
    at = x + matrix * x_matrix + (first + rows)[:, None].to(tl.int64) * x_stride + col[None, :]
    v = tl.load(at, mask=(rows < size)[:, None] & inside[None, :], other=0)
    to = out + matrix * out_matrix + col[:, None] * out_stride + (out_first + rows)[None, :]
    tl.store(to, tl.trans(v), mask=inside[:, None])


def column_tile(columns: int) -> int:
    return min(2048, max(128, triton.next_power_of_2(columns)))


def dispatch(x: Tensor, groups: PaddedGroups) -> Tensor:
    """`reference.dispatch`, with zeros between groups."""
    assert x.dtype == torch.bfloat16 and x.stride(1) == 1
    size, d = len(groups.tokens), x.shape[1]
    out, block = torch.empty(size, d, dtype=x.dtype, device=x.device), column_tile(d)
    if size:
        _copy_kernel[(size, triton.cdiv(d, block))](
            x, groups.tokens, groups.total, out, d, x.stride(0), B=block, num_warps=4, **LAUNCH
        )
    return out


def dispatch_quantize(x: Tensor, groups: PaddedGroups, pow2: bool) -> QTensor:
    """`reference.dispatch_quantize`, bit-equal in the rows of tokens; the others are not written."""
    assert x.dtype == torch.bfloat16 and x.stride(1) == 1
    size, d, block = len(groups.tokens), x.shape[1], column_tile(x.shape[1])
    codes, scale = new_codes(size, d, x.device), new_scale(size, triton.cdiv(d, BLOCK), x.device)
    if size:
        _copy_quantized_kernel[(x.shape[0], triton.cdiv(d, block))](
            x, groups.rows, codes.view(torch.uint8), scale, d, x.stride(0), codes.stride(0), scale.stride(1),
            codes.stride(0), K=groups.rows.shape[1], B=block, FLOOR=_FLOOR_BITS, POW2=pow2, num_warps=4,
            enable_fp_fusion=False, **LAUNCH,
        )
    return QTensor(codes, scale, "1x128", (size,), (d,))


def _summed(y: Tensor, weights: Tensor | None, groups: PaddedGroups, shared: Tensor | None = None) -> Tensor:
    assert y.dtype == torch.bfloat16 and y.stride(1) == 1 and (weights is None or weights.is_contiguous())
    (tokens, k), d = groups.rows.shape, y.shape[1]
    assert shared is None or (shared.shape == (tokens, d) and shared.dtype == y.dtype and shared.stride(1) == 1)
    out, block = torch.empty(tokens, d, dtype=y.dtype, device=y.device), min(1024, column_tile(d))
    if tokens:
        _sum_kernel[(tokens, triton.cdiv(d, block))](
            y, y if weights is None else weights, groups.rows, y if shared is None else shared, out, d, y.stride(0),
            y.stride(0) if shared is None else shared.stride(0), K=k, B=block, WEIGHTED=weights is not None,
            SHARED=shared is not None, num_warps=4, enable_fp_fusion=False, **LAUNCH,
        )
    return out


def dispatch_backward(d_rows: Tensor, groups: PaddedGroups) -> Tensor:
    """`reference.dispatch_backward`, bit-equal."""
    return _summed(d_rows, None, groups)


def combine(y: Tensor, weights: Tensor, groups: PaddedGroups, shared: Tensor | None = None) -> Tensor:
    """`reference.combine`, bit-equal."""
    return _summed(y, weights, groups, shared)


def combine_backward(dy: Tensor, y: Tensor, weights: Tensor, groups: PaddedGroups) -> tuple[Tensor, Tensor]:
    """`reference.combine_backward`: the rows bit-equal, zeros between groups; the weights' sums in one order."""
    assert dy.stride(1) == 1 and y.stride(1) == 1 and weights.is_contiguous() and dy.dtype == y.dtype == torch.bfloat16
    (tokens, k), d = groups.rows.shape, y.shape[1]
    d_rows, d_weights = torch.empty(y.shape, dtype=y.dtype, device=y.device), torch.empty_like(weights)
    block = triton.next_power_of_2(d)
    if tokens:
        _spread_kernel[(len(groups.tokens),)](
            dy, y, weights, groups.rows, groups.tokens, groups.total, d_rows, d_weights, d, dy.stride(0), y.stride(0),
            K=k, KB=triton.next_power_of_2(k), B=block, num_warps=4 if block <= 4096 else 8, enable_fp_fusion=False,
        )
    return d_rows, d_weights


def gate_rows(x: Tensor, logits: Tensor) -> Tensor:
    """`reference.gate_rows`, bit-equal."""
    (tokens, d), block = x.shape, 1024
    assert x.stride(1) == 1 and logits.is_contiguous() and logits.dtype == torch.float32
    out = torch.empty(tokens, d, dtype=x.dtype, device=x.device)
    if tokens:
        _gate_rows_kernel[(tokens, triton.cdiv(d, block))](
            x, logits, out, d, x.stride(0), B=block, num_warps=4, enable_fp_fusion=False, **LAUNCH
        )
    return out


def swiglu_quantize_rows(gate_up: Tensor, groups: PaddedGroups, pow2: bool) -> QTensor:
    """`reference.swiglu_quantize_rows`, bit-equal in the rows of tokens; the others are not written."""
    assert gate_up.dtype == torch.bfloat16 and gate_up.stride(1) == 1
    size, f, choices = gate_up.shape[0], gate_up.shape[1] // 2, groups.rows.numel()
    codes, scale = new_codes(size, f, gate_up.device), new_scale(size, triton.cdiv(f, BLOCK), gate_up.device)
    r = 16 if choices >= 16384 else 4
    if choices:
        _swiglu_quantized_kernel[(triton.cdiv(choices, r), triton.cdiv(f, BLOCK))](
            gate_up, groups.rows, codes.view(torch.uint8), scale, choices, f, gate_up.stride(0), codes.stride(0),
            scale.stride(1), codes.stride(0), ROWS=r, FLOOR=_FLOOR_BITS, POW2=pow2, num_warps=r // 4,
            enable_fp_fusion=False, **LAUNCH,
        )
    return QTensor(codes, scale, "1x128", (size,), (f,))


def _swiglu(gate_up: Tensor, grad: Tensor | None, groups: PaddedGroups) -> Tensor:
    assert gate_up.dtype == torch.bfloat16 and gate_up.stride(1) == 1 and (grad is None or grad.is_contiguous())
    size, f = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(size, f if grad is None else 2 * f, dtype=gate_up.dtype, device=gate_up.device)
    r = 16 if size >= 4096 else 4
    if size:
        _swiglu_kernel[(triton.cdiv(size, r), triton.cdiv(f, 128))](
            gate_up if grad is None else grad, gate_up, groups.tokens, groups.total, out, size, f, gate_up.stride(0),
            ROWS=r, BACKWARD=grad is not None, num_warps=r // 4, enable_fp_fusion=False, **LAUNCH,
        )
    return out


def swiglu_rows(gate_up: Tensor, groups: PaddedGroups) -> Tensor:
    """`reference.swiglu_rows`, bit-equal, with zeros between groups."""
    return _swiglu(gate_up, None, groups)


def swiglu_rows_backward(grad: Tensor, gate_up: Tensor, groups: PaddedGroups) -> Tensor:
    """`reference.swiglu_rows_backward`, bit-equal, with zeros between groups."""
    return _swiglu(gate_up, grad, groups)


def transpose_matrices(codes: Tensor, sections: tuple[int, ...], out: Tensor) -> None:
    """E4M3 [E, N, K] -> `out` [E, >= K, N'], each matrix's sections of rows padded to whole blocks with zeros."""
    source, out = codes.view(torch.uint8), out.view(torch.uint8)
    count, _, cols = codes.shape
    assert out.stride(2) == 1 and out.shape[2] == sum(padded(size) for size in sections)
    start = first = 0
    for size in sections:
        _transpose_kernel[(triton.cdiv(size, BLOCK), triton.cdiv(cols, BLOCK), count)](
            source, out, size, cols, source.stride(1), out.stride(1), source.stride(0), out.stride(0), start, first,
            num_warps=4,
        )
        start, first = start + size, first + padded(size)
