"""Recipes in and out: TOML with dotted overrides to a `Config`, a `Config` back to TOML, and its digest.

Every mistake becomes a `UserError` that names the key and the fix. Nothing here imports torch, so a recipe can be
checked on any machine.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jetrl import moved
from jetrl.config.base import Section
from jetrl.config.errors import explain
from jetrl.config.keys import keys, marked, sections
from jetrl.config.markers import NoEffectWhile, Since
from jetrl.config.precedence import Statements
from jetrl.config.rl import RLConfig
from jetrl.config.rollout import RolloutConfig
from jetrl.config.sections import Config, dapo_buffer_len
from jetrl.config.toml import read_toml, set_override, split_override, toml_key, toml_literal
from jetrl.errors import UserError
from jetrl.presets import PRESETS
from jetrl.untrusted import printable


def parse_config(data: Mapping[str, Any], source: str = "config") -> Config:
    """Checks a nested mapping. All mistakes are listed in one `UserError`, which begins with `source`."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise _refused(error, source) from None


def _refused(
    error: ValidationError, source: str, notes: Sequence[str] = (), given_by: Mapping[str, str] | None = None
) -> UserError:
    """The user's error with all mistakes, and what was dropped before they were found. `given_by`: by key, where it was
    given instead of in the source."""
    lines, sources = [], set()
    for line in explain(error, Config):
        key = re.split(r"[:\[]", line, maxsplit=1)[0]
        owner = next((by for other, by in (given_by or {}).items() if f"{key}.".startswith(f"{other}.")
                      or f"{other}.".startswith(f"{key}.")), source)
        sources.add(owner)
        lines.append(line if owner == source else f"{owner}: {line}")
    below = "".join(f"\n  ({note})" for note in notes)
    if len(lines) == 1:
        return UserError((lines[0] if source not in sources else f"{source}: {lines[0]}") + below)
    return UserError(f"{source} has {len(lines)} errors:\n" + "\n".join(f"  {line}" for line in lines) + below)


def tell(note: str) -> None:
    """One line on standard error, from the first of several ranks."""
    if os.environ.get("RANK", "0") == "0":
        print(printable(note), file=sys.stderr, flush=True)


def quiet(note: str) -> None:
    """For a file that is read again: what was dropped has been said."""


def load_config(path: str | Path, overrides: Sequence[str] = (), say: Callable[[str], object] = tell) -> Config:
    """Reads a TOML recipe and applies overrides such as `train.lr=1e-5`; the last one wins.

    A value is read as TOML or, if it is not TOML, as a plain string; `none` unsets an optional key. What an override
    makes void in the file is dropped, and so is what depends on a switch that the file itself states as off; `say`
    gets one line for each (`precedence.py`). Another `rl.algo` drops what the file's algorithm would have set itself
    (a run's config.toml states every value) and what the new one ignores.
    """
    source = f"{path} with overrides" if overrides else str(path)
    return config_of(read_toml(Path(path)), map(split_override, overrides), source, say)


def config_of(
    data: dict[str, Any], overrides: Iterable[tuple[str, Any]], source: str, say: Callable[[str], object] = tell,
    given_by: Mapping[str, str] | None = None,
) -> Config:
    """`load_config` of tables that are there already, and of overrides as key and value. `data` is changed. `given_by`:
    what messages call the place of an override, by its key; the others are in `source`."""
    before = copy.deepcopy(data)
    given: dict[str, Any] = {}
    for key, value in overrides:
        given.pop(key, None)  # in the order of what was said last
        given[key] = value
    if "rl.algo" in given:
        _take_back_preset(data)
    for key, value in given.items():
        set_override(data, key, value)
    said = Statements(data, given)
    said.replace_sources(before)
    while True:
        try:
            config = Config.model_validate(data)
            break
        except ValidationError as error:
            if not said.give_way(error):
                raise _refused(error, source, said.notes, given_by) from None
    for note in said.notes:
        say(note)
    return config


def _preset_values(data: Mapping[str, Any]) -> dict[str, Any]:
    """What the algorithm of `data` sets for the keys of `[rl]` that differ by algorithm; {} if it is unknown."""
    rl, rollout = (data[k] if isinstance(data.get(k), dict) else {} for k in ("rl", "rollout"))
    algo = rl.get("algo", "grpo")
    if not isinstance(algo, str) or algo not in PRESETS:
        return {}
    keys = {"overlong_buffer_len"}.union(*(preset.values for preset in PRESETS.values()))
    values = {key: RLConfig.model_fields[key].default for key in sorted(keys)} | dict(PRESETS[algo].values)
    length = rollout.get("max_response_length", RolloutConfig.model_fields["max_response_length"].default)
    if algo == "dapo" and isinstance(length, int):
        values["overlong_buffer_len"] = dapo_buffer_len(length)
    return values


def _take_back_preset(data: dict[str, Any]) -> None:
    """Removes, in place, the keys of `[rl]` whose value is what the file's own algorithm sets anyway."""
    if isinstance(rl := data.get("rl"), dict):
        for key, value in _preset_values(data).items():
            if key in rl and rl[key] == value:
                del rl[key]


