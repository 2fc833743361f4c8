"""The gap by depth as a picture (SVG, no library) and as lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from jetrl.parity.depth import DepthResult, Gaps

_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _GAP = 720, 190, 74, 24, 82, 62
_COLOURS = ("#0063a6", "#b05a00", "#5b6470")
_STYLE = """
text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 12px; fill: #1a1d21; }
.page { fill: #ffffff; } .title { font-size: 16px; font-weight: 600; } .soft { fill: #5b6470; }
.grid { stroke: #d9dee3; } .axis { stroke: #8a939c; }
"""


def depth_svg(results: Sequence[DepthResult]) -> str:
    """Two panels, by position and by turn: each engine's mean gap as a line and the largest gap as dots, on a
    logarithmic scale whose foot is an exact 0."""
    first = results[0]
    title = "Gap between sampler and learner, by depth"
    about = f"{first.model}, {first.precision}, KV cache {first.kv_cache}. Filled: the mean of |d|; rings: the largest."
    height = _TOP + 2 * (_PANEL + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}: {escape(about)}</title><style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>', _text(_LEFT, 24, title, "title"),
        _text(_LEFT, 43, about, "soft"),
    ]
    for n, result in enumerate(results):
        x, said = _LEFT + 330 * n, "0 everywhere" if result.bit_equal else f"largest {_largest(result):.3g}"
        parts.append(f'<circle cx="{x + 5}" cy="60" r="4" fill="{_COLOURS[n % 3]}"/>')
        parts.append(_text(x + 16, 64, f"{result.engine}: {said}"))
    decades = _decades([g.largest for r in results for g in (*r.positions, *r.turns)])
    drawn = [list(r.positions) for r in results]
    last = math.log2(first.depth)
    ticks = [(n / last, f"{1 << n:,}") for n in range(3, int(last) + 1, 2 if last > 9 else 1)]
    places = [[math.log2(max(1, (g.start + g.end) / 2)) / last for g in row] for row in drawn]
    parts += _panel(_TOP, "position in the conversation, tokens", ticks, decades, drawn, places)
    count = len(first.turns)
    ticks = [((n + 0.5) / count, str(n + 1)) for n in range(0, count, max(1, count // 20))]
    turns = [list(r.turns) for r in results]
    parts += _panel(_TOP + _PANEL + _GAP, "turn", ticks, decades, turns, [
        [(n + 0.5) / count for n in range(len(row))] for row in turns
    ])
    return "\n".join([*parts, "</svg>"]) + "\n"


def depth_lines(result: DepthResult) -> Iterator[str]:
    """The result as lines of text, by position and by turn."""
    yield f"{result.engine}: {'zero at every depth' if result.bit_equal else 'NOT ZERO'}"
    yield f"  {'positions':>16} {'drawn':>7} {'differ':>7} {'mean gap':>10} {'largest':>10}"
    for gaps in result.positions:
        yield f"  {f'{gaps.start} to {gaps.end - 1}':>16} {_numbers(gaps)}"
    yield f"  {'turn':>5} {'looks back':>10} {'drawn':>7} {'differ':>7} {'mean gap':>10} {'largest':>10}"
    for gaps in result.turns:
        yield f"  {gaps.turn or '':>5} {gaps.looks_back or '':>10} {_numbers(gaps)}"


def _numbers(gaps: Gaps) -> str:
    return f"{gaps.tokens:>7} {gaps.different:>7} {gaps.mean:>10.3g} {gaps.largest:>10.3g}"


def _largest(result: DepthResult) -> float:
    return max(gaps.largest for gaps in result.turns)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten that the scale has above its 0."""
    positive = [v for v in values if v > 0] or [1e-3, 1.0]
    low = math.floor(math.log10(min(positive)))
    return max(low, -9), max(math.ceil(math.log10(max(positive))), max(low, -9) + 1)


def _panel(
    top: float, name: str, ticks: Sequence[tuple[float, str]], decades: tuple[int, int],
    rows: Sequence[Sequence[Gaps]], places: Sequence[Sequence[float]],
) -> list[str]:
    low, high = decades
    wide, foot = _WIDTH - _LEFT - _RIGHT, top + _PANEL

    def height(value: float) -> float:
        share = 0.0 if value <= 0 else (math.log10(max(value, 10.0**low)) - low + 1) / (high - low + 1)
        return foot - share * _PANEL

    parts = []
    for level, label in [(0.0, "0"), *((10.0**n, f"1e{n}") for n in range(low, high + 1))]:
        y = height(level)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 8, y + 4, label, "soft", "end"))
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_LEFT + wide}" y1="{foot}" y2="{foot}"/>')
    parts += [_text(_LEFT + at * wide, foot + 16, label, "soft", "middle") for at, label in ticks]
    parts.append(_text(_LEFT + wide / 2, foot + 34, name, "soft", "middle"))
    for n, (row, xs) in enumerate(zip(rows, places, strict=True)):
        colour = _COLOURS[n % 3]
        points = [(_LEFT + x * wide, height(g.mean)) for g, x in zip(row, xs, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        for (x, y), gaps in zip(points, row, strict=True):
            tip = f"<title>{escape(_tip(gaps))}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">{tip}</circle>')
            if gaps.largest > 0:
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{height(gaps.largest):.1f}" r="2.6" fill="none" stroke="{colour}">{tip}'
                    "</circle>"
                )
    return parts


def _tip(gaps: Gaps) -> str:
    where = f"positions {gaps.start} to {gaps.end - 1}"
    if gaps.turn is not None:
        where = f"turn {gaps.turn}, {where}" + (f", looks back {gaps.looks_back} tokens" if gaps.looks_back else "")
    return f"{where}: {gaps.different} of {gaps.tokens} differ, mean {gaps.mean:.3g}, largest {gaps.largest:.3g}"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
