"""The HTTP side: routes, keys, limits and streams, in a process of its own. `run_front` is what that process runs."""

from __future__ import annotations

import asyncio
import hmac
import json
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from jetrl.chat.prompts import decoded
from jetrl.serve.address import FrontSettings
from jetrl.serve.counts import Counts
from jetrl.serve.link import Flight, Link
from jetrl.serve.refusal import Refused
from jetrl.serve.service import About, Choice, Service
from jetrl.serve.wire import Ask, chat_ask, completion_ask, generate_ask, parse_json

SILENCE = 30.0  # seconds without a word of the engine after which it is not healthy
_LOCAL = {"localhost", "127.0.0.1", "[::1]", "::1"}
_KINDS = {"chat": ("chatcmpl", chat_ask), "completion": ("cmpl", completion_ask), "generate": ("gen", generate_ask)}


class Front:
    """The endpoints over one model and one link to its engine."""

    def __init__(self, about: About, settings: FrontSettings, link: Link) -> None:
        self.about, self.settings, self.link = about, settings, link
        self.service, self.counts = Service(about), Counts()

    def app(self) -> Starlette:
        """The application, for any ASGI server."""
        def posts(path: str, call: Callable[[Request], Awaitable[Response]]) -> Route:
            return Route(path, self._guarded(path, call), methods=["POST"])

        def gets(path: str, call: Callable[[Request], Awaitable[Response]], open: bool = False) -> Route:
            return Route(path, self._guarded(path, call, open), methods=["GET"])

        routes = [
            posts("/v1/chat/completions", lambda request: self._generation(request, "chat")),
            posts("/v1/completions", lambda request: self._generation(request, "completion")),
            posts("/inference/v1/generate", lambda request: self._generation(request, "generate")),
            posts("/tokenize", self._tokenize), posts("/detokenize", self._detokenize),
            gets("/v1/models", self._models), gets("/v1/models/{name:path}", self._models),
            gets("/health", self._health, open=True), gets("/metrics", self._metrics),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _own_error})

    # ---- who may ask, and how much ----------------------------------------------------------------------------------

    def _guarded(
        self, path: str, call: Callable[[Request], Awaitable[Response]], open: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                self._require_allowed(request, open)
                response = await call(request)
            except Refused as error:
                response = _refusal(error)
            except ClientDisconnect:  # nobody reads it
                response = Response(status_code=499)
            self.counts.requests[path, response.status_code] += 1
            return response

        return guarded

    def _require_allowed(self, request: Request, open: bool) -> None:
        """Refuse a wrong key; and without a key, what a page in a browser of this machine may have sent."""
        if self.settings.api_key is None:
            host = request.headers.get("host", "")
            if (host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host) not in _LOCAL:
                raise Refused("The header Host is not this machine's: use http://127.0.0.1, or a server with a key.",
                              403, code="wrong_host")
        elif not open:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(key.strip().encode(), self.settings.api_key.encode())
            if scheme.lower() != "bearer" or not same:
                raise Refused("The key is missing or wrong: send `Authorization: Bearer KEY`.", 401,
                              code="invalid_api_key")
        if request.method == "POST":
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":  # what a page elsewhere can send without asking is another type
                raise Refused("Send `Content-Type: application/json`.", 415)

    async def _body(self, request: Request) -> dict[str, Any]:
        most = self.settings.max_body
        size = request.headers.get("content-length", "0")
        body = bytearray()
        if not (size.isdigit() and int(size) > most):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    break
            else:
                return parse_json(bytes(body))
        raise Refused(f"The body has more than {most:,} bytes.", 413, code="body_too_large")

    # ---- generation -------------------------------------------------------------------------------------------------

    async def _generation(self, request: Request, kind: str) -> Response:
        prefix, parse = _KINDS[kind]
        ask = parse(await self._body(request), self.about.name, self.about.vocab_size)
        job = _Job(self, ask, self.service.choices(ask), f"{prefix}-{uuid.uuid4().hex}", kind)
        job.begin(request)
        if ask.stream:
            headers = {"cache-control": "no-cache"}
            return StreamingResponse(job.stream(), media_type="text/event-stream", headers=headers)
        return JSONResponse(await job.whole())

    # ---- the rest ---------------------------------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response:
        data = await self._body(request)
        known = {"model", "messages", "tools", "chat_template_kwargs"} if "messages" in data else {"model", "prompt"}
        parse = chat_ask if "messages" in data else completion_ask
        if wrong := sorted(data.keys() - known):
            raise Refused(f"{wrong[0]} is no field of this endpoint. Leave it out.", param=wrong[0])
        prompts = self.service.prompts(parse(data, self.about.name, self.about.vocab_size))
        if len(prompts) != 1:
            raise Refused("prompt: send one text.", param="prompt")
        return JSONResponse({
            "count": len(prompts[0]), "max_model_len": self.about.max_position, "tokens": list(prompts[0])
        })

    async def _detokenize(self, request: Request) -> Response:
        data = await self._body(request)
        ask = generate_ask({"token_ids": data.get("tokens")}, self.about.name, self.about.vocab_size)
        ids = [token for prompt in ask.prompts for token in prompt if isinstance(token, int)]
        return JSONResponse({"prompt": decoded(self.about.tokenizer, ids)})

    async def _models(self, request: Request) -> Response:
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [self.about.to_json()]})
        if name != self.about.name:
            raise Refused(f"{name}: this server has {self.about.name!r}.", 404, "model", "model_not_found")
        return JSONResponse(self.about.to_json())

    async def _health(self, request: Request) -> Response:
        silent = time.monotonic() - self.link.heard
        well = self.link.alive and silent < SILENCE
        return JSONResponse({"status": "ok" if well else "engine silent", "silent_s": round(silent, 1)},
                            200 if well else 503)

    async def _metrics(self, request: Request) -> Response:
        state = self.link.state
        text = self.counts.text(
            state["running"], state["waiting"], len(self.link.flights), self.about.weight_version
        )
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


