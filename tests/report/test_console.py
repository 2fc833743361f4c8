"""The display: plain lines off a terminal, a panel of at most 80 columns on one, and a terminal left as it was."""

from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console

from jetrl.report.console import Display, summary
from jetrl.report.text import duration, sparkline


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=30, color_system="standard")


def text_of(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


ROW = {
    "reward/mean": 0.625,
    "response_length/mean": 5.31,
    "parity/logprob_abs_diff_max": 0.0,
    "policy/entropy": 0.83,
    "perf/tokens_per_s_per_gpu": 12345.6,
}


def test_plain_output_is_one_line_a_step_with_time_left() -> None:
    console, clock = plain_console(), Clock()
    with Display(40, "run", console=console, clock=clock) as display:
        for step in (1, 2, 3):
            clock.now += 60.0 if step == 1 else 2.0  # the first step also warms up; the median forgets it
            display.phase("rollout", 4)
            display.advance(4)
            display.step({"step": step, **ROW})
        display.step({"step": 4, **ROW, "eval/add/avg@1": 0.5, "parity/logprob_abs_diff_max": 0.0123})
    lines = text_of(console).splitlines()
    assert lines[0] == "run: 40 steps" and len(lines) == 5
    assert lines[3] == "step  3/40  reward 0.625  length 5.3  parity 0  12,346 tokens/s  left 1:14"
    assert "held-out 0.500" in lines[4] and "parity 0.0123" in lines[4]
    assert "\x1b" not in text_of(console)


def test_plain_output_tells_of_a_long_phase_at_intervals() -> None:
    console, clock = plain_console(), Clock()
    with Display(10, "run", console=console, clock=clock, interval=10.0) as display:
        display.phase("sft", 100)
        for _ in range(100):
            clock.now += 0.25
            display.advance()
    assert text_of(console).splitlines()[1:] == ["  sft 40/100  left 0:15", "  sft 80/100  left 5.0 s"]


def test_a_warm_start_shows_its_loss_at_intervals_and_at_its_end() -> None:
    console, clock = plain_console(), Clock()
    with Display(25, "warm start", console=console, clock=clock, step_interval=10.0) as display:
        for step in range(1, 26):
            clock.now += 1.0
            display.step({"step": step, "policy/loss": 1 / step})
        panel = Console(file=io.StringIO(), width=80, force_terminal=False)
        panel.print(display.render())
    lines = text_of(console).splitlines()[1:]
    assert [line.split()[1] for line in lines] == ["1/25", "11/25", "21/25", "25/25"]
    assert lines[-1] == "step 25/25  loss 0.0400  left 0.0 s"
    assert "loss      0.0400  █" in text_of(panel) and "reward" not in text_of(panel)


def test_markup_in_messages_and_titles_is_text() -> None:
    for console in (plain_console(), terminal()):
        with Display(1, "run [red]x[/red]", console=console) as display:
            display.message("loss [0.41] [bold]")
        assert "loss [0.41] [bold]" in text_of(console)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_fits_the_terminal(width: int) -> None:
    console = terminal(width)
    display = Display(20_000, "a long title " * 9, console=console)
    display.phase("a phase with a long name", 123_456)
    for step in range(1, 200):
        display.step({"step": step, **ROW, "reward/mean": math.sin(step), "eval/add/avg@1": step / 200})
    sheet = Console(file=io.StringIO(), width=width, force_terminal=False)
    sheet.print(display.render())
    lines = text_of(sheet).splitlines()
    assert max(len(line) for line in lines) <= min(width, 100) and len(lines) == 8
    if width >= 80:
        assert "199/20000" in text_of(sheet) and "0.995  (was 0.005)" in text_of(sheet) and "12,346" in text_of(sheet)


def test_an_evaluation_alone_shows_no_steps() -> None:
    for about, line in (("", "tiny eval"), ("sums", "tiny eval: sums")):
        console = plain_console()
        with Display(0, "tiny eval", about=about, console=console, clock=Clock()) as display:
            display.phase("eval", 4)
            sheet = Console(file=io.StringIO(), width=80, force_terminal=False)
            sheet.print(display.render())
        assert text_of(console) == f"{line}\n"
        assert "step" not in text_of(sheet) and "0/4" in text_of(sheet)


RANKS = {"perf/communication_s": 1.25, "perf/memory_peak_gib_max": 98.12, "perf/memory_peak_gib_mean": 97.0}


def test_several_ranks_show_their_exchanges_and_memory() -> None:
    console = plain_console()
    with Display(2, "run", console=console, clock=Clock()) as display:
        display.step({"step": 1, **ROW})
        display.step({"step": 2, **ROW, **RANKS})
        sheet = Console(file=io.StringIO(), width=80, force_terminal=False)
        sheet.print(display.render())
    one, several = text_of(console).splitlines()[1:]
    assert "exchange" not in one and "memory" not in one
    assert "12,346 tokens/s  exchange 1.2 s  memory 98.1 GiB  left" in several
    panel = text_of(sheet)
    assert re.search(r"exchange +1\.2 s +memory +98\.1 GiB", panel) and max(map(len, panel.splitlines())) <= 80


def styled_parity(*gaps: float) -> str:
    console = terminal()
    display = Display(9, "run", console=console)
    for step, gap in enumerate(gaps, start=1):
        display.step({"step": step, "parity/logprob_abs_diff_max": gap})
    console.print(display.render())
    return text_of(console)


def test_parity_is_green_only_when_exactly_zero_and_remembers_the_worst() -> None:
    assert re.search(r"\x1b\[1;32m0[ \x1b]", styled_parity(0.0, 0.0))
    assert re.search(r"\x1b\[1;31m1.19e-07[ \x1b]", styled_parity(0.0, 2.0**-23))
    late = styled_parity(0.5, 0.0)
    assert "\x1b[1;32m0\x1b" in late and "(worst 0.5)" in late
    assert "nan" in styled_parity(math.nan, 0.0)


def test_a_step_that_compared_nothing_shows_no_parity() -> None:
    """Not the last step's 0, in the panel and in plain lines."""
    console = terminal()
    display = Display(2, "run", console=console)
    display.step({"step": 1, "reward/mean": 0.5, "parity/logprob_abs_diff_max": 0.0})
    display.step({"step": 2, "reward/mean": 0.5})
    console.print(display.render())
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text_of(console))
    assert re.search(r"parity +-", shown) and not re.search(r"parity +0", shown)
    console = plain_console()
    with Display(2, "run", console=console) as display:
        display.step({"step": 1, "reward/mean": 0.5})
    assert "parity" not in text_of(console)


