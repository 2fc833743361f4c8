"""Numbers, times and curves as short text for the console."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from textwrap import fill

from rich.console import Console

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.:-=+*#"
_LOSS = re.compile(r"eval/[^/]+/loss")
_ACCURACY = re.compile(r"eval/.+/avg@\d+")


def narrator(console: Console, quiet: bool) -> Callable[[str], None]:
    """Prints what a command is doing, a line each; nothing with `quiet`, where only JSON is wanted."""
    return (lambda text: None) if quiet else lambda text: console.print(wrapped(f"... {text}"), style="dim")


def counted(n: float, what: str) -> str:
    """1 step, 2 steps."""
    return f"{n:.0f} {what}" + "s" * (n != 1)


def number(value: float | None, digits: int) -> str:
    """The value with `digits` decimals; `-` if there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def accuracy_of(metrics: Mapping[str, float]) -> float | None:
    """The first held-out accuracy (`eval/<set>/avg@k`) of a row."""
    return next((float(value) for key, value in metrics.items() if _ACCURACY.fullmatch(key)), None)


def held_out_loss_of(metrics: Mapping[str, float]) -> float | None:
    """The loss on held-out answers (`eval/<set>/loss`) of a row."""
    return next((float(value) for key, value in metrics.items() if _LOSS.fullmatch(key)), None)


def unscored_of(metrics: Mapping[str, float]) -> str:
    """Of an evaluation, ` (6 of 8 not scored)`, and failed conversations likewise; empty where all count."""
    found: dict[str, float] = {}
    for key, value in metrics.items():
        if key.startswith("eval/") and (name := key.rpartition("/")[2]) in ("num_unscored", "num_failed"):
            found[name] = value
        elif key.startswith("eval/") and key.endswith("/num_completions"):
            found["all"] = value
    parts = [f"{found[key]:.0f} of {found['all']:.0f} {what}" for key, what in
            (("num_unscored", "not scored"), ("num_failed", "failed")) if key in found and "all" in found]
    return f" ({', '.join(parts)})" if parts else ""


def parity_note(missing: int) -> str:
    """What is said of training steps without a comparison: that they say nothing of parity."""
    return f"; {counted(missing, 'step')} had nothing to compare" if missing else ""


def parity_text(gap: float) -> str:
    """`0` only for a gap of exactly 0; else the gap with three digits (1.19e-07, 0.0123)."""
    return "0" if gap == 0.0 else f"{gap:.3g}"


def count(value: float) -> str:
    """12345.6 -> 12,346; small rates keep a decimal."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """83 -> 1:23, 3723 -> 1:02:03; below ten seconds with one decimal."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def wrapped(text: str, indent: int = 0, hang: int = 0) -> str:
    """The text in lines of at most 80 characters, `indent` before each and `hang` more before all but the first. Words
    are not cut."""
    first, later = " " * indent, " " * (indent + hang)
    return fill(
        text, 80, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """One character per value; more than `width` values are averaged in equal runs. NaN is a blank."""
    if len(values) > width:
        edges = [i * len(values) // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, span = min(finite), max(finite) - min(finite)
    top = len(blocks) - 1
    levels = [round((value - low) / (span or 1.0) * top) if math.isfinite(value) else None for value in values]
    return "".join(" " if level is None else blocks[level] for level in levels)


def notes(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """What else a step's row shows, as (name, text): refill, failed environments, all rewards the same.

    A critic learns from equal rewards too, so with a critic they are not mentioned.
    """
    found = []
    if (rounds := metrics.get("rollout/refill_rounds", 0.0)) > 1:
        found.append(("refill", f"{rounds:.0f} rounds"))
    if failures := failures_of(metrics):
        found.append(("environment", failures))
    if unscored := metrics.get("reward/frac_unscored"):
        found.append(("not scored", f"{100 * unscored:.2g}% of completions"))
    least = metrics.get("reward/min")
    if least is not None and least == metrics.get("reward/max") and "critic/loss" not in metrics:
        found.append(("no signal", f"all rewards {least:.3g}"))
    return found


def rank_notes(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """For a run of several ranks, as (name, text): the wait in exchanges, and the peak of the fullest GPU."""
    found = []
    if (waited := metrics.get("perf/communication_s")) is not None:
        found.append(("exchange", duration(waited)))
    if (peak := metrics.get("perf/memory_peak_gib_max")) is not None:
        found.append(("memory", f"{peak:.1f} GiB"))
    return found


def failures_of(metrics: Mapping[str, float]) -> str:
    """`2 errors, 1 time-out`; empty if no environment failed."""
    kinds = (("environment/num_errors", "error"), ("environment/num_timeouts", "time-out"))
    return ", ".join(counted(metrics[key], kind) for key, kind in kinds if metrics.get(key))
