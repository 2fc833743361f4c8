"""The doctor's findings in a terminal of 80 columns."""

from __future__ import annotations

import contextlib
import json
import sys
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jetrl import __version__
from jetrl.doctor.diagnosis import Diagnosis, examine
from jetrl.report.console import Output

_STYLES = {"ok": "green", "note": "yellow", "bad": "bold red"}
_NAMES = {"cuda": "the GPU", "cpu": "the CPU"}


def run(console: Console, as_json: bool) -> bool:
    """Examine the machine and print what was found. Returns whether it can train."""
    progress = Output(stderr=True, highlight=False)
    with contextlib.redirect_stdout(sys.stderr):  # some libraries print when they are imported
        diagnosis = examine(lambda text: progress.print(f"... {text}", style="dim"))
    if as_json:
        print(json.dumps(diagnosis.to_json(), indent=1))
    else:
        show(diagnosis, console)
    return diagnosis.ok


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print sections, verdict and what to do."""
    width = min(console.width, 100)
    console.print(Text(f"jetrl {__version__}", style="bold"))
    for title, findings in groupby(diagnosis.findings, key=lambda finding: finding.section):
        table = Table.grid(padding=(0, 1))
        table.add_column(width=5)
        table.add_column(width=18, overflow="fold")
        table.add_column(overflow="fold")
        for finding in findings:
            cell = Text(finding.found)
            if finding.cure:
                cell.append(f"\n-> {finding.cure}", style=_STYLES[finding.level])
            table.add_row(Text(finding.level.rjust(5), style=_STYLES[finding.level]), Text(finding.what), cell)
        console.print(Text(f"\n{title}", style="bold"))
        console.print(table, width=width, soft_wrap=False)
    console.print()
    style = "bold green" if diagnosis.ok else "bold red"
    console.print(Text(verdict(diagnosis), style=style), width=width, soft_wrap=False)
    for cure in diagnosis.to_do():
        console.print(Text(f"  -> {cure}"), soft_wrap=True)  # not wrapped, so that it can be copied


def verdict(diagnosis: Diagnosis) -> str:
    """One sentence: whether and where this machine can train, and what `device = "auto"` does."""
    if not diagnosis.ok:
        return "This machine cannot train yet. To do:" if diagnosis.to_do() else "This machine cannot train."
    auto, good = diagnosis.trials[0], diagnosis.devices
    where = " and ".join(_NAMES[device] for device in good)
    if auto.ok:
        return f'This machine can train on {where}; device = "auto" takes it.'
    stops = f'"auto" takes {_NAMES[auto.device]} and stops'
    return f'This machine can train on {where} with device = "cpu"; {stops}. To do:'
