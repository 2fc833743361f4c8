"""The figures of `study.html`, each from the plain data of study.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from jetrl.report.metrics import title_of
from jetrl_study.svg import Line, Scale, chart, decades, doubling, forest, linear
from jetrl_study.timing import seconds_at

Data = Mapping[str, Any]
GAP = "parity/logprob_abs_diff_mean"


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def figures(data: Data) -> list[tuple[str, str, str, bool]]:
    """(title, note, SVG, whether it is wide) of every figure for which the study has data."""
    band, score = "line: mean over seeds; band: smallest to largest", data["score"]
    found = [
        (f"Held-out {score}", band, by_step(data, _score, score, percent, zero=True), False),
        (f"Held-out {score} by time of training", f"{band}. Warm start, evaluations and checkpoints are left out",
         by_seconds(data), False),
        ("Mean log-prob gap by step", f"{band}. 0 is exact: the same bits on both sides",
         by_step(data, _series(GAP), "mean |d|", log=True), False),
        ("Mean log-prob gap by position in the answer", "mean over steps and seeds; token n to 2n - 1, the first is 1",
         by_position(data), False),
        *((f"Held-out {score} against {_label(data, other)}", _forest_note(data), differences(data, other), True)
          for other in data["study"]["against"]),
    ]
    others = {  # whether the axis is logarithmic
        "reward/mean": False, "policy/entropy": False, "policy/grad_norm": True, "parity/k3_kl": True,
        "parity/logprob_abs_diff_max": True, "correction/frac_truncated": False, "correction/frac_rejected": False,
        "response_length/mean": False, "response_length/frac_truncated": False,
    }
    found += [
        (title_of(key), band, svg, False) for key, log in others.items()
        if (svg := by_step(data, _series(key), key, log=log, drop_zeros=key.startswith("correction/")))
    ]
    clipped = by_step(data, _clipped, "share", percent, drop_zeros=True)
    found.append(("Clipped share of tokens", band, clipped, False))
    note = f"{band}. Tokens drawn from the old policy have a mean ratio of 1, up to chance"
    ratio = by_step(data, _off_one, "|mean ratio - 1|", log=True, drop_zeros=True)
    found.append((title_of("policy/ratio_mean"), note, ratio, False))
    change = by_step(data, _series("policy/logprob_abs_change_mean"), "mean |new - old|", log=True, drop_zeros=True)
    note = f"{band}. Of tokens, mean over the updates of a step"
    found.append((title_of("policy/logprob_abs_change_mean"), note, change, False))
    return [(title, note, svg, wide) for title, note, svg, wide in found if svg]


def by_step(
    data: Data, get: Callable[[Data], tuple[list[int], list[float]]], name: str,
    text: Callable[[float], str] = lambda v: f"{v:g}", zero: bool = False, log: bool = False,
    drop_zeros: bool = False,
) -> str:
    """One line for each arm: mean and range over its seeds. Empty if no run has the series, and with `drop_zeros` if it
    is never above 0."""
    lines = []
    for number, arm in enumerate(data["study"]["arms"]):
        values: dict[int, list[float]] = {}
        for run in _runs(data, arm["name"]):
            for step, value in zip(*get(run), strict=True):
                values.setdefault(step, []).append(value)
        if values:
            lines.append(_line(number, arm["label"], {float(step): values[step] for step in sorted(values)}))
    if not lines or (drop_zeros and not any(any(line.high) for line in lines)):
        return ""
    return chart(lines, _steps(lines), _values(lines, text, zero, log), "step", name)


def by_seconds(data: Data) -> str:
    """Held-out score against seconds of training: mean score at mean seconds of each evaluation."""
    lines = []
    for number, arm in enumerate(data["study"]["arms"]):
        values: dict[int, list[tuple[float, float]]] = {}
        for run in _runs(data, arm["name"]):
            clock = seconds_at(run)
            for step, value in zip(*_score(run), strict=True):
                seconds = clock.get(step)
                if seconds is not None:
                    values.setdefault(step, []).append((seconds, value))
        if values:
            points = [values[step] for step in sorted(values)]
            ys = [[y for _, y in point] for point in points]
            lines.append(Line(
                number, arm["label"], [fmean(x for x, _ in point) for point in points], list(map(fmean, ys)),
                list(map(min, ys)), list(map(max, ys)),
            ))
    if not lines:
        return ""
    xs = [x for line in lines for x in line.xs]
    return chart(lines, linear([*xs, 0.0]), _values(lines, percent, True, False), "seconds", data["score"])


def by_position(data: Data) -> str:
    """Mean gap by the token's number in its answer."""
    lines = []
    for number, arm in enumerate(data["study"]["arms"]):
        values: dict[float, list[float]] = {}
        for run in _runs(data, arm["name"]):
            for first, value in run["by_position"].items():
                values.setdefault(float(first), []).append(value)
        if values:
            lines.append(_line(number, arm["label"], dict(sorted(values.items()))))
    if not lines:
        return ""
    x = doubling([x for line in lines for x in line.xs])
    return chart(lines, x, _values(lines, str, True, True), "token of the answer", "mean |d|", markers=True)


