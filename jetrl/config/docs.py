"""`docs/CONFIG.md` from the config tree, so that the page cannot go stale, and the tables of other systems' keys."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from jetrl.config import Config, sections
from jetrl.config.base import Section, union_members
from jetrl.config.errors import describe_bounds, describe_type
from jetrl.config.keys import keys
from jetrl.config.markers import NoEffectWhile, Since, marks
from jetrl.config.peers import peers, same_in
from jetrl.config.toml import toml_literal
from jetrl.presets import OWN

INTRO = """# Configuration

<!-- Written by `python -m jetrl.config.docs > docs/CONFIG.md`; a test compares. -->

A run is described by a TOML file. `jetrl recipes` lists examples, and `jetrl recipes NAME` prints
one. `jetrl settings` prints the tables of this page in the terminal. Any key can be overridden on
the command line, by its full name:

    jetrl train quickstart train.lr=1e-4 rollout.group_size=16

- Only `name`, `model` and `task` are required. All other keys have defaults.
- Unknown keys, wrong types and values out of range are errors, and so are **values without
  effect**, such as `rl.kl_estimator = "k2"` while `rl.kl_coef = 0`. The value that a key has anyway
  is always accepted.
- The command line wins over the file. If an override makes settings of the file meaningless, they
  are dropped with a note. So `precision=bf16` works on a recipe with a `[quant]` table,
  `train.steps=1` on one with a longer warm-up, and `model.path=FOLDER` on one with a `[model.arch]`
  table. The same happens if the file itself switches a feature off, as in an edited copy with
  `save_interval = 0` that still has `keep = 3`.
- Two settings on one command line that contradict each other are refused. If the one without effect
  would change no bit of the run, as in `sft.steps=0 sft.cache_dir=/x`, it is dropped with a note
  instead.
- `none` (in TOML: `"none"`) unsets an optional key. The value of an override is read as TOML, or as
  plain text if it is not TOML, so text needs no quotes on the command line.
- Errors that involve several keys are reported once each key is valid by itself.
- The config with all defaults filled in is written to the run folder as `config.toml`, which is
  itself a recipe.
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
    since: str | None  # the version that brought it; None: the first


def settings_of(section: type[Section]) -> Iterator[Setting]:
    """The keys of a section, in order; options that need another one say so."""
    for key, field in section.model_fields.items():
        if section is Config and key in sections():
            continue
        default = None if field.is_required() else toml_literal(field.get_default(call_default_factory=True))
        meaning = field.description or ""
        switches: dict[str, tuple[Any, ...]] = {}
        for rule in keys()[section.full_key(key)].all(NoEffectWhile):
            switches[rule.switch] = (*switches.get(rule.switch, ()), *rule.off)
        if switches:
            meaning += f" Only used when {' and '.join(_is_on(*each) for each in switches.items())}."
        values = describe_type(field.annotation, describe_bounds(field))
        since = next((since.version for since in marks(field, Since)), None)
        yield Setting(key, section.full_key(key), values, default, meaning, since)


def _is_on(switch: str, off: tuple[Any, ...]) -> str:
    """In words, that a switch has none of the values `off`: `is` what is left where that is shorter."""
    if off == (None,):
        return f"`{switch}` is set"
    annotation = keys()[switch].field.annotation
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
    about = textwrap.wrap(section.__doc__ or "", 100, break_on_hyphens=False)
    rows = [f"## {title}", "", *about, "", "| key | values | default | meaning |", "|---|---|---|---|"]
    for one in settings_of(section):
        shown = "required" if one.default is None else f"`{one.default}`"
        values = one.values.replace("|", "\\|")
        rows.append(f"| `{one.key}` | {values} | {shown} | {one.meaning} |")
    return "\n".join(rows) + "\n"


def peer_table(whose: str, page: str = "") -> str:
    """The keys of another system and ours, as a Markdown table: for docs/FROM_TRL.md and docs/FROM_VERL.md.

    Rows are in the order that they have on `page`, which groups them by what they are about; new ones come last.
    """
    rows: dict[tuple[str, bool], list[str]] = {}
    for key in same_in(whose):
        rows.setdefault((key, True), []).append(key.rpartition(".")[2])
    for peer in peers():
        if whose in peer.whose.split(", "):
            rows.setdefault((peer.ours, peer.key is not None), []).append(peer.name)
    order = {ours: place for place, ours in enumerate(re.findall(r"^\|.* \| (.*) \|$", page, re.M))}
    cells = [(_shown(*row), ", ".join(f"`{name}`" for name in names)) for row, names in rows.items()]
    cells.sort(key=lambda cell: order.get(cell[0], len(order)))
    return "\n".join([f"| {whose} | jetrl |", "|---|---|", *(f"| {theirs} | {ours} |" for ours, theirs in cells), ""])


def _shown(ours: str, is_key: bool) -> str:
    """What stands in jetrl's column, with its keys marked as code."""
    cell = re.sub(r"(?<![\w.`])([a-z]+\.[a-z_]+)(?= = | |,|:|\)|$)(?!\.\w)", r"`\1`", ours)
    first = re.match(r"\w+", cell)
    if first is not None and first[0] in Config.model_fields:
        cell = f"`{first[0]}`{cell[first.end():]}"
    return cell if is_key else f"no key: {cell}"


def _printed(which: str) -> str:
    """What `python -m jetrl.config.docs WHICH` prints, in the repository."""
    page = Path("docs") / f"FROM_{which.upper()}.md"
    return peer_table(which, page.read_text(encoding="utf-8")) if which else describe_config()


if __name__ == "__main__":
    print(_printed("".join(sys.argv[1:])), end="")
