"""From pydantic's errors to messages that say what is wrong with which key, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from jetrl.config.base import NAME_RULE, union_members
from jetrl.config.peers import FOREIGN_SECTIONS, peer_name
from jetrl.config.toml import toml_literal

_NAMES = {int: "an integer", float: "a number", str: "a string", type(None): '"none"'}


def describe_type(annotation: Any, bounds: str = "") -> str:
    """What values a key takes, in words, with `bounds` after the number: `an integer >= 1 or "none"`."""
    parts = []
    for member in union_members(annotation):
        arguments = get_args(member)
        if get_origin(member) is Annotated:
            pattern = any(getattr(of, "pattern", None) for of in get_args(member)[1].metadata)
            parts.append('"path/to/file.py:function"' if pattern else describe_type(arguments[0]))
        elif get_origin(member) is Literal:
            parts += [toml_literal(value) for value in arguments]
        elif member is bool:
            parts += ["true", "false"]
        elif get_origin(member) is tuple:
            each = describe_type(arguments[0])
            members = f"values among {each}" if get_origin(arguments[0]) is Literal else f"{each.split()[-1]}s"
            count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
            parts.append(f"a list of {count}{members}")
        elif get_origin(member) is dict or (isinstance(member, type) and issubclass(member, BaseModel)):
            parts.append("a table")
        else:
            parts.append(_NAMES[member] + (bounds if member in (int, float) else ""))
    return " or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def describe_bounds(field: FieldInfo) -> str:
    """The bounds of a number, such as ` > 0 and <= 1`; empty where there are none."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [f"{sign} {getattr(m, name)}" for m in field.metadata for name, sign in signs.items() if hasattr(m, name)]
    return " " + " and ".join(bounds) if bounds else ""


def explain(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line for each mistake, beginning with the full key."""
    lines: dict[str, str] = {}  # by key: each alternative of a union reports the same mistake
    for item in error.errors(include_url=False):
        path, field = _locate(item["loc"], root)
        key = ".".join(path)
        inside = item["loc"][len(path) :]  # an index into a list, or pydantic's name of an alternative
        if item["type"] == "value_error":
            # Lines of Section and plain_value, which begin with the full key.
            for line in str(item["ctx"]["error"]).splitlines():
                lines[line] = line
        elif item["type"] == "extra_forbidden":
            lines.update({text: text for text in _unknown(path, item["input"], root)})
        elif item["type"] == "missing" and not inside:
            lines[key] = f"{key}: is missing; {_missing(key, field)}"
        else:
            index = f"[{inside[0]}]" if inside and isinstance(inside[0], int) and item["type"] != "missing" else ""
            lines.setdefault(key + index, f"{key}{index}: {_bad_value(item, field, bool(index))}")
    return list(lines.values())


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _locate(loc: tuple[int | str, ...], root: type[BaseModel]) -> tuple[list[str], FieldInfo | None]:
    """Names of the keys in `loc` (without pydantic's names of alternatives), and the field that they lead to."""
    model, path, field = root, [], None
    for part in loc:
        path.append(str(part))
        field = model.model_fields.get(str(part))
        if field is None or not _is_section(field.annotation):
            break
        model = cast(type[BaseModel], field.annotation)
    return path, field


def _missing(key: str, field: FieldInfo | None) -> str:
    advice = {"name": 'give the run a name, such as name = "first"',
              "model": "add a [model] table with path (a model folder) or arch (random weights)",
              "task": 'add a [task] table with name = "addition", "file", "gym" or "environment"'}
    return advice.get(key, f"it takes {describe_type(field.annotation)}" if field else "add it")


def _bad_value(item: Any, field: FieldInfo | None, of_element: bool) -> str:
    """The message for a value of the wrong type, out of range or not among those allowed."""
    assert field is not None
    value, context, kind = item["input"], item.get("ctx", {}), item["type"]
    got = f"got {toml_literal(value)}"
    for name, sign in (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most")):
        if name in context:
            return f"must be {sign} {context[name]:g}, {got}"
    if kind == "string_pattern_mismatch":
        return f"{NAME_RULE}, {got}"
    if kind in ("string_too_short", "too_short") and context.get("min_length") == 1:
        return f"must not be empty, {got}"
    if kind == "finite_number":
        return f"must be a finite number, {got}"
    choices = [str(v) for m in _leaves(field.annotation) if get_origin(m) is Literal for v in get_args(m)]
    close = difflib.get_close_matches(value.lower(), choices, 1, 0.5) if isinstance(value, str) else []
    kinds = (field.annotation, *get_args(field.annotation))
    of_list = not of_element and any(get_origin(each) in (tuple, list) for each in kinds)
    hint = f"; did you mean {toml_literal(close if of_list else close[0])}?" if close else ""
    if kind == "model_type":
        return f"is a section, so it must be a table of keys, {got}"
    wanted = describe_type(get_args(field.annotation)[0] if of_element else field.annotation)
    return f"must be {wanted}, {got}{hint}"


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types inside a union or tuple."""
    for member in union_members(annotation):
        if get_origin(member) is tuple:
            yield from (leaf for argument in get_args(member) for leaf in _leaves(argument))
        else:
            yield member


def _closest(name: str, among: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name.lower(), list(among), 1, 0.7)


def _unknown(path: list[str], value: Any, root: type[BaseModel]) -> Iterator[str]:
    """Lines for an unknown key, or for every key of an unknown section that resembles none of ours."""
    section, name = ".".join(path[:-1]), path[-1]
    homes = {key: kind.annotation for key, kind in root.model_fields.items() if _is_section(kind.annotation)}
    keys = [key for key in root.model_fields if key not in homes]
    keys += [f"{home}.{key}" for home, kind in homes.items() for key in kind.model_fields]  # type: ignore[union-attr]
    known = [key.rpartition(".")[2] for key in keys]
    sections = difflib.get_close_matches(name.lower(), homes, 1) if not section else []
    peer = peer_name(".".join(path))
    foreign = path[0] in FOREIGN_SECTIONS
    if isinstance(value, Mapping) and (foreign or not peer) and (name not in known or foreign):
        if value and (not sections or foreign):
            for inner, below in value.items():
                yield from _unknown([*path, inner], below, root)
            return
        near = f"did you mean [{sections[0]}]?" if sections else f"the sections are {', '.join(homes)}"
        hint = peer or near
        yield f"{'.'.join(path)}: unknown section; {hint}"
        return
    here = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section]
    elsewhere = [key for key, last in zip(keys, known, strict=True) if last == name]
    close = _closest(name, here) or _closest(name, known)
    if peer:
        hint = peer
    elif elsewhere:
        hint = f"did you mean {' or '.join(elsewhere)}?"
    elif close:
        prefix = f"{section}." if section else ""
        hint = f"did you mean {prefix + close[0] if close[0] in here else keys[known.index(close[0])]}?"
    else:
        hint = f"its keys are {', '.join(here)}" if here and section else "`jetrl settings all` lists all keys"
    yield f"{'.'.join(path)}: unknown key; {hint}"
