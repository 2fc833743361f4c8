"""Calls of tools in the text of a model, in the form that its chat template asks for.

hermes       `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, several in a turn (Qwen2.5, Qwen3, Hermes)
llama3       the turn is `{"name": "add", "parameters": {"a": 1}}`, perhaps after `<|python_tag|>`, several with `;`
qwen3_coder  `<tool_call><function=add><parameter=a>1</parameter></function></tool_call>`; values are plain text

What a model thinks, up to `</think>`, holds no calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jetrl.untrusted import no_constant

CallFormat = Literal["hermes", "llama3", "qwen3_coder"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. `error`: why it cannot be read; its name may be known nevertheless.

    `plain`: the values of `arguments` are text that the tool's schema gives a type.
    """

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False
    error: str = ""


_OPEN, _CLOSE, _PYTHON = "<tool_call>", "</tool_call>", "<|python_tag|>"
_NAMED = re.compile(r'\s*\{\s*"name"\s*:')  # how a call in bare JSON begins, even one that is broken further on
_NAME_KEY = re.compile(r'''\\?["']name\\?["']\s*:''')  # of JSON, perhaps inside of a text of a template
_SPACE, _BETWEEN = re.compile(r"\s*"), re.compile(r"[\s;]*")
_FUNCTION = re.compile(r"\s*<function=([^>\s]*)>(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def read_calls(text: str, form: CallFormat) -> list[ToolCall]:
    """The calls in a turn of the policy, in order; none: the turn is an answer."""
    return list(_READERS[form](answer_part(text)))


def answer_part(text: str) -> str:
    """What follows the thinking of a turn, which the template may have opened. If it is not over, nothing does."""
    _, closed, rest = text.partition("</think>")
    if closed:
        return rest
    return "" if text.lstrip().startswith("<think>") else text


def format_of(template: str) -> CallFormat | None:
    """The form that a chat template's source asks for; None: it is none of those that are read here. Others put other
    things between the same tags, so that a template has to show the form itself."""
    if _OPEN in template:
        return "qwen3_coder" if "<function=" in template else "hermes" if _NAME_KEY.search(template) else None
    return "llama3" if _PYTHON in template or ("ipython" in template and '"parameters"' in template) else None


def _hermes(text: str) -> Iterator[ToolCall]:
    start = text.find(_OPEN)
    while start >= 0:
        begin = _SPACE.match(text, start + len(_OPEN)).end()  # type: ignore[union-attr]
        value, end, error = _json_at(text, begin)
        closed = text.find(_CLOSE, end if not error else begin)
        rest = text[end : closed if closed >= 0 else len(text)].strip()
        if not error and rest:
            error = f"the call is not valid JSON: there is more behind it ({rest[:40]!r})"
        elif error and closed < 0:
            error += f", and it is not closed by {_CLOSE}"
        yield _call(value, ("arguments",), error)
        start = text.find(_OPEN, closed if closed >= 0 else max(end, begin))


def _llama3(text: str) -> Iterator[ToolCall]:
    _, tagged, behind = text.partition(_PYTHON)
    rest = behind if tagged else text
    if not tagged and not _NAMED.match(rest):
        return
    at = _SPACE.match(rest).end()  # type: ignore[union-attr]
    while at < len(rest):
        value, end, error = _json_at(rest, at)
        if not tagged and not error and not _with_arguments(value):
            return  # an answer in JSON that happens to have a name
        yield _call(value, ("parameters", "arguments"), error)
        if error:
            return
        at = _BETWEEN.match(rest, end).end()  # type: ignore[union-attr]


def _qwen3_coder(text: str) -> Iterator[ToolCall]:
    for part in text.split(_OPEN)[1:]:
        body, closed, _ = part.partition(_CLOSE)
        function = _FUNCTION.match(body)
        if function is None:
            yield ToolCall(error=f"the call does not begin with <function=NAME> inside of {_OPEN}")
            continue
        name, inside = function.groups()
        values, ended, _ = inside.partition("</function>")
        found = _PARAMETER.findall(values)
        error = ""
        if _PARAMETER.sub("", values).strip() or not (ended and closed):
            error = "a call has the form <function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>"
        elif len(dict(found)) < len(found):
            error = "the call gives an argument twice"
        yield ToolCall(name, {} if error else dict(found), True, error)


_READERS: Mapping[CallFormat, Callable[[str], Iterator[ToolCall]]] = {
    "hermes": _hermes, "llama3": _llama3, "qwen3_coder": _qwen3_coder,
}


_DECODER = json.JSONDecoder(parse_constant=no_constant)


def _json_at(text: str, begin: int) -> tuple[Any, int, str]:
    """The JSON value that begins at a place of the text, the place behind it, and what is wrong with it."""
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        return None, begin, f"the call is not valid JSON: {what} at character {error.pos - begin + 1}"
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond what Python reads
        return None, begin, f"the call is not valid JSON: {str(error) or type(error).__name__}"
    return value, end, ""


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _with_arguments(value: Any) -> bool:
    return _is_object(value) and ("parameters" in value or "arguments" in value)


def _call(value: Any, keys: tuple[str, ...], error: str) -> ToolCall:
    """A call from its JSON value, whose arguments are under one of `keys`."""
    if error:
        return ToolCall(error=error)
    form = f'{{"name": ..., "{keys[0]}": {{...}}}}'
    if not _is_object(value) or not isinstance(value.get("name"), str):
        return ToolCall(error=f"a call must have the form {form}")
    key = next((key for key in keys if key in value), None)
    if key is None:
        return ToolCall(value["name"], error=f'"{keys[0]}" is missing: a call must have the form {form}')
    if not _is_object(value[key]):
        return ToolCall(value["name"], error=f'"{key}" must be an object: a call must have the form {form}')
    return ToolCall(value["name"], value[key])
