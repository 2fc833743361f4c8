"""The HTTP process of a run whose episodes are programs: it passes calls on to the run and waits for the answers.

`python -m jetrl.serve.relay LISTENER PIPE` with two file descriptors; `serve/gateway.py` starts it. It knows no key and
no conversation. It ends with the pipe.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jetrl.serve import pipe
from jetrl.serve.http import HANDLERS, body_of, disconnect, key_of, refusal, require_json, serve_until
from jetrl.serve.refusal import Refused
from jetrl.serve.whole import events_of

MOST_BYTES = 32 << 20


class Relay:
    """Calls that wait for the run, by number."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.count = 0
        self.gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(connection.fileno(), self._read)

    def app(self) -> Starlette:
        """The application."""
        at = "/sessions/{session}"
        return Starlette(routes=[
            Route(f"{at}/v1/chat/completions", self._call, methods=["POST"], name="chat"),
            Route(f"{at}/reward", self._call, methods=["POST"], name="reward"),
            Route(f"{at}/v1/models", self._call, methods=["GET"], name="models"),
        ], exception_handlers=HANDLERS)

    async def _call(self, request: Request) -> Response:
        try:
            require_json(request)
            body = await body_of(request, MOST_BYTES) if request.method == "POST" else {}
            return await self._passed(request, body)
        except Refused as error:
            return refusal(error)
        except ClientDisconnect:  # nobody reads it
            return Response(status_code=499)

    async def _passed(self, request: Request, body: dict[str, Any]) -> Response:
        self.count += 1
        number, what = self.count, request.scope["path"].rpartition("/")[2]
        answer = self.waiting[number] = asyncio.get_running_loop().create_future()
        self._send({
            "call": number, "what": what, "session": request.path_params["session"], "key": key_of(request),
            "body": body,
        })
        gone = asyncio.create_task(disconnect(request))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientDisconnect
            found = answer.result()
            if (stream := found.get("stream")) is not None:
                return Response("".join(events_of(found["body"], stream["usage"])), media_type="text/event-stream")
            return JSONResponse(found["body"], found["status"])
        finally:
            gone.cancel()
            del self.waiting[number]

    def _send(self, message: dict[str, Any]) -> None:
        try:
            pipe.send(self.connection, message)
        except OSError as error:
            raise Refused("The run has ended.", 503, code="run_ended") from error

    def _read(self) -> None:
        try:
            while pipe.ready(self.connection):
                message = pipe.receive(self.connection)
                if "stop" in message:
                    raise EOFError
                answer = self.waiting.get(message["call"])
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self.connection.fileno())
            ended = Refused("The run has ended.", 503, code="run_ended").to_json()
            for answer in self.waiting.values():
                if not answer.done():
                    answer.set_result({"status": 503, "body": ended})
            self.gone.set()


async def serve(listener: socket.socket, connection: Connection) -> None:
    """Serve until the run closes the pipe."""
    relay = Relay(connection)
    await serve_until(relay.gone, relay.app(), listener, patience=2)


if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends it, by closing the pipe
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), Connection(int(sys.argv[2]))))