def test_an_exception_shows_the_cursor_again_and_passes() -> None:
    console = terminal()
    with pytest.raises(KeyboardInterrupt), Display(5, "run", console=console) as display:
        display.phase("rollout", 3)
        raise KeyboardInterrupt
    out = text_of(console)
    assert out.count("\x1b[?25l") == 1 and out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")
    assert "interrupted in rollout after" in out  # the last frame says how it ended


def test_time_left_counts_from_the_resumed_step() -> None:
    clock = Clock()
    display = Display(100, "run", start_step=90, console=plain_console(), clock=clock)
    assert display.time_left() is None
    clock.now += 3.0
    display.step({"step": 91})
    assert display.time_left() == pytest.approx(27.0)


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 10, 10], 2) == "▁█"  # halves averaged
    assert sparkline([5, 5], 9) == "▁▁" and sparkline([], 5) == ""
    assert sparkline([1, math.nan, 2], 3) == "▁ █"
    assert sparkline([0, 1], 2, "_#") == "_#"


def test_duration() -> None:
    assert [duration(s) for s in (0.04, 9.94, 9.96, 83, 3723)] == ["0.0 s", "9.9 s", "0:10", "1:23", "1:02:03"]


def test_summary_says_what_happened_and_what_to_do() -> None:
    console = plain_console()
    long_command = "jetrl export runs/addition/checkpoints/step_000100 --out a/folder/with/a/long/name --format fp8"
    numbers = {"accuracy_before": 0.02, "accuracy_after": 0.97, "parity_max": 0.0}
    then = [("export it", long_command)]
    summary(run_dir="runs/addition", steps=30, seconds=83.2, **numbers, next_commands=then, console=console)
    out = text_of(console)
    assert "0.020 -> 0.970" in out and "bit for bit" in out and "30 in 1:23" in out and "runs/addition" in out
    assert f"    {long_command}\n" in out  # not wrapped: it is there to be copied
    console = plain_console()
    summary(run_dir="r", steps=1, seconds=1.0, parity_max=1e-7, console=console)
    assert "1e-07 (largest log-prob gap)\n" in text_of(console) and "accuracy" not in text_of(console)
    console = plain_console()
    summary(run_dir="r", steps=3, seconds=1.0, parity_max=0.0, parity_missing=2, console=console)
    assert "agreed bit for bit; 2 steps had nothing to compare" in " ".join(text_of(console).split())


