"""dispatch, the FP8 experts and combine as one autograd function: the bits of one after another.

Forward is the rollout's kernels: no row is copied, and SwiGLU's output is written as codes only. Kept are the tokens
[T, D], which the router keeps anyway, gate_up's output [R, 2F] and down's [R, D]. Backward makes codes of what it needs
where it is read: of combine's and of SwiGLU's gradient both ways, of the rows of tokens and of SwiGLU's output for
wgrad. Rows of padding (`experts.groups.Groups`) may hold anything on the way; wgrad's operands have zeros there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl.kernels.dispatch import experts_backend_of
from jetrl.kernels.experts import ops as moe
from jetrl.kernels.experts.groups import Groups
from jetrl.precision.blocks.moe import one_recipe
from jetrl.precision.recipe import LinearRecipe
from jetrl.types import Side

if TYPE_CHECKING:
    from jetrl.model.moe import ExpertLinear


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, gate_up_master: Tensor, down_master: Tensor, gate_up: ExpertLinear,
        down: ExpertLinear, recipe: LinearRecipe, groups: Groups, shared: Tensor | None,
    ) -> Tensor:
        pow2 = recipe.fprop.left.pow2
        ctx.layers, ctx.recipe, ctx.groups = (gate_up, down), recipe, groups
        rows = moe.dispatch_quantize(x, groups, pow2)
        hidden = moe.grouped_fp8_gemm(rows, gate_up.fp8_operand(), groups, x.dtype)
        del rows
        out = moe.grouped_fp8_gemm(moe.swiglu_quantize(hidden, groups, pow2), down.fp8_operand(), groups, x.dtype)
        ctx.save_for_backward(x, weights, hidden, out)
        return experts_backend_of(out).combine(out, weights, groups, shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, hidden, out = ctx.saved_tensors
        (gate_up, down), recipe, groups = ctx.layers, ctx.recipe, ctx.groups
        along, across = recipe.dgrad.left.pow2, recipe.wgrad.left.pow2
        dy_q, dy_t, d_weights = moe.combine_backward_quantize(dy.contiguous(), out, weights, groups, along, across)
        d_act = moe.grouped_fp8_gemm(dy_q, down.fp8_operand_t(), groups, dy.dtype)
        del dy_q
        d_q, d_t, act_t = moe.swiglu_backward_quantize(d_act, hidden, groups, along, across)
        del d_act
        d_down = down.add_rows_gradient(dy_t, act_t, groups)
        del dy_t, act_t
        dx = None
        if ctx.needs_input_grad[0]:
            d_rows = moe.grouped_fp8_gemm(d_q, gate_up.fp8_operand_t(), groups, dy.dtype)
            dx = experts_backend_of(d_rows).dispatch_backward(d_rows, groups)
            del d_rows
        d_gate_up = gate_up.add_rows_gradient(d_t, moe.dispatch_quantize_t(x, groups, across), groups)
        d_shared = dy if ctx.needs_input_grad[8] else None
        return dx, d_weights, d_gate_up, d_down, None, None, None, None, d_shared


def fused_experts_recipe(gate_up: ExpertLinear, down: ExpertLinear, side: Side) -> LinearRecipe | None:
    """The recipe of both linears, if `fused_experts` computes them: FP8, and both trained."""
    recipe = one_recipe(gate_up.recipes[side], down.recipes[side])
    if recipe is None:
        return None
    assert recipe.saved_activation.pow2 == recipe.wgrad.left.pow2, "both operands of wgrad have one kind of scale"
    return recipe if gate_up.master.trained and down.master.trained else None


def fused_experts(
    x: Tensor, weights: Tensor, gate_up: ExpertLinear, down: ExpertLinear, recipe: LinearRecipe, groups: Groups,
    shared: Tensor | None = None,
) -> Tensor:
    """`combine(down(swiglu(gate_up(dispatch(x)))), weights, shared)` of `x` and perhaps `shared` [T, D], `weights`
    [T, k], with gradients; `recipe` by `fused_experts_recipe`."""
    return _FusedExperts.apply(x, weights, gate_up.weight, down.weight, gate_up, down, recipe, groups, shared)
