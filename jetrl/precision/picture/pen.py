"""The pen of the flow's picture: boxes, arrows and labels for operators of the drawn layer, placed by rows and columns.

Every box and label is read from the flow graphs. Blocks draw themselves with it; `draw.py` draws what surrounds them.
Rows hold the same operator in every column; the backward column is read from the bottom up.
"""

from __future__ import annotations

from jetrl.precision.graph import FlowEdge, FlowGraph, FlowNode
from jetrl.precision.picture.svg import Canvas, class_of
from jetrl.precision.recipe import Recipe, Role
from jetrl.spec import ModelSpec

WIDTH, TOP, PITCH = 1460, 150, 70
BOX_W, BOX_H, WEIGHT_W = 190, 38, 156
ROLLOUT_X, WEIGHT_X, TRAIN_X, BACK_X, WGRAD_X = 165, 482, 799, 1103, 1332
RESIDUAL = 118  # distance of the residual line from the middle of its column


class Graph:
    """One graph seen from the drawn layer: names are looked up without the layer's prefix."""

    def __init__(self, graph: FlowGraph, layer: int) -> None:
        self.prefix = f"layers.{layer}."
        self.nodes, self.edges = graph.node_map(), graph.edge_map()

    def find(self, name: str) -> FlowNode | None:
        """The node, or None where this graph has none of that name."""
        return self.nodes.get(self.prefix + name)

    def node(self, name: str) -> FlowNode:
        """The node; it must exist."""
        return self.nodes[self.prefix + name]

    def edge(self, name: str) -> FlowEdge:
        """The tensor that enters an input, `qkv.x`."""
        return self.edges[self.prefix + name]


