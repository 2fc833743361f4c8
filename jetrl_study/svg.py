"""Figures as SVG text, without a browser's or matplotlib's help: axes, lines with bands, points with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _FOOT = 62, 20, 12, 46


@dataclass(frozen=True, slots=True)
class Line:
    """A curve of an arm: its number (colour), label, points, and a band (low, high) at each of them."""

    arm: int
    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """A value's place from 0 to 1, and the ticks with their texts."""

    at: Callable[[float], float]
    ticks: list[tuple[float, str]]


def linear(values: Sequence[float], text: Callable[[float], str] = lambda v: f"{v:g}", zero: bool = False) -> Scale:
    """A scale whose ticks are round numbers. `zero`: it begins at 0."""
    low, high = (0.0 if zero else min(values)), max(values)
    if high <= low:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
        low = max(low, 0.0) if zero else low
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    ticks = [round(low + i * step, 12) for i in range(round((high - low) / step) + 1)]
    return Scale(lambda v: (v - low) / (high - low), [(tick, text(tick)) for tick in ticks])


def decades(values: Sequence[float]) -> Scale:
    """A logarithmic scale with zero at its foot, apart from the rest."""
    positive = [v for v in values if v > 0]
    if not positive:
        return Scale(lambda v: 0.0, [(0.0, "0")])
    first = math.floor(math.log10(min(positive)))
    last = max(math.ceil(math.log10(max(positive))), first + 1)
    span = last - first + 1

    def at(value: float) -> float:
        return 0.0 if value <= 0 else (math.log10(value) - first + 1) / span

    every = -(-span // 6)
    return Scale(at, [(0.0, "0"), *((10.0**d, f"1e{d}") for d in range(last, first - 1, -every))])


def doubling(values: Sequence[float]) -> Scale:
    """A scale on which each power of two is as far from the next; values from 1 on."""
    top = max(1, math.ceil(math.log2(max(values))))
    every = -(-(top + 1) // 9)
    return Scale(lambda v: math.log2(v) / top, [(2.0**p, f"{2**p:,}") for p in range(0, top + 1, every)])


def chart(
    lines: Sequence[Line], x: Scale, y: Scale, x_name: str, y_name: str, markers: bool = False
) -> str:
    """Lines with their bands over a grid. Each arm's parts have the class a<number>, which the page can hide."""
    parts = _frame(x, y, x_name, y_name)
    for line in lines:
        points = [(_x(x, a), _y(y, b)) for a, b in zip(line.xs, line.ys, strict=True)]
        inner = ""
        if len(line.low):
            edge = [(_x(x, a), _y(y, b)) for a, b in zip(line.xs, line.high, strict=True)]
            edge += [(_x(x, a), _y(y, b)) for a, b in zip(line.xs, line.low, strict=True)][::-1]
            inner += f'<polygon class="band" points="{_points(edge)}"/>'
        inner += f'<polyline points="{_points(points)}"/>'
        if markers or len(points) <= 12:
            inner += "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6"/>' for a, b in points)
        parts.append(f'<g class="arm a{line.arm}"><title>{escape(line.label)}</title>{inner}</g>')
    return _svg(parts, WIDTH, HEIGHT, f"{y_name} by {x_name}")


def forest(rows: Sequence[tuple[int, str, float, float | None, float | None, str]], name: str) -> str:
    """One row for each (arm, label, mean, low, high, note): a point, its interval, and a line at 0."""
    longest = max((len(label) for _, label, *_ in rows), default=0)
    noted = max((len(note) for *_, note in rows), default=0)
    height, left = 44 + 26 * len(rows), min(400, max(250, 14 + round(6.4 * longest)))
    right = max(250, 28 + round(5.8 * noted))
    width = 2 * WIDTH - 60
    ends = [v for _, _, mean, low, high, _ in rows for v in (mean, low, high) if v is not None]
    x = linear([*ends, 0.0], lambda v: f"{100 * v:+.3g}" if v else "0")

    def place(value: float) -> float:
        return left + x.at(value) * (width - left - right)

    foot = height - 34
    parts = []
    for tick, text in x.ticks:
        kind = "zero" if tick == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{place(tick):.1f}" x2="{place(tick):.1f}" y1="4" y2="{foot}"/>')
        parts.append(f'<text x="{place(tick):.1f}" y="{foot + 15}" text-anchor="middle">{escape(text)}</text>')
    for number, (arm, label, mean, low, high, note) in enumerate(rows):
        y = 18 + 26 * number
        inner = f'<text class="row" x="{left - 14}" y="{y + 4}" text-anchor="end">{escape(label)}</text>'
        if low is not None and high is not None:
            inner += f'<line class="bar" x1="{place(low):.1f}" x2="{place(high):.1f}" y1="{y}" y2="{y}"/>'
        inner += f'<circle cx="{place(mean):.1f}" cy="{y}" r="5"/>'
        inner += f'<text x="{width - right + 16}" y="{y + 4}">{escape(note)}</text>'
        parts.append(f'<g class="arm a{arm}"><title>{escape(f"{label}: {note}")}</title>{inner}</g>')
    middle = (left + width - right) / 2
    parts.append(f'<text x="{middle:.1f}" y="{height - 3}" text-anchor="middle">{escape(name)}</text>')
    return _svg(parts, width, height, name)


def _frame(x: Scale, y: Scale, x_name: str, y_name: str) -> list[str]:
    parts = []
    for tick, text in y.ticks:
        at = _y(y, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for tick, text in x.ticks:
        at = _x(x, tick)
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - _FOOT + 17}" text-anchor="middle">{escape(text)}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>')
    centre = (HEIGHT - _FOOT + _TOP) / 2
    turned = f'transform="translate(13 {centre:.1f}) rotate(-90)"'
    parts.append(f'<text {turned} text-anchor="middle">{escape(y_name)}</text>')
    return parts


def _svg(parts: Sequence[str], width: int, height: int, label: str) -> str:
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label={quoteattr(label)}>'
    return f'{head}{"".join(parts)}</svg>'


def _x(scale: Scale, value: float) -> float:
    return _LEFT + scale.at(value) * (WIDTH - _LEFT - _RIGHT)


def _y(scale: Scale, value: float) -> float:
    return HEIGHT - _FOOT - scale.at(value) * (HEIGHT - _FOOT - _TOP)


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
