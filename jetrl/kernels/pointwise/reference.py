"""Gradients of norms and RoPE on a CPU, and ops that do several things at once: one after another here."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels import reference as ref
from jetrl.kernels.qtensor import Coded, QTensor
from jetrl.kernels.quantize.reference import quantize_act, quantize_act_t
from jetrl.kernels.reference import add, rms_norm, swiglu


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, more: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm` for x (rounded) and weight (FP32); they pass straight through the inner rounding.

    `more`, another gradient of x, is added to the first.
    """
    inv = ref.inv_rms(x, eps)
    g, n = grad.to(torch.float32), x.to(torch.float32) * inv
    gw = g * weight.to(torch.float32)
    dx = ((gw - n * (gw * n).mean(-1, keepdim=True)) * inv).to(x.dtype)
    return dx if more is None else add(dx, more), (g * n).flatten(0, -2).sum(0)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`r = rounded(x + residual)`; returns (`rms_norm(r)`, `r`)."""
    total = ref.add(x, residual)
    return ref.rms_norm(total, weight, eps), total


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pow2: bool
) -> tuple[QTensor, Tensor]:
    total = x if residual is None else add(x, residual)
    return quantize_act(rms_norm(total, weight, eps), pow2), total


def add_rms_norm_coded(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pow2: bool
) -> tuple[Coded, Tensor]:
    total = x if residual is None else add(x, residual)
    normed = rms_norm(total, weight, eps)
    return Coded(normed, quantize_act(normed, pow2)), total


def add_rms_norm_kept(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, pow2: bool
) -> tuple[QTensor, Tensor, Tensor]:
    """`add_rms_norm_quantize`, and `inv_rms` of each row, FP32 [T], for `normed_t`."""
    total = ref.add(x, residual)
    return quantize_act(rms_norm(total, weight, eps), pow2), total, ref.inv_rms(total, eps)[:, 0]


def normed_t(x: Tensor, inverses: Tensor, weight: Tensor, pow2: bool, tile: bool) -> QTensor:
    """`quantize_act_t(rms_norm(x, weight, eps), pow2, tile)`, given `inv_rms` of the rows of `x` [T, D], FP32 [T]."""
    normed = (x.to(torch.float32) * inverses[:, None]).to(x.dtype)
    return quantize_act_t((normed.to(torch.float32) * weight.to(torch.float32)).to(x.dtype), pow2, tile)


def swiglu_quantize(gate_up: Tensor, pow2: bool) -> QTensor:
    return quantize_act(swiglu(gate_up), pow2)


def rope_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse rotation."""
    return ref.rope(grad, cos, -sin)
