"""`docs/CONFIG.md` from the config tree, so that the page cannot go stale, and the tables of other systems' keys."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from jetrl.config import Config, sections
from jetrl.config.base import Section
from jetrl.config.errors import describe_bounds, describe_type, union_members
from jetrl.config.peers import SAME, peers
from jetrl.config.toml import toml_literal
from jetrl.presets import OWN

INTRO = """# Configuration

<!-- Written by `python -m jetrl.config.docs > docs/CONFIG.md`; a test compares. -->

A run is described by a TOML file (`jetrl recipes` lists examples, `jetrl recipes NAME` prints one). Any key can be
overridden on the command line, by its full name (`jetrl settings` prints these tables in the terminal):

    jetrl train quickstart train.lr=1e-4 rollout.group_size=16

- Only `name`, `model` and `task` are required; the rest has the defaults below.
- Unknown keys, wrong types and values out of range are errors, and so are **values without effect**, such as
  `rl.kl_estimator = "k2"` while `rl.kl_coef = 0`. The value that a key has anyway is always accepted.
- The command line wins over the file. What an override makes void in the file is dropped, with one line that says so:
  `precision=bf16` works on a recipe with a `[quant]` table, `train.steps=1` on one with a longer warm-up, and
  `model.path=FOLDER` on one with a `[model.arch]` table. The same happens to settings of a feature that the file itself
  switches off, as in an edited copy with `save_interval = 0` that still has `keep = 3`. Two settings on one command
  line that contradict each other are refused, unless the one without effect would change no bit of the run, as in
  `sft.steps=0 sft.cache_dir=/x`: then it is dropped with a line, too.
- `none` (in TOML: `"none"`) unsets an optional key. The value of an override is read as TOML, or as plain text if it is
  not TOML, so text needs no quotes on the command line.
- Errors that involve several keys are reported once each key is valid by itself.
- The config with all defaults filled in is written to the run folder as `config.toml`, which is itself a recipe.
"""


def describe_config() -> str:
    """`docs/CONFIG.md` as Markdown: every key with its values, default and meaning."""
    parts = [INTRO, _describe("Top level", Config)]
    for name, section in sections().items():
        parts.append(_describe(f"[{name}]", section))
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class Setting:
    """One key as a user reads about it."""

    key: str
    full_key: str
    values: str  # in words, with bounds
    default: str | None  # as TOML; None: it must be given
    meaning: str


def settings_of(section: type[Section]) -> Iterator[Setting]:
    """The keys of a section, in order; options that need another one say so."""
    for key, field in section.model_fields.items():
        if section is Config and key in sections():
            continue
        default = None if field.is_required() else toml_literal(field.get_default(call_default_factory=True))
        meaning = field.description or ""
        switches: dict[str, tuple[Any, ...]] = {}
        for rule in (*section.rules, *Config.rules):
            home = section if rule in section.rules else Config
            if section.full_key(key) in map(home.full_key, rule.keys):
                switch = home.full_key(rule.switch)
                switches[switch] = (*switches.get(switch, ()), *rule.off)
        if switches:
            meaning += f" Only used when {' and '.join(_is_on(*each) for each in switches.items())}."
        values = describe_type(field.annotation, describe_bounds(field))
        yield Setting(key, section.full_key(key), values, default, meaning)


def _is_on(switch: str, off: tuple[Any, ...]) -> str:
    """In words, that a switch has none of the values `off`: `is` what is left where that is shorter."""
    if off == (None,):
        return f"`{switch}` is set"
    home, _, key = switch.rpartition(".")
    annotation = (sections()[home] if home else Config).model_fields[key].annotation
    members = [member for member in union_members(annotation) if get_origin(member) is not Annotated]
    named = all(get_origin(member) is Literal for member in members)
    choices = [value for member in members for value in get_args(member)] if named else []
    known = (True, False) if annotation is bool else choices
    off = tuple(value for value in off if value is not OWN)
    left = [value for value in known if value not in off]
    taken, verb = (left, "is") if 0 < len(left) <= len(off) else (off, "is not")
    values = [f"`{toml_literal(value)}`" for value in taken]
    return f"`{switch}` {verb} {' or '.join([', '.join(values[:-1]), values[-1]] if len(values) > 1 else values)}"


def _describe(title: str, section: type[Section]) -> str:
    """One Markdown table."""
    rows = [f"## {title}", "", section.__doc__ or "", "", "| key | values | default | meaning |", "|---|---|---|---|"]
    for one in settings_of(section):
        shown = "required" if one.default is None else f"`{one.default}`"
        values = one.values.replace("|", "\\|")
        rows.append(f"| `{one.key}` | {values} | {shown} | {one.meaning} |")
    return "\n".join(rows) + "\n"


def peer_table(whose: str) -> str:
    """The keys of another system and ours, as a Markdown table: for docs/FROM_TRL.md and docs/FROM_VERL.md."""
    rows: dict[str, list[str]] = {}
    for key in SAME[whose]:
        rows.setdefault(key, []).append(key.rpartition(".")[2])
    for peer in peers():
        if whose in peer.whose.split(", "):
            rows.setdefault(peer.ours, []).append(peer.name)
    lines = [f"| {whose} | jetrl |", "|---|---|"]
    for ours, names in rows.items():
        told = re.sub(r"(?<![\w.`])([a-z]+\.[a-z_]+)(?= = | |,|:|\)|$)(?!\.\w)", r"`\1`", ours.removeprefix("- "))
        first = re.match(r"\w+", told)
        if first is not None and first[0] in Config.model_fields:
            told = f"`{first[0]}`{told[first.end():]}"
        told = f"no key: {told}" if ours.startswith("- ") else told
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {told} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(peer_table(sys.argv[1]) if len(sys.argv) > 1 else describe_config(), end="")
