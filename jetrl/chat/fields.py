"""Chat messages: what one may hold, whoever gives it (the data, an environment, a call of the API)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jetrl.phrases import some

Message = Mapping[str, Any]  # role and content, and what else chat templates read: name, tool_calls, ...

_SCALARS = (str, int, float)  # bool is an int


def message_of(value: Any, *, padded: bool = False) -> dict[str, Any]:
    """A message as the chat template gets it; ValueError saying what is wrong with it.

    `role` and `content` are texts. Further keys (`name`, `tool_calls`, `reasoning_content`, ...) stay as they are, if
    JSON can hold them. A key of the message with the value None is left out. Deeper ones stay: a call's argument may be
    null. `padded`: the value comes from a table of Arrow, which pads all structs to the same keys, and they are left
    out at any depth. Where there are `tool_calls`, `content` may be None or missing, and is then an empty text.
    """
    if not isinstance(value, Mapping):
        raise ValueError("a chat message needs the strings 'role' and 'content'")
    message = {k: v for k, v in _plain(value, "", padded).items() if v is not None}
    if message.get("content") is None and message.get("tool_calls"):
        message["content"] = ""
    if isinstance(parts := message.get("content"), list):
        kinds = dict.fromkeys(str(part.get("type")) for part in parts if isinstance(part, dict))
        raise ValueError(
            f"'content' of a chat message is a list of parts ({some([*kinds]) or 'none with a type'}), and jetrl reads "
            "text only, no images: give the text alone, as a string"
        )
    if not all(isinstance(message.get(key), str) for key in ("role", "content")) or not message["role"]:
        raise ValueError("a chat message needs the strings 'role' and 'content'")
    return message


def _plain(value: Any, path: str, padded: bool) -> Any:
    """The value with dicts and lists of its own; of a `padded` one without keys whose value is None."""
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"a key of a chat message must be a string, not {wrong[0]!r}")
        return {
            k: _plain(v, f"{path}.{k}" if path else k, padded) for k, v in value.items() if not (padded and v is None)
        }
    if isinstance(value, list | tuple):
        return [_plain(each, f"{path}[{i}]", padded) for i, each in enumerate(value)]
    if value is None or isinstance(value, _SCALARS):
        return value
    raise ValueError(f"{path} of a chat message must be a string, a number, a list or an object, not a "
                     f"{type(value).__name__}")