class Pen:
    """`rows`: the y of each row. `differs`: nodes and edges of the layer in which rollout and training differ."""

    def __init__(
        self, spec: ModelSpec, recipe: Recipe, rollout: Graph, train: Graph, backward: Graph, differs: set[str]
    ) -> None:
        self.spec, self.recipe, self.canvas = spec, recipe, Canvas()
        self.rollout, self.train, self.backward, self.differs = rollout, train, backward, differs
        self.rows: dict[str, float] = {}

    def linear_rows(self, role: Role) -> list[str]:
        """The rows of a linear; a row exists if any column has something in it."""
        return [f"{role}.quantize_x", role] if self.rollout.find(f"{role}.quantize_x") else [role]

    # ---- forward ----------------------------------------------------------------------------------------------------

    def box(
        self, graph: Graph, name: str, x: float, y: float, width: float = BOX_W, title: str = "", formula: str = ""
    ) -> None:
        """The box of an operator; `formula` says what it computes where its name does not."""
        node = graph.node(name)
        kind = "quantizer" if node.op == "quantize" else ""
        if graph is self.rollout and name in self.differs:
            kind += " differs"
        words = {
            "gemm": "x @ Wᵀ", "grouped_gemm": "x @ (its expert's W)ᵀ", "add": "residual + y", "rms_norm": "RMSNorm",
            "quantize": "quantize",
        }
        sub = f"{formula or words.get(node.op, node.op)} → {node.out}"
        self.canvas.box(x, y, width, BOX_H, title or name, sub, kind, f"{node.name}: {node.rounding}")

    def operator(self, graph: Graph, x: float, name: str, slot: str, above: str, formula: str = "") -> None:
        """A box in its row, and the tensor that reaches its input `slot` from the row `above`."""
        self.box(graph, name, x, self.rows[name], formula=formula)
        self.arrow_down(x, above, name, graph.edge(f"{name}.{slot}"), f"{name}.{slot}")

    def arrow_down(self, x: float, above: str, below: str, edge: FlowEdge | FlowNode, name: str) -> None:
        """The tensor between two rows, labelled to the right of the line, which crosses the rows between them."""
        format = edge.format if isinstance(edge, FlowEdge) else edge.out
        kind = class_of(format, name in self.differs)
        half = 13 if above == "input" else BOX_H / 2
        end = self.rows[below] - (13 if below == "output" else BOX_H / 2)
        self.canvas.arrow([(x, self.rows[above] + half), (x, end)], kind)
        mark = " ≠" if name in self.differs else ""
        self.canvas.label(x + 8, end - 10, f"{format}{mark}", f"label {kind}")

    def residual(self, graph: Graph, x: float, lane: float, above: str, below: str) -> None:
        """The residual stream past a block, at the distance `lane` from the column."""
        edge = graph.edge(f"{below}.residual")
        y0, y1 = self.rows[above], self.rows[below]
        edge_of = BOX_W / 2 if lane > 0 else -BOX_W / 2
        start = (65 if above == "input" else BOX_W / 2) * (1 if lane > 0 else -1)
        y0 += 6 if above != "input" else 0  # below the arrow that comes in at the middle
        points = [(x + start, y0), (x + lane, y0), (x + lane, y1 - 6), (x + edge_of, y1 - 6)]
        self.canvas.arrow(points, class_of(edge.format))

    def linear(self, graph: Graph, x: float, role: Role, above: str) -> str:
        """A linear with its quantizer; returns its row."""
        quantizer = f"{role}.quantize_x"
        if graph.find(quantizer):
            self.operator(graph, x, quantizer, "x", above)
            above = quantizer
        elif quantizer in self.rows:
            self.canvas.box(x, self.rows[quantizer], BOX_W, BOX_H, "no quantizer", kind="ghost differs")
            self.arrow_down(x, above, quantizer, graph.edge(f"{role}.x"), "")
            above = quantizer
        self.operator(graph, x, role, "x", above)
        return role

    # ---- weights ----------------------------------------------------------------------------------------------------

    def weight(self, role: Role) -> None:
        """One BF16-rounded weight for both sides, and its quantizer where a side reads codes."""
        c, y = self.canvas, self.rows
        quantizer = f"{role}.quantize_weight"
        node = self.rollout.find(quantizer)
        row = f"{role}.quantize_x" if node else role
        top = y[row]
        c.box(WEIGHT_X, top, WEIGHT_W, BOX_H, f"{role}.weight", "master → bf16", tip="master weight rounded to bf16")
        if node:
            kind = "quantizer differs" if quantizer in self.differs else "quantizer"
            tip = f"{node.name}: {node.rounding}"
            c.box(WEIGHT_X, y[role], WEIGHT_W, BOX_H, "quantize_weight", f"→ {node.out}", kind, tip)
            edge = self.rollout.edge(f"{quantizer}.x")
            c.arrow([(WEIGHT_X, top + BOX_H / 2), (WEIGHT_X, y[role] - BOX_H / 2)], class_of(edge.format))
            c.label(WEIGHT_X + 8, y[role] - BOX_H / 2 - 10, str(edge.format), f"label {class_of(edge.format)}")
        for side, x, sign in ((self.rollout, ROLLOUT_X, -1), (self.train, TRAIN_X, 1)):
            edge = side.edge(f"{role}.weight")
            differs = f"{role}.weight" in self.differs
            kind, end = class_of(edge.format, differs), x - sign * BOX_W / 2
            start = WEIGHT_X + sign * WEIGHT_W / 2
            if node and side.find(quantizer) is None:  # past the quantizer
                turn = start + sign * 30
                c.arrow([(start, top), (turn, top), (turn, y[role]), (end, y[role])], kind)
            else:
                c.arrow([(start, y[role]), (end, y[role])], kind)
            middle = (start + end) / 2 + (0 if side.find(quantizer) or not node else 15)
            c.label(middle, y[role] - 7, f"{edge.format}{' ≠' if differs else ''}", f"label {kind}", "middle")

    # ---- backward ---------------------------------------------------------------------------------------------------

    def gradient(self, row: str, name: str, slot: str, below: str, title: str = "") -> str:
        """A box of the backward spine, its input coming up from the row `below`; returns its own row."""
        node, edge = self.backward.node(name), self.backward.edge(f"{name}.{slot}")
        words = {"add": "residual + dy", "gemm": "dy @ W"}
        sub = f"{words.get(node.op, 'gradient')} → {node.out}"
        self.canvas.box(BACK_X, self.rows[row], BOX_W, BOX_H, title or name, sub, "", f"{node.name}: {node.rounding}")
        self.arrow_up(BACK_X, below, row, edge)
        return row

    def arrow_up(self, x: float, below: str, row: str, edge: FlowEdge, word: str = "") -> None:
        """The tensor between two rows of the backward column."""
        kind = class_of(edge.format)
        start = self.rows[below] - (13 if below == "output" else BOX_H / 2)
        end = self.rows[row] + BOX_H / 2
        self.canvas.arrow([(x, start), (x, end)], kind)
        self.canvas.label(x + 8, end + 24, f"{word}{edge.format}", f"label {kind}")

    def linear_backward(self, role: Role, below: str, saved_row: str, word: str = "") -> str:
        """dgrad on the spine, wgrad next to it, each with the quantizers of its operands; x^T is what forward saved."""
        c, y, side = self.canvas, self.rows, self.backward
        fp8 = side.find(f"{role}.quantize_dy") is not None
        top = f"{role}.quantize_x" if fp8 else role
        if fp8:
            for name, x, slot in (("quantize_dy", BACK_X, "dgrad.dy"), ("quantize_dy_t", WGRAD_X, "wgrad.dy")):
                node = side.node(f"{role}.{name}")
                tip = f"{node.name}: {node.rounding}"
                c.box(x, y[role], BOX_W, BOX_H, f"{role}.{name}", f"→ {node.out}", "quantizer", tip)
                self.arrow_up(x, role, top, side.edge(f"{role}.{slot}"))
            incoming = side.edge(f"{role}.quantize_dy.x")
        else:
            incoming = side.edge(f"{role}.dgrad.dy")
        self.arrow_up(BACK_X, below, role, incoming, word)
        fork, kind = y[role] + BOX_H / 2 + 10, class_of(incoming.format)
        c.arrow([(BACK_X, fork), (WGRAD_X, fork), (WGRAD_X, y[role] + BOX_H / 2)], kind)
        weight, grad = side.edge(f"{role}.dgrad.weight"), side.node(f"{role}.dgrad")
        tip = f"{grad.name}: {grad.rounding}"
        c.box(BACK_X, y[top], BOX_W, BOX_H, f"{role}.dgrad → {grad.out}", f"dy @ W, {weight.format}", "", tip)
        wgrad, x_t = side.node(f"{role}.wgrad"), side.edge(f"{role}.wgrad.x")
        c.box(WGRAD_X, y[top], BOX_W, BOX_H, f"{role}.wgrad", f"dW = dyᵀ @ x → {wgrad.out}", "", wgrad.rounding)
        saved = f"quantize → {x_t.format}" if fp8 else f"{x_t.format}"
        c.box(WGRAD_X, y[saved_row], BOX_W, BOX_H, f"x of {role}, saved", saved, "quantizer" if fp8 else "")
        kind = class_of(x_t.format)
        c.arrow([(WGRAD_X, y[saved_row] + BOX_H / 2), (WGRAD_X, y[top] - BOX_H / 2)], kind)
        c.label(WGRAD_X + 8, y[top] - BOX_H / 2 - 10, str(x_t.format), f"label {kind}")
        return top

    def residual_backward(self, below: str, row: str, edge: FlowEdge) -> None:
        """The stream's gradient past a block."""
        y, x = self.rows, BACK_X - BOX_W / 2
        y0 = y[below] - (6 if below != "output" else 0)
        start = BACK_X - 75 if below == "output" else x
        lane = BACK_X - RESIDUAL
        self.canvas.arrow([(start, y0), (lane, y0), (lane, y[row] + 6), (x, y[row] + 6)], class_of(edge.format))