def switched_off(key: str, value: Any) -> set[str]:
    """The full keys that have no effect once an override has set `key` to `value`."""
    return {
        other.full for other in keys().values() for rule in other.all(NoEffectWhile)
        if rule.switch == key and (value in rule.off or (value == "none" and None in rule.off))
    }


HOPPER = (9, 0)  # compute capability of the GPUs for which `kernels = "auto"` means hopper; elsewhere it means triton


def device_of(config: Config, *, cuda_available: bool) -> str:
    """The device of a run: "auto" is the GPU if there is one."""
    return ("cuda" if cuda_available else "cpu") if config.device == "auto" else config.device


def resolve(
    config: Config, *, cuda_available: bool, capability: tuple[int, int] | None = None
) -> Config:
    """Fills in what depends on the machine (`device`, `kernels`, engine sizes); refuses what it cannot do.

    `capability`: the compute capability of its GPU; None, where nobody knows one, stands for Hopper's.
    """
    device = device_of(config, cuda_available=cuda_available)
    on_gpu = "hopper" if capability in (None, HOPPER) else "triton"
    kernels = (on_gpu if device == "cuda" else "reference") if config.kernels == "auto" else config.kernels
    if device == "cuda" and not cuda_available:
        raise UserError(
            'device = "cuda", but torch sees no GPU. On a machine with one, install a torch with CUDA (the extra '
            'hopper or gpu) or fix the driver; `jetrl doctor` says which. To check a recipe elsewhere: --dry-run '
            'device=cpu.'
        )
    if (kernels == "reference") != (device == "cpu"):
        pair = f'kernels = "{kernels}" with device = "{device}"'
        where = "hopper and triton run on a GPU (cuda), reference on a CPU (cpu)"
        raise UserError(f'{pair}: {where}; set kernels = "auto"')
    page_size, tokens = (128, 8192) if device == "cuda" else (16, 2048)
    sizes = {"page_size": page_size, "max_tokens_per_step": tokens}
    sizes = {key: value for key, value in sizes.items() if getattr(config.rollout, key) is None}
    rollout = config.rollout.model_copy(update=sizes)
    model = config.model
    if model.tokenizer is not None and model.tokenizer == model.path and model.tokenizer_revision is None:
        model = model.model_copy(update={"tokenizer_revision": model.revision})  # one repository, one commit
    return config.model_copy(update={"device": device, "kernels": kernels, "rollout": rollout, "model": model})


def to_toml(config: Config) -> str:
    """The config as TOML that `load_config` reads back to an equal config; keys without effect are left out."""
    silent = config.without_effect()
    blocks = [_table("", config, silent)]
    for name in sections():
        section: Section = getattr(config, name)
        inner = {key.removeprefix(f"{name}.") for key in silent if key.startswith(f"{name}.")}
        blocks.append(_table(name, section, section.without_effect() | inner))
        for key in type(section).model_fields:
            if isinstance(value := getattr(section, key), dict) and value:
                rows = [f"{toml_key(k)} = {toml_literal(v)}" for k, v in value.items()]
                blocks.append("\n".join([f"[{name}.{key}]", *rows]))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _table(name: str, section: Section, silent: set[str]) -> str:
    """One TOML table, without its sub-tables. Empty where nothing in it has an effect."""
    values = {key: getattr(section, key) for key in type(section).model_fields if key not in silent}
    optional = type(section).model_fields  # a None that is the default is left out
    rows = [
        f"{key} = {toml_literal(v)}" for key, v in values.items()
        if not isinstance(v, (dict, Section)) and not (v is None and optional[key].default is None)
    ]
    return "\n".join([f"[{name}]", *rows] if name and rows else rows)


def digest(config: Config, leave_out: Collection[str] = ()) -> str:
    """16 hexadecimal digits that name the config: equal configs, and only they, have equal digests. `leave_out`: full
    keys that do not count. Keys that came later (`Since`) leave the digests of before as they were."""
    held = config.model_dump(mode="json")
    later = {full for full, since in marked(Since).items() if _table_of(held, full)[keys()[full].name] == since.before}
    for full in {*leave_out, *later}:
        del _table_of(held, full)[keys()[full].name]
    held = {key: value for key, value in held.items() if value != {}}  # sections that came later, as they were before
    held["task"]["reward"] = moved.first(held["task"]["reward"])
    held["rollout"]["engine"] = moved.first(held["rollout"]["engine"])
    text = json.dumps(held, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _table_of(held: dict[str, Any], full: str) -> dict[str, Any]:
    """The table of a dumped config that has a key."""
    section = keys()[full].section
    return held[section] if section else held


def by_full_key(config: Config) -> dict[str, Any]:
    """Every setting by its full key, as JSON has it; those inside of a table such as task.params too."""
    return dict(_flat("", config.model_dump(mode="json")))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else key, inner)
    else:
        yield prefix, value
