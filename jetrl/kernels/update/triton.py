"""Kernels for gradients and the optimizer: addition, sums of squares for the norm, AdamW in one pass per parameter."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.update.adamw import AdamWStep
from jetrl.kernels.update.squares import ROW


@triton.jit
def _adamw_kernel(
    param, grad, exp_avg, exp_avg_sq, size, factor, c1, beta2, c2, correction2, eps, decay, rate, B: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < size
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
    g = g.to(grad.dtype.element_ty).to(tl.float32)  # as a product that is stored, and read again
    m = tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(param + at, mask=inside, other=0.0).to(tl.float32)
    m = m + (g - m) * c1
    v = v * beta2 + (g * g) * c2
    root = tl.sqrt_rn(tl.div_rn(v, correction2 + tl.zeros_like(v))) + eps
    p = p * decay + tl.div_rn(m * rate, root)
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    tl.store(param + at, p.to(param.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["out"])  # a part of one array for all parameters
def _squares_kernel(x, out, size, ROW: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = row * ROW + tl.arange(0, ROW)
    v = tl.load(x + at, mask=at < size, other=0.0).to(tl.float64)
    tl.store(out + row, tl.sum(v * v, axis=0))


@triton.jit
def _add_kernel(grad, x, size, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < size
    more = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) + more
    tl.store(grad + at, total.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def _two_kernel(x, y, out, size, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < size
    more = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + more, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _sum_kernel(total, parts, size, count, FIRST: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < size
    place = at  # in `parts`, in 64 bits
    if FIRST:
        held = tl.load(parts + place, mask=inside, other=0.0)
        place += size
    else:
        held = tl.load(total + at, mask=inside, other=0.0)
    for _ in range(1 if FIRST else 0, count):
        part = tl.load(parts + place, mask=inside, other=0.0)
        held = (held.to(tl.float32) + part.to(tl.float32)).to(held.dtype)
        place += size
    tl.store(total + at, held, mask=inside)


def add_in_order(total: Tensor, parts: Tensor, first: bool) -> None:
    """`kernels.update.sums.add_in_order`, in one pass over memory."""
    assert total.is_contiguous() and parts.is_contiguous()
    size = total.numel()
    _sum_kernel[(triton.cdiv(size, 2048),)](
        total, parts, size, len(parts), FIRST=first, B=2048, num_warps=8, enable_fp_fusion=False
    )


def add_rounded(grad: Tensor, x: Tensor) -> None:
    """`grad = rounded(grad + x)` in one pass, `grad` and `x` FP32 or BF16, contiguous and of one shape."""
    assert grad.shape == x.shape and grad.is_contiguous() and x.is_contiguous()
    _add_kernel[(triton.cdiv(x.numel(), 2048),)](grad, x, x.numel(), B=2048, num_warps=8, enable_fp_fusion=False)


def sum_of_two(x: Tensor, y: Tensor) -> Tensor:
    """`x + y` of two BF16 matrices in FP32, where it is exact but for one rounding."""
    assert x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous() and y.is_contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _two_kernel[(triton.cdiv(x.numel(), 2048),)](x, y, out, x.numel(), B=2048, num_warps=8, enable_fp_fusion=False)
    return out


def row_squares(x: Tensor, out: Tensor) -> None:
    """`kernels.update.squares.row_squares`."""
    _squares_kernel[(out.shape[0],)](x, out, x.numel(), ROW=ROW, num_warps=8, enable_fp_fusion=False)


def adamw_step_(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: AdamWStep) -> None:
    """`reference.adamw_step_`, bit-equal."""
    (beta1, beta2), size = numbers.betas, param.numel()
    _adamw_kernel[(triton.cdiv(size, 2048),)](
        param, grad, exp_avg, exp_avg_sq, size, numbers.factor, 1 - beta1, beta2, 1 - beta2, 1 - beta2**numbers.step,
        numbers.eps, 1 - numbers.lr * numbers.weight_decay, -numbers.lr / (1 - beta1**numbers.step), B=2048,
        num_warps=8, enable_fp_fusion=False,
    )
