"""gate_up, SwiGLU and down as one autograd function, for `quant.wgrad = "tile"`: the bits of one after another.

Forward is the rollout's kernels, with SwiGLU's output written as codes only. Backward makes SwiGLU's gradient and, for
down's wgrad, SwiGLU's output again in one kernel (`swiglu_backward_act`), so that nothing of the output is kept. Kept
are gate_up's input, in tiles (or, with the norm in the same function, the residual stream: `model.normed`), and its
output: in BF16, or with `quant.saved_gate_up = "fp8"` as codes with a scale for 128 columns of a row, from which both
are then made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl.kernels.dispatch import backend_of
from jetrl.kernels.gemm import ops as gemm
from jetrl.kernels.qtensor import QTensor
from jetrl.kernels.quantize.ops import quantize_act, quantize_act_t
from jetrl.model.linear import FlowLinear, input_for_wgrad, saved_activation
from jetrl.model.normed import NormBefore
from jetrl.precision.recipe import LinearRecipe
from jetrl.types import Side


class _FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, norm_master: Tensor | None, gate_up_master: Tensor,
        down_master: Tensor, gate_up: FlowLinear, down: FlowLinear, recipe: LinearRecipe, before: NormBefore | None,
    ) -> tuple[Tensor, Tensor | None]:
        rows, total = recipe.fprop.left.pow2, None
        ctx.layers, ctx.recipe, ctx.before = (gate_up, down), recipe, before
        ctx.set_materialize_grads(False)
        if before is not None:
            assert residual is not None
            codes, total, inverses = before.forward(x, residual)
            source = [total, inverses]
        else:
            x_t, codes = input_for_wgrad(recipe, x), quantize_act(x, rows)
            source = [x_t.codes, x_t.scale]
        hidden = gemm.fp8_gemm(codes, gate_up.fp8_operand(), x.dtype)
        kept = [hidden]
        if recipe.saved_out.is_quantized:
            q = quantize_act(hidden, recipe.saved_out.pow2, gate_up.sections)
            kept = [q.codes, q.scale]
        ctx.save_for_backward(*source, *kept)
        return gemm.fp8_gemm(backend_of(x).swiglu_quantize(hidden, rows), down.fp8_operand(), x.dtype), total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, stream: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:  # nothing used the output
            return stream, stream, *[None] * 7
        (gate_up, down), recipe, before, dy = ctx.layers, ctx.recipe, ctx.before, dy.contiguous()
        first, second, *kept = ctx.saved_tensors
        hidden: Tensor | QTensor = kept[0]
        if recipe.saved_out.is_quantized:
            hidden = QTensor(kept[0], kept[1], "1x128", (kept[0].shape[0],), gate_up.sections)
        rows, columns = recipe.dgrad.left.pow2, recipe.wgrad.left.pow2
        d_act = gemm.fp8_gemm(quantize_act(dy, rows, down.sections), down.fp8_operand_t(), dy.dtype)
        d, act_t = backend_of(dy).swiglu_backward_act(d_act, hidden, columns)
        d_down = down.add_gradient(quantize_act_t(dy, columns), act_t)
        dx = d_norm = None
        if ctx.needs_input_grad[0] or before is not None:
            dx = gemm.fp8_gemm(quantize_act(d, rows, gate_up.sections), gate_up.fp8_operand_t(), dy.dtype)
        x_t = saved_activation(recipe, first, second) if before is None else before.again(first, second)
        d_gate_up = gate_up.add_gradient(quantize_act_t(d, columns), x_t)
        if before is not None:
            del d
            dx, d_norm = before.backward(dx, first, stream)
        return dx, None if before is None else dx, d_norm, d_gate_up, d_down, None, None, None, None


def fused_recipe(gate_up: FlowLinear, down: FlowLinear, side: Side) -> LinearRecipe | None:
    """The recipe of both linears, if `fused_mlp` computes them: FP8 with tiles for wgrad, no bias, both trained."""
    recipe = gate_up.recipes[side]
    if recipe is None or recipe != down.recipes[side] or not recipe.wgrad_tiles:
        return None
    plain = gate_up.bias is None and down.bias is None
    return recipe if plain and gate_up.master.trained and down.master.trained else None


def fused_mlp(x: Tensor, gate_up: FlowLinear, down: FlowLinear, recipe: LinearRecipe) -> Tensor:
    """`down(swiglu(gate_up(x)))` of `x` [T, D], with gradients; `recipe` by `fused_recipe`."""
    masters = gate_up.weight, down.weight
    return _FusedMLP.apply(x, None, None, *masters, gate_up, down, recipe, None)[0]


def normed_mlp(
    x: Tensor, residual: Tensor, gate_up: FlowLinear, down: FlowLinear, recipe: LinearRecipe, before: NormBefore
) -> tuple[Tensor, Tensor]:
    """`fused_mlp(rms_norm(x + residual))` and the sum; `before` by `normed.norm_before`."""
    masters = before.norm.weight, gate_up.weight, down.weight
    return _FusedMLP.apply(x, residual, *masters, gate_up, down, recipe, before)
