"""The flow of one decoder layer as a picture: rollout, weights, training forward and backward side by side.

The layer drawn is the first that the recipe quantizes (or layer 0), since the others are either equal to it or plain
BF16. Everything is read from the flow graphs; `layout.py` says what stands where. Rows run down in the order of
execution, and up in the backward column. Tensors that pass a row by run in lanes at the side of their column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jetrl.precision.blocks.layouts import blocks_of, roles_of
from jetrl.precision.flow import build_flow, diff_recipe, flow_digest, layer_ranges
from jetrl.precision.graph import FlowEdge, FlowGraph, FlowNode
from jetrl.precision.picture.layout import Box, Layer, Line, arrange
from jetrl.precision.picture.svg import Canvas, Point, class_of
from jetrl.precision.picture.table import flow_text
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec

__all__ = ["flow_svg", "flow_text"]

WIDTH, TOP, PITCH = 1580, 150, 70
BOX_W, BOX_H, GAP, LANE = 190, 38, 14, 10
BACKWARD_W = 156  # of its boxes; up to three stand side by side
ROLLOUT_X, WEIGHT_X, TRAIN_X, BACK_X = 165, 482, 799, 1110
WORDS = {  # what common operators compute; those of one kind of block are in `Block.formulas`
    "gemm": "x @ Wᵀ", "grouped_gemm": "x @ (its expert's W)ᵀ", "add": "residual + y", "rms_norm": "RMSNorm",
    "cache_read": "KV cache", "weight_sum": "Σ over tokens", "concat": "concatenate",
}


def flow_svg(spec: ModelSpec, recipe: Recipe, sampler: str = "") -> str:
    """A self-contained SVG document (no scripts, no outside resources), for light and dark backgrounds. `sampler`: the
    engine that samples, where it does not promise the bits of the training forward."""
    return _Drawing(spec, recipe, sampler).draw()


@dataclass(frozen=True, slots=True)
class _Column:
    """A view's boxes at their places. `x`: the middle of the spine. `side`: -1 or 1, where its lanes run. `down`:
    whether it is read downwards."""

    graph: FlowGraph
    layer: Layer
    x: float
    width: float
    side: int
    down: bool
    rows: Mapping[str, float]  # y by the name of a box

    def at(self, box: Box) -> Point:
        return self.x + box.place * (self.width + GAP + 6), self.rows[box.name]


class _Drawing:
    def __init__(self, spec: ModelSpec, recipe: Recipe, sampler: str) -> None:
        self.spec, self.recipe, self.sampler, self.canvas = spec, recipe, sampler, Canvas()
        quantized = [
            i for i in range(spec.num_layers)
            if recipe.linear(i, roles_of(spec, i)[0], "rollout") is not None or recipe.weight_only(i) is not None
        ]
        self.layer = quantized[0] if quantized else 0
        self.bf16_layers = [i for i in range(spec.num_layers) if i not in quantized] if quantized else []
        self.prefix = f"layers.{self.layer}."
        self.formulas = WORDS | {op: text for b in blocks_of(spec, self.layer) for op, text in b.formulas.items()}
        self.differences = diff_recipe(spec, recipe)
        self.differs = {d.name.removeprefix(self.prefix) for d in self.differences}
        rollout, train = build_flow(spec, recipe, "rollout"), build_flow(spec, recipe, "train_forward")
        backward = build_flow(spec, recipe, "train_backward")
        above = arrange(rollout, self.layer, 1)
        below = arrange(backward, self.layer, 3)
        self.bottom = TOP + PITCH * (1 + max(above.rows, below.rows))  # of the output
        rows = {name: TOP + PITCH * (1.0 + box.row) for name, box in above.by_name.items()}
        self.rollout = _Column(rollout, above, ROLLOUT_X, BOX_W, -1, True, rows)
        self.train = _Column(train, arrange(train, self.layer, 1), TRAIN_X, BOX_W, 1, True, rows)
        upwards = {name: self.bottom - PITCH * (1.0 + box.row) for name, box in below.by_name.items()}
        self.backward = _Column(backward, below, BACK_X, BACKWARD_W, -1, False, upwards)

    def draw(self) -> str:
        self._headings()
        for column in (self.rollout, self.train, self.backward):
            self._column(column)
        for node in self.rollout.graph.nodes:
            if node.name.startswith(self.prefix) and node.op in ("gemm", "grouped_gemm"):
                self._weight(node.name.removeprefix(self.prefix))
        self._footer()
        return self.canvas.render(WIDTH, self.bottom + 120, f"Precision flow {self.recipe.name}, layer {self.layer}")

    def _headings(self) -> None:
        c, spec = self.canvas, self.spec
        title = f"Precision flow: {self.recipe.name}   ({spec.family}, {spec.num_layers} layers)"
        c.label(24, 36, title, "title")
        c.label(WIDTH - 24, 36, f"digest {flow_digest(spec, self.recipe)}", "label", "end")
        if self.differences:
            text = f"≠  Rollout and training differ in {len(self.differences)} places (red, dashed)"
            c.label(24, 62, text, "differs")
        elif self.sampler:
            text = f"Equal formats, edge by edge. {self.sampler} samples and does not promise equal bits"
            c.label(24, 62, text, "label")
        else:
            c.label(24, 62, "✓  The rollout is a subgraph of the training forward, edge by edge", "good")
        columns = (
            ("Rollout", ROLLOUT_X, 280), ("Published weights", WEIGHT_X, 200), ("Training forward", TRAIN_X, 280),
            ("Training backward (read upwards)", BACK_X + BACKWARD_W + GAP + 6, 500),
        )
        for text, x, width in columns:
            c.label(x, 100, text, "head", "middle")
            c.rule(x - width / 2, x + width / 2, 110)

    # ---- columns ----------------------------------------------------------------------------------------------------

    def _column(self, column: _Column) -> None:
        ends = ("residual x", "to the next layer") if column.down else ("dy of the next layer", "to the layer before")
        ys = (TOP, self.bottom) if column.down else (self.bottom, self._top(column) - PITCH)
        for text, y in zip(ends, ys, strict=True):
            self.canvas.box(column.x, y, 150, 26, text, kind="ghost")
        for box in column.layer.boxes:
            self._box(column, box)
        if column is self.train:
            self._absent(column)
        self._lines(column)

    def _top(self, column: _Column) -> float:
        return min(column.rows[box.name] for box in column.layer.boxes)

    def _box(self, column: _Column, box: Box) -> None:
        node, (x, y) = box.nodes[0], column.at(box)
        kind = "quantizer" if box.op == "quantize" else ""
        if column is self.rollout and box.name in self.differs:
            kind += " differs"
        tip = "\n".join(f"{n.name}: {n.rounding}" for n in box.nodes)
        self.canvas.box(x, y, column.width, BOX_H, _title(box), f"{self._words(column, node)}→ {box.out}", kind, tip)

    def _words(self, column: _Column, node: FlowNode) -> str:
        if not column.down and node.op in ("gemm", "grouped_gemm"):
            return "dW = dyᵀ @ x " if node.name.endswith(".wgrad") else "dy @ W "
        word = self.formulas.get(node.op, "").format_map(dict(node.attributes))
        if node.op == "add" and not {e.name for e in column.graph.edges} & {f"{node.name}.residual"}:
            word = "sum"
        return f"{word} " if word else ""

    def _absent(self, column: _Column) -> None:
        """Quantizers that only the rollout has."""
        for box in self.rollout.layer.boxes:
            if box.op == "quantize" and box.name not in column.layer.by_name:
                self.canvas.box(column.x, column.rows[box.name], BOX_W, BOX_H, f"no {box.op}r", kind="ghost differs")

    # ---- lines ------------------------------------------------------------------------------------------------------

    def _lines(self, column: _Column) -> None:
        lanes: list[tuple[float, float, Line]] = []
        labelled: set[tuple[int, str]] = set()
        for line in column.layer.lines:
            y0, y1 = self._ends(column, line)
            if self._is_free(column, line, min(y0, y1), max(y0, y1)):
                self._short(column, line, y0, y1, labelled)
            else:
                lanes.append((min(y0, y1), max(y0, y1), line))
        taken: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for top, end, line in sorted(lanes, key=lambda lane: lane[1] - lane[0]):
            right = self._side(column, line)
            number = 0
            while any(top < b and a < end for a, b in taken.get((right, number), [])):
                number += 1
            taken.setdefault((right, number), []).append((top, end))
            self._lane(column, line, right, number)

    def _ends(self, column: _Column, line: Line) -> tuple[float, float]:
        """The y of the middle of both boxes."""
        first, last = (TOP, self.bottom) if column.down else (self.bottom, self._top(column) - PITCH)
        y0 = first if line.source is None else column.rows[line.source.name]
        return y0, last if line.target is None else column.rows[line.target.name]

    def _is_free(self, column: _Column, line: Line, top: float, end: float) -> bool:
        """Whether nothing stands in the rows between."""
        return not any(top < column.rows[box.name] < end for box in column.layer.boxes)

    def _short(self, column: _Column, line: Line, y0: float, y1: float, labelled: set[tuple[int, str]]) -> None:
        """A line between neighbouring rows, and what it carries, named once at its source."""
        way = 1 if column.down else -1
        x0 = column.x if line.source is None else column.at(line.source)[0]
        x1 = column.x if line.target is None else column.at(line.target)[0]
        differs = bool(self.differs & set(line.names)) and column.down
        kind = class_of(line.format, differs)
        half0, half1 = (13 if end is None else BOX_H / 2 for end in (line.source, line.target))
        start, end, turn = y0 + way * half0, y1 - way * half1, y0 + way * (half0 + 9)
        x1 += 0 if x0 == x1 else 24 if x0 > x1 else 0
        points = [(x0, start), (x1, end)] if x0 == x1 else [(x0, start), (x0, turn), (x1, turn), (x1, end)]
        self.canvas.arrow(points, kind)
        if line.source is not None and line.source.place and not column.down:
            return  # no room beside it; its box says the format
        several = line.target is not None and len(self._into(column, line.target)) > 1
        slots = f"{', '.join(line.slots)} " if several and column.down and len(line.slots) > 1 else ""
        text = f"{slots}{line.format}{' ≠' if differs else ''}"
        if (id(line.source), text) not in labelled:
            labelled.add((id(line.source), text))
            away = 22 if column.down else 12  # of the baseline from the box
            self.canvas.label(x0 + 8, start + way * away + (0 if column.down else 4), text, f"label {kind}")

    def _into(self, column: _Column, box: Box | None) -> list[Line]:
        return [line for line in column.layer.lines if line.target is box]

    def _side(self, column: _Column, line: Line) -> int:
        """The side of a lane: the column's, or the right one where it begins beside the spine of the backward."""
        beside = any(box is not None and box.place for box in (line.source, line.target))
        return 1 if beside and not column.down else column.side

    def _lane(self, column: _Column, line: Line, side: int, number: int) -> None:
        """A line past other rows: out of a box, along the column's side, into another box."""
        way = 1 if column.down else -1
        outer = column.width / 2 if side < 0 or column.down else 2.5 * column.width + 2 * (GAP + 6)
        x = column.x + side * (outer + 12 + LANE * number)
        (y0, y1), kind = self._ends(column, line), class_of(line.format)
        x0 = column.x if line.source is None else column.at(line.source)[0]
        x1 = column.x if line.target is None else column.at(line.target)[0]
        if side == column.side:  # nothing stands between the spine and the lane
            start = x0 + side * (75 if line.source is None else column.width / 2)
            others = [other for other in self._into(column, line.target) if other.slots != line.slots]
            below = 6 if len(others) > 1 and "residual" not in line.slots else -6
            a, b = y0 + way * (0 if line.source is None else 6), y1 + way * below
            points = [(start, a), (x, a), (x, b), (x1 + side * column.width / 2, b)]
        else:
            a, b = y0 + way * (BOX_H / 2 + 5), y1 - way * (BOX_H / 2 + 7)
            half, end = way * BOX_H / 2, x1 + 30
            points = [(x0, y0 + half), (x0, a), (x, a), (x, b), (end, b), (end, y1 - half)]
        self.canvas.arrow(points, kind)

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _weight(self, role: str) -> None:
        """One BF16-rounded weight for both sides, and its quantizer where a side reads codes."""
        c, width, y = self.canvas, 156, self.rollout.rows[role]
        quantizer = f"{role}.quantize_weight"
        graphs = (self.rollout.graph, self.train.graph)
        nodes, train_nodes = (graph.node_map() for graph in graphs)
        edges = [graph.edge_map() for graph in graphs]
        node = nodes.get(self.prefix + quantizer)
        top = y - PITCH if node else y
        c.box(WEIGHT_X, top, width, BOX_H, f"{role}.weight", "master → bf16", tip="master weight rounded to bf16")
        if node:
            kind = "quantizer differs" if quantizer in self.differs else "quantizer"
            tip = f"{node.name}: {node.rounding}"
            c.box(WEIGHT_X, y, width, BOX_H, "quantize_weight", f"→ {node.out}", kind, tip)
            edge = edges[0][f"{node.name}.x"]
            c.arrow([(WEIGHT_X, top + BOX_H / 2), (WEIGHT_X, y - BOX_H / 2)], class_of(edge.format))
            c.label(WEIGHT_X + 8, y - BOX_H / 2 - 10, str(edge.format), f"label {class_of(edge.format)}")
        for side, x, sign in ((0, ROLLOUT_X, -1), (1, TRAIN_X, 1)):
            edge = edges[side][f"{self.prefix}{role}.weight"]
            codes = self.prefix + quantizer in (nodes, train_nodes)[side]
            self._weight_line(edge, x, y, top, sign, node is not None and not codes, codes)

    def _weight_line(
        self, edge: FlowEdge, x: float, y: float, top: float, sign: int, past: bool, codes: bool
    ) -> None:
        """From the weight, or from its quantizer, to the side `sign`; `past`: around the quantizer."""
        differs = edge.name.removeprefix(self.prefix) in self.differs
        kind, start, end = class_of(edge.format, differs), WEIGHT_X + sign * 78, x - sign * BOX_W / 2
        turn = start + sign * 30
        self.canvas.arrow([(start, top), (turn, top), (turn, y), (end, y)] if past else [(start, y), (end, y)], kind)
        middle = (start + end) / 2 + (15 if past else 0)
        self.canvas.label(middle, y - 7, f"{edge.format}{' ≠' if differs else ''}", f"label {kind}", "middle")

    def _footer(self) -> None:
        c, y = self.canvas, self.bottom + 48
        num = self.spec.num_layers
        shown = [i for i in range(num) if i not in self.bf16_layers]
        text = f"Drawn: layer {self.layer}, equal in layers {layer_ranges(shown)}."
        if self.bf16_layers:
            text += f" Layers {layer_ranges(self.bf16_layers)}: every GEMM in bf16 on both sides."
        c.label(24, y, text, "soft")
        edges = self.train.graph.edge_map()
        head, logits = edges["lm_head.x"], edges["logprob.logits"]
        out = self.train.graph.node_map()["logprob"].out
        c.label(
            24, y + 20, f"After the last layer, on both sides: norm → {head.format}, lm_head → {logits.format} logits, "
            f"logprob → {out}. Rounding points: hover over a box.", "soft",
        )
        x = 24.0
        for name, kind in (("bf16", "bf16"), ("e4m3[block,scale]", "e4m3"), ("fp32", "fp32"), ("differs ≠", "differs")):
            c.arrow([(x, y + 42), (x + 34, y + 42)], kind)
            c.label(x + 42, y + 46, name, f"label {kind}")
            x += 60 + 8 * len(name)


def _title(box: Box) -> str:
    """Its operators' names; those of the backward share their ending."""
    stems, endings = zip(*(title.rpartition(".")[::2] for title in box.titles), strict=True)
    if len(box.titles) > 1 and all(stems) and len(set(endings)) == 1:
        return f"{', '.join(stems)} .{endings[0]}"
    return ", ".join(title.removesuffix("_read") for title in box.titles)
