"""SwiGLU as Triton kernels, bit-equal to `reference`: alone, with the quantizer after it, and its gradient.

`swiglu_backward_act` makes in one kernel the gradient, and SwiGLU's output again in the tiles that down's weight
gradient reads. Nothing of the output is then kept for the backward pass, nor written in BF16.

Legend: `T` tokens, `F` feed-forward. FP fusion is off, as in `quantize/triton.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.launch import LAUNCH, begin
from jetrl.kernels.pointwise.triton import rows_view, sigmoid32
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.triton import (
    _FLOOR_BITS,
    abs_bits,
    new_codes,
    new_scale,
    new_tile_scale,
    pack4,
    quotient,
    scale_from,
    to_bf16,
)
from jetrl.precision.formats import BLOCK

# two programs on a multiprocessor, so that one reads while the other computes
OPTIONS = {"num_warps": 8, "maxnreg": 128}


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def _swiglu_kernel(
    gate_up, out, codes, scale, num_rows, x_stride, codes_stride, scale_stride, written,
    F: tl.constexpr, R: tl.constexpr, B: tl.constexpr, QUANT: tl.constexpr, FLOOR: tl.constexpr, POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    group = tl.program_id(1)
    cols = group * B + tl.arange(0, B)
    alive = (rows < num_rows)[:, None]
    mask = alive & (cols < F)[None, :]
    at = gate_up + rows[:, None] * x_stride + cols[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
    y = gate * sigmoid32(gate) * up
    if QUANT:
        y = tl.where(mask, to_bf16(y), 0.0)
        s = scale_from(tl.max(abs_bits(y), axis=1), FLOOR, POW2)
        q = quotient(y, s[:, None], True).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(codes + rows[:, None] * codes_stride + cols[None, :], q, mask=alive & (cols < written)[None, :])
        tl.store(scale + group.to(tl.int64) * scale_stride + rows, s, mask=rows < num_rows)
    else:
        tl.store(out + rows[:, None] * F + cols[None, :], y.to(tl.bfloat16), mask=mask)


@triton.jit
def swiglu_gradient(gate, up, g):
    """Of FP32 `g`, for gate and for up, and SwiGLU's output again; not rounded."""
    sig = sigmoid32(gate)
    silu = gate * sig
    return (g * up) * (sig * (gate * (1.0 - sig) + 1.0)), g * silu, silu * up


