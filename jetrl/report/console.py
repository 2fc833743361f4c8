"""The live display of a run: rich on a terminal, one plain line per step elsewhere; and the closing summary."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from jetrl.errors import UserError
from jetrl.report.hints import NO_SIGNAL, ConstantRewards, Hints
from jetrl.report.run import Headline, held_out_name
from jetrl.report.terminal import Lasting
from jetrl.report.text import (
    ASCII_BLOCKS,
    BLOCKS,
    accuracy_of,
    count,
    counted,
    duration,
    failures_of,
    held_out_loss_of,
    notes,
    number,
    parity_note,
    parity_text,
    rank_notes,
    sparkline,
    unscored_of,
)
from jetrl.untrusted import printable

_MAX_WIDTH = 100


class Output(Console):
    """A rich console on which text of others is text: control characters are spelled out, and brackets are no markup.

    It reports a closed pipe; rich itself would end the program silently. A terminal that is gone ends nothing.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    @property
    def file(self) -> IO[str]:
        """Where it writes."""
        return cast(IO[str], Lasting(super().file))

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:  # type: ignore[override]
        """What all printing goes through: rich's own control codes pass, those in texts do not."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        raise UserError("standard output was closed, which stops the program. Send it to a file; --resume continues.")


class Display:
    """Shows where a run stands. Use as a context manager, so that the terminal is restored whatever happens.

    Call `phase` when the work changes, `advance` as parts of a phase finish, `step` with the row of a finished step.
    Off a terminal, a phase is reported only once it lasts longer than `interval` seconds, then again at that interval;
    steps at most every `step_interval` seconds (0: all of them), the last one always. A warm start, whose rows have
    `policy/loss` and no reward, shows its loss. With `total_steps` 0, as of an evaluation alone, no steps are shown.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        *,
        about: str = "",
        start_step: int = 0,
        console: Console | None = None,
        interval: float = 10.0,
        step_interval: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.title, self.about = printable(title), printable(about)
        self.current = start_step
        self.notice: Callable[[], str] = lambda: ""  # a line for the user in the live panel
        self.console = console or Output()
        self._interval, self._step_interval, self._clock = interval, step_interval, clock
        self._last_step_line = -math.inf
        self._started = self._step_started = clock()
        self._durations: deque[float] = deque(maxlen=20)
        self._phase, self._done = "starting", 0
        self._total: int | None = None
        self._phase_started = self._last_line = clock()
        self._metrics: dict[str, float] = {}
        self._curve: list[float] = []
        self._worst_gap: float | None = None  # None: nothing was compared yet
        self._first_accuracy: float | None = None
        self._ended = ""
        self._evaluated: Mapping[str, float] = {}  # the row of the last evaluation
        self._hints, self._constant = Hints(self.message), ConstantRewards()
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(get_renderable=self.render, console=self.console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Display:
        if self._live is not None:
            if self.about:
                self.console.print(Text(self.about, style="dim"))
            self._live.start(refresh=True)
        else:
            parts = [counted(self.total_steps, "step")] if self.total_steps else []
            parts += [self.about] if self.about else []
            self._line(": ".join([self.title, *(["; ".join(parts)] if parts else [])]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            if kind is None:
                self.phase("done" if self.current >= self.total_steps else "stopped")
            else:
                self._ended = f"{'interrupted' if kind is KeyboardInterrupt else 'failed'} in {self._phase} after "
            self._live.stop()  # draws once more and shows the cursor again

    @property
    def live(self) -> bool:
        """Whether this is a panel on a terminal, drawn again and again."""
        return self._live is not None

    def phase(self, name: str, total: int | None = None) -> None:
        """Begin a phase (rollout, reward, update, eval, ...) of `total` parts, if their number is known."""
        self._phase, self._done, self._total = name, 0, total
        self._phase_started = self._last_line = self._clock()

    def advance(self, n: int = 1) -> None:
        """Count `n` more parts of the phase as done."""
        self._done += n
        now = self._clock()
        if self._live is None and now - self._last_line >= self._interval:
            self._last_line = now
            parts = f"{self._done}/{self._total}" if self._total else str(self._done)
            left = self._phase_left(now)
            self._line(f"  {self._phase} {parts}" + (f"  left {duration(left)}" if left is not None else ""))

    def step(self, metrics: Mapping[str, float]) -> None:
        """Show the row of a finished step. `metrics` holds the key `step` and those that go to metrics.jsonl."""
        now = self._clock()
        step = int(metrics["step"])
        if step > self.current:  # the row of step 0 is an evaluation: no measure of a step's time
            self._durations.append((now - self._step_started) / (step - self.current))
            # What this row lacks was not measured in it; the last evaluation stays in view.
            self._metrics = {key: value for key, value in self._metrics.items() if key.startswith("eval/")}
        self.current, self._step_started = step, now
        self._metrics.update(metrics)
        self._constant.look(metrics, partial(self.hint, step), known=self._hints.counts[NO_SIGNAL] > 0)
        shown = metrics.get("reward/mean", metrics.get("policy/loss"))
        if shown is not None:
            self._curve.append(float(shown))
        if "parity/logprob_abs_diff_max" not in metrics:  # this step compared nothing: an earlier gap is not its own
            self._metrics.pop("parity/logprob_abs_diff_max", None)
        gap, worst = metrics.get("parity/logprob_abs_diff_max"), self._worst_gap
        if gap is not None and (worst is None or not (math.isnan(worst) or gap <= worst)):  # NaN is the worst and stays
            self._worst_gap = float(gap)
        accuracy = accuracy_of(metrics)
        if accuracy is not None:
            self._evaluated = metrics
            self._first_accuracy = accuracy if self._first_accuracy is None else self._first_accuracy
        due = now - self._last_step_line >= self._step_interval or step >= self.total_steps
        if self._live is None and due:
            self._last_step_line = now
            self._line(self._plain(metrics))
            for line in _joined([f"{name}: {text}" for name, text in notes(metrics) if name != "no signal"]):
                self._line(line)  # steps without a signal are reported by `hint`, and not every time

    def hint(self, step: int, what: str, detail: str) -> None:
        """Report what happened in a step, the first time in full."""
        self._hints.hint(step, what, detail)

    def message(self, text: str) -> None:
        """Print a line above the display."""
        if self._live is None:
            self._line(text)
        else:
            self.console.print(Text(printable(text)), highlight=False)

    def _line(self, text: str) -> None:
        """One line as it is: no wrapping, no markup, and out at once, so that `tail -f` and job logs follow."""
        self.console.out(printable(text), highlight=False)
        self.console.file.flush()

    def time_left(self) -> float | None:
        """Seconds to the last step at the median pace of the last 20, or None before the first."""
        if not self._durations:
            return None
        pace = statistics.median(self._durations)  # the first step also warms up; evaluations come now and then
        return pace * max(self.total_steps - self.current, 0)

    def _phase_left(self, now: float) -> float | None:
        if not self._total or not self._done:
            return None
        return (now - self._phase_started) / self._done * max(self._total - self._done, 0)

    def _plain(self, metrics: Mapping[str, float]) -> str:
        width = len(str(self.total_steps))
        parts = [f"step {self.current:>{width}}/{self.total_steps}"]
        if "reward/mean" in metrics:
            parts.append(f"reward {metrics['reward/mean']:.3f}")
        elif "policy/loss" in metrics:
            parts.append(f"loss {metrics['policy/loss']:.4f}")
        accuracy = accuracy_of(metrics)
        if accuracy is not None:
            parts.append(f"held-out {accuracy:.3f}{unscored_of(metrics)}")
        elif (loss := held_out_loss_of(metrics)) is not None:
            parts.append(f"held-out loss {loss:.4f}")
        if "response_length/mean" in metrics:
            parts.append(f"length {metrics['response_length/mean']:.1f}")
        if "parity/logprob_abs_diff_max" in metrics:
            parts.append(f"parity {parity_text(metrics['parity/logprob_abs_diff_max'])}")
        if "perf/tokens_per_s_per_gpu" in metrics:
            parts.append(f"{count(metrics['perf/tokens_per_s_per_gpu'])} tokens/s")
        parts += [f"{name} {text}" for name, text in rank_notes(metrics)]
        left = self.time_left()
        if left is not None:
            parts.append(f"left {duration(left)}")
        return "  ".join(parts)

    def render(self) -> RenderableType:
        """The panel of the live display; at most 100 columns, never wider than the terminal."""
        width = min(self.console.width, _MAX_WIDTH)
        now = self._clock()
        left = self.time_left()
        progress = Table.grid(expand=True, padding=(0, 1))
        progress.add_column(width=10)
        progress.add_column(ratio=1)
        progress.add_column(justify="right", width=11, no_wrap=True)
        progress.add_column(justify="right", width=13, no_wrap=True)
        if self.total_steps:
            progress.add_row(
                Text("steps"),
                ProgressBar(total=self.total_steps, completed=self.current),
                f"{self.current}/{self.total_steps}",
                Text("left " + (duration(left) if left is not None else "..."), style="dim"),
            )
        phase_left = self._phase_left(now)
        counted = self._total is not None
        progress.add_row(
            Text(self._phase, style="cyan", overflow="ellipsis", no_wrap=True),
            ProgressBar(total=max(self._total or 1, 1), completed=self._done, style="bar.back", complete_style="cyan"),
            f"{self._done}/{self._total}" if counted else "",
            Text("left " + duration(phase_left) if phase_left is not None else "", style="dim"),
        )
        title = Text(self.title, style="bold not dim")
        title.truncate(width - 6, overflow="ellipsis")
        elapsed = Text.assemble((self._ended, "bold red not dim"), (duration(now - self._started), "dim"))
        notice = [Text(self.notice(), style="yellow")] if self.notice() else []
        return Panel(
            Group(progress, Text(""), self._numbers(width), *notice),
            title=title,
            title_align="left",
            subtitle=elapsed,
            subtitle_align="right",
            width=width,
            border_style="dim",
        )

    def _numbers(self, width: int) -> Table:
        metrics = self._metrics
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(width=9, style="dim")
        table.add_column(ratio=1, no_wrap=True)
        table.add_column(width=9, style="dim")
        table.add_column(ratio=1, no_wrap=True)
        utf8 = self.console.encoding.lower().startswith("utf")
        spark = sparkline(self._curve, max(width // 2 - 26, 6), BLOCKS if utf8 else ASCII_BLOCKS)
        warm_start = "policy/loss" in metrics and "reward/mean" not in metrics
        first, digits = ("policy/loss", 4) if warm_start else ("reward/mean", 3)
        reward = Text.assemble(number(metrics.get(first), digits), "  ", (spark, "cyan"))
        accuracy = accuracy_of(metrics)
        held_out = Text(number(accuracy, 3), style="bold" if accuracy is not None else "")
        if accuracy is None and (loss := held_out_loss_of(metrics)) is not None:
            held_out = Text(f"{loss:.4f} (loss)", style="bold")
        if accuracy is not None and accuracy != self._first_accuracy:
            held_out.append(f"  (was {self._first_accuracy:.3f})", style="dim")
        held_out.append(unscored_of(self._evaluated), style="yellow")
        gap = metrics.get("parity/logprob_abs_diff_max")
        if gap is None:
            parity = Text("-")
        else:
            parity = Text(parity_text(gap), style="bold green" if gap == 0.0 else "bold red")
            if self._worst_gap is not None and self._worst_gap != gap:
                parity.append(f"  (worst {parity_text(self._worst_gap)})", style="red")
        speed = metrics.get("perf/tokens_per_s_per_gpu")
        table.add_row("loss" if warm_start else "reward", reward, "held-out", held_out)
        table.add_row("length", number(metrics.get("response_length/mean"), 1), "parity", parity)
        entropy = number(metrics.get("policy/entropy"), 3)
        table.add_row("entropy", entropy, "tokens/s", count(speed) if speed is not None else "-")
        for row in self._extra_numbers():
            table.add_row(*row)
        return table

    def _extra_numbers(self) -> Iterator[tuple[RenderableType, ...]]:
        """Rows of the panel that not every run has: conversations, several ranks, refill, a step without signal."""
        metrics = self._metrics
        if "environment/turns_mean" in metrics:
            failures = failures_of(metrics)
            most = metrics.get("environment/turns_max")
            turns = number(metrics["environment/turns_mean"], 1) + (f"  (most {most:.0f})" if most is not None else "")
            yield "turns", turns, "failed", Text(failures or "0", style="bold red" if failures else "")
        if ranks := rank_notes(metrics):
            yield tuple(text for note in ranks for text in note)
        yield from (note for note in notes(metrics) if note[0] != "environment")


def _joined(notes: Sequence[str]) -> list[str]:
    """One line of all notes where 80 columns hold them, else one line each."""
    together = "  " + "; ".join(notes)
    return [together] if notes and len(together) <= 80 else [f"  {note}" for note in notes]


def summary(
    *,
    run_dir: Path | str,
    steps: int,
    seconds: float,
    accuracy_before: float | None = None,
    accuracy_after: float | None = None,
    parity_max: float | None = None,
    parity_missing: int = 0,
    warm_start_seconds: float | None = None,
    held_out: str = "accuracy",
    constant: Sequence[str] = (),
    next_commands: Sequence[tuple[str, str]] = (),
    console: Console | None = None,
    losses: Sequence[float] = (),
) -> None:
    """Print the outcome of the run, with the rewards that never moved (`constant`), and what to do next:
    `next_commands` holds pairs (what it does, command). `losses`: on held-out answers, by evaluation.
    """
    console = console or Output()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    if accuracy_after is not None:
        before = "" if accuracy_before is None else f"{accuracy_before:.3f} -> "
        table.add_row(f"held-out {held_out}", Text(f"{before}{accuracy_after:.3f}", style="bold"))
    if losses:
        before = f"{losses[0]:.4f} -> " if len(losses) > 1 else ""
        table.add_row("held-out loss", Text(f"{before}{losses[-1]:.4f}", style="bold"))
    if parity_max is not None:
        exact = parity_max == 0.0
        agreed, gap = "0: sampler and learner agreed bit for bit", f"{parity_text(parity_max)} (largest log-prob gap)"
        verdict = (agreed if exact else gap) + parity_note(parity_missing)
        table.add_row("parity", Text(verdict, style="green" if exact else "red"))
    if constant:
        table.add_row("never moved", Text("; ".join(constant), style="yellow"))
    warmed = warm_start_seconds or 0.0  # next to nothing if it came from the cache
    warm = f", after a warm start of {duration(warmed)}" if warmed >= 1.0 else ""
    table.add_row("steps", f"{steps} in {duration(seconds)}{warm}")
    table.add_row("run folder", Text(str(run_dir)))
    console.print()
    console.print(table, highlight=False)
    if next_commands:
        console.print("\nNext", style="bold")
        for what, command in next_commands:
            console.print(Text(f"  {what}"), style="dim")
            console.out(f"    {command}", highlight=False)  # not wrapped, so that it can be copied
    console.print()


def comparison(rows: Sequence[tuple[str, Headline]], console: Console | None = None) -> None:
    """Print several runs, one per row: (precision flow, its headline)."""
    console = console or Output()
    table = Table(box=None, padding=(0, 2, 0, 0))
    measured = held_out_name(run.held_out for _, run in rows).lower()
    routed = ("other experts",) if any(run.routing_mean is not None for _, run in rows) else ()
    for name in ("precision", measured, "largest log-prob gap", "steps with a gap", *routed, "time"):
        table.add_column(name, overflow="fold", justify="left" if name == "precision" else "right")
    for name, run in rows:
        before = "" if run.accuracy_before is None else f"{run.accuracy_before:.3f} -> "
        accuracy = "" if run.accuracy_after is None else f"{before}{run.accuracy_after:.3f}"
        gap = "" if run.parity_max is None else parity_text(run.parity_max)
        style = "" if run.parity_max is None else "green" if run.parity_max == 0.0 else "red"
        steps = f"{run.parity_nonzero_steps}/{run.parity_steps}" if run.parity_steps else ""
        cells: list[str | Text] = [name, accuracy, Text(gap, style=style), Text(steps, style=style)]
        if routed:
            share = run.routing_mean
            cells.append("" if share is None else Text("0" if share == 0.0 else f"{share:.2%}", style=style))
        table.add_row(*cells, "" if run.seconds is None else duration(run.seconds))
    console.print()
    console.print(table, highlight=False)
