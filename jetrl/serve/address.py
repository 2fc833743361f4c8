"""Where a server listens, who may ask, and how much: checked before a model is loaded. Imports no HTTP library."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

from jetrl.arguments import fits_header
from jetrl.errors import UserError
from jetrl.requirements import install, packages


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """How the front behaves. `api_key` None: anyone on this machine may ask."""

    api_key: str | None = None
    max_requests: int = 1024  # that the engine has at once, running and waiting
    max_body: int = 32 << 20  # bytes
    sessions: Path | None = None  # the folder that records them
    sessions_bytes: int = 256 << 20  # that it may take


def require_extra() -> None:
    """UserError where the packages of the extra `serve` are missing."""
    if missing := [package for package in packages("serve") if not package.fits]:
        raise UserError(f"jetrl serve: {missing[0]}. Install what it needs: {install('serve')}")


def require_key(host: str, api_key: str | None) -> None:
    """UserError where others could reach the server without a key, or with one that no header can carry."""
    if api_key is not None and not fits_header(api_key):
        raise UserError("The key must be one word of printable ASCII characters, and not empty.")
    if api_key is None and not is_loopback(host):
        raise UserError(
            f"host = {host!r}: others can reach this address, so a key is needed. Set the environment variable "
            "JETRL_API_KEY, or leave the address at 127.0.0.1."
        )


def opened(host: str, port: int, settings: FrontSettings) -> socket.socket:
    """The socket of a server, after all that can be refused before a model is loaded."""
    from jetrl.serve.session_log import require_folder

    require_extra()
    require_key(host, settings.api_key)
    if settings.sessions is not None:
        require_folder(settings.sessions)
    return listen(host, port)


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may mean any address
        return False


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; UserError where the address or the port cannot be had. Port 0: any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # What is accepted inherits it, and asyncio sets it for its own sockets alone: without it an answer of two writes
    # waits 40 ms for the client to acknowledge the first.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        found.bind((host, port))
        found.listen(1024)
    except OSError as error:
        found.close()
        cure = "Another program has it: choose another port." if error.errno == errno.EADDRINUSE else (
            "Choose another address or port."
        )
        raise UserError(f"{host}:{port}: {error.strerror or error}. {cure}") from error
    return found
