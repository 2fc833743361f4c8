"""`serve`: the front in a process of its own, the engine in this one, a pipe between them."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from jetrl.engine.engine import PagedEngine
from jetrl.errors import UserError
from jetrl.serve.address import FrontSettings
from jetrl.serve.engine_side import serve_engine
from jetrl.serve.front import run_front
from jetrl.serve.service import About

_PATIENCE = 8.0  # seconds until a front that does not end is ended


@dataclass(frozen=True, slots=True)
class Running:
    """A front that listens. `connection` is the engine's end of the pipe; `url` is where clients go."""

    url: str
    connection: Connection
    process: Any  # multiprocessing's


@contextmanager
def front_process(
    listener: socket.socket, connections: Sequence[Connection], about: About, settings: FrontSettings
) -> Iterator[tuple[str, Any]]:
    """The front's process, and the address where clients go. It ends when the engines' ends of all `connections` are
    closed, for which it has some seconds at the end of the block. Socket and connections belong to it."""
    host, port = listener.getsockname()[:2]
    process = multiprocessing.get_context("spawn").Process(
        target=run_front, args=(listener, list(connections), about, settings), name="jetrl-serve-front", daemon=True
    )
    process.start()
    try:
        for connection in connections:
            connection.close()
        listener.close()
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}", process
    finally:
        process.join(_PATIENCE)
        if process.is_alive():
            process.terminate()
            process.join(_PATIENCE)


@contextmanager
def running_front(listener: socket.socket, about: About, settings: FrontSettings) -> Iterator[Running]:
    """The front of an engine in this process, ended with the block. The socket belongs to it."""
    ours, theirs = multiprocessing.Pipe()
    with front_process(listener, [theirs], about, settings) as (url, process):
        try:
            yield Running(url, ours, process)
        finally:
            ours.close()


def serve(
    engine: PagedEngine, about: About, listener: socket.socket, settings: FrontSettings,
    say: Callable[[str], object] = lambda text: None, stop: Callable[[], bool] = lambda: False,
) -> None:
    """Serve until `stop`, an interrupt, or the end of the front, which is a UserError."""
    engine.expect([about.max_position] * engine.settings.max_num_seqs)
    with running_front(listener, about, settings) as front:
        say(front.url)
        serve_engine(engine, front.connection, stop)
        if not stop():
            front.process.join(_PATIENCE)
            raise front_ended(front.process)


def front_ended(process: Any) -> UserError:
    """What the user reads where the front has ended first."""
    return UserError(f"The process of the HTTP server has ended (status {process.exitcode}); see above.")
