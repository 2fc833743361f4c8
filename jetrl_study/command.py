"""The command `jetrl study`. Like the command line itself, this module loads no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from jetrl.errors import UserError
from jetrl.report.console import Output

Name = Annotated[str, typer.Argument(
    help="A study's name, or its TOML file. Default: list those that come with jetrl.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(
    help="Overrides for all arms, such as train.steps=8.", show_default=False)]


def study(
    name: Name = "",
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder (default: studies/<name>).")] = None,
    arms: Annotated[str | None, typer.Option(help="Only these arms, separated by commas.")] = None,
    seeds: Annotated[str | None, typer.Option(help="These seeds, separated by commas.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, spread over the visible GPUs or cores.")] = 1,
    threads: Annotated[int | None, typer.Option(
        min=1, help="CPU threads per run (default: its share of the cores).")] = None,
    stop_after: Annotated[float | None, typer.Option(
        help="Stop after this many minutes, with checkpoints. The same command continues from there.")] = None,
    add: Annotated[list[Path] | None, typer.Option(
        "--add", help="study.json of the same study in another folder; its runs count too. Repeatable.")] = None,
) -> None:
    """Train arms that differ in their flows, with the same warm starts, data and seeds, and compare what they learn."""
    from jetrl_study.plan import find_study, listing, load_study

    console = Output(highlight=False, soft_wrap=True)
    if not name and add:
        raise UserError("--add needs the study's name: jetrl study NAME --add FILE")
    if not name:
        for known, about in listing():
            console.print(Text(known, style="bold"))
            console.print(Padding(about, (0, 0, 0, 2)), soft_wrap=False)
        return
    if stop_after is not None and not 0 < stop_after < math.inf:
        raise UserError(f"--stop-after {stop_after:g}: give minutes above 0.")
    from jetrl_study.conduct import conduct

    whole = load_study(find_study(name), overrides or [])
    target = out if out is not None else Path("studies") / whole.name
    raise SystemExit(
        conduct(whole, whole.only(arms, seeds), target, jobs, threads, stop_after, console, add or ())
    )
