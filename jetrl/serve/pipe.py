"""Messages between the HTTP process and that of the engine or the run: JSON, so that nothing that a process which was
broken into sends is run by the other. Arrays of int32 and float32 follow the JSON as bytes.

A message is the length of its JSON (4 bytes, big-endian), the JSON, and all arrays. In the JSON, `{"@": [kind, start,
count]}` stands for an array: its kind, the byte at which it begins, and its length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

_KINDS = {"i": np.dtype("<i4"), "f": np.dtype("<f4")}


def send(connection: Connection, message: Mapping[str, Any]) -> None:
    """OSError where the other process has ended."""
    arrays: list[bytes] = []
    size = 0

    def noted(value: Any) -> dict[str, Any]:
        nonlocal size
        kind = value.dtype.kind
        arrays.append(value.astype(_KINDS[kind]).tobytes())
        start, size = size, size + len(arrays[-1])
        return {"@": [kind, start, len(value)]}

    text = json.dumps(message, default=noted).encode()
    connection.send_bytes(b"".join((len(text).to_bytes(4, "big"), text, *arrays)))


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
