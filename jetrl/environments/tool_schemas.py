"""Tools from Python functions and classes: the JSON schemas that a chat template shows, and checks of arguments.

The schemas are those of `transformers.utils.get_json_schema`: type hints and a Google-style docstring, as in

    def search(query: str, limit: int = 3) -> list[str]:
        \"\"\"Search the notes.

        Args:
            query: Words to look for.
            limit: Most results.
        \"\"\"

Arguments are checked by pydantic against the same hints, strictly: the text "5" is no integer. A class is a tool with
state: its public methods that have a docstring are tools, and each conversation gets an instance of its own.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from jetrl.errors import UserError, reason, shorten
from jetrl.user_code.importing import import_attribute

KEY = "environment.tools"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call; with `owner`, a method of that class."""

    name: str
    function: Callable[..., Any]
    owner: type | None
    schema: Mapping[str, Any]  # as chat templates and the OpenAI API have it
    arguments: Mapping[str, TypeAdapter[Any]]  # what reads the value of each, in the order of the signature
    required: frozenset[str]

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def read(self, given: Mapping[str, Any], plain: bool) -> tuple[dict[str, Any], list[str]]:
        """The arguments as the function takes them, and what is wrong with them, for the model. With `plain`, values
        are texts: one for a parameter that is a text stays so, others are read as JSON where they can be."""
        values: dict[str, Any] = {}
        known = ", ".join(self.arguments) or "none"
        wrong = [f"there is no argument {key!r}; arguments: {known}" for key in given if key not in self.arguments]
        wrong += [f"the argument {key!r} is missing" for key in self.arguments if key in self.required - given.keys()]
        for key, adapter in self.arguments.items():
            if key not in given:
                continue
            try:
                values[key] = self._value(key, adapter, given[key], plain)
            except ValidationError as error:
                first = error.errors()[0]
                place = "".join(f"[{part!r}]" for part in first["loc"] if isinstance(part, int))
                got = shorten(json.dumps(given[key], ensure_ascii=False))
                wrong.append(f"the argument {key!r}{place}: {first['msg']}, got {got}")
        return values, wrong

    def _value(self, key: str, adapter: TypeAdapter[Any], value: Any, plain: bool) -> Any:
        texts = [json.dumps(value)]
        if plain and self.schema["function"]["parameters"]["properties"][key].get("type") != "string":
            texts.insert(0, value)  # a text such as 5, which is JSON as it is
        for text in texts[:-1]:
            try:
                return adapter.validate_json(text)
            except ValidationError as error:
                if error.errors()[0]["type"] != "json_invalid":
                    raise
        return adapter.validate_json(texts[-1])


def load_tools(names: str | Sequence[str]) -> tuple[Tool, ...]:
    """The tools that `environment.tools` names. UserError where a schema cannot be made, by function and argument."""
    tools: list[Tool] = []
    modules: dict[str, types.ModuleType] = {}  # a file with several tools is loaded once: they may share what it holds
    for name in [names] if isinstance(names, str) else names:
        found = import_attribute(name, KEY, "function", modules)
        if inspect.isclass(found):
            tools += _methods(found, name)
        elif inspect.isfunction(found):
            tools.append(_tool(found, None, name))
        else:
            raise UserError(f"{KEY}: {name} is of type {type(found).__name__}, not a Python function or a class.")
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise UserError(f"{KEY}: two tools have the name {tool.name!r}. Rename one of them.")
        seen.add(tool.name)
    return tuple(tools)


def _methods(kind: type, name: str) -> list[Tool]:
    """The tools of a class: public methods with a docstring, in the order in which they are written."""
    members = {k: v for base in reversed(kind.__mro__[:-1]) for k, v in vars(base).items()}
    found = {
        k: v for k, v in members.items()
        if not k.startswith("_") and k != "close" and inspect.isfunction(v) and v.__doc__
    }
    if not found:
        raise UserError(
            f"{KEY}: the class {name} has no tools: a tool is a public method with a docstring that describes it."
        )
    needed = [
        p.name for p in inspect.signature(kind).parameters.values()
        if p.default is p.empty and p.name != "problem" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if needed:
        raise UserError(
            f"{KEY}: {name} is made for each conversation as {kind.__name__}(), or {kind.__name__}(problem) if it has "
            f"a parameter of that name; give its parameter {needed[0]!r} a default."
        )
    return [_tool(function, kind, f"{name}.{k}") for k, function in found.items()]


def _tool(function: Callable[..., Any], owner: type | None, where: str) -> Tool:
    from transformers.utils import get_json_schema  # slow to import

    bound: Any = function if owner is None else types.MethodType(function, object())  # a method without its `self`
    parameters = inspect.signature(bound).parameters
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(
                f"{KEY}: {where}: the argument {parameter.name!r} cannot be given by name. Write the arguments of a "
                "tool one by one, without * and /."
            )
        if parameter.annotation is parameter.empty:
            raise UserError(f"{KEY}: {where}: the argument {parameter.name!r} has no type hint. Write one, as in "
                            f"{parameter.name}: str.")
    try:
        hints = typing.get_type_hints(bound)
    except Exception as error:  # evaluating the user's annotations
        raise UserError(f"{KEY}: {where}: its type hints cannot be read: {type(error).__name__}: {error}.") from error
    arguments = {key: _adapter(hints[key], f"{KEY}: {where}: the argument {key!r}") for key in parameters}
    try:
        schema = get_json_schema(bound)
    except Exception as error:  # the library's own, and what broken docstrings give
        raise UserError(
            f"{KEY}: {where}: {reason(error)} Describe the function and each argument in a Google-style "
            "docstring."
        ) from error
    required = frozenset(key for key, p in parameters.items() if p.default is p.empty)
    return Tool(schema["function"]["name"], function, owner, schema, arguments, required)


def _adapter(hint: Any, where: str) -> TypeAdapter[Any]:
    """What reads a value of this type from JSON. UserError for a type that has no JSON schema, or is no JSON."""
    from transformers.utils import get_json_schema

    def probe(value: Any) -> None: ...

    probe.__annotations__ = {"value": hint}
    probe.__doc__ = "Probe.\n\nArgs:\n    value: A value."
    try:
        get_json_schema(probe)
        return TypeAdapter(hint, config=ConfigDict(strict=True))
    except Exception as error:  # of either library, whose messages name no argument
        raise UserError(
            f"{where} has the type {_shown(hint)}, which a model cannot write as JSON. Use str, int, float, bool, a "
            "Literal, an Enum, list, dict, or unions of these."
        ) from error


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
