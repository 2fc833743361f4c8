"""The flow of one decoder layer as a picture: rollout, weights, training forward and backward side by side.

Every box and label is read from the flow graphs; only the places are decided here. The layer drawn is the first that
the recipe quantizes (or layer 0), since the others are either equal to it or plain BF16. Rows run down in the order of
execution and hold the same operator in every column; the backward column is read from the bottom up.
"""

from __future__ import annotations

from jetrl.precision.flow import build_flow, diff_recipe, flow_digest, layer_ranges
from jetrl.precision.formats import Format
from jetrl.precision.graph import FlowEdge, FlowGraph, FlowNode
from jetrl.precision.recipe import ROLES, Recipe
from jetrl.precision.svg import Canvas, class_of
from jetrl.precision.table import flow_text
from jetrl.spec import ModelSpec

__all__ = ["flow_svg", "flow_text"]

WIDTH, TOP, PITCH = 1460, 150, 70
BOX_W, BOX_H, WEIGHT_W = 190, 38, 156
ROLLOUT_X, WEIGHT_X, TRAIN_X, BACK_X, WGRAD_X = 165, 482, 799, 1103, 1332
QK_SHIFT, V_SHIFT, LANE_W = -35, 78, 120  # lanes of Q with K and of V between qkv and attention
RESIDUAL = 118  # distance of the residual line from the middle of its column


def flow_svg(spec: ModelSpec, recipe: Recipe) -> str:
    """A self-contained SVG document (no scripts, no outside resources), for light and dark backgrounds."""
    return _Drawing(spec, recipe).draw()


class _Side:
    """One graph seen from the drawn layer: names are looked up without the layer's prefix."""

    def __init__(self, graph: FlowGraph, layer: int) -> None:
        self.prefix = f"layers.{layer}."
        self.nodes, self.edges = graph.node_map(), graph.edge_map()

    def node(self, name: str) -> FlowNode | None:
        return self.nodes.get(self.prefix + name)

    def edge(self, name: str) -> FlowEdge:
        return self.edges[self.prefix + name]


