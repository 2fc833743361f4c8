"""`plot_runs`: one PNG of four panels (reward, held-out score, parity, time by phase) for a README or a paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetrl.errors import UserError
from jetrl.report.run import PARITY_KEY, Run, headline, held_out_name, load_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours: distinguishable with any common colour blindness. Dashes distinguish lines of one colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)))
PHASE_COLOURS = ("#77AADD", "#EE8866", "#44BB99", "#FFAABB", "#AAAA00", "#EEDD88", "#99DDFF", "#BBCC33", "#9A9A9A")
VISIBLE = 0.02  # of a step's time: a smaller part of a bar is not seen
PHASE_ORDER = ("rollout", "update", "eval", "reward", "pack", "publish", "load", "checkpoint", "report")


def plot_runs(run_dirs: Sequence[Path], out_png: Path) -> Path:
    """Draw these runs into one picture, write it to `out_png` and return its path. Needs matplotlib."""
    runs = load_runs(run_dirs)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plots need matplotlib, which is not installed. Run: pip install matplotlib") from error
    figure = Figure(figsize=(10, 6.4), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # no pyplot: nothing global, no display needed
    axes = figure.subplots(2, 2)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e8e8e4", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(colors="#55554f", labelsize=9)
    _curves(axes[0, 0], runs, "Reward", {run.label: "reward/mean" for run in runs}, smooth=True)
    held_out = held_out_name(run.held_out for run in runs)
    _curves(axes[0, 1], runs, held_out, {run.label: next(iter(run.accuracy_keys()), "") for run in runs})
    _parity(axes[1, 0], runs)
    _phases(axes[1, 1], runs)
    if len(runs) > 1:
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(len(runs), 4), frameon=False, fontsize=10)
    out_png = Path(out_png)
    try:
        out_png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out_png)
    except OSError as error:
        raise UserError(f"cannot write {out_png}: {error.strerror}. Choose another place for the picture.") from error
    return out_png


def _style(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % 6], "linestyle": DASHES[number // 6 % 3]}


def _title(axis: Axes, text: str, note: str = "") -> None:
    axis.set_title(text, loc="left", fontsize=11, fontweight="bold")
    if note:
        axis.set_title(note, loc="right", fontsize=9, color="#55554f")
    axis.set_xlabel("step", fontsize=9, color="#55554f")


def _curves(axis: Axes, runs: Sequence[Run], title: str, keys: dict[str, str], smooth: bool = False) -> None:
    longest = 0
    for number, run in enumerate(runs):
        steps, values = run.series(keys[run.label])
        longest = max(longest, len(steps))
        noisy = smooth and len(steps) > 60
        if noisy:
            axis.plot(steps, values, **_style(number), linewidth=0.8, alpha=0.25)
            values = running_mean(values, 0.7)
        marker = "o" if 0 < len(steps) <= 25 else ""
        axis.plot(steps, values, **_style(number), linewidth=1.8, marker=marker, markersize=3.5, label=run.label)
    if longest == 0:
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes, color="#55554f")
    low, high = axis.get_ylim()
    axis.set_ylim(min(0.0, low), 1.04 if not smooth and high <= 1.1 else high)  # a share is shown over its whole range
    named = {key for key in keys.values() if key}
    _title(axis, title, named.pop() if len(named) == 1 else "")


def _parity(axis: Axes, runs: Sequence[Run]) -> None:
    """Largest log-prob gap by step on a scale that has zero: exact runs lie on the zero line and are named there."""
    measured = [(number, run, run.series(PARITY_KEY)) for number, run in enumerate(runs)]
    measured = [one for one in measured if one[2][0]]
    gaps = [value for _, _, (_, values) in measured for value in values if value > 0 and math.isfinite(value)]
    if gaps:
        axis.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(gaps))))
        axis.set_ylim(0, 10.0 ** math.ceil(math.log10(max(gaps) * 1.001)))
    else:
        axis.set_ylim(0, 1)
        axis.set_yticks([0])
    exact = [run.label for _, run, _ in measured if headline(run).parity_nonzero_steps == 0]
    for number, _, (steps, values) in measured:
        axis.plot(steps, values, **_style(number), linewidth=1.8, clip_on=any(values))
    if exact:
        note = "exactly 0 in every step"
        text = note if len(runs) == 1 else "\n".join(f"{label}: {note}" for label in exact)
        height, side = (0.04, "bottom") if gaps else (0.5, "center")
        style: dict[str, Any] = {"ha": "center", "va": side, "color": "#0B7A4B", "fontweight": "bold"}
        axis.text(0.5, height, text, transform=axis.transAxes, fontsize=10, **style)
    elif not measured:
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes, color="#55554f")
    _title(axis, "Parity", "largest |log-prob of sampler - learner|")


def _phases(axis: Axes, runs: Sequence[Run]) -> None:
    """Mean seconds per step, one stacked bar per run: each part that can be seen, and the rest as "other"."""
    parts = _parts(runs)
    names, left = list(parts), [0.0] * len(runs)
    rows = list(range(len(runs)))[::-1]  # first run on top
    for number, (name, widths) in enumerate(parts.items()):
        axis.barh(rows, widths, left=left, height=0.5, color=PHASE_COLOURS[min(number, 8)], label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_yticks([])
    if len(runs) > 1:  # names above the bars: next to them, long ones would squeeze the panel
        for row, run in zip(rows, runs, strict=True):
            axis.text(0, row + 0.32, run.label, fontsize=9, color="#33332f", va="bottom")
    axis.set_ylim(-0.6, max(len(runs), 2) - 0.3)
    axis.grid(axis="y", visible=False)
    if names:
        place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": min(len(names), 6)}
        axis.legend(**place, frameon=False, fontsize=8.5, handlelength=1, columnspacing=1)
    else:
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes, color="#55554f")
    _title(axis, "Time by phase")
    axis.set_xlabel("seconds per step, mean", fontsize=9, color="#55554f")


def _parts(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Mean seconds of each phase in each run. The warm start is no part of a step; a phase of less than `VISIBLE` of
    every run's step is counted in "other"."""
    names = sorted({phase for run in runs for phase in run.phases() if phase != "warm start"}, key=_rank)
    seconds = {name: [seconds_a_step(run, name) for run in runs] for name in names}
    whole = [sum(one[i] for one in seconds.values()) for i in range(len(runs))]
    small = [name for name in names if all(s < VISIBLE * all_ for s, all_ in zip(seconds[name], whole, strict=True))]
    parts = {name: seconds[name] for name in names if name not in small}
    return parts | ({"other": [sum(seconds[name][i] for name in small) for i in range(len(runs))]} if small else {})


def seconds_a_step(run: Run, phase: str) -> float:
    """Seconds of a phase over the whole run, divided by the number of training steps."""
    steps = max(1, sum(int(row["step"]) > 0 for row in run.rows))
    return math.fsum(value for value in run.series(f"time/{phase}")[1] if math.isfinite(value)) / steps


def running_mean(values: Sequence[float], keep: float) -> list[float]:
    """Exponential mean without the bias of its start: `sum_i keep^(n-i) x_i / sum_i keep^(n-i)`; NaN stays NaN."""
    total = weight = 0.0
    means = []
    for value in values:
        if math.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight if math.isfinite(value) else math.nan)
    return means


def _rank(phase: str) -> tuple[int, str]:
    return (PHASE_ORDER.index(phase) if phase in PHASE_ORDER else len(PHASE_ORDER), phase)
