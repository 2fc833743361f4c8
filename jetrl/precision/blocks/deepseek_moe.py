"""The block of experts as DeepSeek has it: scores by sigmoid, a bias and groups for the choice, and shared experts.

    z = x @ router.T                           BF16 operands, FP32 logits of E experts
    s = sigmoid(z)                             or, as DeepSeek-V2, their softmax
    route:    of the best groups, the k experts of the largest s + bias, ties to the lower index; weights by s alone,
              divided by their sum where the model says so, times its scaling
    combine:  sum over j of weight_j * y_j, in the order of rank, then the shared experts' row, rounded once
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jetrl.precision.blocks.block import Linear, TrainingPass
from jetrl.precision.blocks.moe import MoE
from jetrl.precision.formats import FP32
from jetrl.precision.recipe import Role
from jetrl.spec import DeepSeekSpec, ModelSpec

if TYPE_CHECKING:
    from jetrl.precision.builder import BlockBackward, BlockForward


class SharedMoE(MoE):
    """Experts beside a shared one through which every token runs; a base of blocks that say how the others are chosen.
    """

    roundings = {
        **MoE.roundings,
        "combine": "fp32 products, added in fp32 by rank, then the shared row, rounded once to bf16",
    }

    def linears(self, spec: ModelSpec) -> Mapping[Role, Linear]:
        found, width, d = dict(super().linears(spec)), _shared_width(spec), spec.hidden_size
        if width:
            found["shared_gate_up"] = Linear((width, width), d, projections=("gate_proj", "up_proj"))
            found["shared_down"] = Linear((d,), width, writes_residual=True, projections=("down_proj",))
        return found

    def forward(self, flow: BlockForward, x: str) -> str:
        assert flow.spec.experts is not None
        rows = flow.op("dispatch", "dispatch", {"x": x, "experts": self.routed(flow, x)})
        product = flow.op("swiglu", "swiglu", {"gate_up": flow.linear("gate_up", rows)})
        inputs = {"y": flow.linear("down", product), "weights": flow.full("route")}
        if flow.spec.experts.shared_size:
            product = flow.op("shared_swiglu", "swiglu", {"gate_up": flow.linear("shared_gate_up", x)})
            inputs["shared"] = self.shared(flow, x, flow.linear("shared_down", product))
        return flow.op("combine", "combine", inputs)

    def shared(self, flow: BlockForward, x: str, row: str) -> str:
        """What is added of the shared experts' `row`."""
        return row

    def shared_backward(self, flow: BlockBackward, dy: str, dx: str) -> tuple[str, str]:
        """The gradient of the shared experts' row, and that of the stream with what `shared` adds to it."""
        return dy, dx

    def routed(self, flow: BlockForward, x: str) -> str:
        """The nodes of router and choice."""
        e = flow.spec.experts
        assert e is not None
        inputs = {"logits": flow.router("router", x, e.count)}
        return flow.op("route", "route", inputs, FP32, experts_per_token=e.per_token, normalized=int(e.normalized))

    def backward(self, flow: BlockBackward, dy: str) -> str:
        dx = super().backward(flow, dy)
        if not _shared_width(flow.spec):
            return dx
        dy, dx = self.shared_backward(flow, dy, dx)
        d = flow.linear("shared_down", dy, "shared_swiglu")
        inputs = {"dy": d, "gate_up": flow.saved("shared_gate_up")}
        d = flow.linear("shared_gate_up", flow.op("shared_swiglu.dgrad", "swiglu_backward", inputs), "mlp_norm")
        return flow.op("shared.grad", "add", {"x": dx, "y": d})

    def saved_bytes(self, of: TrainingPass) -> float:
        """With the inputs of the shared linears, gate and up, and their output."""
        f, d = _shared_width(of.spec), of.spec.hidden_size
        shared = of.kept_input("shared_gate_up", d) + of.kept_input("shared_down", f) + 4 * f + 2 * d if f else 0
        return super().saved_bytes(of) + shared


class DeepSeekMoE(SharedMoE):
    kind = "deepseek_moe"

    def routed(self, flow: BlockForward, x: str) -> str:
        """The nodes of router and choice."""
        e, more = flow.spec.experts, deepseek_of(flow.spec)
        assert e is not None
        inputs = {"logits": flow.router("router", x, e.count)}
        if more.bias:
            inputs["bias"] = flow.op("router_bias", "frozen", {}, FP32)
        return flow.op(
            "route", "route", inputs, FP32, experts_per_token=e.per_token, normalized=int(e.normalized),
            scaling=more.scaling, groups=more.groups, kept_groups=more.kept_groups,
        )


class SigmoidMoE(DeepSeekMoE):
    kind = "sigmoid_moe"
    roundings = {
        **DeepSeekMoE.roundings,
        "frozen": "none (fp32)",
        "route": "fp32 sigmoids and their sums with the bias, ties to the lower index; weights by one float64 division "
        "and product, rounded once to fp32",
    }


def deepseek_of(spec: ModelSpec) -> DeepSeekSpec:
    """What a model of this kind adds to its experts."""
    assert spec.experts is not None and spec.experts.deepseek is not None, f"no such experts in {spec.family}"
    return spec.experts.deepseek


def _shared_width(spec: ModelSpec) -> int:
    assert spec.experts is not None
    return spec.experts.shared_size
