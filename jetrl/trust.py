"""Whose code a run folder names: `jetrl eval RUN` reads the recipe in it, and a recipe's functions run as the user.

A recipe that the user names is the user's act. The recipe inside of a folder that came from others is not: the code
that it names is shown before it runs, and must be agreed to, unless it is jetrl's own or this user has run it here with
the same arguments. What was run is noted outside of run folders, which may be anyone's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl.config import Config
from jetrl.config.keys import value_of
from jetrl.config.paths import absolute_paths, holding
from jetrl.config.teacher import SERVER_KEY
from jetrl.config.toml import split_override
from jetrl.errors import UserError

# Only these: a function of jetrl that is no reward, such as one that writes files, is not harmless as one.
BUILT_IN = frozenset({
    "jetrl.rewards.text:exact_match", "jetrl.rewards.text:last_integer", "jetrl.rewards.gsm8k:gsm8k_reward",
    "jetrl.rewards.mathematics:math_reward", "jetrl_study.perturb:OtherBits", "jetrl_study.perturb:OtherAttention",
    "jetrl_study.perturb:OtherQuantizer",
})
_PARAMS = ("task.params", "environment.params")  # arguments of code, which may name more of it
_NAMES_CODE = re.compile(r"[^\s:]+\.py:\w+|[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_COMMAND, _VERIFIERS, _SERVERS = "environment.params.command", "environment.params.env", "teacher.path"
_KEPT = 1000  # notes


@dataclass(frozen=True, slots=True)
class Named:
    """Code that a config names under a key: module:name or path/to/file.py:name."""

    key: str
    name: str


def code_of(config: Config) -> list[Named]:
    """The code that a config names, beyond what comes with jetrl, in the order of the keys."""
    found = [Named(key, name) for key in holding("code") for name in _texts(value_of(config, key)) if ":" in name]
    for key in _PARAMS:
        found += [Named(key, name) for name in _texts(value_of(config, key)) if _NAMES_CODE.fullmatch(name)]
    if config.environment.name == "command":  # a program of any kind
        found.append(Named(_COMMAND, str(config.environment.params.get("command"))))
    if os.environ.get(SERVER_KEY):  # a secret, of which the folder decides who gets it
        found += [Named(_SERVERS, f"{url} (gets the key in {SERVER_KEY})") for url in config.teacher.servers]
    if config.environment.name == "verifiers":  # a package, or a module of this folder
        found.append(Named(_VERIFIERS, json.dumps(config.environment.params.get("env"), default=str)))
    return [one for one in found if one.name not in BUILT_IN]


def remember(config: Config) -> None:
    """Note that this user has run the code of a config. Where no note can be written, `require` will ask."""
    if not (named := code_of(config)):
        return
    note = _note(config)
    try:
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        note.write_text("".join(f"{one.key} = {one.name}\n" for one in named))
        for old in sorted(note.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        return


def require(
    where: object, config: Config, overrides: Sequence[str], trusted: bool, ask: Callable[[str], bool] | None,
    *, takes_recipe: bool = True,
) -> bool:
    """UserError unless the code that the recipe inside of the folder `where` names may run; True if it was asked for.

    `overrides` are the user's own. `ask` puts a question to the user; None: there is no terminal. `takes_recipe`:
    whether another recipe may be given instead.
    """
    own = {split_override(text)[0] for text in overrides}
    named = [one for one in code_of(config) if one.key not in own]
    if trusted or not named or _note(config).is_file():
        return False
    listed = "".join(f"\n  {one.key} = {one.name}" for one in named)
    notice = (
        f"{where}: the recipe in this folder names code that runs with your rights, and that you have not run here "
        f"with these arguments:{listed}\nA column of the data fills a function's parameter of the same name, so that "
        "the data decide what it is called with."
    )
    if ask is None:
        other = "; or give your own recipe with --recipe" if takes_recipe else ""
        raise UserError(f"{notice} If you trust it, and the data, add --trust{other}.")
    if not ask(f"{notice}\nRun it?"):
        if not takes_recipe:
            raise UserError(f"{where}: nothing was run.")
        raise UserError(f"{where}: not evaluated. With --recipe RECIPE, your own task and rewards are used instead.")
    return True


def _note(config: Config) -> Path:
    """The file that says that the code of a config was run: named by where the code lies, and by its arguments."""
    here = (_COMMAND, _VERIFIERS)  # these run in this folder
    code = [
        [one.key, one.name, os.getcwd() if one.key in here else "" if one.key == _SERVERS else _origin(one.name)]
        for one in code_of(absolute_paths(config))
    ]
    held = json.dumps([code, [value_of(config, key) for key in _PARAMS]], sort_keys=True, default=str)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "jetrl" / "own_code" / hashlib.sha256(held.encode()).hexdigest()[:32]


def _origin(name: str) -> str:
    """Where a module's top package lies, found without importing it; a file names its place itself."""
    place = name.partition(":")[0]
    if place.endswith(".py"):
        return os.path.abspath(os.path.expanduser(place))
    try:
        found = importlib.util.find_spec(place.partition(".")[0])
    except (ImportError, ValueError):
        return ""
    return str(found.origin) if found is not None else ""


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value, keys of tables included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _texts(inner)
