"""`jetrl settings`: the settings in a terminal, in 80 columns; the rows are those of docs/CONFIG.md."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jetrl.config import Config, sections
from jetrl.config.base import Section
from jetrl.config.docs import Setting, settings_of
from jetrl.config.peers import peer_name
from jetrl.errors import UserError

ALL = "all"
_WIDTH = 100  # columns, at most


def print_settings(which: str, console: Console) -> None:
    """Print a section, a key (of all sections that have it, if no section is named), everything, or the sections."""
    if not which:
        _print_overview(console)
        return
    for title, about, rows in find_settings(which):
        _print_table(title, about, rows, console)


def find_settings(which: str) -> list[tuple[str, str, list[Setting]]]:
    """(title, what it is about, its settings) for each section that `which` means; an unknown name is a UserError."""
    parts = _parts()
    found = []
    for name, section in parts.items():
        title = f"[{name}]" if name else "Top level"
        rows = list(settings_of(section))
        if which not in (ALL, name):
            rows = [row for row in rows if which in (row.key, row.full_key)]
        if rows:
            found.append((title, _about(section), rows))
    if which in sections():  # the section of that name, not keys of that name
        return [one for one in found if one[0] == f"[{which}]"]
    if not found:
        raise UserError(f"settings: there is no setting {which!r}. {_hint(which, list(parts.values()))}")
    return found


def _parts() -> dict[str, type[Section]]:
    """The sections by name; first, under an empty name, the keys outside of all sections."""
    return {"": Config, **sections()}


def _hint(which: str, known: Sequence[type[Section]]) -> str:
    peer = peer_name(which)
    if peer is not None:
        return f"{peer}."
    rows = [row for section in known for row in settings_of(section)]
    names = [*sections(), *(row.key for row in rows), *(row.full_key for row in rows)]
    if found := [row.full_key for row in rows if which.lower() in f"{row.key} {row.meaning}".lower()]:
        return f"It occurs in {', '.join(found[:8])}{', ...' * (len(found) > 8)}."
    close = difflib.get_close_matches(which, names, 1) or difflib.get_close_matches(which.rpartition(".")[2], names, 1)
    return f"Did you mean {close[0]}?" if close else "`jetrl settings` lists the sections."


def _print_overview(console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, section in _parts().items():
        cell = Text(f"{_about(section)}\n")
        cell.append(", ".join(row.key for row in settings_of(section)), style="dim")
        table.add_row(Text(name or "top level", style="bold"), cell)
    console.print(table, width=min(console.width, _WIDTH), soft_wrap=False)
    console.print("\n`jetrl settings rl` explains a section, `jetrl settings train.lr` a key, and `all` everything.")


def _print_table(title: str, about: str, rows: Sequence[Setting], console: Console) -> None:
    width = min(console.width, _WIDTH)
    console.print(Text.assemble("\n", (title, "bold"), f"  {about}\n"), width=width, soft_wrap=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("key", no_wrap=True)
    table.add_column("default", overflow="fold", max_width=16)
    table.add_column("meaning")
    for row in rows:
        default = Text("required", style="yellow") if row.default is None else Text(row.default)
        since = f" (since {row.since})" if row.since is not None else ""
        meaning = Text.assemble(_plain(row.meaning), (f"\n{row.values}{since}", "dim"))
        table.add_row(Text(row.key, style="bold"), default, meaning)
    console.print(table, width=width, soft_wrap=False)


def _about(section: type[Section]) -> str:
    return "The run itself: its name, precision and device." if section is Config else _plain(section.__doc__ or "")


def _plain(text: str) -> str:
    """Without Markdown's code marks; pages of docs/ by the command that prints them."""
    return re.sub(r"docs/(\w+)\.md", r"jetrl docs \1", text).replace("`", "")
