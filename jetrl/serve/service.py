"""What an `Ask` becomes: prompts as tokens, requests for the engine, and answers as JSON. No HTTP here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jetrl.chat.fields import Message
from jetrl.chat.prompts import decoded, encode_plain, encode_rendered, encode_text, uses_chat_template
from jetrl.chat.template import Template
from jetrl.errors import UserError
from jetrl.serve.calls import MARKS, calls_of, for_template, form_of
from jetrl.serve.link import Flight
from jetrl.serve.names import Name, Names
from jetrl.serve.refusal import Refused
from jetrl.serve.session_log import SessionLog, spoken
from jetrl.serve.sessions import Session, Turn, turn_of
from jetrl.serve.text import TextStream, visible
from jetrl.serve.wire import Ask
from jetrl.types import SamplingParams

_IDS = frozenset({"tool_call_id", "tool_calls[].id"})  # the API's, and few templates write them


@dataclass(frozen=True, slots=True)
class About:
    """The model that is served: what a client is told of it, and what a request is checked against."""

    name: str
    tokenizer: Any
    vocab_size: int
    max_position: int
    flow_digest: str
    weight_version: int
    seed: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def to_json(self) -> dict[str, Any]:
        """An entry of `/v1/models`."""
        return {
            "id": self.name, "object": "model", "created": self.created, "owned_by": "jetrl",
            "max_model_len": self.max_position, "flow_digest": self.flow_digest,
            "weight_version": self.weight_version,
        }


@dataclass(eq=False, slots=True)
class Choice:
    """One answer: its prompt (also as `row` [n] int32), its request, and the text that was sent of it."""

    index: int
    prompt: tuple[int, ...]
    row: np.ndarray
    sampling: SamplingParams
    name: Name
    text: TextStream
    parent: Turn | None = None  # the turn of a session that the prompt goes on from
    flight: Flight | None = None
    scores: Flight | None = None  # the log-probs of its prompt, if they are asked for
    told: int = 0  # tokens that a stream has sent

    @property
    def id(self) -> int:
        return self.name.id

    @property
    def landed(self) -> Flight:
        assert self.flight is not None, "the request was not submitted"
        return self.flight


class Service:
    """Prompts and answers of one model. `log`: where sessions are recorded."""

    def __init__(self, about: About, log: SessionLog | None = None) -> None:
        self.log = log
        self.about, self.names, self.form = about, Names(), form_of(about.tokenizer)
        self._texts: dict[int, tuple[str, list[int] | None]] = {}

    def prompts(self, ask: Ask, session: Session | None = None) -> list[tuple[Turn | None, tuple[int, ...]]]:
        """The prompts as token ids, each with the turn of the session that it goes on from."""
        if ask.messages:
            found = session.find(ask.messages, ask.variables) if session is not None else None
            if found is not None:
                turn, length = found
                return [(turn, (*turn.tokens, *self._behind(turn, ask, length)))]
            return [(None, self.chat_prompt(ask.messages, ask.variables))]
        try:
            prompts = [
                tuple(encode_plain(p, self.about.tokenizer, "prompt") if isinstance(p, str) else p)
                for p in ask.prompts
            ]
        except UserError as error:
            raise Refused(str(error), param="prompt") from error
        return [(session.find_tokens(prompt) if session is not None else None, prompt) for prompt in prompts]

    def _behind(self, turn: Turn, ask: Ask, length: int) -> list[int]:
        """Tokens of the messages that follow the first `length`, which end with `turn`; its own are not touched."""
        tokenizer, messages = self.about.tokenizer, for_template(ask.messages)
        try:
            text = Template(tokenizer, ask.variables).reply(
                messages[: length - 1], messages[length:], "of the request", _IDS
            )
            tokens = encode_text(text, tokenizer, "messages", "message")
        except UserError as error:
            raise Refused(str(error), param="messages") from error
        ended = turn.stopped and turn.drawn[-1:].tolist() == tokens[:1]
        return tokens[1:] if ended else tokens  # the policy has drawn the end of its turn itself

    def chat_prompt(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> tuple[int, ...]:
        """Messages by the model's own template, with the assistant's turn opened."""
        tokenizer = self.about.tokenizer
        if not uses_chat_template("auto", tokenizer):
            raise Refused(
                f"{self.about.name} has no chat template: use /v1/completions with plain text or token ids.",
                param="messages", code="no_chat_template",
            )
        try:
            text = Template(tokenizer, variables).prompt(for_template(messages), "of the request", ours=_IDS)
            return tuple(encode_rendered(text, tokenizer, "messages"))
        except UserError as error:
            raise Refused(str(error), param="messages") from error

    def choices(
        self, ask: Ask, session: Session | None = None, names: Sequence[Sequence[Name]] | None = None
    ) -> list[Choice]:
        """The requests of an ask. `names`: those of an earlier attempt, by prompt. Refused where prompt and answer do
        not fit into the model's positions."""
        counts = self.names if session is None else session.names
        asked = [(parent, prompt, self._sampling(ask, len(prompt))) for parent, prompt in self.prompts(ask, session)]
        found: list[Choice] = []
        for i, (parent, prompt, sampling) in enumerate(asked):
            row = np.array(prompt, dtype=np.int32)
            if names is None:
                taken = counts.take(row, sampling, ask.n, ask.seed is not None)
            else:
                taken = list(names[i])
                counts.claim(row, sampling, taken)
            for name in taken:
                text = TextStream(self.about.tokenizer, sampling.stop, self._marks(ask))
                found.append(Choice(len(found), prompt, row, sampling, name, text, parent))
                if not sampling.max_tokens:
                    found[-1].flight = Flight(name.id, done=self._nothing)
        return found

    @property
    def _nothing(self) -> dict[str, Any]:
        """The end of a request that draws nothing."""
        version, digest = self.about.weight_version, self.about.flow_digest
        return {"text": "", "finish": "length", "version": version, "digest": digest}

    def give_back(self, ask: Ask, session: Session | None, choices: Sequence[Choice]) -> None:
        """Nobody got these answers."""
        if ask.seed is None:
            counts = self.names if session is None else session.names
            for choice in choices:
                counts.give_back(choice.row, choice.sampling, [choice.name])

    def note(self, ask: Ask, session: Session, choices: Sequence[Choice]) -> None:
        """Put the answers into the session's tree."""
        for choice in choices:
            done = choice.landed.done
            assert done is not None
            turn = turn_of(choice.id, choice.parent, choice.prompt, done)
            if not ask.messages:
                new = session.add(turn)
            else:
                message, _ = self.said(ask, choice)
                answer = {k: v for k, v in message.items() if v is not None}
                new = session.add(turn, ask.messages, ask.variables, answer)
            if new and self.log is not None:
                self._record(self.log, ask, session, turn, done["text"])

    def _record(self, log: SessionLog, ask: Ask, session: Session, turn: Turn, text: str) -> None:
        """Write an answer down, and what was said before it."""
        said = session.behind(turn.parent, ask.messages, ask.variables)
        tokens = [(self._texts.get(token) or self._text_of(token))[0] for token in turn.drawn.tolist()]
        read = decoded(self.about.tokenizer, turn.before.tolist()) if len(turn.before) else ""
        log.turn(session, turn, [(str(one["role"]), spoken(one)) for one in said], read, tokens, text)

    def _marks(self, ask: Ask) -> tuple[str, ...]:
        return MARKS[self.form] if self.form is not None and ask.variables.get("tools") else ()

    def _sampling(self, ask: Ask, length: int) -> SamplingParams:
        room = self.about.max_position - length
        most = room if ask.max_tokens is None else ask.max_tokens
        if most > room or most < (ask.prompt_logprobs is None):
            wanted = "" if ask.max_tokens is None else f", and {length + most} with max_tokens = {most}"
            raise Refused(
                f"The prompt has {length} tokens{wanted}; the model has {self.about.max_position} positions. Shorten "
                "one of the two.", param="max_tokens" if room > 0 else "prompt", code="context_length_exceeded",
            )
        return replace(ask.sampling, max_tokens=most, seed=self.about.seed if ask.seed is None else ask.seed)

    # ---- answers ----------------------------------------------------------------------------------------------------

    def answer(self, ask: Ask, choices: Sequence[Choice], id: str, kind: str) -> dict[str, Any]:
        """The whole answer. `kind`: chat, completion or generate."""
        body: dict[str, Any] = {
            "id": id, "object": _OBJECTS[kind], "created": int(time.time()), "model": self.about.name,
            "system_fingerprint": self.about.flow_digest,
            "choices": [self._choice(ask, choice, kind) for choice in choices], "usage": _usage(choices),
        }
        if kind == "generate":
            body["request_id"] = id
        if kind == "chat" and ask.token_ids:
            body["prompt_token_ids"] = list(choices[0].prompt)
        return body

    def said(self, ask: Ask, choice: Choice) -> tuple[dict[str, Any], str]:
        """The answer to a chat as a message, and why it ended."""
        done = choice.landed.done
        assert done is not None
        text = visible(done["text"], choice.sampling.stop)
        text, calls = calls_of(text, self.form, ask.variables.get("tools", ()), choice.id)
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        return (message | {"tool_calls": calls}, "tool_calls") if calls else (message, done["finish"])

    def _choice(self, ask: Ask, choice: Choice, kind: str) -> dict[str, Any]:
        flight = choice.landed
        assert flight.done is not None
        found: dict[str, Any] = {"index": choice.index, "finish_reason": flight.done["finish"]}
        if kind == "chat":
            found["message"], found["finish_reason"] = self.said(ask, choice)
        elif kind == "completion":
            found["text"] = visible(flight.done["text"], choice.sampling.stop)
        found["logprobs"] = self._logprobs(ask, flight.tokens, flight.logprobs, kind) if ask.logprobs else None
        if choice.scores is not None:
            found["prompt_logprobs"] = self._prompt_logprobs(choice)
        if ask.token_ids or kind == "generate":
            found["token_ids"] = flight.tokens
        if kind != "chat" and ask.token_ids:
            found["prompt_token_ids"] = list(choice.prompt)
        return found | self._origin(choice)

    def _origin(self, choice: Choice) -> dict[str, Any]:
        """Which weights drew the tokens, and from which stream of random numbers."""
        flight = choice.landed
        assert flight.done is not None
        span = {"version": flight.done["version"], "start": 0, "end": len(flight.tokens)}
        return {
            "weight_versions": [span],
            "jetrl": {"stream": [choice.sampling.seed, choice.id], "flow_digest": flight.done["digest"]},
        }

    def _logprobs(
        self, ask: Ask, tokens: Sequence[int], logprobs: Sequence[float], kind: str
    ) -> dict[str, Any]:
        """Log-probs at the sampling temperature; JSON's digits give back the FP32 bits."""
        if ask.tokens_as_ids:
            texts: list[tuple[str, list[int] | None]] = [(f"token_id:{token}", None) for token in tokens]
        else:
            texts = [self._texts.get(token) or self._text_of(token) for token in tokens]
        if kind == "completion":
            return {
                "tokens": [name for name, _ in texts], "token_logprobs": list(logprobs), "top_logprobs": None,
                "text_offset": None, "token_ids": list(tokens),
            }
        return {"content": [
            {"token": name, "token_id": token, "logprob": logprob, "top_logprobs": [], "bytes": letters}
            for (name, letters), token, logprob in zip(texts, tokens, logprobs, strict=True)
        ], "refusal": None}

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, Any] | None]:
        """As vLLM's server has them: for each token of the prompt a table by token id, None for the first. Log-probs
        are of the whole distribution at temperature 1, whatever the request's is; `rank` is that among the most
        probable ones, None beyond them."""
        assert choice.scores is not None and choice.scores.done is not None
        done = choice.scores.done
        count = len(choice.prompt) - 1
        top = len(done["top_tokens"]) // count if count else 0
        tokens, logprobs = done["top_tokens"].tolist(), done["top_logprobs"].tolist()
        found: list[dict[str, Any] | None] = [None]
        for i, (token, logprob) in enumerate(zip(choice.prompt[1:], done["logprobs"].tolist(), strict=True)):
            part = slice(i * top, i * top + top)
            here = {each: (value, rank) for rank, (each, value) in enumerate(
                zip(tokens[part], logprobs[part], strict=True), 1)}
            first = {token: (logprob, here.get(token, (0, None))[1])}
            found.append({
                str(each): {"logprob": value, "rank": rank,
                            "decoded_token": (self._texts.get(each) or self._text_of(each))[0]}
                for each, (value, rank) in ({**first, **here} | first).items()
            })
        return found

    def _text_of(self, token: int) -> tuple[str, list[int] | None]:
        """The text of one token, and its bytes; None where these are part of a character. Each is made once."""
        name = decoded(self.about.tokenizer, [token])
        found = self._texts[token] = name, None if "\ufffd" in name else list(name.encode())
        return found

    # ---- streams ----------------------------------------------------------------------------------------------------

    def opening(self, ask: Ask, choices: Sequence[Choice], id: str, kind: str) -> Iterator[dict[str, Any]]:
        """What a stream begins with."""
        if kind == "chat":
            for choice in choices:
                first = self._chunk(id, kind, [{
                    "index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                    "finish_reason": None,
                }])
                yield first | ({"prompt_token_ids": list(choice.prompt)} if ask.token_ids else {})

    def news(self, ask: Ask, choices: Sequence[Choice], id: str, kind: str) -> Iterator[dict[str, Any]]:
        """What is new of each choice since the last call."""
        for choice in choices:
            flight, told = choice.landed, choice.told
            if told < 0 or (flight.done is None and len(flight.tokens) == told):
                continue
            tokens, logprobs = flight.tokens[told:], flight.logprobs[told:]
            calls, finish = list[dict[str, Any]](), None
            if flight.done is None:
                piece = choice.text.more(flight.tokens)
                choice.told = len(flight.tokens)
            else:
                piece, calls, finish = self._last(ask, choice, kind)
                choice.told = -1
            if not (piece or flight.done or ask.token_ids or ask.logprobs):
                continue
            found: dict[str, Any] = {
                "index": choice.index, "finish_reason": finish,
                "logprobs": self._logprobs(ask, tokens, logprobs, kind) if ask.logprobs else None,
            }
            delta = {"content": piece} | ({"tool_calls": calls} if calls else {})
            found |= {"delta": delta} if kind == "chat" else {"text": piece}
            if ask.token_ids:
                found["token_ids"] = tokens
                if kind != "chat" and told == 0:
                    found["prompt_token_ids"] = list(choice.prompt)
            yield self._chunk(id, kind, [found | (self._origin(choice) if flight.done else {})])

    def _last(self, ask: Ask, choice: Choice, kind: str) -> tuple[str, list[dict[str, Any]], str]:
        """The last piece of a text, its calls, and why it ended."""
        done = choice.landed.done
        assert done is not None
        if kind != "chat":
            return choice.text.rest(visible(done["text"], choice.sampling.stop)), [], done["finish"]
        message, finish = self.said(ask, choice)
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
        return choice.text.rest(message["content"] or ""), calls, finish

    def closing(self, ask: Ask, choices: Sequence[Choice], id: str, kind: str) -> Iterator[dict[str, Any]]:
        """What a stream ends with: the counts, if they are asked for."""
        if ask.usage:
            yield self._chunk(id, kind, []) | {"usage": _usage(choices)}

    def _chunk(self, id: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": id, "object": "chat.completion.chunk" if kind == "chat" else _OBJECTS[kind],
            "created": int(time.time()), "model": self.about.name, "system_fingerprint": self.about.flow_digest,
            "choices": choices,
        }


_OBJECTS = {"chat": "chat.completion", "completion": "text_completion", "generate": "generation"}


def _usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of prompts, each counted once, and of answers."""
    prompts = sum(len(choice.prompt) for i, choice in enumerate(choices)
                  if i == 0 or choices[i - 1].prompt is not choice.prompt)
    drawn = sum(len(choice.landed.tokens) for choice in choices)
    return {"prompt_tokens": prompts, "completion_tokens": drawn, "total_tokens": prompts + drawn}
