"""Which settings must be those of the checkpoint that a run is resumed from, and how a difference is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jetrl import moved
from jetrl.chat.tokenizer import content_of
from jetrl.config import Config, sections
from jetrl.config.keys import Key, changes_no_bit, keys, marked, may_change
from jetrl.config.load import by_full_key
from jetrl.config.markers import MayChange, Since
from jetrl.config.paths import holding, path_values
from jetrl.config.teacher import is_url
from jetrl.config.toml import toml_literal
from jetrl.errors import UserError
from jetrl.hashing import sha256_of_file
from jetrl.run.checkpoint.checkpoint import Meta
from jetrl.run.teacher import KEY as TEACHER
from jetrl.tasks.task import holds_out
from jetrl.user_code.from_python import ARGUMENTS, MARK, NOTHING, FromPython, same_objects


def settings(config: Config) -> dict[str, Any]:
    """The settings that must not change between a run and its resumption, by full key."""
    kept = {key: value for key, value in by_full_key(config).items() if not may_change(key, config)}
    # the only thing in [eval] that decides which problems are trained on
    return kept | {"eval.eval_interval > 0 (holds problems out)": holds_out(config)}


def may_change_in_words() -> str:
    """All that may change at a resume, for a message."""
    whole = [name for name in sections() if all(changes_no_bit(k) for k, key in keys().items() if key.section == name)]
    groups: dict[tuple[str, str], list[Key]] = {}  # by section and condition
    for key in keys().values():
        when = [f"{m.where} = {toml_literal(m.value)}" for m in key.all(MayChange) if m.where is not None]
        if key.section not in whole and (when or changes_no_bit(key.full)):
            groups.setdefault((key.section, f" while {' or '.join(when)}" if when else ""), []).append(key)
    parts = [f"the sections {_listed(whole)}", "how a path is written"]
    for (_, condition), (first, *others) in groups.items():
        parts.append(_listed([first.full, *(key.name for key in others)]) + condition)
    return ", ".join(parts)


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def paths(config: Config) -> dict[str, Any]:
    """The paths of a config, made absolute, which `check` compares instead of their spelling."""
    return {key: value for key, value in path_values(config).items() if key in settings(config)}


def check(path: Path, meta: Meta, given: Config, absolute: Config, flow_digest: str) -> None:
    """UserError that names every setting in which this run is not the one that wrote the checkpoint."""
    if meta.step > absolute.train.steps:
        epochs = given.train.epochs
        said = f"train.steps = {given.train.steps}. Raise train.steps"
        if epochs is not None:
            said = f"train.epochs = {epochs:g}, which is {absolute.train.steps} steps. Raise it"
        raise UserError(f"{path} is at step {meta.step}, beyond {said}.")
    found = [*_differences(meta.settings, meta.paths, given, absolute)]
    if not found and meta.flow_digest != flow_digest:
        found = [f"the flow of the model: {meta.flow_digest} there, {flow_digest} here (its config.json, or jetrl's "
                 "version)"]
    if not found:
        return
    raise UserError(
        f"{path} was written by a run with other settings:\n" + "\n".join(f"  {line}" for line in found)
        + "\nResume with the run's own config.toml, or start a run under a new name. You may change "
        f"{may_change_in_words()}."
    )


TOKENIZER = "tokenizer"  # key of a digest: it may come with model.path


def data_digests(
    config: Config, tokenizer: Any, own: FromPython = NOTHING, teacher: str | None = None
) -> dict[str, str]:
    """SHA-256 of the local data files that the config names, of the rows that a program gave, and of what the tokenizer
    makes of them, by key; and the digest of a `teacher`."""
    files = {key: Path(value) for key, value in path_values(config).items() if key in holding("data")}
    found = {key: sha256_of_file(file) for key, file in files.items() if file.is_file()} | own.digests
    if teacher is not None:
        found[TEACHER] = teacher
    return found | {TOKENIZER: content_of(tokenizer)}


def check_data(path: Path, meta: Meta, config: Config, data: Mapping[str, str]) -> None:
    """UserError if a local data file, or the tokenizer, has another content than when the checkpoint was written."""
    changed = [key for key, digest in meta.data.items() if data.get(key, digest) != digest]
    if changed and not config.checkpoint.allow_changed_data:
        values = path_values(config)
        values[TOKENIZER] = str(config.model.tokenizer or config.model.path)
        files = ", ".join(f"{key} ({'rows from Python' if values[key] == MARK else values[key]})" for key in changed)
        others = {TOKENIZER: "tokens (its vocabulary, rules or chat template)", TEACHER: "advantages"}
        other = others.get(changed[0], "problems") if len(changed) == 1 else "problems"
        raise UserError(
            f"{files}: the content has changed since {path} was written, so the run would continue with other {other}. "
            "Put the file back, or continue with the new one: checkpoint.allow_changed_data=true."
        )


def _differences(
    there: Mapping[str, Any], paths_there: Mapping[str, Any], given: Config, absolute: Config
) -> Iterator[str]:
    """One line for each key whose value differs."""
    here, defaults, paths_here = settings(given), _defaults(), json.loads(json.dumps(paths(absolute)))
    for key in {**there, **here}:
        old, new = (values.get(key, defaults.get(key)) for values in (there, here))
        old = moved.current(old)  # an earlier version wrote the names that it had
        same_file = key in paths_here and paths_here[key] == paths_there.get(key)
        same = old == new or (key in ARGUMENTS and same_objects(old, new)) or _moved_servers(key, old, new)
        if not same and not same_file and (key in here or key in there):
            yield f"{key} = {toml_literal(old)} there, {toml_literal(new)} here"


def _moved_servers(key: str, old: Any, new: Any) -> bool:
    """Whether teachers differ in where servers listen alone: what they have is compared with the data."""
    if key not in (TEACHER, "teacher.paths"):
        return False
    before, now = ([value] if isinstance(value, str | None) else list(value) for value in (old, new))
    return len(before) == len(now) and all(
        a == b or (is_url(a) and is_url(b)) for a, b in zip(before, now, strict=True))


def _defaults() -> dict[str, Any]:
    """What a run did before it had a key, by full key: for those that the checkpoint does not have."""
    usual = {full: key.field.get_default(call_default_factory=True) for full, key in keys().items()}
    usual |= {full: since.before for full, since in marked(Since).items()}
    return {full: json.loads(json.dumps(value, default=str)) for full, value in usual.items()}
