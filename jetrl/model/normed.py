"""A norm and the FP8 linear after it as one autograd function: the bits of one after the other, with less kept.

Forward is the rollout's kernel: residual sum, norm and row codes in one, and nothing of the norm's output is written.
Kept is the residual stream, which the norm's gradient reads anyway, and `inv_rms` of each row; the codes that wgrad
reads are made again from both (`normed_t`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.ops import quantize_act, quantize_act_t
from jetrl.kernels.update.gradient import grad_dtype
from jetrl.model.linear import FlowLinear
from jetrl.model.published import Norm
from jetrl.precision.recipe import LinearRecipe
from jetrl.types import Side


class NormBefore(NamedTuple):
    """The norm whose output an FP8 linear reads; `recipe` is the linear's."""

    norm: Norm
    eps: float
    recipe: LinearRecipe

    def forward(self, x: Tensor, residual: Tensor) -> tuple[QTensor, Tensor, Tensor]:
        """Row codes, the stream, and `inv_rms` of its rows."""
        pow2 = self.recipe.fprop.left.pow2
        return backend_of(x).add_rms_norm_kept(x, residual, self.norm.factor, self.eps, pow2)

    def again(self, total: Tensor, inverses: Tensor) -> QTensor:
        """What wgrad reads of the norm's output."""
        pow2, tile = self.recipe.saved_activation.pow2, self.recipe.wgrad_tiles
        return backend_of(total).normed_t(total, inverses, self.norm.factor, pow2, tile)

    def backward(self, grad: Tensor, total: Tensor, stream: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gradients of the stream before the sum and of the norm's weight; `stream` is that of the stream after it."""
        more = None if stream is None else stream.contiguous()
        dx, dw = backend_of(total).rms_norm_backward(grad, total, self.norm.factor, self.eps, more)
        return dx, dw.to(grad_dtype(self.norm.weight))


def norm_before(
    norm: Norm, eps: float, linear: FlowLinear, residual: Tensor | None, side: Side
) -> NormBefore | None:
    """For `linear` after `norm`, if it is FP8 and trained, and there is a residual to add; None else."""
    recipe = linear.recipes[side]
    if recipe is None or residual is None or not torch.is_grad_enabled() or not linear.master.trained:
        return None
    return NormBefore(norm, eps, recipe)


class _NormedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, norm_master: Tensor, master: Tensor, linear: FlowLinear,
        before: NormBefore,
    ) -> tuple[Tensor, Tensor]:
        codes, total, inverses = before.forward(x, residual)
        ctx.save_for_backward(total, inverses)
        ctx.linear, ctx.before = linear, before
        ctx.set_materialize_grads(False)
        return gemm.fp8_gemm(codes, linear.fp8_operand(), x.dtype), total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, stream: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:  # nothing used the output
            return stream, stream, None, None, None, None
        linear, before, dy = ctx.linear, ctx.before, dy.contiguous()
        total, inverses = ctx.saved_tensors
        recipe = before.recipe
        d_normed = gemm.fp8_gemm(
            quantize_act(dy, recipe.dgrad.left.pow2, linear.sections), linear.fp8_operand_t(), dy.dtype
        )
        dw = linear.add_gradient(quantize_act_t(dy, recipe.wgrad.left.pow2), before.again(total, inverses))
        dx, d_norm = before.backward(d_normed, total, stream)
        return dx, dx, d_norm, dw, None, None


def normed_linear(x: Tensor, residual: Tensor, linear: FlowLinear, before: NormBefore) -> tuple[Tensor, Tensor]:
    """`linear(rms_norm(x + residual))` and the sum, with gradients; `before` by `norm_before`."""
    y, total = _NormedLinear.apply(x, residual, before.norm.weight, linear.weight, linear, before)
    return linear.biased(y), total
