"""The experts of Qwen3.5's mixtures: chosen by a softmax, beside a shared one with a gate of its own.

Legend: `T` tokens, `D` model, `F` the shared expert's feed-forward.
"""

from __future__ import annotations

from torch import Tensor

from jetrl.kernels.experts import ops as moe
from jetrl.model.block import Build, Piece, Tap
from jetrl.model.deepseek_moe import SharedMoE
from jetrl.model.moe import MoE, Router
from jetrl.spec import ModelSpec
from jetrl.types import Side


class GatedMoE(SharedMoE):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.add_shared(build)
        self.shared_gate = Router((1, build.spec.hidden_size), build.master_dtype, build.dtype)

    def shared(self, y: Tensor, side: Side, tap: Tap) -> Tensor:
        row = super().shared(y, side, tap)
        assert row is not None, "a mixture without the shared expert that its gate is for"
        logits = self.shared_gate(y)
        tap(f"{self.at}.shared_gate", logits)
        row = moe.gate_rows(row, logits)
        tap(f"{self.at}.shared_gated", row)
        return row

    @staticmethod
    def checkpoint_names(spec: ModelSpec, layer: int) -> dict[str, tuple[Piece, ...]]:
        assert spec.experts is not None and spec.experts.gated_shared is not None
        D, F, at = spec.hidden_size, spec.experts.gated_shared, f"model.layers.{layer}.mlp."
        own = f"{at}shared_expert."
        return MoE.checkpoint_names(spec, layer) | {
            "shared_gate_up.weight": tuple(Piece(f"{own}{x}_proj.weight", (F, D)) for x in ("gate", "up")),
            "shared_down.weight": (Piece(f"{own}down_proj.weight", (D, F)),),
            "shared_gate.weight": (Piece(f"{at}shared_expert_gate.weight", (1, D)),),
        }
