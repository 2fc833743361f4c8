"""The HTTP side: routes, keys, limits and streams, in a process of its own. `run_front` is what that process runs."""

from __future__ import annotations

import asyncio
import hmac
import json
import signal
import socket
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from hashlib import blake2b
from multiprocessing.connection import Connection
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jetrl.chat.prompts import decoded
from jetrl.errors import shown
from jetrl.serve.address import FrontSettings, is_loopback
from jetrl.serve.counts import Counts
from jetrl.serve.dealer import SILENCE, Dealer
from jetrl.serve.http import (
    HANDLERS,
    Answer,
    body_of,
    compact_json,
    disconnect,
    key_of,
    refusal,
    require_json,
    serve_until,
)
from jetrl.serve.link import Flight
from jetrl.serve.names import Name
from jetrl.serve.refusal import Refused
from jetrl.serve.service import About, Choice, Service
from jetrl.serve.session_log import SessionLog
from jetrl.serve.sessions import Session, Sessions
from jetrl.serve.wire import Ask, chat_ask, completion_ask, generate_ask

_ATTEMPTS = 10_000  # requests whose names another attempt can have
_KINDS = {"chat": ("chatcmpl", chat_ask), "completion": ("cmpl", completion_ask), "generate": ("gen", generate_ask)}


