"""What both HTTP processes share: bodies within limits, errors in OpenAI's form, how long they serve."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jetrl.serve.refusal import Refused
from jetrl.serve.wire import parse_json


async def body_of(request: Request, most: int, optional: bool = False) -> dict[str, Any]:
    """The body, a JSON object. `optional`: none at all is an empty one. Refused: one of more than `most` bytes, of
    which no more are read."""
    size = request.headers.get("content-length", "0")
    body = bytearray()
    if not (size.isdigit() and int(size) > most):
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                break
        else:
            return {} if optional and not body else parse_json(bytes(body))
    raise Refused(f"The body has more than {most:,} bytes.", 413, code="body_too_large")


def require_json(request: Request) -> None:
    """Refuse other types: those that a page in a browser can send anywhere without asking."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and kind != "application/json":
        raise Refused("Send `Content-Type: application/json`.", 415)


def key_of(request: Request) -> str:
    """The key that a client sends; "" for none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def slow_json(content: Any) -> bytes:
    """What orjson writes, without it."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


try:  # an answer has thousands of numbers
    from orjson import dumps as compact_json
except ModuleNotFoundError:  # an environment that was made before the extra had it
    compact_json = slow_json  # type: ignore[assignment]


class Answer(Response):
    """JSON, quickly."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return compact_json(content)


def refusal(error: Refused) -> JSONResponse:
    """The answer that says why there is none."""
    headers = {"retry-after": str(error.retry_after)} if error.retry_after is not None else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.to_json(), error.status, headers)


async def disconnect(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def serve_until(
    gone: asyncio.Event, app: Starlette, listener: socket.socket, patience: int, **options: Any
) -> None:
    """Serve until `gone`, and for `patience` seconds more what is open then. `options` are uvicorn's."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=patience, server_header=False,
        lifespan="off", **options,
    ))

    async def follow() -> None:
        await gone.wait()
        server.should_exit = True

    watch = asyncio.create_task(follow())
    await server.serve(sockets=[listener])
    watch.cancel()


async def http_error(request: Request, error: Exception) -> Response:
    """No such address or method."""
    assert isinstance(error, HTTPException)
    path, hint = request.url.path, ""
    if path.endswith("/responses"):
        hint = " The Responses API is not served: use chat completions."
    elif "/v1/" not in path and path.endswith(("/completions", "/models")):
        hint = " Clients need a base URL that ends in /v1."
    return refusal(Refused(f"{request.method} {path}: {error.detail}.{hint}", error.status_code))


async def own_error(request: Request, error: Exception) -> Response:
    """A mistake of ours: uvicorn prints the traceback, the client hears that much."""
    return refusal(Refused("The server has failed at this request; its log says how.", 500, code="internal_error"))


HANDLERS: Any = {HTTPException: http_error, Exception: own_error}
