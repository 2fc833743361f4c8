"""The feed-forward block: `down(silu(gate) * up)` of the normed stream."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.pointwise import ops as pointwise
from jetrl.kernels.qtensor import Coded, QTensor
from jetrl.model.block import Block, Build, Context, Piece, Tap, no_tap
from jetrl.model.fused_mlp import fused_mlp, fused_recipe, normed_mlp
from jetrl.model.linear import FlowLinear
from jetrl.model.normed import norm_before
from jetrl.spec import ModelSpec
from jetrl.types import Side


class MLP(Block):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.gate_up = build.linear("gate_up")
        self.down = build.linear("down")

    def forward(self, x: Tensor, residual: Tensor | None, context: Context, tap: Tap) -> tuple[Tensor, Tensor]:
        at, side = self.at, context.batch.side
        recipe = fused_recipe(self.gate_up, self.down, side) if tap is no_tap and torch.is_grad_enabled() else None
        if recipe is not None and residual is not None:
            before = norm_before(self.norm, self.spec.rms_norm_eps, self.gate_up, residual, side)
            if before is not None:
                return normed_mlp(x, residual, self.gate_up, self.down, recipe, before)
        y, residual = self.add_norm(x, residual, tap)
        if recipe is not None:
            return fused_mlp(y, self.gate_up, self.down, recipe), residual
        y = self.gate_up(y, side)
        tap(f"{at}.gate_up", y)
        y = pointwise.swiglu(y)
        tap(f"{at}.swiglu", y)
        y = self.down(y, side)
        tap(f"{at}.down", y)
        return y, residual

    def infer(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        side = context.batch.side
        normed, residual = self.add_norm_for(self.gate_up, x, residual, side)
        return self.down.infer(infer_swiglu(normed, self.gate_up, self.down, side), side), residual

    @staticmethod
    def checkpoint_names(spec: ModelSpec, layer: int) -> dict[str, tuple[Piece, ...]]:
        D, F, at = spec.hidden_size, spec.intermediate_size, f"model.layers.{layer}."
        return {
            "norm.weight": (Piece(f"{at}post_attention_layernorm.weight", (D,)),),
            "gate_up.weight": tuple(Piece(f"{at}mlp.{x}_proj.weight", (F, D)) for x in ("gate", "up")),
            "down.weight": (Piece(f"{at}mlp.down_proj.weight", (D, F)),),
        }


def infer_swiglu(
    x: Tensor | QTensor | Coded, gate_up: FlowLinear, down: FlowLinear, side: Side
) -> Tensor | QTensor | Coded:
    """`swiglu(gate_up(x))` [T, F] without gradients, as `down` reads it, from as few kernels as there are for that."""
    reads = down.reads(side)
    if gate_up.lora is not None and gate_up.bias is None:
        return gate_up.lora.finish_swiglu(*gate_up.base(x, side), reads)
    y = gate_up.infer(x, side)
    if reads.values or reads.pow2 is None:
        return pointwise.swiglu(y)
    return pointwise.swiglu_quantize(y, reads.pow2)
