"""Rows of a data set by name (Hugging Face hub) or of a folder with data files, read by the library `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jetrl.errors import UserError

_ROWS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one split. `source` says in words where they come from."""

    source: str
    rows: Iterator[dict[str, Any]]


def read_dataset(name: str, subset: str | None, revision: str | None, split: str) -> Rows:
    """One split of the data set's configuration `subset` (None: its only one, or its default)."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(
            f'task.dataset = "{name}": data sets by name are read by the package datasets; run: '
            "pip install 'jetrl[data]'"
        ) from error
    loaded = load_dataset(name, subset, revision=revision)
    if split not in loaded:
        raise UserError(f'{name} has no split "{split}"; it has: {", ".join(loaded)}.')
    source = f"{name}{f' ({subset})' if subset else ''}, split {split}"
    return Rows(source, _rows(loaded[split]))


def _rows(split: Any) -> Iterator[dict[str, Any]]:
    for table in split.with_format("arrow").iter(_ROWS_AT_ONCE):
        yield from table.to_pylist()
