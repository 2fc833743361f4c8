"""Rows of a data set: by its name on the Hugging Face hub, or of a folder with data files, read by `datasets`.

Files come through `model/hub.py`, as those of models do; the library then reads the local folder alone. So the cache of
the hub is enough without network, and a data set is of one commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.model import hub
from jetrl.model.hf_files import some

_CARD = "README.md"
_DATA = tuple(f"*.{ending}{packed}" for ending in ("parquet", "jsonl", "json", "csv", "tsv", "txt", "arrow")
              for packed in ("", ".gz", ".zst", ".xz", ".bz2"))
_ROWS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one split. `source` says in words where they come from."""

    source: str
    rows: Iterator[dict[str, Any]]


def read_dataset(name: str, subset: str | None, revision: str | None, split: str) -> Rows:
    """One split of the data set's configuration `subset` (None: its only one, or the one that its card names)."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{name}: data sets by name are read by the package datasets; run: pip install 'jetrl[data]'"
        ) from error
    folder = hub.on_disk(name, revision)
    if folder is None:
        folder = _downloaded(name, subset, revision)
    else:
        _chosen(name, _configs(folder / _CARD), subset)
    splits = _asked(name, lambda: datasets.load_dataset(str(folder), subset))
    if split not in splits:
        raise UserError(
            f"{name}{_of(subset)} has no split {split!r}; it has: {', '.join(splits)}. Set task.train_split (or "
            "eval_split)."
        )
    return Rows(f"{name}{_of(subset)}, {split}", _rows(splits[split]))


def _of(subset: str | None) -> str:
    return f" ({subset})" if subset is not None else ""


def _rows(split: Any) -> Iterator[dict[str, Any]]:
    for table in split.with_format("arrow").iter(_ROWS_AT_ONCE):
        yield from table.to_pylist()


def _asked(name: str, call: Any) -> Any:
    """A call of the library, with its errors about what the files hold as one message."""
    from datasets.exceptions import DatasetsError

    try:
        return call()
    except (DatasetsError, FileNotFoundError, ValueError) as error:
        texts = [str(each).strip().splitlines() for each in (error, error.__cause__) if each is not None]
        said = " ".join(lines[0] for lines in texts if lines) or type(error).__name__
        raise UserError(f"{name}: the library datasets cannot read it: {said}") from error


def _downloaded(name: str, subset: str | None, revision: str | None) -> Path:
    """The folder of the data set's snapshot with the card and the data files of one configuration.

    An asterisk of a pattern matches slashes, too, so it may bring more than the configuration needs, never less.
    """
    card = hub.fetch(name, revision, "dataset", [_CARD])
    config = _chosen(name, _configs(card.folder / _CARD), subset)
    patterns = _paths(config) or _DATA
    found = hub.fetch(name, card.commit, "dataset", [_CARD, *patterns])
    if not any(path.is_file() and path.name != _CARD for path in found.folder.rglob("*")):
        held = f" It has: {some(sorted(found.files))}." if found.files else ""
        raise UserError(f"{name} has no files of data that can be read (parquet, jsonl, json, csv, arrow, text).{held}")
    return found.folder


def _chosen(name: str, configs: list[dict[str, Any]], subset: str | None) -> dict[str, Any]:
    """The configuration that is asked for, or the only or default one; {} where the card names none."""
    names = [str(config.get("config_name", "default")) for config in configs] or ["default"]
    fitting = [config for config, each in zip(configs or [{}], names, strict=True) if each == subset]
    if subset is None:
        fitting = [config for config in configs if config.get("default")]
        if not fitting and len(names) == 1:
            fitting = configs or [{}]
    if not fitting:
        which = "its configuration must be named" if subset is None else f"it has no configuration {subset!r}"
        raise UserError(
            f"{name}: {which}; it has: {', '.join(names)}. Set task.dataset_config (or eval_dataset_config)."
        )
    return fitting[0]


def _configs(card: Path) -> list[dict[str, Any]]:
    """The entry `configs` of a data set's card; [] where it has none."""
    import yaml

    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    found = re.match(r"---\s*\n(.*?)\n---\s*$", text, re.S | re.M)
    if found is None:
        return []
    try:
        head = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        raise UserError(f"{card}: its head is no YAML: {error}") from error
    configs = head.get("configs") if isinstance(head, dict) else None
    return [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []


def _paths(config: dict[str, Any]) -> list[str]:
    """All paths in the `data_files` (a text, a list, or entries with `path`) and `data_dir` of a configuration."""
    directory = str(config.get("data_dir") or "").strip("./")
    prefix = f"{directory}/" if directory else ""

    def flat(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [path for inner in ([value["path"]] if "path" in value else value.values()) for path in flat(inner)]
        return [path for inner in value for path in flat(inner)] if isinstance(value, list) else [str(value)]

    files = config.get("data_files")
    paths = flat(files) if files else ["*"] if prefix else []
    return [f"{prefix}{path.removeprefix('./')}".replace("**/", "*") for path in paths]
