"""The feed-forward block: down(silu(gate) * up), gate and up in one GEMM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jetrl.precision.blocks.block import Block, Linear
from jetrl.precision.formats import BF16
from jetrl.precision.recipe import Role
from jetrl.spec import ModelSpec

if TYPE_CHECKING:
    from jetrl.precision.builder import BlockBackward, BlockForward
    from jetrl.precision.picture.pen import Graph, Pen


class MLP(Block):
    kind, name = "mlp", "mlp"
    roundings = {
        "swiglu": "fp32 products, rounded once to bf16",
        "swiglu_backward": "fp32 products, rounded once to bf16",
    }

    def linears(self, spec: ModelSpec) -> Mapping[Role, Linear]:
        return {
            "gate_up": Linear(spec.gate_up_sections, spec.hidden_size),
            "down": Linear((spec.hidden_size,), spec.intermediate_size, writes_residual=True),
        }

    def forward(self, flow: BlockForward, x: str) -> str:
        product = flow.op("swiglu", "swiglu", {"gate_up": flow.linear("gate_up", x)})
        return flow.linear("down", product)

    def backward(self, flow: BlockBackward, dy: str) -> str:
        dx = flow.linear("down", dy, "swiglu")
        linear = flow.recipe.linear(flow.layer, "gate_up", flow.side)
        kept = flow.saved("gate_up", BF16 if linear is None else linear.saved_out)
        dx = flow.op("swiglu.dgrad", "swiglu_backward", {"dy": dx, "gate_up": kept})
        return flow.linear("gate_up", dx, "mlp_norm")

    def rows(self, pen: Pen) -> list[str]:
        return [*pen.linear_rows("gate_up"), "swiglu", *pen.linear_rows("down")]

    def draw_forward(self, pen: Pen, graph: Graph, x: float) -> str:
        pen.linear(graph, x, "gate_up", "mlp_norm")
        pen.operator(graph, x, "swiglu", "gate_up", "gate_up", "silu(gate) · up")
        return pen.linear(graph, x, "down", "swiglu")

    def draw_backward(self, pen: Pen, below: str) -> str:
        below = pen.linear_backward("down", below, "swiglu")
        below = pen.gradient("swiglu", "swiglu.dgrad", "dy", below)
        return pen.linear_backward("gate_up", below, "mlp_norm")
