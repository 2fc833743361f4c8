"""A tiny study, and how tests conduct it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jetrl_study.conduct import conduct
from jetrl_study.plan import Study

ARMS = """\
name = "tiny"
about = "A tiny study <of two arms>"
recipe = "tiny.toml"
seeds = [0, 1]
[[arm]]
name = "one"
label = "One flow"
[[arm]]
name = "two"
label = "Two flows"
overrides = ["precision=fp8_rollout"]
"""


def conducted(study: Study, out: Path, add: Sequence[Path] = (), **parts: str) -> tuple[int, str]:
    """Status and output of `jetrl study`."""
    console = Console(record=True, width=200, quiet=False, file=open("/dev/null", "w"))
    status = conduct(study, study.only(**parts), out, 1, 1, None, console, add)
    return status, console.export_text()
