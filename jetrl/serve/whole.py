"""A turn of the policy in training as the answer of a chat call: whole, or as the events of a stream.

A stream has the text in one piece: it is sent when the turn is over.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from jetrl.chat.tool_calls import CallFormat
from jetrl.serve.calls import calls_of
from jetrl.serve.wire import Ask
from jetrl.types import Completion


def answer_of(
    ask: Ask, prompt: tuple[int, ...], turn: Completion, form: CallFormat | None, model: str
) -> dict[str, Any]:
    """The body of the answer. `prompt`: all tokens before the turn; `form`: how the policy writes calls of tools."""
    unique = uuid.uuid4()
    text, calls = calls_of(turn.text, form, ask.variables.get("tools", ()), unique.int >> 64)
    message = {"role": "assistant", "content": None if calls and not text.strip() else text, "refusal": None}
    drawn, before = len(turn.tokens), len(prompt)
    choice: dict[str, Any] = {
        "index": 0, "finish_reason": "tool_calls" if calls else turn.finish_reason,
        "logprobs": _logprobs(turn) if ask.logprobs else None,
        "message": message | ({"tool_calls": calls} if calls else {}),
        "weight_versions": [{"version": turn.weight_version, "start": 0, "end": drawn}],
    }
    if ask.token_ids:
        choice["token_ids"] = turn.tokens.tolist()
    return {
        "id": f"chatcmpl-{unique.hex}", "object": "chat.completion", "created": int(time.time()), "model": model,
        "system_fingerprint": turn.flow_digest, "choices": [choice],
        "usage": {"prompt_tokens": before, "completion_tokens": drawn, "total_tokens": before + drawn},
    } | ({"prompt_token_ids": list(prompt)} if ask.token_ids else {})


def _logprobs(turn: Completion) -> dict[str, Any]:
    """At the sampling temperature; JSON's digits give back the FP32 bits. Tokens are named by their ids."""
    pairs = zip(turn.tokens.tolist(), turn.logprobs.tolist(), strict=True)
    return {"content": [
        {"token": f"token_id:{token}", "token_id": token, "logprob": value, "top_logprobs": [], "bytes": None}
        for token, value in pairs
    ], "refusal": None}


def events_of(body: Mapping[str, Any], usage: bool) -> Iterator[str]:
    """Server-sent events with the same content as `body`."""
    (choice,) = body["choices"]
    message = choice["message"]
    head = {key: value for key, value in body.items() if key not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk"
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    delta = {"content": message["content"] or ""} | ({"tool_calls": calls} if calls else {})
    rest = {key: value for key, value in choice.items() if key != "message"} | {"delta": delta}
    chunks = [head | {"choices": [first]}, head | {"choices": [rest]}]
    if usage:
        chunks.append(head | {"choices": [], "usage": body["usage"]})
    for chunk in chunks:
        yield f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
    yield "data: [DONE]\n\n"
