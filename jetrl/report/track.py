"""Experiment trackers: what they get, which run of theirs it goes to, and how they are checked and opened.

They get each row of metrics.jsonl as it is written, and some samples as tables. A tracker that cannot be used is one
message before the model is loaded; one that fails later never ends the run (`report/channel.py`). Which run of the
tracker belongs to a run folder is kept there, in `track.json`, so that a resumed or moved run goes on in it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.report.backends import BACKENDS, Opening, is_score
from jetrl.report.channel import Channel, Limits, within
from jetrl.report.files import write_whole
from jetrl.untrusted import json_value, text_inside

TRACK_FILE = "track.json"
MAX_TEXT = 4000  # characters of a text in a table
_COLUMNS = ("prompt", "prompt_rendered", "completion", "answer", "reward", "advantage", "finish_reason")


@dataclass(frozen=True)
class TrackSettings:
    """The section `[track]`. None: the tracker's own environment variable, else jetrl's default."""

    backends: tuple[str, ...] = ()
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    run_name: str | None = None
    num_samples: int = 8


def check_trackers(settings: TrackSettings, limits: Limits | None = None) -> None:
    """Before anything is loaded: UserError if a package is missing, nobody is logged in, or a store is unreachable."""
    for name in settings.backends:
        within(name, (limits or Limits()).checking, BACKENDS[name].check)


def open_trackers(
    settings: TrackSettings, run_dir: Path, config: Mapping[str, Any], *, first: int = 0,
    tell: Callable[[str], None] = print, limits: Limits | None = None,
) -> list[Channel]:
    """Open the trackers that `track.backends` names; UserError if one cannot be opened.

    `first` is the first step that this process may log: above 0 in a run that goes on. `config` is the run's.
    """
    kept, channels = read_kept(run_dir), []
    for name in settings.backends:
        opening = Opening(
            run_dir, settings.run_name, settings.project, settings.entity, settings.group, settings.tags, config,
            kept.get(name, {}), secrets.token_hex(4), first,
        )
        try:
            channels.append(Channel(name, partial(BACKENDS[name], opening), tell, limits))
        except UserError:
            for channel in channels:
                channel.close(failed=True)
            raise
        if (now := channels[-1].kept) and kept.get(name) != now:
            kept[name] = dict(now)
            write_whole(run_dir / TRACK_FILE, json.dumps(kept, indent=2) + "\n")
    return channels


def read_kept(run_dir: Path) -> dict[str, dict[str, str]]:
    """The tracker's run of each backend, as `track.json` keeps it; empty if there is none, or it is damaged."""
    text = text_inside(run_dir, TRACK_FILE)
    try:
        found = json_value(text) if text else {}
    except ValueError:  # it holds nothing that the run needs: the tracker gets a new run
        found = {}
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}


def table_rows(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Rows of samples as a table has them: from lines of samples.jsonl. All rows have the same columns.

    One column for each reward function. What was not scored is None, long texts are cut. What no row has, such as an
    advantage in an evaluation, is no column.
    """
    rows = [json_value(line) for line in lines]
    names = {part: list(dict.fromkeys(k for row in rows for k in row.get(part) or {})) for part in ("rewards", "extra")}
    columns = [key for key in _COLUMNS if is_score(key) or any(row.get(key) is not None for row in rows)]
    table = []
    for row in rows:
        one = {"step": row["step"]} | {key: _short(row.get(key)) for key in columns}
        for part, keys in names.items():
            one |= {f"{part}/{key}": _short((row.get(part) or {}).get(key)) for key in keys}
        table.append(one)
    return table


def evenly(lines: Sequence[bytes], wanted: int) -> list[bytes]:
    """At most that many, evenly over all."""
    if wanted <= 0 or not lines:
        return []
    count = min(wanted, len(lines))
    return [lines[i * len(lines) // count] for i in range(count)]


def _short(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... ({len(text) - MAX_TEXT:,} more characters)"
