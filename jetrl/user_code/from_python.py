"""What a program gives a run as Python objects, where a recipe would name them: rewards, an environment, rows of data.

The config holds a name for each, such as `<python>:train:right` for the function `right` of train.py, and `<python>`
for rows. So config.toml records what was used, and whoever reads it without the objects is asked to give them again.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jetrl.config.task import MAX_DATA_GIB
from jetrl.errors import UserError, as_user_error, shown, told
from jetrl.untrusted import MOST_DEPTH, Budget

MARK = "<python>"
ARGUMENTS = {  # key of the config -> the argument of jetrl.Trainer that gives it
    "task.reward": "reward", "environment.name": "environment", "task.train_file": "dataset",
    "task.eval_file": "eval_dataset",
}


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows of data, with columns as in a file, and the SHA-256 of their content. `name` is the argument's.

    `padded`: they come from a table of Arrow, whose structs all have the same keys.
    """

    name: str
    rows: tuple[Mapping[str, Any], ...]
    digest: str
    padded: bool = False


@dataclass(frozen=True, slots=True)
class FromPython:
    """The objects of a run: functions and classes by their name in the config, rows by the key of the config."""

    objects: Mapping[str, Any] = field(default_factory=dict)
    rows: Mapping[str, GivenRows] = field(default_factory=dict)

    def find(self, name: str, key: str) -> Any:
        """The object of this name. UserError where the run has to be given it again."""
        if name not in self.objects:
            raise UserError(not_given(key, name))
        return self.objects[name]

    def rows_of(self, key: str, value: str) -> GivenRows | None:
        """The rows that `key = value` stands for; None if it names a file. UserError where they are missing."""
        if value == MARK and key not in self.rows:
            raise UserError(not_given(key, value))
        return self.rows[key] if value == MARK else None

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of the rows, by key of the config."""
        return {key: rows.digest for key, rows in self.rows.items()}


NOTHING = FromPython()


def is_given(name: str) -> bool:
    """Whether a value of the config stands for a Python object."""
    return name == MARK or name.startswith(f"{MARK}:")


def not_given(key: str, name: str) -> str:
    """The message where the config stands for an object that nobody has given."""
    argument = ARGUMENTS.get(key)
    if argument is None:
        return f"{key} = {name!r}: cannot be given from Python. Name it as module:name or path/to/file.py:name."
    what = "the rows of the data" if name == MARK else name.removeprefix(f"{MARK}:")
    problem = (
        f"{key} = {name!r}: this run was given {what} from Python, and config.toml holds only that name. Use it from "
        f"Python with the same objects: jetrl.Trainer(RUN, resume=True, {argument}=...), where RUN is the run folder; "
        "then evaluate() or step()."
    )
    if argument in ("reward", "environment"):
        form = "function" if argument == "reward" else "Class"
        return f"{problem} On the command line, name the {form.lower()}: `jetrl eval RUN {key}=path/to/file.py:{form}`."
    return f"{problem} On the command line, name a file: `jetrl eval RUN {key}=path/to/rows.jsonl`."


def name_of(value: Any) -> str:
    """`<python>:module:name` of a function, method, class or callable object. The program that runs is called by its
    file's name, so that it is the same when it is imported."""
    module = getattr(value, "__module__", None) or type(value).__module__
    name = getattr(value, "__qualname__", type(value).__qualname__).replace("<locals>.", "")
    if module == "__main__" and (file := getattr(sys.modules["__main__"], "__file__", None)):
        module = Path(file).stem
    return f"{MARK}:{module}:{name}"


def same_objects(one: Any, other: Any) -> bool:
    """Whether two values of a key name the same objects, as far as their names say: the module does not count, nor what
    a function is nested in, so that another script may go on with a run."""
    return _bare(one) == _bare(other)


def _bare(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_bare(one) for one in value]
    if isinstance(value, str) and is_given(value):
        return f"{MARK}:{value.rpartition(':')[2].rpartition('.')[2]}"
    return value


def rows_given(value: Any, name: str, gib: float = MAX_DATA_GIB) -> GivenRows:
    """The rows of the argument `name`: a list of dicts, a `datasets.Dataset`, or any iterable of dicts, read once.

    UserError where it is something else, raises, has no rows, needs more memory than `gib` (`task.max_data_gib`), or
    holds a value that has no content to compare.
    """
    cure = "Give a list of dicts, a datasets.Dataset (one split), or another iterable of dicts."
    if isinstance(value, str | bytes | Path):
        raise UserError(
            f"{name} = {shown(value)}: give rows, not a name. For a file set task.train_file, for a data set "
            f"by name task.dataset, in overrides. {cure}"
        )
    if isinstance(value, Mapping):
        keys = ", ".join(map(shown, itertools.islice(value, 5)))
        raise UserError(f"{name} is a {type(value).__name__} with the keys {keys}, not rows. {cure}")
    if not isinstance(value, Iterable) and not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        raise UserError(f"{name} is a {type(value).__name__}, which cannot be read row by row. {cure}")
    rows: list[Mapping[str, Any]] = []
    total, budget, where = hashlib.sha256(), Budget(name, gib), f"{name}[0]"
    try:
        for row in value if isinstance(value, Iterable) else (value[i] for i in range(len(value))):
            if not isinstance(row, Mapping):
                hint = " Of a DataFrame, give df.to_dict('records')." if hasattr(value, "to_dict") else ""
                raise UserError(f"{where} is a {type(row).__name__} ({shown(row)}), not a dict of columns.{hint}")
            rows.append(dict(row))
            budget.take(1, 0, 0)
            total.update(json.dumps(_plain(rows[-1], where, budget), sort_keys=True).encode() + b"\n")
            where = f"{name}[{len(rows)}]"
    except UserError:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:  # of the user's iterable, or of a value in it
        raise as_user_error(error)(f"{where}: reading it raised {told(error)}. Fix what gives the rows.") from error
    if not rows:
        raise UserError(f"{name} has no rows.")
    padded = any(kind.__module__.partition(".")[0] == "datasets" for kind in type(value).__mro__)
    return GivenRows(name, tuple(rows), total.hexdigest(), padded)


def _plain(value: Any, where: str, budget: Budget, depth: int = 0) -> Any:
    """The content of a value as JSON holds it, for the digest. What it needs of memory is taken from the budget."""
    if depth > MOST_DEPTH:
        raise UserError(
            f"{where}: lists or dicts are nested more than {MOST_DEPTH} deep, or hold themselves. Make the value flat."
        )
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{where}[{key!r}]", budget, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, where, budget, depth + 1) for inner in value]
    budget.take(0, 1, _content(value))
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return {type(value).__name__: str(value)}
    if callable(getattr(value, "tolist", None)):  # an array or tensor, or one of their numbers
        held = Budget(where, math.inf) if type(getattr(value, "nbytes", None)) is int else budget  # counted as a whole
        return {type(value).__name__: _plain(value.tolist(), where, held, depth + 1)}
    raise UserError(
        f"{where} is a {type(value).__name__} ({shown(value)}): jetrl cannot tell whether its content is the "
        "same when the run is resumed. Put strings or numbers there, and build the object in the reward function."
    )


def _content(value: Any) -> int:
    """Bytes of a text, of bytes, or of an array; what else a value takes is the same for all."""
    if isinstance(value, str):
        return sys.getsizeof(value) - sys.getsizeof("")
    size = len(value) if isinstance(value, bytes) else getattr(value, "nbytes", 0)
    return size if type(size) is int else 0