class Front:
    """The endpoints over one model and the links to its engines."""

    def __init__(self, about: About, settings: FrontSettings, dealer: Dealer) -> None:
        self.about, self.settings, self.dealer = about, settings, dealer
        self.log = None if settings.sessions is None else SessionLog(settings.sessions, settings.sessions_bytes)
        self.service, self.counts, self.sessions = Service(about, self.log), Counts(), Sessions()
        if self.log is not None:
            self.sessions.on_end = self.log.ended
        self.attempts: OrderedDict[tuple[str, ...], tuple[bytes, list[list[Name]]]] = OrderedDict()

    def app(self) -> Starlette:
        """The application, for any ASGI server."""
        def posts(path: str, call: Callable[[Request], Awaitable[Response]]) -> Route:
            return Route(path, self._guarded(path, call), methods=["POST"])

        def gets(path: str, call: Callable[[Request], Awaitable[Response]], open: bool = False) -> Route:
            return Route(path, self._guarded(path, call, open), methods=["GET"])

        routes = [
            route for scope in ("", "/sessions/{session}") for route in (
                posts(scope + "/v1/chat/completions", lambda request: self._generation(request, "chat")),
                posts(scope + "/v1/completions", lambda request: self._generation(request, "completion")),
                posts(scope + "/inference/v1/generate", lambda request: self._generation(request, "generate")),
                gets(scope + "/v1/models", self._models), gets(scope + "/v1/models/{name:path}", self._models),
            )
        ] + [
            posts("/sessions", self._new_session), posts("/sessions/{session}/reward", self._reward),
            gets("/sessions/{session}/traces", self._traces),
            Route("/sessions/{session}", self._guarded("/sessions/{session}", self._end_session), methods=["DELETE"]),
            posts("/tokenize", self._tokenize), posts("/detokenize", self._detokenize),
            gets("/health", self._health, open=True), gets("/metrics", self._metrics),
        ]
        return Starlette(routes=routes, exception_handlers=HANDLERS)

    # ---- who may ask, and how much ----------------------------------------------------------------------------------

    def _guarded(
        self, path: str, call: Callable[[Request], Awaitable[Response]], open: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                self._require_allowed(request, open)
                response = await call(request)
            except Refused as error:
                response = refusal(error)
            except ClientDisconnect:  # nobody reads it
                response = Response(status_code=499)
            self.counts.requests[path, response.status_code] += 1
            return response

        return guarded

    def _require_allowed(self, request: Request, open: bool) -> None:
        """Refuse a wrong key; and without a key, what a page in a browser of this machine may have sent."""
        if self.settings.api_key is None:
            if not is_loopback(_name_in(request.headers.get("host", ""))):
                raise Refused("The header Host is not this machine's: use http://127.0.0.1, or a server with a key.",
                              403, code="wrong_host")
        elif not open:
            if not hmac.compare_digest(key_of(request).encode(), self.settings.api_key.encode()):
                raise Refused("The key is missing or wrong: send `Authorization: Bearer KEY`.", 401,
                              code="invalid_api_key")
        require_json(request)

    async def _body(self, request: Request) -> dict[str, Any]:
        return await body_of(request, self.settings.max_body)

    # ---- generation -------------------------------------------------------------------------------------------------

    async def _generation(self, request: Request, kind: str) -> Response:
        prefix, parse = _KINDS[kind]
        data = await self._body(request)
        ask = parse(data, self.about.name, self.about.vocab_size)
        session = self._session(request, data)
        if session is not None and ask.prompt_logprobs is not None:
            raise Refused("prompt_logprobs: ask for them outside of sessions.", param="prompt_logprobs")
        choices = self._named(request, data, ask, session)
        job = _Job(self, ask, choices, f"{prefix}-{uuid.uuid4().hex}", kind, session)
        job.begin(request)
        if ask.stream:
            headers = {"cache-control": "no-cache"}
            return _Stream(job, media_type="text/event-stream", headers=headers)
        return Answer(await job.whole())

    def _session(self, request: Request, data: dict[str, Any]) -> Session | None:
        """The session that a request names: in its path, its header or its body."""
        named = request.path_params.get("session") or request.headers.get("x-session-id") or data.get("session_id")
        if named is not None and not isinstance(named, str):
            raise Refused(f"session_id = {shown(named, 60)}: send a text.", param="session_id")
        return None if named is None else self.sessions.use(named)

    def _named(self, request: Request, data: dict[str, Any], ask: Ask, session: Session | None) -> list[Choice]:
        """The requests for the engine. Another attempt of a request that came before has its names, and so its answer:
        it says the same Idempotency-Key or, within a session, that it is a retry (as OpenAI's client does)."""
        key = request.headers.get("idempotency-key")
        if key is None and session is None:
            return self.service.choices(ask)
        body = blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=16).digest()
        scope = "" if session is None else f"session {session.id}"
        tries = request.headers.get("x-stainless-retry-count", "0")
        place = ("key", scope, key) if key is not None else ("same", scope, body.hex())
        before = self.attempts.get(place) if key is not None or tries != "0" else None
        if before is not None and before[0] != body:
            raise Refused("This Idempotency-Key came with another body.", 422, code="idempotency_key_reused")
        choices = self.service.choices(ask, session, None if before is None else before[1])
        names = [choice.name for choice in choices]
        self.attempts[place] = body, [names[i : i + ask.n] for i in range(0, len(names), ask.n)]
        self.attempts.move_to_end(place)
        if len(self.attempts) > _ATTEMPTS:
            self.attempts.popitem(last=False)
        return choices

    # ---- sessions ---------------------------------------------------------------------------------------------------

    async def _new_session(self, request: Request) -> Response:
        data = await body_of(request, self.settings.max_body, optional=True)
        session = self.sessions.use(self._id_of(data))
        return Answer({"id": session.id, "base_url": f"{request.base_url}sessions/{session.id}/v1"}, 201)

    def _id_of(self, data: dict[str, Any]) -> str:
        if wrong := sorted(data.keys() - {"id"}):
            raise Refused(f"{wrong[0]} is no field of this endpoint. Leave it out.", param=wrong[0])
        id = data.get("id", uuid.uuid4().hex)
        if not isinstance(id, str) or not id.replace("-", "").replace("_", "").isalnum() or not id.isascii():
            raise Refused(f"id = {shown(id, 60)}: letters, digits, - and _.", param="id")
        return id

    async def _reward(self, request: Request) -> Response:
        data = await self._body(request)
        session = self.sessions.use(request.path_params["session"], make=False)
        session.set_reward(data.get("reward"))
        if self.log is not None:
            self.log.reward(session)
        return Answer({"id": session.id, "reward": session.reward})

    async def _traces(self, request: Request) -> Response:
        return Answer(self.sessions.use(request.path_params["session"], make=False).to_json())

    async def _end_session(self, request: Request) -> Response:
        return Answer(self.sessions.close(request.path_params["session"]).to_json())

    # ---- the rest ---------------------------------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> Response:
        data = await self._body(request)
        known = {"model", "messages", "tools", "chat_template_kwargs"} if "messages" in data else {"model", "prompt"}
        parse = chat_ask if "messages" in data else completion_ask
        if wrong := sorted(data.keys() - known):
            raise Refused(f"{wrong[0]} is no field of this endpoint. Leave it out.", param=wrong[0])
        prompts = [prompt for _, prompt in self.service.prompts(parse(data, self.about.name, self.about.vocab_size))]
        if len(prompts) != 1:
            raise Refused("prompt: send one text.", param="prompt")
        return Answer({
            "count": len(prompts[0]), "max_model_len": self.about.max_position, "tokens": list(prompts[0])
        })

    async def _detokenize(self, request: Request) -> Response:
        data = await self._body(request)
        ask = generate_ask({"token_ids": data.get("tokens")}, self.about.name, self.about.vocab_size)
        ids = [token for prompt in ask.prompts for token in prompt if isinstance(token, int)]
        return Answer({"prompt": decoded(self.about.tokenizer, ids)})

    async def _models(self, request: Request) -> Response:
        name = request.path_params.get("name")
        if name is None:
            return Answer({"object": "list", "data": [self.about.to_json()]})
        if name != self.about.name:
            raise Refused(f"{name}: this server has {self.about.name!r}.", 404, "model", "model_not_found")
        return Answer(self.about.to_json())

    async def _health(self, request: Request) -> Response:
        workers = [
            {"worker": link.number, "silent_s": round(link.silent, 1),
             "status": "ended" if not link.alive else "silent" if link.silent >= SILENCE else "ok"}
            for link in self.dealer.links
        ]
        well = [one for one in workers if one["status"] == "ok"]
        status = "engine silent" if not well else "ok" if len(well) == len(workers) else "degraded"
        silent = min(link.silent for link in self.dealer.links)
        return Answer({"status": status, "silent_s": round(silent, 1), "workers": workers}, 200 if well else 503)

    async def _metrics(self, request: Request) -> Response:
        workers = [(link.alive, link.state, len(link.flights)) for link in self.dealer.links]
        text = self.counts.text(workers, self.about.weight_version)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