CONVERSATION = {
    "environment/turns_mean": 3.25,
    "environment/turns_max": 8.0,
    "environment/num_errors": 2.0,
    "environment/num_timeouts": 1.0,
    "rollout/refill_rounds": 3.0,
    "reward/min": 0.0,
    "reward/max": 0.0,
}


def test_failures_and_refill_have_a_line_of_their_own() -> None:
    console = plain_console()
    quiet = {"environment/num_errors": 0.0, "environment/num_timeouts": 0.0, "rollout/refill_rounds": 1.0}
    with Display(40, "run", console=console, clock=Clock()) as display:
        display.step({"step": 1, **ROW, **CONVERSATION})
        display.step({"step": 2, **ROW, **quiet, "reward/min": 0.0, "reward/max": 1.0})
        display.step({"step": 3, **ROW, "environment/num_timeouts": 1.0})
        display.step({"step": 4, **ROW, "reward/min": 1.0, "reward/max": 1.0, "critic/loss": 0.5})
    lines = text_of(console).splitlines()
    told = [line for line in lines if not line.startswith("step")]
    assert told[1] == "  refill: 3 rounds; environment: 2 errors, 1 time-out"
    assert told[2:] == ["  environment: 1 time-out"] and [line[:9] for line in lines[1:3]] == ["step  1/4", "  refill:"]


def test_notes_too_long_for_one_line_have_one_each() -> None:
    console = plain_console()
    with Display(40, "run", console=console, clock=Clock()) as display:
        many = {"environment/num_errors": 10.0**12, "environment/num_timeouts": 10.0**16}
        display.step({"step": 1, **CONVERSATION, **many, "rollout/refill_rounds": 10.0**9})
    refill, environment = text_of(console).splitlines()[2:]
    assert refill == "  refill: 1000000000 rounds"
    assert environment == "  environment: 1000000000000 errors, 10000000000000000 time-outs"


@pytest.mark.parametrize("width", [40, 80])
def test_the_panel_has_rows_for_conversations(width: int) -> None:
    sheet = Console(file=io.StringIO(), width=width, force_terminal=False)
    display = Display(9, "run", console=sheet)
    display.step({"step": 1, **ROW, **CONVERSATION})
    sheet.print(display.render())
    panel = text_of(sheet).splitlines()[-11:]
    assert max(len(line) for line in panel) <= width and panel[0].startswith("╭") and panel[-1].startswith("╰")
    if width == 80:
        assert "turns     3.2  (most 8)" in panel[7] and "failed    2 errors, 1 time-out" in panel[7]
        assert "refill    3 rounds" in panel[8] and "no signal all rewards 0" in panel[9]


def test_the_panel_shows_failures_in_red_and_forgets_them() -> None:
    console = terminal()
    display = Display(9, "run", console=console)
    display.step({"step": 1, **CONVERSATION})
    console.print(display.render())
    assert "\x1b[1;31m2 errors, 1 time-out" in text_of(console)
    display.step({"step": 2, **CONVERSATION, "environment/num_errors": 0.0, "environment/num_timeouts": 0.0})
    sheet = plain_console()
    sheet.print(display.render())
    assert "failed    0" in text_of(sheet)


def test_what_an_evaluation_could_not_score_stands_next_to_its_score() -> None:
    row = {"eval/a/avg@1": 0.125, "eval/a/num_unscored": 6.0, "eval/a/num_completions": 8.0}
    console = plain_console()
    with Display(1, "run", console=console) as display:
        display.step({"step": 0} | row)
        display.step({"step": 1} | row | {"eval/a/num_failed": 1.0})
    assert "held-out 0.125 (6 of 8 not scored)" in text_of(console)
    assert "held-out 0.125 (6 of 8 not scored, 1 of 8 failed)" in text_of(console)


def test_a_reward_that_never_moves_is_told_of_once_and_at_the_end() -> None:
    console = plain_console()
    with Display(30, "run", console=console) as display:
        for step in range(1, 31):
            display.step({"step": step, "reward/anchored/mean": 0.0, "reward/anchored/std": 0.0})
    assert text_of(console).count("constant reward anchored: it gave 0 to every completion of 10 steps") == 1
    console = plain_console()
    summary(run_dir="r", steps=30, seconds=1.0, constant=["anchored: 0 in all 30 steps"], console=console)
    assert "never moved" in text_of(console) and "anchored: 0 in all 30 steps" in text_of(console)