class _Drawing:
    def __init__(self, spec: ModelSpec, recipe: Recipe) -> None:
        self.spec, self.recipe, self.canvas = spec, recipe, Canvas()
        quantized = [i for i in range(spec.num_layers) if recipe.linear(i, "qkv", "rollout") is not None]
        self.layer = quantized[0] if quantized else 0
        self.bf16_layers = [i for i in range(spec.num_layers) if i not in quantized] if quantized else []
        self.rollout = _Side(build_flow(spec, recipe, "rollout"), self.layer)
        self.train = _Side(build_flow(spec, recipe, "train_forward"), self.layer)
        self.backward = _Side(build_flow(spec, recipe, "train_backward"), self.layer)
        self.differences = diff_recipe(spec, recipe)
        self.differs = {d.name.removeprefix(self.rollout.prefix) for d in self.differences}
        self.rows = self._rows()

    def _rows(self) -> dict[str, float]:
        """The y of each row; a row exists if any column has something in it."""
        names = ["input", "attn_norm", *self._linear_rows("qkv")]
        names += ["qkv_bias"] if self.spec.qkv_bias else []
        names += ["qk_norm"] if self.spec.qk_norm else []
        names += ["rope", *(["kv_quantize"] if self.recipe.kv_cache.is_quantized else []), "cache", "attention"]
        names += [*self._linear_rows("o"), "attn_add", "mlp_norm", *self._linear_rows("gate_up")]
        names += ["swiglu", *self._linear_rows("down"), "mlp_add", "output"]
        return {name: TOP + i * PITCH for i, name in enumerate(names)}

    def _linear_rows(self, role: str) -> list[str]:
        return [f"{role}.quantize_x", role] if self.rollout.node(f"{role}.quantize_x") else [role]

    def draw(self) -> str:
        self._headings()
        for side, x, lane in ((self.rollout, ROLLOUT_X, -RESIDUAL), (self.train, TRAIN_X, RESIDUAL)):
            self._forward(side, x, lane)
        for role in ROLES:
            self._weight(role)
        self._backward()
        self._footer()
        height = self.rows["output"] + 120
        return self.canvas.render(WIDTH, height, f"Precision flow {self.recipe.name}, layer {self.layer}")

    def _headings(self) -> None:
        c, spec = self.canvas, self.spec
        title = f"Precision flow: {self.recipe.name}   ({spec.family}, {spec.num_layers} layers)"
        c.label(24, 36, title, "title")
        c.label(WIDTH - 24, 36, f"digest {flow_digest(spec, self.recipe)}", "label", "end")
        if self.differences:
            text = f"≠  Rollout and training differ in {len(self.differences)} places (red, dashed)"
            c.label(24, 62, text, "differs")
        else:
            c.label(24, 62, "✓  The rollout is a subgraph of the training forward, edge by edge", "good")
        columns = (
            ("Rollout", ROLLOUT_X, 280),
            ("Published weights", WEIGHT_X, 200),
            ("Training forward", TRAIN_X, 280),
            ("Training backward (read upwards)", (BACK_X + WGRAD_X) / 2 - 12, 450),
        )
        for text, x, width in columns:
            c.label(x, 100, text, "head", "middle")
            c.rule(x - width / 2, x + width / 2, 110)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def _forward(self, side: _Side, x: float, lane: float) -> None:
        y = self.rows
        self.canvas.box(x, y["input"], 130, 26, "residual x", kind="ghost")
        self._operator(side, x, "attn_norm", "x", "input")
        self._linear(side, x, "qkv", "attn_norm")
        self._attention(side, x)
        self._linear(side, x, "o", "attention")
        self._operator(side, x, "attn_add", "y", "o")
        self._residual(side, x, lane, "input", "attn_add")
        self._operator(side, x, "mlp_norm", "x", "attn_add")
        self._linear(side, x, "gate_up", "mlp_norm")
        self._operator(side, x, "swiglu", "gate_up", "gate_up")
        self._linear(side, x, "down", "swiglu")
        self._operator(side, x, "mlp_add", "y", "down")
        self._residual(side, x, lane, "attn_add", "mlp_add")
        self._arrow_down(x, "mlp_add", "output", self._node(side, "mlp_add"), "")
        self.canvas.box(x, y["output"], 150, 26, "to the next layer", kind="ghost")

    def _node(self, side: _Side, name: str) -> FlowNode:
        node = side.node(name)
        assert node is not None, name
        return node

    def _box(self, side: _Side, name: str, x: float, y: float, width: float = BOX_W, title: str = "") -> None:
        node = self._node(side, name)
        kind = "quantizer" if node.op == "quantize" else ""
        if side is self.rollout and name in self.differs:
            kind += " differs"
        words = {"gemm": "x @ Wᵀ", "add": "residual + y", "rms_norm": "RMSNorm"}
        words |= {"quantize": "quantize", "swiglu": "silu(gate) · up", "attention": "softmax(q kᵀ) v"}
        words |= {"add": "x + bias"} if name == "qkv_bias" else {}
        sub = f"{words.get(node.op, node.op)} → {node.out}"
        self.canvas.box(x, y, width, BOX_H, title or name, sub, kind, f"{node.name}: {node.rounding}")

    def _operator(self, side: _Side, x: float, name: str, slot: str, above: str) -> None:
        self._box(side, name, x, self.rows[name])
        edge = side.edge(f"{name}.{slot}")
        self._arrow_down(x, above, name, edge, f"{name}.{slot}")

    def _arrow_down(self, x: float, above: str, below: str, edge: FlowEdge | FlowNode, name: str) -> None:
        """The tensor between two rows, labelled to the right of the line. Rows between them are crossed."""
        format = edge.format if isinstance(edge, FlowEdge) else edge.out
        kind = class_of(format, name in self.differs)
        half = 13 if above == "input" else BOX_H / 2
        end = self.rows[below] - (13 if below == "output" else BOX_H / 2)
        self.canvas.arrow([(x, self.rows[above] + half), (x, end)], kind)
        mark = " ≠" if name in self.differs else ""
        self.canvas.label(x + 8, end - 10, f"{format}{mark}", f"label {kind}")

    def _residual(self, side: _Side, x: float, lane: float, above: str, below: str) -> None:
        edge = side.edge(f"{below}.residual")
        y0, y1 = self.rows[above], self.rows[below]
        edge_of = BOX_W / 2 if lane > 0 else -BOX_W / 2
        start = (65 if above == "input" else BOX_W / 2) * (1 if lane > 0 else -1)
        y0 += 6 if above != "input" else 0  # below the arrow that comes in at the middle
        points = [(x + start, y0), (x + lane, y0), (x + lane, y1 - 6), (x + edge_of, y1 - 6)]
        self.canvas.arrow(points, class_of(edge.format))

    def _linear(self, side: _Side, x: float, role: str, above: str) -> None:
        quantizer = f"{role}.quantize_x"
        if side.node(quantizer):
            self._operator(side, x, quantizer, "x", above)
            above = quantizer
        elif quantizer in self.rows:
            self.canvas.box(x, self.rows[quantizer], BOX_W, BOX_H, "no quantizer", kind="ghost differs")
            self._arrow_down(x, above, quantizer, side.edge(f"{role}.x"), "")
            above = quantizer
        self._operator(side, x, role, "x", above)

    def _attention(self, side: _Side, x: float) -> None:
        """From qkv to attention in two lanes: Q and K through norm and RoPE, V past them; K and V through the cache."""
        above, y, c = "qkv", self.rows, self.canvas
        if self.spec.qkv_bias:
            self._operator(side, x, "qkv_bias", "x", "qkv")
            above = "qkv_bias"
        first, v_top = above, y[above] + BOX_H / 2
        for row, name, title in (("qk_norm", "k_norm", "q_norm, k_norm"), ("rope", "rope_k", "rope_q, rope_k")):
            if row in y:
                edge = side.edge(f"{name}.x")
                self._box(side, name, x + QK_SHIFT, y[row], LANE_W, title)
                kind = class_of(edge.format)
                c.arrow([(x + QK_SHIFT, y[above] + BOX_H / 2), (x + QK_SHIFT, y[row] - BOX_H / 2)], kind)
                word = "q, k " if above == first else ""
                c.label(x + QK_SHIFT + 7, y[row] - BOX_H / 2 - 10, f"{word}{edge.format}", f"label {kind}")
                above = row
        rope = y["rope"] + BOX_H / 2
        q, k = side.edge("attention.q"), side.edge("attention.k")
        top = y["attention"] - BOX_H / 2
        c.arrow([(x - 75, rope), (x - 75, top)], class_of(q.format))
        c.label(x - 69, top - 10, f"q {q.format}", f"label {class_of(q.format)}")
        v = self._node(side, "qkv_bias" if self.spec.qkv_bias else "qkv")
        c.arrow([(x + V_SHIFT, v_top), (x + V_SHIFT, rope)], class_of(v.out), tip=False)
        c.label(x + V_SHIFT + 6, rope - BOX_H / 2 + 4, "v", f"label {class_of(v.out)}")
        self._key_value(side, x, rope, top, k)
        self._box(side, "attention", x, y["attention"])

    def _key_value(self, side: _Side, x: float, start: float, top: float, k: FlowEdge) -> None:
        c, y = self.canvas, self.rows
        differs = "attention.k" in self.differs
        lanes = (x - 10, x + V_SHIFT)
        middle = (lanes[0] + lanes[1]) / 2
        stages = [("kv_quantize", "k.quantize", "quantize K, V"), ("cache", "k_cache_read", "KV cache")]
        before = self._node(side, "rope_k").out
        for row, name, title in stages:
            node = side.node(name)
            if node is None:
                continue
            for lane in lanes:
                c.arrow([(lane, start), (lane, y[row] - BOX_H / 2)], class_of(before))
            kind = "quantizer" if node.op == "quantize" else ""
            sub = f"→ {_dtype(node.out)}" if node.op == "quantize" else _dtype(node.out)
            c.box(middle, y[row], 120, BOX_H, title, sub, kind, f"{node.name}: {node.rounding}")
            start, before = y[row] + BOX_H / 2, node.out
        for lane in lanes:
            c.arrow([(lane, start), (lane, top)], class_of(k.format, differs))
        mark = " ≠" if differs else ""
        c.label(lanes[0] + 6, top - 10, f"k, v {_dtype(k.format)}{mark}", f"label {class_of(k.format, differs)}")
        if side.node("k_cache_read") is None:
            c.label(lanes[0] + 8, y["cache"] + 4, "no cache", "small")

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _weight(self, role: str) -> None:
        """One BF16-rounded weight for both sides, and its quantizer where a side reads codes."""
        c, y = self.canvas, self.rows
        quantizer = f"{role}.quantize_weight"
        node = self.rollout.node(quantizer)
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
            if node and side.node(quantizer) is None:  # past the quantizer
                turn = start + sign * 30
                c.arrow([(start, top), (turn, top), (turn, y[role]), (end, y[role])], kind)
            else:
                c.arrow([(start, y[role]), (end, y[role])], kind)
            middle = (start + end) / 2 + (0 if side.node(quantizer) or not node else 15)
            c.label(middle, y[role] - 7, f"{edge.format}{' ≠' if differs else ''}", f"label {kind}", "middle")

    # ---- backward ---------------------------------------------------------------------------------------------------

    def _backward(self) -> None:
        y, c, side = self.rows, self.canvas, self.backward
        c.box(BACK_X, y["output"], 150, 26, "dy of the next layer", kind="ghost")
        below = self._linear_backward("down", "output", "swiglu")
        below = self._gradient("swiglu", "swiglu.dgrad", "dy", below)
        below = self._linear_backward("gate_up", below, "mlp_norm")
        below = self._gradient("mlp_norm", "mlp_norm.dgrad", "dy", below)
        below = self._gradient("attn_add", "attn_add.grad", "y", below)
        self._residual_backward("output", "attn_add", side.edge("attn_add.grad.residual"))
        below = self._linear_backward("o", below, "attention")
        below = self._gradient("attention", "attention.dgrad", "dy", below)
        below = self._gradient("rope", "rope_k.dgrad", "dy", below, "rope_q, rope_k .dgrad")
        if self.spec.qk_norm:
            below = self._gradient("qk_norm", "k_norm.dgrad", "dy", below, "q_norm, k_norm .dgrad")
        below = self._linear_backward("qkv", below, "attn_norm", "dq, dk, dv ")
        below = self._gradient("attn_norm", "attn_norm.dgrad", "dy", below)
        self._gradient("input", "input.grad", "y", below)
        self._residual_backward("attn_add", "input", side.edge("input.grad.residual"))

    def _gradient(self, row: str, name: str, slot: str, below: str, title: str = "") -> str:
        """A box of the backward spine, its input coming up from the row `below`; returns its own row."""
        node, edge = self._node(self.backward, name), self.backward.edge(f"{name}.{slot}")
        words = {"add": "residual + dy", "gemm": "dy @ W"}
        sub = f"{words.get(node.op, 'gradient')} → {node.out}"
        self.canvas.box(BACK_X, self.rows[row], BOX_W, BOX_H, title or name, sub, "", f"{node.name}: {node.rounding}")
        self._arrow_up(BACK_X, below, row, edge)
        return row

    def _arrow_up(self, x: float, below: str, row: str, edge: FlowEdge, word: str = "") -> None:
        kind = class_of(edge.format)
        start = self.rows[below] - (13 if below == "output" else BOX_H / 2)
        end = self.rows[row] + BOX_H / 2
        self.canvas.arrow([(x, start), (x, end)], kind)
        self.canvas.label(x + 8, end + 24, f"{word}{edge.format}", f"label {kind}")

    def _linear_backward(self, role: str, below: str, saved_row: str, word: str = "") -> str:
        """dgrad on the spine, wgrad beside it, each with the quantizers of its operands; x^T is what forward saved."""
        c, y, side = self.canvas, self.rows, self.backward
        fp8 = side.node(f"{role}.quantize_dy") is not None
        top = f"{role}.quantize_x" if fp8 else role
        if fp8:
            for name, x, slot in (("quantize_dy", BACK_X, "dgrad.dy"), ("quantize_dy_t", WGRAD_X, "wgrad.dy")):
                node = self._node(side, f"{role}.{name}")
                tip = f"{node.name}: {node.rounding}"
                c.box(x, y[role], BOX_W, BOX_H, f"{role}.{name}", f"→ {node.out}", "quantizer", tip)
                self._arrow_up(x, role, top, side.edge(f"{role}.{slot}"))
            incoming = side.edge(f"{role}.quantize_dy.x")
        else:
            incoming = side.edge(f"{role}.dgrad.dy")
        self._arrow_up(BACK_X, below, role, incoming, word)
        fork, kind = y[role] + BOX_H / 2 + 10, class_of(incoming.format)
        c.arrow([(BACK_X, fork), (WGRAD_X, fork), (WGRAD_X, y[role] + BOX_H / 2)], kind)
        weight, grad = side.edge(f"{role}.dgrad.weight"), self._node(side, f"{role}.dgrad")
        tip = f"{grad.name}: {grad.rounding}"
        c.box(BACK_X, y[top], BOX_W, BOX_H, f"{role}.dgrad → {grad.out}", f"dy @ W, {weight.format}", "", tip)
        wgrad, x_t = self._node(side, f"{role}.wgrad"), side.edge(f"{role}.wgrad.x")
        c.box(WGRAD_X, y[top], BOX_W, BOX_H, f"{role}.wgrad", f"dW = dyᵀ @ x → {wgrad.out}", "", wgrad.rounding)
        saved = f"quantize → {x_t.format}" if fp8 else f"{x_t.format}"
        c.box(WGRAD_X, y[saved_row], BOX_W, BOX_H, f"x of {role}, saved", saved, "quantizer" if fp8 else "")
        kind = class_of(x_t.format)
        c.arrow([(WGRAD_X, y[saved_row] + BOX_H / 2), (WGRAD_X, y[top] - BOX_H / 2)], kind)
        c.label(WGRAD_X + 8, y[top] - BOX_H / 2 - 10, str(x_t.format), f"label {kind}")
        return top

    def _residual_backward(self, below: str, row: str, edge: FlowEdge) -> None:
        y, x = self.rows, BACK_X - BOX_W / 2
        y0 = y[below] - (6 if below != "output" else 0)
        start = BACK_X - 75 if below == "output" else x
        lane = BACK_X - RESIDUAL
        self.canvas.arrow([(start, y0), (lane, y0), (lane, y[row] + 6), (x, y[row] + 6)], class_of(edge.format))

    def _footer(self) -> None:
        c, y = self.canvas, self.rows["output"] + 48
        num = self.spec.num_layers
        shown = [i for i in range(num) if i not in self.bf16_layers]
        text = f"Drawn: layer {self.layer}, equal in layers {layer_ranges(shown)}."
        if self.bf16_layers:
            text += f" Layers {layer_ranges(self.bf16_layers)}: every GEMM in bf16 on both sides."
        c.label(24, y, text, "soft")
        head, logits = self.train.edges["lm_head.x"], self.train.edges["logprob.logits"]
        out = self.train.nodes["logprob"].out
        c.label(
            24, y + 20, f"After the last layer, on both sides: norm → {head.format}, lm_head → {logits.format} logits, "
            f"logprob → {out}. Rounding points: rest the pointer on a box.", "soft",
        )  # fmt: skip
        x = 24.0
        for name, kind in (("bf16", "bf16"), ("e4m3[block,scale]", "e4m3"), ("fp32", "fp32"), ("differs ≠", "differs")):
            c.arrow([(x, y + 42), (x + 34, y + 42)], kind)
            c.label(x + 42, y + 46, name, f"label {kind}")
            x += 60 + 8 * len(name)


def _dtype(format: Format) -> str:
    """The format without its block, where there is no room for it."""
    return str(format).split("[")[0]