class _Job:
    """One request of a client, from the engine's queue to the last byte of its answer."""

    def __init__(self, front: Front, ask: Ask, choices: list[Choice], id: str, kind: str) -> None:
        self.front, self.ask, self.choices, self.id, self.kind = front, ask, choices, id, kind
        self.changed = asyncio.Event()
        self.wake: Callable[[], None] = self.changed.set
        self.gone: asyncio.Task[None] | None = None
        self.answered = False

    def begin(self, request: Request) -> None:
        """Ask the engine. From now on a client that leaves is noticed."""
        wanted = [(choice.id, choice.prompt, choice.sampling) for choice in self.choices]
        for choice, flight in zip(
            self.choices, self.front.link.submit(wanted, self.ask.stream, self.wake), strict=True
        ):
            choice.flight = flight
        self.gone = asyncio.create_task(_disconnect(request))
        self.gone.add_done_callback(lambda task: self.wake())

    async def whole(self) -> dict[str, Any]:
        """The whole answer; Refused where the engine gives none."""
        try:
            while not all(flight.ended for flight in self._flights):
                await self._change()
            self._require_answers()
            self._count()
            return self.front.service.answer(self.ask, self.choices, self.id, self.kind)
        except Refused:
            self.answered = True
            raise
        finally:
            self._end()

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events; an error in the middle is an event of its own."""
        service, parts = self.front.service, (self.ask, self.choices, self.id, self.kind)
        try:
            for chunk in service.opening(*parts):
                yield _event(chunk)
            while True:
                ended = all(flight.ended for flight in self._flights)
                self._require_answers()
                for chunk in service.news(*parts):
                    yield _event(chunk)
                if ended:
                    break
                await self._change()
            for chunk in service.closing(*parts):
                yield _event(chunk)
            self._count()
            yield "data: [DONE]\n\n"
        except Refused as error:
            self.answered = True
            yield _event(error.to_json())
        except ClientDisconnect:
            return
        finally:
            self._end()

    @property
    def _flights(self) -> list[Flight]:
        return [choice.landed for choice in self.choices]

    async def _change(self) -> None:
        await self.changed.wait()
        self.changed.clear()
        if self.gone is not None and self.gone.done():
            raise ClientDisconnect

    def _require_answers(self) -> None:
        for flight in self._flights:
            if flight.error is not None:
                raise flight.error

    def _count(self) -> None:
        self.answered = True
        self.front.counts.prompt_tokens += sum(len(choice.prompt) for choice in self.choices)
        self.front.counts.drawn_tokens += sum(len(flight.tokens) for flight in self._flights)

    def _end(self) -> None:
        self.front.counts.left += not self.answered
        if self.gone is not None:
            self.gone.cancel()
        self.front.link.leave(self._flights, self.wake)


async def _disconnect(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _refusal(error: Refused) -> JSONResponse:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after is not None else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.to_json(), error.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """No such address or method."""
    assert isinstance(error, HTTPException)
    return _refusal(Refused(f"{request.method} {request.url.path}: {error.detail}.", error.status_code))


async def _own_error(request: Request, error: Exception) -> Response:
    """A mistake of ours: uvicorn prints the traceback, the client hears that much."""
    return _refusal(Refused("The server has failed at this request; its log says how.", 500, code="internal_error"))


def run_front(listener: socket.socket, connection: Connection, about: About, settings: FrontSettings) -> None:
    """Serve until the engine's process closes the pipe. What a process of its own runs."""
    import uvicorn

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's process' to answer: it closes the pipe

    async def serve() -> None:
        link = Link(connection, settings.max_requests)
        config = uvicorn.Config(
            Front(about, settings, link).app(), log_level="warning", access_log=False, timeout_graceful_shutdown=5,
            server_header=False, lifespan="off",
        )
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]

        async def follow() -> None:
            await link.gone.wait()
            server.should_exit = True

        watch = asyncio.create_task(follow())
        await server.serve(sockets=[listener])
        watch.cancel()
        link.close()

    asyncio.run(serve())
