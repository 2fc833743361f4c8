"""What is wrong with a recipe that is not valid TOML: a second table or key, another format, text without quotes.

`tomllib` names the line; why it failed there, and what to write instead, is guessed from the text.
"""

from __future__ import annotations

import re
import tomllib

_AT = re.compile(r" \(at line (\d+), column \d+\)| \(at end of document\)")
_SECOND = ("twice", "overwrite", "Duplicate", "mutate")  # in tomllib's messages about a key that is already there
_HEADER = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[\w-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w-]+))*)\s*=\s*(.*)""")
_YAML = re.compile(r"\s*(?:---\s*$|-\s|[\w.-]+\s*:(?:\s|$))")
_PYTHON = re.compile(r"\s*(?:(?:import|from|class|def|async def)\s+\w|@\w|\"{3})")
_WORDS = {"True": "true", "False": "false", "None": '"none"', "null": '"none"', "yes": "true", "no": "false"}
_TYPOGRAPHIC = "“”„‘’«»"

Path = tuple[str, ...]


def explain_syntax(text: str, error: tomllib.TOMLDecodeError) -> str:
    """`line 3: not valid TOML (...): '...'` with what to do about it."""
    lines = text.splitlines()
    found = _AT.search(str(error))
    number = int(found[1]) if found and found[1] else len(lines)
    what = str(error)[: found.start()] if found else str(error)
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    message = f"line {number}: not valid TOML ({what})" + (f": {line!r}" if line else "")
    return message + _cure(lines, number, line, what)


def _cure(lines: list[str], number: int, line: str, what: str) -> str:
    if (twice := re.search(r"inline table key (\S+)", what)) is not None:
        return f"; {twice[1]} is twice between these braces. Remove one"
    if any(word in what for word in _SECOND):
        return _second(lines, number)
    first = next((each for each in lines if each.strip() and not each.lstrip().startswith("#")), "")
    if first.lstrip().startswith("{"):
        return '; this looks like JSON. Recipes are TOML: [model] on a line of its own, then path = "...", and so on'
    if _PYTHON.match(first):
        return "; this looks like Python. Recipes are TOML; code is named with its class or function: FILE.py:NAME"
    if _YAML.match(first) or _YAML.match(line):
        return '; this looks like YAML. Recipes are TOML: [model] on a line of its own, then path = "...", and so on'
    if any(sign in line for sign in _TYPOGRAPHIC):
        return '; it has typographic quotes, TOML takes " or \''
    if what == "Unterminated string":
        return "; a string has no closing quote"
    if (pair := _KEY.fullmatch(line)) is not None:
        value = re.sub(r"\s+#.*", "", pair[2]).strip()
        if not value:
            return "; there is no value after the ="
        if value in _WORDS:
            return f"; write {pair[1]} = {_WORDS[value]}"
        if re.match(r"[A-Za-z_/~\\]|\.[./\\]", value) and not any(quote in value for quote in "\"'"):
            return f"; strings need quotes: {pair[1]} = {_quoted(value)}"
    return ""


def _quoted(value: str) -> str:
    return f"'{value}'" if "\\" in value else f'"{value}"'


def _second(lines: list[str], number: int) -> str:
    """Where that table or key appears first."""
    paths: list[tuple[Path, bool]] = []
    table: Path = ()
    for line in lines[:number]:
        path, is_table = _path(line, table)
        table = path if is_table else table
        paths.append((path, is_table))
    own, own_is_table = paths[-1]
    if not own:
        return "; it is already there. Remove one of the two"
    name = f"[{'.'.join(own)}]" if own_is_table else ".".join(own)
    before = list(enumerate(paths[:-1], 1))
    same = [place for place, (path, _) in before if path == own]
    inside = [
        place for place, (path, is_table) in before
        if path and (path[: len(own)] == own or (not is_table and own[: len(path)] == path))
    ]
    if not (same or inside):
        return f"; {name} is already there. Remove one of the two"
    place = same[-1] if same else inside[0]
    there = lines[place - 1].strip()
    return f"; {name} is already there, in line {place}: {there!r}. Put both into one place, or remove one"


def _path(line: str, table: Path) -> tuple[Path, bool]:
    """The full key that a line defines, and whether it is a table's header. Empty for other lines."""
    if (header := _HEADER.match(line)) is not None:
        return _parts(header[1]), True
    pair = _KEY.match(line)
    return ((*table, *_parts(pair[1])), False) if pair is not None else ((), False)


def _parts(key: str) -> Path:
    return tuple(part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", key))
