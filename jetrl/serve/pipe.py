"""Messages between the HTTP process and that of the engine or the run: JSON, so that nothing that a process which was
broken into sends is run by the other. Arrays of int32 and float32 follow the JSON as bytes.

A message is the length of its JSON (4 bytes, big-endian), the JSON, and all arrays. In the JSON, `{"@": [kind, start,
count]}` stands for an array: its kind, the byte at which it begins, and its length.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Mapping
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

_AT_ONCE = 64  # messages of one write
_KINDS = {"i": np.dtype("<i4"), "f": np.dtype("<f4")}


def send(connection: Connection, message: Mapping[str, Any]) -> None:
    """OSError where the other process has ended."""
    connection.send_bytes(b"".join(_parts(message)))


def ready(connection: Connection, seconds: float = 0.0) -> bool:
    """Whether a message, or the end, can be read within so many seconds; as `Connection.poll`, which makes a selector
    for each look, and takes ten times as long."""
    look = select.poll()
    look.register(connection.fileno(), select.POLLIN)
    return bool(look.poll(seconds * 1e3))


class Outbox:
    """Sends from an asyncio loop, in order, and never waits: what the pipe has no room for leaves when it has. What is
    sent in one turn of the loop leaves at once, so the other process wakes once for it. No thread: two that take the
    interpreter from each other cost more than all of a request. What is sent after the other process has ended is lost,
    as it would be on its way."""

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))  # a connection is one
        self._waiting: deque[memoryview] = deque()
        self._due: asyncio.Handle | None = None

    def send(self, message: Mapping[str, Any]) -> None:
        """Put a message behind those that have not left yet."""
        data = b"".join(_parts(message))
        if not self._waiting:
            self._due = asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(memoryview(struct.pack("!i", len(data)) + data))  # as `Connection.send_bytes`

    def close(self) -> None:
        """Send nothing more."""
        if self._due is not None:
            self._due.cancel()
        asyncio.get_running_loop().remove_writer(self._socket.fileno())
        self._waiting.clear()
        self._socket.close()

    def _flush(self) -> None:
        loop, waiting = asyncio.get_running_loop(), self._waiting
        try:
            while waiting:
                self._take(self._socket.sendmsg(list(islice(waiting, _AT_ONCE)), (), socket.MSG_DONTWAIT))
        except BlockingIOError:
            loop.add_writer(self._socket.fileno(), self._flush)
            return
        except OSError:
            waiting.clear()
        loop.remove_writer(self._socket.fileno())

    def _take(self, sent: int) -> None:
        """So many bytes have left."""
        while self._waiting and sent >= len(self._waiting[0]):
            sent -= len(self._waiting.popleft())
        if sent:
            self._waiting[0] = self._waiting[0][sent:]


def _parts(message: Mapping[str, Any]) -> list[bytes]:
    """The bytes of a message, in pieces."""
    arrays: list[bytes] = []
    size = 0

    def noted(value: Any) -> dict[str, Any]:
        nonlocal size
        kind = value.dtype.kind
        arrays.append(value.astype(_KINDS[kind]).tobytes())
        start, size = size, size + len(arrays[-1])
        return {"@": [kind, start, len(value)]}

    text = json.dumps(message, default=noted).encode()
    return [len(text).to_bytes(4, "big"), text, *arrays]


def receive(connection: Connection) -> Any:
    """The next message, with read-only arrays. EOFError or OSError where the other process has ended."""
    data = connection.recv_bytes()
    end = 4 + int.from_bytes(data[:4], "big")
    text, arrays = data[4:end], memoryview(data)[end:]

    def restored(found: dict[str, Any]) -> Any:
        if "@" not in found:
            return found
        kind, start, count = found["@"]
        return np.frombuffer(arrays, _KINDS[kind], count, start) if count else np.empty(0, _KINDS[kind])

    return json.loads(text, object_hook=restored if b'{"@": [' in text else None)
