"""Rows of a data set: by its name on the Hugging Face hub, or from a folder with data files, read by `datasets`.

Files come through `huggingface/hub.py`, as models do; the library then reads only the local folder. So the hub's
cache is enough without network, and a data set comes from one commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl.config.task import MAX_DATA_GIB
from jetrl.errors import UserError
from jetrl.huggingface import hub
from jetrl.phrases import some
from jetrl.tasks.row_files import read_by_library
from jetrl.untrusted import Budget, inside, require_shallow, text_file

_CARD = "README.md"
# Ending of a file -> the reader of the library, and its settings.
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}), ".jsonl": ("json", {}), ".json": ("json", {}), ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}), ".txt": ("text", {}), ".arrow": ("arrow", {}),
}
_PACKED = ("", ".gz", ".zst", ".xz", ".bz2")
_DATA = tuple(f"*{ending}{packed}" for ending in _READERS for packed in _PACKED)
_SETTINGS = ("sep", "delimiter", "field")  # keys of a configuration that its reader gets
_ROWS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one split. `source` says in words where they come from."""

    source: str
    rows: Iterator[dict[str, Any]]


def read_dataset(name: str, subset: str | None, revision: str | None, split: str, gib: float = MAX_DATA_GIB) -> Rows:
    """One split of the data set's configuration `subset` (None: its only one, or the one that its card names).
    UserError where its rows need more than `gib` GiB of memory."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{name}: data sets by name need the package datasets; run: pip install 'jetrl[data]'"
        ) from error
    folder = hub.on_disk(name, revision, "dataset")
    if folder is None:
        folder = _downloaded(name, subset, revision)
    config = _chosen(name, _configs(folder / _CARD), subset)
    splits = _asked(name, lambda: _splits(folder, config, datasets.load_dataset))
    if split not in splits:
        raise UserError(
            f"{name}{_of(subset)} has no split {split!r}; it has: {', '.join(splits)}. Set task.train_split (or "
            "eval_split)."
        )
    source = f"{name}{_of(subset)}, {split}"
    return Rows(source, _rows(splits[split], Budget(source, gib)))


def _splits(folder: Path, config: dict[str, Any], load: Callable[..., Any]) -> Mapping[str, Any]:
    """The data sets by split. Files that a card names are given to their reader one by one, since the library itself
    would look for the files of every configuration; without a card, the library finds splits by the files' names."""
    base = inside(folder, str(config.get("data_dir") or "."), source=folder / _CARD)
    if not config.get("data_files"):
        _require_own(folder, base)
        return load(str(base))
    files = {
        split: [
            str(inside(folder, str(path.relative_to(folder))))
            for pattern in patterns for path in sorted(base.glob(pattern)) if path.is_file()
        ]
        for split, patterns in _patterns(config["data_files"]).items()
    }
    first = next((Path(path) for paths in files.values() for path in paths), None)
    if first is None:
        raise FileNotFoundError(f"its card names {config['data_files']}, and {base} has no such file")
    endings = [ending for ending in first.suffixes if ending in _READERS]
    if not endings:
        raise ValueError(f"{first.name} is not one of {', '.join(_READERS)}")
    reader, settings = _READERS[endings[-1]]
    settings = settings | {key: config[key] for key in _SETTINGS if key in config}
    return load(reader, data_files={split: paths for split, paths in files.items() if paths}, **settings)


def _require_own(folder: Path, base: Path) -> None:
    """UserError for a file that leads out of the data set's folder by a link: the library would read it."""
    for path in base.rglob("*"):
        if path.is_symlink():
            inside(folder, str(path.relative_to(folder)))


def _of(subset: str | None) -> str:
    return f" ({subset})" if subset is not None else ""


def _rows(split: Any, budget: Budget) -> Iterator[dict[str, Any]]:
    """The library has the rows in files that are mapped into memory, and knows their size."""
    table = split.data
    budget.take(split.num_rows, split.num_rows * len(split.column_names), split.data.nbytes)
    with read_by_library(budget):
        for table in split.with_format("arrow").iter(_ROWS_AT_ONCE):
            yield from table.to_pylist()


def _asked(name: str, call: Any) -> Any:
    """A call of the library, with its errors about the files' content as one message."""
    from datasets.exceptions import DatasetsError

    try:
        return call()
    except (DatasetsError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, FileNotFoundError):
            raise  # of the disk; pyarrow's about damaged files have no number
        texts = [str(each).strip().splitlines() for each in (error, error.__cause__) if each is not None]
        said = " ".join(lines[0] for lines in texts if lines) or type(error).__name__
        raise UserError(f"{name}: the library datasets cannot read it: {said}") from error


def _downloaded(name: str, subset: str | None, revision: str | None) -> Path:
    """The folder of the data set's snapshot, with the card and the data files of one configuration."""
    card = hub.fetch(name, revision, "dataset", [_CARD])
    config = _chosen(name, _configs(card.folder / _CARD), subset)
    patterns = _paths(config) or _DATA
    found = hub.fetch(name, card.commit, "dataset", [_CARD, *patterns])
    if not any(path.is_file() and path.name != _CARD for path in found.folder.rglob("*")):
        held = f" It has: {some(sorted(found.files))}." if found.files else ""
        raise UserError(f"{name} has no data files that can be read (parquet, jsonl, json, csv, arrow, text).{held}")
    return found.folder


def _chosen(name: str, configs: list[dict[str, Any]], subset: str | None) -> dict[str, Any]:
    """The configuration asked for, or the only or default one; {} where the card names none."""
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

    try:
        text = text_file(card) if card.is_file() else ""
    except ValueError as error:
        raise UserError(f"{card}: it cannot be read: {error}.") from error
    found = re.match(r"---\s*\n(.*?)\n---\s*$", text, re.S | re.M)
    if found is None:
        return []
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(found[1])):
            raise ValueError("it has aliases, which can make a small text stand for a huge one")
        head = yaml.safe_load(found[1])
        require_shallow(head)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{card}: its head is not valid YAML: {error}") from error
    configs = head.get("configs") if isinstance(head, dict) else None
    return [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []


def _patterns(files: Any) -> dict[str, list[str]]:
    """Patterns by split of a card's `data_files`: a text, a list, entries with split and path, or paths by split."""
    found: dict[str, list[str]] = {}
    for entry in files if isinstance(files, list) else [files]:
        pairs = {"train": entry}
        if isinstance(entry, dict):
            pairs = {str(entry.get("split", "train")): entry["path"]} if "path" in entry else entry
        for split, paths in pairs.items():
            texts = [str(path).removeprefix("./") for path in (paths if isinstance(paths, list) else [paths])]
            if outside := [text for text in texts if ":" in text or text.startswith("/") or ".." in text.split("/")]:
                raise UserError(f"The data set's card names {outside[0]}, which is outside of it. Use another one.")
            found.setdefault(split, []).extend(texts)
    return found


def _paths(config: dict[str, Any]) -> list[str]:
    """What to download for a configuration: an asterisk matches slashes, too. Empty: all data files."""
    directory = str(config.get("data_dir") or "").strip("./")
    prefix = f"{directory}/" if directory else ""
    patterns = [path for paths in _patterns(config.get("data_files") or []).values() for path in paths]
    return [f"{prefix}{pattern}".replace("**/", "*") for pattern in patterns or (["*"] if prefix else [])]