@triton.jit
def _swiglu_backward_kernel(grad, gate_up, out, x_stride, F: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * B + tl.arange(0, B)
    mask = cols < F
    gate = tl.load(gate_up + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * x_stride + F + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + row * F + cols, mask=mask, other=0.0).to(tl.float32)
    d_gate, d_up, _ = swiglu_gradient(gate, up, g)
    tl.store(out + row * 2 * F + cols, d_gate.to(tl.bfloat16), mask=mask)
    tl.store(out + row * 2 * F + F + cols, d_up.to(tl.bfloat16), mask=mask)


@triton.jit
def _quarter(
    grad, gate_up, saved_scale, up_saved_scale, out, row, cols, num_rows, grad_stride, x_stride, saved_first,
    F: tl.constexpr, SAVED: tl.constexpr,
):
    """Every fourth row of a tile: writes both parts of the gradient, returns SwiGLU's output (rounded, as FP32)."""
    alive = row < num_rows
    mask = alive[:, None] & (cols < F)[None, :]
    at = gate_up + row[:, None] * x_stride + cols[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
    if SAVED:
        s = tl.load(saved_scale + saved_first + row, mask=alive, other=0.0)
        s_up = tl.load(up_saved_scale + saved_first + row, mask=alive, other=0.0)
        gate = to_bf16(gate * s[:, None])
        up = to_bf16(up * s_up[:, None])
    g = tl.load(grad + row[:, None] * grad_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    d_gate, d_up, y = swiglu_gradient(gate, up, g)
    to = out + row[:, None] * (2 * F) + cols[None, :]
    tl.store(to, d_gate.to(tl.bfloat16), mask=mask)
    tl.store(to + F, d_up.to(tl.bfloat16), mask=mask)
    return to_bf16(y)


@triton.jit(do_not_specialize=["num_rows", "saved_stride", "act_scale_stride"])
def _swiglu_backward_act_kernel(
    grad, gate_up, saved_scale, up_saved_scale, out, words_t, act_scale, num_rows, grad_stride, x_stride, saved_stride,
    words_t_stride, act_scale_stride,
    F: tl.constexpr, FLOOR: tl.constexpr, POW2: tl.constexpr, SAVED: tl.constexpr,
):
    """128 tokens of 128 columns of gate and of up. SAVED: both are codes with a scale for each row and 128 columns."""
    group, block = tl.program_id(0), tl.program_id(1).to(tl.int64)
    four, cols = block * 32 + tl.arange(0, 32), group * 128 + tl.arange(0, 128)
    row, first = four * 4, group.to(tl.int64) * saved_stride
    a = _quarter(
        grad, gate_up, saved_scale, up_saved_scale, out, row, cols, num_rows, grad_stride, x_stride, first, F, SAVED
    )
    b = _quarter(
        grad, gate_up, saved_scale, up_saved_scale, out, row + 1, cols, num_rows, grad_stride, x_stride, first, F, SAVED
    )
    c = _quarter(
        grad, gate_up, saved_scale, up_saved_scale, out, row + 2, cols, num_rows, grad_stride, x_stride, first, F, SAVED
    )
    d = _quarter(
        grad, gate_up, saved_scale, up_saved_scale, out, row + 3, cols, num_rows, grad_stride, x_stride, first, F, SAVED
    )
    top = tl.maximum(tl.maximum(abs_bits(a), abs_bits(b)), tl.maximum(abs_bits(c), abs_bits(d)))
    s = scale_from(tl.max(tl.max(top, axis=0), axis=0), FLOOR, POW2)
    tl.store(act_scale + group.to(tl.int64) * act_scale_stride + block, s)
    word = pack4(quotient(a, s, True), quotient(b, s, True), quotient(c, s, True), quotient(d, s, True))
    to = words_t + cols[:, None].to(tl.int64) * words_t_stride + four[None, :]
    tl.store(to, tl.trans(word), mask=(cols < F)[:, None])


def swiglu_backward_act(grad: Tensor, gate_up: Tensor | QTensor, pow2_t: bool) -> tuple[Tensor, QTensor]:
    """`reference.swiglu_backward_act`, bit-equal."""
    (rows, f), device = grad.shape, grad.device
    saved, groups = isinstance(gate_up, QTensor), triton.cdiv(f, BLOCK)
    x, x_scale = (gate_up.codes, gate_up.scale) if isinstance(gate_up, QTensor) else (gate_up, grad)
    assert x.shape == (rows, 2 * f) and grad.stride(1) == x.stride(1) == 1 and rows > 0
    assert grad.dtype == torch.bfloat16 and (x_scale.shape == (rows, 2 * groups) if saved else x.dtype == grad.dtype)
    out = torch.empty(rows, 2 * f, dtype=grad.dtype, device=device)
    codes, scale = new_codes(f, rows, device), new_tile_scale(f, rows, device)
    words = codes.as_strided((f, codes.stride(0)), (codes.stride(0), 1)).view(torch.int32)
    _swiglu_backward_act_kernel[(groups, triton.cdiv(rows, BLOCK))](
        grad, x, x_scale, x_scale[:, groups:] if saved else grad, out, words, scale, rows, grad.stride(0), x.stride(0),
        x_scale.stride(1), words.stride(0), scale.stride(0), F=f, FLOOR=_FLOOR_BITS, POW2=pow2_t, SAVED=saved,
        enable_fp_fusion=False, **OPTIONS,
    )
    return out, QTensor(codes, scale, "128x128", (f,), (rows,))


def _swiglu(gate_up: Tensor, quantize: bool, pow2: bool) -> Tensor | QTensor:
    rows_view(gate_up)
    rows, f = gate_up.shape[0], gate_up.shape[1] // 2
    out = codes = scale = gate_up
    if quantize:
        codes, scale = new_codes(rows, f, gate_up.device), new_scale(rows, triton.cdiv(f, 128), gate_up.device)
    else:
        out = torch.empty(rows, f, dtype=gate_up.dtype, device=gate_up.device)
    r = 16 if rows >= 4096 else 8
    if rows:
        _swiglu_kernel[(triton.cdiv(rows, r), triton.cdiv(f, 128))](
            gate_up, out, codes.view(torch.uint8) if quantize else codes, scale, rows, gate_up.stride(0),
            codes.stride(0), scale.stride(1), codes.stride(0), F=f, R=r, B=128, QUANT=quantize, FLOOR=_FLOOR_BITS,
            POW2=pow2, num_warps=4, enable_fp_fusion=False, **LAUNCH,
        )
    return QTensor(codes, scale, "1x128", (rows,), (f,)) if quantize else out


def swiglu(gate_up: Tensor) -> Tensor:
    """`reference.swiglu` of `gate_up` [T, 2F]."""
    y = _swiglu(gate_up, False, False)
    assert isinstance(y, Tensor)
    return y


def swiglu_quantize(gate_up: Tensor, pow2: bool) -> QTensor:
    """`quantize_act(swiglu(gate_up))` in one kernel."""
    y = _swiglu(gate_up, True, pow2)
    assert isinstance(y, QTensor)
    return y


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """`reference.swiglu_backward`, bit-equal."""
    rows_view(gate_up)
    f = grad.shape[1]
    out = torch.empty(grad.shape[0], 2 * f, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(f))
    _swiglu_backward_kernel[(grad.shape[0], triton.cdiv(f, block))](
        grad, gate_up, out, gate_up.stride(0), F=f, B=block, num_warps=4, enable_fp_fusion=False
    )
    return out
