"""What the sessions of a server leave on disk: a line for each answer, reward and end, of which `jetrl report` makes a
page (`report/sessions.py`).

The file is bounded: at half of `most` bytes it becomes the old one, in the place of the one before. A line is written
whole when an answer is, so a server that is killed loses none. A disk that takes no more ends the record, not the
server.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetrl.errors import UserError, printable
from jetrl.report.files import cut_torn_line, disk_errors, line_of, lock
from jetrl.report.recorder import CONFIG_FILE
from jetrl.report.sessions import OLD_FILE, SESSIONS_FILE
from jetrl.serve.sessions import Session, Turn
from jetrl.untrusted import refuse_link

MOST_TEXT = 20_000  # characters of a message, and of a prompt as the policy reads it


def require_folder(folder: Path) -> None:
    """UserError where the folder cannot be made, is a run's, or is written by another server."""
    if (folder / CONFIG_FILE).exists():
        raise UserError(f"--sessions {folder}: this is the folder of a run. Choose another one.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UserError(f"--sessions {folder}: {error.strerror}. Choose another folder.") from error
    file = lock(folder, "Choose another folder for its sessions.")
    if file >= 0:
        os.close(file)


def spoken(message: Mapping[str, Any]) -> str:
    """A message as text: its content, and its calls of tools as JSON."""
    calls = message.get("tool_calls")
    parts = [str(message.get("content") or ""), json.dumps(calls, ensure_ascii=False) if calls else ""]
    return "\n".join(part for part in parts if part)


class SessionLog:
    """Writes the sessions of one server into `folder`: at most `most` bytes, of all servers that wrote there."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self.server = f"{time.time():.3f}"  # sessions of another start are others, also with the same id
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(folder, "Choose another folder for its sessions.")
        cut_torn_line(folder / SESSIONS_FILE)  # of a server that was killed, or whose disk was full
        self._size = 0
        self._file = self._open()

    def turn(
        self, session: Session, turn: Turn, said: Sequence[tuple[str, str]], read: str, tokens: Sequence[str],
        text: str,
    ) -> None:
        """An answer. `said`: role and text of each message behind the turn before; `read`: all of that as the policy
        reads it; `tokens`: the text of each drawn token; `text`: the answer's."""
        self._write({
            "session": session.id, "turn": session.number_of(turn),
            "after": -1 if turn.parent is None else session.number_of(turn.parent),
            "said": [[role, each[:MOST_TEXT]] for role, each in said], "read": read[:MOST_TEXT], "tokens": list(tokens),
            "logprobs": turn.logprobs.tolist(), "text": text, "finish": "stop" if turn.stopped else "length",
            "version": turn.version, "request": turn.id,
        })

    def reward(self, session: Session) -> None:
        """Its reward has come."""
        self._write({"session": session.id, "reward": session.reward})

    def ended(self, session: Session) -> None:
        """It takes no more calls."""
        self._write({"session": session.id, "ended": True})

    def close(self) -> None:
        """Write nothing more."""
        for file in (self._file, self._lock):
            if file >= 0:
                os.close(file)
        self._file = self._lock = -1

    def _open(self) -> int:
        path = self.folder / SESSIONS_FILE
        with disk_errors(path):
            file = os.open(refuse_link(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self._size = os.fstat(file).st_size
        return file

    def _write(self, event: dict[str, Any]) -> None:
        if self._file < 0:
            return
        data = line_of({"server": self.server, "time": round(time.time(), 3), **event})
        try:
            if self._size and self._size + len(data) > self.most // 2:
                os.close(self._file)
                self._file = -1
                (self.folder / SESSIONS_FILE).replace(self.folder / OLD_FILE)
                self._file = self._open()
            self._size += len(data)
            with disk_errors(self.folder / SESSIONS_FILE):
                while data:
                    data = data[os.write(self._file, data) :]
        except (OSError, UserError) as error:
            print(printable(f"Sessions are no longer recorded: {error}"), file=sys.stderr, flush=True)
            self.close()
