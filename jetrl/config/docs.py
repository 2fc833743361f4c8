"""`docs/CONFIG.md` from the config tree, so that the page cannot go stale."""

from __future__ import annotations

from jetrl.config import Config, sections
from jetrl.config.base import Section
from jetrl.config.errors import describe_bounds, describe_type
from jetrl.config.toml import toml_literal

INTRO = """# Configuration

<!-- Written by `python -m jetrl.config.docs > docs/CONFIG.md`; a test compares. -->

A run is described by a TOML file (`jetrl recipes` lists examples, `jetrl recipes NAME` prints one). Any key can be
overridden on the command line, by its full name:

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


def _describe(title: str, section: type[Section]) -> str:
    """One Markdown table; options that need another one say so."""
    rows = [f"## {title}", "", section.__doc__ or "", "", "| key | values | default | meaning |", "|---|---|---|---|"]
    for key, field in section.model_fields.items():
        if section is Config and key in sections():
            continue
        default = field.get_default(call_default_factory=True)
        shown = "required" if field.is_required() else f"`{toml_literal(default)}`"
        meaning = field.description or ""
        for rule in (*section.rules, *Config.rules):
            home = section if rule in section.rules else Config
            if section.full_key(key) in map(home.full_key, rule.keys):
                off = " or ".join(f"`{toml_literal(value)}`" for value in rule.off)
                meaning += f" Has no effect, and is refused, while `{home.full_key(rule.switch)}` is {off}."
        values = describe_type(field.annotation, describe_bounds(field)).replace("|", "\\|")
        rows.append(f"| `{key}` | {values} | {shown} | {meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(describe_config(), end="")
