"""What a program says of a run, as arguments of `jetrl.Trainer`, becomes a config: the recipe, overrides, objects."""

from __future__ import annotations

import copy
import difflib
import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jetrl.config import Config, resolve, sections, to_toml
from jetrl.config.load import config_of
from jetrl.config.paths import in_own_folder
from jetrl.config.peers import peer_name
from jetrl.config.shipped import find_recipe
from jetrl.config.toml import read_toml, split_override
from jetrl.errors import UserError, shown, told
from jetrl.kernels.support import capability
from jetrl.report.recorder import METRICS_FILE
from jetrl.rewards.calls import distinct_names
from jetrl.run import start as entry
from jetrl.untrusted import require_shallow
from jetrl.user_code.from_python import ARGUMENTS, MARK, FromPython, is_given, name_of, rows_given, same_objects

# What an argument for rows takes the place of: where a recipe's own problems come from.
_SOURCES = (
    "train_file", "eval_file", "dataset", "eval_dataset", "eval_split", "eval_prompt_column", "eval_answer_column",
    "eval_prompt_template",
)


@dataclass(frozen=True, slots=True)
class Program:
    """A resolved config, the objects that it names, and its run folder."""

    config: Config
    own: FromPython
    run_dir: Path


def program(
    recipe: Any, *, reward: Any = None, dataset: Any = None, eval_dataset: Any = None, environment: Any = None,
    overrides: Any = None, run_dir: str | Path | None = None, resume: Any = False,
) -> Program:
    """The run that the arguments describe; `docs/PYTHON.md` says what each may be. UserError for all others."""
    data, source, path = _tables(recipe)
    said = _pairs(overrides)
    objects, pairs = _named(reward, environment)
    given = {"task.train_file": dataset, "task.eval_file": eval_dataset}
    given = {key: value for key, value in given.items() if value is not None}
    if both := sorted({key for key, _ in said} & {*pairs, *given}):
        raise UserError(f"overrides: {both[0]} is also given by the argument {ARGUMENTS[both[0]]}; leave out one.")
    pairs = {**_replaced(data, given, pairs), **pairs}
    keys = {key for key, _ in said}
    placed_at = _placed(run_dir, resume, keys)
    given_by = {key: ARGUMENTS.get(key, "the arguments") for key in pairs} | dict.fromkeys(keys, "overrides")
    given_by |= {key: "resume" if key == "checkpoint.resume" else "run_dir" for key in placed_at}
    config = config_of(data, [*pairs.items(), *said, *placed_at.items()], source, given_by=given_by)
    rows = {key: rows_given(value, ARGUMENTS[key], config.task.max_data_gib) for key, value in given.items()}
    own = FromPython(objects, rows)
    for key, value in (("task.reward", config.task.reward), ("environment.name", config.environment.name)):
        for name in (value,) if isinstance(value, str) else value or ():
            if is_given(name):
                own.find(name, key)
    config = resolve(config, cuda_available=torch.cuda.is_available(), capability=capability())
    if path is not None and config.checkpoint.resume != "never":
        config = in_own_folder(config, str(path), [f"{key}=" for key in (*keys, *(["name"] if run_dir else []))])
    return Program(config, own, entry.run_dir_of(config))


