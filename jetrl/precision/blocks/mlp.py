"""The feed-forward block: down(silu(gate) * up), gate and up in one GEMM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jetrl.precision.blocks.block import Block, Linear, TrainingPass
from jetrl.precision.formats import BF16
from jetrl.precision.recipe import Role
from jetrl.spec import ModelSpec

if TYPE_CHECKING:
    from jetrl.precision.builder import BlockBackward, BlockForward


class MLP(Block):
    kind, name = "mlp", "mlp"
    roundings = {
        "swiglu": "fp32 products, rounded once to bf16",
        "swiglu_backward": "fp32 products, rounded once to bf16",
    }
    formulas = {"swiglu": "silu(gate) · up"}

    def linears(self, spec: ModelSpec) -> Mapping[Role, Linear]:
        return {
            "gate_up": Linear(spec.gate_up_sections, spec.hidden_size, projections=("gate_proj", "up_proj")),
            "down": Linear(
                (spec.hidden_size,), spec.intermediate_size, writes_residual=True, projections=("down_proj",),
            ),
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

    def saved_bytes(self, of: TrainingPass) -> float:
        """What gate_up reads, gate and up (in BF16, or as codes with a scale for 128), and SwiGLU's output, which
        `model.fused_mlp` makes again."""
        f, into = of.spec.intermediate_size, of.linear("down")
        fused = into is not None and into.wgrad_tiles and of.recipe.lora is None
        kept = 4 if into is None or not into.saved_out.is_quantized or not fused else 2 + 2 / 32
        total = of.kept_normed("gate_up", fused) + kept * f
        return total + (0 if fused else of.kept_input("down", f))
