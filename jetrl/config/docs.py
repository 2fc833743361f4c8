"""`docs/CONFIG.md` from the config tree, so that the page cannot go stale; `jetrl settings` prints the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jetrl.config import Config, sections
from jetrl.config.base import Section
from jetrl.config.errors import describe_bounds, describe_type
from jetrl.config.toml import toml_literal

INTRO = """# Configuration

<!-- Written by `python -m jetrl.config.docs > docs/CONFIG.md`; a test compares. -->

A run is described by a TOML file (`jetrl recipes` lists examples, `jetrl recipes NAME` prints one). Any key can be
overridden on the command line, by its full name (`jetrl settings` prints these tables in the terminal):

    jetrl train quickstart train.lr=1e-4 rollout.group_size=16

- Only `name`, `model` and `task` are required; the rest has the defaults below.
- Unknown keys, wrong types and values out of range are errors, and so are **keys without effect**, such as
  `rl.kl_estimator` while `rl.kl_coef = 0`. An override that switches a feature off also drops the file's settings of
  that feature: `precision=bf16` works on a recipe with a `[quant]` table.
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
        switches = []
        for rule in (*section.rules, *Config.rules):
            home = section if rule in section.rules else Config
            if section.full_key(key) in map(home.full_key, rule.keys):
                off = " or ".join(f"`{toml_literal(value)}`" for value in rule.off)
                switches.append(f"`{home.full_key(rule.switch)}` is {off}")
        if switches:
            meaning += f" Has no effect, and is refused, while {', or '.join(switches)}."
        values = describe_type(field.annotation, describe_bounds(field))
        yield Setting(key, section.full_key(key), values, default, meaning)


def _describe(title: str, section: type[Section]) -> str:
    """One Markdown table."""
    rows = [f"## {title}", "", section.__doc__ or "", "", "| key | values | default | meaning |", "|---|---|---|---|"]
    for one in settings_of(section):
        shown = "required" if one.default is None else f"`{one.default}`"
        values = one.values.replace("|", "\\|")
        rows.append(f"| `{one.key}` | {values} | {shown} | {one.meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(describe_config(), end="")
