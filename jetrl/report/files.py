"""Files with one JSON object per line: reading and repair; locks of folders; disk errors in plain words."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jetrl.errors import UserError
from jetrl.untrusted import MOST_LINE, fresh, json_value, open_regular, refuse_link, require_bounded


def lock(folder: Path, advice: str = "Wait, or choose another name.") -> int:
    """Lock the folder of a run or study for this process (the system unlocks it, however the process ends); returns a
    descriptor. UserError, with this advice, if another process has it."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        return -1
    with disk_errors(folder):
        file = os.open(refuse_link(folder / ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            raise UserError(f"Another process is writing {folder}. {advice}") from None
        return -1  # a file system without locks
    return file


MOST_ROWS_BYTES = 1 << 30  # of a file whose rows are all held: one of a run of 300,000 steps


def read_rows(path: Path, most_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a file; a torn last line is left out. UserError for more than `most_bytes`, if that is given."""
    if most_bytes is not None:
        require_bounded(path, most_bytes)
    for number, line in enumerate(lines_of(path), start=1):
        row = parse_row(line)
        if row is not None:
            yield row
        elif line.endswith(b"\n"):
            raise UserError(f"{path}, line {number}, is not a row: {line[:80]!r}. Remove that line.")


def lines_of(path: Path, start: int = 0) -> Iterator[bytes]:
    """The lines of a file, with their ends, from byte `start`. UserError for one that is too long, and for a pipe or
    device."""
    try:
        file = open_regular(path)
    except ValueError as error:
        raise UserError(f"{path}: {error}.") from error
    with file:
        file.seek(start)
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), start=1):
            if len(line) > MOST_LINE:
                behind = f" behind byte {start}" if start else ""
                raise UserError(f"{path}, line {number}{behind}, has more than {MOST_LINE >> 20} MiB. Remove it.")
            yield line


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row that a line holds, or None if the line is torn or is not ours."""
    try:
        row = json_value(line)
    except ValueError:  # of JSON or of UTF-8, or nested too deeply
        return None
    return row if isinstance(row, dict) and "step" in row else None


def cut_torn_line(path: Path) -> None:
    """End the file after its last whole row. A whole row that lost only its newline gets it back."""
    if not refuse_link(path).exists():
        return
    end, last = 0, b""
    for line in lines_of(path):
        end, last = end + len(line), line
    if last and not last.endswith(b"\n"):
        with disk_errors(path), path.open("rb+") as file:
            if parse_row(last) is None:
                file.truncate(end - len(last))
            else:
                file.seek(end)
                file.write(b"\n")


def keep_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> set[int]:
    """Remove the rows for which `keep` is false; the steps of the others."""
    temporary, steps = fresh(path), set()
    with disk_errors(path):
        with temporary.open("wb") as target:
            for number, line in enumerate(lines_of(path), start=1):
                row = parse_row(line)
                if row is None or type(row["step"]) is not int:
                    raise UserError(f"{path}, line {number}, is not a row: {line[:80]!r}. Remove that line.")
                if keep(row):
                    target.write(line)
                    steps.add(row["step"])
        temporary.replace(path)
    return steps


def replace_row(path: Path, row: Mapping[str, Any]) -> None:
    """Put `row` in the place of the row of its step, whole or not at all."""
    temporary = fresh(path)
    with disk_errors(path):
        with temporary.open("wb") as target:
            for line in lines_of(path):
                old = parse_row(line)
                target.write(line_of(row) if old is not None and old["step"] == row["step"] else line)
        temporary.replace(path)


def write_whole(path: Path, text: str) -> Path:
    """Write a file, and its folder, whole or not at all."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = fresh(path)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    return path


def line_of(row: Mapping[str, Any]) -> bytes:
    """A row as its line of the file."""
    line = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")) + "\n"
    return line.encode("utf-8", errors="replace")  # token strings may hold lone surrogates


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Report a full disk or an unwritable folder in plain words; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
            free = shutil.disk_usage(place.parent if not place.is_dir() else place).free
            reason = "no space left" if error.errno == errno.ENOSPC else "disk quota used up"
            raise UserError(
                f"cannot write {path}: {reason} ({free / 2**20:.1f} MiB free). Free some space, or choose another "
                "output_dir; then continue with checkpoint.resume=auto."
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UserError(f"cannot write {path}: {error.strerror}. Choose another output_dir.") from error
        raise
