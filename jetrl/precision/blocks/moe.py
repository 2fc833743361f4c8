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

from jetrl.precision.blocks.block import Block, Linear
from jetrl.precision.blocks.mlp import MLP
from jetrl.precision.formats import FP32
from jetrl.precision.picture.pen import BACK_X, BOX_H, BOX_W, WGRAD_X
from jetrl.precision.picture.svg import class_of
from jetrl.precision.recipe import Role
from jetrl.spec import ExpertSpec, ModelSpec

if TYPE_CHECKING:
    from jetrl.precision.builder import BlockBackward, BlockForward
    from jetrl.precision.picture.pen import Graph, Pen


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

    def linears(self, spec: ModelSpec) -> Mapping[Role, Linear]:
        e = _experts(spec)
        sections = (e.intermediate_size, e.intermediate_size) * e.count
        return {
            "gate_up": Linear(sections, spec.hidden_size, experts=e.count),
            "down": Linear(
                (spec.hidden_size,) * e.count, e.intermediate_size, writes_residual=True, experts=e.count
            ),
        }

    # ---- flow -------------------------------------------------------------------------------------------------------

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

    # ---- picture ----------------------------------------------------------------------------------------------------

    def rows(self, pen: Pen) -> list[str]:
        experts = [*pen.linear_rows("gate_up"), "swiglu", *pen.linear_rows("down")]
        return ["router", "route", "dispatch", *experts, "combine"]

    def draw_forward(self, pen: Pen, graph: Graph, x: float) -> str:
        e = _experts(pen.spec)
        if graph is pen.rollout:
            pen.weight("router")
        pen.operator(graph, x, "router", "x", "mlp_norm")
        pen.operator(graph, x, "route", "logits", "router", f"top {e.per_token} of {e.count}")
        pen.operator(graph, x, "dispatch", "experts", "route", "rows by expert")
        pen.linear(graph, x, "gate_up", "dispatch")
        pen.operator(graph, x, "swiglu", "gate_up", "gate_up", "silu(gate) · up")
        pen.linear(graph, x, "down", "swiglu")
        pen.operator(graph, x, "combine", "y", "down", "Σ weight · y")
        away = 1 if graph is pen.rollout else -1  # from the residual line
        for above, below, slot, lane in (("mlp_norm", "dispatch", "x", 104), ("route", "combine", "weights", 112)):
            name = f"{below}.{slot}"
            kind = class_of(graph.edge(name).format, name in pen.differs)
            y0, y1, side = pen.rows[above], pen.rows[below], x + away * BOX_W / 2
            pen.canvas.arrow([(side, y0), (x + away * lane, y0), (x + away * lane, y1), (side, y1)], kind)
        return "combine"

    def draw_backward(self, pen: Pen, below: str) -> str:
        """Experts on the spine; the router next to it, from `combine` past them to the norm."""
        below = pen.gradient("combine", "combine.dgrad", "dy", below)
        self._draw_beside(pen, "combine", "combine.wgrad", "dy · y")
        c, y, half = pen.canvas, pen.rows, BOX_H / 2
        dy = class_of(pen.backward.edge("combine.wgrad.dy").format)
        fork = y["combine"] + half + 10
        c.arrow([(BACK_X, fork), (WGRAD_X, fork), (WGRAD_X, y["combine"] + half)], dy)
        below = pen.linear_backward("down", below, "swiglu")
        below = pen.gradient("swiglu", "swiglu.dgrad", "dy", below)
        below = pen.linear_backward("gate_up", below, "dispatch")
        below = pen.gradient("dispatch", "dispatch.dgrad", "dy", below)
        self._draw_beside(pen, "route", "route.dgrad", "gradient")
        side, fp32 = WGRAD_X + BOX_W / 2, class_of(pen.backward.edge("route.dgrad.dy").format)
        lane = [(side, y["combine"]), (side + 12, y["combine"]), (side + 12, y["route"]), (side, y["route"])]
        c.arrow(lane, fp32)
        self._draw_beside(pen, "router", "router.dgrad", "dy @ W")
        pen.arrow_up(WGRAD_X, "route", "router", pen.backward.edge("router.dgrad.dy"))
        self._draw_beside(pen, "mlp_norm", "router.wgrad", "dW = dyᵀ @ x")
        pen.arrow_up(WGRAD_X, "router", "mlp_norm", pen.backward.edge("router.wgrad.dy"), "dy ")
        below = pen.gradient("router", "dispatch.grad", "x", below, "dx of both")
        routed = class_of(pen.backward.edge("dispatch.grad.y").format)
        c.arrow([(WGRAD_X - BOX_W / 2, y["router"]), (BACK_X + BOX_W / 2, y["router"])], routed)
        return below

    def _draw_beside(self, pen: Pen, row: str, name: str, formula: str) -> None:
        node = pen.backward.node(name)
        tip = f"{node.name}: {node.rounding}"
        pen.canvas.box(WGRAD_X, pen.rows[row], BOX_W, BOX_H, name, f"{formula} → {node.out}", "", tip)


def _experts(spec: ModelSpec) -> ExpertSpec:
    assert spec.experts is not None, f"a family with experts, and none in the spec of {spec.family}"
    return spec.experts
