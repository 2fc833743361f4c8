"""TOML text to plain values and back, and dotted overrides. Knows nothing of the config tree."""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetrl.config.syntax import explain_syntax
from jetrl.errors import UserError, shown
from jetrl.untrusted import require_shallow, text_file


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, which may begin with a byte order mark.

    Raises UserError for an unreadable or empty file and, with line and cure, for bad syntax.
    """
    try:
        text = text_file(path, encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        inside = [path / "config.toml", *sorted(path.glob("*.toml"))]
        found = next((f" Did you mean {each}?" for each in inside if each.is_file()), " Give a TOML file.")
        raise UserError(f"{path}: is a folder, not a recipe.{found}") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text (byte {error.start}); a recipe is a TOML file. If it is one, save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: too large, or a device
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read: {reason}") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}, {explain_syntax(text, error)}") from None
    except RecursionError:
        raise UserError(f"{path}: values are nested too deeply for a recipe") from None
    try:
        require_shallow(data)  # dotted keys nest without a limit
    except ValueError:
        raise UserError(f"{path}: values are nested too deeply for a recipe") from None
    if not data:
        raise UserError(f"{path}: the file is empty. `jetrl recipes quickstart > {path}` fills it with a recipe")
    return data


def split_override(text: str) -> tuple[str, Any]:
    """`train.lr=1e-5` as key and value; a value that is not a TOML literal is a plain string."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not all(key.split(".")):
        raise UserError(f"{text!r} is not an override: write section.key=value without spaces, such as train.lr=1e-5")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return key, value
    return key, parsed["value"] if len(parsed) == 1 else value


def set_override(data: dict[str, Any], key: str, value: Any) -> None:
    """Puts `value` at the dotted `key` of nested tables, in place, creating tables as needed."""
    *parents, name = key.split(".")
    table = data
    for depth, parent in enumerate(parents, 1):
        inner = table.setdefault(parent, {})
        if not isinstance(inner, dict):
            full = ".".join(parents[:depth])
            raise UserError(f"override {key}: {full} is a value ({toml_literal(inner)}), so it has no key {name}")
        table = inner
    table[name] = value


def plain_value(value: Any, where: str) -> Any:
    """A copy that TOML can hold: tuples as lists, no None, no other objects. Raises ValueError for what it cannot."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {shown(key)}; keys must be text")
        return {key: plain_value(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(inner, f"{where}[{i}]") for i, inner in enumerate(value)]
    if value is None:
        raise ValueError(f"{where} is None, which TOML cannot hold; leave it out")
    if not isinstance(value, (str, bool, int, float, datetime.date, datetime.time)):
        raise ValueError(
            f"{where} is a {type(value).__name__} ({shown(value)}); TOML holds text, numbers, lists and tables"
        )
    return value


def toml_key(key: str) -> str:
    """A key as TOML writes it: bare where that is allowed, else quoted."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_literal(key)


def toml_literal(value: Any) -> str:
    """A value as TOML writes it. For messages also None, as `"none"`, and other objects, as Python writes them."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_literal(inner) for inner in value)}]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{toml_key(str(key))} = {toml_literal(v)}" for key, v in value.items())
        return f"{{{inner}}}"
    if isinstance(value, (datetime.date, datetime.time)):  # datetime is a date
        return value.isoformat()
    return shown(value)
