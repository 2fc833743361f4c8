"""What comes from others' files, used as if it were ours: text on a terminal, JSON of any depth, names of files.

Each has one function here: `printable`, `json_value` and `json_file`, `text_file` and `open_regular`, `inside` and
`text_inside`; and what rows may take of memory has a `Budget`.
tests/test_untrusted.py looks for places that do without.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import sys
import threading
import traceback
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from jetrl.errors import Notice, UserError
from jetrl.errors import printable as printable

MOST_JSON_BYTES = 64 << 20  # of one JSON file; the index of a model of 30,000 tensors has 3 MiB
MOST_TEXT_BYTES = 16 << 20  # of a recipe, a picture, a card, a script
MOST_LINE = 64 << 20  # characters or bytes of one line of jsonl
GIB = 1 << 30
ROW_BYTES, CELL_BYTES = 300, 60  # that Python needs for the table of a row, for a value in it
MOST_DEPTH = 64  # of lists and tables in each other
_NESTS = (dict, list, tuple)


# ---- JSON -----------------------------------------------------------------------------------------------------------


def no_constant(name: str) -> Any:
    """`parse_constant` of readers that refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is not JSON")


def json_value(text: str | bytes, **options: Any) -> Any:
    """`json.loads`, with ValueError for whatever is no JSON, and for what is nested more than `MOST_DEPTH` deep: code
    that walks through it would fail with RecursionError."""
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError(f"lists or tables are nested more than {MOST_DEPTH} deep") from None
    opening: Any = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(text.count(sign) for sign in opening) > MOST_DEPTH:
        require_shallow(value)
    return value


def require_shallow(value: Any) -> None:
    """ValueError for lists and tables that are nested more than `MOST_DEPTH` deep, or hold themselves."""
    level = [value] if isinstance(value, _NESTS) else []
    for _ in range(MOST_DEPTH):
        inner: dict[int, Any] = {}  # each once: objects of Python may be in many places
        for one in level:
            for each in one.values() if isinstance(one, dict) else one:
                if isinstance(each, _NESTS):
                    inner[id(each)] = each
        if not inner:
            return
        level = list(inner.values())
    raise ValueError(f"lists or tables are nested more than {MOST_DEPTH} deep")


def json_file(path: Path, most_bytes: int = MOST_JSON_BYTES, **options: Any) -> Any:
    """The value of a JSON file. Errors as those of `json_value` and `text_file`."""
    return json_value(text_file(path, most_bytes), **options)


# ---- whole files ----------------------------------------------------------------------------------------------------


def text_file(path: Path, most_bytes: int = MOST_TEXT_BYTES, encoding: str = "utf-8") -> str:
    """The text of a file, its lines ended by a newline alone. ValueError (of which UnicodeDecodeError is one) for a
    file that is too large, is no regular one, or is no text; OSError as reading."""
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(_too_large(most_bytes))
    return data.decode(encoding).replace("\r\n", "\n")