def refuse_others(unnamed: Sequence[Any], unknown: Mapping[str, Any]) -> None:
    """UserError for arguments of `jetrl.Trainer` and `jetrl.train` that have no name, or a name that is none."""
    known = [name for name in inspect.signature(program).parameters if name != "recipe"] + ["callbacks", "verbose"]
    if unnamed:
        raise UserError(
            f"jetrl.Trainer and jetrl.train: give all arguments but the recipe by name, {shown(unnamed[0])} too: "
            f"{', '.join(known)}."
        )
    for name in unknown:
        keys = [f"{section}.{name}" for section, kind in sections().items() if name in kind.model_fields]
        keys += [name] if name in Config.model_fields and name not in sections() else []
        near = difflib.get_close_matches(name, known, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Its arguments: recipe, {', '.join(known)}."
        if keys:
            hint = f"It is a setting: overrides={{{keys[0]!r}: {shown(unknown[name])}}}."
        elif (peer := peer_name(name)) is not None:
            hint = f"{peer}. Settings go into overrides={{...}}."
        raise UserError(f"jetrl.Trainer and jetrl.train have no argument {name!r}. {hint}")


def placed(found: Program, explicit: bool, must_resume: bool, say: Callable[[str], object]) -> Program:
    """The run in a folder that is free or, if it is resumed, holds it. UserError if an `explicit` folder is taken."""
    run_dir, metrics = found.run_dir, found.run_dir / METRICS_FILE
    if explicit and found.config.checkpoint.resume == "never" and metrics.exists() and metrics.stat().st_size:
        raise UserError(
            f"run_dir = {run_dir} already holds a run. Continue it with resume=True, or give another folder."
        )
    config = entry.placed(found.config, say)
    if must_resume:
        entry.require_resumable(entry.run_dir_of(config))
    return Program(config, found.own, entry.run_dir_of(config))


def _tables(recipe: Any) -> tuple[dict[str, Any], str, Path | None]:
    """The tables of a recipe, what messages call it, and its file."""
    if isinstance(recipe, Config):
        return tomllib.loads(to_toml(recipe)), "the config", None
    if isinstance(recipe, Mapping):
        return _copied(recipe, "recipe"), "the config", None
    if not isinstance(recipe, str | Path) or not str(recipe):
        raise UserError(
            f"recipe = {shown(recipe)}: give the name of a recipe (`jetrl recipes`), a TOML file, a run "
            "folder, a dict of tables, or a Config."
        )
    path = Path(recipe)
    path = path / "config.toml" if (path / "config.toml").is_file() else find_recipe(str(recipe))
    return read_toml(path), str(path), path


def _copied(value: Any, argument: str) -> Any:
    """A copy of a user's tables. UserError where they are too deep for a recipe, or objects in them fail."""
    try:
        require_shallow(found := dict(value))
        return copy.deepcopy(found)
    except Exception as error:
        raise UserError(
            f"{argument}: its values cannot be read: {told(error)}. Give strings, numbers, lists and dicts."
        ) from error


def _pairs(overrides: Any) -> list[tuple[str, Any]]:
    """Overrides as full key and value: of a dict, whose values may be a section's dict, or of texts as on the command
    line."""
    if overrides is None:
        return []
    if isinstance(overrides, Mapping):
        found: list[tuple[str, Any]] = []
        for key, value in _copied(overrides, "overrides").items():
            if not isinstance(key, str):
                raise UserError(f"overrides: the key {shown(key)} is not a string; write 'train.lr', for example.")
            if key in sections() and isinstance(value, Mapping):
                found += [(f"{key}.{name}", inner) for name, inner in value.items()]
            else:
                found.append((key, value))
        return [(key, str(value) if isinstance(value, Path) else value) for key, value in found]
    if not isinstance(overrides, list | tuple) or not all(isinstance(text, str) for text in overrides):
        raise UserError(
            f"overrides = {shown(overrides)}: give a dict such as {{'train.lr': 1e-5}}, or a list of strings "
            "such as ['train.lr=1e-5']."
        )
    return [split_override(text) for text in overrides]


def _named(reward: Any, environment: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The objects by their names, and the keys of the config with these names."""
    objects: dict[str, Any] = {}
    pairs: dict[str, Any] = {}
    if reward is not None:
        given = list(reward) if isinstance(reward, list | tuple) else [reward]
        if not given:
            raise UserError("reward = []: give at least one function, or leave the argument out.")
        names = []
        for i, one in enumerate(given):
            where = f"reward[{i}]" if len(given) > 1 else "reward"
            if isinstance(one, str) and not is_given(one):
                names.append(one)
                continue
            if inspect.isclass(one) or not callable(one):
                hint = f" Give an instance: {one.__name__}()." if inspect.isclass(one) else ""
                raise UserError(
                    f"{where} = {shown(one)} ({type(one).__name__}): a reward is a function "
                    f"f(completions, answer, **columns) that returns a number per completion.{hint}"
                )
            names.append(name_of(one))
        names = list(distinct_names(names))
        objects |= {name: one for name, one in zip(names, given, strict=True) if not isinstance(one, str)}
        pairs["task.reward"] = names[0] if len(names) == 1 else tuple(names)
    if isinstance(environment, str):
        pairs["environment.name"] = environment
    elif environment is not None:
        if not inspect.isclass(environment):
            raise UserError(
                f"environment = {shown(environment)} ({type(environment).__name__}): give the class; each "
                "conversation makes its own instance, with environment.params as arguments."
            )
        name = name_of(environment)
        objects[name], pairs["environment.name"] = environment, name
    return objects, pairs


def _replaced(data: Mapping[str, Any], rows: Mapping[str, Any], pairs: Mapping[str, Any]) -> dict[str, Any]:
    """The keys by which given objects take the place of a recipe's own: the problems (those for evaluation too), the
    weights of its rewards, the parameters of its environment. A run's own config names the
    objects: nothing changes.

    What a recipe says of its columns stays where its problems are a file's or a data set's.
    """
    task, environment = (data[k] if isinstance(data.get(k), Mapping) else {} for k in ("task", "environment"))
    found: dict[str, Any] = dict.fromkeys(rows, MARK)
    if "task.train_file" in rows and task.get("train_file") != MARK:
        other: dict[str, Any] = {"task.params": {}} if task.get("name") != "file" else {}
        found = {"task.name": "file", **other, **{f"task.{key}": None for key in _SOURCES}, **found}
    elif "task.eval_file" in rows and task.get("eval_file") != MARK:
        found = {**{f"task.{key}": None for key in _SOURCES if key.startswith("eval_")}, **found}
    if "task.reward" in pairs and not same_objects(_listed(task.get("reward")), _listed(pairs["task.reward"])):
        found["task.reward_weights"] = None
    if "environment.name" in pairs and not same_objects(environment.get("name"), pairs["environment.name"]):
        found["environment.params"] = {}
    return found


def _listed(names: Any) -> list[Any]:
    return list(names) if isinstance(names, list | tuple) else [names]


def _placed(run_dir: str | Path | None, resume: Any, said: Iterable[str]) -> dict[str, Any]:
    """The keys that say where the run is and from where it goes on."""
    pairs: dict[str, Any] = {}
    if run_dir is not None:
        if not isinstance(run_dir, str | Path):
            raise UserError(f"run_dir = {shown(run_dir)}: give a folder.")
        if taken := sorted({"name", "output_dir"} & set(said)):
            raise UserError(f"overrides: {taken[0]} is also given by run_dir; leave out one.")
        pairs = {"output_dir": str(Path(run_dir).parent), "name": Path(run_dir).name}
    if resume is not False and "checkpoint.resume" in said:
        raise UserError("overrides: checkpoint.resume is also given by the argument resume; leave out one.")
    if resume is True or resume == "auto":
        pairs["checkpoint.resume"] = "auto"
    elif isinstance(resume, str | Path) and str(resume):
        pairs["checkpoint.resume"] = str(resume)
    elif resume is not False:
        raise UserError(
            f"resume = {shown(resume)}: give True (continue from the newest checkpoint), 'auto' (the same, or start if "
            "there is none), a checkpoint's folder, or False."
        )
    return pairs
