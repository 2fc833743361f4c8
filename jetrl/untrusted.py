"""What comes from others' files, used as if it were ours: text on a terminal, JSON of any depth, names of files.

Each has one function here: `printable`, `json_value` and `json_file`, `inside` and `text_inside`.
tests/test_untrusted.py looks for places that do without.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import traceback
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

from jetrl.errors import UserError
from jetrl.errors import printable as printable

MOST_JSON_BYTES = 64 << 20  # of one JSON file; the index of a model of 30,000 tensors has 3 MiB
MOST_LINE = 64 << 20  # characters or bytes of one line of jsonl
MOST_DEPTH = 64  # of lists and tables in each other
_NESTS = (dict, list)


# ---- JSON -----------------------------------------------------------------------------------------------------------


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
    """ValueError for lists and tables that are nested more than `MOST_DEPTH` deep."""
    level = [value]
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += [each for each in one.values() if isinstance(each, _NESTS)]
            elif isinstance(one, list):
                inner += [each for each in one if isinstance(each, _NESTS)]
        if not inner:
            return
        level = inner
    raise ValueError(f"lists or tables are nested more than {MOST_DEPTH} deep")


def json_file(path: Path, most_bytes: int = MOST_JSON_BYTES, **options: Any) -> Any:
    """The value of a JSON file. ValueError as `json_value`, and for a file that is too large; OSError as reading."""
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {most_bytes >> 20} MiB, the most that jetrl reads of such a file")
    return json_value(data.decode("utf-8"), **options)


# ---- names ----------------------------------------------------------------------------------------------------------


def inside(folder: Path, name: str, *, links: bool = False, source: object = None) -> Path:
    """`folder / name`, for a name that comes from a file (`source`). UserError if that is outside of the folder: by an
    absolute name, by `..`, or by a link that leads out (with `links`, links are followed).

    The snapshots of the hub's cache consist of links into `blobs` next to them, and these count as inside.
    """
    told = f"{source} names" if source is not None else f"{folder} holds"
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts or re.match("[A-Za-z]:", name):
        raise UserError(f"{told} {name!r}, which is outside of {folder}. Use another copy, or correct the name.")
    path = folder / name
    if not links and not _leads_inside(path, folder):
        raise UserError(
            f"{told} {name!r}, which leads by a link to {path.resolve()}, outside of {folder}. Others' folders could "
            "take in any file of yours so. If it is meant, put a copy of the file in the place of the link."
        )
    return path


def text_inside(folder: Path, name: str, most_bytes: int = MOST_JSON_BYTES) -> str:
    """The text of a file in a folder that may be anyone's; empty if there is no such file. UserError as `inside`, and
    for a file that is no UTF-8 text or too large."""
    path = inside(folder, name)
    if not path.is_file():  # nor a pipe, which would never end
        return ""
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise UserError(f"{path} has more than {most_bytes >> 20} MiB, the most that jetrl reads of it. Remove it.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}). Fix or remove it.") from None


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
    """Make warnings, log lines and tracebacks of this program `printable`: they may quote files. For a command line,
    which owns its process."""
    written = warnings.formatwarning
    if getattr(written, "guards", False):
        return

    def formatwarning(*args: Any, **kwargs: Any) -> str:
        return printable(written(*args, **kwargs))

    formatwarning.guards = True  # type: ignore[attr-defined]
    warnings.formatwarning = formatwarning
    logging.setLogRecordFactory(_Record)
    sys.excepthook = _told
    threading.excepthook = lambda end: _told(end.exc_type, end.exc_value, end.exc_traceback)


def _told(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if not issubclass(kind, SystemExit):
        sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))
