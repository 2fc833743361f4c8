"""The flow of one decoder layer as a picture: rollout, weights, training forward and backward side by side.

The layer drawn is the first that the recipe quantizes (or layer 0), since the others are either equal to it or plain
BF16. Rows run down in the order of execution. Blocks draw themselves (`block.Block`); this module draws the rest.
"""

from __future__ import annotations

from jetrl.precision.blocks.layouts import blocks_of, roles_of
from jetrl.precision.flow import build_flow, diff_recipe, flow_digest, layer_ranges
from jetrl.precision.picture.pen import (
    BACK_X,
    PITCH,
    RESIDUAL,
    ROLLOUT_X,
    TOP,
    TRAIN_X,
    WEIGHT_X,
    WGRAD_X,
    WIDTH,
    Graph,
    Pen,
)
from jetrl.precision.picture.table import flow_text
from jetrl.precision.recipe import Recipe
from jetrl.spec import ModelSpec

__all__ = ["flow_svg", "flow_text"]


def flow_svg(spec: ModelSpec, recipe: Recipe, sampler: str = "") -> str:
    """A self-contained SVG document (no scripts, no outside resources), for light and dark backgrounds. `sampler`: the
    engine that samples, where it does not promise the bits of the training forward."""
    return _Drawing(spec, recipe, sampler).draw()


class _Drawing:
    def __init__(self, spec: ModelSpec, recipe: Recipe, sampler: str) -> None:
        self.spec, self.recipe, self.sampler = spec, recipe, sampler
        quantized = [i for i in range(spec.num_layers) if recipe.linear(i, roles_of(spec, i)[0], "rollout") is not None]
        self.layer = quantized[0] if quantized else 0
        self.bf16_layers = [i for i in range(spec.num_layers) if i not in quantized] if quantized else []
        self.blocks = blocks_of(spec, self.layer)
        rollout = Graph(build_flow(spec, recipe, "rollout"), self.layer)
        self.train = Graph(build_flow(spec, recipe, "train_forward"), self.layer)
        backward = Graph(build_flow(spec, recipe, "train_backward"), self.layer)
        self.differences = diff_recipe(spec, recipe)
        differs = {d.name.removeprefix(rollout.prefix) for d in self.differences}
        self.pen = Pen(spec, recipe, rollout, self.train, backward, differs)
        self.pen.rows = self.rows = self._rows()
        self.canvas = self.pen.canvas

    def _rows(self) -> dict[str, float]:
        """The y of each row; a row exists if any column has something in it."""
        names = ["input"]
        for block in self.blocks:
            names += [f"{block.name}_norm", *block.rows(self.pen), f"{block.name}_add"]
        return {name: TOP + i * PITCH for i, name in enumerate([*names, "output"])}

    def draw(self) -> str:
        self._headings()
        for graph, x, lane in ((self.pen.rollout, ROLLOUT_X, -RESIDUAL), (self.train, TRAIN_X, RESIDUAL)):
            self._forward(graph, x, lane)
        for role in roles_of(self.spec, self.layer):
            self.pen.weight(role)
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
        elif self.sampler:
            text = f"Equal formats, edge by edge. {self.sampler} samples and does not promise equal bits"
            c.label(24, 62, text, "label")
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

    def _forward(self, graph: Graph, x: float, lane: float) -> None:
        pen, y, stream = self.pen, self.rows, "input"
        self.canvas.box(x, y["input"], 130, 26, "residual x", kind="ghost")
        for block in self.blocks:
            add = f"{block.name}_add"
            pen.operator(graph, x, f"{block.name}_norm", "x", stream)
            pen.operator(graph, x, add, "y", block.draw_forward(pen, graph, x))
            pen.residual(graph, x, lane, stream, add)
            stream = add
        pen.arrow_down(x, stream, "output", graph.node(stream), "")
        self.canvas.box(x, y["output"], 150, 26, "to the next layer", kind="ghost")

    def _backward(self) -> None:
        pen, graph = self.pen, self.pen.backward
        self.canvas.box(BACK_X, self.rows["output"], 150, 26, "dy of the next layer", kind="ghost")
        streams = ["input", *(f"{block.name}_add" for block in self.blocks[:-1])]  # before each block
        below = stream = "output"
        for block, row in zip(reversed(self.blocks), reversed(streams), strict=True):
            below = block.draw_backward(pen, below)
            below = pen.gradient(f"{block.name}_norm", f"{block.name}_norm.dgrad", "dy", below)
            below = pen.gradient(row, f"{row}.grad", "y", below)
            pen.residual_backward(stream, row, graph.edge(f"{row}.grad.residual"))
            stream = row

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
            f"logprob → {out}. Rounding points: hover over a box.", "soft",
        )
        x = 24.0
        for name, kind in (("bf16", "bf16"), ("e4m3[block,scale]", "e4m3"), ("fp32", "fp32"), ("differs ≠", "differs")):
            c.arrow([(x, y + 42), (x + 34, y + 42)], kind)
            c.label(x + 42, y + 46, name, f"label {kind}")
            x += 60 + 8 * len(name)