def require_bounded(path: Path, most_bytes: int) -> None:
    """UserError for a file that a library is about to read whole, if it is too large or no regular one."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > most_bytes:
                raise ValueError(_too_large(most_bytes))
    except ValueError as error:
        raise UserError(f"{path}: {error}.") from error


def _too_large(most_bytes: int) -> str:
    return f"it has more than {most_bytes >> 20} MiB, the most that jetrl reads of such a file"


def open_regular(path: Path) -> BinaryIO:
    """The file, to be read. ValueError for a pipe or a device, which may have no end or hang, unless it is named as
    such (`/dev/stdin`, `<(command)` of a shell); OSError as opening."""
    named = str(path).startswith(("/dev/", "/proc/"))
    file = open(path, "rb", opener=None if named else _at_once)  # noqa: SIM115
    if not named and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is no regular file, but a pipe or a device. Put a file in its place")
    return file


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe that nobody writes would be waited for


# ---- names ----------------------------------------------------------------------------------------------------------


def inside(folder: Path, name: str, *, links: bool = False, source: object = None) -> Path:
    """`folder / name`, for a name that comes from a file (`source`). UserError if that is outside of the folder: by an
    absolute name, by `..`, or by a link that leads out (with `links`, links are followed).

    The snapshots of the hub's cache consist of links into `blobs` next to them, and these count as inside.
    """
    named = f"{source} names" if source is not None else f"{folder} holds"
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts or re.match("[A-Za-z]:", name):
        raise UserError(f"{named} {name!r}, which is outside of {folder}. Use another copy, or correct the name.")
    path = folder / name
    if not links and not _leads_inside(path, folder):
        raise UserError(
            f"{named} {name!r}, which leads by a link to {path.resolve()}, outside of {folder}. Such a link "
            "could read any of your files. If you meant it, replace the link by a copy, or name the file it leads to."
        )
    return path


def text_inside(folder: Path, name: str, most_bytes: int = MOST_JSON_BYTES) -> str:
    """The text of a file in a folder that may be anyone's; empty if there is no such file. UserError as `inside`, and
    for a file that is too large, is no regular one, or is no text."""
    path = inside(folder, name)
    if not path.exists():
        return ""
    try:
        return text_file(path, most_bytes)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}). Fix or remove it.") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}. Fix or remove it.") from error


def _leads_inside(path: Path, folder: Path) -> bool:
    root, place = folder.resolve(), path.resolve()
    if place.is_relative_to(root):
        return True
    repository = root.parent.parent  # REPOSITORY/snapshots/COMMIT, in the hub's cache
    in_cache = root.parent.name == "snapshots" and repository.name.startswith(("models--", "datasets--"))
    return in_cache and place.is_relative_to(repository / "blobs")


def fresh(path: Path) -> Path:
    """Where to write the new content of a file in a folder that may be anyone's, to be renamed to `path`. Nothing lies
    there, and renaming replaces a link: so no link of others, under either name, is written through."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    return temporary


def refuse_link(path: Path) -> Path:
    """The path, for a file that is written in place. UserError if it is a link: what it leads to would be changed."""
    if path.is_symlink() and not path.is_char_device():
        raise UserError(
            f"{path} is a link to {path.readlink()}, and writing there would change that file. Remove the link, or put "
            "a copy of the file in its place."
        )
    return path


# ---- the terminal ---------------------------------------------------------------------------------------------------


class _Record(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802  # logging's name
        return printable(super().getMessage())


def guard_terminal() -> None:
    """Make warnings, log lines and tracebacks of this program `printable`: they may quote files. A `Notice` is shown
    as a line of jetrl's, others' warnings with their places. For a command line, which owns its process."""
    written = warnings.formatwarning
    if getattr(written, "guards", False):
        return

    def formatwarning(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> str:
        if issubclass(category, Notice):
            return printable(f"jetrl: warning: {message}\n")
        return printable(written(message, category, *args, **kwargs))

    formatwarning.guards = True  # type: ignore[attr-defined]
    warnings.formatwarning = formatwarning
    logging.setLogRecordFactory(_Record)
    sys.excepthook = _print_safely
    threading.excepthook = lambda end: _print_safely(end.exc_type, end.exc_value, end.exc_traceback)


def _print_safely(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if not issubclass(kind, SystemExit):
        sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))


# ---- rows ------------------------------------------------------------------------------------------------------------


class Budget:
    """Memory for the rows of `source`: bytes of their texts and numbers, and `ROW_BYTES` and `CELL_BYTES` for Python's
    objects. UserError where they need more than `gib` GiB."""

    def __init__(self, source: object, gib: float) -> None:
        self.source, self.gib = source, gib
        self.left = self.limit = gib * GIB

    def take(self, rows: int, cells: int, content: int) -> None:
        """Count rows with so many values and bytes of content."""
        self.left -= self.needs(rows, cells, content)
        if self.left < 0:
            self.refuse(f"more than {self.gib:g} GiB")

    @staticmethod
    def needs(rows: int, cells: int, content: int) -> int:
        return rows * ROW_BYTES + cells * CELL_BYTES + content

    def refuse(self, size: str) -> None:
        raise UserError(
            f"{self.source}: its rows need {size} of memory, and task.max_data_gib is {self.gib:g}. If that is "
            "what you expect, and this machine has the memory, raise the limit; or take fewer rows or columns."
        )
