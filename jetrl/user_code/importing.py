"""What a config names in the user's code: `module:name` or `path/to/file.py:name`, which may import its neighbours."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from jetrl.errors import UserError, told
from jetrl.moved import now_at
from jetrl.user_code.from_python import NOTHING, FromPython, is_given
from jetrl.user_code.guard import user_code
from jetrl.user_code.neighbours import add_folder

FILE_MODULE = "jetrl_file_"  # how modules made from files are called, in front of a hash of the path

Kind = Literal["function", "class"]
_PLURAL = {"function": "functions", "class": "classes"}


def import_attribute(
    name: str, key: str, kind: Kind, loaded: dict[str, ModuleType] | None = None, own: FromPython = NOTHING
) -> Any:
    """What `name` names, not yet checked to be of this kind; `own` has what a program gave. Messages name the config's
    `key`. Files and modules that are among the `loaded` are not loaded again; others join them."""
    if is_given(name):
        return own.find(name, key)
    form = "function" if kind == "function" else "Class"
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise UserError(f"{key} = {name!r}: write module:{form} or path/to/file.py:{form}.")
    loaded = {} if loaded is None else loaded
    if place not in loaded:
        with user_code(f"{key} = {name}", in_threads=key.startswith("environment.")):
            is_file = place.endswith(".py")
            loaded[place] = _load_file(Path(place).expanduser(), key) if is_file else _load_module(place, key, form)
    module = loaded[place]
    found = getattr(module, attribute, None)
    if found is None:
        of_kind = inspect.isfunction if kind == "function" else inspect.isclass
        defined = [k for k, value in vars(module).items() if of_kind(value) and not k.startswith("_")]
        raise UserError(
            f"{key}: {place} has no {attribute!r}; its {_PLURAL[kind]}: {', '.join(defined) or 'none'}."
        )
    return found


def _load_module(name: str, key: str, form: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        hint = f" If it is a file here, write {name}.py:{form}." if isinstance(error, ModuleNotFoundError) else ""
        raise UserError(f"{key}: cannot import {name}: {told(error)}.{_moved(error) or hint}") from error


def _load_file(path: Path, key: str) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{key}: file {path} not found (searched from {Path.cwd()}).")
    add_folder(path, key)
    name = FILE_MODULE + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that the module's own dataclasses and pickles find it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # running the user's code
        del sys.modules[name]
        raise UserError(f"{key}: {path} cannot be loaded: {told(error)}{_moved(error)}") from error
    return module


def _moved(error: BaseException) -> str:
    """For a module of an earlier version of jetrl that is not there: where it is now."""
    new = now_at(error.name) if isinstance(error, ModuleNotFoundError) and error.name else None
    return f" {error.name} is {new} now." if new is not None and isinstance(error, ModuleNotFoundError) else ""