class _Job:
    """One request of a client, from the engine's queue to the last byte of its answer."""

    def __init__(
        self, front: Front, ask: Ask, choices: list[Choice], id: str, kind: str, session: Session | None
    ) -> None:
        self.front, self.ask, self.choices, self.id, self.kind, self.session = front, ask, choices, id, kind, session
        self.changed = asyncio.Event()
        self.wake: Callable[[], None] = self.changed.set
        self.gone: asyncio.Task[None] | None = None
        self.answered = self.failed = self.ended = False

    def begin(self, request: Request) -> None:
        """Ask the engine. From now on a client that leaves is noticed."""
        dealer, drawn = self.front.dealer, [choice for choice in self.choices if choice.flight is None]
        scored = 0 if self.ask.prompt_logprobs is None else len(self.choices)
        try:
            flights = dealer.submit([(choice.id, choice.row, choice.sampling) for choice in drawn],
                                    self.ask.stream, self.wake, self.session, scored)
            for choice, flight in zip(drawn, flights, strict=True):
                choice.flight = flight
            if self.ask.prompt_logprobs is not None:
                rows = [choice.row for choice in self.choices]
                scores = dealer.score(rows, self.ask.prompt_logprobs, self.wake, self.session)
                for choice, flight in zip(self.choices, scores, strict=True):
                    choice.scores = flight
        except Refused:
            self.front.service.give_back(self.ask, self.session, self.choices)
            dealer.leave([choice.flight for choice in drawn if choice.flight is not None], self.wake)
            raise
        if self.session is not None:
            self.session.open_requests += 1
        self.gone = asyncio.create_task(disconnect(request))
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
            self.failed = True
            raise
        finally:
            self.end()

    async def stream(self) -> AsyncIterator[bytes]:
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
            self._count()
            for chunk in service.closing(*parts):
                yield _event(chunk)
            yield b"data: [DONE]\n\n"
        except Refused as error:
            self.failed = True
            yield _event(error.to_json())
        except ClientDisconnect:
            return
        finally:
            self.end()

    @property
    def _flights(self) -> list[Flight]:
        found = [flight for choice in self.choices for flight in (choice.flight, choice.scores)]
        return [flight for flight in found if flight is not None]

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
        """The answer is whole: it counts, and is part of its session."""
        self.answered = True
        if self.session is not None:
            self.front.service.note(self.ask, self.session, self.choices)
        for choice in self.choices:
            by = choice.scores or choice.landed  # one that draws nothing has no worker
            self.front.counts.answered(by.worker, len(choice.prompt), len(choice.landed.tokens))

    def end(self) -> None:
        """What is not answered by now will not be. Once."""
        if self.ended:
            return
        self.ended = True
        self.front.counts.left += not (self.answered or self.failed)
        if not self.answered:
            self.front.service.give_back(self.ask, self.session, self.choices)
        if self.session is not None:
            self.session.open_requests -= 1
        if self.gone is not None:
            self.gone.cancel()
        self.front.dealer.leave(self._flights, self.wake)


def _name_in(host: str) -> str:
    """The name or address of a header Host, without the port."""
    name, _, port = host.rpartition(":")
    return (name if port.isdigit() else host).removeprefix("[").removesuffix("]")


class _Stream(StreamingResponse):
    """The stream of a job, which ends with it, also where the client left before the first byte."""

    def __init__(self, job: _Job, **options: Any) -> None:
        super().__init__(job.stream(), **options)
        self.job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.job.end()


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + compact_json(data) + b"\n\n"


def run_front(
    listener: socket.socket, connections: Sequence[Connection], about: About, settings: FrontSettings
) -> None:
    """Serve until the processes of all engines have closed their pipes. What a process of its own runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process' to answer: it ends the engines

    async def serve() -> None:
        dealer = Dealer(connections, settings.max_requests)
        app = Front(about, settings, dealer).app()
        await serve_until(dealer.gone, app, listener, patience=5, timeout_keep_alive=60)
        dealer.close()

    asyncio.run(serve())
