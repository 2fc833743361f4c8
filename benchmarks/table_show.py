"""The tables of `table.py` as Markdown and on the console."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from table_pieces import GOALS as GOAL_PIECES
from table_pieces import ROLLOUTS as ROLLOUT_PIECES
from table_pieces import UPDATES as UPDATE_PIECES
from table_pieces import Piece
from table_rows import GOALS, OTHER_GROUPS, ROLLOUTS, UPDATES, Raw, Row, pieces_of, read


@dataclass(frozen=True)
class Sheet:
    """A table: its rows and those shown only once they are measured, its pieces, and where it stands."""

    marker: str  # in docs/PERFORMANCE.md
    file: str  # of benchmarks/results/
    pieces: Sequence[Piece]
    rows: Sequence[Row]
    extra: Sequence[Row] = ()
    rounds: bool = True  # whether it has a column with rounds and spread

    def shown(self, raw: Raw) -> list[Row]:
        return [*self.rows, *(row for row in self.extra if read(raw, row).ours is not None)]


SHEETS = {
    "goals": Sheet("table", "table.json", GOAL_PIECES, GOALS, rounds=False),
    "rollouts": Sheet("rollouts", "table_rollouts.json", ROLLOUT_PIECES, ROLLOUTS, OTHER_GROUPS),
    "updates": Sheet("updates", "table_updates.json", UPDATE_PIECES, UPDATES),
}
HEAD = ["Qwen3-8B's shape", "ours", "baseline, same run", "result", "goal", "", "peak GiB"]
ROUNDS = "rounds, spread: ours / baseline"


def markdown(raw: Raw, sheet: Sheet = SHEETS["goals"]) -> str:
    head = [*HEAD, *([ROUNDS] if sheet.rounds else [])]
    lines = [f"| {' | '.join(head)} |", "|---|--:|--:|--:|--:|---|--:|" + ("--:|" if sheet.rounds else "")]
    for row in sheet.shown(raw):
        reading = read(raw, row)
        cells = reading.cells()
        cells[3] = f"**{cells[3]}**" if cells[3] != "not run" else cells[3]
        lines.append(f"| {' | '.join([*cells, *([reading.rounds] if sheet.rounds else [])])} |")
    return "\n".join([*lines, "", *notes(raw, sheet)])


def notes(raw: Raw, sheet: Sheet = SHEETS["goals"]) -> list[str]:
    """Counts of verdicts; GPU, versions and commits; warnings where pieces come from different commits, or kernels were
    compiled within a figure."""
    rows_shown = sheet.shown(raw)
    readings = [read(raw, row) for row in rows_shown]
    verdicts = [reading.met for reading in readings]
    not_run = sum(reading.result is None for reading in readings)
    names = set().union(*(pieces_of(row) for row in rows_shown))
    rows = [row for name, piece in raw.items() if name in names for row in piece["rows"]]
    before = [row for name in names & {"whole bf16 before"} for row in raw.get(name, {}).get("rows", [])]
    places = [row["environment"] for row in rows if "environment" in row and row not in before]
    text = [f"{verdicts.count(True)} met, {verdicts.count(False)} missed, {not_run} not run."]
    if places:
        versions = sorted({f"{e['gpu']}, torch {e['torch']}" for e in places})
        peers = sorted({row["peer"] for row in rows if "peer" in row})
        foreign = sorted({
            f"transformers {row['transformers']}, Liger {row['liger-kernel']}" for row in rows if "liger-kernel" in row
        })
        dates = sorted(e["date"] for e in places)
        text.append(f"{'; '.join(versions)}; compared with: {', '.join(peers + foreign) or 'not run'}.")
        text.append(f"Measured from {dates[0][:16]} to {dates[-1][:16]} UTC.")
        commits = sorted({e["commit"] for e in places})
        text.append(f"Commit {', '.join(commits)}." + (" **Not one state of the code.**" if len(commits) > 1 else ""))
    late = {f"{row['piece']}, {row['work']} ({row['compiled']})" for row in rows if row.get("compiled")}
    text += [f"**Kernels were compiled within:** {'; '.join(sorted(late))}."] if late else []
    return text


def show(raw: Raw, console: Console, sheet: Sheet = SHEETS["goals"]) -> None:
    table = Table(width=min(console.width, 100), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, title in enumerate(HEAD):
        table.add_column(title, justify="left" if i in (0, 5) else "right", overflow="fold")
    for row in sheet.shown(raw):
        reading = read(raw, row)
        style = {True: "green", False: "red", None: "dim"}[reading.met]
        cells = reading.cells()
        table.add_row(*cells[:3], f"[{style}]{cells[3]}[/]", cells[4], f"[{style}]{cells[5]}[/]", cells[6])
    console.print(table)
    for text in notes(raw, sheet):
        console.print(text.replace("**", ""), style="dim", highlight=False)
