"""The block of experts as Qwen3.5 has it: one shared expert, whose row is multiplied by a sigmoid of a gate of its own.

    z = x @ router.T, g = x @ gate.T            BF16 operands, FP32 logits of E experts, and one for the shared expert
    route:    as in `moe.py`
    combine:  sum over j of weight_j * y_j, in the order of rank, then rounded(shared * sigmoid(g)), rounded once
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetrl.precision.blocks.block import TrainingPass
from jetrl.precision.blocks.deepseek_moe import SharedMoE
from jetrl.precision.formats import FP32

if TYPE_CHECKING:
    from jetrl.precision.builder import BlockBackward, BlockForward


class GatedMoE(SharedMoE):
    kind = "gated_moe"
    roundings = {
        **SharedMoE.roundings,
        "gate_rows": "fp32 sigmoid and product, rounded once to bf16",
        "gate_rows_backward": "fp32, rounded once to bf16",
        "gate_rows_logits": "fp32 products and sum",
    }
    formulas = {**SharedMoE.formulas, "gate_rows": "y · sigmoid(gate)", "gate_rows_logits": "dy · y"}

    def shared(self, flow: BlockForward, x: str, row: str) -> str:
        return flow.op("shared_gated", "gate_rows", {"x": row, "gate": flow.router("shared_gate", x, 1)})

    def shared_backward(self, flow: BlockBackward, dy: str, dx: str) -> tuple[str, str]:
        inputs = {"dy": dy, "x": flow.saved("shared_down"), "gate": flow.saved("shared_gate", FP32)}
        d_logits = flow.op("shared_gated.wgrad", "gate_rows_logits", inputs, FP32)
        d_row = flow.op("shared_gated.dgrad", "gate_rows_backward", inputs)
        return d_row, flow.op("gate.grad", "add", {"x": dx, "y": flow.router("shared_gate", d_logits, "mlp_norm")})

    def saved_bytes(self, of: TrainingPass) -> float:
        """With the gate's logit, and the row before it."""
        return super().saved_bytes(of) + 2 * of.spec.hidden_size + 4
