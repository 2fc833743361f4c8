"""A small SVG canvas: boxes, arrows and labels, coloured by format in a way that colour-blind readers can tell apart.

Colours follow the reader's light or dark scheme. BF16 is blue and E4M3 orange (Okabe and Ito's safest pair), FP32 grey;
a difference is red, dashed, thick and labelled, so that it never depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from jetrl.precision.formats import Format

Point = tuple[float, float]
CLASSES = {"float32": "fp32", "bfloat16": "bf16", "float8_e4m3fn": "e4m3"}

STYLE = """
.flow { --bg: #ffffff; --ink: #1a1d21; --soft: #5b6470; --box: #f3f5f7; --edge: #aab2bb;
  --bf16: #0063a6; --e4m3: #b05a00; --fp32: #5b6470; --e4m3-box: #fff1dd; --differs: #c4001a; --good: #00694a; }
@media (prefers-color-scheme: dark) {
  .flow { --bg: #14171a; --ink: #e8eaed; --soft: #a3abb5; --box: #22272d; --edge: #566069;
    --bf16: #62b5f0; --e4m3: #f0a83c; --fp32: #a3abb5; --e4m3-box: #3a2c14; --differs: #ff7b85; --good: #4fd1a5; } }
.flow text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13px; fill: var(--ink); }
.flow .page { fill: var(--bg); }
.flow .title { font-size: 20px; font-weight: 600; }
.flow .head { font-size: 15px; font-weight: 600; }
.flow .soft { fill: var(--soft); font-size: 12px; }
.flow .good { fill: var(--good); font-weight: 600; }
.flow .small { font-size: 11px; fill: var(--soft); }
.flow .label { font-size: 11px; font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  paint-order: stroke; stroke: var(--bg); stroke-width: 4px; stroke-linejoin: round; }
.flow .box { fill: var(--box); stroke: var(--edge); stroke-width: 1; }
.flow .box.quantizer { fill: var(--e4m3-box); stroke: var(--e4m3); }
.flow .box.ghost { fill: none; stroke: var(--edge); stroke-dasharray: 3 3; }
.flow .box.differs { stroke: var(--differs); stroke-width: 2; stroke-dasharray: 6 3; }
.flow .line { fill: none; stroke-width: 1.8; }
.flow .rule { stroke: var(--edge); stroke-width: 1; }
.flow .line.bf16 { stroke: var(--bf16); } .flow .tip.bf16, .flow .label.bf16 { fill: var(--bf16); }
.flow .line.e4m3 { stroke: var(--e4m3); } .flow .tip.e4m3, .flow .label.e4m3 { fill: var(--e4m3); }
.flow .line.fp32 { stroke: var(--fp32); } .flow .tip.fp32, .flow .label.fp32 { fill: var(--fp32); }
.flow .line.differs { stroke: var(--differs); stroke-width: 2.8; stroke-dasharray: 7 4; }
.flow .tip.differs, .flow .label.differs { fill: var(--differs); }
.flow text.differs { fill: var(--differs); font-weight: 600; }
.flow text.label.differs { font-weight: 400; }
"""


def class_of(format: Format, differs: bool = False) -> str:
    """The CSS class of a tensor of this format."""
    return "differs" if differs else CLASSES[format.dtype]


class Canvas:
    """Collects elements; lines are drawn below boxes, labels above all."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.boxes: list[str] = []
        self.labels: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, title: str, sub: str = "", kind: str = "", tip: str = ""
    ) -> None:
        """A box centred at x, y with one or two lines of text; `tip` shows when the pointer rests on it."""
        rect = f'x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width:g}" height="{height:g}" rx="5"'
        hover = f"<title>{escape(tip)}</title>" if tip else ""
        self.boxes.append(f'<g>{hover}<rect class="{f"box {kind}".strip()}" {rect}/>')
        self.boxes.append(_text(x, y - 3 if sub else y + 4.5, title, "differs" if kind == "ghost differs" else ""))
        self.boxes.append((_text(x, y + 11.5, sub, "small") if sub else "") + "</g>")

    def arrow(self, points: Sequence[Point], kind: str, tip: bool = True) -> None:
        """A line through the points, with a head at the last one."""
        path = "M" + " L".join(f"{x:g},{y:g}" for x, y in points)
        self.lines.append(f'<path class="line {kind}" d="{path}"/>')
        if tip:
            (x0, y0), (x, y) = points[-2:]
            dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
            corners = [(x, y), (x - 8 * dx - 4 * dy, y - 8 * dy - 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy + 4 * dx)]
            path = " ".join(f"{a:g},{b:g}" for a, b in corners)
            self.labels.append(f'<polygon class="tip {kind}" points="{path}"/>')

    def label(self, x: float, y: float, text: str, kind: str = "label", anchor: str = "start") -> None:
        """Text at the baseline point."""
        self.labels.append(_text(x, y, text, kind, anchor))

    def rule(self, x0: float, x1: float, y: float) -> None:
        """A thin horizontal line."""
        self.lines.append(f'<path class="rule" d="M{x0:g},{y:g} H{x1:g}"/>')

    def render(self, width: float, height: float, title: str) -> str:
        """The whole document."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="flow" role="img" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}">'
        )
        page = f'<rect class="page" width="{width:g}" height="{height:g}"/>'
        body = [f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", page]
        return "\n".join([head, *body, *self.lines, *self.boxes, *self.labels, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "middle") -> str:
    css = f' class="{kind}"' if kind else ""
    return f'<text{css} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
