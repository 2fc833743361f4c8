"""Calls of tools in a chat's answer: the policy's text as OpenAI's `tool_calls`, and theirs for a template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jetrl.chat.fields import Message
from jetrl.chat.tool_calls import CallFormat, ToolCall, answer_part, format_of, read_calls
from jetrl.untrusted import json_value

MARKS: Mapping[CallFormat, tuple[str, ...]] = {  # how calls begin; llama3's may be bare JSON
    "hermes": ("<tool_call>",), "qwen3_coder": ("<tool_call>",), "llama3": ("<|python_tag|>", "{"),
}


def form_of(tokenizer: Any) -> CallFormat | None:
    """The form of calls that a tokenizer's chat template asks for; None: none that is read."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, Mapping):
        found = found.get("tool_use", found.get("default"))
    return format_of(found) if isinstance(found, str) else None


def calls_of(
    text: str, form: CallFormat | None, tools: Sequence[Mapping[str, Any]], id: int
) -> tuple[str, list[dict[str, Any]]]:
    """The text before the calls, and the calls. Without any, or with one that cannot be read, all is text."""
    calls = read_calls(text, form) if form is not None and tools else []
    if form is None or not calls or any(call.error for call in calls):
        return text, []
    part = answer_part(text)
    ends = [at for mark in MARKS[form] if (at := part.find(mark)) >= 0]
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    return text[: len(text) - len(part) + min(ends)], [
        {
            "id": f"call_{id:016x}{i:02d}", "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(_arguments(call, schemas), ensure_ascii=False)},
        }
        for i, call in enumerate(calls)
    ]


def _arguments(call: ToolCall, schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments; texts of a form without types get those of the schema, where they are such."""
    if not call.plain:
        return call.arguments
    schema = schemas.get(call.name)
    known = schema.get("properties") if isinstance(schema, Mapping) else None
    return {key: _typed(value, known.get(key) if isinstance(known, Mapping) else None)
            for key, value in call.arguments.items()}


def _typed(value: Any, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind in (None, "string") or not isinstance(value, str):
        return value
    try:
        return json_value(value)
    except ValueError:  # the tool says what is wrong with the text
        return value


def for_template(messages: Sequence[Message]) -> list[Message]:
    """Messages as templates read them: a call's arguments are an object, and not JSON in a text."""
    return [_with_objects(message) if message.get("tool_calls") else message for message in messages]


def _with_objects(message: Message) -> Message:
    calls = message["tool_calls"]
    return {**message, "tool_calls": [_with_object(call) for call in calls] if isinstance(calls, list) else calls}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json_value(function["arguments"])
    except ValueError:  # of another author; the template writes the text
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
