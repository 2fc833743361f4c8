"""The experts of DeepSeek's layers: chosen by sigmoids with a bias, or by a softmax, beside shared ones.

The bias [E] is FP32, published and never trained: an update that balanced the load by it would be another policy. The
shared experts are one MLP; its row is added to the chosen experts' after them, before the one rounding.

Legend: `T` tokens, `D` model, `E` experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.experts import ops as moe
from jetrl.kernels.experts.reference import Choice
from jetrl.kernels.pointwise import ops as pointwise
from jetrl.model.block import Build, Piece, Tap, no_tap
from jetrl.model.fused_mlp import fused_mlp, fused_recipe
from jetrl.model.mlp import infer_swiglu
from jetrl.model.moe import MoE
from jetrl.model.published import Published
from jetrl.precision.blocks.deepseek_moe import deepseek_of
from jetrl.spec import ModelSpec
from jetrl.types import Side


class SharedMoE(MoE):
    """Experts beside shared ones, which are one MLP."""

    def add_shared(self, build: Build) -> None:
        """The shared experts' linears, if there are any: parameters keep their order, so this comes where they are."""
        if self.experts.shared_size:
            self.shared_gate_up, self.shared_down = build.linear("shared_gate_up"), build.linear("shared_down")

    def shared(self, y: Tensor, side: Side, tap: Tap) -> Tensor | None:
        """The shared experts' rows [T, D] of the normed stream `y` [T, D]."""
        if not self.experts.shared_size:
            return None
        into, out, grad = self.shared_gate_up, self.shared_down, torch.is_grad_enabled()
        if tap is no_tap and grad and (recipe := fused_recipe(into, out, side)) is not None:
            return fused_mlp(y, into, out, recipe)
        if tap is no_tap and not grad:
            return out.infer(infer_swiglu(y, into, out, side), side)
        hidden = into(y, side)
        tap(f"{self.at}.shared_gate_up", hidden)
        product = pointwise.swiglu(hidden)
        tap(f"{self.at}.shared_swiglu", product)
        row = out(product, side)
        tap(f"{self.at}.shared_down", row)
        return row


class DeepSeekMoE(SharedMoE):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.more, e = deepseek_of(build.spec), self.experts
        self.choice = Choice(
            e.per_token, self.more.groups, self.more.kept_groups, e.normalized, self.more.scaling
        )
        if self.more.bias:
            self.router_bias = Published((e.count,), None, torch.float32)
        self.add_shared(build)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.more.sigmoid:
            bias = self.router_bias.published if self.more.bias else logits.new_zeros(logits.shape[-1])
            return moe.route_sigmoid(logits, bias, self.choice)
        chosen, weights = super().choose(logits)
        return chosen, weights if self.more.scaling == 1.0 else weights * self.more.scaling

    @staticmethod
    def checkpoint_names(spec: ModelSpec, layer: int) -> dict[str, tuple[Piece, ...]]:
        assert spec.experts is not None
        names, more = MoE.checkpoint_names(spec, layer), deepseek_of(spec)
        D, F, at = spec.hidden_size, spec.experts.shared_size, f"model.layers.{layer}.mlp."
        if more.bias:
            names["router_bias.weight"] = (Piece(f"{at}gate.e_score_correction_bias", (spec.experts.count,), True),)
        if F:
            own = f"{at}shared_experts."
            names["shared_gate_up.weight"] = tuple(Piece(f"{own}{x}_proj.weight", (F, D)) for x in ("gate", "up"))
            names["shared_down.weight"] = (Piece(f"{own}down_proj.weight", (D, F)),)
        return names
