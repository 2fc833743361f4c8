"""`jetrl docs`: the pages of docs/, which a wheel brings along and a clone has next to the package."""

from __future__ import annotations

import difflib
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from jetrl.errors import UserError

_INSTALLED = "share/doc/jetrl/"  # as pyproject.toml says
_IN_ORDER = (  # what a newcomer reads first; the others follow by name
    "README", "FIRST_RUN", "OWN_DATA", "OWN_ENVIRONMENT", "INSTALL", "RUNS", "MODELS_AND_DATA", "REWARDS",
    "ENVIRONMENTS", "ALGORITHMS", "PYTHON", "CONFIG", "METRICS", "TRACKING", "FLAT_REWARD", "GPUS", "SEVERAL_GPUS",
    "MEMORY", "ENGINES", "SERVE", "FROM_TRL", "FROM_VERL",
)


def pages() -> dict[str, Path]:
    """The pages by name. UserError where this installation has none."""
    found = {path.stem: path for path in _next_to_the_package() or _installed()}
    if not found:
        raise UserError("docs: this installation of jetrl has no pages. They come with the wheel, and with a clone.")
    return {name: found[name] for name in (*_IN_ORDER, *sorted(found.keys() - {*_IN_ORDER})) if name in found}


def _next_to_the_package() -> list[Path]:
    clone = Path(__file__).parents[1]
    return sorted(clone.glob("docs/*.md")) if (clone / "pyproject.toml").is_file() else []


def _installed() -> list[Path]:
    try:
        listed = files("jetrl") or []
    except PackageNotFoundError:  # a copy of the package, without a wheel
        listed = []
    return [Path(str(one.locate())) for one in listed if _INSTALLED in one.as_posix() and one.suffix == ".md"]


def page(name: str) -> str:
    """The text of a page, by its name in any case, or as messages name it: docs/REWARDS.md."""
    known = pages()
    wanted = name.rpartition("/")[2].removesuffix(".md").upper().replace("-", "_")
    if wanted not in known:
        close = difflib.get_close_matches(wanted, known, 1)
        hint = f"Did you mean {close[0]}?" if close else "`jetrl docs` lists the pages."
        raise UserError(f"docs: there is no page {name!r}. {hint}")
    return known[wanted].read_text(encoding="utf-8")


def title(path: Path) -> str:
    """The first heading of a page."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ") for line in lines if line.startswith("# ")), path.stem)
