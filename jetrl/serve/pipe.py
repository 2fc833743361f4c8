"""Messages between the HTTP process and that of the engine or the run: JSON, so that nothing that a process which was
broken into sends is run by the other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any


def send(connection: Connection, message: Mapping[str, Any]) -> None:
    """OSError where the other process has ended."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Any:
    """The next message. EOFError or OSError where the other process has ended."""
    return json.loads(connection.recv_bytes())
