"""Modules next to a user's file: `import helpers` works in `path/to/reward.py` as in a script.

Folders are searched last, at any time while the program runs. Installed modules keep their names, so that a file such
as `random.py` breaks nothing that others import; a user's file that means its neighbour and would get another module is
refused when it is loaded.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from jetrl.errors import UserError


class Neighbours:
    """A finder of `sys.meta_path`, after all others. A name that two folders have is an ImportError."""

    def __init__(self) -> None:
        self.folders: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module or package `name` in one of the folders; a package's own modules are found by its path."""
        if path is not None:
            return None
        found = [spec for folder in self.folders if (spec := _spec_in(folder, name)) is not None]
        if len(found) > 1:
            places = " and ".join(str(spec.origin) for spec in found)
            raise ImportError(f"{name} may be {places}: rename one of them, or start a new Python process")
        return found[0] if found else None


_FINDER = Neighbours()


def add_folder(file: Path, key: str) -> None:
    """From now on modules in the folder of `file` can be imported; UserError where one of its imports would miss them.

    `key` is the config's, for the message. What a neighbour itself imports is not checked.
    """
    folder = str(file.resolve().parent)
    for name in _imported(file):
        own = _spec_in(folder, name)
        if own is not None and (other := _taken(name)) is not None and not _same(other, str(own.origin)):
            raise UserError(
                f"{key}: {file} imports {name}, and {own.origin} lies next to it, but the import would give {other}. "
                "Rename the file that lies next to yours."
                + (" Or start a new Python process." if str(Path(other).parent) in _FINDER.folders else "")
            )
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
    if folder not in _FINDER.folders:
        _FINDER.folders.append(folder)


def _spec_in(folder: str, name: str) -> ModuleSpec | None:
    """The module in this folder. A folder without `__init__.py` is none, or `import wandb` would find its output."""
    spec = PathFinder.find_spec(name, [folder])
    return spec if spec is not None and spec.origin is not None else None


def _taken(name: str) -> str | None:
    """The file, or a word, of the module that `import name` gives now; None: there is none."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.loader is None else str(spec.origin)


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _imported(file: Path) -> Iterator[str]:
    """The first names of all absolute imports in a file; none if it is not Python, which loading it will report."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    names: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0]: None for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names[node.module.split(".")[0]] = None
    yield from names