def differences(data: Data, other: str) -> str:
    """A forest plot of all arms against `other`, for each outcome."""
    rows = []
    numbers = {arm["name"]: number for number, arm in enumerate(data["study"]["arms"])}
    for outcome in data["outcomes"]:
        for one in data["differences"]:
            if (one["against"], one["outcome"]) == (other, outcome):
                rows.append((
                    numbers[one["arm"]], f"{_label(data, one['arm'])}, {outcome}", one["mean"], one["low"],
                    one["high"], interval(one),
                ))
    return forest(rows, f"difference of held-out {data['score']}, times 100") if rows else ""


def interval(one: Data) -> str:
    """A difference in words: mean, interval, up to which step if not to the end, verdict."""
    spread = f"({len(one['seeds'])} seed)"
    if one["low"] is not None:
        spread = f"[{100 * one['low']:+.1f}, {100 * one['high']:+.1f}]"
    upto = f" to step {one['to_step']}" if "to_step" in one else ""
    return f"{100 * one['mean']:+.1f} {spread}{upto}: {one['verdict']}"


def _forest_note(data: Data) -> str:
    method = data["method"]
    return (
        f"paired: same problems, same seeds. Bars: {100 * method['level']:g}% intervals of {method['resamples']:,} "
        "bootstrap resamples of seeds and problems. last: the last evaluation; mean: all after the start"
    )


def _label(data: Data, name: str) -> str:
    return next(arm["label"] for arm in data["study"]["arms"] if arm["name"] == name)


def _runs(data: Data, arm: str) -> list[Data]:
    return [run for run in data["runs"] if run["arm"] == arm]


def _score(run: Data) -> tuple[list[int], list[float]]:
    return run["held_out"]["steps"], run["held_out"]["mean"]


def _series(key: str) -> Callable[[Data], tuple[list[int], list[float]]]:
    def get(run: Data) -> tuple[list[int], list[float]]:
        series = run["series"].get(key, {"steps": [], "values": []})
        pairs = [(s, v) for s, v in zip(series["steps"], series["values"], strict=True) if v is not None]
        return [s for s, _ in pairs], [v for _, v in pairs]

    return get


def _clipped(run: Data) -> tuple[list[int], list[float]]:
    steps, low = _series("policy/clip_frac_low")(run)
    high = dict(zip(*_series("policy/clip_frac_high")(run), strict=True))
    return steps, [value + high.get(step, 0.0) for step, value in zip(steps, low, strict=True)]


def _off_one(run: Data) -> tuple[list[int], list[float]]:
    steps, means = _series("policy/ratio_mean")(run)
    return steps, [abs(mean - 1) for mean in means]


def _line(number: int, label: str, values: Mapping[float, Sequence[float]]) -> Line:
    ys = list(values.values())
    return Line(number, label, list(values), list(map(fmean, ys)), list(map(min, ys)), list(map(max, ys)))


def _steps(lines: Sequence[Line]) -> Scale:
    return linear([0.0, *(x for line in lines for x in line.xs)])


def _values(lines: Sequence[Line], text: Callable[[float], str], zero: bool, log: bool) -> Scale:
    values = [v for line in lines for v in (*line.low, *line.high)]
    if log:
        return decades(values)
    return linear([*values, 0.0] if zero or min(values) >= 0 else values, text)
