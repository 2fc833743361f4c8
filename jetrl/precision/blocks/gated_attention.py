"""The attention block of Qwen3.5: attention whose output is multiplied by the sigmoid of a gate.

The gate of a head is projected next to its query; only the beginning of a head is rotated (`ModelSpec.rotary_dim`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetrl.precision.blocks.attention import Attention
from jetrl.precision.blocks.block import TrainingPass

if TYPE_CHECKING:
    from jetrl.precision.builder import BlockBackward, BlockForward


class GatedAttention(Attention):
    kind, name = "gated_attention", "attn"
    roundings = Attention.roundings | {
        "output_gate": "fp32 product, rounded once to bf16",
        "output_gate_backward": "fp32 products, rounded once to bf16",
    }
    formulas = {**Attention.formulas, "output_gate": "x · sigmoid(gate)"}

    def _output(self, flow: BlockForward, a: str) -> str:
        return flow.op("output_gate", "output_gate", {"x": a, "gate": flow.at("qkv")})

    def _output_backward(self, flow: BlockBackward, dy: str) -> tuple[str, dict[str, str]]:
        dy = flow.linear("o", dy, "output_gate")
        inputs = {"dy": dy, "x": flow.saved("attention"), "gate": flow.saved("qkv")}
        dy = flow.op("output_gate.dgrad", "output_gate_backward", inputs)
        return dy, {"gate": dy}

    def saved_bytes(self, of: TrainingPass) -> float:
        """Attention's; then the heads side by side, the gates, and the gated output, which o keeps."""
        s = of.spec
        output = s.num_heads * s.head_dim
        return super().saved_bytes(of) + 2 * sum(s.qkv_sections) + of.kept_input("o", output)
