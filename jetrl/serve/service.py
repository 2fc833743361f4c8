"""What an `Ask` becomes: prompts as tokens, requests for the engine, and answers as JSON. No HTTP here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jetrl.chat.fields import Message
from jetrl.chat.prompts import decoded, encode_plain, encode_rendered, uses_chat_template
from jetrl.chat.template import Template
from jetrl.errors import UserError
from jetrl.serve.link import Flight
from jetrl.serve.names import Names
from jetrl.serve.refusal import Refused
from jetrl.serve.text import TextStream, visible
from jetrl.serve.wire import Ask
from jetrl.types import SamplingParams


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
    """One answer: its prompt, its request, and the text that was sent of it."""

    index: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    id: int
    text: TextStream
    flight: Flight | None = None
    told: int = 0  # tokens that a stream has sent

    @property
    def landed(self) -> Flight:
        assert self.flight is not None, "the request was not submitted"
        return self.flight


class Service:
    """Prompts and answers of one model."""

    def __init__(self, about: About) -> None:
        self.about, self.names = about, Names()

    def prompts(self, ask: Ask) -> list[tuple[int, ...]]:
        """The prompts as token ids."""
        if ask.messages:
            return [self.chat_prompt(ask.messages, ask.variables)]
        try:
            return [
                tuple(encode_plain(p, self.about.tokenizer, "prompt") if isinstance(p, str) else p)
                for p in ask.prompts
            ]
        except UserError as error:
            raise Refused(str(error), param="prompt") from error

    def chat_prompt(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> tuple[int, ...]:
        """Messages by the model's own template, with the assistant's turn opened."""
        tokenizer = self.about.tokenizer
        if not uses_chat_template("auto", tokenizer):
            raise Refused(
                f"{self.about.name} has no chat template: use /v1/completions with plain text or token ids.",
                param="messages", code="no_chat_template",
            )
        try:
            text = Template(tokenizer, variables).prompt(messages, "of the request")
            return tuple(encode_rendered(text, tokenizer, "messages"))
        except UserError as error:
            raise Refused(str(error), param="messages") from error

    def choices(self, ask: Ask) -> list[Choice]:
        """The requests of an ask. Refused where prompt and answer do not fit into the model's positions."""
        found: list[Choice] = []
        for prompt in self.prompts(ask):
            sampling = self._sampling(ask, len(prompt))
            ids = self.names.take(prompt, sampling, ask.n, ask.seed is not None)
            for id in ids:
                text = TextStream(self.about.tokenizer, sampling.stop)
                found.append(Choice(len(found), prompt, sampling, id, text))
        return found

    def _sampling(self, ask: Ask, length: int) -> SamplingParams:
        room = self.about.max_position - length
        most = room if ask.max_tokens is None else ask.max_tokens
        if most > room or most < 1:
            wanted = "" if ask.max_tokens is None else f", with max_tokens = {most} {length + most}"
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

    def _choice(self, ask: Ask, choice: Choice, kind: str) -> dict[str, Any]:
        flight = choice.landed
        assert flight.done is not None
        text = visible(flight.done["text"], choice.sampling.stop)
        found: dict[str, Any] = {"index": choice.index, "finish_reason": flight.done["finish"]}
        if kind == "chat":
            found["message"] = {"role": "assistant", "content": text, "refusal": None}
        elif kind == "completion":
            found["text"] = text
        found["logprobs"] = self._logprobs(ask, flight.tokens, flight.logprobs, kind) if ask.logprobs else None
        if ask.token_ids or kind == "generate":
            found["token_ids"] = flight.tokens
        if kind != "chat" and (ask.token_ids):
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
        tokenizer = self.about.tokenizer
        names = [f"token_id:{t}" if ask.tokens_as_ids else decoded(tokenizer, [t]) for t in tokens]
        if kind == "completion":
            return {
                "tokens": names, "token_logprobs": list(logprobs), "top_logprobs": None,
                "text_offset": None, "token_ids": list(tokens),
            }
        return {"content": [
            {
                "token": name, "token_id": token, "logprob": logprob, "top_logprobs": [],
                "bytes": None if ask.tokens_as_ids or "\ufffd" in name else list(name.encode()),
            }
            for name, token, logprob in zip(names, tokens, logprobs, strict=True)
        ], "refusal": None}

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
            if flight.done is None:
                piece = choice.text.more(flight.tokens)
                choice.told = len(flight.tokens)
            else:
                piece = choice.text.rest(flight.done["text"])
                choice.told = -1
            if not (piece or flight.done or ask.token_ids or ask.logprobs):
                continue
            found: dict[str, Any] = {
                "index": choice.index, "finish_reason": flight.done["finish"] if flight.done else None,
                "logprobs": self._logprobs(ask, tokens, logprobs, kind) if ask.logprobs else None,
            }
            found |= {"delta": {"content": piece}} if kind == "chat" else {"text": piece}
            if ask.token_ids:
                found["token_ids"] = tokens
                if kind != "chat" and told == 0:
                    found["prompt_token_ids"] = list(choice.prompt)
            yield self._chunk(id, kind, [found | (self._origin(choice) if flight.done else {})])

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
