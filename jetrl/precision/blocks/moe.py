"""The mixture-of-experts block: each token through the few experts that a router chooses, their outputs weighted and
added. A sibling of the MLP, in its place in the layer.

    z = x @ router.T                         BF16 operands, FP32 logits of E experts
    route:    the k largest z, ties to the lower index; their weights by the softmax of z
    dispatch: a copy of a token's row for each of its k experts, grouped by expert
    experts:  down(silu(gate) * up), each row by its expert's matrices
    combine:  sum over j of weight_j * y_j, in the order of rank: the largest logit first
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jetrl.precision.blocks.block import Block, Linear, TrainingPass
from jetrl.precision.blocks.mlp import MLP
from jetrl.precision.formats import BLOCK, FP32
from jetrl.precision.recipe import LinearRecipe, Role
from jetrl.spec import ExpertSpec, ModelSpec

if TYPE_CHECKING:
    from jetrl.precision.builder import BlockBackward, BlockForward


class MoE(Block):
    kind, name = "moe", "mlp"
    roundings = {
        "route": "largest fp32 logits, ties to the lower index; softmax weights by float64 division, rounded once to "
        "fp32",
        "dispatch": "none (copies of rows)",
        "swiglu": MLP.roundings["swiglu"],
        "combine": "fp32 products, added in fp32 by rank, rounded once to bf16",
        "route_backward": "fp32",
        "dispatch_backward": "fp32 sum over experts by rank, rounded once to bf16",
        "swiglu_backward": MLP.roundings["swiglu_backward"],
        "combine_backward": "fp32 product, rounded once to bf16",
        "combine_weights": "fp32 products and sum",
    }
    formulas = {
        **MLP.formulas, "route": "top {experts_per_token}", "dispatch": "rows by expert", "combine": "Σ weight · y",
        "combine_weights": "dy · y",
    }

    def linears(self, spec: ModelSpec) -> Mapping[Role, Linear]:
        e = _experts(spec)
        sections = (e.intermediate_size, e.intermediate_size) * e.count
        return {
            "gate_up": Linear(sections, spec.hidden_size, experts=e.count, projections=("gate_proj", "up_proj")),
            "down": Linear(
                (spec.hidden_size,) * e.count, e.intermediate_size, writes_residual=True, experts=e.count,
                projections=("down_proj",),
            ),
        }

    def forward(self, flow: BlockForward, x: str) -> str:
        e = _experts(flow.spec)
        logits = flow.router("router", x, e.count)
        weights = flow.op(
            "route", "route", {"logits": logits}, FP32, experts_per_token=e.per_token, normalized=int(e.normalized)
        )
        rows = flow.op("dispatch", "dispatch", {"x": x, "experts": weights})
        product = flow.op("swiglu", "swiglu", {"gate_up": flow.linear("gate_up", rows)})
        return flow.op("combine", "combine", {"y": flow.linear("down", product), "weights": weights})

    def backward(self, flow: BlockBackward, dy: str) -> str:
        weights, logits = flow.saved("route", FP32), flow.saved("router", FP32)
        d_weights = flow.op("combine.wgrad", "combine_weights", {"dy": dy, "y": flow.saved("down")}, FP32)
        dx = flow.op("combine.dgrad", "combine_backward", {"dy": dy, "weights": weights})
        dx = flow.linear("down", dx, "swiglu")
        dx = flow.op("swiglu.dgrad", "swiglu_backward", {"dy": dx, "gate_up": flow.saved("gate_up")})
        dx = flow.linear("gate_up", dx, "dispatch")
        dx = flow.op("dispatch.dgrad", "dispatch_backward", {"dy": dx})
        inputs = {"dy": d_weights, "logits": logits, "weights": weights}
        d_logits = flow.op("route.dgrad", "route_backward", inputs, FP32)
        routed = flow.router("router", d_logits, "mlp_norm")
        return flow.op("dispatch.grad", "add", {"x": dx, "y": routed})

    def saved_bytes(self, of: TrainingPass) -> float:
        """The router's input, logits, choices and weights, and for each row what both linears read, gate and up, and
        the experts' output; where the experts are one function, both inputs are made again."""
        e, d = _experts(of.spec), of.spec.hidden_size
        f, inputs = e.intermediate_size, 0.0
        if of.recipe.lora is not None or one_recipe(of.linear("gate_up"), of.linear("down")) is None:
            inputs = of.kept_input("gate_up", d) + of.kept_input("down", f)
        row = inputs + 4 * f + 2 * d + 4
        return 2 * d + 4 * e.count + 20 * e.per_token + row * expert_rows(of.spec, of.tokens) / of.tokens

    def passing_bytes(self, of: TrainingPass) -> int:
        """Gradients of rows with their codes both ways, and the router's in FP32.

        In one function these are at most the codes of combine's gradient along rows next to the gradients of SwiGLU's
        output and input and the codes of both ways, or codes both ways next to the gradient of the tokens' rows. BF16
        gradients take the sum of all experts in FP32; what makes the layer again also makes the codes for dgrad.
        """
        e, d, tokens = _experts(of.spec), of.spec.hidden_size, of.tokens
        f, row = e.intermediate_size, 6 * d + 8 * e.intermediate_size
        if one_recipe(of.linear("gate_up"), of.linear("down")) is not None:
            row = max(d + 11 * f, 2 * d + 4 * f) * 33 // 32
        matrix = e.count * 2 * f * d
        made = matrix * ((4 if of.summed else 0) + (1 if of.again else 0))
        return max(super().passing_bytes(of), expert_rows(of.spec, tokens) * row + 8 * tokens * d + made)


def one_recipe(into: LinearRecipe | None, out: LinearRecipe | None) -> LinearRecipe | None:
    """The recipe of gate_up and down where `model.fused_experts` computes both in one function: FP8, and the same."""
    return into if into is not None and into == out else None


def expert_rows(spec: ModelSpec, tokens: int) -> int:
    """Rows of the grouped matrices of T tokens: k for each, and at most a tile of 128 less one for each expert."""
    if spec.experts is None:
        return 0
    chosen = tokens * spec.experts.per_token
    return (chosen + min(spec.experts.count, chosen) * (BLOCK - 1)) // BLOCK * BLOCK


def _experts(spec: ModelSpec) -> ExpertSpec:
    assert spec.experts is not None, f"a family with experts, and none in the spec of {spec.family}"
    return spec.experts
