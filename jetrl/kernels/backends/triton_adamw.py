"""AdamW as one pass over a parameter: 8 to 16 bytes read and 6 to 12 written an element."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels take pointers and compile-time numbers, for which there are no types)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.adamw import AdamWStep


@triton.jit
def _adamw_kernel(
    param, grad, exp_avg, exp_avg_sq, size, c1, beta2, c2, correction2, eps, decay, rate, B: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < size
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
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


def adamw_step_(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: AdamWStep) -> None:
    """`reference.adamw_step_`, bit-equal."""
    (beta1, beta2), size = numbers.betas, param.numel()
    _adamw_kernel[(triton.cdiv(size, 2048),)](
        param, grad, exp_avg, exp_avg_sq, size, 1 - beta1, beta2, 1 - beta2, 1 - beta2**numbers.step, numbers.eps,
        1 - numbers.lr * numbers.weight_decay, -numbers.lr / (1 - beta1**numbers.step), B=2048, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip
